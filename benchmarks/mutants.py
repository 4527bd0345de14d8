"""Mutation testing: are small mistakes in the code that must not lie found by tests?

    python benchmarks/mutants.py [--each 30] [--seed 0] [--only layout,schedules]
                                 [--proven] [--exact] [--again FILE]

Takes the files of six rooms of ideas (layouts, collectives, the gathered call,
schedules, layers, optimizers), draws ``--each`` mutants of each file (another
comparison, another operator, a number off by one, a condition turned round, a statement
left out, a branch taken), and runs the tests of that file's idea on each in a process
of its own. Prints who survived, with the line before and after, and the share that was
killed; a mutant that does not end within ``--limit`` seconds is killed too. ``--exact``
runs, in place of an idea's own tests, exact runs alone: what a comparison with one
device in a finite field kills. ``--again`` tries those alone that survived, of which
the lines stand in a file, once there are tests for them or the code is another.
Messages, docstrings, types and what only a type checker reads are not mutated: a
wording is nobody's law.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).parents[1]

IDEAS = {
    "layout": (
        "sharded/layout.py sharded/packing.py sharded/slices.py",
        "tests/sharded tests/transforms/test_split_leaves.py "
        "tests/checkpoint/test_resharding.py",
    ),
    "collectives": (
        "comm/linear_maps.py comm/collectives.py comm/typed_maps.py "
        "comm/collective_ops.py",
        "tests/comm/test_meanings.py tests/comm/test_transposes.py "
        "tests/comm/test_collectives.py tests/comm/test_splitting.py "
        "tests/comm/test_abstract.py tests/comm/test_ledger.py tests/test_torch.py "
        "tests/derivatives/test_refusals.py tests/tracing tests/sharded/test_sparse.py "
        "tests/transforms/test_shard_higher_order.py tests/derivatives/test_law.py "
        "tests/transforms/test_split_leaves.py",
    ),
    "gathered": (
        "transforms/gathers.py transforms/unit_calls.py transforms/gradient_sums.py",
        "tests/transforms/test_gathers.py "
        "tests/transforms/test_shard_laws.py tests/transforms/test_hierarchy.py "
        "tests/transforms/test_shard_ledger.py tests/transforms/test_shard_units.py "
        "tests/transforms/test_shard_memory.py tests/transforms/test_accumulate.py "
        "tests/transforms/test_shard_stock.py "
        "tests/derivatives tests/transforms/test_hybrid_reductions.py "
        "tests/transforms/test_precision.py tests/transforms/test_offload.py "
        "tests/transforms/test_shard_higher_order.py tests/optim/test_adascale.py "
        "tests/transforms/test_split_leaves.py tests/planning/test_plan_memory.py "
        "tests/transforms/test_wire.py",
    ),
    "schedules": (
        "pipelining/actions.py pipelining/schedules.py pipelining/verification.py "
        "pipelining/player.py pipelining/transfers.py",
        "tests/pipelining/test_schedules.py tests/pipelining/test_verification.py "
        "tests/pipelining/test_bubbles.py tests/pipelining/test_asynchronous.py "
        "tests/pipelining/test_pipeline_laws.py "
        "tests/pipelining/test_pipeline_ledger.py",
    ),
    "layers": (
        "nn/cross_entropy.py nn/routing.py nn/statistics.py nn/tensor_parallel.py "
        "nn/ring.py",
        "tests/nn",
    ),
    "optimizers": (
        "optim/adam.py optim/descent.py optim/factored.py optim/layerwise.py "
        "optim/reductions.py optim/averaging.py",
        "tests/optim",
    ),
}

# Of these files the tests that compare exact runs with one device.
EXACT_FILES = (
    "tests/testing/test_exact.py tests/testing/test_exact_rows.py "
    "tests/nn/test_kinds_of_axes.py tests/nn/test_sharded_experts.py "
    "tests/optim/test_laws.py tests/derivatives/test_judge.py "
    "tests/pipelining/test_pipeline_composition.py tests/transforms/test_shard_laws.py"
)
COMPARED_EXACTLY = (
    "same_function or equals_one_device or those_of_one_device or on_one_device or "
    "right_or_refused or saved_goes_on or on_parts or same_numbers"
)
EXACT = [*EXACT_FILES.split(), "-k", COMPARED_EXACTLY]

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


def unspoken(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that compute: no messages, annotations, docstrings, declarations."""
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        declared = isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        )
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
            continue
        if text or declared or isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.keyword) and node.arg in ("strict", "repr"):
            continue  # of zip, an assertion; of a field, a wording
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    stack.append(child)


def changes(node: ast.AST) -> list[str]:
    """The names of the mistakes that can be made at a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        return ["compare"]
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATED:
        return ["operate"]
    if isinstance(node, ast.BoolOp):
        return ["and or"]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return ["sign"]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        return ["constant"]
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return ["always", "never"]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ["leave out"]
    if isinstance(node, ast.AugAssign):
        return ["leave out"]
    if isinstance(node, ast.Return) and node.value is not None:
        return ["return nothing"]
    return []


def changed(node: ast.AST, change: str) -> ast.AST:
    """The node with one mistake in it."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare):
        new.ops[0] = COMPARED[type(new.ops[0])]()
    elif change == "operate" and isinstance(new, ast.BinOp | ast.AugAssign):
        new.op = OPERATED[type(new.op)]()
    elif isinstance(new, ast.BoolOp):
        new.op = ast.And() if isinstance(new.op, ast.Or) else ast.Or()
    elif isinstance(new, ast.UnaryOp):
        return new.operand
    elif isinstance(new, ast.Constant):
        value = new.value
        new.value = not value if isinstance(value, bool) else value + 1  # type: ignore[operator]
    elif isinstance(new, ast.If | ast.IfExp | ast.While):
        new.test = ast.Constant(change == "always")
    elif change == "leave out":
        return ast.Pass()
    elif isinstance(new, ast.Return):
        new.value = ast.Constant(None)
    return new


