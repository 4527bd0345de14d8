"""torch's own database of optimizers (``optim_db``), through `from_torch`.

    python -m tests.judges.optimizers               all; --sample and --part as in
    python -m tests.judges.optimizers --sample 6 0  `tests.judges.operators`

Each, with each of the options that torch's tests give it, makes a few steps at zero=1
and zero=3. It ends with 1 if parameters were wrong.
"""

import sys
import warnings

import torch

import fsfunc as ff
from tests.judges.verdicts import MESH, SHARES, drawn, refused, told, verdict

STEPS = 4
SHAPES = {"w": (4, 3), "b": (3,), "s": ()}


def given():
    """Parameters, and the gradients of each step."""
    draw = torch.Generator().manual_seed(0)
    new = lambda s: torch.randn(s, generator=draw, dtype=torch.float64)  # noqa: E731
    first, *grads = [{k: new(s) for k, s in SHAPES.items()} for _ in range(STEPS + 1)]
    return first, grads


def alone(kind, options):
    """The parameters after torch's own steps."""
    first, grads = given()
    params = {k: torch.nn.Parameter(x) for k, x in first.items()}
    optimizer = kind(params.values(), **options)
    for each in grads:
        for k, g in each.items():
            params[k].grad = g.clone()
        optimizer.step()
    return {k: p.detach() for k, p in params.items()}


@ff.unit
def product(params, grads, share):
    """Of which the gradient by the parameters is what is given, in the mean."""
    return sum((params[k] * g).sum() for k, g in grads.items()) * share.sum()


def over_ranks(optimizer, zero):
    def rank():
        first, grads = given()
        share = ff.local_batch(SHARES, MESH, "data")
        step = ff.shard(optimizer(ff.value_and_grad(product)), MESH, "data", zero=zero)
        state = ff.init_state(step, first, optimizer, grads[0], share)
        for each in grads:
            state, _ = step(state, each, share)
        return ff.unshard(state.params)

    return ff.spmd(rank, MESH)()


def judge(kind, options):
    """By stage of ZeRO, what an optimizer is judged to be."""
    try:
        optimizer = ff.from_torch(kind, **options)
    except Exception as error:
        return {"made": refused(error)}
    try:
        expected = alone(kind, options)
    except Exception:  # it needs a closure, or sparse gradients
        return {}
    return {
        f"zero={zero}": verdict(lambda zero=zero: over_ranks(optimizer, zero), expected)
        for zero in (1, 3)
    }


def main(arguments):
    warnings.simplefilter("ignore")  # torch's own, of what it deprecates
    from torch.testing._internal.common_optimizers import optim_db

    cases = [
        (info.optim_cls, one.desc, one.kwargs)
        for info in optim_db
        for one in info.optim_inputs_func(device="cpu")
    ]
    verdicts = {}
    for kind, name, options in drawn(cases, arguments):
        for place, v in judge(kind, options).items():
            verdicts[f"{kind.__name__}, {name}", place] = v
    return told("optimizers", verdicts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
