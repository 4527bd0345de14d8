"""Which keys a query sees: limits of distance, documents, and a mask.

Both forms of attention (``context_parallel.py``) compute block by block: some queries
times some keys. ``Masks`` is what a rank has for all its blocks, ``Visible`` what one
block needs. A key that a query does not see gets the score ``HIDDEN_SCORE``: low enough
that its weight is 0 beside any score, and finite, so that a row of such scores has no
NaN in its derivatives. A row that sees no key of one block may see some of another. A
row that sees none at all is known by its sum of exponentials, and gives zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc.nn.numerics import sum_dtype
from fsfunc.nn.sequence_order import Block, Limit, SequenceCut

HIDDEN_SCORE = -1e30  # within the range of fp32 and of bfloat16


class Visible(NamedTuple):
    """The keys of a block that its queries see.

    Args:
        least, most: query r sees key c where ``least <= r - c <= most``; None: any.
        rows: [batch or 1, n], the documents of the queries.
        keys: [batch or 1, m], the documents of the keys.
        mask: [batch or 1, heads or 1, n, m], truth values, or numbers to add to scores.
    """

    least: Limit = None
    most: Limit = None
    rows: Tensor | None = None
    keys: Tensor | None = None
    mask: Tensor | None = None

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key."""
        return all(x is None for x in self)

    @property
    def is_causal(self) -> bool:
        """Whether query r sees keys 0 to r."""
        # A tensor (see ``Limit``) has no value to compare, so the class is asked first.
        least, *others = self
        return least.__class__ is int and least == 0 and all(x is None for x in others)  # type: ignore

    def tile(self, rows: slice, keys: slice) -> Visible:
        """Returns the same for some of the queries and some of the keys."""
        offset = rows.start - keys.start
        return Visible(
            None if self.least is None else self.least - offset,
            None if self.most is None else self.most - offset,
            None if self.rows is None else self.rows[:, rows],
            None if self.keys is None else self.keys[:, keys],
            None if self.mask is None else self.mask[:, :, rows, keys],
        )

    def mask_scores(self, scores: Tensor) -> Tensor:
        """Masks scores of shape [batch, key heads, query heads a key head, n, m].

        Returns the scores plus a mask of numbers, with ``HIDDEN_SCORE`` for what is
        not seen.
        """
        *_, groups, n, m = scores.shape
        if self.least is not None or self.most is not None:
            positions = torch.arange(max(n, m), device=scores.device)
            hidden = beyond_limits(
                positions[:n, None] - positions[:m], self.least, self.most
            )
            scores = scores.masked_fill(hidden, HIDDEN_SCORE)
        if self.rows is not None and self.keys is not None:
            hidden = self.rows[:, None, None, :, None] != self.keys[:, None, None, None]
            scores = scores.masked_fill(hidden, HIDDEN_SCORE)
        if self.mask is None:
            return scores
        group_size = 1 if self.mask.shape[1] == 1 else groups
        mask = self.mask.unflatten(1, (-1, group_size))
        if mask.dtype == torch.bool:
            return scores.masked_fill(~mask, HIDDEN_SCORE)
        return scores + mask.to(scores.dtype)


def beyond_limits(distance: Tensor, least: Limit, most: Limit) -> Tensor:
    """Returns where a distance is below ``least`` or above ``most``."""
    beyond = torch.zeros_like(distance, dtype=torch.bool)
    beyond = beyond if least is None else beyond | (distance < least)
    return beyond if most is None else beyond | (distance > most)


class Masks(NamedTuple):
    """What a rank's queries see, apart from limits of distance.

    Keys are in the order in which the ranks hold them, rank after rank.

    Args:
        documents: [batch or 1, S], the document of each position of all ranks.
        mask: [batch or 1, heads or 1, n or 1, S], of this rank's queries.
    """

    documents: Tensor | None = None
    mask: Tensor | None = None

    def visible(
        self, block: Block, step: int, rank_index: int | Tensor, cut: SequenceCut
    ) -> Visible:
        """Returns which keys of a block its queries see, in one step of the ring."""
        rows = keys = mask = None
        # At step s a rank has the keys of the rank s before it (``sequence_order.py``).
        key_part = (rank_index - step) % cut.size * cut.parts + block.part
        if self.documents is not None:
            query_part = rank_index * cut.parts + block.rows
            rows, keys = (
                _take_part(self.documents, 1, part, cut.size * cut.parts)
                for part in (query_part, key_part)
            )
        if self.mask is not None:
            mask = _take_part(self.mask, 2, block.rows, cut.parts)
            mask = _take_part(mask, 3, key_part, cut.size * cut.parts)
        return Visible(block.least, block.most, rows, keys, mask)

    def shift_mask(self, rank_index: int | Tensor, cut: SequenceCut) -> Masks:
        """Subtracts from a mask of numbers the largest that each row sees.

        Softmax is the same for that. But a row whose keys all have low numbers keeps
        its digits, and is not taken for one that sees nothing. The mask returned has
        all rows.
        """
        if self.mask is None:
            return self
        mask = self.mask.expand(-1, -1, cut.parts * cut.length, -1)
        if mask.dtype == torch.bool:
            return self._replace(mask=mask)
        mask = mask.to(sum_dtype(mask))
        # Keys that limits or documents hide must not be the largest of a row.
        if cut.left is not None or cut.right is not None:
            key_positions = [
                _rank_positions(rank, cut, mask) for rank in range(cut.size)
            ]
            distance = _rank_positions(rank_index, cut, mask)[:, None] - torch.cat(
                key_positions
            )
            least = None if cut.right is None else -cut.right
            mask = mask.masked_fill(
                beyond_limits(distance, least, cut.left), -torch.inf
            )
        if self.documents is not None:
            own_documents = _take_part(self.documents, 1, rank_index, cut.size)[
                :, None, :, None
            ]
            mask = mask.masked_fill(
                own_documents != self.documents[:, None, None], -torch.inf
            )
        largest = mask.detach().amax(-1, keepdim=True)
        # A row that sees nothing has -inf, and -inf - -inf would be NaN.
        largest = largest.masked_fill(largest == -torch.inf, 0)
        return self._replace(mask=(mask - largest).clamp(min=HIDDEN_SCORE))


def _rank_positions(rank: int | Tensor, cut: SequenceCut, like: Tensor) -> Tensor:
    """Returns the positions, in the whole sequence, of what a rank holds."""
    positions = torch.arange(cut.length, device=like.device)
    numbers = [cut.part_number(rank, part) for part in range(cut.parts)]  # type: ignore
    return torch.cat([positions + number * cut.length for number in numbers])


def _take_part(x: Tensor, dim: int, index: int | Tensor, parts: int) -> Tensor:
    """Returns part number ``index`` of ``parts`` equal ones along a dim."""
    length = x.shape[dim] // parts
    if isinstance(index, int):
        return x.narrow(dim, index * length, length)
    positions = index * length + torch.arange(length, device=x.device)
    return x.index_select(dim, positions)
