"""Moments in 8 bits: decoded for an update, block by block, and encoded after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import composable
from fsfunc.optim.block_codes import BLOCK, Coder, chance
from fsfunc.optim.coded_steps import CodedStep, groups_of, stretches, zero_codes
from fsfunc.optim.element_rules import Codec, ElementRule, Scaled
from fsfunc.optim.in_place import Writing, count_write
from fsfunc.optim.leaves import Tree, check_width, local, paths_of, split, trainable
from fsfunc.optim.matching import update_of
from fsfunc.optim.optimizer import Phases, finished
from fsfunc.optim.places import room_like
from fsfunc.runtime.generators import mix
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import is_sharded


class Codes(NamedTuple):
    """Moments in 8 bits: by buffer, uint8 codes and float32 scales of their blocks."""

    codes: tuple[Any, ...]
    scales: tuple[Any, ...]


def is_coded(state: Any) -> bool:
    """True for a state with moments in 8 bits."""
    return isinstance(state, tuple) and hasattr(state, "coders")


def decoded(state: Any) -> Any:
    """A state with the moments themselves, in float32: what this rank holds of each."""
    count, *kept, places = state
    pairs = zip(kept, state.coders, strict=True)
    return type(state)(count, *(_decoded(x, coder) for x, coder in pairs), places)


def encoded(state: Any, wide: Any) -> Any:
    """Such moments as codes, which lie as those of ``state`` do."""
    count, *kept, places = state
    made = [
        _encoded(codes, x, coder, mix(count, k))
        for k, (codes, x, coder) in enumerate(
            zip(kept, wide[1:-1], state.coders, strict=True)
        )
    ]
    return type(state)(count, *made, places)


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


class Coded(Codec):
    """Moments in 8 bits, with a scale for each block of what one rank holds.

    Args:
        state: as a rule's, with how the parameters lay behind, and a coder for each
            moment in its class.
    """

    elementwise = False  # codes lie by buffer, and are stepped all at once

    def __init__(self, state: Callable[..., Any]):
        super().__init__()
        self.state = state

    def init(self, rule: ElementRule, params: Tree) -> Any:
        check_width(params, torch.uint8)
        leaves, treedef = tree.flatten(params, is_sharded)
        groups, places = groups_of(leaves, paths_of(treedef))

        def codes() -> Codes:
            return Codes(
                tuple(zero_codes(g, 1, torch.uint8) for g in groups),
                tuple(zero_codes(g, BLOCK, torch.float32) for g in groups),
            )

        return self.state(0, *(codes() for _ in range(rule.moments)), places)

    def phases(
        self, rule: ElementRule, grads: Tree, state: Any, params: Tree, adds: bool
    ) -> Phases:
        if not adds:
            rule.matched(grads, params, ())  # which checks that parameters are given
            like = grads if params is None else params
            start = tree.map(lambda x: _wide(x, rule), like, is_leaf=is_sharded)
            apply = lambda *args: finished(self.phases(rule, *args, True))  # noqa: E731
            done = update_of(apply, grads, state, start)
            yield
            return done
        matched = rule.matched(grads, params, ())
        if composable() or matched.differentiated:
            raise RuntimeError(
                f"{rule.name} with moments in 8 bits: this update is differentiated, "
                "and codes have no derivative: leave moment_dtype out"
            )
        groups, places = groups_of(matched.trees[0], paths_of(matched.treedef))
        if places != state.places:
            raise ValueError(
                f"{rule.name}: moments in 8 bits were made for parameters of other "
                "layouts. A scale is of a block of what one rank has, so they fit no "
                "other mesh, zero or units: make them by init(params) of parameters "
                "with these layouts (ff.init_state does), and load them there"
            )
        decays, count = rule.decays(matched), state.count
        kernel = rule.writer(count)
        yield
        writing = Writing(matched)
        with torch.no_grad():
            (new,) = writing.targets([matched.trees[0]])
            count_write(new.tensors)
            columns = [column for codes in state[1:-1] for column in codes]
            held = [(x, writing.target(list(x), split([x])[0]).leaves) for x in columns]
            cuts = stretches(matched, new, decays, groups)
            step = CodedStep(kernel, state.coders, count)
            for i, group in enumerate(groups):
                where = [(_flat(old[i]), _flat(to[i])) for old, to in held]
                step.write(i, group, cuts.get(i, []), where)
        writing.end()
        made = [tuple(to) for _, to in held]
        moments = [Codes(*made[k : k + 2]) for k in range(0, len(made), 2)]
        params = matched.restore(new.leaves, matched.trees[0])
        return params, self.state(count + 1, *moments, places)


def codec_of(
    dtype: torch.dtype | None,
    coded: Callable[..., Any],
    scaled: Callable[..., Any] | None = None,
) -> Codec:
    """The codec of a ``moment_dtype``; that of float16 has a scale where given."""
    if dtype == torch.uint8:
        return Coded(coded)
    if dtype == torch.float16 and scaled is not None:
        return Scaled(scaled)
    return Codec(dtype)


def _flat(leaf: Any) -> Tensor:
    return local(leaf).view(-1)


def _wide(leaf: Any, rule: ElementRule) -> Any:
    """A parameter in float32, or zeros in its place where none decays."""
    if not trainable(leaf):
        return leaf
    x = local(leaf).detach()
    wide = room_like(x, torch.float32)
    wide = wide.copy_(x) if rule.weight_decay else wide.zero_()
    return leaf.with_local(wide) if is_sharded(leaf) else wide
