"""``collective``: a user's own collective, given with its transpose."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import current_label, label
from fsfunc.comm.mesh import Here, here, place_here
from fsfunc.sharded.inputs import check_function

Map = Callable[[Tensor], Tensor]


def collective(forward: Map, transpose: Map) -> Map:
    """``forward`` as a collective whose derivative is ``transpose``.

    A function of public collectives is differentiable without this. It is for another
    backward: one with fewer bytes, other steps, or a straight-through estimate.

    Args:
        forward: a linear function of one tensor, made of public collectives and torch
            operators (under ``vmap`` these are mapped).
        transpose: its transpose, a function from a cotangent of its output to one of
            its input: <y, forward(x)> = <transpose(y), x>, both summed over the ranks
            (values of type V). ``ff.testing.check_collective`` checks it.

    Returns:
        a function of one tensor, that works under autograd and ``torch.func``, nested
        in any way. Both maps run on the mesh on which it was called.

    Raises:
        ValueError: a map reads another tensor that is differentiated.
        RuntimeError: a map changes its input in place.

    Cost: that of ``forward``, and in a backward pass that of ``transpose``.

    >>> import torch, fsfunc as ff
    >>> half = lambda x: x.bfloat16()
    >>> total = ff.collective(  # exact, but its backward sends 16 bits
    ...     lambda x: ff.psum(x, "data", to="V"),
    ...     lambda g: ff.psum(half(g), "data", to="V").to(g.dtype))
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> with ff.ledger() as log:
    ...     grad = lambda: torch.func.grad(lambda x: total(x).sum())(torch.ones(4))
    ...     found = ff.spmd(grad, mesh)()
    >>> found[0], log.table()
    (tensor([2., 2., 2., 2.]), [('psum', 'data', 2, 24)])
    """
    check_function(forward, "collective")
    check_function(transpose, "collective")
    pair = _Pair(forward, transpose)

    @functools.wraps(forward)
    def run(x: Tensor) -> Tensor:
        if _torch.functorch_active():
            _check_beside(forward)
            _check_beside(transpose)
        return _Map.apply(x, pair, here())

    return run


def _check_beside(fn: Map) -> None:
    """Raises if ``torch.func`` differentiates a tensor that ``fn`` closes over.

    Inside the Function's forward its level could not be seen any more.
    """
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            x = cell.cell_contents
            if isinstance(x, Tensor) and _torch.differentiation_level(x):
                break
    else:
        return
    raise ValueError(_BESIDE)


_BESIDE = (
    "collective: a map reads another tensor than its argument that is differentiated, "
    "and has no derivative by it: use it before or after the collective, or detached"
)


@dataclass(frozen=True)
class _Pair:
    forward: Map
    transpose: Map

    def turned(self) -> _Pair:
        return _Pair(self.transpose, self.forward)

    def mapped(self) -> _Pair:
        return _Pair(torch.func.vmap(self.forward), torch.func.vmap(self.transpose))


class _Map(torch.autograd.Function):
    """The first map of a pair, on the rank ``at``."""

    @staticmethod
    def forward(x: Tensor, pair: _Pair, at: Here) -> Tensor:  # type: ignore[override]
        mine = x.detach()
        with place_here(at), torch.enable_grad():  # a backward pass may run anywhere
            version = 0 if x.is_inference() else mine._version
            y = pair.forward(mine)
        if y.requires_grad:
            raise ValueError(_BESIDE)
        if not x.is_inference() and mine._version != version:
            raise RuntimeError(
                "collective: a map changed the tensor that it was given in place, "
                "which others may still read; work on a copy"
            )
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.pair, ctx.at = inputs
        ctx.unit = current_label()[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        with label(ctx.unit, "backward"):
            return _Map.apply(g, ctx.pair.turned(), ctx.at), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, _: Any, __: Any) -> Any:  # type: ignore[override]
        return _Map.apply(t, ctx.pair, ctx.at)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, pair: _Pair, at: Here) -> Any:
        return _Map.apply(x.movedim(in_dims[0], 0), pair.mapped(), at), 0
