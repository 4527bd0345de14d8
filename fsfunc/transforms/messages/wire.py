"""Messages between ranks: ``Gather`` and ``Reduction`` of a packed buffer, as values.

A message has five steps: the buffer's memory space (`memory_spaces`) copies it to the
device if it is offloaded; ``encode`` returns the tensor to send; ``move`` sends it;
``decode`` makes the result from what arrived; and the memory space stores that. To send
other dtypes, quantised values or compressed gradients, replace ``encode``, ``move`` or
``decode``; nothing else of ``shard`` changes.

Derive from one of the two classes, override the steps that differ, set ``exact =
False`` if values change on the way, and give an instance to ``shard``::

    class Narrow(Gather):
        exact = False

        def encode(self, part, dtype):
            return part.to(torch.bfloat16)

        def decode(self, arrived, dtype, count):
            return arrived.to(dtype)

    step = ff.shard(step, mesh, "data", gather=Narrow())

On an axis of one rank no step is taken. All ranks must send as many elements, of one
dtype. What arrives lies in memory of the rank's pool; ``decode`` may return new memory.
An inexact message works under ``value_and_grad``, whose backward is the reduction; it
is refused under ``torch.func``, which would differentiate the encoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup, to_strided
from fsfunc.sharded.layout import View
from fsfunc.sharded.leaf import FlatShard


def check_decoded(message: Gather, x: Tensor, count: int, dtype: torch.dtype) -> None:
    """Raises unless a ``decode`` returned ``count`` elements in ``dtype``."""
    if x.shape != (count,) or x.dtype != dtype:
        raise ValueError(
            f"{message}.decode returned {list(x.shape)} in {x.dtype}: it must return "
            f"[{count}] in {dtype}"
        )


class _Message:
    """What gathers and reductions have in common.

    Equality, hash and repr are by attributes, so that ranks can compare messages.
    """

    exact: bool

    def encodes(self, dtype: torch.dtype) -> bool:
        """Returns whether an inexact one, or a feedback, is for this dtype.

        Others are sent as they are: integers, masks, complex numbers.
        """
        return dtype.is_floating_point

    def __init_subclass__(cls) -> None:
        overrides = not {"encode", "decode"}.isdisjoint(vars(cls))
        # Taken for exact, it would be differentiated as if it sent values as they are:
        # a wrong gradient with no error. (`Gather` and `Reduction` derive directly, and
        # have an exact encode.)
        if overrides and _Message not in cls.__bases__ and cls.exact is True:
            raise TypeError(
                f"{cls.__name__} has an encode or a decode of its own: say exact = "
                "False in it, as what arrives may differ from what was sent"
            )

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        attributes = ", ".join(f"{k}={v!r}" for k, v in sorted(vars(self).items()))
        return f"{type(self).__name__}({attributes})"


class Gather(_Message):
    """The gather of a packed buffer: from each rank's range to the whole buffer.

    A subclass with an ``encode`` or ``decode`` sets ``exact = False``: it works under
    ``ff.value_and_grad``, and is refused where ``torch.func`` differentiates it.

    Raises:
        ValueError: ``decode`` returns another dtype, or number of elements.
        RuntimeError: ``encode`` changes its argument in place.

    Cost: one all-gather of what ``encode`` gives.

    >>> import torch, fsfunc as ff
    >>> class Narrow(ff.Gather):  # half the bytes
    ...     exact = False
    ...     def encode(self, part, dtype):
    ...         return part.to(torch.bfloat16)
    ...     def decode(self, arrived, dtype, count):
    ...         return arrived.to(dtype)
    >>> mesh, layer = ff.make_mesh({"data": 2}), ff.unit(lambda w, x: (w * x).sum())
    >>> loss = ff.shard(layer, mesh, "data", gather=Narrow())
    >>> w, x = torch.full((2,), 1.001), torch.ones(2)
    >>> ff.spmd(lambda: loss(ff.place(loss, w, x), x).item(), mesh)()
    [2.0, 2.0]
    """

    exact = True

    def check(self, axes: tuple[str, ...]) -> None:
        """Raises if it cannot be used over these axes of a mesh."""

    def encode(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor to send for this rank's range of the buffer."""
        return part.to(dtype)

    def move(self, sent: Tensor, where: RankGroup, out: Tensor, what: str) -> Handle:
        """Starts the gather of all ranks' tensors into ``out``.

        If it returns a `KeptGather`, the backward gathers by its ``again``.
        """
        # Nobody writes an exact one, so ranks may share memory. A `decode` may write
        # what arrives, of which this rank's part is what it sent.
        return where.start("all_gather", sent, out=out, name=what, read_only=self.exact)

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int) -> Tensor:
        """Returns the whole buffer in ``dtype``: ``count`` elements of each rank."""
        return arrived


