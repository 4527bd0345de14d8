"""Loss scales by unit: the backward of a unit is scaled, and its results divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.shard_linear_maps import LawError
from fsfunc.core.frames import Interpretation, composable, frame
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.units import Call
from fsfunc.sharded.leaf import Sharded, is_sharded

__all__ = ["UnitScaling"]


class UnitScaling(Interpretation):
    """Multiplies by a unit's scale where its backward begins, and divides at its ends.

    Innermost, it sees parameters as they are gathered.
    """

    called = "layerwise_loss_scale"
    scales = True

    def __init__(self, by_name: Mapping[str, float]):
        self.by_name, self.met = by_name, set()
        self.found: dict[str, Tensor] = {}  # whether a unit made what is not finite

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(call: GradientCall) -> Outcome:
            f, outcome = frame(), run(call)
            if f.in_loss:  # a derivative that the loss itself takes
                return outcome
            unmet = set(self.by_name) - self.met
            if unmet and not any(h.same_batch for h in f.handlers):
                raise ValueError(
                    f"scales of layerwise_loss_scale has {min(unmet)!r}, and the units "
                    f"of the loss are {', '.join(sorted(self.met)) or 'none'}"
                )
            return outcome

        return scaled

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if call.frame.path or not call.frame.in_loss:
            return run
        self.met.add(call.name)
        if call.name not in self.by_name:
            return run

        def scaled(params: Any, *inputs: Any, **keywords: Any) -> Any:
            if composable() or not torch.is_grad_enabled():
                return run(params, *inputs, **keywords)
            ends = _Ends(self, call)
            given = tree.map(ends.begin, (params, inputs, keywords), is_leaf=is_sharded)
            params, inputs, keywords = given
            out = run(params, *inputs, **keywords)
            return tree.map(ends.end, out, is_leaf=is_sharded)

        return scaled


class _Ends:
    """Scaling at the inputs and outputs of one unit call."""

    def __init__(self, scaling: UnitScaling, call: Call):
        self.found, self.name = scaling.found, call.name
        self.scale = scaling.by_name[call.name]
        # A record knows leaves by what they are, and another tensor is none.
        self.traced = call.frame.tracer is not None
        self.looks = not _torch.fake_active()
        self.given: Tensor | None = None  # whether its cotangents are finite

    def begin(self, x: Any) -> Any:
        return self._through(x, lambda g: self._made(g) / self.scale)

    def end(self, x: Any) -> Any:
        return self._through(x, lambda g: self._seen(g) * self.scale)

    def _through(self, x: Any, back: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(x, Sharded):
            if x.packed is not None:
                raise LawError(
                    f"unit {self.name!r} has a scale of its own, and units within it "
                    f"gather {x.name!r}: make it ff.unit(fn, whole=True), or give the "
                    "loss units that hold none, and scale these"
                )
            return x.with_local(self._through(x.local, back))
        if not (isinstance(x, Tensor) and x.requires_grad):
            return x
        if x.dtype.itemsize < 4:
            raise LawError(
                f"what unit {self.name!r}, which has a scale of its own, is given or "
                f"returns is {x.dtype}: what is divided by a scale must be float32 or "
                "wider. Take ff.precision(step, torch.float32, output=torch.float32) "
                "around, and compute in half by torch.autocast in the loss"
            )
        return x if self.traced else _Back.apply(x, back)

    def _seen(self, g: Tensor) -> Tensor:
        if self.looks:
            finite = g.detach().isfinite().all()
            self.given = finite if self.given is None else self.given & finite
        return g

    def _made(self, g: Tensor) -> Tensor:
        if self.looks:
            bad = ~g.detach().isfinite().all()
            bad = bad if self.given is None else bad & self.given
            before = self.found.get(self.name)
            self.found[self.name] = bad if before is None else before | bad
        return g


class _Back(torch.autograd.Function):
    """The same value, whose cotangent is ``back`` of what comes."""

    @staticmethod
    def forward(ctx, x, back):  # type: ignore[override]
        ctx.back = back
        return x.detach()  # which may be changed in place

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return ctx.back(g), None