class Swap(ast.NodeTransformer):
    """Puts ``new`` in the place of ``old``."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, ast.copy_location(new, old)

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


class Mutant:
    """One file with one mistake: ``code``, and how it reads before and after."""

    def __init__(self, path: Path, index: int, change: str):
        tree = ast.parse(path.read_text())
        node = list(unspoken(tree))[index]
        self.path, self.change = path, change
        self.line = getattr(node, "lineno", 0)
        self.before = ast.unparse(node).splitlines()[0]
        new = changed(node, change)
        self.after = ast.unparse(new).splitlines()[0]
        self.code = ast.fix_missing_locations(Swap(node, new).visit(tree))

    @property
    def text(self) -> str:
        """What it is, wherever in its file."""
        return f"[{self.change}]  {self.before}  ->  {self.after}"

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}  {self.text}"


class Instead(MetaPathFinder):
    """Imports the mutant's module with its mistake."""

    def __init__(self, mutant: Mutant):
        self.mutant = mutant
        relative = mutant.path.relative_to(ROOT).with_suffix("")
        self.name = ".".join(relative.parts)

    def find_spec(self, name, path, target=None) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        mutant = self.mutant

        class Loader(SourceFileLoader):
            def get_code(self, fullname):
                return compile(mutant.code, str(mutant.path), "exec")

        spec.loader = Loader(name, spec.origin)
        return spec


def drawn(
    each: int, seed: int, only: list[str], again: str, exact: bool = False
) -> Iterator[tuple[Mutant, list[str]]]:
    """Mutants of every file, and the tests for each.

    Args:
        again: the lines of some that survived; then these, whatever was to be drawn.
        exact: whether the tests are exact runs, the same for all.
    """
    wanted = list(_survivors(again))
    for idea, (files, tests) in IDEAS.items():
        if only and idea not in only:
            continue
        for file in files.split():
            path = ROOT / "fsfunc" / file
            nodes = list(unspoken(ast.parse(path.read_text())))
            every = [(i, c) for i, node in enumerate(nodes) for c in changes(node)]
            if not again:
                draw = random.Random(f"{seed} {file}")
                every = draw.sample(every, min(each, len(every)))
            found = [Mutant(path, i, change) for i, change in every]
            if again:
                mine = [
                    (line, text) for at, line, text in wanted if at == f"fsfunc/{file}"
                ]
                found = [_nearest(found, *one) for one in mine]
            run = EXACT if exact else tests.split()
            yield from ((mutant, run) for mutant in found if mutant)


def _survivors(log: str) -> Iterator[tuple[str, int, str]]:
    """Of each survivor that a log names: its file, its line, and what it is."""
    for said in log.splitlines():
        if said.startswith("survived "):
            at, text = said.removeprefix("survived ").split("  ", 1)
            file, line = at.split(":")
            yield file, int(line), text


def _nearest(mutants: list[Mutant], line: int, text: str) -> Mutant | None:
    """The one that it is now, if the code still has it."""
    alike = [m for m in mutants if m.text == text]
    return min(alike, key=lambda m: abs(m.line - line), default=None)


def tried(mutant: Mutant | None, tests: list[str]) -> int:
    """Starts a process that runs the tests on the mutant; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    sink = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(sink, stream)
    status = 3
    try:
        os.environ["CI"] = "1"  # the draws of every run are the same
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))
        if mutant is not None:
            sys.meta_path.insert(0, Instead(mutant))
        import pytest

        quiet = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
        status = int(pytest.main([*quiet, *tests]))
    finally:
        os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--each", type=int, default=30, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="ideas, by commas")
    parser.add_argument("--again", type=Path, help="only who survived, by a log")
    parser.add_argument("--limit", type=float, default=300, help="seconds a mutant")
    parser.add_argument("--proven", action="store_true", help="tests are known to pass")
    parser.add_argument("--exact", action="store_true", help="by exact runs alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    import pytest  # noqa: F401  # once, for all processes that are forked here
    import torch  # noqa: F401

    os.environ["OMP_NUM_THREADS"] = "1"
    only = [name for name in asked.only.split(",") if name]
    for idea, (_, tests) in IDEAS.items():
        if not asked.proven and (not only or idea in only):
            run = EXACT if asked.exact else tests.split()
            _, status = os.waitpid(tried(None, run), 0)
            if status:
                sys.exit(f"{idea}: its tests fail on the code as it stands")
    again = asked.again.read_text() if asked.again else ""
    waiting = list(drawn(asked.each, asked.seed, only, again, asked.exact))
    running: dict[int, tuple[Mutant, float]] = {}
    counted: dict[str, list[int]] = {}
    survivors: list[Mutant] = []
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            mutant, tests = waiting.pop(0)
            running[tried(mutant, tests)] = mutant, time.monotonic()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            for late, (_, since) in running.items():
                if time.monotonic() - since > asked.limit:
                    os.killpg(late, signal.SIGKILL)
            time.sleep(0.05)
            continue
        mutant, _ = running.pop(pid)
        name = str(mutant.path.relative_to(ROOT))
        killed, tries = counted.get(name, [0, 0])
        counted[name] = [killed + (status != 0), tries + 1]
        if status == 0:
            survivors.append(mutant)
            print("survived", mutant, flush=True)
    for name, (killed, tries) in counted.items():
        print(f"{name:40} {killed:4} of {tries:4} killed")
    tries = sum(n for _, n in counted.values())
    share = 1 - len(survivors) / tries
    print(f"{tries} mutants, {len(survivors)} survived: {share:.1%} killed")


if __name__ == "__main__":
    main()
