"""Stacks of transforms to test steps under: as values, that print as their code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.transforms.accumulation import accumulate
from fsfunc.transforms.rematerialization import remat
from fsfunc.transforms.sharding import shard

__all__ = ["DrawnStack"]


@dataclass(frozen=True)
class DrawnStack:
    """Transforms in an order: ``stack(step)`` is the step under them.

    Args:
        order: of "shard", "remat" and "accumulate", the innermost first.
        axis, options: what ``shard`` is given.
        microbatches: what ``accumulate`` is given.

    >>> import fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> DrawnStack(mesh, ("remat", "shard"), "data", {"zero": 2})
    shard(remat(step), mesh, 'data', zero=2)  # of Mesh({'data': 2}, 'simulated')
    """

    mesh: Mesh
    order: tuple[str, ...] = ("shard",)
    axis: Axis = "data"
    options: Any = None
    microbatches: int = 2

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        for name in self.order:
            if name == "shard":
                step = shard(step, self.mesh, self.axis, **(self.options or {}))
            elif name == "remat":
                step = remat(step)
            else:
                step = accumulate(step, self.microbatches)
        return step

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the batch is cut."""
        copies = (self.options or {}).get("replicate")
        names = (self.axis,) if isinstance(self.axis, str) else self.axis
        return names if copies is None else (copies, *names)

    @property
    def rows(self) -> int:
        """The smallest batch that every rank, and microbatch, has a row of."""
        size = self.mesh.axis_size(self.axes)
        return size * self.microbatches if "accumulate" in self.order else size

    def __repr__(self) -> str:
        said = "step"
        for name in self.order:
            if name == "shard":
                options = "".join(
                    f", {k}={v!r}" for k, v in (self.options or {}).items()
                )
                said = f"shard({said}, mesh, {self.axis!r}{options})"
            else:
                more = f", {self.microbatches}" if name == "accumulate" else ""
                said = f"{name}({said}{more})"
        return f"{said}  # of {self.mesh}"
