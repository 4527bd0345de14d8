"""Simulated ranks: deterministic, each as if alone, and nobody waits for ever."""

import os
import signal
import sys
import threading
import time

import pytest
import torch

import fsfunc as ff
from fsfunc import _torch
from fsfunc.comm.attribution import label
from fsfunc.comm.backends.baton import Baton, Deadlock
from fsfunc.comm.backends.link import CollectiveMismatch


@pytest.fixture(autouse=True)
def nobody_stays():
    """No thread outlives its spmd, whatever happened in it."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def ranks(n=3):
    return ff.make_mesh({"data": n}, "simulated")


def run(main, n=3):
    return ff.spmd(main, ranks(n))()


def index():
    return ff.axis_index("data")


# Order, and random numbers


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_every_rank_has_a_forward_mode_level_of_its_own():
    """torch has one for the process, and whoever leaves it first ends it for all."""
    from torch.autograd import forward_ad

    def main():
        seen = [_torch.forward_ad_active()]
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(1), torch.full((1,), index() + 1.0))
            y = ff.psum(x, "data")
            if index():  # rank 0 leaves while the others are inside
                ff.ppermute(torch.ones(1), "data", [(1, 2)])
            z = forward_ad.unpack_dual(y * x).tangent
        if not index():
            ff.ppermute(torch.ones(1), "data", [(1, 2)])
        return [*seen, _torch.forward_ad_active(), z.item()]

    assert run(main) == [[False, False, 3 * (r + 1) + 6] for r in range(3)]
    assert not _torch.forward_ad_active()
    with forward_ad.dual_level():
        pass


@pytest.mark.parametrize(
    ("call", "first"),  # the first number of what rank r gets, where rank r sends r + 1
    [
        (lambda x: ff.psum(x, "data"), lambda r: 6),
        (lambda x: ff.all_gather(x, "data"), lambda r: 1),
        (lambda x: ff.ppermute(x, "data", [(0, 1), (1, 2), (2, 0)]), lambda r: r or 3),
        (lambda x: ff.ppermute(x, "data", [(r, r) for r in range(3)]), lambda r: r + 1),
        (lambda x: ff.pbroadcast(x, "data", source=2), lambda r: 3),
        (lambda x: ff.psum_scatter(x, "data"), lambda r: 6),
        (lambda x: ff.all_to_all(x, "data", split_dim=0, concat_dim=0), lambda r: 1),
        (lambda x: ff.pmax(x, "data"), lambda r: 3),
        (lambda x: ff.pmin(x, "data"), lambda r: 1),
    ],
)
def test_results_belong_to_their_rank(call, first):
    """Nobody's result changes where another rank writes into its input or result."""

    def main():
        x = torch.full((3,), index() + 1.0)
        y = call(x)
        x.add_(100)  # the last rank to come does it before the others have theirs
        seen = [y[0].item()]
        ff.psum(torch.ones(1), "data")
        seen.append(y[0].item())
        y.add_(1000)
        ff.psum(torch.ones(1), "data")
        return seen == [first(index())] * 2 and x[0].item() == index() + 101

    assert all(run(main))


