"""``estimate``: the time of a planned step on some hardware.

It plays the plan through (`simulation.play_through`), with the seconds of each operator
and transfer from `cost_model`, and adds what no simulation shows: how long a step waits
for its slowest node, how uncertain the result is and why (the band), and the rule of
thumb that people compare it with.
"""

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
        hardware: the hardware's name.
        seconds: the likely time from the start to the end of the last rank;
            ``compute``, ``exposed`` and ``bubble`` add up to it.
        compute, exposed, bubble: the parts of the rank that computes most (see
            :class:`RankTimes`). Its idle time at the end counts as a bubble; what a
            step waits for its slowest node counts as exposed.
        ranks: the times of every planned rank.
        flops_per_second: FLOPs of a device in a second, as the plan counts them (what
            is recomputed and what a causal mask spares are in it).
        share_of_peak: HFU, hardware FLOPs utilisation: the time that those FLOPs take
            at the peak of their dtypes, over the whole time.
        tokens_per_second: of all ranks together, if ``tokens`` was given.
        spans: what every stream does, and when.
        waits: when ranks compute nothing, and the transfer that they wait for; the
            phase is "exposed" or "bubble".
        mfu: model FLOPs utilisation: the same for the FLOPs that the model asks for,
            without what remat or the attention's backward computes again (Chowdhery et
            al. 2022, appendix B).
        devices: the number of ranks.
        band: (what makes the time uncertain, by how much as a natural logarithm), the
            widest first.
        rule_of_thumb: seconds by 6ND at the hardware's usual utilisation, N being all
            parameters, or those ``active``; None if tokens or that utilisation are not
            known.
        attention: the generation of the attention's kernels that is assumed; None where
            none runs, or the hardware has one rate for all.
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
    attention: str | None = None

    @property
    def width(self) -> float:
        """The natural logarithm of ``high`` over ``seconds``.

        The band's parts are independent errors, so their squares add up.
        """
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
        """Returns the band, what is assumed, and the rule of thumb, a line each."""
        lines = []
        if self.band:
            reasons = ", ".join(f"{reason} {size:.0%}" for reason, size in self.band)
            ends = f"{of_seconds(self.low)} and {of_seconds(self.high)}"
            lines.append(f"between {ends}: {reasons}")
        if self.attention is not None:
            number = self.attention.removeprefix("fa")
            name = f"FlashAttention-{number}" if number.isdecimal() else self.attention
            lines.append(f"attention by kernels of the generation of {name}")
        if self.rule_of_thumb is not None:
            lines.append(f"by the rule of thumb (6ND) {of_seconds(self.rule_of_thumb)}")
        return lines

    @staticmethod
    def _parts(times: Estimate | RankTimes) -> str:
        names = ("compute", "exposed", "bubble")
        return ", ".join(f"{name} {of_seconds(getattr(times, name))}" for name in names)


@api_boundary
def estimate(
    plan: Plan,
    hardware: Hardware,
    *,
    tokens: float | None = None,
    attention: str | None = None,
    active: float | None = None,
) -> Estimate:
    """Estimates the time of a planned step on ``hardware``, by its parts.

    All planned ranks are played through together. Each computes its operators in
    order. Its collectives run beside them, on one stream for each group, from the
    moment when the last planned rank has issued them; messages likewise, on one stream
    for each pair of ranks. So a transfer is hidden as far as the step issues it ahead
    of its use. ``planning.cost_model`` has what operators and transfers take.

    Where ``hardware.overlap`` is below 1, a transfer of length t takes (1 - overlap) t
    from the computing beside it; it is counted among ``exposed`` where the transfer is
    waited for (``planning.simulation.play_through`` has the equation).

    Where the hardware gives its ``processors``, its host launches operators and
    transfers, ``hardware.overhead`` seconds each, ahead of the device: a step of many
    small ones takes what the host takes.

    Over n nodes the whole takes 1 + ``hardware.straggling`` · log2(n) times that, as
    a step waits for the slowest of them. The band adds up what no part explains
    (``hardware.uncertain``) and, for each kind of work, its share of the time, times
    how far its rate is uncertain.

    Copies between the device and a store beside it take the store's rates
    (``hardware.stores``), and nothing overlaps with them.

    Not modelled: streams that share a link, the allocator when memory runs out, and
    hosts that wait for the device, as where a message's shape is read before it comes.

    Args:
        plan: what ``ff.plan`` returned for the step.
        hardware: the machine that it shall run on.
        tokens: the tokens of one step, of all ranks together.
        attention: the generation of the attention's kernels, such as "fa2"; None: the
            hardware's likeliest, and a wider band.
        active: how many parameters a token meets in a mixture of experts, for the rule
            of thumb; None: all.

    Returns:
        an :class:`Estimate`.

    Raises:
        Deadlock: ranks that wait for each other; names them and what each waits for.
        CollectiveMismatch: ranks that meet in different collectives.
        ValueError: what the hardware does not say; messages to a rank that was not
            planned; ``tokens`` or ``active`` not above 0.

    Cost: some microseconds an event of the plan; nothing runs.

    >>> import math, torch, fsfunc as ff
    >>> from fsfunc.planning.planner import plan
    >>> from fsfunc.planning.hardware import A100_40
    >>> layer = ff.unit(lambda p, x: torch.tanh(x @ p))
    >>> mesh = ff.make_mesh({"data": 16}, "abstract")
    >>> loss = ff.shard(lambda p, x: layer(p, layer(p, x)).sum(), mesh, "data")
    >>> def main():
    ...     return plan(loss, torch.zeros(4096, 4096), torch.zeros(4096, 4096))
    >>> step = estimate(ff.spmd(main, mesh)()[0], A100_40)
    >>> math.isclose(step.seconds, step.compute + step.exposed), step.bubble
    (True, 0.0)
    """
    if not isinstance(plan, Plan) or not isinstance(hardware, Hardware):
        raise TypeError(
            f"estimate is given a {type(plan).__name__} and a {type(hardware).__name__}"
            ": estimate(plan, hardware) takes what ff.plan(step, state, batch) returns "
            "and a description of a machine, such as ff.hardware.H100"
        )
    for name, n in {"tokens of one step": tokens, "active parameters": active}.items():
        if n is not None and not n > 0:
            raise ValueError(f"{name} must be above 0, got {n!r}")
    played = play_through(plan, hardware, attention)
    lateness = hardware.straggling * math.log2(_nodes(plan, hardware))
    seconds = played.seconds * (1 + lateness)
    lost_seconds = played.seconds * lateness
    # What all wait for the slowest node they wait in collectives: it is exposed.
    times = [
        dataclasses.replace(r, exposed=r.exposed + lost_seconds) for r in played.ranks
    ]
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
        attention=_generation(plan, hardware, attention),
    )


