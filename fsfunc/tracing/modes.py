"""Seeing every operator of a thread, as all who look below autograd do."""

from __future__ import annotations

from typing import Any

import torch

from fsfunc import _torch

__all__ = ["OperatorMode"]

_DEVICE: Any = torch.ops.prim.device.default


class OperatorMode(_torch.TorchDispatchMode):
    """A dispatch mode, which backward passes and ``torch.func`` do not escape.

    ``operator`` is told of each operator that runs, and runs it.
    """

    fake: Any = None

    def __enter__(self) -> Any:
        self.fake = _torch.fake_mode()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and isinstance(args[0], _torch.FakeTensor):
            return _torch.device_of(args[0])  # asked all the time
        return self.operator(func, args, kwargs or {})

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator returns, once it has been looked at."""
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator returns."""
        if self.fake is None:
            return func(*args, **kwargs)
        return _torch.fake_result(self.fake, func, args, kwargs)
