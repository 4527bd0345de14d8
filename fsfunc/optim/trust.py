"""Trust ratios: each leaf's update at the scale of the leaf, whatever its layout.

What `lamb` and `lars` share. The norms of all leaves, of parameters and of updates,
are reduced at once: one psum over each set of axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from typing import Any

import torch
from torch import Tensor

from fsfunc.optim.arguments import check_not_negative, check_params_given
from fsfunc.optim.leaves import Mask, Tree, local, paths_of
from fsfunc.optim.matching import Matched
from fsfunc.optim.norms import Row, row_norms, rows_of
from fsfunc.optim.optimizer import Optimizer, State, described
from fsfunc.optim.reductions import into_parts
from fsfunc.sharded.leaf import is_sharded


@described
def scale_by_trust_ratio(
    min_norm: float = 0.0,
    trust_coefficient: float = 1.0,
    eps: float = 0.0,
    *,
    mask: Mask | None = None,
) -> Optimizer:
    """The transformation that scales each leaf's update by its trust ratio.

    Of a leaf p with update u, as optax does it::

        u trust_coefficient |p| / (|u| + eps)       u itself where a norm is 0

    Args:
        min_norm: what norms below count as.
        trust_coefficient: above 0.
        eps: added to the norm of the update.
        mask: ``mask(path, leaf)`` says which leaves are scaled; all are without it.

    Raises:
        ValueError: a negative number, or an update without ``params``.

    Cost: one psum over each distinct set of axes in the layouts, of two numbers for
    each leaf there; one fresh copy of the updates.

    Source: You et al., Large Batch Training of Convolutional Networks, section 4.

    >>> trust = scale_by_trust_ratio()
    >>> params = {"w": torch.tensor([6.0, 8.0]), "b": torch.zeros(1)}
    >>> updates = {"w": torch.tensor([0.0, 2.0]), "b": torch.ones(1)}
    >>> trust.update(updates, (), params)[0]
    {'w': tensor([ 0., 10.]), 'b': tensor([1.])}
    """
    trust = Trust(min_norm, trust_coefficient, eps, mask)

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        return trust.scaled(grads, params), state

    return Optimizer(lambda params: (), update)


@dataclass(frozen=True)
class Trust:
    """The formula of trust ratios; see `scale_by_trust_ratio`."""

    min_norm: float = 0.0
    coefficient: float = 1.0
    eps: float = 0.0
    mask: Mask | None = None

    def __post_init__(self) -> None:
        check_not_negative(
            min_norm=self.min_norm, trust_coefficient=self.coefficient, eps=self.eps
        )

    def ratios(self, matched: Matched, updates: Iterator[Row]) -> list[Tensor]:
        """By flat tensor of ``matched``, 1-D, the ratio of each of its leaves.

        ``updates`` are made as they are asked for: only their norms are kept.
        """
        count = len(matched.members)
        rows = joined(_rows(matched, 0), updates)
        norms = [n.clamp(min=self.min_norm) for n in row_norms(rows)]
        adapted = self._adapted(matched)
        out = []
        pairs = zip(norms[:count], norms[count:], matched.members, strict=True)
        for of_params, of_updates, members in pairs:
            usable = (of_params != 0) & (of_updates != 0)
            safe = torch.where(usable, of_updates, 1) + self.eps
            ratio = torch.where(usable, self.coefficient * of_params / safe, 1)
            if not all(adapted[j] for j in members):
                which = [adapted[j] for j in members]
                ratio = torch.where(torch.tensor(which, device=ratio.device), ratio, 1)
            out.append(ratio)
        return out

    def _adapted(self, matched: Matched) -> list[bool]:
        if self.mask is None:
            return [True] * len(matched.active)
        paths, leaves = paths_of(matched.treedef), matched.trees[0]
        return [self.mask(paths[i], leaves[i]) for i in matched.active]

    def scaled(
        self, updates: Tree, params: Tree, rate: Any = 1, own: bool = False
    ) -> Tree:
        """Updates times their ratios and ``rate``.

        own: whether ``updates`` may be written over.
        """
        check_params_given(params, "a trust ratio")
        matched = Matched.of(params, updates)
        ratios = [rate * r for r in self.ratios(matched, _rows(matched, 1))]
        nothing = [None] * len(matched.trees[0])
        buffers = matched.buffers[1]
        if matched.differentiated:
            return matched.restore(_times(matched, ratios), nothing)
        flats = buffers.tensors
        if not own:
            flats = [t.clone(memory_format=torch.contiguous_format) for t in flats]
        with torch.no_grad():
            for flat, (_, packed), ratio in zip(
                flats, buffers.groups, ratios, strict=True
            ):
                if packed is None:
                    flat.mul_(ratio[0].to(flat.dtype))
                    continue
                parts = [flat[a:b] for a, b in packed.ranges]
                torch._foreach_mul_(parts, list(ratio.to(flat.dtype).unbind()))
        return matched.restore(buffers.rebuild(flats), nothing)


def _rows(matched: Matched, column: int) -> Iterator[Row]:
    leaves = [matched.trees[column][i] for i in matched.active]
    return rows_of(leaves, matched.buffers[column])


def _times(matched: Matched, ratios: Sequence[Tensor]) -> list[Any]:
    """Leaves times their ratios, by operations that differentiate."""
    out: list[Any] = [None] * len(matched.active)
    for ratio, members in zip(ratios, matched.members, strict=True):
        for j, factor in zip(members, ratio.unbind(), strict=True):
            leaf = matched.trees[1][matched.active[j]]
            x = local(leaf)
            if is_sharded(leaf):
                factor = into_parts(factor, leaf.layout.axes)
                out[j] = leaf.with_local(x * factor.to(x.dtype))
            else:
                out[j] = x * factor.to(x.dtype)
    return out
