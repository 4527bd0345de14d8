"""Equal unit calls in the recording that a plan begins with: their bodies run once.

A plan lays out a state before it runs the step, and for that records which leaves units
take (`tracing.recorder`). A unit is a pure function, so a call of the same unit, on
tensors that look the same, reads the same leaves and returns the same shapes::

    block(params[0], x)   runs; what it read and returned is noted
    block(params[1], x)   is equal: new outputs of the same shapes, the same reads
    ...

The step itself runs every unit call, and so does each recording before a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch.fake_results import CPU, Look, new_fakes
from fsfunc.core.execution_context import running
from fsfunc.core.units import Call
from fsfunc.sharded.leaf import is_sharded
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


class EqualCalls:
    """The unit calls of one recording, by what decides what their bodies do."""

    def __init__(self) -> None:
        # None: what the body did cannot be noted, and it runs each time.
        self._noted: dict[Hashable, _Noted | None] = {}

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
            key = _key(recorder, call, arguments, leaves)
        if key is None:
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
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            if not _is_plain(x) or getattr(x, "fake_mode", None) is not mode:
                return None
            # Which arguments are one tensor, or lie in one memory, and where in it.
            same = first.setdefault(id(x), i)
            memory = first.setdefault(-_torch.storage_key(x), i)
            place = x.shape, x.stride(), x.storage_offset(), x.dtype
            flags = x.requires_grad, x.is_leaf, recorder.path_of(x) is None
            kinds.append((*place, *flags, same, memory))
        elif type(x) in _PLAIN_TYPES:
            kinds.append((type(x), x))
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
