"""``jit``: units as compiled functions, or a step as one compiled graph.

For units it puts a `_Compiler` into the frame, which unit calls ask for the function to
run. What ``shard`` and ``remat`` do stays around the compiled function. A whole step is
compiled by `step_graphs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import Lock
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch

from fsfunc import _torch
from fsfunc.comm.attribution import source_line
from fsfunc.comm.groups import NOT_IN_GRAPHS
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import Transformed, frame, inside
from fsfunc.core.units import Call
from fsfunc.sharded.inputs import check_function
from fsfunc.transforms.rematerialization import saved_share, saves_named_values
from fsfunc.tree.structure import matches

_P = ParamSpec("_P")
_R = TypeVar("_R")

Function = Callable[..., Any]


@api_boundary
def jit(
    f: Callable[_P, _R],
    *,
    only: str | Sequence[str] = "**",
    whole_step: bool = False,
    **options: Any,
) -> Callable[_P, _R]:
    """Compiles the units of ``f``, forward and backward, each function once.

    In a train step an update without a fused kernel of torch's compiles too, to one
    pass over memory: Lion (0.42 of the plain time on 8.4M parameters), the directions
    of LAMB (0.47), Muon's and Shampoo's steps. It is compiled once for all sizes, steps
    and rates, and near the plain one, not its bits. Adam and SGD keep their fused
    kernels, which are as fast; moments in float16 and 8 bits step as without ``jit``.

    What is around units stays Python: which unit runs when, what is gathered, sent and
    forgotten is as without ``jit``, and so are bytes and layouts. Equal layers that are
    calls of one unit share what is compiled for it; other shapes compile once more.
    Where a step is recorded or checked, under ``torch.func``, and for a
    gradient that is differentiated itself, the plain function runs. (Take that gradient
    by ``value_and_grad``: torch.autograd's ``create_graph=True`` through a compiled
    unit is an error of torch's.)

    Its order with other transforms is free. The numbers are those of the fused kernels:
    near the plain ones, not their bits; random numbers are others, and repeat in a
    recompute as ever. The compiler gives an output of a unit that no loss uses a
    gradient of zeros where the plain function has none: through a root of zero that is
    NaN, so return what is used.

    With ``whole_step`` the step itself is one graph: forward, backward, collectives and
    update, between whose operators no Python runs, and across which the compiler fuses.
    It is for many short operators, and where Python takes long. The first call with a
    state runs without it, and is checked; later ones are graphs, on all ranks: each set
    of shapes is traced and compiled at its first call, then Python does not run again.
    So numbers, strings and functions that the step finds by itself stay as they were,
    and what it would write into Python's own objects, such as a list, it does not; the
    clock and what the system draws (``random.SystemRandom``, an unseeded generator made
    in the step) stay too. Schedules of optimizers are asked before each run. Tensors
    that it closes over are read in each call; numbers of the first argument may change,
    and are float64 tensors in the graph; other arguments are part of the shapes. As of
    a unit, 8 sets of these have graphs at most.
    What is sent is as without, in the order of the step (``min_bytes`` of ``shard``
    says how small a message may be), and so are the comparisons of ranks. At ``zero=3``
    the backward computes activations of products again, as units' does. It goes
    around all transforms but ``donate``, and takes ``shard``, ``accumulate``, ``remat``
    and ``precision``; a recompute stays one, and a ``jit`` within is compiled with the
    step. A step that draws random numbers, of Python's and numpy's generators too,
    reads a value, or whose update depends on one, is refused. In inference mode, under
    ``torch.func``, and with arguments that require gradients the step runs as it is.

    Args:
        f: a train step, a loss, or a unit.
        only: patterns of the names of unit calls to compile, as in ``precision``:
            ``"block"``, ``"model/block"`` of one within another, ``"**/block"`` for
            both. A unit that calls units does not compile: leave it out.
        whole_step: compile the whole step; then ``options`` are ``backend=``,
            "inductor" or "eager" (the graph's operators one by one), and ``options=``,
            the compiler's.
        options: of ``torch.compile``: ``mode=``, ``backend=``, ``options=``. Unless
            given, ``dynamic`` is False: each set of shapes has kernels of its own (8 of
            one function at most, ``torch._dynamo.config.recompile_limit``); and
            ``fullgraph`` is True, so that what the compiler cannot take is an error
            with its line, and never slow.

    Raises (when a unit is compiled, at its first call for a set of shapes):
        Exception: what torch.compile raises where it cannot, with the line, and a note
            that names the unit.
        ValueError: ``remat`` around it keeps values by name: operators that are fused
            have no such values; or the unit calls a collective, or asks for its rank.

    Under ``remat`` a compiled backward computes again what it reads, in kernels of its
    own, and the unit's function runs once; ``remat(step, MinCut(share))`` keeps what
    costs least to keep. (In ``remat(shard(step))``, in pipelines, under ``offload``,
    with other backends and with ``fullgraph=False`` ``remat`` runs the compiled
    function a second time.)

    Cost: compiling, seconds to a minute a unit function and set of shapes, at the first
    call; torch keeps kernels on disk, so that a later process, or another rank of one,
    takes about an eighth of that. What a backward keeps is the compiler's choice, and
    under ``shard`` at ``zero`` 1 to 3 less, as by ``MinCut(1.0)``, for 1 to 2 % of the
    time. A plan makes that choice too; it counts chains of operators as the kernels
    that they become, with nothing between. (Of other backends, and of units with split
    parameters, a plan holds what the plain functions save.)

    With ``whole_step`` all layers are compiled, equal ones too.

    Source: torch.compile (Ansel et al., 2024); as units of their own, as FSDP2 is
    compiled block by block; ``whole_step``: SimpleFSDP (Zhang et al., 2024).

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda w, x: torch.sin(x * w))
    >>> step = ff.jit(ff.value_and_grad(lambda w: layer(w, torch.ones(3)).sum()),
    ...               backend="aot_eager")
    >>> step(torch.tensor(0.0))[1].item()
    3.0
    """
    check_function(f, "jit")
    if whole_step:
        return _compile_step(f, only, **options)
    patterns = (only,) if isinstance(only, str) else tuple(only)
    compiler = _Compiler(patterns, {"fullgraph": True, "dynamic": False, **options})

    @functools.partial(Transformed, f, "jit", options.items)
    def run(*args: Any, **keywords: Any) -> Any:
        outer = frame()
        if outer.compiler is not None and outer.compiler.whole:
            return f(*args, **keywords)  # it is compiled with all of its step
        with inside(outer.replace(compiler=compiler)):
            return f(*args, **keywords)

    return run


def _compile_step(
    f: Callable[..., Any],
    only: str | Sequence[str],
    *,
    backend: str = "inductor",
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    if only != "**" or backend not in ("inductor", "eager"):
        raise ValueError(_WHOLE)
    from fsfunc.transforms.step_graphs import whole_step  # slow to import

    return whole_step(f, backend, options or {})


class _Compiler:
    """Compiles the functions of unit calls, each once.

    Args:
        patterns: of the names of calls; ``options``: torch.compile's.

    Attributes:
        whole: whether the step around is compiled, with all that it calls.
        replays: whether a GPU's kernels are replayed (CUDA graphs), on memory of their
            own.
        partitions: whether this decides what the backward of a unit is given.
    """

    whole = False

    def __init__(self, patterns: Sequence[str], options: dict[str, Any]):
        self.patterns, self.options = patterns, options
        # By unit, and by the share that it saves (see `saved_share`); or by the rule of
        # an update, and by its name. Weakly: what is compiled for a unit goes with it.
        self._compiled: WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]]
        self._compiled = WeakKeyDictionary()
        inductor_options = options.get("options") or {}
        self.replays = bool(inductor_options.get("triton.cudagraphs"))
        self.replays |= options.get("mode") in ("reduce-overhead", "max-autotune")
        is_inductor = options.get("backend", "inductor") == "inductor"
        # A unit of several graphs has more between them than its inputs.
        one_graph = is_inductor and options["fullgraph"]
        self.partitions = one_graph and "custom_partitioner_fn" not in inductor_options
        self._lock = Lock()  # simulated ranks are threads
        self._matches = functools.cache(lambda x: any(matches(p, x) for p in patterns))

    def of(self, call: Call) -> Callable[..., Any]:
        """Returns the function to run for a unit call: compiled, if it matches."""
        name, plain = call.name, call.unit.fn
        if not self.compiles(call):
            return plain
        if saves_named_values(call):
            raise ValueError(_NAMED.format(name))
        share = saved_share(call) if self.partitions else None
        # Two ranks at once would make two functions, and each would compile its own.
        with self._lock:
            by_share = self._compiled.setdefault(call.unit, {})
            compiled = by_share.get(share)
            if compiled is None:
                # A unit of a module says itself what a compiler can take.
                compiled_by = getattr(plain, "compiled_by", None)
                compile = partial(self._compile, share=share)
                fn = compile(plain) if compiled_by is None else compiled_by(compile)
                by_share[share] = compiled = _naming_errors(fn, call.unit.__name__)
        return compiled

    def compiles(self, call: Call) -> bool:
        """Returns whether the unit of a call is one to compile."""
        return self._matches(call.name)

    def update(
        self, rule: Hashable, make: Callable[[], Function], name: str
    ) -> Function:
        """Returns an optimizer's update, compiled once for tensors of any size.

        Args:
            rule: whose update it is.
            make: makes the function; ``name``: what errors call it.
        """
        with self._lock:
            by_name = self._compiled.setdefault(rule, {})
            if name not in by_name:
                # An update runs for each buffer of a model, of many sizes.
                options = {**self.options, "fullgraph": True, "dynamic": True}
                compiled = torch.compile(make(), **options)
                by_name[name] = _naming_errors(compiled, name)
        return by_name[name]

    def partitions_call(self, call: Call) -> bool:
        """Returns whether it decides what the backward of a call's unit is given."""
        return self.partitions and self.compiles(call)

    def _compile(
        self, fn: Callable[..., Any], share: float | None = None
    ) -> Callable[..., Any]:
        if share is None:
            return torch.compile(fn, **self.options)
        from fsfunc._torch.partitions import options_saving_share  # slow to import

        return torch.compile(fn, **options_saving_share(self.options, share))


def _naming_errors(compiled: Function, name: str) -> Function:
    """Returns ``compiled``, with errors of the compiler that name the unit."""

    def run(*args: Any, **keywords: Any) -> Any:
        try:
            return compiled(*args, **keywords)
        except Exception as error:
            # An error of the unit itself passes as it is. Collectives may not be traced
            # (`outside_graphs`): the compiler's error has that reason in its text.
            if _torch.is_compiler_error(error):
                if NOT_IN_GRAPHS in str(error):
                    message = _COLLECTIVE.format(name, source_line())
                    raise ValueError(message) from error
                error.add_note(_REFUSED.format(name))
            raise

    return run


_WHOLE = (
    "jit(whole_step=True) compiles all of a step: it takes no only=, and of "
    'torch.compile\'s arguments backend="inductor" or "eager", and options='
)
_REFUSED = (
    "unit {!r} cannot be compiled so. Change that, or leave the unit as it is: "
    'jit(..., only=patterns of other names), such as "**/block"; fullgraph=False '
    "compiles what is between such lines; give it a number that changes as a tensor"
)
_COLLECTIVE = (
    "unit {!r}, called at {}, calls a collective or asks for its rank, and jit "
    "compiles a unit to one graph, whose operators send nothing. Leave the unit out, "
    "by jit(..., only=patterns of the others); compile what is around the call, by "
    "fullgraph=False; or compile the step with its collectives, by jit(step, "
    "whole_step=True)"
)
_NAMED = (
    "unit {!r} is compiled by jit under a remat that keeps values by name: fused "
    "operators have no such values. Give remat no policy under jit, or leave the unit "
    "out of jit's only="
)
