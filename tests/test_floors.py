"""The house has floors: a file imports from those below it, and from no private torch.

The checks read the source and run nothing, so that imports inside functions and under
`TYPE_CHECKING` count too; but these never run, so they may lead in a circle within a
floor. Each check is also shown a small house that breaks its rule.
"""

import ast
import functools
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = "fsfunc"
ROOT = Path(__file__).parent.parent

# A pattern ending in "/" covers a folder. A new file needs a floor here.
FLOORS = [
    (0, ["_torch/", "printing/", "tree/"]),
    (1, ["runtime/"]),
    (2, ["sharded/"]),
    (3, ["comm/"]),
    (4, ["core/"]),
    (5, ["optim/", "nn/", "tracing/"]),
    (6, ["transforms/", "data/"]),
    (7, ["pipelining/", "interop/", "state/"]),
    (8, ["checkpoint/", "planning/"]),
    (9, ["show/", "testing/"]),
    (10, ["cli/", "__init__.py"]),
    (11, ["__main__.py"]),
]

PRIVATE_TORCH_LIVES_IN = "_torch/"
# Nodes are registered with torch's pytree too: there is no public way to.
PRIVATE_TORCH_IN = {"tree/nodes.py": ["torch.utils._pytree", "torch.utils._pytree.*"]}
# The operators of torch's own optimizers: private by name, stable in fact, and without
# a public equal.
PRIVATE_TORCH_ANYWHERE = ["torch._foreach_*", "torch._fused_*"]

House = dict[str, str]  # path below the package -> source
parsed = functools.cache(ast.parse)


@functools.cache
def the_house() -> House:
    """Return the source of every file of the package."""
    package = ROOT / PACKAGE
    return {
        path.relative_to(package).as_posix(): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }


def floor(path: str) -> int | None:
    """Return the floor of a file, None where the table has none for it."""
    for number, patterns in FLOORS:
        for pattern in patterns:
            if path == pattern or pattern.endswith("/") and path.startswith(pattern):
                return number
    return None


