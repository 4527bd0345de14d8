"""The rows of the comparison: what is measured, against whom, and what is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        key: its name for `--only`.
        what: what of fsfunc is measured.
        against: the peer, or "" where `bar` and `aim` are absolute.
        group: the measurement that it is read from; competitors of one group run side
            by side.
        ours: fsfunc's competitor in that group.
        theirs: the peer's.
        bar: the ratio (or the absolute figure) to stay under; None: for information.
        aim: the one to reach.
        unit: of the absolute figures: s, ms, us or MiB.
    """

    key: str
    what: str
    against: str
    group: str
    ours: str
    theirs: str | None = None
    bar: float | None = None
    aim: float | None = None
    unit: str = "s"

    @property
    def timed_steps(self) -> bool:
        return self.group == "one_device" or self.group.startswith("zero")

    def competitors(self, peers_only: bool) -> list[str]:
        """In the order of their turns; a group of steps begins with its floor."""
        names = ["plain"] if self.timed_steps else []
        if self.theirs is not None and self.theirs not in names:
            names.append(self.theirs)
        if not peers_only:
            names.append(self.ours)
            if self.timed_steps:
                names.append(f"{self.ours}_pure")
        return names

    def result(self, group: dict[str, Any]) -> dict[str, Any]:
        """The row's figures out of its group's measurements (None: not measured)."""

        def value(name: str | None) -> float | None:
            if name is None or name not in group:
                return None
            measured = group[name]
            of = "bytes" if self.group == "memory" else "seconds"
            return measured[of] / _UNITS[self.unit]

        ours, theirs = value(self.ours), value(self.theirs)
        floor = value("plain") if self.timed_steps else None
        ratio = over(ours, theirs)
        judged = ratio if self.theirs is not None else ours
        return {
            "key": self.key,
            "what": self.what,
            "against": self.against,
            "unit": self.unit,
            "ours": ours,
            "theirs": theirs,
            "ratio": ratio,
            "pure_ratio": over(value(f"{self.ours}_pure"), theirs),
            "ours_to_floor": over(ours, floor),
            "theirs_to_floor": over(theirs, floor),
            "bar": self.bar,
            "aim": self.aim,
            "verdict": self.verdict(judged),
        }

    def verdict(self, judged: float | None) -> str:
        if judged is None or self.bar is None:
            return ""
        if self.aim is not None and judged <= self.aim:
            return "aim"
        return "bar" if judged <= self.bar else "over"


def over(a: float | None, b: float | None) -> float | None:
    """a / b, or None where either is not measured or nothing is left of b."""
    return a / b if a is not None and b is not None and b > 0 else None


_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "MiB": 2.0**20}

DDP = "DDP"
ZERO_REDUNDANCY = "DDP + ZeroRedundancyOptimizer"
FSDP2 = "FSDP2"
FSDP2_CHECKPOINT = "FSDP2 + checkpoint_wrapper"

ROWS = [
    Row(
        "one_device",
        "one device, no transform",
        "the same loop on torch.autograd",
        "one_device",
        ours="ours",
        theirs="plain",
        bar=1.02,
        aim=1.00,
    ),
    Row(
        "remat",
        "remat step, one device",
        "torch.utils.checkpoint",
        "one_device",
        ours="ours_remat",
        theirs="checkpoint",
        bar=1.00,
        aim=0.97,
    ),
    Row(
        "zero0",
        "zero=0 step",
        DDP,
        "zero0",
        ours="zero0",
        theirs="ddp",
        bar=0.95,
        aim=0.90,
    ),
    Row(
        "zero1",
        "zero=1 step",
        ZERO_REDUNDANCY,
        "zero1 and zero2",
        ours="zero1",
        theirs="zero_redundancy",
        bar=0.95,
        aim=0.90,
    ),
    Row(
        "zero2",
        "zero=2 step",
        ZERO_REDUNDANCY,
        "zero1 and zero2",
        ours="zero2",
        theirs="zero_redundancy",
        bar=0.95,
        aim=0.90,
    ),
    Row(
        "zero3",
        "zero=3 step",
        FSDP2,
        "zero3",
        ours="zero3",
        theirs="fsdp2",
        bar=0.85,
        aim=0.78,
    ),
    Row(
        "zero3_remat",
        "zero=3 + remat step",
        FSDP2_CHECKPOINT,
        "zero3 and remat",
        ours="zero3_remat",
        theirs="fsdp2_checkpoint",
        bar=0.90,
        aim=0.83,
    ),
    Row(
        "zero3_memory",
        "zero=3 peak memory",
        FSDP2,
        "memory",
        ours="zero3",
        theirs="fsdp2",
        bar=1.00,
        aim=0.85,
        unit="MiB",
    ),
    Row(
        "zero3_remat_memory",
        "zero=3 + remat peak memory",
        FSDP2_CHECKPOINT,
        "memory",
        ours="zero3_remat",
        theirs="fsdp2_checkpoint",
        unit="MiB",
    ),
    Row(
        "zero0_memory",
        "zero=0 peak memory",
        DDP,
        "memory",
        ours="zero0",
        theirs="ddp",
        unit="MiB",
    ),
    Row(
        "zero1_memory",
        "zero=1 peak memory",
        ZERO_REDUNDANCY,
        "memory",
        ours="zero1",
        theirs="zero_redundancy",
        unit="MiB",
    ),
    Row(
        "zero2_memory",
        "zero=2 peak memory",
        ZERO_REDUNDANCY,
        "memory",
        ours="zero2",
        theirs="zero_redundancy",
        unit="MiB",
    ),
    Row(
        "sharded_adam",
        "sharded_adam, donated",
        "torch.optim.AdamW(fused=True)",
        "adam",
        ours="sharded_adam",
        theirs="AdamW",
        bar=1.00,
        aim=0.95,
        unit="ms",
    ),
    Row(
        "unit_call",
        "shard's cost of a unit call",
        "FSDP2's hooks on an empty module",
        "hooks",
        ours="shard",
        theirs="fully_shard",
        bar=0.5,
        aim=0.25,
        unit="us",
    ),
    Row(
        "import",
        "import fsfunc beyond import torch",
        "",
        "import",
        ours="import",
        bar=0.15,
        aim=0.08,
        unit="s",
    ),
    Row(
        "example",
        "property test's example, 8 simulated ranks",
        "",
        "example",
        ours="example",
        bar=50.0,
        aim=10.0,
        unit="ms",
    ),
]
