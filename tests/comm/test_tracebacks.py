"""Errors leave the library without its frames; a note says so, and has all of them."""

import contextlib
import copy
import functools
import gc
import io
import logging
import pickle
import threading
import traceback
import weakref
from pathlib import Path

import optree
import pytest
import torch

import fsfunc as ff
from fsfunc.comm.tracebacks import LeftOut
from tests.models import chain, train_step
from tests.programs import python

MESH = ff.make_mesh({"data": 2}, "simulated")
OPTIMIZER = ff.sharded_adam(1e-3)
X = torch.ones(4, 8)


def params():
    return [torch.ones(8, 8)]


LIBRARIES = (
    *(str(Path(m.__file__).parent) for m in (ff, torch, optree)),
    *(contextlib.__file__, functools.__file__),
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.delenv("FSFUNC_TRACEBACK", raising=False)


def raised(call, kind=Exception):
    with pytest.raises(kind) as info:
        call()
    return info.value


def frames(trace):
    codes = (x.f_code for x, _ in traceback.walk_tb(trace))
    return [(code.co_filename, code.co_name) for code in codes]


def names(error):
    """The names of its frames, all of the user's, below the one that caught it."""
    found = frames(error.__traceback__)
    assert not [path for path, _ in found if path.startswith(LIBRARIES)]
    return [name for _, name in found[1:]]


def stated(error):
    """What is printed of it."""
    return "".join(traceback.format_exception(error))


def is_told(error):
    """Its last note says what is left out; the frames in it are more."""
    note = error.__notes__[-1]
    assert isinstance(note, LeftOut) and "FSFUNC_TRACEBACK=full" in note
    full = frames(ff.full_traceback(error))
    assert [x for x in full if not x[0].startswith(LIBRARIES)] == frames(
        error.__traceback__
    )
    assert f"{sum(path.startswith(LIBRARIES) for path, _ in full)} frame" in note
    return note


@ff.unit
def layer(w, x):
    return misshapen(w, x)


def misshapen(w, x):
    return torch.nn.functional.linear(x, w[:, 1:])


def loss(params, x):
    return sum(layer(w, x).sum() for w in params)


STACKS = {
    "alone": lambda f: f,
    "remat": ff.remat,
    "precision": lambda f: ff.precision(f, torch.bfloat16),
    "accumulate": lambda f: ff.accumulate(f, 2),
    "all": lambda f: ff.remat(ff.accumulate(ff.precision(f, torch.float32), 2)),
}


@pytest.mark.parametrize("stack", STACKS)
def test_the_users_frames_stay_those_between_ours_too(stack):
    step = STACKS[stack](ff.value_and_grad(loss))
    error = raised(lambda: step(params(), X), RuntimeError)
    assert names(error) == ["<lambda>", "loss", "<genexpr>", "layer", "misshapen"]
    assert "in unit 'layer'" in error.__notes__ and is_told(error)


def test_under_a_step_of_all_transforms_too():
    step = ff.donate(ff.shard(ff.remat(train_step(loss, OPTIMIZER)), MESH, "data"))

    def main():
        ff.init_state(step, params, OPTIMIZER, X)

    error = raised(lambda: ff.spmd(main, MESH)(), RuntimeError)
    assert names(error)[:2] == ["<lambda>", "main"]
    assert names(error)[-3:] == ["<genexpr>", "layer", "misshapen"]
    assert stated(error).count("Traceback") == 1  # of one rank, once
    assert "on simulated rank 0 of Mesh({'data': 2}, 'simulated')" in error.__notes__
    assert is_told(error)


BY_US = {
    "a wrong axis": lambda: ff.shard(ff.remat(loss), MESH, "dta"),
    "no function": lambda: ff.accumulate(3, 2),
    "a wrong number": lambda: ff.sharded_adam(-1.0),
    "a wrong mesh": lambda: ff.make_mesh({"data": 0}),
    "no loss": lambda: ff.value_and_grad(lambda w: w)(X),
    "a unit": lambda: ff.unit(torch.Tensor.add_)(X.clone(), X),
    "no folder": lambda: ff.load("nowhere", None),
    "a step": lambda: OPTIMIZER(ff.value_and_grad(loss))(3),
    "a plan": lambda: ff.plan(3, None, OPTIMIZER, X),
    "a module": lambda: ff.from_module(3),
}


@pytest.mark.parametrize("name", BY_US)
def test_the_last_frame_is_the_users_line_that_called(name):
    error = raised(BY_US[name])
    assert names(error) == ["<lambda>"] and is_told(error)


def test_a_plain_tensor_is_an_error_of_few_lines():
    step = ff.shard(ff.value_and_grad(chain()), MESH, "data")
    error = raised(lambda: ff.spmd(lambda: step(params(), X), MESH)(), ValueError)
    assert "ff.init_state" in str(error) and len(stated(error).splitlines()) <= 12
    assert "the last at fsfunc/sharded/" in is_told(error)


def test_all_frames_stay_where_that_is_asked_for(monkeypatch):
    call = BY_US["a wrong axis"]
    shortened = raised(call)
    monkeypatch.setenv("FSFUNC_TRACEBACK", "full")
    full = raised(call)
    assert frames(full.__traceback__) == frames(ff.full_traceback(shortened))
    assert not getattr(full, "__notes__", ())
    assert ff.full_traceback(full) is full.__traceback__


def test_only_the_outermost_call_leaves_out():
    seen = []

    def main():
        try:
            ff.shard(loss, MESH, "dta")
        except ValueError as error:
            seen.append(frames(error.__traceback__))
            raise

    error = raised(lambda: ff.spmd(main, MESH)())
    assert any(path.startswith(LIBRARIES) for path, _ in seen[0])
    assert names(error) == ["<lambda>", "main"]
    assert sum(isinstance(x, LeftOut) for x in error.__notes__) == 1


def test_a_debugger_finds_the_frames_with_what_they_hold():
    error = raised(BY_US["a wrong axis"])
    held = [x.f_locals for x, _ in traceback.walk_tb(ff.full_traceback(error))]
    assert any(there.get("name") == "dta" for there in held)
    try:
        raise error
    except ValueError:
        assert frames(ff.full_traceback())[-1][1] == "check"


def test_what_an_error_was_raised_from_is_shortened_too():
    def fails(w):
        try:
            torch.nn.functional.linear(w, w[:, 1:])
        except RuntimeError as error:
            raise LookupError("a user's") from error

    error = raised(lambda: ff.value_and_grad(fails)(X))
    assert names(error) == ["<lambda>", "fails"]
    assert frames(error.__cause__.__traceback__)[0][1] == "fails"
    assert len(stated(error).splitlines()) < 20


def test_one_that_is_handled_around_stays_as_it_is():
    try:
        torch.nn.Linear(3, 4)(torch.ones(5))
    except RuntimeError as around:
        before = frames(around.__traceback__)
        error = raised(BY_US["a wrong axis"])
        assert error.__context__ is around
        assert frames(around.__traceback__) == before
        assert any(path.startswith(LIBRARIES) for path, _ in before)


def test_an_error_in_a_backward_pass_has_the_users_frame():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ArithmeticError("in backward")

    unit = ff.unit(lambda w, x: Bad.apply(w * x))
    step = ff.shard(ff.value_and_grad(lambda w, x: unit(w, x).sum()), MESH, "data")

    def main():
        w = ff.place(step, torch.ones(4), torch.ones(4))
        step(w, torch.ones(4))

    error = raised(lambda: ff.spmd(main, MESH)(), ArithmeticError)
    assert names(error)[-1] == "backward" and is_told(error)


def test_in_another_thread_its_own_call_is_the_outermost():
    seen = []

    def work():
        try:
            BY_US["no loss"]()
        except (TypeError, ValueError) as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert frames(seen[0].__traceback__)[-1][1] == "<lambda>" and is_told(seen[0])


def test_a_hook_of_the_users_is_its_frame():
    def hook(g):
        raise ArithmeticError("hooked")

    def hooked(w):
        y = w * 2
        y.register_hook(hook)
        return y.sum()

    error = raised(lambda: ff.remat(ff.value_and_grad(hooked))(X), ArithmeticError)
    assert names(error) == ["<lambda>", "hook"]


def test_an_interrupt_is_one_too():
    def stops(w):
        raise KeyboardInterrupt

    error = raised(lambda: ff.value_and_grad(stops)(X), KeyboardInterrupt)
    assert names(error) == ["<lambda>", "stops"]


class Frozen(ValueError):
    def __setattr__(self, name, value):
        if name == "__notes__":
            raise AttributeError(name)


class WithoutNotes(ValueError):
    __notes__ = None


class Unreadable(ValueError):
    @property
    def __notes__(self):
        raise RuntimeError("no notes")


class Overridden(ValueError):
    def with_traceback(self, tb):
        raise RuntimeError("no traceback")


@pytest.mark.parametrize("kind", [Frozen, WithoutNotes, Unreadable, Overridden])
def test_an_error_that_takes_no_note_comes_out_all_the_same(kind):
    def fails(w):
        raise kind

    error = raised(lambda: ff.value_and_grad(fails)(X), kind)
    assert names(error) == ["<lambda>", "fails"]
    assert ff.full_traceback(error) is not None


def test_the_error_is_copied_and_pickled_as_before():
    error = raised(BY_US["a wrong axis"])
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert again.args == error.args
        assert [str(x) for x in again.__notes__] == [str(x) for x in error.__notes__]


def test_logging_prints_the_same():
    log, out = logging.getLogger("test_tracebacks"), io.StringIO()
    log.addHandler(logging.StreamHandler(out))
    log.propagate = False
    try:
        BY_US["a wrong axis"]()
    except ValueError:
        log.exception("failed")
    assert "left out" in out.getvalue() and not any(
        path in out.getvalue() for path in LIBRARIES
    )


@pytest.mark.parametrize("ranks", [0, 2])
def test_tensors_live_no_longer_than_the_error(ranks):
    """Without the collector: no circle goes through an error, or its frames."""
    alive = []

    def fails(w, x):
        y = layer_of(w, x)
        alive.append(weakref.ref(y))
        raise ArithmeticError

    layer_of = ff.unit(lambda w, x: torch.tanh(w * x))
    step = ff.value_and_grad(fails)

    def main():
        step(torch.ones(4), torch.ones(4))

    gc.collect()
    gc.disable()
    try:
        try:
            ff.spmd(main, MESH)() if ranks else main()
        except ArithmeticError as error:
            assert alive and all(y() is not None for y in alive)
            is_told(error)
        assert alive and all(y() is None for y in alive)
    finally:
        gc.enable()


PROGRAM = """
import torch, fsfunc as ff
mesh = ff.make_mesh({"data": 2}, "simulated")
def main():
    ff.psum(torch.ones(2), "dta")
ff.spmd(main, mesh)()
"""


@pytest.mark.parametrize("full", [False, True])
def test_a_program_ends_with_few_lines(full, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = python(path, FSFUNC_TRACEBACK="full" if full else "")
    assert done.returncode == 1 and "unknown axis" in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) > 20 if full else len(lines) <= 9
    assert done.stderr.count("program.py") == 2


SCRIPT = """
import torch, fsfunc as ff
def build(mesh):
    raise ArithmeticError("of a script")
"""


def test_so_does_a_script_of_the_command_line(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    call = "-m", "fsfunc", "plan", path, "--mesh", "data=2"
    done = python(*call, FSFUNC_TRACEBACK="")
    lines = done.stderr.splitlines()
    assert 'raise ArithmeticError("of a script")' in done.stderr
    assert len(lines) < 12 and "left out" in lines[-1], done.stderr


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
shell.run_cell("import fsfunc as ff, torch")
shell.run_cell("mesh = ff.make_mesh({'data': 2}, 'simulated')")
shell.run_cell("ff.spmd(lambda: ff.psum(torch.ones(2), 'dta'), mesh)()")
shell.run_cell("trace, n = ff.full_traceback(), 0")
shell.run_cell("while trace: trace, n = trace.tb_next, n + 1")
shell.run_cell("print(n > 10)")
"""


def test_a_cell_of_a_notebook_too(tmp_path):
    pytest.importorskip("IPython")
    path = tmp_path / "notebook.py"
    path.write_text(NOTEBOOK)
    home = str(tmp_path)  # IPython writes there
    done = python(path, FSFUNC_TRACEBACK="", IPYTHONDIR=home)
    out = done.stdout.splitlines()
    assert done.stdout.count("unknown axis") == 1 and out[-1] == "True", done.stdout
    assert len(out) < 20 and not any(path in done.stdout for path in LIBRARIES)
