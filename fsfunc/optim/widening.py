"""Updates below the precision of parameters: master_weights, stochastic_rounding.

An update is often smaller than half the distance of two numbers of 16 bits, and lost if
the sum is rounded to the nearest. So the optimizer within is given float32 parameters.
`master_weights` stores them in its state. `stochastic_rounding` makes them for the
step, and rounds the new ones up or down at random.
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
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import (
    Tree,
    flatten_like,
    local_tensor,
    map_flat,
    paths_of,
    select_leaves,
    trainable,
    trainable_copy,
)
from fsfunc.optim.matching import Matched, wrong_state_error
from fsfunc.optim.optimizer import (
    GradientScope,
    Optimizer,
    Phases,
    State,
    apply_updates,
    begin_step,
    finish_step,
    from_phases,
    optimizer_factory,
)
from fsfunc.optim.places import copy_all_to, step_memory_like
from fsfunc.optim.schedules import check_params_given
from fsfunc.runtime.generators import seed63
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.runtime.random_blocks import any_bits, draw
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.donated import Donation
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import take as slice_of
from fsfunc.tree.types import Leaf, PyTree

_NARROW_DTYPES = (torch.float16, torch.bfloat16)


class NarrowLeaves:
    """Which leaves of a tree have 16 bits; made before these are written over."""

    treedef: tree.TreeDef

    def __init__(self, params: Tree):
        self.params = params
        leaves, self.treedef = tree.flatten(params, is_sharded)
        self.mask: list[bool] = [
            trainable(x) and x.dtype in _NARROW_DTYPES for x in leaves
        ]

    def only(self, values: Tree) -> Tree:
        """Returns ``values`` where the parameters have 16 bits, and None elsewhere."""
        return select_leaves(self.treedef, self.mask, values)

    def merge(self, values: Tree, narrow: Tree) -> Tree:
        """Returns ``narrow`` where parameters have 16 bits, else ``values``."""
        return select_leaves(self.treedef, self.mask, narrow, values)

    def where_given(self, given: Tree, values: Tree) -> Tree:
        """Returns ``values``, with None where ``given`` is None."""
        leaves = flatten_like(self.treedef, given, "optimizer state")
        return select_leaves(self.treedef, [x is not None for x in leaves], values)

    def float_copies(self) -> Tree:
        """Returns float32 copies where parameters have 16 bits, and None elsewhere.

        They lie in the memory space of the parameters.
        """
        with torch.no_grad():
            narrow, wide = self.only(self.params), torch.float32
            return map_flat(lambda ts: [space_of(t).put(t, wide) for t in ts], narrow)


@dataclass(frozen=True, eq=False)
class WidenedOptimizer:
    """The functions of an optimizer around one that sees its parameters in float32."""

    optimizer: Optimizer

    called = ""
    state: ClassVar[Any] = None  # the class of its states

    def make_optimizer(self) -> Optimizer:
        return from_phases(
            self.init,
            self.phases,
            interprets=self.interprets if self.optimizer.interprets else None,
            elementwise=self.optimizer.elementwise,
        )

    def init(self, params: Tree) -> State:
        raise NotImplementedError

    def widen(self, state: State, narrow: NarrowLeaves) -> Tree:
        """Returns the parameters as the optimizer within sees them, in float32."""
        raise NotImplementedError

    def round(self, state: State, wide: Tree) -> Tree:
        """Rounds new float32 parameters to 16 bits.

        Or returns them as they are, if a copy to 16 bits rounds them as they should be.
        """
        return wide

    def next_state(self, state: State, wide: Tree, inner: State) -> State:
        """Returns the state after a step.

        Args:
            wide: the new float32 parameters, before they are rounded.
            inner: the next state of the optimizer within.
        """
        raise NotImplementedError

    def phases(
        self, grads: Tree, state: State, params: Tree, returns_params: bool
    ) -> Phases:
        check_params_given(params, "an update of parameters of 16 bits")
        if type(state) is not self.state:
            raise wrong_state_error(self.called, state, self.state)
        narrow = NarrowLeaves(params)
        wide = self.widen(state, narrow)
        narrow_params = narrow.only(params)
        # Both are matched, which checks that they fit. Neither is stored: the copies
        # are written over only where nothing else uses their memory.
        pairs = (params, grads), (narrow_params, narrow.only(wide))
        is_differentiated = any([Matched.of(*pair).differentiated for pair in pairs])
        del pairs
        if returns_params and not is_differentiated:
            inner_frame = frame().replace(donated=self.donation(narrow.only(wide)))
            # No ``with`` is open at the ``yield``: others run their phases there.
            with inside(inner_frame):
                step = begin_step(self.optimizer.phases(grads, state.inner, wide, True))
            yield
            with inside(inner_frame):
                new_wide, inner = finish_step(step)
            copies = narrow.only(new_wide)
            matched = Matched.of(narrow_params, self.round(state, copies))
            (written,) = run_kernel(matched, copy_all_to, cast=False)
            new_params = narrow.merge(new_wide, written)
            return new_params, self.next_state(state, copies, inner)
        updates, inner = self.optimizer.update(grads, state.inner, wide)
        with inside(frame().replace(donated=None)):
            copies = narrow.only(apply_updates(wide, updates))
        # In float32: the difference that the addition will round back to these.
        difference = lambda p, n, _: [n.to(p.dtype).float() - p.float()]  # noqa: E731
        (differences,) = Matched.of(narrow_params, self.round(state, copies)).map_rule(
            difference
        )
        updates = narrow.merge(updates, narrow.where_given(updates, differences))
        new_tree = apply_updates(params, updates) if returns_params else updates
        yield
        return new_tree, self.next_state(state, copies, inner)

    def donation(self, wide: Tree) -> Donation | None:
        """Returns what the optimizer within may write over: the state's own memory."""
        return frame().donated

    def interprets(self, state: State) -> GradientScope:
        handlers, inner = self.optimizer.gradient_scope(state.inner)
        return GradientScope(handlers, replace(self, optimizer=inner).make_optimizer())