def test_a_deadlock_is_a_table():
    mesh = ff.make_mesh({"data": 2, "pipe": 2}, "simulated")

    def main():
        if mesh.rank == 3:
            return  # early
        with label("blocks/0", "forward"):
            ff.psum(torch.ones(2, 5), "data" if mesh.rank else "pipe")
        ff.all_gather(torch.ones(3), "pipe")

    with pytest.raises(Deadlock) as caught:
        ff.spmd(main, mesh)()
    first, *rows = str(caught.value).splitlines()
    assert first == "no simulated rank can go on:" and len(rows) == 4
    said = 'rank 0 waits in psum over "pipe", float32[2, 5] of blocks/0 (forward) at '
    assert said in rows[0] and f"{__file__}:" in rows[0]
    ends = ["for ranks [1]", "for ranks [3]", "for ranks [0]", "rank 3 has returned"]
    assert all(row.endswith(end) for row, end in zip(rows, ends, strict=True))
    assert '"data"' in rows[1]


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (lambda x: ff.pmax(x, "data"), "rank 1 pmax"),
        (lambda x: ff.psum(x[:1], "data"), r"rank 1 psum .*float32\[1\]"),
        (lambda x: ff.psum(x.double(), "data"), "rank 1 psum .*float64"),
        (lambda x: ff.pbroadcast(x, "data", source=1), "rank 1 pbroadcast"),
        (lambda x: ff.ppermute(x, "data", [(0, 1)]), "rank 1 ppermute"),
    ],
)
def test_different_collectives_are_told_apart(odd, says):
    def main(like, swallow):
        x = torch.ones(2)
        try:
            odd(x) if index() == 1 else like(x)
        except Exception:
            if not swallow:
                raise

    sums = lambda x: ff.psum(x, "data")  # noqa: E731
    for swallow in (False, True):
        with pytest.raises(CollectiveMismatch, match=says) as caught:
            run(lambda swallow=swallow: main(sums, swallow))
        said = str(caught.value)
        assert "rank 0 psum" in said and "rank 2 psum" in said
    with pytest.raises(CollectiveMismatch):  # other pairs, or another op
        run(lambda: main(lambda x: ff.ppermute(x, "data", [(1, 0)]), False))


@pytest.mark.parametrize("ahead", [0, 4095])
def test_nobody_has_numbers_after_an_error_that_was_caught(ahead):
    found = []

    def main():
        try:
            ff.psum(torch.ones(1 + index()), "data")
        except RuntimeError:
            pass
        for _ in range(1 + ahead):
            found.append(ff.psum(torch.ones(1), "data"))

    with pytest.raises(CollectiveMismatch):
        run(main)
    assert found == []


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ArithmeticError("no such gradient")


def in_forward():
    if index() == 1:
        raise ArithmeticError("no such value")
    ff.psum(torch.ones(1), "data")


def in_backward():
    x = torch.ones(1, requires_grad=True)
    y = Bad.apply(x) if index() == 1 else x * 1
    ff.all_gather(y, "data").sum().backward()
    ff.psum(torch.ones(1), "data")


def waited_for_in_backward():
    x = torch.ones(1, requires_grad=True)
    y = ff.all_gather(x, "data").sum()
    if index() == 1:
        raise ArithmeticError("before the backward pass")
    y.backward()


@pytest.mark.parametrize("main", [in_forward, in_backward, waited_for_in_backward])
@pytest.mark.parametrize("handler", [None, Exception])
def test_a_rank_that_raises_raises_everywhere(main, handler):
    ended = []

    def guarded():
        if index() == 1 or handler is None:
            main()
        else:
            try:
                main()
            except handler:
                ended.append("swallowed")  # a user's own handler
        ended.append(index())

    with pytest.raises(ArithmeticError) as caught:
        run(guarded)
    assert ended == []
    assert caught.value.__notes__ == [
        "on simulated rank 1 of Mesh({'data': 3}, 'simulated')"
    ]
    assert run(lambda: ff.psum(torch.ones(1), "data").item()) == [3, 3, 3]  # anew


