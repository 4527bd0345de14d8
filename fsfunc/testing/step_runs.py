"""Calls of one step, on one device and on the ranks of a mesh, with all they return."""

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
from fsfunc.testing.comparing import held


class RankRuns(NamedTuple):
    """What the calls on the ranks hosted here gave.

    Args:
        outs: by rank, what each call returned, whole.
        written: by rank, a sentence on a write into an argument, or "".
        rows: by rank, the number of rows of its batch.
    """

    outs: Sequence[Sequence[Any]]
    written: Sequence[str]
    rows: Sequence[int]


@dataclass(frozen=True)
class Calls:
    """How a step is called; see :func:`ff.testing.assert_equals_one_device`."""

    count: int = 2
    goes_on: Callable[[Any], Any] | None = None
    layouts: LayoutRules | None = None
    whole: Callable[[Any], Any] = unshard
    uneven: bool = False

    def on_one(self, step: Callable[..., Any], state: Any, batch: Any) -> list[Any]:
        """Returns the results of each call on one device."""
        outs = []
        for _ in range(self.count):
            out = step(state, *batch)
            outs.append(tree.map(copied, out))
            state = state if self.goes_on is None else self.goes_on(out)
        return outs

    def on_ranks(
        self,
        transformed: Callable[..., Any],
        mesh: Mesh,
        axes: tuple[str, ...],
        state: Any,
        batch: Any,
    ) -> RankRuns:
        """Calls it on every rank, with the rank's rows of the batch along ``axes``."""

        def main() -> Any:
            mine = local_batch(batch, mesh, axes, self.uneven) if axes else batch
            placed: Any = None
            outs, written = [], ""
            for _ in range(self.count):
                if placed is None or self.goes_on is None and _donated(placed):
                    placed = place(transformed, state, *mine, layouts=self.layouts)
                before = held(placed), held(mine)
                out = transformed(placed, *mine)
                written = written or written_into(before, placed, mine)
                with silence():
                    outs.append(tree.map(copied, self.whole(out)))
                placed = placed if self.goes_on is None else self.goes_on(out)
            return outs, written, _rows(mine)

        return RankRuns(*spmd(main, mesh)().unzip())


def batch_axes(transformed: Any, mesh: Mesh) -> tuple[str, ...]:
    """The axes over which the transforms around a step take means."""
    laying = [
        h for h in getattr(transformed, "interpretations", ()) if hasattr(h, "axes")
    ]
    if not laying:
        return tuple(mesh.axes)
    over = {a for h in laying for a in h.axes if a not in h.same_batch}
    return tuple(a for a in mesh.axes if a in over)


def rows_of(batch: Any, mesh: Mesh, axes: tuple[str, ...], rank: int) -> Any:
    """The rows of a rank."""
    size, index = mesh.axis_size(axes), mesh.coordinate(axes, rank)
    part = lambda x: x.tensor_split(size)[index] if isinstance(x, Tensor) else x  # noqa: E731
    return tree.map(part, batch)


def copied(x: Any) -> Any:
    """A tensor as it is now: a later call may be given its memory to write into."""
    return x.detach().clone() if isinstance(x, Tensor) else x


def _donated(placed: Any) -> bool:
    return any_unusable(tree.leaves(placed, is_leaf=is_sharded))


def written_into(before: Sequence[list[Tensor]], placed: Any, batch: Any) -> str:
    """A sentence on a write into an argument that was not donated, or ""."""
    for what, olds, now in zip(
        ("state", "batch"), before, (placed, batch), strict=True
    ):
        if _donated(now):
            continue  # it may
        paths, after, _ = tree.flatten_with_paths(now, is_leaf=is_sharded)
        real = [
            p for p, x in zip(paths, after, strict=True)
            if is_sharded(x) or isinstance(x, Tensor)
        ]  # fmt: skip
        for path, old, new in zip(real, olds, held(now), strict=True):
            if not bool(((old == new) | (old != old) & (new != new)).all()):
                return (
                    f"wrote into the {what}'s {path!r}, which was not donated: use "
                    "ff.donate, or a copy"
                )
    return ""


def _rows(batch: Any) -> int:
    """The number of rows of a batch."""
    sizes = [len(x) for x in tree.leaves(batch) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 0
