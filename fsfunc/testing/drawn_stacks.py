"""Stacks of transforms to test steps under: as values, that print as their code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.pipelining.pipelines import pipeline
from fsfunc.transforms.accumulation import accumulate
from fsfunc.transforms.donation import donate
from fsfunc.transforms.rematerialization import remat
from fsfunc.transforms.sharding import shard

__all__ = ["DrawnStack"]


@dataclass(frozen=True)
class DrawnStack:
    """Transforms in an order: ``stack(step)`` is the step under them.

    Args:
        order: of "shard", "remat", "accumulate", "pipeline" and "donate", the innermost
            first.
        axis, options: what ``shard`` is given.
        microbatches: what ``accumulate`` and ``pipeline`` are given.
        pipe: the axis of ``pipeline``, along which the batch is whole.

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
    pipe: str = ""

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        for name in self.order:
            args, options = self._given(name)
            step = _TRANSFORMS[name](step, *args, **options)
        return step

    def _given(self, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a transform beside the step."""
        if name == "shard":
            return (self.mesh, self.axis), dict(self.options or {})
        if name == "pipeline":
            return (self.mesh, self.pipe), {"n_microbatches": self.microbatches}
        return (self.microbatches,) * (name == "accumulate"), {}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the batch is cut."""
        copies = (self.options or {}).get("replicate")
        names = (self.axis,) if isinstance(self.axis, str) else self.axis
        return names if copies is None else (copies, *names)

    @property
    def rows(self) -> int:
        """The smallest batch that every rank, and microbatch, has a row of."""
        times = sum(name in ("accumulate", "pipeline") for name in self.order)
        return self.mesh.axis_size(self.axes) * self.microbatches**times

    def __repr__(self) -> str:
        said = "step"
        for name in self.order:
            args, options = self._given(name)
            each = ["mesh" if x is self.mesh else repr(x) for x in args]
            each += [f"{k}={v!r}" for k, v in options.items()]
            said = f"{name}({', '.join([said, *each])})"
        return f"{said}  # of {self.mesh}"


_TRANSFORMS: dict[str, Callable[..., Any]] = {
    "shard": shard,
    "remat": remat,
    "accumulate": accumulate,
    "pipeline": pipeline,
    "donate": donate,
}
