"""``estimate``: the time of a planned step on some hardware."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fsfunc.comm.tracebacks import api_boundary
from fsfunc.planning.cost_model import arithmetic
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan
from fsfunc.planning.simulation import Played, RankTimes, Span, play_through
from fsfunc.printing.markup import text_markup
from fsfunc.printing.tables import of_count, of_flops, of_seconds


@dataclass(frozen=True, repr=False)
class Estimate:
    """The estimated time of a step by its parts; ``print`` it for the ranks too.

    Args:
        hardware: its name.
        seconds: from the start to the end of the last rank, the likely time;
            ``compute``, ``exposed`` and ``bubble`` add up to it.
        compute, exposed, bubble: of the rank that computes most, where it is idle at
            the end as a bubble too; see :class:`RankTimes`. What a step waits for its
            slowest node is exposed.
        ranks: the times of every planned rank.
        flops_per_second: a device and second, as the plan counts FLOPs (what is
            recomputed and what a causal mask spares are in it).
        share_of_peak: the time that those FLOPs take at the peak of their dtypes, of
            the whole: HFU, hardware FLOPs utilisation.
        tokens_per_second: of all ranks together, where ``tokens`` was given.
        spans: what every stream does when; ``waits``: when ranks compute nothing, and
            the transfer that they wait for; the phase is "exposed" or "bubble".
        mfu: model FLOPs utilisation: the same of the FLOPs that the model asks for,
            without what remat or the attention's backward computes again (Chowdhery et
            al. 2022, appendix B).
        devices: the number of ranks.
        band: (what makes the time uncertain, by how much as a natural logarithm), the
            widest first.
        rule_of_thumb: seconds by 6ND over the hardware's usual utilisation, N being all
            parameters, or those ``active``; None where tokens or that utilisation are
            not known.
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
    mfu: float = 0.0
    devices: int = 1
    band: tuple[tuple[str, float], ...] = ()
    rule_of_thumb: float | None = None
    waits: list[Span] = field(default_factory=list)

    @property
    def width(self) -> float:
        """The natural logarithm of ``high`` over ``seconds``: errors in quadrature."""
        return math.hypot(*(size for _, size in self.band))

    @property
    def low(self) -> float:
        """Seconds that the step hardly takes less than."""
        return self.seconds * math.exp(-self.width)

    @property
    def high(self) -> float:
        """Seconds that the step hardly takes more than."""
        return self.seconds * math.exp(self.width)

    def __repr__(self) -> str:
        tokens = self.tokens_per_second
        rate = ""
        if tokens is not None:
            rate = f", {of_count(tokens / self.devices)} tokens/s a device"
        return (
            f"Estimate({of_seconds(self.seconds)} on {self.hardware}: "
            f"{self._parts(self)}; {of_flops(self.flops_per_second)}/s a device, "
            f"MFU {self.mfu:.0%}, HFU {self.share_of_peak:.0%}{rate})"
        )

    def __str__(self) -> str:
        rows = [repr(self)]
        for r in self.ranks:
            others = f" and {r.alike - 1} like it" if r.alike > 1 else ""
            parts = f"{self._parts(r)}, idle {of_seconds(r.idle)}"
            rows.append(f"  rank {r.rank}{others}: {parts}")
        return "\n".join([*rows, *(f"  {line}" for line in self.beside())])

    def _repr_html_(self) -> str:  # what a notebook shows
        return text_markup(str(self))

    def beside(self) -> list[str]:
        """The band and what makes it wide, and the rule of thumb, a line each."""
        found = []
        if self.band:
            why = ", ".join(f"{what} {size:.0%}" for what, size in self.band)
            ends = f"{of_seconds(self.low)} and {of_seconds(self.high)}"
            found.append(f"between {ends}: {why}")
        if self.rule_of_thumb is not None:
            found.append(f"by the rule of thumb (6ND) {of_seconds(self.rule_of_thumb)}")
        return found

    @staticmethod
    def _parts(of: Estimate | RankTimes) -> str:
        names = ("compute", "exposed", "bubble")
        return ", ".join(f"{name} {of_seconds(getattr(of, name))}" for name in names)