def module_name(path: str) -> str:
    """Return the dotted name under which a file is imported."""
    parts = [PACKAGE, *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported_names(path: str, tree: ast.AST) -> list[tuple[int, str, str | None]]:
    """Return (line, module, name) for each import: name is None for a whole module."""
    return list(_imported_names(path, tree))


def _imported_names(path: str, tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, module, alias.name
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(
                name, ast.Constant
            ):
                relative = str(name.value).startswith(".")
                prefix = ".".join(package) if relative else ""
                yield node.lineno, prefix + str(name.value), None


def lines_for_checkers(source: str) -> set[int]:
    """Return the lines under `if TYPE_CHECKING`, which never run."""
    return {
        line
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for line in range(statement.lineno, statement.end_lineno + 1)
    }


def imports(house: House, run: bool = False) -> dict[str, dict[str, int]]:
    """Return, for every file, the files of the house that it imports, with a line.

    With ``run`` those alone that are imported when a program runs.
    """
    file_of = {module_name(path): path for path in house}
    found: dict[str, dict[str, int]] = {}
    for path, source in house.items():
        edges = found[path] = {}
        unread = lines_for_checkers(source) if run else ()
        for line, module, name in imported_names(path, parsed(source)):
            if line in unread:
                continue
            inner = f"{module}.{name}"
            target = file_of.get(inner, file_of.get(module))
            if target is None:
                if module.partition(".")[0] == PACKAGE:
                    edges[f"(no such module) {module}"] = line
                continue
            edges.setdefault(target, line)
            # Importing a.b.c runs a/b/__init__.py, unless we are inside a.b already.
            steps = target.split("/")[:-1]
            for depth in range(1, len(steps) + 1):
                folder = "/".join(steps[:depth]) + "/"
                initial = folder + "__init__.py"
                if initial in house and not path.startswith(folder):
                    edges.setdefault(initial, line)
    return found


def floor_faults(house: House) -> list[str]:
    """Return files without a floor, and imports that go up or lead nowhere."""
    faults = [
        f"{path}: has no floor in FLOORS" for path in house if floor(path) is None
    ]
    for path, targets in imports(house).items():
        for target, line in targets.items():
            here, there = floor(path), floor(target)
            if target.startswith("("):
                faults.append(f"{path}:{line}: {target}")
            elif here is not None and there is not None and there > here:
                faults.append(
                    f"{path}:{line}: floor {here} imports {target} of floor {there}"
                )
    return faults


def cycles(house: House) -> list[str]:
    """Return the chains of imports that lead back to where they began."""
    graph = imports(house, run=True)
    faults, done = [], set()

    def visit(path: str, chain: list[str]) -> None:
        if path in chain:
            faults.append(" -> ".join([*chain[chain.index(path) :], path]))
        elif path not in done and path in graph:
            for target in graph[path]:
                visit(target, [*chain, path])
            done.add(path)

    for path in graph:
        visit(path, [])
    return faults


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def torch_names(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for everything reached by name from torch."""
    bound = {}
    for line, module, name in imported_names(path, tree):
        if module.partition(".")[0] in ("torch", "functorch"):
            yield line, f"{module}.{name}" if name else module
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                bound[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        steps, below = [], node
        while isinstance(below, ast.Attribute):
            steps.append(below.attr)
            below = below.value
        if steps and isinstance(below, ast.Name):
            base = bound.get(below.id, "")
            if base.partition(".")[0] in ("torch", "functorch"):
                yield node.lineno, ".".join([base, *reversed(steps)])


def private_faults(house: House) -> list[str]:
    """Return the uses of torch's private names outside the folder made for them."""
    faults = set()
    for path, source in house.items():
        allowed = [*PRIVATE_TORCH_ANYWHERE, *PRIVATE_TORCH_IN.get(path, [])]
        if path.startswith(PRIVATE_TORCH_LIVES_IN):
            continue
        for line, name in torch_names(path, parsed(source)):
            steps = name.split(".")
            first = next((i for i, s in enumerate(steps) if is_private(s)), None)
            if first is None or any(fnmatch(name, pattern) for pattern in allowed):
                continue
            faults.add(f"{path}:{line}: {'.'.join(steps[: first + 1])} is private")
    return sorted(faults)


def name_faults(house: House) -> list[str]:
    """Return the modules that bear the name of a public function or class.

    Importing such a module puts it in the function's place. Public is what its own
    file defines, and what an `__init__.py` names (in a string too: it may be lazy): of
    a folder's, in that folder; of the package's own, anywhere.
    """
    defined: dict[str, list[str]] = {}
    exported: dict[str, set[str]] = {}  # by the folder in which it counts
    for path, source in house.items():
        tree = parsed(source)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.setdefault(node.name, []).append(path)
        if path.endswith("__init__.py"):
            names = exported.setdefault(path.removesuffix("__init__.py"), set())
            for node in ast.walk(tree):
                if isinstance(node, ast.alias):
                    names.add(node.asname or node.name)
                elif isinstance(node, ast.Constant):
                    names.add(str(node.value))
    faults = []
    for path in house:
        name = module_name(path).rpartition(".")[2]
        places = defined.get(name, [])
        shown = any(path.startswith(f) and name in ns for f, ns in exported.items())
        if path in places or places and shown:
            faults.append(f"{path}: {name} is also defined in {places[0]}")
    return faults


def class_faults(house: House) -> list[str]:
    """Return the classes that bear the name of another of the house."""
    defined: dict[str, str] = {}
    faults = []
    for path, source in house.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                other = defined.setdefault(node.name, f"{path}:{node.lineno}")
                if other != f"{path}:{node.lineno}":
                    faults.append(
                        f"{path}:{node.lineno}: {node.name} is at {other} too"
                    )
    return faults


LATE = {"matplotlib", "rich", "hypothesis", "transformers", "safetensors"}


def late_faults(house: House) -> list[str]:
    """Return the imports, outside of functions, of packages that are asked for late."""
    faults = []
    for path, source in house.items():
        names = [
            name
            for node in parsed(source).body
            for name in imported_names(path, node)
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)
        ]
        faults += [
            f"{path}:{line}: imports {module} at once"
            for line, module, _ in names
            if module.partition(".")[0] in LATE and path != HYPOTHESIS
        ]
        if "matplotlib.pyplot" in source:
            faults.append(f"{path}: pyplot has state of its own")
    return faults


HYPOTHESIS = "testing/strategies.py"  # imported by who asks for it


CHECKS = [floor_faults, cycles, private_faults, name_faults, class_faults, late_faults]


@pytest.mark.parametrize("check", CHECKS)
def test_the_house_keeps_the_rule(check):
    assert check(the_house()) == []


def test_every_room_names_its_files():
    """In its docstring: to read one's way in, no other map is needed."""
    house, faults = the_house(), []
    for path in house:
        room, _, name = path.rpartition("/")
        if not room or name == "__init__.py":
            continue
        said = ast.get_docstring(parsed(house[f"{room}/__init__.py"])) or ""
        if not re.search(rf"(?<!\w){re.escape(name)}\b", said):
            faults.append(f"{room}/__init__.py does not name {name}")
    for path, source in house.items():
        if path.endswith("/__init__.py"):
            said = ast.get_docstring(parsed(source)) or ""
            there = {p.rpartition("/")[2] for p in house if p.startswith(path[:-11])}
            for name in re.findall(r"(?<![\w/])\w+\.py\b", said):
                if name not in there:
                    faults.append(f"{path} names {name}, which is not there")
    assert not faults


def test_the_map_in_the_readme_names_every_room():
    text = (ROOT / "README.md").read_text()
    drawn = re.findall(r"^[ \d]{4,6}(\w+)/ ", text.partition("## The house")[2], re.M)
    rooms = [
        path.split("/")[-2] for path in the_house() if path.endswith("/__init__.py")
    ]
    assert sorted(drawn) == sorted(rooms)
    text += (ROOT / "benchmarks" / "README.md").read_text()
    named = set(re.findall(r"\bbenchmarks/(\w+\.py)|\b(compare\.py)", text))
    programs = [
        path.name
        for path in (ROOT / "benchmarks").glob("*.py")
        if "__main__" in path.read_text()
    ]
    assert {*programs} - {name for pair in named for name in pair} <= {
        "worker.py",
        "__main__.py",
    }


BELOW = {"tree/__init__.py": "", "core/units.py": "", "__init__.py": ""}
GROUP, METHOD = "class Group: ...", "class Mesh:\n    def mesh(self): ..."
ONE, OTHER = "sharded/layout.py", "sharded/placements.py"
SIDEWAYS = {ONE: "", OTHER: "from . import layout"}
NAMESAKES = {"transforms/remat.py": "", "units.py": "def remat(): ..."}
# (check, a small house, what it says or None); or the source of one file of the house
PLANTED = [
    *[
        (floor_faults, BELOW | {ONE: source}, fault)
        for source, fault in {
            "import fsfunc.core.units": "imports core/units.py of floor 4",
            "from fsfunc.core import units": "imports core/units.py of floor 4",
            "from fsfunc.core.units import unit": "imports core/units.py of floor 4",
            "from ..core.units import unit": "imports core/units.py of floor 4",
            "def late():\n    from fsfunc.core import units": "layout.py:2: floor 2",
            "import fsfunc as ff": "imports __init__.py of floor 10",
            "from importlib import import_module as i; i('x')": None,
            "import importlib; importlib.import_module('fsfunc.core.units')": "units.p",
            "import importlib; importlib.import_module('.far', __package__)": "far",
            "import fsfunc.nowhere": "no such module",
            "from fsfunc import tree": None,
            "from torch import units": None,
        }.items()
    ],
    (floor_faults, {"odd.py": ""}, "odd.py: has no floor in FLOORS"),
    (floor_faults, SIDEWAYS, None),
    (cycles, SIDEWAYS, None),
    (cycles, SIDEWAYS | {ONE: "def f():\n    import fsfunc.sharded.placements"},
     f"{ONE} -> {OTHER} -> {ONE}"),
    (cycles,
     SIDEWAYS | {ONE: "if TYPE_CHECKING:\n    import fsfunc.sharded.placements"},
     None),
    (cycles,
     {"comparison.py": "import fsfunc.comm.link", "comm/link.py": "",
      "comm/__init__.py": "from . import processes",
      "comm/processes.py": "from fsfunc import comparison"},
     "comparison.py -> comm/__init__.py -> "),
    *[
        (private_faults, {"mesh.py": source, "_torch/graph.py": source}, fault)
        for source, fault in {
            "import torch._C": "torch._C is",
            "from torch._functorch import vmap": "torch._functorch is",
            "from torch.utils import _pytree": "torch.utils._pytree is",
            "import torch\ndef f():\n    torch._C._get()": "mesh.py:3: torch._C is",
            "import torch as t; t.nn._reduction.x": "torch.nn._reduction is",
            "import torch.distributed as d; d._world": "torch.distributed._world is",
            "from torch import distributed as d; d._w": "torch.distributed._w is",
            "from torch.autograd import Function; Function._x": "Function._x is",
            "import torch; torch._foreach_add_([], [])": None,
            "from torch import _fused_adamw_": None,
            "import torch; torch.nn.Module.__call__": None,
            "import other; other._private": None,
        }.items()
    ],
    (private_faults, {"tree/nodes.py": "import torch.utils._pytree as p; p.X"}, None),
    (name_faults, NAMESAKES, None),
    *[
        (name_faults, NAMESAKES | {"__init__.py": export},
         "remat.py: remat is also defined in units.py")
        for export in ("from .units import remat", "LAZY = ['remat']")
    ],
    (name_faults, {"mesh.py": "class mesh: ..."}, "mesh.py: mesh"),
    (name_faults, {"mesh.py": METHOD}, None),
    (name_faults,
     {"a/tree.py": "", "b/c.py": "def tree(): ...",
      "b/__init__.py": "from b.c import tree"}, None),
    *[
        (class_faults, house, "Group is at comm/mesh.py:1 too")
        for again in (GROUP, f"if f():\n    {GROUP}")
        for house in (
            {"comm/mesh.py": GROUP, "optim/adam.py": again},
            {"comm/mesh.py": f"{GROUP}\n{again}"},
        )
    ],
    (class_faults, {"comm/mesh.py": "class Group:\n    class Of: ..."}, None),
    (late_faults, {"show/lanes.py": "import matplotlib.figure"}, "imports matplotlib"),
    (late_faults, {"show/lanes.py": "def f():\n    import rich"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("check", "house", "fault"), PLANTED)
def test_a_house_that_breaks_the_rule_is_seen(check, house, fault):
    faults = check(house)
    if fault is None:
        assert faults == []
    else:
        assert len(faults) == 1 and fault in faults[0], faults