class MasterState(NamedTuple):
    """The parameters in float32, and the state of the optimizer within.

    ``master`` is a tree like the parameters, in the same layout, with None for leaves
    that are not of 16 bits: these are their own masters. ``origins`` names the field
    that a step makes the parameters from, whatever they were: see `leaves.origins`.
    """

    master: PyTree
    inner: State

    origins = "master"


@optimizer_factory
def master_weights(optimizer: Optimizer) -> Optimizer:
    """Runs ``optimizer`` on float32 copies of float16 and bfloat16 parameters.

    The copies lie in its state, laid out as the parameters. The optimizer updates the
    copies alone; the parameters are the copies, rounded to the nearest. Leaves of other
    dtypes are updated as they are. Whatever else is written into parameters of 16 bits
    must be written into the copies too: the next step overwrites the parameters.

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
    return _MasterWeights(optimizer).make_optimizer()


class _MasterWeights(WidenedOptimizer):
    called, state = "master_weights", MasterState

    def init(self, params: Tree) -> MasterState:
        narrow = NarrowLeaves(params)
        master = trainable_copy(narrow.only(params), torch.float32)
        return MasterState(master, self.optimizer.init(narrow.merge(params, master)))

    def widen(self, state: MasterState, narrow: NarrowLeaves) -> Tree:
        return narrow.merge(narrow.params, state.master)

    def next_state(self, state: MasterState, wide: Tree, inner: State) -> MasterState:
        return MasterState(wide, inner)


class RoundingState(NamedTuple):
    """The count of rounded updates, and the inner state.

    ``rounds`` marks it for `leaves.check_follows_no_params`.
    """

    count: int
    inner: State

    rounds = True


@optimizer_factory
def stochastic_rounding(optimizer: Optimizer, *, seed: int = 0) -> Optimizer:
    """Runs ``optimizer`` on bfloat16 parameters, rounding them stochastically.

    A new parameter becomes one of its two neighbours in bfloat16, the nearer one with
    the larger probability. So in the mean it is what float32 would hold, and no copy is
    stored. The random bits follow from ``seed``, the count of updates and the place of
    an element in its leaf: ranks that hold the same element round it alike, whatever
    the mesh, and a resumed run goes on with the same bits.

    Args:
        optimizer: sees parameters in float32; so its moments are float32, unless it has
            a dtype of its own for them.
        seed: of the draws.

    Returns:
        the optimizer; its state is a `RoundingState`.

    Raises:
        TypeError: a float16 leaf: what `master_weights` is for.
        RuntimeError: an update that is differentiated: a draw has no derivative.

    Cost: nothing is sent or stored; for the time of an update 4 bytes a
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
    return _StochasticRounding(optimizer, int(seed)).make_optimizer()


