"""torch's own database of modules (``module_db``), through `from_module`.

    python -m tests.judges.modules                  all; --sample and --part as in
    python -m tests.judges.modules --sample 6 0     `tests.judges.operators`

Each runs in a unit, its inputs differentiated too: under `shard`, under `remat` inside
it, and in a pipeline. It ends with 1 if a gradient was wrong.
"""

import sys
import warnings
from itertools import islice

import torch

import fsfunc as ff
from tests.judges.verdicts import (
    MESH,
    SHARES,
    Unjudged,
    derived,
    drawn,
    refused,
    score,
    tensors,
    told,
    verdict,
)

SAMPLES = 2  # of each module, of those of torch's tests
STAGES = ff.make_mesh({"pipe": 2}, "simulated")
STACKS = {
    "shard": lambda f: ff.shard(f, MESH, "data"),
    "shard(remat)": lambda f: ff.shard(ff.remat(f), MESH, "data"),
    "pipeline": lambda f: ff.pipeline(f, STAGES, "pipe", n_microbatches=2),
}


def over_ranks(loss, params, stack):
    """The gradients on each rank, whole."""
    mesh = STAGES if stack == "pipeline" else MESH

    def rank():
        f, share = STACKS[stack](ff.value_and_grad(loss)), SHARES
        if mesh is MESH:
            share = ff.local_batch(SHARES, mesh, "data")
        return ff.unshard(f(ff.place(f, params, share), share)[1])

    return ff.spmd(rank, mesh)()


def judge(module, args, named):
    """By stack, what a module with its arguments is judged to be."""
    given, rebuilt = tensors((args, named))
    params = dict(module.named_parameters())
    names, every = list(params), [x.detach().clone() for x in params.values()] + given
    if any(x.dtype != torch.float64 for x in every):
        return {}

    def plain(leaves):
        args, named = rebuilt(leaves[len(names) :])
        params = dict(zip(names, leaves, strict=False))
        return score(torch.func.functional_call(module, params, args, named))

    try:
        grads = derived(plain, every)
    except Unjudged:
        return {}
    try:
        apply, _, buffers = ff.from_module(module)
    except Exception as error:
        return dict.fromkeys(STACKS, refused(error))

    @ff.unit
    def scored(leaves):
        args, named = rebuilt(leaves[len(names) :])
        params = dict(zip(names, leaves, strict=False))
        return score(apply(params, buffers, *args, **named))

    shared = ff.unit(lambda _, y, share: y * share.sum())
    loss = lambda p, share: shared((), scored(p), share)  # noqa: E731
    return {
        stack: verdict(lambda stack=stack: over_ranks(loss, every, stack), grads)
        for stack in STACKS
    }


def main(arguments):
    warnings.simplefilter("ignore")  # torch's own, of what it deprecates
    from torch.testing._internal.common_modules import module_db

    infos = [m for m in module_db if torch.float64 in m.dtypes and not m.is_lazy]
    verdicts = {}
    for info in drawn(sorted(infos, key=lambda m: m.name), arguments):
        inputs = info.module_inputs_func(info, "cpu", torch.float64, False, False)
        for i, one in enumerate(islice(inputs, SAMPLES)):
            if one.forward_input is None:
                continue
            torch.manual_seed(0)
            made, call = one.constructor_input, one.forward_input
            module = info.module_cls(*made.args, **made.kwargs).double().eval()
            for stack, v in judge(module, call.args, call.kwargs).items():
                verdicts[f"{info.name} {i}", stack] = v
    return told("modules", verdicts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
