"""Ports: where the gradients of whole homes gather, past autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.layout import Layout
from fsfunc.memory_kinds import count_as
from fsfunc.sharded import Home, Sharded, is_sharded

__all__ = ["Port", "collected", "open_ports"]


class Port:
    """Where the gradient of a home gathers, past autograd."""

    def __init__(self, home: Home):
        self.home = home
        self.grad: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        """Adds a reduced gradient, which is the port's to keep."""
        grad = grad.to(self.home.flat.dtype)
        count_as("gradients", [grad])
        self.grad = grad if self.grad is None else self.grad.add_(grad)


def open_ports(
    args: Any, argnums: Any, mine: Callable[[Layout], bool]
) -> dict[int, Port]:
    """A port for each home whose leaves are all differentiated here."""
    chosen = [args[i] for i in argnums]
    counts: dict[int, tuple[Home, int]] = {}
    for x in tree.leaves(chosen, is_leaf=is_sharded):
        if isinstance(x, Sharded) and x.home is not None and mine(x.layout):
            home, count = counts.get(id(x.home), (x.home, 0))
            counts[id(home)] = (home, count + 1)
    ports = {}
    for key, (home, count) in counts.items():
        real = home.flat.is_floating_point() and not home.flat.requires_grad
        if count == len(home.members) and real and home.port is None:
            ports[key] = home.port = Port(home)
    return ports


def collected(
    grads: tuple[Any, ...],
    args: Any,
    argnums: Any,
    ports: dict[int, Port],
    mean_size: int,
) -> tuple[Any, ...]:
    """The gradients' trees, with what the ports gathered in its places."""
    chosen = tuple(args[i] for i in argnums)
    old, treedef = tree.flatten(chosen, is_leaf=is_sharded)
    # Up to the arguments' leaves: a gradient of None is one leaf, a None in the
    # arguments is none.
    direct: list[Any] = treedef.flatten_up_to(grads)  # type: ignore[arg-type]
    flats: dict[int, Home] = {}
    for key, port in ports.items():
        grad = port.grad
        if grad is None:
            grad = torch.zeros_like(port.home.flat)
        flats[key] = port.home.like(grad)
    if flats and mean_size > 1:
        torch._foreach_div_([h.flat for h in flats.values()], mean_size)
    leaves = {key: home.leaves() for key, home in flats.items()}
    out = list(direct)
    for i, x in enumerate(old):
        if isinstance(x, Sharded) and id(x.home) in leaves:
            k = [id(m) for m in x.home.members].index(id(x.layout))  # type: ignore[union-attr]
            new = leaves[id(x.home)][k]
            if direct[i] is not None and direct[i]._local is not None:
                new.local.add_(direct[i].local)  # used beside a unit, as by tree_map
            out[i] = new
    return tree.unflatten(treedef, out)
