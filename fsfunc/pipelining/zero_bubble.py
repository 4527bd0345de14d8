"""Schedules of split backwards: parameters' gradients fill what would be bubbles.

The gradient of the inputs (I) is what the stage before waits for; that of the
parameters (W) can come at any later time, and only it gives the activations back.
"""

from __future__ import annotations

from fsfunc.pipelining.actions import Schedule, ScheduleError, numbered, ranks_for


def zb_h1(n_stages: int, n_microbatches: int) -> Schedule:
    """Return 1F1B with the backwards split and W put off by a rank's number.

    Args:
        n_stages: stages, as many as ranks.
        n_microbatches: microbatches of a batch, from 1 on.

    Raises:
        ScheduleError: a count below 1.

    Cost: bubble (P-1)(f+i-w) for M >= P, w <= f and w <= i; every rank holds P
    microbatches, as many as the first rank of 1F1B.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.

    >>> from fsfunc.pipelining.actions import listing
    >>> print(listing(zb_h1(2, 3)))
    0: F0 F1 I0 W0 F2 I1 W1 I2 W2
    1: F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    ranks_for(n_stages, n_microbatches)
    rows = []
    for rank in range(n_stages):
        ahead = min(n_stages - 1 - rank, n_microbatches)
        pattern = ["F"] * ahead
        for n in range(n_microbatches):
            pattern += (
                ["F"] * (ahead + n < n_microbatches) + ["I"] + ["W"] * (n >= rank)
            )
        pattern += ["W"] * min(rank, n_microbatches)
        rows.append(numbered([(kind, rank) for kind in pattern], n_microbatches))
    return tuple(rows)


def zb_v(n_stages: int, n_microbatches: int, *, chunks: int = 2) -> Schedule:
    """Return the zero-bubble schedule of two stages a rank, laid out as a V.

    Rank r has the stages r and 2P-1-r, so that the first and the last stage are on
    one rank and the loss's gradient starts where the forward began.

    Args:
        n_stages: all stages, 2P.
        n_microbatches: microbatches of a batch, from 1 on.
        chunks: stages on each rank: 2, no other.

    Raises:
        ScheduleError: a count below 1, an odd number of stages, chunks other than 2.

    Cost: for f = i = w and M >= 2P-1 no bubble within a rank's span, and (P-1)f/2 by
    makespan; every rank holds P microbatches. For fewer microbatches it is the
    schedule of 2P-1 with the surplus left out: `greedy` finds shorter ones there.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 6.

    >>> from fsfunc.pipelining.actions import listing
    >>> print(listing(zb_v(2, 1)))
    0: F0@0 F0@1 I0@1 W0@1 I0@0 W0@0
    """
    if chunks != 2:
        raise ScheduleError(f"zb_v has 2 stages on each rank, got chunks={chunks}")
    ranks = ranks_for(n_stages, n_microbatches, chunks)
    count = max(n_microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        F0, I0, W0 = (("F", rank), ("I", rank), ("W", rank))
        last = n_stages - 1 - rank
        F1, I1, W1 = (("F", last), ("I", last), ("W", last))
        below = ranks - rank
        pattern = [F0] * (2 * below - 1) + [F1, F0] * rank + [F1, I1, W1] * below
        fresh = count - (2 * ranks - 1 - rank)  # forwards of the first stage left
        pattern += [F0, I0, W0, F1, I1, W1] * fresh
        pattern += [I0, W0, F1, I1, W1] * (count - ranks - fresh)
        pattern += [I0, I1] * rank + [I0, W0] * below + [W1] * rank + [W0] * rank
        rows.append(numbered(pattern, n_microbatches))
    return tuple(rows)
