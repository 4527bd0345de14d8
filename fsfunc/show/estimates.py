"""Tables of estimates: how long a planned step takes, on what, and whether it fits.

The commands of ``fsfunc plan`` print these: `estimate` of one plan, `comparison` of
several, `description` of a hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsfunc.planning.allocation import fits
from fsfunc.planning.estimation import Estimate
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan
from fsfunc.printing.folding import fold_programs
from fsfunc.printing.tables import (
    Report,
    Table,
    of_axes,
    of_bytes,
    of_count,
    of_flops,
    of_seconds,
    of_share,
)
from fsfunc.show.plans import check_plan


def estimate(
    estimate: Estimate, plan: Plan | None = None, hardware: Hardware | None = None
) -> Report:
    """Returns the tables of an estimate: rates, where time goes, what is too much.

    Args:
        estimate: of ``ff.estimate``.
        plan: of which it is; each program's memory is then shown.
        hardware: on which; with ``plan``: whether its memory is enough.

    Returns:
        A ``Report``: print it, or print it in colours with ``rich.print``.

    Raises:
        TypeError: no estimate, or no plan.

    >>> from fsfunc.planning.simulation import RankTimes
    >>> times = RankTimes(0, 8, 0.75, 0.25, 0.0, 0.0)
    >>> print(estimate(Estimate("A100-80", 1.0, 0.75, 0.25, 0.0, (times,), 9e13, 0.29)))
    1.00 s a step on A100-80: 90.0 TFLOP/s a device, MFU 0 %, HFU 29 %
    <BLANKLINE>
    time of a step              seconds  share
    computing                    750 ms   75 %
    waiting for collectives      250 ms   25 %
    waiting for other programs      0 s    0 %
    """
    if not isinstance(estimate, Estimate):
        raise TypeError(
            f"this shows an estimate, and got {type(estimate).__name__}: make one by "
            "ff.estimate(plan, hardware)"
        )
    seconds = estimate.seconds
    parts = (
        ("computing", estimate.compute),
        ("waiting for collectives", estimate.exposed),
        ("waiting for other programs", estimate.bubble),
    )
    rows = [(name, of_seconds(t), of_share(t, seconds)) for name, t in parts]
    report: list[Table | str] = [
        describe_rates(estimate),
        *estimate.beside(),
        "",
        Table("", ("<time of a step", ">seconds", ">share"), rows),
    ]
    if len(estimate.ranks) > 1:
        report += ["", _ranks(estimate, plan)]
    if plan is not None and hardware is not None:
        report += ["", str(fits(check_plan(plan), hardware))]
    return Report(tuple(report))


def describe_rates(estimate: Estimate) -> str:
    """Describes an estimate: its seconds, and what share of the hardware is used."""
    rate = f"{of_flops(estimate.flops_per_second)}/s a device"
    used = f"MFU {of_share(estimate.mfu, 1)}, HFU {of_share(estimate.share_of_peak, 1)}"
    tokens = estimate.tokens_per_second
    token_rate = ""
    if tokens is not None:
        each = of_count(tokens / estimate.devices)
        token_rate = f", {of_count(tokens)} tokens/s, {each} a device"
    step = f"{of_seconds(estimate.seconds)} a step on {estimate.hardware}"
    return f"{step}: {rate}, {used}{token_rate}"


def _ranks(estimate: Estimate, plan: Plan | None) -> Table:
    """Returns a table of the programs' time, and of their memory if it is known."""
    peaks = {p.rank: p.peak_bytes for p in plan.ranks} if plan else {}
    rows = [
        (
            str(r.rank),
            str(r.alike),
            *(of_seconds(t) for t in (r.compute, r.exposed, r.bubble, r.idle)),
            *([of_bytes(peaks[r.rank])] if r.rank in peaks else []),
        )
        for r in estimate.ranks
    ]
    head = (">rank", ">ranks alike", ">computes", ">collectives", ">others", ">idle")
    head += (">memory",) if peaks else ()
    return Table("time of each program", head, fold_programs(rows))


def comparison(plans: Sequence[tuple[Plan, Estimate | None]]) -> Report:
    """Returns a table of plans: what the fullest rank of each computes and sends.

    >>> from fsfunc.comm.mesh import Mesh
    >>> from fsfunc.planning.plans import RankPlan
    >>> own = RankPlan(0, 8, {"data": 0}, [], {}, [], [])
    >>> print(comparison([(Plan(Mesh({"data": 8}, "abstract"), (own,)), None)]))
    mesh    FLOP  sent  memory
    data=8     0   0 B     0 B
    """
    rows = []
    for plan, times in plans:
        sent = max(rank_plan.ledger.bytes() for rank_plan in plan.ranks)
        row = (
            of_axes(plan.mesh.axes),
            of_count(plan.flops),
            of_bytes(sent),
            of_bytes(plan.peak_bytes),
        )
        if times is not None:
            row += (of_seconds(times.seconds), of_share(times.share_of_peak, 1))
        rows.append(row)
    head = ("<mesh", ">FLOP", ">sent", ">memory")
    head += (">a step", ">of peak") if len(rows[0]) > len(head) else ()
    return Report((Table("", head, rows),))


def _attention(hardware: Hardware) -> list[tuple[str, str]]:
    """Returns rows on the share of the peak that attention reaches."""
    shares = hardware.attention
    if not isinstance(shares, Mapping):
        return [("of peak, attention", of_share(shares, 1))]
    return [
        (f"of peak, attention {name}", f"{of_share(f, 1)}, backward {of_share(b, 1)}")
        for name, (f, b) in shares.items()
    ]


def description(hardware: Hardware) -> Report:
    """Returns the table of all fields of a hardware.

    >>> from fsfunc.planning.hardware import A100_80
    >>> print(description(A100_80).tables["A100-80"].rows[0])
    ('peak, bfloat16', '312 TFLOP/s')
    """
    rows = [(f"peak, {d}", f"{of_flops(rate)}/s") for d, rate in hardware.peak.items()]
    rows += [
        (f"of peak, products of size {size:g}", of_share(share, 1))
        for size, share in hardware.efficiency
    ]
    rows += [
        *_attention(hardware),
        ("memory", of_bytes(hardware.memory)),
        ("of memory, kept free", of_share(hardware.margin, 1)),
        ("memory's bandwidth", f"{of_bytes(hardware.bandwidth)}/s"),
        ("overhead of an operator", of_seconds(hardware.overhead)),
    ]
    if hardware.fresh is not None:
        rows.append(("first touch of memory", f"{of_bytes(hardware.fresh)}/s"))
    for level in hardware.levels:
        name = f"links of {level.ranks or 'all'} ranks"
        speed = f"{of_bytes(level.bandwidth)}/s, {of_seconds(level.latency)} a message"
        rows.append((name, speed))
    if hardware.levels:
        rows.append(("of a transfer while computing", of_share(hardware.overlap, 1)))
    rows += [(name, f"{of_bytes(rate)}/s") for name, rate in hardware.rates.items()]
    return Report((Table(hardware.name, ("<field", ">value"), rows, most=len(rows)),))
