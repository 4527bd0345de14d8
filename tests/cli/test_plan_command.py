"""``python -m fsfunc``: what it prints is what the plan says; what it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fsfunc as ff
from fsfunc.__main__ import main
from fsfunc.planning import hardware as machines
from fsfunc.planning.estimation import estimate
from fsfunc.planning.plans import Plan
from fsfunc.printing.tables import of_bytes, of_flops, of_seconds
from tests.programs import ROOT, forked

EXAMPLE = ROOT / "examples" / "train_gpt.py"
SIZES = "--dim 32 --layers 2 --heads 2 --seq 32".split()

SCRIPT = """
import sys
import torch
import fsfunc as ff

WIDTH = int(sys.argv[1]) if len(sys.argv) > 1 else 8

@ff.unit
def layer(p, x):
    return torch.tanh(x @ p)

def loss_fn(params, x):
    for p in params:
        x = layer(p, x)
    return x.sum()

def sharded(f, mesh):
    return ff.shard(f, mesh, "data")

def build(mesh):
    optimizer = ff.sharded_adam(1e-3)
    def train_step(state, batch):
        loss, grads = ff.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads, optimizer), {"loss": loss}
    def init():
        return [torch.zeros(WIDTH, WIDTH) for _ in range(3)]
    return sharded(train_step, mesh), init, optimizer, torch.zeros(4, WIDTH)
"""


@pytest.fixture
def script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Path]]:
    """Writes a script; gives its path."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    before = list(sys.path), list(sys.argv)

    def write(text: str) -> Path:
        path = tmp_path / "planned_script.py"
        path.write_text(text)
        return path

    yield write
    sys.modules.pop("planned_script", None)
    assert (sys.path, sys.argv) == before


def run(*args: object) -> subprocess.CompletedProcess:
    return forked("-W", "error", "-m", "fsfunc", *args)


def plan_of(path: Path, mesh: ff.Mesh) -> Plan:
    scope: dict = {"__name__": "script"}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return ff.plan(*scope["build"](mesh), mesh=mesh)


