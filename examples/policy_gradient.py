"""Generate with layers split over "model", train at zero 3: a policy gradient.

    python examples/policy_gradient.py                            4 simulated ranks
    torchrun --nproc-per-node 4 examples/policy_gradient.py       4 processes
    python examples/policy_gradient.py --devices 1                one device, no mesh

A small transformer is given a digit and writes six more. The reward is the share of
these that count on by one, as all of 7 8 9 0 1 2 3 do. It writes a group of rows for a
prompt; those that did better than the mean of their group become likelier, others less.

`train` is the program of one device, and `train_on_ranks` that of many: with the table
`LAYOUTS` ten lines are new. Digits, rewards and losses are the same.
"""

import argparse
import os

import torch
import torch.nn.functional as F

import fsfunc as ff

DIGITS, LENGTH, DIM, HEADS, HIDDEN = 10, 6, 32, 4, 128
PROMPTS, GROUP = 16, 16  # rows of a step: 16 prompts, each written to 16 times

# The policy. On whole weights its layers are torch's own; on split ones each rank has
# some of the heads and of the hidden features.


@ff.unit
def embed(p, tokens):
    return p["digit"][tokens] + p["position"][: tokens.shape[1]]


@ff.unit
def block(p, x):
    qkv = ff.nn.column_linear(norm(x), p["attention"]["into"])
    y = F.scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4), is_causal=True)
    x = x + ff.nn.row_linear(y.transpose(1, 2).flatten(2), p["attention"]["out"])
    hidden = F.gelu(ff.nn.column_linear(norm(x), p["mlp"]["into"]))
    return x + ff.nn.row_linear(hidden, p["mlp"]["out"])


@ff.unit
def head(p, x):
    return F.linear(norm(x), p["digit"]).log_softmax(-1)


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


def log_probabilities(params, tokens):
    """[rows, n] digits to [rows, n, DIGITS], of the digit that follows each of them."""
    return head(params["head"], block(params["block"], embed(params["embed"], tokens)))


def init():
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):  # float64: no digit is drawn otherwise for a rounding
        x = torch.randn(shape, generator=draw, dtype=torch.float64)
        return x / shape[-1] ** 0.5

    into = normal(HEADS, 3, DIM // HEADS, DIM)
    return {
        "embed": {"digit": normal(DIGITS, DIM), "position": normal(LENGTH, DIM)},
        "block": {
            "attention": {"into": into, "out": normal(DIM, DIM)},
            "mlp": {"into": normal(HIDDEN, DIM), "out": normal(DIM, HIDDEN)},
        },
        "head": {"digit": normal(DIGITS, DIM) / 10},  # nearly even odds
    }


# A step: write, judge, learn. The digits of a row follow from its own noise: they are
# the same on whichever rank it is written, and on both ranks that share its layers.


def draw_batch(number):
    """Draws the prompts of a step, and Gumbel noise [rows, LENGTH, DIGITS]."""
    draw = torch.Generator().manual_seed(number)
    prompts = torch.randint(DIGITS, (PROMPTS, 1), generator=draw)
    shape = PROMPTS * GROUP, LENGTH, DIGITS
    noise = torch.rand(shape, generator=draw, dtype=torch.float64)
    rows = prompts.repeat_interleave(GROUP, 0)
    return {"prompt": rows, "noise": -(-noise.log()).log()}


@torch.no_grad()
def write(params, batch):
    """Adds LENGTH digits to each prompt; argmax(log p + noise) is k in p_k of cases."""
    tokens = batch["prompt"]
    for i in range(LENGTH):
        scores = log_probabilities(params, tokens)[:, -1] + batch["noise"][:, i]
        tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], 1)
    return tokens


def reward(tokens):
    """The share of a row's digits that are one more than the digit before."""
    return (tokens[:, 1:] == (tokens[:, :-1] + 1) % DIGITS).double().mean(1)


def loss_fn(params, tokens):
    rewards = reward(tokens)
    groups = rewards.view(-1, GROUP)
    better = groups - groups.mean(1, keepdim=True)
    written = log_probabilities(params, tokens[:, :-1]).gather(2, tokens[:, 1:, None])
    return -(better.view(-1, 1, 1) * written).mean(), {"reward": rewards.mean()}


