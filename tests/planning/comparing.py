"""What the tests of plans share: a step planned and run, and what the two show."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

import fsfunc as ff
from fsfunc import tree


def facts(records):
    """All that a record says."""
    return [
        (r.op, r.axis, r.bytes, r.dtype, r.unit, r.phase, r.rank, r.where)
        for r in records
    ]


@dataclass
class Both:
    """One call of a step, planned and run.

    Args:
        plan, plain: with units looked at once, and at each call.
        sent: what the real call sent; ``peak``: the most bytes that it held.
        out: what it returned.
    """

    plan: Any
    plain: Any
    sent: list
    peak: int
    out: Any

    def check(self, memory=0.0, slack=0):
        """The plan's records are the run's; so are FLOPs and peaks.

        Args:
            memory: by which share the plain plan's peak may miss what was measured.
            slack: by how many bytes (or 1 %) that with units looked at once may.
        """
        mine, plain = self.plan.ranks[0], self.plain.ranks[0]
        assert facts(plain.records) == facts(self.sent)
        assert facts(mine.records) == facts(self.sent)
        assert totals(mine) == totals(plain)
        assert mine.derived == plain.derived
        close(plain.peak_bytes, self.peak, memory * self.peak)
        close(mine.peak_bytes, plain.peak_bytes, max(slack, 0.01 * self.peak))


def close(found, expected, distance):
    assert abs(found - expected) <= distance, (found, expected)


def totals(rank_plan):
    """FLOPs by unit and phase, where there are any."""
    found = {key: work.flops for key, work in rank_plan.work.items()}
    return {key: flops for key, flops in found.items() if flops}


def planned_and_run(step, *args):
    """:class:`Both` of ``step(*args)`` on this rank, called from one line of source."""
    plan, plain = (functools.partial(ff.plan, step, repeat=r) for r in (True, False))
    found, logs = [], []
    for call in plan, plain, step:
        with ff.ledger() as log:
            if call is not step:
                found.append(called(call, args))
                continue
            with ff.testing.live_bytes(*args) as seen:
                found.append(called(call, args))
        logs.append(log)
    return Both(found[0], found[1], logs[-1].records, seen.peak_bytes, found[2])


def called(call, args):
    return call(*args)


def own(values):
    """Copies: a part of a batch would hold all of it."""
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)
