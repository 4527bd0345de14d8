"""Runs that go wrong, over real processes: does every rank hear of it, and in time?

Each case is a training of 2 to 4 ranks in which one rank does one thing wrong (see
KINDS and OURS in faulty/kinds.py). Its survivors are the other ranks, and where nothing
is to be told that rank too. A survivor is

    told    it raises, before the time is up, and names the rank that went wrong;
    right   it ends with the losses of one device, as is due where a rank is only late
            or slow, or sees a batch of another size (the loss is the mean of the
            ranks' means);
    hang    it has not ended when the time is up: then it is killed;
    misnamed  it raises, and names another rank than that as the cause;
    silent  it ends with another loss than that of one device, NaN too, and nothing was
            said.

A case is as bad as its worst survivor. "itself" is what became of the rank that went
wrong: one that skips a step is a batch ahead of the others, and where their last steps
are like its own it ends well before them; they hear of it then (so does it under
FSFUNC_CHECK=1, which half of the cases have). "late numbers" are losses that a survivor
got after the fault that are not those of one device, and of which it heard only later:
such a rank's collectives are like all others' until the next evaluation.

    python benchmarks/faults.py                    300 random faults
    python benchmarks/faults.py --sample           one of each kind
    python benchmarks/faults.py --sample --fsdp2   and FSDP2 on the same ones
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch._dynamo  # noqa: F401  what is imported here no rank imports again
from faulty.kinds import JOINING, KINDS, OURS, Fault, plain, work

torch.set_num_threads(1)
ALL = KINDS | OURS
GONE = {"is killed", "stops", "aborts", "is killed while it saves"}
GONE |= {"stops while it saves", "is killed, and no descriptor left"}
GONE |= {"is killed before others come"}
GONE |= {"is killed at a collective", "stops at a collective"}
GONE |= {"is killed as it joins", "stops as it joins"}
VERDICTS = ["right", "told", "misnamed", "silent", "hang"]  # from good to bad
CAUSES = [r"waits in vain for others of ranks \[[^\]]*\]\. Rank (\d+)\b"]
CAUSES += [r"^rank (\d+)(?:, rank \d+)* did not join"]


@dataclass
class Case:
    """A fault under way: its processes and their files."""

    fault: Fault
    side: str
    folder: str
    limit: float
    pids: list[int] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    began: float = 0.0

    def start(self) -> None:
        self.began = time.monotonic()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.fault.ranks):
            pid = os.fork()
            if not pid:
                self._be(rank, port)
            self.pids.append(pid)

    def _be(self, rank: int, port: int) -> None:
        """The rest of a fork's life."""
        code = 1
        try:
            log = os.open(self.path(rank, "log"), os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(self.fault.ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                GLOO_SOCKET_IFNAME="lo",
            )
            self._meet(rank)
            work(self.side, self.fault, rank, self.path(rank, "notes"))
            code = 0
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:  # as Python ends
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(code)

    def _meet(self, rank: int) -> None:
        """Waits till all ranks run: how long they take to start is no fault."""
        Path(self.path(rank, "here")).touch()
        while not all(Path(self.path(r, "here")).exists() for r in self.ranks):
            time.sleep(0.01)

    @property
    def ranks(self) -> range:
        return range(self.fault.ranks)

    def path(self, rank: int, what: str) -> str:
        return str(Path(self.folder, f"{what}{rank}"))

    @property
    def survivors(self) -> list[int]:
        odd = self.fault.rank if ALL[self.fault.kind] == "told" else None
        return [rank for rank in range(self.fault.ranks) if rank != odd]

    def over(self) -> bool:
        """Whether all survivors have ended, or their time is up: then none is left."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        gone = [self.fault.rank] if self.fault.kind in GONE else []
        ended = {*self.statuses, *gone} == set(range(self.fault.ranks))
        if not ended and time.monotonic() - self.began < self.limit:
            return False
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return True

    def notes(self, rank: int) -> list[dict[str, Any]]:
        try:
            text = Path(self.path(rank, "notes")).read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines()]

    def judged(self) -> dict[str, Any]:
        """What became of it."""
        fault = self.fault
        longer = fault.kind == "sees another batch size"
        right = plain(fault.ranks, (fault.rank, fault.step) if longer else None)
        every = {rank: self.notes(rank) for rank in range(fault.ranks)}
        when = [n["at"] for notes in every.values() for n in notes if "fault" in n]
        found: dict[str, Any] = {
            **asdict(fault), "side": self.side, "verdict": "right", "seconds": 0.0,
            "late numbers": 0, "names it": 0, "intact": [], "happened": bool(when),
            "survivors": len(self.survivors), "errors": {}, "itself": "",
            "due": ALL[fault.kind],
            "own screen": Path(self.path(fault.rank, "log")).read_text()[-40_000:],
        }  # fmt: skip
        for rank in range(fault.ranks):
            notes, verdict = every[rank], "right"
            losses = {n["step"]: n["loss"] for n in notes if "loss" in n}
            wrong = [s for s, x in losses.items() if not near(x, right[s])]
            errors = [n for n in notes if "error" in n]
            if rank in self.survivors:
                found["intact"] += [n["intact"] for n in notes if "intact" in n]
            if rank not in self.statuses:
                verdict = "hang"
            elif errors:
                verdict = "told"
                since = errors[0]["at"] - min(when, default=errors[0]["at"])
                found["seconds"] = max(found["seconds"], since)
                found["errors"][rank] = f"{errors[0]['error']}: {errors[0]['text']}"
            elif self.statuses[rank] != 0:
                verdict = "told"
                found["errors"][rank] = f"ended by {self.statuses[rank]}"
            elif wrong or len(losses) < len(right):
                verdict = "silent"
            if rank not in self.survivors:
                gone = self.statuses.get(rank, -1) < 0
                found["itself"] = "is gone" if gone else verdict
                continue
            if errors:
                text = errors[0]["text"]
                found["late numbers"] += len(wrong)
                found["names it"] += (
                    re.search(rf"\b[Rr]ank {fault.rank}\b", text) is not None
                )
                causes = [m[1] for c in CAUSES if (m := re.search(c, text))]
                if causes and causes[0] != str(fault.rank):
                    verdict = "misnamed"
            worst = max(found["verdict"], verdict, key=VERDICTS.index)
            found["verdict"] = worst
        return found


def near(x: float, y: float) -> bool:
    return abs(x - y) <= 1e-5 * abs(y)


def run(
    faults: Sequence[Fault], side: str, at_once: int, limit: float
) -> Iterator[dict[str, Any]]:
    """What became of each, in the order in which they end."""
    waiting, running = list(faults), list[Case]()
    while waiting or running:
        while waiting and len(running) < at_once:
            folder = tempfile.mkdtemp(prefix="faults-")
            running.append(Case(waiting.pop(0), side, folder, limit))
            running[-1].start()
        for case in [case for case in running if case.over()]:
            running.remove(case)
            yield case.judged()
            shutil.rmtree(case.folder)
        time.sleep(0.02)


def drawn(count: int, seed: int, timeout: float) -> list[Fault]:
    """Random faults: every kind is there before one comes again."""
    draw, kinds, found = random.Random(seed), list[str](), list[Fault]()
    while len(found) < count:
        if not kinds:
            kinds = sorted(ALL)
            draw.shuffle(kinds)
        ranks = draw.choice([2, 2, 3, 4])
        found.append(
            Fault(
                kinds.pop(),
                draw.randrange(ranks),
                draw.randrange(5),
                ranks,
                draw.random() < 0.5,
                draw.random() < 0.3,
                timeout,
                draw.random() < 0.5,
                draw.randrange(50),
            )  # fmt: skip
        )
    return found


def sample(timeout: float) -> list[Fault]:
    """One of each kind; the rank that goes wrong is the first, or another."""
    return [
        Fault(
            kind,
            i % 2,
            2,
            2 + (i % 4 == 1),
            bool(i // 2 % 2),
            timeout=timeout,
            shared=i % 3 > 0 or kind in JOINING,
            at=17 + i,
        )
        for i, kind in enumerate(ALL)
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """By kind: how many of each verdict, and how soon it was said."""
    lines = [f"{'a rank':33} {'due':6}" + "".join(f"{v:>9}" for v in VERDICTS)
             + "  slowest  names it  late numbers  state   itself"]  # fmt: skip
    for kind, due in ALL.items():
        mine = [row for row in rows if row["kind"] == kind]
        if not mine:
            continue
        counts = [sum(row["verdict"] == v for row in mine) for v in VERDICTS]
        told = [row for row in mine if row["errors"]]
        slowest = max((row["seconds"] for row in told), default=0.0)
        named = sum(row["names it"] for row in told)
        heard = sum(row["survivors"] for row in told)
        states = {s for row in mine for s in row["intact"]}
        itself = Counter(row["itself"] for row in mine)
        lines.append(
            f"{kind:33} {due:6}" + "".join(f"{c or '':>9}" for c in counts)
            + f"{slowest:8.1f}s {f'{named}/{heard}':>9}"
            + f"{sum(row['late numbers'] for row in mine) or '':>14}"
            + f"  {', '.join(sorted(states)):7} "
            + ", ".join(f"{n} {what}" for what, n in itself.items() if what)
        )  # fmt: skip
    totals = [sum(row["verdict"] == v for row in rows) for v in VERDICTS]
    lines.append(f"{'all':40}" + "".join(f"{c:9}" for c in totals))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="faults to leave out")
    parser.add_argument("--sample", action="store_true", help="one of each kind")
    parser.add_argument("--only", help="kinds, separated by commas")
    parser.add_argument("--fsdp2", action="store_true", help="FSDP2 beside it")
    parser.add_argument("--timeout", type=float, default=2.0, help="of a collective")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a case")
    parser.add_argument("--at-once", type=int, default=2, help="cases at a time")
    parser.add_argument("--json", type=Path, help="where to write what became of each")
    parser.add_argument("--errors", action="store_true", help="print them")
    options = parser.parse_args()
    first = options.first
    faults = drawn(first + options.count, options.seed, options.timeout)[first:]
    if options.sample:
        faults = sample(options.timeout)
    if options.only:
        faults = [f for f in faults if f.kind in options.only.split(",")]
    record, bad = {}, 0
    if options.fsdp2:
        import torch.distributed.fsdp  # noqa: F401
    for side in ["ours", "fsdp2"] if options.fsdp2 else ["ours"]:
        given = faults
        if side == "fsdp2":  # it has none of these
            shared = [f for f in faults if f.kind in KINDS]
            given = [replace(f, check=False, donated=False) for f in shared]
        rows = []
        for row in run(given, side, options.at_once, options.limit):
            rows.append(row)
            if options.errors:
                for rank, text in row["errors"].items():
                    print(f"-- {row['kind']} (rank {row['rank']}): rank {rank} {text}")
                print(flush=True)
        record[side] = rows
        print(f"\n{side}: {len(rows)} faults\n{table(rows)}", flush=True)
    bad = sum(row["verdict"] != ALL[row["kind"]] for row in record["ours"])
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
