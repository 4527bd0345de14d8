"""Stochastic rounding of bfloat16 parameters, without float32 copies."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.mesh import here
from fsfunc.core.frames import composable, frame
from fsfunc.optim.leaves import Tree, local, map_flat, paths_of, trainable
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import Optimizer, State, described
from fsfunc.optim.widening import Narrow, Widened
from fsfunc.runtime.generators import mix
from fsfunc.runtime.random_blocks import any_bits, draw
from fsfunc.sharded.donated import Donation
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import take as slice_of

__all__ = ["RoundingState", "stochastic_rounding"]


class RoundingState(NamedTuple):
    """The count of rounded updates, and the inner state."""

    count: int
    inner: State


@described
def stochastic_rounding(optimizer: Optimizer, *, seed: int = 0) -> Optimizer:
    """``optimizer`` on bfloat16 parameters, which are rounded stochastically.

    A parameter becomes one of its two neighbours in bfloat16, the nearer one the more
    likely, so that in the mean it is what float32 would hold, and no copy is kept. What
    is drawn follows from ``seed``, the count of updates and the place of an element in
    its leaf: ranks that hold the same element round it alike, whatever the mesh, and a
    resumed run goes on with the same bits.

    Args:
        optimizer: sees parameters in float32; so its moments are float32, unless it has
            a dtype of its own for them.
        seed: of the draws.

    Returns:
        the optimizer; its state is a `RoundingState`.

    Raises:
        TypeError: a float16 leaf: what `master_weights` is for.
        RuntimeError: an update that is differentiated: a draw has no derivative.

    Cost: nothing is sent. Nothing is kept; for the time of an update 4 bytes a
    parameter on the rank for the wide ones, and 2 for the rounded; 16 random bits an
    element, of which whole blocks of 131072 elements of a leaf are drawn.

    Source: Gupta et al., Deep Learning with Limited Numerical Precision, 2015.

    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = stochastic_rounding(sgd(2.0**-10))
    >>> w, g = torch.ones(2000, dtype=torch.bfloat16), torch.full((2000,), -1.0)
    >>> state = optimizer.init(w)
    >>> for _ in range(8):
    ...     w, state = optimizer.apply(g, state, w)
    >>> abs(w.float().mean() - (1 + 8 * 2.0**-10)) < 1e-3
    tensor(True)
    """
    return _Rounded(optimizer, int(seed)).functions()


@dataclass(frozen=True, eq=False)
class _Rounded(Widened):
    seed: int

    def init(self, params: Tree) -> RoundingState:
        leaves, treedef = tree.flatten(params, is_sharded)
        for path, leaf in zip(paths_of(treedef), leaves, strict=True):
            if trainable(leaf) and leaf.dtype == torch.float16:
                raise TypeError(
                    f"{path!r} is float16, and stochastic_rounding takes bfloat16: "
                    "give ff.master_weights(optimizer)"
                )
        low = Narrow(params)
        return RoundingState(0, self.optimizer.init(low.merged(params, low.floats())))

    def wide(self, state: RoundingState, low: Narrow) -> Tree:
        if composable() or Matched.of(low.params, low.params).differentiated:
            raise RuntimeError(
                "stochastic_rounding of parameters that are differentiated: a "
                "draw has no derivative: give ff.master_weights(optimizer)"
            )
        return low.merged(low.params, low.floats())

    def donation(self, wide: Tree) -> Donation | None:
        """The float32 copies are temporary, so the optimizer may write into them."""
        mine = tree.leaves(wide, is_sharded)
        flats = {id(x.packed): x.packed.flat for x in mine if _lies_packed(x)}
        if (given := frame().donated) is None:
            return Donation(flats.values(), mine)
        given.add([*flats.values(), *mine])
        return given

    def rounded(self, state: RoundingState, wide: Tree) -> Tree:
        out = map_flat(
            lambda ts: [torch.zeros_like(t, dtype=torch.bfloat16) for t in ts], wide
        )
        leaves, treedef = tree.flatten(wide, is_sharded)
        places = zip(leaves, tree.leaves(out, is_sharded), strict=True)
        with torch.no_grad():
            for path, (leaf, target) in zip(paths_of(treedef), places, strict=True):
                stream = mix(self.seed, zlib.crc32(path.encode())), state.count
                _round_by_chance(leaf, local(target), stream)
        return out

    def after(self, state: RoundingState, wide: Tree, inner: State) -> RoundingState:
        return RoundingState(state.count + 1, inner)


def _round_by_chance(leaf: Any, target: Tensor, stream: tuple[int, int]) -> None:
    """Writes a float32 leaf into ``target``: below what is cut off chance is added."""
    x = local(leaf).contiguous()
    chance = _drawn(leaf, x, stream).view(x.shape)
    bits = x.view(torch.int32) + chance  # from -2^15 to 2^15 - 1
    bits.add_(1 << 15).bitwise_and_(-1 << 16)
    target.copy_(torch.where(x.isnan(), x, bits.view(torch.float32)))


def _drawn(leaf: Any, x: Tensor, stream: tuple[int, int]) -> Tensor:
    """16 random bits for each element of this rank's part, by its place in the leaf."""
    made = torch.empty(x.numel(), dtype=torch.int16, device=x.device)
    if x.is_meta or _torch.fake_active() or isinstance(x, _torch.FakeTensor):
        return made
    if not is_sharded(leaf):
        draw(any_bits(), stream, made, 0, made.numel())
    elif leaf.layout.splits:  # a block is no range of the leaf
        full = made.new_empty(leaf.shape)
        draw(any_bits(), stream, full.view(-1), 0, full.numel())
        at = here().mesh.coordinates()
        made.copy_(slice_of(full, leaf.layout, at).reshape(-1))
    else:
        axes = leaf.layout.axes
        start = leaf.layout.span(here().mesh.coordinates())[0] if axes else 0
        draw(any_bits(), stream, made, start, leaf.numel())
    return made


def _lies_packed(leaf: Any) -> bool:
    return is_sharded(leaf) and leaf.packed is not None
