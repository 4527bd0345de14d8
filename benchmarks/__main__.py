"""Every benchmark by one command: beside torch's own, in the same runs.

    python -m benchmarks                     all that README.md has figures of
    python -m benchmarks --quick             a rehearsal, in two minutes
    python -m benchmarks shapes vocabulary   some of them
    python -m benchmarks --readme            the lines of README.md's first table

Each is a program of this folder, which can be run by itself and says more (`--help`,
or its first lines). What they print, and the JSON that they write, goes to
benchmarks/results/, with the share of the processors that other programs used
meanwhile; where that was more than 5 %, no figure is good.

A rehearsal runs every program, its every row, on small models: two programs at a time,
each a fork of this process, which has imported torch for all of them. What its figures
say is nothing; that no program fails is all that it is for.

gpu.sh runs what needs a card, on a machine that has one.

compared/     the models, fsfunc's steps and the peers', and how they are timed
card/         what gpu.sh and gpu.py measure of a card
literature/   runs that others have published, and plans of them in closed form
faulty/       what goes wrong in runs that go wrong
slow_link/    two hosts made of network namespaces, and what crosses between them
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from compared import forks  # noqa: E402
from compared.measuring import ENVIRONMENT, Load, environment  # noqa: E402

# A rehearsal's programs are forks, so this process must have their environment when
# it starts, and before it imports torch.
if __name__ == "__main__" and "--quick" in sys.argv:
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, sys.orig_argv, environment())

from compared.models import SHAPES  # noqa: E402
from compared.report import busy, markdown  # noqa: E402

STEPS = "zero0,zero1,zero2,zero3,zero3_remat"
COMPILED = "jit_zero0,jit_whole_zero0,jit_zero3,jit_whole_zero3"
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@dataclass(frozen=True)
class Benchmark:
    """Runs of one program.

    Args:
        what: that is measured.
        runs: by name, the arguments of Python.
        quick: those of the rehearsal.
    """

    what: str
    runs: dict[str, list[str]]
    quick: list[str]


def _compare(name: str, *more: str) -> list[str]:
    return ["compare.py", "--json", f"results/{name}.json", *more]


def _shapes() -> dict[str, list[str]]:
    found = {}
    for shape in SHAPES:
        found[shape] = _compare(shape, "--only", STEPS, "--shape", shape)
    for n in ("1", "4"):
        name = f"{n} processes"
        found[name] = _compare(name, "--only", STEPS, "--ranks", n)
    for name, only in (("shared", STEPS), ("compiled", COMPILED)):
        name = f"small units {name}"
        how = ("--only", only, "--shape", "small units", "--min-bytes", "1000000")
        found[name] = _compare(name, *how)
    bf16 = ("--only", "one_device,zero3,zero3_remat", "--bf16")
    return found | {"bf16": _compare("bf16", *bf16)}


BENCHMARKS = {
    "compare": Benchmark(
        "steps, memory and costs beside DDP, FSDP2, pipelining, AdamW",
        {"compare": _compare("compare")},
        _compare("quick", "--quick"),
    ),
    "compiling": Benchmark(
        "what compiling takes, with an empty cache, beside compiled blocks",
        {"compiling": ["compiling.py", "--json", "results/compiling.json"]},
        ["compiling.py", "--quick"],
    ),
    "shapes": Benchmark(
        "zero 0 to 3 on other models, on 1 and 4 processes, in bfloat16",
        _shapes(),
        _compare("quick shapes", "--quick", "--only", "zero0,zero3", "--ranks", "1"),
    ),
    "scaling": Benchmark(
        "how calls grow with units, leaves and ranks",
        {"scaling": ["scaling.py", "--json", "results/scaling.json"]},
        ["scaling.py", "--quick"],
    ),
    "checkpoints": Benchmark(
        "saving and loading beside DCP and dd",
        {"checkpoints": ["checkpoints.py", "--rounds", "7"]},
        ["checkpoints.py", "--quick"],
    ),
    "setting_up": Benchmark(
        "the first state of 1B parameters beside FSDP2's",
        {"setting_up": [*TWO, "setting_up.py", "--params", "1e9", "--rounds", "6"]},
        [*TWO, "setting_up.py", "--params", "1e5", "--rounds", "1"],
    ),
    "vocabulary": Benchmark(
        "linear_cross_entropy beside torch's two functions",
        {"vocabulary": ["vocabulary.py"]},
        ["vocabulary.py", "--tokens", "64", "--classes", "512", "--rounds", "1"],
    ),
    "muon": Benchmark(
        "Muon over 2 processes beside torch's on one",
        {"muon": [*TWO, "muon.py"]},
        [*TWO, "muon.py", "--blocks", "1", "--width", "32", "--rounds", "2"],
    ),
    "foresight": Benchmark(
        "estimated steps beside measured ones",
        {"foresight": ["foresight.py"]},
        ["foresight.py", "--quick"],
    ),
    "hosts": Benchmark(
        "steps over slow links, and bytes that the kernel counted (root)",
        {"hosts": ["hosts.py"]},
        ["hosts.py", "--bytes", "--quick"],
    ),
    "published": Benchmark(
        "predictions beside published runs, and 6ND",
        {"published": ["published.py"]},
        ["published.py", "--quick"],
    ),
    "searching": Benchmark(
        "searches of 70B over all meshes of 512 ranks, and of many small stacks",
        {"searching": ["searching.py", "--json", "results/searching.json"]},
        ["searching.py", "--quick"],
    ),
    "faults": Benchmark(
        "300 random faults: who hears of them, and when",
        {"faults": ["faults.py"]},
        ["faults.py", "--count", "6"],
    ),
}


def run(name: str, given: list[str]) -> int:
    """Runs one, prints and keeps what it says; the status that it ends with."""
    print(f"\n== {name}: python {' '.join(given)}", flush=True)
    with Load() as load, (HERE / "results" / f"{name}.txt").open("w") as kept:
        running = subprocess.Popen(
            [sys.executable, *given],
            cwd=HERE,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            for line in running.stdout or ():
                print(line, end="", flush=True)
                kept.write(line)
            running.wait()
        finally:  # also where this one is told to end
            running.terminate()
            running.wait()
    print(busy(load.others))
    return running.returncode


LONGEST = ("compare", "compiling", "hosts", "foresight")  # to rehearse


@dataclass(frozen=True)
class Rehearsal:
    """A program that runs in forks, one or two.

    Args:
        name: whose; ``text``: the file that it writes; ``start``: when it began.
    """

    name: str
    ranks: list[forks.Fork]
    text: Path
    start: float

    @classmethod
    def begin(cls, name: str, given: list[str]) -> Rehearsal:
        text = HERE / "results" / f"{name}.txt"
        text.write_text("")
        ranks: list[dict[str, str]] = [{}]
        if given[: len(TWO)] == TWO:
            given, ranks = given[len(TWO) :], forks.ranks_environment(2)
        started = [forks.Fork(given, {**environment(), **more}, text) for more in ranks]
        return cls(name, started, text, time.monotonic())

    def ended(self) -> bool:
        """Returns whether it is over: all its ranks have ended, or one has failed."""
        codes = [rank.poll() for rank in self.ranks]
        return any(codes) or None not in codes

    def end(self) -> bool:
        """Ends what still runs; returns whether all went well."""
        for rank in self.ranks:
            rank.kill()
        return not any([rank.wait() for rank in self.ranks])


def rehearse(names: list[str]) -> list[str]:
    """Runs the rehearsals of some benchmarks, two at a time; returns what failed."""
    # The longest begin first, so that the last to end is no long one.
    waiting = sorted(names, key=lambda name: name not in LONGEST)
    os.chdir(HERE)
    forks.prepare()
    running: list[Rehearsal] = []
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < 2:
                name = waiting.pop(0)
                running.append(Rehearsal.begin(f"quick {name}", BENCHMARKS[name].quick))
            over = [each for each in running if each.ended()]
            for each in over:
                running.remove(each)
                if not each.end():
                    failed.append(each.name)
                wall = time.monotonic() - each.start
                used = sum(rank.processor_seconds for rank in each.ranks)
                took = f"{wall:.0f} s, {used:.0f} s of processors"
                print(f"\n== {each.name}, {took}\n{each.text.read_text()}")
            sys.stdout.flush()
            time.sleep(0 if over else 0.05)
    finally:  # also where this one is told to end
        for each in running:
            each.end()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = "\n".join(f"  {name:12} {b.what}" for name, b in BENCHMARKS.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help="of those listed")
    parser.add_argument("--quick", action="store_true", help="a rehearsal")
    parser.add_argument("--readme", action="store_true", help="print README.md's lines")
    parser.epilog = f"the benchmarks:\n{named}"
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(BENCHMARKS)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are:\n{named}")
    if chosen.readme:
        found = json.loads((HERE / "results" / "compare.json").read_text())
        print("\n".join(markdown(found["rows"])))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and so ends what it runs
    (HERE / "results").mkdir(exist_ok=True)
    names = list(chosen.names or BENCHMARKS)
    if chosen.quick:
        failed = rehearse(names)
    else:
        each = {k: v for name in names for k, v in BENCHMARKS[name].runs.items()}
        failed = [name for name, given in each.items() if run(name, given)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
