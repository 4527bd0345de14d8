"""What is set around ``spmd`` holds inside simulated ranks too, or is refused."""

import contextlib
import contextvars
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

import fsfunc as ff
from fsfunc.comm.backends.baton import Baton, Meeting
from fsfunc.comm.operations import OPERATIONS
from tests.probes import Watch


def run(main):
    return ff.spmd(main, ff.make_mesh({"data": 3}, "simulated"))()


NAME = contextvars.ContextVar("name", default="nobody")


def settings():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_device(),
        torch.ones(1).device,
        torch.get_num_threads(),
        NAME.get(),
    )


def test_backward_stays_in_the_thread_of_its_rank():
    """A CUDA backward would run in a thread that every rank shares."""
    assert run(torch._C._is_multithreading_enabled) == [False] * 3
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize(
    "setting",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.device("meta"),
    ],
)
def test_settings_are_carried_in(setting):
    plain = settings()
    with setting():
        token = NAME.set("somebody")
        outside = settings()
        assert run(settings) == [outside] * 3 and outside != plain
        NAME.reset(token)


def test_what_a_rank_sets_stays_there():
    def main():
        NAME.set("mine")
        torch.set_grad_enabled(ff.axis_index("data") == 1)
        ff.psum(torch.ones(1), "data")
        return torch.is_grad_enabled()

    assert run(main) == [False, True, False]
    assert NAME.get() == "nobody" and torch.is_grad_enabled()


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "around",
    [
        Functions,
        Watch,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ],
)
def test_what_cannot_be_carried_is_refused(around):
    name = "Functions|Watch|saved_tensors_hooks"
    says = f"cannot carry ({name}).*inside the function given to spmd"
    with around(), pytest.raises(RuntimeError, match=says):
        run(lambda: None)

    def within():  # each rank its own
        with around():
            return ff.psum(torch.ones(1), "data").item()

    assert run(within) == [3] * 3


def test_levels_around_are_refused():
    f = lambda x: run(lambda: x)[0].sum()  # noqa: E731
    for around in (torch.func.grad(f), torch.func.vmap(f)):
        with pytest.raises(RuntimeError, match="inside a torch.func transform"):
            around(torch.ones(3))


class CUDA:
    """A CUDA of which there are a generator and streams: begun when it is first used.

    Its seed is the last that was given, also before, or one that nobody knows.
    """

    def __init__(self, patched):
        self.given, self.generator, self.waits = None, None, []
        self.current = "the caller's"
        self.default = torch.initial_seed() + 1
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: self.generator is not None,
            "initial_seed": lambda: self.generator.initial_seed(),
            "manual_seed": self.seed,
            "manual_seed_all": self.seed,
            "get_rng_state": lambda: self.generator.get_state(),
            "set_rng_state": lambda state: self.generator.set_state(state),
            "current_stream": lambda: self.current,
            "stream": lambda stream: contextlib.nullcontext(),
        }.items():
            patched.setattr(torch.cuda, name, value)

    def seed(self, number):
        if self.generator is None:
            self.given = number
        else:
            self.generator.manual_seed(number)

    def draw(self):
        if self.generator is None:
            given = self.default if self.given is None else self.given
            self.generator = torch.Generator().manual_seed(given)
        return torch.rand((), generator=self.generator).item()


@pytest.mark.parametrize("seeded", [None, "all", "cuda"])
def test_cuda_that_begins_in_a_rank_begins_alike_in_each(monkeypatch, seeded):
    cuda = CUDA(monkeypatch)
    if seeded:  # `torch.manual_seed` seeds CUDA too
        {"all": torch.manual_seed, "cuda": torch.cuda.manual_seed}[seeded](3)

    def main():
        found = [cuda.draw()]
        ff.psum(torch.ones(1), "data")
        return [*found, cuda.draw()]

    first, *others = run(main)
    assert others == [first] * 2
    if seeded:
        draw = torch.Generator().manual_seed(3)
        assert first == [torch.rand((), generator=draw).item() for _ in range(2)]


@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_rank_that_seeds_itself_does_so_on_cuda(monkeypatch, begins):
    """Though torch keeps one seed until CUDA begins."""
    cuda = CUDA(monkeypatch)

    def main():
        rank = ff.axis_index("data")
        if begins == "before":
            cuda.draw()
        torch.manual_seed(rank)
        ff.psum(torch.ones(1), "data")
        return cuda.draw()

    found = run(main)
    draws = [torch.Generator().manual_seed(rank) for rank in range(3)]
    assert found == [torch.rand((), generator=draw).item() for draw in draws]


class OnCUDA:
    """What a meeting asks a tensor on CUDA for; it notes who reads it."""

    is_cuda, device = True, "cuda:1"

    def __init__(self, log):
        self.log = log

    def record_stream(self, stream):
        self.log.append(f"kept for {stream}")


class Stream(str):
    log: list[str] = []

    def wait_stream(self, other):
        Stream.log.append(f"{self} waits for {other}")


def test_ranks_in_streams_of_their_own_wait_for_one_another(monkeypatch):
    """Whoever completes a meeting reads all inputs, and the others what it made.

    A rank may come in one stream, and take the result in another.
    """
    CUDA(monkeypatch).generator = torch.Generator()
    now = []
    streams = lambda device: Stream({"cuda:1": now[-1]}[device])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", streams)
    baton, call = Baton(2), SimpleNamespace(signature=("all_gather",))
    result = OnCUDA(Stream.log)
    made = lambda inputs: Stream.log.append("made") or [result] * 2  # noqa: E731
    row = SimpleNamespace(combine=made)
    monkeypatch.setitem(OPERATIONS, "all_gather", row)
    for own, later in ("ab", "ab"), ("aa", "aa"), ("aa", "ba"):
        Stream.log.clear()
        for rank, stream in enumerate(own):
            now.append(stream)
            new = Meeting((0, 1))
            meeting = baton.come(rank, new, (0, 1), call, OnCUDA(Stream.log))
        out = SimpleNamespace(copy_=lambda x: Stream.log.append("copied"))
        for rank in range(2):
            now.append(later[rank])
            meeting.take(rank, out)
        joined = ["b waits for a", "kept for b"] if own == "ab" else []
        left = {
            ("ab", "ab"): ["a waits for b", "kept for a"],
            ("aa", "aa"): [],
            ("aa", "ba"): ["b waits for a", "kept for b"],
        }[own, later]
        assert Stream.log == [*joined, "made", *left, "copied", "copied"]
