"""A small tree, whole or split over two ranks."""

import torch

import fsfunc as ff
from tests.checkpointing.drawn import laid_out, on

PAIR = {"data": 2}


def tree_of(n=6, step=3):
    layers = [{"w": torch.arange(1.0 * n).view(2, -1), "b": torch.ones(3) * i}
              for i in range(2)]  # fmt: skip
    return {"params": {"layers": layers, "h": torch.ones(2).bfloat16()}, "step": step}


def empty(state):
    zero = lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0  # noqa: E731
    return ff.tree.map(zero, state)


def split(n):
    """The layouts of ``tree_of`` on two ranks, in the order of its leaves."""
    half = ff.Split("data", 2, 1)
    w = ff.Layout((2, n // 2), torch.float32, (half,))
    return [None if x == "step" else w if x == "w" else ff.Layout(*x)
            for x in (((2,), torch.bfloat16), B, "w", B, "w", "step")]  # fmt: skip


B = (3,), torch.float32


def save_on_two(path, n=6, **options):
    """Saves `tree_of` with the matrices split over two ranks."""
    state = tree_of(n)
    on(PAIR, lambda mesh: ff.save(path, laid_out(state, split(n), mesh), **options))
    return state
