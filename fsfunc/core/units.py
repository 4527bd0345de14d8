"""``unit``: a function whose calls transforms may reinterpret.

A unit is a pure function of ``(params, *inputs)``. Without a transform around it,
calling a unit calls the function. A transform changes what the call does: gather the
parameters first, recompute it in the backward pass, run it on another rank.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal, label, warn
from fsfunc.comm.tracebacks import api_boundary, leave_out
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.casts import Casts, cast
from fsfunc.core.execution_context import running
from fsfunc.core.frames import Counter, Frame, frame, inside, recording
from fsfunc.core.outcomes import is_newborn
from fsfunc.runtime.generators import OwnDraws, States, generator_states, mix
from fsfunc.runtime.scopes import in_one_thread, refuse_compiled
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import row_major


@api_boundary
def unit(fn: Callable[..., Any], *, whole: bool = False) -> Unit:
    """``fn`` as a unit: a function whose calls transforms may reinterpret.

    Units are the granularity of gathers, recomputation, offload and pipeline stages.
    Without a transform around it, calling a unit calls ``fn``.

    Inside, parameters are plain tensors, and a derivative that is taken there is this
    rank's own; the mean over the ranks is taken once, of the parameters' cotangents, as
    they leave the unit.

    Args:
        fn: a pure function of ``(params, *inputs, **keywords)``: any pytrees in, any
            pytree out. Units nest; an outer one gathers the parameters that no inner
            one takes. ``fn`` may be compiled, ``unit(torch.compile(fn))``, if it calls
            no unit; steps are recorded and planned with the plain function.
        whole: gather the parameters of this unit and of all nested units on entry, and
            run nested units as plain functions. Needed to differentiate with respect to
            parameters inside the unit (per-sample gradients, MAML's inner loop). Cost:
            one gather, kept until the unit returns, and one reduction in its backward.

    Raises (when called):
        RuntimeError: ``fn`` captured a differentiated tensor by closure, or changed an
            input in place by ``.data`` (checked on the first call for each set of
            shapes, booleans and strings) or openly; or the unit is called inside a
            compiled function.

    >>> import torch, fsfunc as ff
    >>> @ff.unit
    ... def layer(params, x):
    ...     return torch.tanh(x @ params["w"])
    >>> layer({"w": torch.eye(2)}, torch.zeros(3, 2)).shape
    torch.Size([3, 2])

    Per-sample gradients, each rank's own, of a loss that is made of units:

    >>> from torch.func import grad, vmap
    >>> loss = lambda params, x: layer(params, x[None]).sum()
    >>> each = ff.unit(lambda p, x: vmap(grad(loss), (None, 0))(p, x), whole=True)
    >>> each({"w": torch.eye(2)}, torch.zeros(3, 2))["w"].shape
    torch.Size([3, 2, 2])
    """
    check_function(fn, "unit")
    return fn if isinstance(fn, Unit) and fn.whole == whole else Unit(fn, whole)


class Unit:
    """A function of ``(params, *inputs)`` that transforms may reinterpret."""

    def __init__(self, fn: Callable[..., Any], whole: bool = False):
        functools.update_wrapper(self, fn)
        self.whole = whole
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.fn = fn
        # The number of first inputs that ``precision`` does not cast: buffers.
        self.as_given: int = getattr(fn, "as_given", 0)
        self._seen: set[Any] = set()  # the kinds of calls that were checked
        # By kind of arguments, how values are not saved; and where Python's generators
        # are not drawn of: see `repeated_calls`.
        self.derives: dict[Any, Any] = {}
        self.quiet: set[Any] = set()

    def __call__(self, params: Any, /, *inputs: Any, **keywords: Any) -> Any:
        refuse_compiled(self)
        f = frame()
        call = Call(self, f, f.counter.next())
        try:
            return call.run(params, *inputs, **keywords)
        except BaseException as error:
            leave_out(error)
            raise

    def __repr__(self) -> str:
        return f"unit({self.__name__})"

    def checked(
        self, params: Any, inputs: Any, keywords: Any, fn: Callable[..., Any]
    ) -> Any:
        """Calls ``fn``, and raises if it captured tensors or changed its inputs."""
        given = tree.shown(
            (params, inputs, keywords), self, "is given", _PARTS, is_sharded
        )
        # Not the parts of sharded leaves: gathers for inner units write beside them.
        watched, kinds, untracked = [], [], False
        for x in given:
            if isinstance(x, Tensor):
                watched.append(x)
                kinds.append((x.shape, x.dtype, x.requires_grad))
                untracked = untracked or x.is_inference()
            elif is_sharded(x):
                kinds.append((x.layout.shape, x.layout.dtype))
                part = x.local if x.packed is None else x.packed.flat
                untracked = untracked or part.is_inference()
            elif isinstance(x, bool | str):  # which may choose a branch
                kinds.append(x)
        watched = [] if untracked else watched
        versions, key = list(map(_VERSION, watched)), tuple(kinds)
        # Within a unit grad stays off: what that saves is the same when it runs again.
        within = not torch.is_grad_enabled() and len(frame().path) > 1
        if untracked or within or key in self._seen or _torch.functorch_active():
            out = fn(params, *inputs, **keywords)
        elif (traced := recording()) and (traced, key) in self._seen:
            out = fn(params, *inputs, **keywords)
        else:
            told = functools.partial(self._changed, params, inputs, keywords)
            # Without data nothing is written, and what records would see the mode. So
            # would a compiler's guards, by which it compiled each call anew.
            compiled = frame().compiler or _torch.is_compiled_function(self.fn)
            looks = not (traced or compiled)
            with _torch.WriteWatcher(watched, told) if looks else nullcontext():
                out = self._check_captures(
                    _tensors(given), params, inputs, keywords, fn
                )
            self._seen.add((traced, key) if traced else key)
        for x, version in zip(watched, versions, strict=True):
            if x._version != version:
                self._changed(params, inputs, keywords, x)
        return out

    def _changed(self, params: Any, inputs: Any, keywords: Any, x: Tensor) -> None:
        """Raises, and names the argument that ``x`` lies in."""
        names = ("params", *[f"input {i}" for i in range(len(inputs))], *keywords)
        values = (params, *inputs, *keywords.values())
        for name, value in zip(names, values, strict=True):
            paths, leaves, _ = tree.flatten_with_paths(value)
            for path, leaf in zip(paths, leaves, strict=True):
                if _lies_in(x, leaf):
                    name = f"{name} at {path!r}" if path else name
                    raise RuntimeError(
                        f"unit {self.__name__!r} changed its {name} of shape "
                        f"{tuple(leaf.shape)} in place: a unit may be run again, so it "
                        "must leave its inputs as they are; work on a copy"
                    )

    def _check_captures(
        self,
        given: list[Tensor],
        params: Any,
        inputs: Any,
        keywords: Any,
        fn: Callable[..., Any],
    ):
        """Calls ``fn``, and raises if its output depends on a captured tensor.

        The autograd graph of the output is walked back to the inputs; what is reached
        beside them, and was made before the call, was captured.
        """
        recording = torch.is_grad_enabled()
        thread = running().thread
        known = given if thread is None else [*given, thread.token]
        # By edge, not by node: of ``a, b = x.unbind()`` one may be an input, and the
        # other captured.
        seen = {(x.grad_fn, x.output_nr) for x in known if x.grad_fn is not None}
        leaves = {id(x) for x in known}
        # inference_mode turns autograd's threads on, of which each numbers its nodes.
        with torch.inference_mode(False), in_one_thread(), torch.enable_grad():
            start = _torch.next_sequence_number()
            out = fn(params, *inputs, **keywords)
            roots = tree.shown(out, self, "returns")
            roots = [x for x in roots if isinstance(x, Tensor) and x.requires_grad]
            todo = [("", x.grad_fn, x.output_nr) for x in roots if x.grad_fn]
            for x in roots:
                if x.grad_fn is None and id(x) not in leaves:
                    self._captured("", tuple(x.shape))
            while todo:
                user, node, k = todo.pop()
                if (node, k) in seen:
                    continue
                seen.add((node, k))
                variable = getattr(node, "variable", None)
                if variable is not None:
                    if id(variable) not in leaves:
                        self._captured(user, tuple(variable.shape))
                elif _torch.sequence_number(node) < start:
                    self._captured(user, _torch.output_shape(node, k))
                if not is_newborn(node):
                    edges = [(n, i) for n, i in node.next_functions if n]
                    todo += [(node.name(), n, i) for n, i in edges]
        if not recording:
            out = tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)
        return out

    def _captured(self, user: str, shape: tuple[int, ...]) -> None:
        op = user.rstrip("0123456789").removesuffix("Backward")
        raise RuntimeError(
            f"unit {self.__name__!r} uses, in {op or 'its output'}, a differentiated "
            f"tensor of shape {shape} captured by closure: its gradient would be lost "
            "where the unit is recomputed or sharded; pass it as an argument. In place "
            "of one made by requires_grad_(), take gradients by it with torch.func.grad"
        )


def _lies_in(x: Any, leaf: Any) -> bool:
    """True if ``x`` shares memory with a leaf, as far as where it begins shows."""
    if not (isinstance(x, Tensor) and isinstance(leaf, Tensor)):
        return False
    x, leaf = _torch.unwrapped(x), _torch.unwrapped(leaf)
    if _torch.storage_key(x) != _torch.storage_key(leaf):
        return False
    start, at = (t.storage_offset() * t.element_size() for t in (leaf, x))
    return x.element_size() == 1 or start <= at < start + leaf.nbytes


class Call:
    """A unit call: the unit, the frame in which it was called, and its number there.

    Attributes:
        path: the names of the units around it, and its own; ``name`` is ``block`` or,
            inside another unit, ``loss_fn/block``.
        numbers: its number within each unit around it, outermost first.
        savers: autograd nodes that save its arguments for a second run, and to which
            its outputs do not lead.
    """

    def __init__(self, unit: Unit, frame: Frame, number: int):
        self.unit, self.frame, self.number = unit, frame, number
        self.path = (*frame.path, unit.__name__)
        self.numbers = (*frame.numbers, number)
        self.name = "/".join(self.path)
        self.savers: list[Any] = []

    def run(self, params: Any, /, *inputs: Any, **keywords: Any) -> Any:
        """Runs the call through the interpretations of its frame."""
        run = self.body
        for handler in reversed(self.frame.handlers):
            run = handler.unit(run, self)
        with internal():
            return run(params, *inputs, **keywords)

    def body(self, params: Any, /, *inputs: Any, **keywords: Any) -> Any:
        """Runs the unit's function: the innermost of all interpretations."""
        f, numbers = self.frame, self.numbers
        within = f.replace(
            path=self.path,
            numbers=numbers,
            counter=Counter(),
            whole=f.whole or self.unit.whole,
            level=f.level if f.path else _torch.current_level(),
        )
        states: States = []
        own: OwnDraws | None = None
        failed = True
        try:
            if f.tracer is not None and not f.tracer.draws:
                pass
            elif f.seed is not None:
                # From the gradient call, the unit call and the microbatch of the global
                # batch: so a recompute draws the same, whatever the schedule.
                states = generator_states()
                numbers = numbers[f.seeded :]
                index = row_major((*f.varies, *(f.rows or f.micro)))
                seed = mix(f.seed, index, len(numbers), *numbers)
                for g, _ in states:
                    g.manual_seed(seed)
            elif f.varies and not f.path and _differs(f):
                draws = self.unit.__name__ in f.drawing
                own = OwnDraws(row_major((*f.varies, *f.micro)), draws=draws)
            now = running()
            phase = "recompute" if now.recompute else "forward"
            with inside(within, users=f.tracer is None), label(self.name, phase):
                casts = f.casts
                if casts is not None:
                    with internal():
                        given = params, inputs, keywords
                        params, inputs, keywords = self._cast(casts, *given)
                if f.tracer is not None:
                    out = f.tracer.body(self, params, inputs, keywords)
                else:
                    fn = self.unit.fn
                    if f.compiler is not None and not f.composable:
                        fn = f.compiler.of(self)
                    if now.around is not None:
                        fn = functools.partial(now.around, fn)
                    out = self.unit.checked(params, inputs, keywords, fn)
                if casts is not None and casts.output is not None:
                    with internal():
                        out = _cast(out, casts.output)
                failed = False
                return out
        except Exception as error:
            if (refused := _unaligned(error, self.name, params)) is not None:
                raise refused from error
            _tell_unit(error, self.name)
            raise
        finally:
            for g, state in states:
                g.set_state(state)
            if own is not None:
                own.end(failed)

    def _cast(
        self, casts: Casts, params: Any, inputs: Any, keywords: Any
    ) -> tuple[Any, Any, Any]:
        """The arguments, cast as ``precision`` says."""
        f, dtype = self.frame, casts.of(self.name)
        if dtype == torch.float16 and f.in_loss and torch.is_grad_enabled():
            if not any(handler.scales for handler in f.handlers):
                warn(_UNSCALED)
        kept = inputs[: self.unit.as_given]
        rest, keywords = _cast((inputs[len(kept) :], keywords), dtype)
        leaves, treedef = tree.flatten(params, is_leaf=is_sharded)
        each = casts.each(self.name, treedef)
        params = tree.unflatten(treedef, map(cast, leaves, each))
        return params, (*kept, *rest), keywords


_UNSCALED = (
    "gradients are computed in float16, where numbers below 6e-8 become 0: scale the "
    "loss, by ff.loss_scale(optimizer)(grad_fn), or compute in bfloat16"
)
_PARTS = ("params", "inputs", "keywords")
_VERSION = operator.attrgetter("_version")


def _differs(f: Frame) -> bool:
    """True where another rank's data differ, and numbers that are made now count."""
    return any(count > 1 for _, count in f.varies) and not _torch.fake_active()


def inside_unit(path: tuple[str, ...], leaf: str, gathers: str) -> LawError:
    """The error of a derivative by a leaf that only a nested unit gathers."""
    return LawError(
        f"a derivative is taken inside unit {'/'.join(path)!r} by {leaf}, which only "
        f"{gathers} within it gathers: it would be that of the mean over the ranks, "
        f"where a unit's derivatives are the rank's own. Make {path[0]!r} ff.unit(fn, "
        "whole=True), which gathers all of its parameters, or take the derivative "
        "outside"
    )


def _tell_unit(error: Exception, name: str) -> None:
    """Adds the innermost unit: torch tells shapes that do not fit, and not where."""
    notes = getattr(error, "__notes__", ())
    if not any(str(note).startswith("in unit ") for note in notes):
        error.add_note(f"in unit {name!r}")


def _unaligned(error: Exception, name: str, params: Any) -> RuntimeError | None:
    """The refusal of a wider view of leaves that begin anywhere in a packed buffer."""
    if (said := _UNALIGNED.search(str(error))) is None:
        return None
    paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=is_sharded)
    tensors = [(p, x) for p, x in zip(paths, leaves, strict=True) if _is_dense(x)]
    starts = {p: int(_torch.unwrapped(x).storage_offset()) for p, x in tensors}
    odd = [f"{p!r} at element {n}" for p, n in starts.items() if n % int(said[1])]
    return RuntimeError(_VIEWS.format(name, said[1], ", ".join(odd))) if odd else None


_UNALIGNED = re.compile(r"storage_offset.*divisible by (\d+)")
_VIEWS = (
    "unit {!r} views a tensor as one of wider numbers (torch.view_as_complex, "
    "x.view(dtype)), which must begin at a multiple of {} of its elements. Parameters "
    "lie in a packed buffer, one after another, and these do not: {}. View a copy, "
    "torch.view_as_complex(w.clone()); or let the parameter itself have that dtype"
)


def _is_dense(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided


def _tensors(given: list[Any]) -> list[Tensor]:
    """The tensors among leaves, and the parts of sharded ones."""
    return [x for x in tree.leaves(given) if isinstance(x, Tensor)]


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    return tree.map(lambda x: cast(x, dtype), values, is_leaf=is_sharded)
