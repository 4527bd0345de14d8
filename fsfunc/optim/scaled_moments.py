"""Moments in float16, which hold only what a scale brings into their range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc.optim.element_rules import (
    Codec,
    Commit,
    ElementRule,
    Equation,
    Kernel,
    chunks,
)
from fsfunc.optim.leaves import Tree, chosen, map_flat
from fsfunc.optim.matching import Matched
from fsfunc.optim.norms import all_finite, holds
from fsfunc.sharded.leaf import is_sharded

_LARGEST, _INTERVAL = 2.0**16, 2000
_LIMIT = torch.finfo(torch.float16).max


class Scaled(Codec):
    """Moments kept in float16, times a scale that ranks share.

    Moments that would overflow on one rank are set to 0 on all, after the step, and the
    scale is halved; after 2000 good steps it doubles again, up to 2^16.

    Args:
        state: as a rule's, with the scale and the steps since it last changed behind.

    Raises:
        RuntimeError: moments overflow at a scale of 1; on every rank, the state as it
            was.

    Cost: the equation once more, one pmax of one number over the mesh, and one wait for
    it.

    Source: FairScale 0.4.13, ``Adam(precision=Precision.PURE_FP16)``.
    """

    elementwise = False  # one scale for all

    def __init__(self, state: Callable[..., Any]):
        super().__init__(torch.float16)
        self.state = state

    def init(self, rule: ElementRule, params: Tree) -> Any:
        return self.state(*super().init(rule, params), _LARGEST, 0)

    def update(
        self, rule: ElementRule, grads: Tree, state: Any, params: Tree = None
    ) -> tuple[Tree, Any]:
        matched = rule.matched(grads, params, state[1 : 1 + rule.moments])
        scaled, scale, lost = self._chosen(rule, matched, state)
        updates, after = super().update(scaled, grads, state, params)
        return updates, self._after(matched, state, after, scale, lost)

    def prepare(
        self, rule: ElementRule, grads: Tree, state: Any, params: Tree
    ) -> Commit:
        matched = rule.matched(grads, params, state[1 : 1 + rule.moments])
        scaled, scale, lost = self._chosen(rule, matched, state)
        commit = super().prepare(scaled, grads, state, params)

        def finish() -> tuple[Tree, Any]:
            params, after = commit()
            return params, self._after(matched, state, after, scale, lost)

        return finish

    def _after(
        self, matched: Matched, state: Any, after: Any, scale: float, lost: bool
    ) -> Any:
        if not lost:
            good = 0 if scale != state.scale else state.good_steps + 1
            return self.state(*after, scale, good)
        count, *moments = after
        if any(_resting(matched)):  # what has no gradient stands for what it did
            moments = [_halved(matched, m) for m in moments]
        return self.state(count, *moments, scale, 0)

    def _chosen(
        self, rule: ElementRule, matched: Matched, state: Any
    ) -> tuple[ElementRule, float, bool]:
        """The step that all ranks agree on, its scale, and whether moments are lost."""
        largest, scale = _largest(rule, matched, state), state.scale
        more = state.good_steps + 1 >= _INTERVAL and scale < _LARGEST
        more = more and not any(_resting(matched))
        if more and _fit(matched, largest, scale * 2):
            return _scaled(rule, state.scale, scale * 2), scale * 2, False
        if _fit(matched, largest, scale):
            return _scaled(rule, state.scale, scale), scale, False
        if scale / 2 < 1:
            raise RuntimeError(
                f"float16 moments overflow at a scale of {scale:g}, and 1 is the "
                "least: gradients are not finite, or too large for float16; the state "
                "is as it was. Clip them, or give moment_dtype=torch.bfloat16"
            )
        return _scaled(rule, state.scale, 0.0), scale / 2, True


def _resting(matched: Matched) -> list[bool]:
    """By leaf, true for moments of a parameter that has no gradient in this step."""
    active, moments = set(matched.active), matched.trees[2]
    return [m is not None and i not in active for i, m in enumerate(moments)]


def _halved(matched: Matched, moments: Tree) -> Tree:
    """``moments``, those that rest halved."""
    resting = _resting(matched)
    rest = chosen(matched.treedef, resting, moments)
    halved = map_flat(lambda tensors: [t / 2 for t in tensors], rest)
    return chosen(matched.treedef, resting, halved, moments)


def _scaled(rule: ElementRule, old: float, new: float) -> ElementRule:
    """The rule of moments that are kept times a scale; 0 forgets them."""

    def equation(count: Any) -> Equation:
        plain = rule.equation(count)

        def step(p: Tensor, g: Tensor, *rest: Any) -> list[Any]:
            *moments, decay = rest
            p, g, *moments = (_wide(x) for x in (p, g, *moments))
            u, *made = plain(p, g, *(m / old for m in moments), decay)
            if new == 1:
                return [u, *made]
            return [u, *(m * new if new else torch.zeros_like(m) for m in made)]

        return step

    def kernel(count: Any) -> Kernel:
        write = rule.writer(count)

        def scaled(*columns: Sequence[Tensor], weight_decay: float) -> None:
            for row in zip(*columns, strict=True):
                for piece in chunks(row):
                    wide = [_wide(x) for x in piece]
                    torch._foreach_div_(wide[2:], old)
                    write(*([x] for x in wide), weight_decay=weight_decay)
                    for x in wide[2:]:
                        x.mul_(new) if new else x.zero_()
                    for x, made in zip(piece, wide, strict=True):
                        if x is not made and x is not piece[1]:
                            x.copy_(made)

        return scaled

    return replace(rule, equation=equation, kernel=kernel)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _largest(rule: ElementRule, matched: Matched, state: Any) -> list[Tensor]:
    """By flat tensor, the largest magnitude of the next moments: [1]."""
    step = _scaled(rule, state.scale, 1.0).equation(state.count)
    columns = [b.tensors for b in matched.buffers]
    with torch.no_grad():
        return [
            _most(row, step, decay)
            for *row, decay in zip(
                *columns, matched.spread(rule.decays(matched)), strict=True
            )
        ]


def _most(row: Sequence[Tensor], step: Equation, decay: Any) -> Tensor:
    p = row[0]
    most = torch.zeros(1, dtype=torch.float32, device=p.device)
    if not p.numel():
        return most
    if isinstance(decay, Tensor):
        pieces = [(row, decay)]
    else:
        pieces = [(piece, decay) for piece in chunks(row)]
    for piece, by in pieces:
        for m in step(*piece, by)[1:]:
            low, high = torch.aminmax(m)  # of a NaN both are
            most = torch.maximum(most, torch.maximum(-low, high).float())
    return most


def _fit(matched: Matched, largest: Sequence[Tensor], scale: float) -> bool:
    """True if the next moments, times ``scale``, fit float16 on every rank."""
    leaves = [matched.trees[0][matched.active[k[0]]] for k in matched.members]
    flags = [
        torch.where(most * scale < _LIMIT, torch.zeros_like(most), torch.inf)
        for most in largest
    ]
    pairs = zip(leaves, flags, strict=True)
    found = [x.with_local(f) if is_sharded(x) else f for x, f in pairs]
    return holds(all_finite(found))