@api_boundary
def estimate(
    plan: Plan,
    hardware: Hardware,
    *,
    tokens: float | None = None,
    attention: str | None = None,
    active: float | None = None,
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

    Over n nodes the whole takes 1 + ``hardware.straggling`` · log2(n) times that, as
    the slowest of them is waited for. The band about it has what no part explains
    (``hardware.uncertain``), and for each kind of work its share of the time, times
    how far its rate is uncertain.

    Copies between the device and a store beside it are timed by the store's rates
    (``hardware.stores``), and beside nothing.

    What it leaves out: streams that share a link, and the allocator when memory runs
    out.

    Args:
        plan: of a step, by ``plan``.
        hardware: on what.
        tokens: of one step, of all ranks together.
        attention: the generation of its kernels, such as "fa2"; None: the likeliest of
            the hardware, and a wider band.
        active: how many parameters a token meets, for the rule of thumb, of a mixture
            of experts; None: all.

    Returns:
        an :class:`Estimate`.

    Raises:
        Deadlock: ranks that wait for each other; names them and what each waits for.
        CollectiveMismatch: ranks that meet in different collectives.
        ValueError: what the hardware does not say; messages to a rank that was not
            planned; ``tokens`` or ``active`` not above 0.

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
    for what, n in {"tokens of one step": tokens, "active parameters": active}.items():
        if n is not None and not n > 0:
            raise ValueError(f"{what} must be above 0, got {n!r}")
    played = play_through(plan, hardware, attention)
    late = hardware.straggling * math.log2(_nodes(plan, hardware))
    seconds = played.seconds * (1 + late)
    lost = played.seconds * late
    times = [dataclasses.replace(r, exposed=r.exposed + lost) for r in played.ranks]
    busiest = max(times, key=lambda r: (r.compute, -r.rank))
    work = _work(plan, hardware)
    shares = _Work(*(x / seconds if seconds else 0.0 for x in work))
    return Estimate(
        hardware=hardware.name,
        seconds=seconds,
        compute=busiest.compute,
        exposed=busiest.exposed,
        bubble=busiest.bubble + busiest.idle,
        ranks=tuple(times),
        flops_per_second=shares.flops,
        share_of_peak=shares.at_peak,
        tokens_per_second=None if tokens is None else tokens / seconds,
        spans=sorted(played.spans, key=lambda s: (s.rank, s.start, s.end)),
        mfu=shares.asked_for,
        devices=plan.mesh.size,
        band=_band(plan, hardware, attention, busiest, played),
        rule_of_thumb=_rule_of_thumb(plan, hardware, tokens, active),
        waits=played.waits,
    )


def _nodes(plan: Plan, hardware: Hardware) -> int:
    """The number of groups of the innermost level that the mesh lies on."""
    width = hardware.levels[0].ranks if hardware.levels else 0
    return -(-plan.mesh.size // width) if width else 1


class _Work(NamedTuple):
    """The mean over all ranks of what a rank computes.

    Args:
        flops: all of them; ``at_peak``: the seconds that they take at peak.
        asked_for: of these seconds, those that the model asks for.
    """

    flops: float
    at_peak: float
    asked_for: float


def _work(plan: Plan, hardware: Hardware) -> _Work:
    ranks = sum(r.alike for r in plan.ranks)
    flops = at_peak = asked_for = 0.0
    for r in plan.ranks:
        for (op, _, phase), n in r.ran.items():
            if not op.flops:
                continue
            count = n * op.flops * r.alike / ranks
            name, there = arithmetic(op)
            seconds = count * there / op.flops / hardware.peak[name]
            flops, at_peak = flops + count, at_peak + seconds
            if phase != "recompute":
                again = "_attention" in op.name and "backward" in op.name
                asked_for += seconds * (1 - _AGAIN * again)
    return _Work(flops, at_peak, asked_for)


_AGAIN = 1 / 5  # of an attention's backward: its scores, of five products


# How far rates are uncertain, as natural logarithms: of what is bound by memory, by
# whether chains are fused and which kernels there are; of transfers that are waited
# for, by the network and what else is on it; of what lies beside the device, by the
# host's threads, its switches and the disk.
_FUSED, _WIRE, _HOST = 0.35, 0.4, 0.5
_LEAST = 0.005  # what moves the time by less is not listed


def _band(
    plan: Plan,
    hardware: Hardware,
    attention: str | None,
    times: RankTimes,
    played: Played,
) -> tuple[tuple[str, float], ...]:
    """The reasons that make a rank's time uncertain, and by how much, widest first."""
    spent: defaultdict[str, float] = defaultdict(float)
    for event, n in plan[times.rank].ran.items():
        op = event.op
        kind = "attention" if "_attention" in op.name else "other operators"
        kind = "host" if op.store in hardware.stores else kind
        if not op.flops or kind != "other operators":
            spent[kind] += n * played.costs[op]
    whole = sum((times.compute, times.exposed, times.bubble, times.idle)) or 1.0
    found = {"the model": hardware.uncertain}
    if attention is None and isinstance(hardware.attention, Mapping):
        rates = [sum(pair) for pair in hardware.attention.values()]
        apart = math.log(max(rates) / min(rates)) / 2
        found["attention's generation"] = apart * spent["attention"] / whole
    found["operators bound by memory"] = _FUSED * spent["other operators"] / whole
    found["memory beside the device"] = _HOST * spent["host"] / whole
    found["transfers"] = _WIRE * times.exposed / whole
    rows = [row for row in found.items() if row[1] >= _LEAST]
    return tuple(sorted(rows, key=lambda row: -row[1]))


def _rule_of_thumb(
    plan: Plan, hardware: Hardware, tokens: float | None, active: float | None
) -> float | None:
    """Seconds of 6ND FLOPs at the hardware's usual utilisation of its 16-bit peak."""
    if tokens is None or hardware.utilisation is None:
        return None
    leaves = (leaf for r in plan.ranks for leaf in r.leaves)
    sizes = {x.path: math.prod(x.shape) for x in leaves if x.kind == "parameters"}
    rate = hardware.peak["bfloat16"] * hardware.utilisation * plan.mesh.size
    return 6 * (active or sum(sizes.values())) * tokens / rate
