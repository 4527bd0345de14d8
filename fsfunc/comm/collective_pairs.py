"""``collective``: a user's own collective, given with its transpose.

A user gives two functions of public collectives, each the transpose of the other; an
``autograd.Function`` runs the one forward, and the other as its derivative. A new row
of the table (see ``operations``) needs none of this, nor does a function whose
derivative is to be what autograd makes of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import current_label, label
from fsfunc.comm.mesh import Here, here, set_here
from fsfunc.sharded.inputs import check_function

Map: TypeAlias = Callable[[Tensor], Tensor]  # a linear function of one tensor


def collective(forward: Map, transpose: Map) -> Map:
    """Returns ``forward`` as a collective whose derivative is ``transpose``.

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
        # Of plain autograd `_Map.forward` finds out by its result.
        if _torch.functorch_active():
            _check_beside(forward)
            _check_beside(transpose)
        return _Map.apply(x, pair, here())

    return run


def _check_beside(fn: Map) -> None:
    """Raises if ``torch.func`` differentiates a tensor that ``fn`` closes over.

    Asked before the Function runs: inside of it the tensor's level cannot be seen.
    """
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the cell of a name not bound yet
            x = cell.cell_contents
            if isinstance(x, Tensor) and _torch.differentiation_level(x):
                break
    else:
        return
    raise ValueError(_BESIDE)  # not in the loop, where `suppress` would swallow it


_BESIDE = (
    "collective: a map reads another tensor than its argument that is differentiated, "
    "and has no derivative by it: use it before or after the collective, or detached"
)


@dataclass(frozen=True)
class _Pair:
    """A linear map and its transpose."""

    forward: Map
    transpose: Map

    def transposed(self) -> _Pair:
        return _Pair(self.transpose, self.forward)

    def vmapped(self) -> _Pair:
        return _Pair(torch.func.vmap(self.forward), torch.func.vmap(self.transpose))


class _Map(torch.autograd.Function):
    """The forward map of a pair, on the rank ``rank``."""

    @staticmethod
    def forward(x: Tensor, pair: _Pair, rank: Here) -> Tensor:  # type: ignore[override]
        detached = x.detach()
        # The rank is set again, as a backward pass may run outside of its context. With
        # gradients on, a result that requires one tells that the map read a parameter.
        # An inference tensor has no version.
        with set_here(rank), torch.enable_grad():
            version = 0 if x.is_inference() else detached._version
            y = pair.forward(detached)
        if y.requires_grad:
            raise ValueError(_BESIDE)
        if not x.is_inference() and detached._version != version:
            raise RuntimeError(
                "collective: a map changed the tensor that it was given in place, "
                "which others may still read; work on a copy"
            )
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.pair, ctx.rank = inputs
        ctx.unit = current_label()[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        with label(ctx.unit, "backward"):
            return _Map.apply(g, ctx.pair.transposed(), ctx.rank), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, _: None, __: None) -> Tensor:  # type: ignore[override]
        return _Map.apply(t, ctx.pair, ctx.rank)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: Any, x: Tensor, pair: _Pair, rank: Here
    ) -> tuple[Tensor, int]:
        return _Map.apply(x.movedim(in_dims[0], 0), pair.vmapped(), rank), 0
