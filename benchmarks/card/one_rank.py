"""A process group of one rank, over NCCL on a card, in which nothing waits for ever."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    how: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
        torch.cuda.set_device(0)
        how = {"backend": "nccl", "device_id": torch.device("cuda", 0)}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
            timeout=PATIENCE,
            **how,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()
