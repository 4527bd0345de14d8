"""The tour runs as it stands and shows what is kept in it; fsfunc in a kernel.

    python -m tests.examples.test_tour      runs the tour, and keeps what it shows

Text and HTML are compared. No kernel stays behind.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.programs import ROOT, environment

TOUR = ROOT / "examples" / "tour.ipynb"
TIME_LIMIT = 120  # seconds of a cell


@contextmanager
def kernel(
    notebook: nbformat.NotebookNode, folder: Path, **options: object
) -> Iterator[NotebookClient]:
    """Runs a kernel for a notebook: of this Python, and without a user's settings."""
    own = {f"JUPYTER_{x}_DIR": str(folder) for x in ("RUNTIME", "CONFIG", "DATA")}
    own |= {"IPYTHONDIR": str(folder), "JUPYTER_PLATFORM_DIRS": "1"}
    manager = AsyncKernelManager(
        transport="ipc",  # no ports
        connection_file=str(folder / "kernel.json"),
    )
    client = NotebookClient(
        notebook, km=manager, timeout=TIME_LIMIT, coalesce_streams=True, **options
    )
    client.reset_execution_trackers()
    with client.setup_kernel(env=environment(**own), cwd=folder, cleanup_kc=True):
        process = manager.provisioner.pid
        yield client
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def executed(folder: Path) -> nbformat.NotebookNode:
    """Returns the tour with what its cells show now."""
    notebook = nbformat.read(TOUR, as_version=4)
    for cell in notebook.cells:
        cell.metadata.clear()
    with kernel(notebook, folder) as client:
        for i, cell in enumerate(notebook.cells):
            client.execute_cell(cell, i)
            cell.metadata.clear()  # when it ran
    return notebook


def outputs(cell: nbformat.NotebookNode) -> list[object]:
    """Returns what a cell shows: its text, and its HTML."""
    return [out.get("text") or out.get("data") or out for out in cell.outputs]


LONG = re.compile(r"\d+\.\d{9,}")  # all digits of a float, the last by its machine's


def text_and_floats(cell: nbformat.NotebookNode) -> tuple[str, list[float]]:
    """Returns what a cell shows without its longest numbers, and these."""
    text = json.dumps(outputs(cell), sort_keys=True)
    return LONG.sub("...", text), [float(digits) for digits in LONG.findall(text)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


def test_the_tour_shows_what_is_kept_in_it(folder):
    kept, now = nbformat.read(TOUR, as_version=4), executed(folder)
    nbformat.validate(kept)
    for before, after in zip(kept.cells, now.cells, strict=True):
        if before.cell_type == "code":
            (text, floats), (expected, close) = map(text_and_floats, (after, before))
            assert text == expected, before.source
            assert floats == pytest.approx(close, rel=1e-4)
            assert after.execution_count == before.execution_count
    assert TOUR.stat().st_size < 150_000


CELLS = {
    "imports": "import asyncio, os, signal, sys, threading, torch, fsfunc as ff",
    "ranks": """
mesh = ff.make_mesh({"data": 3})
await asyncio.sleep(0)  # the loop of the kernel's main thread runs
def sums():
    if mesh.rank == 1:
        print("from a rank")
    return ff.psum(torch.ones(()), "data").item()
ff.spmd(sums, mesh)()""",
    "interrupted": """
before = threading.active_count()
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
def forever():
    while True:
        ff.psum(torch.ones(()), "data")
ff.spmd(forever, mesh)()""",
    "after it": "threading.active_count() - before, ff.spmd(sums, mesh)()",
    "raising": """
def one_raises():
    if mesh.rank == 2:
        raise ValueError("no rows")
    ff.psum(torch.ones(()), "data")
ff.spmd(one_raises, mesh)()""",
    "reloading": """
%load_ext autoreload
%autoreload 2
def write(factor):
    with open("mine.py", "w") as file:
        print("import fsfunc as ff", file=file)
        print(f"block = ff.unit(lambda w, x: (x @ w).sum() * {factor})", file=file)
    stamp = 10 * factor  # a time of writing that differs
    os.utime("mine.py", (stamp, stamp))
write(1)
sys.path.insert(0, ".")
import mine
step = ff.shard(ff.value_and_grad(lambda w, x: mine.block(w, x)), mesh, "data")
def call():
    w = ff.place(step, torch.ones(2, 2), torch.ones(1, 2))
    return step(w, torch.ones(1, 2) + mesh.rank)[0].item()
ff.spmd(call, mesh)()""",
    "reloaded": "write(3)",
    "called again": "ff.spmd(call, mesh)()",
    "a state": "ff.TrainState({'w': torch.ones(2)})",
    "values": "from fsfunc.comm.launch import PerRank\nown = PerRank([1])\n"
    "own.append(own)\nown",
    "text": "print(ff.show.timeline(ff.schedules.one_f_one_b(2, 3)))",
}


def test_fsfunc_in_a_kernel(folder):
    cells = {name: nbformat.v4.new_code_cell(code) for name, code in CELLS.items()}
    notebook = nbformat.v4.new_notebook(cells=[*cells.values()])
    with kernel(notebook, folder, allow_errors=True) as client:
        for i, cell in enumerate(notebook.cells):
            client.execute_cell(cell, i)
    shown = {name: outputs(cell) for name, cell in cells.items()}
    assert shown["ranks"] == ["from a rank\n", {"text/plain": "[3.0, 3.0, 3.0]"}]
    assert shown["interrupted"][-1]["ename"] == "KeyboardInterrupt"
    assert shown["after it"][-1] == {"text/plain": "(0, [3.0, 3.0, 3.0])"}
    (error,) = shown["raising"]
    assert (error["ename"], error["evalue"]) == ("ValueError", "no rows")
    said = "\n".join(error["traceback"])
    assert said.count(": no rows") == said.count("on simulated rank 2") == 1
    assert shown["reloading"] == [{"text/plain": "[8.0, 8.0, 8.0]"}]
    assert not shown["reloaded"]
    assert shown["called again"] == [{"text/plain": "[24.0, 24.0, 24.0]"}]
    (state,) = shown["a state"]
    for kind in ("text/plain", "text/html"):
        assert (
            re.search("params/w.*f32.2.", state[kind]) and "tensor" not in state[kind]
        )
    assert shown["values"] == [{"text/plain": "[1, [...]]"}]
    assert "makespan 12\n" in shown["text"][0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        nbformat.write(executed(Path(made)), TOUR)
