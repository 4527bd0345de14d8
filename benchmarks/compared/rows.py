"""The rows of the comparison: what is measured, against whom, and what is wanted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compared.measuring import quartiles


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        key: its name for `--only`.
        what: what of fsfunc is measured.
        against: the peer, or "" where `bar` and `aim` are absolute.
        group: the measurement that it is read from; competitors of one group run side
            by side, and those of the steps beside their floor.
        ours: fsfunc's competitor in that group.
        theirs: the peer's.
        bar: the ratio (or the absolute figure) to stay under; None: for information.
        unit: of the absolute figures: s, ms, us or MiB.
    """

    key: str
    what: str
    against: str
    group: str
    ours: str
    theirs: str | None = None
    bar: float | None = None
    unit: str = "s"

    @property
    def timed_steps(self) -> bool:
        return floor_of(self.group) is not None

    def competitors(self, peers_only: bool) -> list[str]:
        """In the order of their turns; a group of steps begins with its floor."""
        floor = floor_of(self.group)
        names = [] if floor is None else [floor]
        if self.theirs is not None and self.theirs not in names:
            names.append(self.theirs)
        if not peers_only:
            names.append(self.ours)
            if self.timed_steps:
                names.append(f"{self.ours}_pure")
        return names

    def result(self, group: dict[str, Any], ranks: int) -> dict[str, Any]:
        """The row's figures out of its group's measurements (None: not measured)."""

        def value(name: str | None) -> float | None:
            if name is None or name not in group:
                return None
            measured = group[name]
            of = "bytes" if self.group == "memory" else "seconds"
            return measured[of] / _UNITS[self.unit]

        ours, theirs = value(self.ours), value(self.theirs)
        floor = floor_seconds(self.group, group, ranks)
        low, ratio, high = None, over(ours, theirs), None
        pairs = [group.get(name, {}).get("times") for name in (self.ours, self.theirs)]
        if all(pairs):  # so that a load that comes and goes meets both
            low, ratio, high = quartiles(*pairs)
        judged = ratio if self.theirs is not None else ours
        return {
            "key": self.key,
            "what": self.what,
            "against": self.against,
            "unit": self.unit,
            "ours": ours,
            "theirs": theirs,
            "ratio": ratio,
            "spread": None if low is None else (low, high),
            "pure_ratio": over(value(f"{self.ours}_pure"), theirs),
            "ours_to_floor": over(ours, floor),
            "theirs_to_floor": over(theirs, floor),
            "bar": self.bar,
            "within": None
            if judged is None or self.bar is None
            else judged <= self.bar,
        }


def over(a: float | None, b: float | None) -> float | None:
    """a / b, or None where either is not measured or nothing is left of b."""
    return a / b if a is not None and b is not None and b > 0 else None


def floor_of(group: str) -> str | None:
    """The competitor whose time is under every step of `group`; None: not steps.

    The same work on one device, without communication. Ranks that share data each have
    a batch, so that is one rank's own step; those of a pipeline, and of layers that are
    split, share one batch.
    """
    if group.startswith(("pipeline", "split")):
        return "plain_whole"
    if group.startswith("jit"):
        return "compiled"
    if group == "one_device" or group.startswith("zero"):
        return "plain"
    return None


def floor_seconds(
    group: str, measured: dict[str, dict[str, Any]], ranks: int
) -> float | None:
    """What a step of `group` would take if nothing were lost.

    That of `plain`; of `plain_whole` its part of a rank, as if the ranks shared its
    work evenly and never waited.
    """
    floor = floor_of(group)
    if floor is None or floor not in measured:
        return None
    return measured[floor]["seconds"] / (ranks if floor == "plain_whole" else 1)


_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "MiB": 2.0**20}

DDP = "DDP"
ZERO_REDUNDANCY = "DDP + ZeroRedundancyOptimizer"
FSDP2 = "FSDP2"
FSDP2_CHECKPOINT = "FSDP2 + checkpoint_wrapper"
PARALLELIZE = "torch's parallelize_module"
PARALLELIZE_SEQUENCE = "parallelize_module + SequenceParallel"

