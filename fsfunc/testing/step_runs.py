"""Calls of one step, on one device and on the ranks of a mesh, with all they return.

``assert_equals_one_device``, ``prove`` and ``first_difference`` run both of their steps
by ``StepCaller``, so that both get the same states, batches and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.launch import local_batch, spmd
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Mesh
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.spent import any_unusable
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.state.placing import place
from fsfunc.state.unsharding import unshard
from fsfunc.testing.comparing import copy_tensors
from fsfunc.tree.types import Leaf, PyTree


class RankRuns(NamedTuple):
    """The results of the calls on the ranks that run in this process.

    Args:
        outputs: for each rank, what each call returned, unsharded.
        written: for each rank, a sentence on a write into an argument, or "".
        rows: for each rank, the number of rows of its batch.
    """

    outputs: Sequence[Sequence[PyTree]]
    written: Sequence[str]
    rows: Sequence[int]


@dataclass(frozen=True)
class StepCaller:
    """Calls a step some times; see :func:`ff.testing.assert_equals_one_device`.

    Args:
        count: the number of calls.
        next_state: makes the next call's state of a call's result (``goes_on``).
        layouts: as for ``ff.place``.
        to_whole: makes, on each rank, one device's result of the rank's (``whole``).
        uneven: whether ranks may have different numbers of rows.
    """

    count: int = 2
    next_state: Callable[[PyTree], PyTree] | None = None
    layouts: LayoutRules | None = None
    to_whole: Callable[[PyTree], PyTree] = unshard
    uneven: bool = False

    def on_one_device(
        self, step: Callable[..., Any], state: PyTree, batch: Sequence[PyTree]
    ) -> list[PyTree]:
        """Calls the step on one device; returns the result of each call."""
        outputs = []
        for _ in range(self.count):
            out = step(state, *batch)
            outputs.append(tree.map(copy_tensor, out))
            state = state if self.next_state is None else self.next_state(out)
        return outputs

    def on_ranks(
        self,
        transformed: Callable[..., Any],
        mesh: Mesh,
        axes: tuple[str, ...],
        state: PyTree,
        batch: Sequence[PyTree],
    ) -> RankRuns:
        """Calls the step on every rank, with the rank's rows of the batch."""

        def main() -> tuple[list[PyTree], str, int]:
            local_rows = local_batch(batch, mesh, axes, self.uneven) if axes else batch
            placed: PyTree = None
            outputs, written = [], ""
            for _ in range(self.count):
                # A donated state is spent: the next call starts from the first again.
                if placed is None or self.next_state is None and _is_donated(placed):
                    placed = place(
                        transformed, state, *local_rows, layouts=self.layouts
                    )
                before = copy_tensors(placed), copy_tensors(local_rows)
                out = transformed(placed, *local_rows)
                written = written or describe_write(before, placed, local_rows)
                with silence():
                    outputs.append(tree.map(copy_tensor, self.to_whole(out)))
                placed = placed if self.next_state is None else self.next_state(out)
            return outputs, written, _row_count(local_rows)

        return RankRuns(*spmd(main, mesh)().unzip())


def batch_axes(transformed: Callable[..., Any], mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes over which the transforms around a step take means.

    All axes of the mesh if no transform has axes.
    """
    sharding = [
        handler
        for handler in getattr(transformed, "interpretations", ())
        if hasattr(handler, "axes")
    ]
    if not sharding:
        return tuple(mesh.axes)
    averaged = {
        a for handler in sharding for a in handler.axes if a not in handler.same_batch
    }
    return tuple(a for a in mesh.axes if a in averaged)


def rows_of_rank(batch: PyTree, mesh: Mesh, axes: tuple[str, ...], rank: int) -> PyTree:
    """Returns the rows of the batch that a rank has."""
    size, index = mesh.axis_size(axes), mesh.coordinate(axes, rank)
    part = lambda x: x.tensor_split(size)[index] if isinstance(x, Tensor) else x  # noqa: E731
    return tree.map(part, batch)


def copy_tensor(x: Leaf) -> Leaf:
    """Returns a copy of a leaf, if it is a tensor."""
    # A later call may write into its memory, if the state is donated.
    return x.detach().clone() if isinstance(x, Tensor) else x


def _is_donated(placed: PyTree) -> bool:
    return any_unusable(tree.leaves(placed, is_leaf=is_sharded))


def describe_write(
    before: Sequence[list[Tensor]], placed: PyTree, batch: PyTree
) -> str:
    """Returns a sentence on a write into an argument that was not donated, or "".

    Args:
        before: copies of the tensors of state and batch, from before the call.
        placed, batch: the arguments after the call.
    """
    for argument, old_tensors, tree_now in zip(
        ("state", "batch"), before, (placed, batch), strict=True
    ):
        if _is_donated(tree_now):
            continue  # a donated argument may be written into
        paths, leaves, _ = tree.flatten_with_paths(tree_now, is_leaf=is_sharded)
        tensor_paths = [
            path for path, x in zip(paths, leaves, strict=True)
            if is_sharded(x) or isinstance(x, Tensor)
        ]  # fmt: skip
        for path, old, new in zip(
            tensor_paths, old_tensors, copy_tensors(tree_now), strict=True
        ):
            if not bool(((old == new) | (old != old) & (new != new)).all()):
                return (
                    f"wrote into the {argument}'s {path!r}, which was not donated: use "
                    "ff.donate, or a copy"
                )
    return ""


def _row_count(batch: PyTree) -> int:
    """Returns the number of rows of a batch: the length of its first tensor."""
    sizes = [len(x) for x in tree.leaves(batch) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 0
