"""Tangents of forward mode, at each of its levels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    maybe_get_level,
)
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from fsfunc._torch.functorch import forward_ad_active


def tangents_of(x: Tensor) -> list[Tensor]:
    """The tangents of ``x`` at every level of forward mode, and those of these."""
    if not forward_ad_active() or not (x.is_floating_point() or x.is_complex()):
        return []
    stack = get_interpreter_stack()
    tangent = None
    if not stack or stack[-1].key() == TransformType.Jvp:
        tangent = torch.autograd.forward_ad.unpack_dual(x).tangent
    found = [] if tangent is None else [tangent]
    if not stack:
        return found
    level = stack[-1].level()
    below = [
        get_unwrapped(y) if maybe_get_level(y) == level else y for y in [x, *found]
    ]
    with retrieve_current_functorch_interpreter().lower():
        return found + [t for y in below for t in tangents_of(y)]