@pytest.fixture
def interruptible():
    """A shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_every_rank(interruptible):
    def main():
        if index() == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)  # long enough for the caller to wake up
        for _ in range(100):
            ff.psum(torch.ones(1), "data")
            time.sleep(0.01)

    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run(main)
    assert time.perf_counter() - began < 2


def test_a_failure_leaves_what_ranks_say_meanwhile():
    """An interrupt is told by another thread than that of the rank that runs."""
    baton = Baton(3)
    baton.state[:] = "ready", "waiting", "done"
    baton.fail(KeyboardInterrupt())
    assert baton.state == ["ready", "waiting", "done"]
    baton.end(0)  # who waits is next, and nobody else
    assert baton.wake[1].acquire(blocking=False) and not baton.over
    baton.end(1)
    assert baton.over and baton.done.acquire(blocking=False)
    assert baton.state == ["done"] * 3 and all(w.locked() for w in baton.wake)


def test_two_threads_do_not_take_numbers_from_one_another():
    """The second is refused, wherever it comes; the first draws what it draws alone."""
    errors, begun, went = [], threading.Event(), threading.Event()

    def main():
        begun.set()
        went.wait(10)
        ff.psum(torch.ones(1), "data")
        return torch.rand(2)

    def other():
        begun.wait(10)
        try:
            run(lambda: torch.rand(1))
        except RuntimeError as error:
            errors.append(str(error))
        went.set()

    torch.manual_seed(3)
    state = torch.get_rng_state()
    thread = threading.Thread(target=other)
    thread.start()
    beside = run(main)
    thread.join()
    assert ["while another thread of this process is at it" in e for e in errors] == [1]
    torch.set_rng_state(state)
    assert all(map(torch.equal, beside, run(main)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("how, status", [("exits", 3), ("returns", 0), ("reduces", 1)])
def test_a_fork_of_a_rank_ends_and_has_no_collectives(how, status, tmp_path):
    def main():
        if index() == 1 and not (pid := os.fork()):
            os.dup2(os.open(tmp_path / "err", os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = os.fdopen(2, "w")
            if how == "returns":
                return
            if how == "exits":
                sys.exit(3)
            ff.psum(torch.ones(1), "data")
        if index() == 1:
            end = time.monotonic() + 10
            while not (found := os.waitpid(pid, os.WNOHANG))[0]:
                assert time.monotonic() < end, os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            assert os.waitstatus_to_exitcode(found[1]) == status
        return ff.psum(torch.ones(1), "data").item()

    assert run(main) == [3, 3, 3]
    said = (tmp_path / "err").read_text()
    assert ("float32[1]" in said and "a fork of process" in said) == (how == "reduces")


def test_the_unit_is_compared_where_that_is_asked_for(monkeypatch):
    """The table is that of processes: who came to what, for whom, and where."""
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        with label(f"layer({mesh.rank})", "forward"):
            return ff.psum(torch.ones(2), "data").tolist()

    monkeypatch.setenv("FSFUNC_CHECK", "")
    assert ff.spmd(main, mesh)() == [[2.0, 2.0]] * 2
    monkeypatch.setenv("FSFUNC_CHECK", "1")
    with pytest.raises(CollectiveMismatch) as caught:
        ff.spmd(main, mesh)()
    for rank, row in enumerate(str(caught.value).splitlines()[1:]):
        said = f'psum over "data", float32[2] of layer({rank}) (forward)'
        assert row.startswith(f"  rank {rank} {said} at ")
        assert "test_simulated.py:" in row


def test_each_rank_draws_as_if_it_were_alone():
    def draws(rank, between=lambda: None):
        first = torch.rand(2)
        between()
        second = torch.rand(2)
        torch.manual_seed(rank)
        between()
        return torch.cat([first, second, torch.rand(2)]).tolist()

    def seeded(main):
        torch.manual_seed(5)
        return main()

    expected = [seeded(lambda rank=rank: draws(rank)) for rank in range(3)]
    main = lambda: draws(index(), lambda: ff.psum(torch.ones(1), "data"))  # noqa: E731
    for _ in range(2):  # bit by bit
        assert seeded(lambda: run(main)) == expected
    expected = seeded(lambda: torch.rand(3))  # the caller goes on from rank 0
    after = torch.get_rng_state()
    assert torch.equal(
        seeded(lambda: run(lambda: torch.rand(3 + index())))[0], expected
    )
    assert torch.equal(torch.get_rng_state(), after)
