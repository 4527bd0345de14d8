"""A compiled graph of a step keeps its collectives among its products."""

import pytest
import torch
from torch._dynamo.utils import counters

from fsfunc._torch import operator_graphs
from fsfunc._torch.operator_graphs import START, WAIT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

RAN = []


@torch.library.custom_op("fsfunc_tests::layer", mutates_args=())
def layer(w: torch.Tensor, x: torch.Tensor, number: int) -> torch.Tensor:
    RAN.append(("layer", number))
    return x @ w


@layer.register_fake
def _(w, x, number):
    return x @ w


@torch.library.custom_op("fsfunc_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x / 2, x / 2


@halves.register_fake
def _(x):
    return x / 2, x / 2


class Gathers:
    """A link of one rank: notes what is started and awaited."""

    def start(self, x, y, number):
        RAN.append(("start", number))

    def wait(self, x, y, number):
        RAN.append(("wait", number))
        y.copy_(x)


def forward(*tensors):
    """Each layer's weight is gathered while the one before is computed."""
    *parts, x = tensors
    ways, token = [], x.new_empty(0)
    for number, part in enumerate(parts):
        y = torch.empty_like(part)
        token = START(part, y, token, number)
        if number:
            x, token = arrived(x, *ways[-1], token, number - 1)
        ways.append((part, y))
    x, _ = arrived(x, *ways[-1], token, len(parts) - 1)
    return [x]


def arrived(x, part, y, token, number):
    token = WAIT(part, y, token, number)
    return sum(halves(layer(y, x, number))).tanh(), token


@pytest.mark.slow
def test_compiled_it_starts_and_awaits_where_the_trace_does():
    """Else nothing is computed meanwhile, and all weights are there at once."""
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    data = [torch.full((4, 4), 0.25 * (k + 1)) for k in range(4)]
    with mode:
        inputs = [torch.empty(4, 4) for _ in data]
    with operator_graphs.running(Gathers()):
        RAN.clear()
        (expected,) = forward(*data)
        order = RAN.copy()
        for _ in range(2):
            with mode:
                graph = operator_graphs.trace_operators(
                    lambda: forward(*inputs), inputs
                ).graph
            known = counters["inductor"].copy()
            run = operator_graphs.compile_graph(graph, data, {})
            RAN.clear()
            (found,) = run(*data)
            assert RAN == order
            torch.testing.assert_close(found, expected)
            made = counters["inductor"] - known
            assert made["fxgraph_cache_bypass"] == 0, "each process compiles it anew"
    assert made["fxgraph_cache_hit"] == 1
