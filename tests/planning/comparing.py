"""A step planned and run, and what the two show."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import unchanged


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
        sent: what the real call sent; ``peak``: the most bytes that it held.
        out: what it returned.
    """

    plan: Any
    sent: list
    peak: int
    out: Any

    def check(self, memory=0.0):
        """The plan's records are the run's; so is its peak, but for a share."""
        plan = self.plan.ranks[0]
        assert facts(plan.records) == facts(self.sent)
        close(plan.peak_bytes, self.peak, memory * self.peak)


def close(found, expected, distance):
    assert abs(found - expected) <= distance, (found, expected)


def totals(rank_plan):
    """FLOPs by unit and phase, where there are any."""
    found = {key: work.flops for key, work in rank_plan.work.items()}
    return {key: flops for key, flops in found.items() if flops}


def planned_and_run(step, *args):
    """:class:`Both` of ``step(*args)`` on this rank, called from one line of source.

    A plan sends nothing, and leaves what it is given as it was.
    """
    planned, found = partial(ff.plan, step), []
    held = ff.testing.live_bytes(*args)
    for call, around in (planned, unchanged(args)), (step, held):
        with ff.ledger() as log, around as seen:
            found.append(called(call, args))
        assert call is step or log.records == []
    return Both(found[0], log.records, seen.peak_bytes, found[1])


def called(call, args):
    return call(*args)


def own(values):
    """Copies: a part of a batch would hold all of it."""
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)
