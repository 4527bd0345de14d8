"""torch's own database of operators (``op_db``), through `shard`.

    python -m tests.judges.operators                all, by the samples of torch's tests
    python -m tests.judges.operators --sample 12 0  some, drawn by a seed
    python -m tests.judges.operators --part 0 8     the first of eight parts

Each operator runs in three places: in a unit, between units, and on the leaves of a
state outside a loss. It prints the counts, and the refused by cause; it ends with 1 if
a gradient or a value was wrong. A program: torch's test code, where it is imported,
changes settings of the whole process.
"""

import sys
import warnings
from itertools import islice

import torch

import fsfunc as ff
from fsfunc import tree
from tests.judges.verdicts import (
    MESH,
    SHARES,
    Unjudged,
    derived,
    drawn,
    score,
    tensors,
    told,
    verdict,
)

SAMPLES = 2  # of each operator, of those of torch's tests


def over_ranks(step, params, **how):
    """What each rank gets of ``step(params, share)``, whole."""

    def rank():
        share = ff.local_batch(SHARES, MESH, "data")
        sharded = ff.shard(step, MESH, "data")
        return ff.unshard(sharded(ff.place(sharded, params, share, **how), share))

    return ff.spmd(rank, MESH)()


def in_a_unit(f, rebuilt):
    unit = ff.unit(lambda p, share: f(rebuilt(p)) * share.sum())
    return ff.value_and_grad(unit)


def between_units(f, rebuilt):
    before = ff.unit(lambda p: [x * 1 for x in p])
    after = ff.unit(lambda p, y, share: y * share.sum())
    return ff.value_and_grad(lambda p, s: after((), f(rebuilt(before(p))), s))


PLACES = {"in a unit": in_a_unit, "between units": between_units}


def on_leaves(run, given, rebuilt):
    """``run`` of leaves that lie in parts, outside the loss; all as the first does."""
    reads = ff.unit(lambda x, share: x.sum() * share.sum())

    def step(p, share):
        reads(p[0], share)
        return tree.map(lambda *xs: run(rebuilt(xs)), *p)

    like = {str(i): "0" for i in range(1, len(given))}
    return over_ranks(step, given, like=like)


def arguments_of(op, sample):
    """The floating tensors of a sample, what rebuilds it, and the call."""
    given, rebuilt = tensors((sample.input, sample.args, sample.kwargs))

    def run(values):
        first, rest, named = values
        return op(first, *rest, **named)

    return given, rebuilt, run


def judge(given, rebuilt, run):
    """By place, what a sample is judged to be; none where torch has no answer."""

    def f(values):
        return score(run(values))

    try:
        if not any(x.numel() for x in given):
            raise Unjudged("there are no elements")
        grads = derived(lambda xs: f(rebuilt(xs)), given)
    except Unjudged:
        return {}
    found = {}
    for place, made in PLACES.items():
        step = made(f, rebuilt)
        found[place] = verdict(lambda s=step: _grads(over_ranks(s, given)), grads)
    one = run(rebuilt(given))
    alike = given[0].ndim and len({x.shape for x in given}) == 1
    if alike and isinstance(one, torch.Tensor) and one.dtype == torch.float64:
        found["on leaves"] = verdict(lambda: on_leaves(run, given, rebuilt), one)
    return found


def _grads(results):
    return [grads for _, grads in results]


def main(arguments):
    warnings.simplefilter("ignore")  # torch's own, of what it deprecates
    from torch.testing._internal.common_methods_invocations import op_db

    usable = [op for op in op_db if torch.float64 in op.dtypes and op.supports_autograd]
    verdicts = {}
    for op in drawn(sorted(usable, key=lambda op: op.full_name), arguments):
        samples = op.sample_inputs("cpu", torch.float64, requires_grad=False)
        for i, sample in enumerate(islice(samples, SAMPLES)):
            for place, v in judge(*arguments_of(op, sample)).items():
                verdicts[f"{op.full_name} {i}", place] = v
    return told("operators", verdicts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
