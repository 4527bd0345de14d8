"""Units that ask for a tensor's value, which a fake tensor has not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.tracing.dataflow import Flow, tensors

__all__ = ["run_on_data"]


def run_on_data(
    flow: Flow, fake: Any, call: Any, params: Any, inputs: Any, keywords: Any
) -> Any:
    """A unit's outputs as fake tensors, from one run on tensors with data.

    Floating and boolean ones hold ones, integers zeros: what an index, a divisor and a
    mask can be. Only shapes and dtypes are kept of it.

    Args:
        flow: the mode that is on, counting for the body that runs.
        fake: the mode around it that makes fake tensors; None if it is not ours.

    Raises:
        RuntimeError: there are other modes on, so that these cannot be taken off.
    """
    body = flow.body
    if fake is None or body is None or _torch.active_modes()[-2:] != _OURS:
        raise RuntimeError("other modes are on, under which nothing has data")
    body.real, body.flops = True, 0
    body.kept.clear()
    leaves, treedef = tree.flatten((params, inputs, keywords))
    flow.__exit__(None, None, None)
    fake.__exit__(None, None, None)
    try:
        real = [_with_data(x) if isinstance(x, Tensor) else x for x in leaves]
        params, inputs, keywords = tree.unflatten(treedef, real)
        with flow:
            out = call.body(params, *inputs, **keywords)
        body.keep_saved((params, inputs, keywords), out)
    finally:
        fake.__enter__()
        flow.__enter__()
    for x in tensors((real, out)):
        body.kept.pop(_torch.storage_key(x), None)
    given = {id(r): x for r, x in zip(real, leaves, strict=True)}
    return tree.map(
        lambda x: given.get(id(x), _fake(x)) if isinstance(x, Tensor) else x, out
    )


_OURS = ["_HereFakeMode", "Flow"]


def _with_data(x: Tensor) -> Tensor:
    fill = 1 if x.dtype.is_floating_point or x.dtype == torch.bool else 0
    real = torch.full(tuple(x.shape), fill, dtype=x.dtype, device=x.device)
    return real.requires_grad_(x.requires_grad)


def _fake(x: Tensor) -> Tensor:
    fake = torch.empty_strided(
        tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device
    )
    return fake.requires_grad_(x.requires_grad)
