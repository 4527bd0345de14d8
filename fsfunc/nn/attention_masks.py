"""The keys that a query sees: limits of distance, documents, and a mask.

What a query does not see scores ``NOTHING``: low enough to weigh nothing beside any
score, and finite, so that no derivative of a row of such has a NaN in it. A row that
sees no key of one block may see some of another; one that sees none at all is known by
its sum, and gives zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.nn.numerics import wide
from fsfunc.nn.sequence_order import Block, SequenceCut

NOTHING = -1e30  # within the range of fp32 and of bfloat16


class Visible(NamedTuple):
    """The keys of a block that its queries see.

    Args:
        least, most: query r sees key c where ``least <= r - c <= most``; None: any.
        rows, keys: [batch or 1, n], [batch or 1, m], the documents of both.
        mask: [batch or 1, heads or 1, n, m], truth values, or numbers to add to scores.
    """

    least: Any = None
    most: Any = None
    rows: Tensor | None = None
    keys: Tensor | None = None
    mask: Tensor | None = None

    @property
    def whole(self) -> bool:
        return all(x is None for x in self)

    @property
    def causal(self) -> bool:
        """True if query r sees keys 0 to r."""
        least, *others = self
        return least.__class__ is int and least == 0 and all(x is None for x in others)

    def at(self, rows: slice, keys: slice) -> Visible:
        """The same for some of the queries and some of the keys."""
        off = rows.start - keys.start
        return Visible(
            None if self.least is None else self.least - off,
            None if self.most is None else self.most - off,
            None if self.rows is None else self.rows[:, rows],
            None if self.keys is None else self.keys[:, keys],
            None if self.mask is None else self.mask[:, :, rows, keys],
        )

    def masked(self, scores: Tensor) -> Tensor:
        """Scores [batch, key heads, queries of one, n, m], less what is not seen."""
        *_, groups, n, m = scores.shape
        if self.least is not None or self.most is not None:
            at = torch.arange(max(n, m), device=scores.device)
            hidden = outside(at[:n, None] - at[:m], self.least, self.most)
            scores = scores.masked_fill(hidden, NOTHING)
        if self.rows is not None and self.keys is not None:
            hidden = self.rows[:, None, None, :, None] != self.keys[:, None, None, None]
            scores = scores.masked_fill(hidden, NOTHING)
        if self.mask is None:
            return scores
        each = 1 if self.mask.shape[1] == 1 else groups
        mask = self.mask.unflatten(1, (-1, each))
        if mask.dtype == torch.bool:
            return scores.masked_fill(~mask, NOTHING)
        return scores + mask.to(scores.dtype)


def outside(apart: Tensor, least: Any, most: Any) -> Tensor:
    """True at distances beyond the limits."""
    far = torch.zeros_like(apart, dtype=torch.bool)
    far = far if least is None else far | (apart < least)
    return far if most is None else far | (apart > most)


class Masks(NamedTuple):
    """The limits of a rank's queries beside distance; columns as the ranks hold keys.

    Args:
        documents: [batch or 1, S], of the positions of all ranks, in axis order.
        mask: [batch or 1, heads or 1, n or 1, S], of this rank's queries.
    """

    documents: Tensor | None = None
    mask: Tensor | None = None

    def seen(self, block: Block, step: int, index: Any, cut: SequenceCut) -> Visible:
        """The keys of a block that its queries see, ``index`` being this rank's."""
        rows = keys = mask = None
        source = (index - step) % cut.size * cut.parts + block.part
        if self.documents is not None:
            own = index * cut.parts + block.rows
            rows, keys = (
                _part(self.documents, 1, at, cut.size * cut.parts)
                for at in (own, source)
            )
        if self.mask is not None:
            mask = _part(self.mask, 2, block.rows, cut.parts)
            mask = _part(mask, 3, source, cut.size * cut.parts)
        return Visible(block.least, block.most, rows, keys, mask)

    def ready(self, index: Any, cut: SequenceCut) -> Masks:
        """With a mask of all rows; of numbers, each less the largest that its row sees.

        Softmax does not see that, but a row of which all keys have low numbers keeps
        its digits, and is not taken for one that sees nothing.
        """
        if self.mask is None:
            return self
        mask = self.mask.expand(-1, -1, cut.parts * cut.length, -1)
        if mask.dtype == torch.bool:
            return self._replace(mask=mask)
        mask = mask.to(wide(mask))
        if cut.left is not None or cut.right is not None:
            ranks = [_positions(rank, cut, mask) for rank in range(cut.size)]
            apart = _positions(index, cut, mask)[:, None] - torch.cat(ranks)
            least = None if cut.right is None else -cut.right
            mask = mask.masked_fill(outside(apart, least, cut.left), -torch.inf)
        if self.documents is not None:
            own = _part(self.documents, 1, index, cut.size)[:, None, :, None]
            mask = mask.masked_fill(own != self.documents[:, None, None], -torch.inf)
        top = mask.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0)
        return self._replace(mask=(mask - top).clamp(min=NOTHING))


def _positions(rank: Any, cut: SequenceCut, like: Tensor) -> Tensor:
    """Those of what a rank holds."""
    at = torch.arange(cut.length, device=like.device)
    places = [cut.place(rank, part) for part in range(cut.parts)]
    return torch.cat([at + place * cut.length for place in places])


def _part(x: Tensor, dim: int, at: Any, parts: int) -> Tensor:
    """One of so many equal parts along a dim; its number may be a tensor."""
    length = x.shape[dim] // parts
    if isinstance(at, int):
        return x.narrow(dim, at * length, length)
    where = at * length + torch.arange(length, device=x.device)
    return x.index_select(dim, where)