ROWS = [
    Row(
        "one_device",
        "one device, no transform",
        "the same loop on torch.autograd",
        "one_device",
        ours="ours",
        theirs="plain",
        bar=1.02,
    ),
    Row(
        "remat",
        "remat step, one device",
        "torch.utils.checkpoint",
        "one_device",
        ours="ours_remat",
        theirs="checkpoint",
        bar=1.00,
    ),
    Row(
        "zero0",
        "zero=0 step",
        DDP,
        "zero0",
        ours="zero0",
        theirs="ddp",
        bar=1.00,
    ),
    Row(
        "zero1",
        "zero=1 step",
        ZERO_REDUNDANCY,
        "zero1 and zero2",
        ours="zero1",
        theirs="zero_redundancy",
        bar=0.95,
    ),
    Row(
        "zero2",
        "zero=2 step",
        ZERO_REDUNDANCY,
        "zero1 and zero2",
        ours="zero2",
        theirs="zero_redundancy",
        bar=0.95,
    ),
    Row(
        "zero3",
        "zero=3 step",
        FSDP2,
        "zero3",
        ours="zero3",
        theirs="fsdp2",
        bar=0.80,
    ),
    Row(
        "zero3_remat",
        "zero=3 + remat step",
        FSDP2_CHECKPOINT,
        "zero3 and remat",
        ours="zero3_remat",
        theirs="fsdp2_checkpoint",
        bar=0.88,
    ),
    Row(
        "zero3_memory",
        "zero=3 peak memory",
        FSDP2,
        "memory",
        ours="zero3",
        theirs="fsdp2",
        bar=1.00,
        unit="MiB",
    ),
    Row(
        "zero3_remat_memory",
        "zero=3 + remat peak memory",
        FSDP2_CHECKPOINT,
        "memory",
        ours="zero3_remat",
        theirs="fsdp2_checkpoint",
        bar=1.00,
        unit="MiB",
    ),
    Row(
        "zero0_memory",
        "zero=0 peak memory",
        DDP,
        "memory",
        ours="zero0",
        theirs="ddp",
        bar=0.95,
        unit="MiB",
    ),
    Row(
        "zero1_memory",
        "zero=1 peak memory",
        ZERO_REDUNDANCY,
        "memory",
        ours="zero1",
        theirs="zero_redundancy",
        bar=0.95,
        unit="MiB",
    ),
    Row(
        "zero2_memory",
        "zero=2 peak memory",
        ZERO_REDUNDANCY,
        "memory",
        ours="zero2",
        theirs="zero_redundancy",
        bar=0.95,
        unit="MiB",
    ),
    Row(
        "jit",
        "jit step, one device",
        "torch.compile of blocks",
        "jit one_device",
        ours="ours_jit",
        theirs="compiled",
        bar=1.00,
    ),
    Row(
        "jit_zero0",
        "jit, zero=0 step",
        "DDP, compiled blocks",
        "jit zero0",
        ours="zero0_jit",
        theirs="ddp_compiled",
        bar=1.00,
    ),
    Row(
        "jit_zero3",
        "jit, zero=3 step",
        "FSDP2, compiled blocks",
        "jit zero3",
        ours="zero3_jit",
        theirs="fsdp2_compiled",
        bar=0.70,
    ),
    Row(
        "jit_zero3_remat",
        "jit, zero=3 + remat step",
        "FSDP2 + checkpoint_wrapper, compiled",
        "jit zero3 and remat",
        ours="zero3_remat_jit",
        theirs="fsdp2_checkpoint_compiled",
        bar=0.88,
    ),
    Row(
        "jit_zero3_memory",
        "jit, zero=3 peak memory",
        "FSDP2, compiled blocks",
        "memory",
        ours="zero3_jit",
        theirs="fsdp2_compiled",
        bar=0.95,
        unit="MiB",
    ),
    Row(
        "jit_whole",
        "whole step as one graph, one device",
        "torch.compile of blocks",
        "jit one_device",
        ours="ours_jit_whole",
        theirs="compiled",
        bar=1.00,
    ),
    Row(
        "jit_whole_zero0",
        "whole step as one graph, zero=0",
        "DDP, compiled blocks",
        "jit zero0",
        ours="zero0_jit_whole",
        theirs="ddp_compiled",
        bar=1.00,
    ),
    Row(
        "jit_whole_zero3",
        "whole step as one graph, zero=3",
        "FSDP2, compiled blocks",
        "jit zero3",
        ours="zero3_jit_whole",
        theirs="fsdp2_compiled",
        bar=0.70,
    ),
    Row(
        "jit_whole_zero3_remat",
        "whole step as one graph, zero=3 + remat",
        "FSDP2 + checkpoint_wrapper, compiled",
        "jit zero3 and remat",
        ours="zero3_remat_jit_whole",
        theirs="fsdp2_checkpoint_compiled",
        bar=0.88,
    ),
    Row(
        "jit_whole_zero3_memory",
        "whole step as one graph, zero=3 peak memory",
        "FSDP2, compiled blocks",
        "memory",
        ours="zero3_jit_whole",
        theirs="fsdp2_compiled",
        bar=0.95,
        unit="MiB",
    ),
    Row(
        "pipeline_1f1b",
        "pipeline 1F1B step",
        "torch's Schedule1F1B",
        "pipeline 1F1B",
        ours="one_f_one_b",
        theirs="torch_1f1b",
        bar=0.94,
    ),
    Row(
        "pipeline_zb_v",
        "pipeline ZB-V step",
        "torch's ScheduleZBVZeroBubble",
        "pipeline ZB-V",
        ours="zb_v",
        theirs="torch_zbv",
        bar=0.94,
    ),
    Row(
        "pipeline_gpipe",
        "pipeline GPipe step",
        "torch's ScheduleGPipe",
        "pipeline GPipe",
        ours="gpipe",
        theirs="torch_gpipe",
    ),
    Row(
        "pipeline_interleaved",
        "pipeline interleaved 1F1B step",
        "torch's ScheduleInterleaved1F1B",
        "pipeline interleaved 1F1B",
        ours="interleaved_1f1b",
        theirs="torch_interleaved",
    ),
    Row(
        "pipeline_1f1b_memory",
        "pipeline 1F1B peak memory",
        "torch's Schedule1F1B",
        "memory",
        ours="one_f_one_b",
        theirs="torch_1f1b",
        bar=1.00,
        unit="MiB",
    ),
    Row(
        "pipeline_zb_v_memory",
        "pipeline ZB-V peak memory",
        "torch's ScheduleZBVZeroBubble",
        "memory",
        ours="zb_v",
        theirs="torch_zbv",
        bar=1.00,
        unit="MiB",
    ),
    Row(
        "tensor_parallel",
        "tensor parallel step",
        PARALLELIZE,
        "split layers",
        ours="tensor_parallel",
        theirs="torch_tensor_parallel",
        bar=0.95,
    ),
    Row(
        "sequence_parallel",
        "sequence parallel step",
        PARALLELIZE_SEQUENCE,
        "split layers and sequences",
        ours="sequence_parallel",
        theirs="torch_sequence_parallel",
        bar=0.95,
    ),
    Row(
        "tensor_parallel_memory",
        "tensor parallel peak memory",
        PARALLELIZE,
        "memory",
        ours="tensor_parallel",
        theirs="torch_tensor_parallel",
        bar=1.00,
        unit="MiB",
    ),
    Row(
        "sequence_parallel_memory",
        "sequence parallel peak memory",
        PARALLELIZE_SEQUENCE,
        "memory",
        ours="sequence_parallel",
        theirs="torch_sequence_parallel",
        bar=1.00,
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
        unit="us",
    ),
    Row(
        "import",
        "import fsfunc beyond import torch",
        "",
        "import",
        ours="import",
        bar=0.10,
        unit="s",
    ),
    Row(
        "example",
        "property test's example, 8 simulated ranks",
        "",
        "example",
        ours="example",
        bar=30.0,
        unit="ms",
    ),
]


def named_rows(parser: argparse.ArgumentParser, only: str, rows: Sequence[Any]) -> list:
    """The rows with the keys in ``only``, between commas; all, if there are none."""
    keys = [row.key for row in rows]
    wanted = only.split(",") if only else keys
    if unknown := sorted(set(wanted) - set(keys)):
        parser.error(f"no row {', '.join(unknown)}; rows: {', '.join(keys)}")
    return [row for row in rows if row.key in wanted]
