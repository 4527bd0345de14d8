"""Updates below the precision of parameters: master_weights, stochastic_rounding.

An update is often smaller than half the distance of two numbers of 16 bits, and is lost
where it is rounded to the nearest. So the optimizer within is given wide parameters:
`master_weights` keeps them, `stochastic_rounding` rounds them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.mesh import here
from fsfunc.core.frames import composable, frame, inside
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import (
    Tree,
    along,
    chosen,
    copied,
    local,
    map_flat,
    paths_of,
    trainable,
)
from fsfunc.optim.matching import Matched, unlike
from fsfunc.optim.optimizer import (
    Optimizer,
    Phases,
    Reading,
    State,
    apply_updates,
    begun,
    by_phases,
    described,
    finished,
)
from fsfunc.optim.places import copied_all_to, room_like
from fsfunc.optim.schedules import check_params_given
from fsfunc.runtime.generators import seed63
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.runtime.random_blocks import any_bits, draw
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.donated import Donation
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import take as slice_of

_NARROW = (torch.float16, torch.bfloat16)


class Narrow:
    """The leaves of a tree that are of 16 bits: found before they are written over."""

    def __init__(self, params: Tree):
        self.params = params
        leaves, self.treedef = tree.flatten(params, is_sharded)
        self.mask = [trainable(x) and x.dtype in _NARROW for x in leaves]

    def only(self, values: Tree) -> Tree:
        """``values`` where the parameters have 16 bits; None at the place of others."""
        return chosen(self.treedef, self.mask, values)

    def merged(self, values: Tree, narrow: Tree) -> Tree:
        """``narrow`` where the parameters have 16 bits, ``values`` elsewhere."""
        return chosen(self.treedef, self.mask, narrow, values)

    def where(self, given: Tree, values: Tree) -> Tree:
        """``values``, but None where nothing is ``given``."""
        there = [x is not None for x in along(self.treedef, given, "optimizer state")]
        return chosen(self.treedef, there, values)

    def floats(self) -> Tree:
        """Copies in float32 where the parameters have 16 bits; None elsewhere.

        They lie where the parameters do.
        """
        with torch.no_grad():
            low, wide = self.only(self.params), torch.float32
            return map_flat(lambda ts: [space_of(t).put(t, wide) for t in ts], low)


@dataclass(frozen=True, eq=False)
class Widened:
    """The functions of an optimizer around one that sees its parameters in float32."""

    optimizer: Optimizer

    called = ""
    state: ClassVar[Any] = None  # what they keep

    def functions(self) -> Optimizer:
        return by_phases(
            self.init,
            self.phases,
            interprets=self.interprets if self.optimizer.interprets else None,
            elementwise=self.optimizer.elementwise,
        )

    def init(self, params: Tree) -> Any:
        raise NotImplementedError

    def wide(self, state: Any, low: Narrow) -> Tree:
        """The parameters as the optimizer within sees them."""
        raise NotImplementedError

    def rounded(self, state: Any, wide: Tree) -> Tree:
        """Parameters of 16 bits as they shall be, or as copying rounds them."""
        return wide

    def after(self, state: Any, wide: Tree, inner: State) -> Any:
        raise NotImplementedError

    def phases(self, grads: Tree, state: Any, params: Tree, adds: bool) -> Phases:
        check_params_given(params, "an update of parameters of 16 bits")
        if type(state) is not self.state:
            raise unlike(self.called, state, self.state)
        low = Narrow(params)
        wide = self.wide(state, low)
        mine = low.only(params)
        # Both are matched, which checks that they fit, and neither is kept: the copies
        # may be written over where nobody else holds them.
        pairs = (params, grads), (mine, low.only(wide))
        graph = any([Matched.of(*pair).differentiated for pair in pairs])
        del pairs
        if adds and not graph:
            # In place, where nobody asks for a graph.
            within = frame().replace(donated=self.donation(low.only(wide)))
            with inside(within):
                step = begun(self.optimizer.phases(grads, state.inner, wide, True))
            yield
            with inside(within):
                new, inner = finished(step)
            copies = low.only(new)
            matched = Matched.of(mine, self.rounded(state, copies))
            (written,) = fused(matched, copied_all_to, cast=False)
            return low.merged(new, written), self.after(state, copies, inner)
        updates, inner = self.optimizer.update(grads, state.inner, wide)
        with inside(frame().replace(donated=None)):
            new = low.only(apply_updates(wide, updates))
        # In float32: the difference that the addition will round back to `new`.
        change = lambda p, n, _: [n.to(p.dtype).float() - p.float()]  # noqa: E731
        (change,) = Matched.of(mine, self.rounded(state, new)).composed(change)
        moved = low.merged(updates, low.where(updates, change))
        result = apply_updates(params, moved) if adds else moved
        yield
        return result, self.after(state, new, inner)

    def donation(self, wide: Tree) -> Donation | None:
        return frame().donated

    def interprets(self, state: Any) -> Reading:
        handlers, inner = self.optimizer.reading(state.inner)
        return Reading(handlers, replace(self, optimizer=inner).functions())


class MasterState(NamedTuple):
    """The parameters in float32, and what the optimizer within keeps.

    ``master`` is a tree like the parameters, in the same layout, with None for leaves
    that are not of 16 bits: these are their own masters. ``origins`` is the field of
    which a step makes the parameters, whatever they were.
    """

    master: Any
    inner: State

    origins = "master"


@described
def master_weights(optimizer: Optimizer) -> Optimizer:
    """``optimizer`` on float32 copies of float16 and bfloat16 parameters.

    The copies lie in its state, as the parameters lie, and it alone updates them; the
    parameters are these, rounded to the nearest. Leaves of other dtypes it updates as
    they are. What else is written into the parameters of 16 bits the next step undoes:
    it belongs into the copies too.

    Returns:
        the optimizer; its state is a `MasterState`. Gradients are of the parameters'
        dtype, or of any other.

    Raises:
        TreeMismatch: the copies do not fit the parameters; names the path.

    Cost: nothing is sent. 4 bytes a parameter of 16 bits on the rank: with
    `sharded_adam` 14 for parameter, copy and moments, and one pass that reads 4 and
    writes 2.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.1.

    >>> import torch
    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = master_weights(sgd(2.0**-10))
    >>> w, g = torch.ones(2, dtype=torch.bfloat16), torch.tensor([1.0, -1.0])
    >>> state = optimizer.init(w)
    >>> for _ in range(8):
    ...     w, state = optimizer.apply(g, state, w)
    >>> w, state.master
    (tensor([0.9922, 1.0078], dtype=torch.bfloat16), tensor([0.9922, 1.0078]))
    """
    return _Masters(optimizer).functions()


class _Masters(Widened):
    called, state = "master_weights", MasterState

    def init(self, params: Tree) -> MasterState:
        low = Narrow(params)
        master = copied(low.only(params), torch.float32)
        return MasterState(master, self.optimizer.init(low.merged(params, master)))

    def wide(self, state: MasterState, low: Narrow) -> Tree:
        return low.merged(low.params, state.master)

    def after(self, state: MasterState, wide: Tree, inner: State) -> MasterState:
        return MasterState(wide, inner)


class RoundingState(NamedTuple):
    """The count of rounded updates, and the inner state."""

    count: int
    inner: State

    rounds = True


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

    called, state = "stochastic_rounding", RoundingState

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
        packed = [x.packed for x in mine if is_sharded(x) and x.packed is not None]
        flats = {id(shard): shard.flat for shard in packed}
        if (given := frame().donated) is None:
            return Donation(flats.values(), mine)
        given.add([*flats.values(), *mine])
        return given

    def rounded(self, state: RoundingState, wide: Tree) -> Tree:
        out = map_flat(
            lambda ts: [room_like(t, torch.bfloat16).zero_() for t in ts], wide
        )
        leaves, treedef = tree.flatten(wide, is_sharded)
        places = zip(leaves, tree.leaves(out, is_sharded), strict=True)
        with torch.no_grad():
            for path, (leaf, target) in zip(paths_of(treedef), places, strict=True):
                stream = seed63(self.seed, zlib.crc32(path.encode())), state.count
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
        refuse_in_graph("parameters are rounded by chance")
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
