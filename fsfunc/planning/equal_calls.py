"""Equal unit calls in the recording that a plan begins with: their bodies run once.

A plan lays out a state before it runs the step, and for that records which leaves units
take (`tracing.recorder`). A unit is a pure function, so a call of the same unit, on
tensors that look the same, reads the same leaves and returns the same shapes::

    block(params[0], x)   runs; what it read and returned is noted
    block(params[1], x)   is equal: new outputs of the same shapes, the same reads
    ...

Of calls in a row that are equal, each with what the one before has returned, the plan
then runs the first and the last ones alone: see `left_out_calls`. Each recording before
a real step runs every body.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch.fake_results import CPU, Look, new_fakes
from fsfunc.comm.attribution import source_line
from fsfunc.core.execution_context import running
from fsfunc.core.units import Call
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.groups import EqualRun
from fsfunc.tracing.recorder import Recorder
from fsfunc.tracing.steadiness import NumbersGiven
from fsfunc.tree.types import Leaf, PyTree


class _Noted(NamedTuple):
    """What the body of a unit did.

    Args:
        treedef: the structure of what it returned.
        outputs: of each leaf of that, how it looks and whether it requires a gradient;
            or (value,) of one that is no tensor.
        reads: by the position of an argument that stands for a leaf of the state, the
            line that read it, and whether in a loss.
        numbers: those that it gave torch's functions.
    """

    treedef: tree.TreeDef
    outputs: list[tuple[Look, bool] | tuple[Leaf]]
    reads: dict[int, tuple[str, bool]]
    numbers: list[NumbersGiven]


class _RecordedCall(NamedTuple):
    """A unit call of a recording.

    Args:
        number: of the call in its loss; ``key``: decides what its body does, if known.
        around: what else decides what the call does; ``line``: that which makes it, as
            the ledger names it.
        param_paths: the paths of its parameters; None for what is no leaf of the state.
        inputs: the leaves of its inputs and keywords; ``results``: those of its result.
    """

    number: int
    key: Hashable | None
    around: tuple[Any, ...]
    line: str
    param_paths: list[str | None]
    inputs: list[Leaf]
    results: list[Leaf]

    def link(self, after: _RecordedCall, recorder: Recorder) -> dict[int, int] | None:
        """Returns the `EqualRun.links` to the next call; None if that is not equal."""
        # A call between them that raised has a number, and is not among those recorded.
        is_next = self.number + 1 == after.number
        is_equal = self.line == after.line and self.around == after.around
        is_equal = is_equal and self.key is not None and self.key == after.key
        if not (is_next and is_equal):
            return None
        place_of = {id(y): i for i, y in enumerate(self.results)}
        links: dict[int, int] = {}
        for i, (x, y) in enumerate(zip(self.inputs, after.inputs, strict=True)):
            if (place := place_of.get(id(y))) is not None and isinstance(y, Tensor):
                if place in links:  # two inputs are one result: none can stand for it
                    return None
                links[place] = i
            # A number is a part of the key; a tensor is to be the same.
            elif y is not x and (isinstance(y, Tensor) or recorder.path_of(y)):
                return None
        tensors = {i for i, y in enumerate(self.results) if isinstance(y, Tensor)}
        return links if links.keys() == tensors and tensors else None


def _runs_in(
    calls: Sequence[_RecordedCall], recorder: Recorder
) -> tuple[EqualRun, ...]:
    """Returns the runs of equal calls among those of one pass through a loss."""
    users: dict[str, set[int]] = {}
    for unit_call in recorder.unit_calls:
        for path in unit_call.leaves:
            users.setdefault(path, set()).add(unit_call.numbers[0])
    read_in_loss = {p for p, (_, in_loss) in recorder.read_outside.items() if in_loss}
    runs: list[EqualRun] = []
    links: dict[int, int] | None = None  # of the run that goes on, if one does
    for before, after in pairwise(calls):
        link = before.link(after, recorder)
        # A leaf that another call reads too, or the loss, has another kind of gradient.
        is_alone = all(
            p is not None and len(users.get(p, ())) == 1 and p not in read_in_loss
            for p in (*before.param_paths, *after.param_paths)
        )
        if link is None or not is_alone:
            links = None
        elif link == links:
            runs[-1] = runs[-1]._replace(count=runs[-1].count + 1)
        else:
            runs.append(EqualRun(before.number, 2, link))
            links = link
    return tuple(runs)


class EqualCalls:
    """The unit calls of one recording, by what decides what their bodies do.

    Attributes:
        runs: the runs of equal calls in the loss that was recorded, or of which another
            plan's record was used.
    """

    def __init__(self) -> None:
        self.runs: tuple[EqualRun, ...] = ()
        # None: what the body did cannot be noted, and it runs each time.
        self._noted: dict[Hashable, _Noted | None] = {}
        self._recorder: Recorder | None = None
        self._key: Hashable | None = None  # of the unit call that runs
        self._calls: list[_RecordedCall] = []  # the calls of the recording so far

    def record_call(
        self,
        recorder: Recorder,
        call: Call,
        run: Callable[..., PyTree],
        params: PyTree,
        /,
        *inputs: PyTree,
        **keywords: PyTree,
    ) -> PyTree:
        """Runs a unit call of a loss, with its transforms, and notes its arguments.

        Args:
            recorder: of the recording; another one begins anew.
        """
        if recorder is not self._recorder:
            self._recorder, self._calls = recorder, []
        self._key = None
        around = call.frame.compiler, *_torch.modes_around()
        out = run(params, *inputs, **keywords)
        leaves_in = tree.leaves((inputs, keywords), is_leaf=is_sharded)
        results = tree.leaves(out, is_leaf=is_sharded)
        param_paths = [recorder.path_of(x) for x in tree.leaves(params, is_sharded)]
        recorded = _RecordedCall(
            call.number,
            self._key,
            around,
            source_line(),
            param_paths,
            leaves_in,
            results,
        )
        self._calls.append(recorded)
        return out

    def runs_of(self, recorder: Recorder) -> tuple[EqualRun, ...]:
        """Returns the runs of equal calls in the loss of a recording that is over.

        They are those of each pass through the loss: none, if passes differ.
        """
        if recorder is not self._recorder:
            return ()
        recorded, self._calls, self._recorder = self._calls, [], None
        starts = [
            i
            for i, x in enumerate(recorded)
            if i == 0 or x.number <= recorded[i - 1][0]
        ]
        passes = [recorded[i:j] for i, j in pairwise([*starts, len(recorded)])]
        found = [_runs_in(calls, recorder) for calls in passes]
        return found[0] if found and all(x == found[0] for x in found) else ()

    def run_body(
        self,
        recorder: Recorder,
        call: Call,
        arguments: tuple[PyTree, ...],
        run: Callable[[], PyTree],
    ) -> PyTree:
        """Returns what the body of a unit call returns, without a run if it is known.

        Args:
            recorder: in which its reads are recorded.
            arguments: the parameters, inputs and keywords of the call.
            run: runs the body.
        """
        leaves = tree.leaves(arguments, is_leaf=is_sharded)
        # What is asked here of tensors is no read of the body's, which a mode records.
        with _torch.outside_function_modes():
            key = self._key = _key(recorder, call, arguments, leaves)
        # What a body does with parts that know their layouts is more than is noted.
        if key is None or any(map(is_sharded, leaves)):
            return run()
        if key not in self._noted:
            before = _counts(recorder)
            out = run()
            with _torch.outside_function_modes():
                self._noted[key] = _note(recorder, call, leaves, out, before)
            return out
        return (
            run()
            if (noted := self._noted[key]) is None
            else _repeat(recorder, call, leaves, noted)
        )


def _key(
    recorder: Recorder, call: Call, arguments: PyTree, leaves: Sequence[Leaf]
) -> Hashable | None:
    """Returns what decides what a body does; None if that is not all known."""
    f = call.frame
    # A unit in another one is a part of its body. Under torch.func tensors are wrapped.
    if f.path or f.composable or _torch.functorch_active():
        return None
    mode, first, kinds = _torch.fake_mode(), {}, []
    for i, leaf in enumerate(leaves):
        x, layout = leaf, None
        if isinstance(leaf, Sharded) and leaf.packed is None:
            x, layout = leaf.local, leaf.layout
        if isinstance(x, Tensor):
            if not _is_plain(x) or getattr(x, "fake_mode", None) is not mode:
                return None
            # Which arguments are one tensor, or lie in one memory, and where in it.
            same = first.setdefault(id(x), i)
            memory = first.setdefault(-_torch.storage_key(x), i)
            place = x.shape, x.stride(), x.storage_offset(), x.dtype
            flags = x.requires_grad, x.is_leaf, recorder.path_of(x) is None
            kinds.append((*place, *flags, layout, same, memory))
        elif type(x) in _PLAIN_TYPES:
            # -0.0 equals 0.0 and is another number; nan is the same, and equals none.
            kinds.append((type(x), repr(x) if isinstance(x, float | complex) else x))
        else:  # such as a cache, or a number whose comparisons are observed
            return None
    autocast = [
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    ]
    modes = torch.is_grad_enabled(), torch.get_default_dtype(), *autocast
    around = f.handlers, f.in_loss > 0, f.seed is None, f.whole, str(f.casts)
    return call.unit, tree.flatten(arguments, is_sharded)[1], *kinds, *modes, *around


_PLAIN_TYPES = {bool, int, float, complex, str, type(None), torch.dtype}


def _is_plain(x: Leaf) -> bool:
    """Returns whether shape, strides and dtype are all that a fake tensor has."""
    is_fake = type(x) is _torch.FakeTensor and x.layout is torch.strided
    return (
        is_fake
        and x.constant is None
        and _torch.device_of(x) == CPU
        and not (x.is_conj() or x.is_neg() or x.is_inference())
    )


def _counts(recorder: Recorder) -> tuple[Any, ...]:
    """Returns counts of what a noted body must leave as it is, and of numbers given."""
    unit_token = running().token
    return (
        len(recorder.unit_calls),
        len(recorder.claims),
        len(recorder.gradient_ids),
        None if unit_token is None else unit_token.latest,
        len(recorder.numbers_given),
    )


def _note(
    recorder: Recorder,
    call: Call,
    leaves: Sequence[Leaf],
    out: PyTree,
    before: tuple[Any, ...],
) -> _Noted | None:
    """Returns what a body did, or None if it did more than that."""
    *others, number_count = before
    *others_now, _ = _counts(recorder)
    if any(a is not b and a != b for a, b in zip(others, others_now, strict=True)):
        return None
    reads = {p: x for (p, n), x in recorder.read_in_units.items() if n == call.numbers}
    positions = {recorder.path_of(x): i for i, x in enumerate(leaves)}
    if not reads.keys() <= positions.keys():  # by closure
        return None
    values, treedef = tree.flatten(out, is_sharded)
    storages = {_torch.storage_key(x) for x in leaves if isinstance(x, Tensor)}
    is_tracked = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
    outputs: list[tuple[Look, bool] | tuple[Leaf]] = []
    for y in values:
        if type(y) in _PLAIN_TYPES:
            outputs.append((y,))
            continue
        if not (isinstance(y, Tensor) and _is_plain(y)):
            return None
        dims = zip(y.shape, y.stride(), strict=True)
        extent = 1 + sum((n - 1) * step for n, step in dims) if y.numel() else 0
        in_own_memory = y.untyped_storage().nbytes() == extent * y.element_size()
        key = _torch.storage_key(y)
        if key in storages or not in_own_memory or y.requires_grad > is_tracked:
            return None
        storages.add(key)
        outputs.append(((tuple(y.shape), y.stride(), y.dtype), y.requires_grad))
    return _Noted(
        treedef,
        outputs,
        {positions[path]: read for path, read in reads.items()},
        recorder.numbers_given[number_count:],
    )


def _repeat(
    recorder: Recorder, call: Call, leaves: Sequence[Leaf], noted: _Noted
) -> PyTree:
    """Records what an equal call does, and returns new outputs."""
    for i, read in noted.reads.items():
        path = recorder.path_of(leaves[i])
        if path is not None:
            recorder.read_in_units.setdefault((path, call.numbers), read)
    recorder.numbers_given += noted.numbers
    looks = [x for x in noted.outputs if len(x) == 2]
    tensors = iter(())
    if looks:
        tracked = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        tensors = iter(_Repeated.apply(looks, *tracked))
    values = [next(tensors) if len(x) == 2 else x[0] for x in noted.outputs]
    return tree.unflatten(noted.treedef, values)


class _Repeated(torch.autograd.Function):
    """The outputs of a body that is not run."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, looks: list[tuple[Look, bool]], *tracked: Tensor
    ) -> tuple[Tensor, ...]:
        mode = _torch.fake_mode()
        made = new_fakes(mode, [look for look, _ in looks])  # type: ignore[arg-type]
        frozen = [x for x, (_, tracks) in zip(made, looks, strict=True) if not tracks]
        ctx.mark_non_differentiable(*frozen)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # A recording takes no gradients itself. One that the step takes by torch needs
        # the graph: the error has the step recorded once more, with all bodies.
        raise RuntimeError("a unit call that was not run has no graph")
