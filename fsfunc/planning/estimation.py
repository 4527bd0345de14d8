"""``estimate``: the time of a planned step on some hardware."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan, RankPlan
from fsfunc.planning.simulation import RankTimes, Span, play_through
from fsfunc.printing.tables import of_count, of_flops, of_seconds

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True, repr=False)
class Estimate:
    """The estimated time of a step by its parts; ``print`` it for the ranks too.

    Args:
        hardware: its name.
        seconds: from the start to the end of the last rank; ``compute``, ``exposed``
            and ``bubble`` add up to it.
        compute, exposed, bubble: of the rank that computes most, where it is idle at
            the end as a bubble too; see :class:`RankTimes`.
        ranks: the times of every planned rank.
        flops_per_second: a device and second, as the plan counts FLOPs (what is
            recomputed and what a causal mask spares are in it).
        share_of_peak: the time that those FLOPs take at the peak of their dtypes, of
            the whole.
        tokens_per_second: of all ranks together, where ``tokens`` was given.
        spans: what every stream does when.
    """

    hardware: str
    seconds: float
    compute: float
    exposed: float
    bubble: float
    ranks: tuple[RankTimes, ...]
    flops_per_second: float
    share_of_peak: float
    tokens_per_second: float | None = None
    spans: list[Span] = field(default_factory=list)

    def __repr__(self) -> str:
        tokens = self.tokens_per_second
        rate = "" if tokens is None else f", {of_count(tokens)} tokens/s"
        return (
            f"Estimate({of_seconds(self.seconds)} on {self.hardware}: "
            f"{self._parts(self)}; {of_flops(self.flops_per_second)}/s a device, "
            f"{self.share_of_peak:.0%} of peak{rate})"
        )

    def __str__(self) -> str:
        rows = [repr(self)]
        for r in self.ranks:
            others = f" and {r.alike - 1} like it" if r.alike > 1 else ""
            parts = f"{self._parts(r)}, idle {of_seconds(r.idle)}"
            rows.append(f"  rank {r.rank}{others}: {parts}")
        return "\n".join(rows)

    @staticmethod
    def _parts(of: Estimate | RankTimes) -> str:
        names = ("compute", "exposed", "bubble")
        return ", ".join(f"{name} {of_seconds(getattr(of, name))}" for name in names)


def estimate(
    plan: Plan, hardware: Hardware, *, tokens: float | None = None
) -> Estimate:
    """Estimate the time of a planned step on ``hardware``, by its parts.

    All planned ranks are played through together: each computes its operators in
    order, while its collectives go on beside them on one stream for each group, from
    the moment when the last planned rank has issued them, and messages likewise on one
    stream for each pair. ``Waited`` is where a rank waits. So what is hidden is what
    the step really issues ahead. What operators and transfers take is
    ``planning.cost_model``'s to say.

    Where ``hardware.overlap`` is below 1, a transfer of length t takes (1 - overlap) t
    from the computing beside it; it is counted among ``exposed`` where the transfer is
    waited for (``planning.simulation.play_through`` has the equation).

    What it leaves out: ranks of one program that are not equally fast, streams that
    share a link, the allocator when memory runs out, and the host, which is taken to
    run ahead of its device.

    Args:
        plan: of a step, by ``plan``.
        hardware: on what.
        tokens: of one step, of all ranks together.

    Returns:
        an :class:`Estimate`.

    Raises:
        Deadlock: ranks that wait for each other; names them and what each waits for.
        CollectiveMismatch: ranks that meet in different collectives.
        ValueError: what the hardware does not say; messages to a rank that was not
            planned; ``tokens`` not above 0.

    Cost: some microseconds an event of the plan; nothing runs.

    >>> import torch, fsfunc as ff
    >>> from fsfunc.planning.planner import plan
    >>> from fsfunc.planning.hardware import A100_40
    >>> layer = ff.unit(lambda p, x: torch.tanh(x @ p))
    >>> mesh = ff.make_mesh({"data": 16}, "abstract")
    >>> loss = ff.shard(lambda p, x: layer(p, layer(p, x)).sum(), mesh, "data")
    >>> def main():
    ...     return plan(loss, torch.zeros(4096, 4096), torch.zeros(4096, 4096))
    >>> found = estimate(ff.spmd(main, mesh)()[0], A100_40)
    >>> found.seconds == found.compute + found.exposed and found.bubble == 0
    True
    """
    if not isinstance(plan, Plan) or not isinstance(hardware, Hardware):
        raise TypeError(
            f"estimate is given a {type(plan).__name__} and a {type(hardware).__name__}"
            ": estimate(plan, hardware) takes what ff.plan(step, state, batch) returns "
            "and a description of a machine, such as ff.hardware.H100"
        )
    if tokens is not None and not tokens > 0:
        raise ValueError(f"tokens of one step are more than none, got {tokens!r}")
    seconds, times, spans = play_through(plan, hardware)
    busiest = max(times, key=lambda r: (r.compute, -r.rank))
    flops, at_peak = _work(plan, hardware)
    return Estimate(
        hardware=hardware.name,
        seconds=seconds,
        compute=busiest.compute,
        exposed=busiest.exposed,
        bubble=busiest.bubble + busiest.idle,
        ranks=tuple(times),
        flops_per_second=flops / seconds if seconds else 0.0,
        share_of_peak=at_peak / seconds if seconds else 0.0,
        tokens_per_second=None if tokens is None else tokens / seconds,
        spans=sorted(spans, key=lambda s: (s.rank, s.start, s.end)),
    )


def _work(plan: Plan, hardware: Hardware) -> tuple[float, float]:
    """FLOPs of a rank, and seconds that they take at peak: the mean over all ranks."""
    ranks = sum(r.alike for r in plan.ranks)
    flops = at_peak = 0.0
    for r in plan.ranks:
        for dtype, count in _by_dtype(r).items():
            flops += count * r.alike / ranks
            at_peak += count * r.alike / ranks / hardware.peak[dtype]
    return flops, at_peak


def _by_dtype(plan: RankPlan) -> Counter[str]:
    """FLOPs of a rank by the dtype's name."""
    found: Counter[str] = Counter()
    for event, n in plan.ran.items():
        if event.op.flops:
            found[str(event.op.dtype).removeprefix("torch.")] += n * event.op.flops
    return found
