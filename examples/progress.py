"""What a run tells: a bar, a file of JSON lines, and one summary at its end.

Rank 0 tells it, and the others nothing. Numbers of a step stay on the card until
`write`, so that a step does not wait for the one before.
"""

import json
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm


class Progress:
    """The steps of a run, in `file`; None for a rank that tells nothing.

    Args:
        done: steps that the checkpoint has. Lines of later ones, which a run wrote
            before it was killed, are dropped: these steps will come again.
        rate: the learning rate by the number of updates before.
    """

    def __init__(self, file: Path | None, done: int, steps: int, rate: Callable):
        self.file, self.done, self.rate = file, done, rate
        self.rows: list[dict] = []
        self.waiting: list[tuple[int, dict[str, Tensor]]] = []
        self.speeds: list[tuple[int, float]] = []  # (tokens, seconds)
        if file and file.exists():
            lines = file.read_text().splitlines()
            rows = [json.loads(line) for line in lines if line.endswith("}")]
            self.rows = [row for row in rows if row.get("step", math.inf) <= done]
            file.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        # None is tqdm's word for: no bar where the output is no terminal
        hidden = None if file else True
        self.bar = tqdm(initial=done, total=steps, unit="step", disable=hidden)
        self.began = time.perf_counter()

    def step(self, metrics: dict[str, Tensor]) -> None:
        """Takes note of a step; "loss" and "tokens" are among its metrics."""
        self.done += 1
        self.waiting.append((self.done, metrics))
        self.bar.update()

    def write(self) -> None:
        """Waits for the steps that were noted, and writes a line for each."""
        if self.file and self.waiting:
            steps = [(i, {k: x.item() for k, x in m.items()}) for i, m in self.waiting]
            tokens = sum(numbers["tokens"] for _, numbers in steps)
            self.speeds.append((tokens, time.perf_counter() - self.began))
            speed = {"tokens_per_s": per_second(self.speeds[-1:])}
            for i, numbers in steps:
                self.add({"step": i, **numbers, "rate": self.rate(i - 1), **speed})
            self.bar.set_postfix(loss=f"{self.rows[-1]['loss']:.4f}", **speed)
        self.waiting.clear()
        self.began = time.perf_counter()

    def evaluation(self, loss: float, sample: str) -> None:
        if self.file:
            self.add({"step": self.done, "eval_loss": loss, "sample": sample})
            self.bar.write(f"step {self.done:5}  eval loss {loss:.4f}  {sample!r}")
        self.began = time.perf_counter()

    def close(self, **more: Any) -> dict | None:
        """The summary, which it prints."""
        self.write()
        self.bar.close()
        if not self.file:
            return None
        latest = {name: x for row in self.rows for name, x in row.items()}
        summary = {name: latest.get(name) for name in ("step", "loss", "eval_loss")}
        # a first step is checked before it runs, which tells of no speed
        summary["tokens_per_s"] = per_second(self.speeds[1:] or self.speeds)
        summary["peak_memory_GB"] = peak_memory() / 1e9
        summary |= more
        self.add({"summary": summary})
        for name, x in summary.items():
            print(f"{name:16} {x:,.4g}" if isinstance(x, float) else f"{name:16} {x}")
        return summary

    def add(self, row: dict) -> None:
        assert self.file
        self.rows.append(row)
        with self.file.open("a") as out:
            out.write(json.dumps(row) + "\n")


def per_second(counted: list[tuple[int, float]]) -> int:
    tokens, seconds = (
        (sum(x) for x in zip(*counted, strict=True)) if counted else (0, 1)
    )
    return round(tokens / seconds)


def peak_memory() -> int:
    """Bytes: of this rank's card, or of its process with all its simulated ranks."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB, on Linux