@dataclass(frozen=True, eq=False)
class _StochasticRounding(WidenedOptimizer):
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
        narrow = NarrowLeaves(params)
        wide = narrow.merge(params, narrow.float_copies())
        return RoundingState(0, self.optimizer.init(wide))

    def widen(self, state: RoundingState, narrow: NarrowLeaves) -> Tree:
        if composable() or Matched.of(narrow.params, narrow.params).differentiated:
            raise RuntimeError(
                "stochastic_rounding of parameters that are differentiated: a "
                "draw has no derivative: give ff.master_weights(optimizer)"
            )
        return narrow.merge(narrow.params, narrow.float_copies())

    def donation(self, wide: Tree) -> Donation | None:
        """Adds the float32 copies, which are temporary: they may be written over."""
        copies = tree.leaves(wide, is_sharded)
        packed = [x.packed for x in copies if is_sharded(x) and x.packed is not None]
        flats = {id(shard): shard.flat for shard in packed}
        if (donation := frame().donated) is None:
            return Donation(flats.values(), copies)
        donation.add([*flats.values(), *copies])
        return donation

    def round(self, state: RoundingState, wide: Tree) -> Tree:
        rounded = map_flat(
            lambda ts: [step_memory_like(t, torch.bfloat16).zero_() for t in ts], wide
        )
        leaves, treedef = tree.flatten(wide, is_sharded)
        pairs = zip(leaves, tree.leaves(rounded, is_sharded), strict=True)
        with torch.no_grad():
            for path, (leaf, target) in zip(paths_of(treedef), pairs, strict=True):
                # By path and count: a resumed run draws the same, leaves do not.
                stream = seed63(self.seed, zlib.crc32(path.encode())), state.count
                _round_stochastically(leaf, local_tensor(target), stream)
        return rounded

    def next_state(
        self, state: RoundingState, wide: Tree, inner: State
    ) -> RoundingState:
        return RoundingState(state.count + 1, inner)


def _round_stochastically(leaf: Leaf, target: Tensor, stream: tuple[int, int]) -> None:
    """Writes a float32 leaf into ``target``, rounded up or down to bfloat16 at random.

    A bfloat16 is the upper half of a float32's bits. A random number below 2^16 is
    added to the bits, and the lower half is cut off. The sum carries into the upper
    half with the probability (lower half) / 2^16.
    """
    x = local_tensor(leaf).contiguous()
    random = _random_bits(leaf, x, stream).view(x.shape)
    bits = x.view(torch.int32) + random  # an int16: from -2^15 to 2^15 - 1
    bits.add_(1 << 15).bitwise_and_(-1 << 16)
    target.copy_(torch.where(x.isnan(), x, bits.view(torch.float32)))


def _random_bits(leaf: Leaf, x: Tensor, stream: tuple[int, int]) -> Tensor:
    """Draws 16 bits for each element of this rank's part, by its place in the leaf.

    So ranks that hold the same element draw the same bits, whatever the mesh.
    """
    bits = torch.empty(x.numel(), dtype=torch.int16, device=x.device)
    if x.is_meta or _torch.fake_active() or isinstance(x, _torch.FakeTensor):
        refuse_in_graph("parameters are rounded by chance")
        return bits
    if not is_sharded(leaf):
        draw(any_bits(), stream, bits, 0, bits.numel())
    elif leaf.layout.splits:  # a block is no range of the leaf: all of it is drawn
        full = bits.new_empty(leaf.shape)
        draw(any_bits(), stream, full.view(-1), 0, full.numel())
        coordinates = here().mesh.coordinates()
        bits.copy_(slice_of(full, leaf.layout, coordinates).reshape(-1))
    else:
        axes = leaf.layout.axes
        start = leaf.layout.span(here().mesh.coordinates())[0] if axes else 0
        draw(any_bits(), stream, bits, start, leaf.numel())
    return bits
