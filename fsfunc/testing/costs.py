"""``assert_cost``: the collectives and bytes of a call, compared with claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from fsfunc.comm.ledgers import Ledger, Record, ledger

__all__ = ["assert_cost", "said"]

_SHOWN = 12  # collectives of a message

Bytes = int | Fraction | Mapping[str, int | Fraction]


def assert_cost(
    fn: Callable[..., Any],
    *args: Any,
    bytes: Bytes | None = None,
    collectives: int | Mapping[str, int] | None = None,
    rank: int | None = None,
) -> Any:
    """``fn(*args)``, of which every rank sends just this.

    Inside ``spmd`` it is this rank's cost; around it, that of every rank hosted here.

    Args:
        bytes: by axis, or in all: what a rank sends, counted as ``ff.ledger`` does.
            Several axes at once are one name, ``"data, node"``.
        collectives: by op, or by op and axis (``"psum data"``), or in all.
        rank: looks at this rank alone, where ranks do unlike things.

    Raises:
        ValueError: neither is given.
        AssertionError: with each collective, its line and its bytes.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> main = ff.spmd(lambda: ff.psum(torch.ones(3), "data"), mesh)
    >>> total = assert_cost(main, bytes={"data": 12}, collectives={"psum": 1})
    >>> assert_cost(main, bytes=6)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: rank 0 sends 12 bytes in all, not 6:
      psum over data at ...  12 bytes
    """
    if bytes is None and collectives is None:
        raise ValueError("assert_cost needs bytes= or collectives=: what is to be sent")
    with ledger() as log:
        out = fn(*args)
    found = sorted(log.ranks | {r.rank for r in log.records}) or [0]
    for at in found if rank is None else [rank]:
        for what, sent, due in _claims(log, at, bytes, collectives):
            if sent != due:
                raise AssertionError(_message(log, at, what, sent, due))
    return out


def _claims(
    log: Ledger, rank: int, size: Any, counts: Any
) -> list[tuple[str, Any, Any]]:
    """(what, what is sent, what is to be)."""
    records = log.of(rank)
    by_axis: dict[str, Fraction] = {}
    ops: Counter[str] = Counter()
    kinds = set[tuple[str, str]]()  # op, and op and axis
    for r in records:
        axis = ", ".join(r.axis)
        by_axis[axis] = by_axis.get(axis, Fraction(0)) + r.bytes
        ops[r.op] += 1
        ops[f"{r.op} {axis}"] += 1
        kinds.add((r.op, f"{r.op} {axis}"))
    claims: list[tuple[str, Any, Any]] = []
    if isinstance(size, Mapping):
        every = dict.fromkeys([*size, *(a for a, n in by_axis.items() if n)])
        for axis in every:
            sent = by_axis.get(axis, 0)
            claims.append((f"bytes over {axis!r}", sent, size.get(axis, 0)))
    elif size is not None:
        claims.append(("bytes in all", sum(by_axis.values()), size))
    if isinstance(counts, Mapping):
        claims += [(f"collectives {op!r}", ops[op], n) for op, n in counts.items()]
        by_axis_too = {key.partition(" ")[0] for key in counts}
        rest = [kind for kind in kinds if kind[0] not in counts]
        others = {kind[kind[0] in by_axis_too] for kind in rest} - set(counts)
        claims += [(f"collectives {op!r}", ops[op], 0) for op in sorted(others)]
    elif counts is not None:
        claims.append(("collectives in all", len(records), counts))
    return claims


def _message(log: Ledger, rank: int, what: str, sent: Any, due: Any) -> str:
    kind, _, rest = what.partition(" ")
    number = lambda n: f"{float(n):g}" if Fraction(n).denominator > 1 else f"{int(n)}"  # noqa: E731
    lines = [f"rank {rank} sends {number(sent)} {kind} {rest}, not {number(due)}:"]
    records = log.of(rank)
    lines += [f"  {said(r)}  {number(r.bytes)} bytes" for r in records[:_SHOWN]]
    if len(records) > _SHOWN:
        lines.append(f"  and {len(records) - _SHOWN} more")
    return "\n".join(lines if records else [*lines, "  nothing"])


def said(r: Record) -> str:
    """A collective with the line that called it, and its unit, phase and leaf."""
    who = " ".join(part for part in (r.unit, r.phase, r.what) if part)
    at = "" if r.where == "?" else f" at {r.where}"  # the library's own, of no line
    return f"{r.op} over {', '.join(r.axis)}{at}  {who}".rstrip()