def _generation(plan: Plan, hardware: Hardware, attention: str | None) -> str | None:
    """Returns the generation of attention's kernels that an estimate assumes."""
    runs = any("_attention" in ran.op.name for r in plan.ranks for ran in r.ran)
    if not runs or not isinstance(hardware.attention, Mapping):
        return None
    return attention or next(iter(hardware.attention))


def _nodes(plan: Plan, hardware: Hardware) -> int:
    """Returns the number of nodes: groups of the innermost level of the network."""
    width = hardware.levels[0].ranks if hardware.levels else 0
    return -(-plan.mesh.size // width) if width else 1


class _Work(NamedTuple):
    """The mean over all ranks of what a rank computes.

    Args:
        flops: all FLOPs.
        at_peak: the seconds that they would take at peak.
        asked_for: the part of these seconds that the model asks for: without what is
            recomputed.
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
            mean_flops = n * op.flops * r.alike / ranks
            name, dtype_flops = arithmetic(op)
            seconds = mean_flops * dtype_flops / op.flops / hardware.peak[name]
            flops, at_peak = flops + mean_flops, at_peak + seconds
            if phase != "recompute":
                is_attention_backward = (
                    "_attention" in op.name and "backward" in op.name
                )
                asked_for += seconds * (1 - _RECOMPUTED * is_attention_backward)
    return _Work(flops, at_peak, asked_for)


# A fused attention's backward makes five products, of which the scores are made again.
_RECOMPUTED = 1 / 5


# How far rates are uncertain, as natural logarithms. Operators bound by memory: whether
# chains are fused and which kernels there are. Transfers and ranks that are waited for:
# the network and what else is on it. Memory beside the device: the host's threads, its
# switches and the disk.
_FUSED, _WIRE, _HOST = 0.25, 0.25, 0.5
_LEAST = 0.005  # reasons that move the time by less are not listed


def _band(
    plan: Plan,
    hardware: Hardware,
    attention: str | None,
    times: RankTimes,
    played: Played,
) -> tuple[tuple[str, float], ...]:
    """Returns the reasons that make a rank's time uncertain, and by how much.

    The widest first.
    """
    seconds_by_kind: defaultdict[str, float] = defaultdict(float)
    for event, n in plan[times.rank].ran.items():
        op = event.op
        kind = "attention" if "_attention" in op.name else "other operators"
        kind = "host" if op.store in hardware.stores else kind
        if not op.flops or kind != "other operators":
            seconds_by_kind[kind] += n * played.costs[op]
    total = sum((times.compute, times.exposed, times.bubble, times.idle)) or 1.0
    uncertainty = {"the model": hardware.uncertain}
    # Without a named generation of kernels it may be the fastest or the slowest.
    if attention is None and isinstance(hardware.attention, Mapping):
        rates = [sum(pair) for pair in hardware.attention.values()]
        spread = math.log(max(rates) / min(rates)) / 2
        uncertainty["attention's generation"] = (
            spread * seconds_by_kind["attention"] / total
        )
    uncertainty["operators bound by memory"] = (
        _FUSED * seconds_by_kind["other operators"] / total
    )
    uncertainty["memory beside the device"] = _HOST * seconds_by_kind["host"] / total
    uncertainty["transfers"] = _WIRE * times.exposed / total
    uncertainty["bubbles"] = _WIRE * (times.bubble + times.idle) / total
    rows = [row for row in uncertainty.items() if row[1] >= _LEAST]
    return tuple(sorted(rows, key=lambda row: -row[1]))


def _rule_of_thumb(
    plan: Plan, hardware: Hardware, tokens: float | None, active: float | None
) -> float | None:
    """Returns the seconds of 6ND FLOPs at the usual share of the 16-bit peak."""
    if tokens is None or hardware.utilisation is None:
        return None
    leaves = (leaf for r in plan.ranks for leaf in r.leaves)
    sizes = {x.path: math.prod(x.shape) for x in leaves if x.kind == "parameters"}
    rate = hardware.peak["bfloat16"] * hardware.utilisation * plan.mesh.size
    return 6 * (active or sum(sizes.values())) * tokens / rate
