"""Train a mixture of experts whose experts lie on different ranks.

    python examples/moe.py                              4 simulated ranks, 8 experts
    torchrun --nproc-per-node 2 examples/moe.py         2 real processes
    python examples/moe.py --capacity 0                 nobody is dropped

Tokens are points of several clouds, each with a map of its own, which one small network
cannot learn as well as experts can that divide the clouds among them. Every rank has
tokens of its own and an equal share of the experts; tokens go to their experts and come
back by all-to-alls. `python examples/moe.py --ranks 1` runs the same program on one.
"""

import argparse
import os

import optree
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fsfunc as ff

DIM, HIDDEN = 16, 32
BALANCE, CALM = 1e-2, 1e-3  # what uneven experts, and large logits, cost
# Stacked along dim 0, experts are split over the axis of the data.
LAYOUTS = {"experts/*": ff.Split(0, "data")}


def init_params(experts: int, seed: int) -> dict:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) / shape[-1] ** 0.5

    return {
        "gate": normal(experts, DIM),
        "experts": {
            "up": normal(experts, HIDDEN, DIM),
            "down": normal(experts, DIM, HIDDEN),
        },
    }


def expert(params: dict, x: Tensor) -> Tensor:
    """What one expert does: [tokens, DIM] to the same."""
    return F.linear(torch.relu(F.linear(x, params["up"])), params["down"])


def make_loss(capacity: float | None):
    @ff.unit
    def mixture(params: dict, x: Tensor) -> tuple[Tensor, Tensor, ff.Summed]:
        logits = F.linear(x, params["gate"])
        routing = ff.nn.top_k_gating(logits, 2, capacity_factor=capacity)
        y = ff.nn.expert_layer(x, routing, expert, params["experts"])
        cost = BALANCE * routing.aux_loss + CALM * routing.z_loss
        seen = {"counts": routing.counts, "dropped": routing.dropped}
        return y, cost, ff.Summed(seen)

    def loss_fn(params: dict, batch: dict) -> tuple[Tensor, dict]:
        y, cost, seen = mixture(params, batch["x"])
        error = (y - batch["y"]).square().mean()
        return error + cost, {"error": error.detach(), "routed": seen}

    return loss_fn


def draw_batch(tokens: int, clouds: int, seed: int) -> dict[str, Tensor]:
    """Points of clouds, and what the map of each makes of them."""
    fixed = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(clouds, DIM, generator=fixed)
    maps = torch.randn(clouds, DIM, DIM, generator=fixed) / DIM**0.5
    draw = torch.Generator().manual_seed(seed)
    cloud = torch.randint(clouds, (tokens,), generator=draw)
    x = centers[cloud] + 0.3 * torch.randn(tokens, DIM, generator=draw)
    return {"x": x, "y": torch.einsum("td,tde->te", x - centers[cloud], maps[cloud])}


def train(args: argparse.Namespace, mesh: ff.Mesh) -> list[float]:
    """The errors of a run; every rank runs this, and rank 0 shows it."""
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(args.lr))
    loss_fn = make_loss(args.capacity or None)
    on_gpu = mesh.backend == "processes" and torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"

    def train_step(state, batch):
        (_, seen), grads = ff.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
        return state.apply_gradients(grads, optimizer), seen

    step = ff.donate(ff.shard(train_step, mesh, "data", zero=3))

    def part(number: int) -> dict[str, Tensor]:
        whole = draw_batch(args.tokens, args.experts, number)
        mine = ff.local_batch(whole, mesh, "data")
        return {name: x.to(device) for name, x in mine.items()}

    whole = init_params(args.experts, args.seed)
    params = optree.tree_map(lambda x: x.to(device), whole)
    state = ff.init_state(step, params, optimizer, part(0), layouts=LAYOUTS)
    console, errors = Console(quiet=mesh.rank != 0, highlight=False), []
    seen, moved = {}, 0.0
    for number in range(1, args.steps + 1):
        with ff.ledger() as log:
            state, seen = step(state, part(number))
        moved = float(log.bytes("data", "all_to_all"))
        errors.append(seen["error"].item())
        if number % max(1, args.steps // 5) == 0 or number == 1:
            lost = int(seen["routed"].tree["dropped"])
            console.print(
                f"step {number:4}  error {errors[-1]:.4f}  "
                f"dropped {lost} of {2 * args.tokens}"
            )
    table = Table("expert", "on rank", "tokens", title="the last batch")
    share = args.experts // mesh.size
    for number, count in enumerate(seen["routed"].tree["counts"].tolist()):
        table.add_row(str(number), str(number // share), f"{count:.0f}")
    console.print(table)
    console.print(f"sent to experts and back in one step: {moved:,.0f} bytes")
    return errors


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="simulated ranks (default: 4)")
    add("--experts", type=int, default=8, help="shared out evenly (default: 8)")
    add("--tokens", type=int, default=512, help="of a global batch (default: 512)")
    add("--steps", type=int, default=200, help="updates (default: 200)")
    add("--lr", type=float, default=1e-2, help="learning rate (default: 0.01)")
    add("--seed", type=int, default=0, help="of the parameters (default: 0)")
    add(
        "--capacity",
        type=float,
        default=1.25,
        help="places of an expert, in even shares; 0: as many as come (default: 1.25)",
    )
    args = parser.parse_args()
    args.ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    for name in ("experts", "tokens"):
        if getattr(args, name) % args.ranks:
            parser.error(f"--{name} must be a multiple of the {args.ranks} ranks")
    return args


if __name__ == "__main__":
    options = settings()
    everyone = ff.make_mesh({"data": options.ranks})
    ff.spmd(train, everyone)(options, everyone)
