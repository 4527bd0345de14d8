"""An interrupt of simulated ranks is heard wherever it comes, and leaves no thread.

FSFUNC_LONG_TESTS=1 draws ten times as many places and times.
"""

import _thread
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.backends import simulated
from tests.covering import LONG_TESTS

SOON = 5.0  # seconds, on a slow machine
BYTECODES, TIMES = (3000, 1000) if LONG_TESTS else (300, 100)


@pytest.fixture(autouse=True)
def handler():
    """A shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threads = set(threading.enumerate())
    yield
    signal.signal(signal.SIGINT, before)
    assert set(threading.enumerate()) == threads


def mesh(n=3):
    return ff.make_mesh({"data": n}, "simulated")


def total():
    return ff.psum(torch.ones(1), "data").item()


def check_nothing_stays(threads):
    assert set(threading.enumerate()) == threads and not simulated._RUNS
    assert torch._C._is_multithreading_enabled()  # which `spmd` turns off
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert ff.spmd(total, mesh())() == [3.0] * 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def apart(call):
    """Calls it in a generator, which takes along the exceptions that it handles.

    One that comes just as the handler of another is left leaves that one as handled: it
    would be the context of all later ones of the thread.
    """

    def run():
        yield call()

    return next(run())


def bytecodes(call, at=None):
    """How many bytecodes of this thread ``call`` takes; SIGINT comes before one."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
            if count == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks for it before settrace
    sys.settrace(trace)
    try:
        apart(call)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "many", [25, pytest.param(BYTECODES, marks=[pytest.mark.slow])]
)
def test_an_interrupt_before_any_bytecode_is_heard(many):
    threads, run = set(threading.enumerate()), ff.spmd(total, mesh())
    run()
    count = bytecodes(run)
    assert count > 1000
    for at in random.Random(many).sample(range(1, count - 10), many):
        with pytest.raises(KeyboardInterrupt):
            bytecodes(run, at)
        check_nothing_stays(threads)


@pytest.mark.processes
def test_what_a_handler_raises_in_a_check_of_a_step_is_heard(processes):
    """Checks go on where a step that they try raises; this is no error of the step."""
    program = Path(__file__).parent / "limited_step.py"
    assert "12 of 12 heard" in processes(program, 1, "1", "12")


@pytest.fixture
def alarm():
    """A timer whose handler raises as Ctrl-C does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("many", [30, pytest.param(TIMES, marks=[pytest.mark.slow])])
def test_an_interrupt_at_any_time_is_heard(many, alarm):
    threads, draw = set(threading.enumerate()), random.Random(many)
    for _ in range(many):
        end = time.monotonic() + SOON

        def main(end=end):
            while time.monotonic() < end:
                ff.psum(torch.ones(2), "data")

        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            # As threads start, and as they run.
            alarm(draw.choice([draw.uniform(5e-5, 3e-3), draw.uniform(0.01, 0.05)]))
            apart(ff.spmd(main, mesh(4)))
        assert time.monotonic() - began < SOON - 1
        check_nothing_stays(threads)


def test_a_rank_that_comes_to_no_collective_is_stopped(alarm, monkeypatch):
    monkeypatch.setattr(simulated, "_GRACE", 0.2)
    ended = []

    def main():
        try:
            if ff.axis_index("data") == 1:
                alarm(0.1)
                while True:
                    pass
            total()
        finally:
            ended.append(ff.axis_index("data"))

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ff.spmd(main, mesh())()
    assert time.monotonic() - began < SOON and sorted(ended) == [0, 1]


def test_an_interrupt_ends_ranks_that_a_rank_has_started(alarm):
    def main():
        alarm(0.1)
        while True:
            total()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ff.spmd(lambda: ff.spmd(main, mesh(2))(), mesh())()
    assert time.monotonic() - began < SOON


def test_an_interrupt_that_another_thread_receives_is_heard():
    """The lock at which the main thread waits does not hear of it."""

    def main():
        _thread.interrupt_main()
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            total()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ff.spmd(main, mesh())()
    assert time.monotonic() - began < SOON - 1


def test_an_interrupt_comes_before_the_error_of_a_rank():
    def main():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)  # the main thread hears of it
        raise ValueError

    with pytest.raises(KeyboardInterrupt) as caught:
        ff.spmd(main, mesh())()
    assert caught.value.__traceback__ is not None


def test_a_handler_that_raises_nothing_is_called_and_stays():
    called, draw = [], lambda *_: called.append(1)
    signal.signal(signal.SIGINT, draw)

    def main():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        return total()

    assert ff.spmd(main, mesh())() == [3.0] * 3
    assert called and signal.getsignal(signal.SIGINT) is draw


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_a_rank_hears_its_own():
    def main():
        if ff.axis_index("data") == 1:
            if not (pid := os.fork()):
                try:
                    signal.raise_signal(signal.SIGINT)
                    time.sleep(0.1)
                except KeyboardInterrupt:
                    os._exit(5)
                os._exit(6)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        return total()

    assert ff.spmd(main, mesh())() == [3.0] * 3


@pytest.mark.parametrize("first", [0, 2])
def test_where_no_thread_can_be_started_none_stays(first, monkeypatch):
    start, count = threading.Thread.start, iter(range(9))

    def refuses(thread):
        if next(count) >= first:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            ff.spmd(total, mesh())()
    assert ff.spmd(total, mesh())() == [3.0] * 3


def test_a_generator_that_cannot_be_read_does_not_stop_the_others(monkeypatch):
    """As that of a device that has failed."""
    from fsfunc.comm.backends import baton

    state = baton.torch_state

    def fails():
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("device-side assert triggered")
        return state()

    monkeypatch.setattr(baton, "torch_state", fails)
    with pytest.raises(RuntimeError, match="device-side assert"):
        ff.spmd(total, mesh())()
