"""Moments in 8 bits: decoded for an update, block by block, and encoded after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import composable, frame, inside
from fsfunc.optim.code_groups import groups_of, zero_codes
from fsfunc.optim.coded_steps import MEAN, SQUARE, Scratch, stretches, write_codes
from fsfunc.optim.in_place import count_write, overlap, targets
from fsfunc.optim.leaves import (
    Mask,
    Tree,
    along,
    local,
    paths_of,
    trainable,
)
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import Optimizer, check_params_given
from fsfunc.runtime.block_codes import BLOCK, Coder, chance
from fsfunc.runtime.generators import mix
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.donated import Donation, Everything
from fsfunc.sharded.leaf import is_sharded

__all__ = ["Codes", "CodedAdamState", "with_coded_moments"]


class Codes(NamedTuple):
    """Moments in 8 bits: by buffer, uint8 codes and float32 scales of their blocks."""

    codes: tuple[Any, ...]
    scales: tuple[Any, ...]


class CodedAdamState(NamedTuple):
    """An `AdamState` with moments in 8 bits.

    ``places`` tells how the parameters lay for which they were made: a block's scale
    is of what one rank holds side by side, so they fit no other mesh.
    """

    count: int
    mu: Codes
    nu: Codes
    places: int

    def decoded(self) -> CodedAdamState:
        """The moments themselves, in float32: tensors of what this rank holds."""
        mu, nu = _decoded(self.mu, MEAN), _decoded(self.nu, SQUARE)
        return self._replace(mu=mu, nu=nu)

    def encoded(self, wide: CodedAdamState) -> CodedAdamState:
        """Such moments as codes, which lie as these do."""
        mu = _encoded(self.mu, wide.mu, MEAN, mix(self.count, 0))
        nu = _encoded(self.nu, wide.nu, SQUARE, mix(self.count, 1))
        return self._replace(mu=mu, nu=nu)


def _decoded(kept: Codes, coder: Coder) -> Any:
    found = []
    for codes, scales in zip(*kept, strict=True):
        codes = _flat(codes)
        out, spare = codes.float(), codes.int()  # both are written over
        if codes.numel():
            coder.decode(codes, _flat(scales), out, spare)
        found.append(out)
    return tuple(found)


def _encoded(kept: Codes, wide: Any, coder: Coder, seed: int) -> Codes:
    made: tuple[list[Any], list[Any]] = [], []
    for codes, scales, x in zip(*kept, wide, strict=True):
        new = [space_of(t).empty_like(t) for t in map(local, (codes, scales))]
        if x.numel():
            dither, (code, scale) = chance(x.device, x.numel(), seed), map(_flat, new)
            coder.encode(x.clone(), code, scale, dither, torch.empty_like(dither))
        for column, old, t in zip(made, (codes, scales), new, strict=True):
            column.append(old.with_local(t) if is_sharded(old) else t)
    return Codes(*map(tuple, made))


@dataclass(frozen=True, eq=False)
class _Coded:
    """The functions of such an optimizer."""

    name: str
    kernel: Callable[[Any], Callable[..., None]]
    weight_decay: float
    mask: Mask | None

    def init(self, params: Tree) -> CodedAdamState:
        leaves, treedef = tree.flatten(params, is_sharded)
        groups, places = groups_of(leaves, paths_of(treedef))

        def codes() -> Codes:
            return Codes(
                tuple(zero_codes(g, 1, torch.uint8) for g in groups),
                tuple(zero_codes(g, BLOCK, torch.float32) for g in groups),
            )

        return CodedAdamState(0, codes(), codes(), places)

    def update(self, grads: Tree, state: CodedAdamState, params: Tree = None):
        like = grads if params is None else params
        if self.weight_decay:
            check_params_given(params, self.name)
        nothing = tree.map(_nothing, like, is_leaf=is_sharded)
        plain = _Coded(self.name, self.kernel, 0.0, None)
        with inside(_not_donated()):
            updates, after = plain.prepare(grads, state, nothing)()
        if self.weight_decay:
            matched = Matched.of(like, updates)
            rate = self.kernel(state).keywords["lr"]  # type: ignore[attr-defined]
            decays = matched.decays(self.weight_decay, self.mask)
            less = lambda p, u, decay: [u - rate * decay * p]  # noqa: E731
            (updates,) = matched.composed(less, decays)
        return _where_given(updates, grads, like), after

    def prepare(self, grads: Tree, state: CodedAdamState, params: Tree):
        matched = Matched.of(params, grads)
        if composable() or matched.differentiated:
            raise RuntimeError(
                f"{self.name} with moments in 8 bits: somebody differentiates this "
                "update, and codes have no derivative: leave moment_dtype out"
            )
        groups, places = groups_of(matched.trees[0], paths_of(matched.treedef))
        if places != state.places:
            raise ValueError(
                f"{self.name}: moments in 8 bits were made for parameters that lay in "
                "another way. A block's scale is of what one rank holds, so they fit "
                "no other mesh, zero or units: make them by init(params) of parameters "
                "laid out as these (ff.init_state does), and load them there"
            )
        decays = matched.decays(self.weight_decay, self.mask)
        donation = frame().donated
        if donation is not None and overlap(matched):
            donation = None
        kernel = self.kernel(state)

        def commit() -> tuple[Tree, CodedAdamState]:
            taken: tuple[list[Any], list[Any]] = [], []
            with torch.no_grad():
                (new,) = targets(matched, [matched.trees[0]], donation, taken)
                count_write(new.tensors)
                held = [_targets(x, donation, taken) for x in _columns(state)]
                cuts = stretches(matched, new, decays, groups)
                scratch = Scratch()
                for i, group in enumerate(groups):
                    where = [(_flat(old[i]), _flat(to[i])) for old, to in held]
                    mine, stream = cuts.get(i, []), (state.count, i)
                    write_codes(kernel, group, mine, where, stream, scratch)
            if donation is not None:
                donation.take(*taken)
            made = [tuple(to) for _, to in held]
            mu, nu = Codes(*made[:2]), Codes(*made[2:])
            after = CodedAdamState(state.count + 1, mu, nu, places)
            return matched.restore(new.leaves, matched.trees[0]), after

        return commit


def _columns(state: CodedAdamState) -> list[Sequence[Any]]:
    return [state.mu.codes, state.mu.scales, state.nu.codes, state.nu.scales]


def _flat(leaf: Any) -> Tensor:
    return local(leaf).view(-1)


def _targets(
    old: Sequence[Any],
    donation: Donation | None,
    taken: tuple[list[Any], list[Any]],
) -> tuple[Sequence[Any], list[Any]]:
    """Codes as they are, and those to write: over the same memory where it is ours."""
    tensors = [local(x) for x in old]
    if donation is None:
        mine = [False] * len(old)
    elif isinstance(donation, Everything):
        return old, list(old)
    else:
        donation.look()
        mine = donation.may_write(tensors)
    new = []
    for x, own in zip(old, mine, strict=True):
        if own:
            new.append(x.twin() if is_sharded(x) else x.detach())
            taken[0].append(x)
            taken[1].append(new[-1])
        else:
            fresh = space_of(local(x)).empty_like(local(x))
            new.append(x.with_local(fresh) if is_sharded(x) else fresh)
    return old, new


def _nothing(leaf: Any) -> Any:
    """Zeros in place of parameters: what a step adds to them is then the update."""
    if not trainable(leaf):
        return leaf
    zeros = torch.zeros_like(local(leaf), dtype=torch.float32)
    return leaf.with_local(zeros) if is_sharded(leaf) else zeros


def _not_donated() -> Any:
    return replace(frame(), donated=None)


def _where_given(updates: Tree, grads: Tree, like: Tree) -> Tree:
    """``updates`` of leaves that have a gradient, None for others."""
    leaves, treedef = tree.flatten(like, is_sharded)
    columns = [along(like, treedef, t, "gradients") for t in (updates, grads)]
    rows = zip(leaves, *columns, strict=True)
    return tree.unflatten(
        treedef, [u if g is not None and trainable(p) else None for p, u, g in rows]
    )


def with_coded_moments(
    name: str,
    kernel: Callable[[Any], Callable[..., None]],
    weight_decay: float,
    mask: Mask | None,
) -> Optimizer:
    """The optimizer of a kernel of Adam's kind, whose moments are kept in 8 bits.

    Args:
        kernel: ``kernel(state)(params, grads, mu, nu, weight_decay=)`` writes one step
            into lists of dense tensors; it has the rate as ``keywords["lr"]``.
        weight_decay, mask: which decay a leaf has.
    """
    made = _Coded(name, kernel, weight_decay, mask)
    return Optimizer(made.init, made.update, prepare=made.prepare)
