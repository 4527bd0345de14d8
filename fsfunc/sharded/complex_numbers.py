"""Complex numbers as pairs of real ones.

A complex leaf is a leaf like others wherever it is only moved, added or scaled: its
buffer is complex, so no cut parts a number. An update sees its real and imaginary parts
as elements of their own, as ``torch.optim`` does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(x: Tensor) -> Tensor:
    """Returns a complex tensor as a real one, ``[..., 2]``; others as they are.

    The result lies in the memory of ``x``, unless its conjugation is still to be
    computed (torch's lazy ``x.conj()``): then it is a copy.

    >>> as_real(torch.tensor([1 + 2j])), as_real(torch.ones(1))
    (tensor([[1., 2.]]), tensor([1.]))
    """
    if not x.is_complex():
        return x
    # torch refuses the empty cotangent of `view_as_real`.
    if x.requires_grad and not x.numel():
        return torch.stack((x.real, x.imag), -1)
    return torch.view_as_real(x.resolve_conj())
