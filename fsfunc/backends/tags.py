"""The tags under which gloo matches what two processes send and receive.

A tag has 31 bits: 2 say what is sent, 12 number it, 16 say of what kind the collective
is and 1 which hop of it. So unlike collectives never meet: their ranks wait until the
group's timeout, where gloo would else pair the bytes of one with the memory of the
other, or end the process where the sizes differ.
"""

from __future__ import annotations

__all__ = ["ANSWER", "DATA", "HEADER", "TRANSFER", "tag"]

DATA, HEADER, TRANSFER, ANSWER = range(4)
_NUMBERS = 2**12  # more than can be in flight at once; what is later comes later


def tag(kind: int, number: int, digest: bytes = b"\0\0", hop: int = 0) -> int:
    """The tag of the ``number``-th collective, or transfer, of a group."""
    said = int.from_bytes(digest[:2], "little")
    return ((kind * _NUMBERS + number % _NUMBERS) << 17) + (said << 1) + hop
