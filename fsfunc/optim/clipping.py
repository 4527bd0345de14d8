"""Clipping by the norm of all gradients, exact where they are sharded."""

from __future__ import annotations

from fsfunc.optim.base import Optimizer, State, check_numbers
from fsfunc.optim.elements import global_norm, tree_scale
from fsfunc.optim.leafwise import Tree


def clip_by_global_norm(
    max_norm: float, eps: float = 1e-6, *, p: float = 2.0
) -> Optimizer:
    """The transformation that scales gradients down to a global norm of ``max_norm``.

    ``g min(max_norm / (global_norm(grads) + eps), 1)``, as
    ``torch.nn.utils.clip_grad_norm_`` does it, exact on sharded gradients.

    Args:
        max_norm: above 0.
        eps: added to the norm.
        p: which norm; see `global_norm`.

    Raises:
        ValueError: ``max_norm`` or ``p`` is not above 0, or ``eps`` is negative.

    Cost: that of `global_norm`, one pass and one fresh copy of the gradients, which
    are left as they were. No branch: nothing waits for the device.

    Source: Pascanu et al., On the difficulty of training recurrent networks, 2013.

    >>> import torch
    >>> clip = clip_by_global_norm(1.0)
    >>> clip.update({"w": torch.tensor([3.0]), "b": torch.tensor(4.0)}, ())[0]
    {'w': tensor([0.6000]), 'b': tensor(0.8000)}
    """
    check_numbers(max_norm=max_norm, p=p, eps=eps)
    if not (max_norm > 0 and p > 0 and eps >= 0):
        raise ValueError(
            f"max_norm is {max_norm}, p is {p} and eps is {eps}: the first two must be "
            "above 0, and eps 0 or more"
        )

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        factor = (max_norm / (global_norm(grads, p) + eps)).clamp(max=1.0)
        return tree_scale(grads, factor), state

    return Optimizer(lambda params: (), update)