@pytest.mark.slow
def test_the_example_s_numbers_are_the_plan_s(tmp_path: Path) -> None:
    table, written = tmp_path / "trace.json", tmp_path / "plan.json"
    done = run(
        *("plan", EXAMPLE, "--mesh", "data=16", "--hardware", "A100_80"),
        *("--memory", "--streams", "--png", tmp_path / "drawn", "--tokens", 1024),
        *("--trace", table, "--json", written, "--", *SIZES, "--batch", "32"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(written.read_text())["plans"][0]
    (program,) = found["programs"]
    # 4 units: the last stays gathered and the first reads nothing in its backward
    counts, sent = (counted(program, column) for column in ("count", "bytes"))
    assert counts == {"all_gather": 6, "psum_scatter": 4, "psum": 2}
    embed, block, head = 288 * 32, 12 * 32 * 32 + 64, 256 * 32 + 32
    # float32, of which a rank sends all but its own sixteenth
    assert sent["all_gather"] == (embed + 4 * block + head) * 4 * 15 // 16
    assert sent["psum_scatter"] == (embed + 2 * block + head) * 4 * 15 // 16
    assert program["alike"] == 16
    assert sum(program["peak_by_kind"].values()) == program["peak_bytes"]
    assert program["peak_bytes"] == found["peak_bytes"]
    times = found["estimate"]
    parts = times["compute"] + times["exposed"] + times["bubble"]
    assert times["seconds"] == pytest.approx(parts)
    assert times["tokens_per_second"] == pytest.approx(1024 / times["seconds"])
    assert found["fits"] and found["memory"] == machines.A100_80.memory
    assert (
        found["needed_bytes"] >= found["peak_bytes"] and found["offloaded_bytes"] == 0
    )
    assert times["low"] < times["seconds"] < times["high"]
    for said in (
        f"{of_flops(found['flops'])} (forward",
        f"at most {of_bytes(found['peak_bytes'])} held",
        f"{of_seconds(times['seconds'])} a step on A100-80",
        f"fits A100-80: {of_bytes(found['needed_bytes'])} of 83.4 GB",
        "memory of rank 0: at most",
        "rank 0 ×16 data    │",
    ):
        assert said in done.stdout, said
    for name in ("memory", "streams"):
        picture = tmp_path / "drawn" / f"data=16,{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert json.loads(table.read_text())["traceEvents"]


def test_it_prints_what_show_shows(script, tmp_path, capsys) -> None:
    path, mesh = script(SCRIPT), ff.make_mesh({"data": 64}, "abstract")
    found = plan_of(path, mesh)
    times = estimate(found, machines.H100)
    given = ["plan", str(path), "--mesh", "data=64", "--hardware", "h100", "--memory"]
    page = tmp_path / "plan.html"
    assert main([*given, "--streams", "--html", str(page)]) == 0
    assert page.read_text() == ff.show.html(found, times, machines.H100)
    printed = capsys.readouterr().out
    head, units, _ = str(ff.show.plan(found)).split("\n\n", 2)
    assert head in printed and units in printed
    assert str(ff.show.memory(found, estimate=times)) in printed
    assert str(ff.show.streams(times)) in printed
    assert f"{of_seconds(times.seconds)} a step on H100" in printed


REFUSED = {
    "nothing": ("WIDTH = 3", "{path} defines no build: write `def build(mesh)`"),
    "value": ("build = 3", "build of {path} is no function, but 3"),
    "arguments": ("def build(): pass", "build(mesh), and is defined as build()"),
    "None": ("def build(mesh): pass", "and returned None"),
    "three": ("def build(mesh): return 1, 2, 3", "and returned 3 values"),
    "step": ("def build(mesh): return 1, 2, 3, 4", "its step is no function, but a"),
    "init": ("def build(mesh): return print, {}, 3, 4", "its init is no function that"),
    "optimizer": ("def build(mesh): return id, dict, 3, 4", "its optimizer is none"),
    "axis": (SCRIPT.replace('"data"', '"rows"'), '{path}:18: unknown axis "rows"'),
    "batch": (
        SCRIPT.replace(
            "torch.zeros(4, WIDTH)\n",
            'lambda: ff.local_batch(torch.zeros(6, WIDTH), mesh, "data")\n',
        ), "{path}:27: cannot cut batch leaf",
    ),
    "asks": (SCRIPT.replace("return x.sum()", "return x * x.sum().item()"), ":15 (.it"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_scripts_that_cannot_be_planned(case: str, script, capsys) -> None:
    text, message = REFUSED[case]
    path = script(text)
    assert main(["plan", str(path), "--mesh", "data=4"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("python -m fsfunc plan: ")
    assert message.format(path=path) in said.err
    assert said.err.count(str(path)) == said.err.count("\n") == 1


def counted(program: dict, column: str) -> dict[str, int]:
    """The sum of a column of a program's collectives, by op."""
    found: dict[str, int] = {}
    for row in program["collectives"]:
        found[row["op"]] = found.get(row["op"], 0) + row[column]
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mesh data=4,model=2", "has no use for the axis model of"),
        ("--mesh data=4 --rank 4", "--rank 4: the ranks of --mesh data=4 are 0 to 3"),
        ("--mesh data=4 --rank -1", "--rank -1: the ranks of --mesh"),
        (
            "--mesh data=4 --hardware b100",
            "there are: A100-40, A100-80, H100, H100-500W",
        ),
        ("--mesh data=4 --hardware no.json", "no.json: No such file or directory"),
        ("--mesh data=4 --hardware this", "which has no links: measure them by"),
        ("--mesh data=4 --streams", "--streams is of an estimate: say on what, by"),
        ("--mesh data=4 --trace t.json", "--trace is of an estimate"),
        ("--mesh data=4 --tokens 4", "--tokens is of an estimate"),
        ("--mesh data=4 --attention fa2", "--attention is of an estimate"),
        ("--mesh data=4 --hardware h100 --tokens 0", "--tokens is above 0: 0"),
        ("--mesh data=4 --json no/such/folder/x.json", "cannot write no/such/folder/"),
        (
            "--mesh data=4 --mesh data=2 --hardware h100 --trace t.json",
            "--trace writes one plan: give one --mesh",
        ),
        ("--mesh data=4 --mesh data=2 --html p.html", "--html writes one plan"),
        *[
            (f"--mesh={mesh}", "an axis is NAME=SIZE, such as data=1024")
            for mesh in ("data", "data=", "data=0", "=4", "data=x", "data=4,", "")
        ],
        ("--mesh=data=2,data=2", "names the axis data twice"),
    ],
)
def test_options_that_make_no_sense(options, message, script, capsys) -> None:
    given = ["plan", str(script(SCRIPT)), *options.split()]
    if "--mesh=" in options:
        with pytest.raises(SystemExit) as refused:
            main(given)
        assert refused.value.code == 2
    else:
        assert main(given) == 2
    assert message in capsys.readouterr().err


H100 = json.loads(machines.to_json(machines.H100))


DESCRIBED = {
    'Hardware has no field "speed"': json.dumps(H100 | {"speed": 1}),
    "memory is finite and above 0, got -1": json.dumps(H100 | {"memory": -1}),
    "H100 has no links": json.dumps(H100 | {"levels": []}),
    "gives no peak for it": json.dumps(H100 | {"peak": {"float64": 1}}),
    "mine.json: Expecting property name": "{",
}


def test_files_that_are_none(script, tmp_path, capsys) -> None:
    described = tmp_path / "mine.json"
    given = ["--mesh", "data=2"]
    for path, message in (
        (tmp_path / "no.py", "no.py does not exist: name a Python file"),
        (tmp_path, "is a folder: name a Python file"),
    ):
        assert main(["plan", str(path), *given]) == 2
        assert message in capsys.readouterr().err
    path = script(SCRIPT)
    for message, text in DESCRIBED.items():
        described.write_text(text)
        assert main(["plan", str(path), *given, "--hardware", str(described)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("WIDTH = no_such_name", NameError),
        (SCRIPT.replace("optimizer = ff", "{}['x']; optimizer = ff"), KeyError),
        (SCRIPT.replace("return x.sum()", "raise ValueError('mine')"), ValueError),
        (SCRIPT.replace("x @ p", "x @ p[1:]"), RuntimeError),
    ],
)
def test_errors_of_the_script_keep_their_traceback(text, error, script) -> None:
    path = script(text)
    with pytest.raises(error) as raised:
        main(["plan", str(path), "--mesh", "data=2"])
    assert any(str(entry.path) == str(path) for entry in raised.traceback)
    if error is NameError:
        assert "planned_script" not in sys.modules


@pytest.mark.processes
def test_of_several_processes_one_speaks(processes, tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    program = """
        import sys
        import torch
        import fsfunc as ff
        from fsfunc import cli, hardware

        def measured(name, seconds):  # the real one takes its time
            ranks = int(ff.psum(torch.ones(()), "data"))
            return hardware.replace(hardware.CPU, name=name, memory=ranks)

        cli.commands.measure_hardware = measured
        sys.exit(cli.main(["hardware", "--name", "two", "--json", sys.argv[1]]))
    """
    out = processes(program, 2, str(path))
    assert out.count("two\n") == out.count("is written") == 1
    assert machines.from_json(path.read_text()).memory == 2
