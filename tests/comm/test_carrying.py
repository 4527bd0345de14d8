"""What is set around ``spmd`` holds inside simulated ranks too, or is refused."""

import contextvars

import pytest
import torch
from torch.overrides import TorchFunctionMode

import fsfunc as ff
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