optimizer = ff.sharded_adam(1e-2)


def train_step(state, tokens):
    (loss, seen), grads = ff.value_and_grad(loss_fn, has_aux=True)(state.params, tokens)
    return state.apply_gradients(grads, optimizer), {"loss": loss, **seen}


def train(steps):
    """Yields each step's state, what it has seen, and the rows that it learns from."""
    state = ff.TrainState(params := init(), optimizer.init(params))
    for number in range(steps):
        batch = draw_batch(number)
        tokens = write(state.params, batch)
        state, seen = train_step(state, tokens)
        yield state, seen, tokens


# The same on ranks. To train, each has one range of a unit's parameters; to generate,
# its part of each layer, and all of what is not split. `place` sends what a rank has
# not. Ranks along "model" write rows together, and divide them among them to learn.
LAYOUTS = {"**/into": ff.Split(0, "model"), "**/out": ff.Split(1, "model")}


def train_on_ranks(steps, mesh):
    """Yields each step's state, what it has seen, and the rows that it learns from."""
    generate = ff.shard(write, mesh, "data", zero=0)
    step = ff.shard(train_step, mesh, ("data", "model"), zero=3)
    rows = torch.zeros(PROMPTS * GROUP // mesh.size, 1 + LENGTH, dtype=torch.long)
    state = ff.init_state(step, init(), optimizer, rows)
    for number in range(steps):
        batch = ff.local_batch(draw_batch(number), mesh, "data")
        params = ff.place(generate, state.params, batch, layouts=LAYOUTS)
        tokens = ff.local_batch(generate(params, batch), mesh, "model")
        state, seen = step(state, tokens)
        yield state, seen, tokens


def move_bytes(params, mesh):
    """Counts bytes of a move: those that this rank sends, and those that it lacked."""
    generate = ff.shard(write, mesh, "data", zero=0)
    batch = ff.local_batch(draw_batch(0), mesh, "data")
    with ff.ledger() as log:
        moved = ff.place(generate, params, batch, layouts=LAYOUTS)
    # No two parameters are equal: a number tells which one it is.
    trees = [ff.tree.leaves(t) for t in (params, moved)]  # this rank's parts
    has, needs = (torch.cat([part.flatten() for part in parts]) for parts in trees)
    lacked = needs[~torch.isin(needs, has)]
    return int(log.bytes(("data", "model"), "all_to_all")), lacked.nbytes


def show(number, seen, tokens):
    digits = " ".join(map(str, tokens[0].tolist()))
    loss, rewarded = seen["loss"].item(), seen["reward"].item()
    print(f"step {number:2}  loss {loss:7.4f}  reward {rewarded:.3f}  {digits}")


def run_on_ranks(options, mesh):
    for number, (state, *seen) in enumerate(train_on_ranks(options.steps, mesh)):
        if number == 0:  # rank 0 prints what all of them count
            bytes_here = torch.tensor([move_bytes(state.params, mesh)])
            sent, lacked = ff.all_gather(bytes_here, tuple(mesh.axes)).T.tolist()
            if mesh.rank == 0:
                print("a move: bytes that each rank sends", *sent)
                print(f"in all {sum(sent):,}, and ranks lack {sum(lacked):,}")
        if mesh.rank == 0 and number % options.every == 0:
            show(number, *seen)


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4, help="1, or simulated ranks")
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--every", type=int, default=5, help="steps to a printed line")
    options = parser.parse_args(argv)
    options.devices = int(os.environ.get("WORLD_SIZE", options.devices))
    if options.devices not in (1, 2, 4, 8, 16):
        parser.error("--devices is 1, 2, 4, 8 or 16: a group's rows lie on one rank")
    return options


def main(options):
    if options.devices == 1:
        for number, (_, *seen) in enumerate(train(options.steps)):
            if number % options.every == 0:
                show(number, *seen)
        return
    mesh = ff.make_mesh({"data": options.devices // 2, "model": 2})
    ff.spmd(run_on_ranks, mesh)(options, mesh)


if __name__ == "__main__":
    main(parse())
