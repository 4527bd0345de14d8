"""Lesson 14. Judge a run on the way, stop it, and go on with other ranks.

The plain program trains on rows with noise, and is judged by rows that it never saw:

    w <- step(w, rows at p, noise from g)          V(w) = 1/N sum_i e(w, x_i)

V over ranks is a mean of means where all have equally many rows; else it is a sum of
errors over a sum of counts. And a run follows from three things: its state, position p
in the data and generator g. Without one of them it goes on too, but as another run.

    python examples/course/14_evaluate_and_resume.py
"""

import tempfile

import torch

import fsfunc as ff

DIM, BATCH, STOP, END = 8, 16, 6, 10  # stopped after 6 steps of 10
torch.manual_seed(0)
params, held_out = list(torch.randn(2, DIM, DIM) / DIM**0.5), torch.randn(10, DIM)
layer, optimizer = ff.unit(lambda w, x: torch.tanh(x @ w)), ff.sharded_adam(3e-2)
four, two = (ff.make_mesh({"data": n}) for n in (4, 2))


def errors(params, x):  # e, one number a row
    return (layer(params[1], layer(params[0], x)) - x.sin()).square().mean(1)


def noisy_loss(params, x):  # what is trained on; outside units all ranks draw alike
    return errors(params, x + 0.3 * torch.randn(DIM)).mean()


def judgement(params, x):  # V: a sum and a count, divided once all ranks' are added
    return ff.Weighted((e := errors(params, x)).sum(), len(e))


# 1. V of 10 rows on 4 ranks, which have 3, 3, 2 and 2: by hand, and by the library.
#    ff.value is value_and_grad without gradients; it keeps nothing for a backward.
def judged():
    rows = ff.local_batch(held_out, four, "data", uneven=True)
    e, value = errors(params, rows), ff.shard(ff.value(judgement), four, "data")
    total, count = ff.psum((e.sum(), torch.ones_like(e).sum()), "data")
    found = {"mean of means": ff.pmean(e.mean(), "data"), "sum / count": total / count}
    return found | {"ff.value": value(ff.place(value, params, rows), rows)}


plain = ff.value(judgement)(params, held_out)
print(f"V is {plain:.4f} on one device; on 4 ranks, with uneven rows,")
for way, found in ff.spmd(judged, four)()[0].items():
    print(f"  {way:13} {found:.4f}", "right" if found.allclose(plain) else "wrong")


# 2. A run that saves itself as it stops, with torch's generator, or goes on from there.
def run(mesh, steps, folder, resumes=False, forgets=""):
    torch.manual_seed(1)
    step = ff.shard(optimizer(ff.value_and_grad(noisy_loss)), mesh, "data")
    data, losses = ff.batches(torch.randn(64, DIM), mesh, "data", BATCH, seed=2), []
    state = ff.init_state(step, params, optimizer, torch.empty(BATCH // mesh.size, DIM))
    run = {"state": state, "position": data.position}
    if resumes:
        run = ff.load(ff.latest(folder), run, random=forgets != "generator")
        data.seek(run["position"] if forgets != "position" else data.position)
    for _ in range(steps):
        run["state"], metrics = step(run["state"], next(data))
        losses.append(metrics["loss"])
    if not resumes:
        ff.save(f"{folder}/{steps}", run | {"position": data.position})
    return torch.stack(losses)


with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
    whole, _ = (ff.spmd(run, four)(four, *given)[0] for given in ((END, a), (STOP, b)))
    print(f"losses {STOP + 1} to {END}:", *(f"{x:.3f}" for x in whole[STOP:]))
    for mesh, forgets in (four, ""), (two, ""), (four, "position"), (four, "generator"):
        found = ff.spmd(run, mesh)(mesh, END - STOP, b, True, forgets)[0]
        off, way = (found - whole[STOP:]).abs().max(), forgets and f"without {forgets}"
        print(f"resumed on {mesh.size} ranks {way:17} off by {off:.0e}")
        assert forgets or off <= 1e-6 * (mesh is two)  # on 4 again, bit for bit
