"""Arithmetic of the CPU's float64 scalars runs ahead of a graph, uncompiled."""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fsfunc as ff
from fsfunc._torch import operator_graphs, scalar_graphs
from tests.checks import close
from tests.models import chain, floats, layers, train_step
from tests.transforms.test_step_graphs import X, whole

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def traced(f, *data):
    mode = FakeTensorMode()
    inputs = [mode.from_tensor(x) for x in data]
    with mode:
        return operator_graphs.trace_operators(lambda: f(*inputs), inputs).graph


def scalars_in(graph):
    """How many operators a graph has that return a float64 scalar, by name."""
    found = Counter()
    for node in graph.graph.nodes:
        x = node.meta.get("val")
        if node.op == "call_function" and isinstance(x, torch.Tensor) and not x.ndim:
            found[str(node.target)] += x.dtype == torch.float64
    return {name: n for name, n in found.items() if n}


def parted(f, *data):
    """(the graph's results, what is given to it behind its inputs, the graph)."""
    graph = traced(f, *data)
    expected = graph(*[x.clone() for x in data])
    first = scalar_graphs.extract_scalar_arithmetic(graph, data)
    given = [] if first is None else first(*data)
    found = graph(*data, *given)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    return found, given, graph


def test_what_scalars_alone_make_is_computed_once_ahead():
    def f(x, step):
        scales = [1 / (1 - 0.9 ** (step + 1)) for _ in range(3)]
        return [*(x * s for s in scales), step + 1, x + step]

    found, given, graph = parted(f, torch.ones(2), scalar(3.0))
    assert len(given) == 2 and not scalars_in(graph)
    assert found[3] is given[1]  # what is returned is nobody else's


def test_two_results_of_one_value_are_two_tensors():
    found, given, _ = parted(lambda n: [n + 1, n + 1, (n + 1) * 2], scalar(3.0))
    assert found[0] is not found[1] and len(given) == 3


def test_constants_of_two_kinds_are_two_values():
    def f(x, n):
        return [x * torch.pow(n, 2), x * torch.pow(n, 2.5), x * (n + 1), x * (n + 1.5)]

    assert len(parted(f, torch.ones(2), scalar(3.0))[1]) == 4


@pytest.mark.parametrize(
    ("f", "stays"),
    [
        (lambda x, n: [x * n.add_(1)], "add_"),  # the caller's own changes
        (lambda x, n: [x * (n + 1).mul_(2)], "add"),
        (lambda x, n: [(n * 2).view(1)], "mul"),  # somebody has a view of it
        (lambda x, n: [n + x.double().sum()], "add"),  # made of others too
        (lambda x, n: [x.double().sum() * 2], "mul"),
    ],
)
def test_what_is_written_seen_or_made_of_others_stays(f, stays):
    _, given, graph = parted(f, torch.ones(2), scalar(3.0))
    assert not given and any(stays in name for name in scalars_in(graph))


@pytest.mark.slow
def test_a_compiled_step_counts_and_scales_as_the_plain_one(monkeypatch):
    """Adam's corrections and a schedule, of numbers that change from call to call."""
    seen, ahead = [], scalar_graphs.extract_scalar_arithmetic

    def looked(graph, inputs):
        first = ahead(graph, inputs)
        seen.append(scalars_in(graph))
        return first

    monkeypatch.setattr(operator_graphs, "extract_scalar_arithmetic", looked)
    optimizer = ff.sharded_adam(ff.warmup_cosine(0.1, 2, 9))
    step = train_step(chain(), optimizer)
    results = []
    for f in (step, whole(step, backend="inductor")):
        state = ff.init_state(f, layers(2, make=floats), optimizer, X)
        for _ in range(4):
            state, _ = f(state, X)
        results.append(state)
    close(results[1].params, results[0].params, 1e-5)
    assert results[1].step == results[0].step == 4
    assert seen == [{}]
