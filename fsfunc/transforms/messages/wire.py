"""Messages between ranks: a gather and a reduction of a packed buffer, as values.

A message is five steps: its memory space (`memory_spaces`) fetches a range to the
device, ``encode`` makes what is sent, ``move`` sends it, ``decode`` makes the result of
what arrived, and the memory space of the result puts it where it belongs. To a buffer
on the device the first and the last are nothing. Gathers in another dtype or
quantised, and compressed gradients, take the place of one of the others, and nothing
else of ``shard`` changes.

To replace one, derive from it, change the steps that differ, say ``exact = False``
where the values change on the way, and give it to ``shard``::

    class Narrow(Gather):
        exact = False

        def encode(self, part, dtype):
            return part.to(torch.bfloat16)

        def decode(self, arrived, dtype, count):
            return arrived.to(dtype)

    step = ff.shard(step, mesh, "data", gather=Narrow())

A rank that is alone on the axis sends nothing: there no step of these is taken. Ranks
must agree in what they send: as many elements, of one dtype. What arrives lies in
memory of the rank's pool; a ``decode`` that returns something else makes its own. What
is not exact holds for ``value_and_grad``, whose backward is the reduction, and is
refused under ``torch.func``, which would differentiate the encoding instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.sharded.leaf import FlatShard


def check_decoded(how: object, x: Tensor, count: int, dtype: torch.dtype) -> None:
    """Raises where a ``decode`` did not return ``count`` elements in ``dtype``."""
    if x.shape != (count,) or x.dtype != dtype:
        raise ValueError(
            f"{how}.decode returned {list(x.shape)} in {x.dtype}: due are [{count}] in "
            f"{dtype}"
        )


class _Shown:
    """Equality, hash and repr from attributes: ranks compare their configurations."""

    exact: bool

    def __init_subclass__(cls) -> None:
        own = not {"encode", "decode"}.isdisjoint(vars(cls))
        if own and _Shown not in cls.__bases__ and cls.exact is True:
            raise TypeError(
                f"{cls.__name__} has an encode or a decode of its own: say exact = "
                "False in it, or what arrives is taken for what was there"
            )

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        made = ", ".join(f"{k}={v!r}" for k, v in sorted(vars(self).items()))
        return f"{type(self).__name__}({made})"


class Gather(_Shown):
    """A rank's range of a buffer becomes the whole buffer.

    One with an ``encode`` or ``decode`` of its own says ``exact = False``: it holds for
    ``ff.value_and_grad``, and is refused where ``torch.func`` differentiates it.

    Raises:
        ValueError: ``decode`` returns another dtype, or number of elements.
        RuntimeError: ``encode`` changes in place what it is given.

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
        """Raises where it cannot be used over these axes of a mesh."""

    def encode(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Encodes this rank's part for sending."""
        return part.to(dtype)

    def move(self, sent: Tensor, where: RankGroup, out: Tensor, what: str) -> Handle:
        """Sends it to all ranks, for the whole to arrive in ``out``.

        A `KeptGather` is asked, until the gradients are there, to gather again.
        """
        return where.start("all_gather", sent, out=out, what=what)

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int) -> Tensor:
        """The whole buffer, in ``dtype``: ``count`` elements of each rank, in a row."""
        return arrived


class KeptGather(Handle):
    """A gather that keeps what it takes to gather the same again at less cost."""

    def again(self, out: Tensor) -> Handle:
        """Gathers once more, for the whole to arrive in ``out``."""
        raise NotImplementedError


class Reduction(_Shown):
    """The ranks' gradients of a whole buffer become their sum: of this rank's range.

    Cost: one reduce-scatter of what ``encode`` gives (at zero=0 one all-reduce).
    """

    exact = True

    def check(self, axes: tuple[str, ...], zero: int) -> None:
        """Raises where it cannot be used over these axes of a mesh, or at ``zero``."""

    def encode(self, buffer: Tensor, ranks: int) -> Tensor:
        """Encodes this rank's part for sending."""
        return buffer

    def sent(self, encoded: Tensor, count: int) -> Tensor:
        """Decodes one's own message: of each range ``count`` elements, in float32.

        Asked for where what was lost is to be sent later, see ``error_feedback``.
        """
        return encoded.float()

    def send(
        self, buffer: Tensor, shard: FlatShard, where: RankGroup, whole: bool
    ) -> Handle:
        """Puts the sum of a buffer's gradient in flight: encodes and moves it."""
        return self.move(self.encode(buffer, where.size), where, whole, shard.name)

    def move(self, sent: Tensor, where: RankGroup, whole: bool, what: str) -> Handle:
        """Sums it; each rank receives its range, or the whole."""
        return where.start("psum" if whole else "psum_scatter", sent, what=what)

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int | None) -> Tensor:
        """The summed gradient: ``count`` elements in ``dtype``.

        With ``count=None`` padding is kept, for a partial sum that is reduced again.
        """
        return arrived