class KeptGather(Handle):
    """A gather that keeps a partial result, to gather the same again at less cost."""

    def again(self, out: Tensor) -> Handle:
        """Starts the same gather again, into ``out``."""
        raise NotImplementedError


class Reduction(_Message):
    """The reduction of the ranks' gradients of a packed buffer to sums.

    Each rank receives the sum of its range, or at zero=0 the whole sum.

    Cost: one reduce-scatter of what ``encode`` gives (at zero=0 one all-reduce).
    """

    exact = True

    def check(self, axes: tuple[str, ...], zero: int) -> None:
        """Raises if it cannot be used over these axes of a mesh, or at ``zero``."""

    def encode(self, buffer: Tensor, ranks: int) -> Tensor:
        """Returns the tensor to send for this rank's gradient of the whole buffer."""
        return buffer

    def sent(self, encoded: Tensor, count: int) -> Tensor:
        """Returns the gradient that ``encoded`` stands for, ``count`` of each range.

        In float32. ``error_feedback`` computes the error of the encoding from it.
        """
        return encoded.float()

    def send(
        self, buffer: Tensor, shard: FlatShard, where: RankGroup, whole: bool
    ) -> Handle:
        """Starts the reduction of a buffer's gradient: encodes and moves it."""
        return self.move(self.encode(buffer, where.size), where, whole, shard.name)

    def move(self, sent: Tensor, where: RankGroup, whole: bool, what: str) -> Handle:
        """Starts the sum; each rank receives its range, or the ``whole``."""
        return where.start(
            ("psum_scatter", "psum")[whole], sent, name=what, read_only=True
        )

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int | None) -> Tensor:
        """Returns the summed gradient: ``count`` elements in ``dtype``.

        With ``count=None`` padding is kept, for a partial sum that is reduced again.
        """
        return arrived


def divisor_before_sum(n: int) -> int:
    """Returns the divisor of float16 gradients before ``n`` of them are summed.

    Their sum would overflow where their mean does not, and divided by ``n`` at once
    they would vanish: so half of it comes before, half after. (FairScale's rule.)

    >>> [divisor_before_sum(n) for n in (1, 2, 3, 4, 6, 8)]
    [1, 2, 2, 2, 4, 4]
    """
    divisor = 1
    while n % divisor == 0 and n > divisor * divisor:
        divisor *= 2
    return divisor


def gradients_by_offset(
    views: Sequence[View],
    grads: Sequence[Tensor | None],
    dtype: torch.dtype,
    later: Mapping[int, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Returns gradients of views of a buffer, by offset; adds those of ``later``.

    For a backward of the backward, and for a graph: nothing is written in place.
    """
    gradients: dict[int, Tensor] = {}
    for (_, _, offset), g in zip(views, grads, strict=True):
        # An empty one has the offset of its neighbour: it would be added to that.
        if g is None or not g.numel():
            continue
        g = to_strided(g).reshape(-1)
        if offset in gradients:  # a leaf that was given twice
            g = gradients[offset] + g
        gradients[offset] = g.to(dtype)
    for offset, g in (later or {}).items():
        gradients[offset] = gradients[offset] + g if offset in gradients else g
    return gradients


def pack_parts(
    grads: Mapping[int, Tensor], shard: FlatShard, dtype: torch.dtype
) -> Tensor:
    """Packs gradients, given by offset, into one buffer, with zeros between."""
    place, parts, end = shard.place, [], 0
    zeros = partial(shard.flat.new_zeros, dtype=dtype)
    # By one `cat`, not into a buffer: a backward of the backward, and a graph, go
    # through it.
    for offset in sorted(grads):
        if offset > end:
            parts.append(zeros(offset - end))
        parts.append(grads[offset])
        end = offset + grads[offset].numel()
    return torch.cat([*parts, zeros(place.size * place.chunk - end)])
