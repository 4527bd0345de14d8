"""Complex numbers as pairs of real ones.

A complex leaf is a leaf like others wherever it is only moved, added or scaled: its
buffer is complex, so no cut parts a number. An update sees its real and imaginary parts
as elements of their own, as ``torch.optim`` does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(x: Tensor) -> Tensor:
    """A complex tensor as a real one, ``[..., 2]``, in its memory; others themselves.

    One whose conjugation is still to be computed is computed, in memory of its own.

    >>> as_real(torch.tensor([1 + 2j])), as_real(torch.ones(1))
    (tensor([[1., 2.]]), tensor([1.]))
    """
    if not x.is_complex():
        return x
    if x.requires_grad and not x.numel():  # torch refuses the view's empty cotangent
        return torch.stack((x.real, x.imag), -1)
    return torch.view_as_real(x.resolve_conj())
