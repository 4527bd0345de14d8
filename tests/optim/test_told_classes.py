"""`from_torch` of classes that are not torch's: by its caller's word, which is held."""

import functools

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import refusals, refused, simulated, unchanged
from tests.optim.optimizers import WORDS, Lion, Signum
from tests.optim.trees import assert_bits, donated

MESH = simulated(3)
BATCHES = [torch.tensor(x) for x in ([1.0, 2, -3, 4, 8, 0], [-1.0, 2, 5, 2, 2, 2])]


def init():
    """Whole numbers: sums of gradients are exact, in any order."""
    draw = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randint(-8, 9, shape, generator=draw).float()  # noqa: E731
    first = {"w": new(3, 5), "b": new(1), "scale": new(), "none": new(0, 2)}
    return [first, {"w": new(1, 1), "b": new(2)}]


@ff.unit
def unit(p, x):
    sums = [(w.flatten() * (1 + torch.arange(w.numel()))).sum() for w in p.values()]
    return sum(((i - 1.5) * s * x).mean() for i, s in enumerate(sums))


def loss(params, x):
    return sum(unit(p, x) for p in params)


def alone(kind):
    leaves, treedef = tree.flatten(init())
    params = list(map(torch.nn.Parameter, leaves))
    optimizer = kind(params)
    for x in BATCHES:
        optimizer.zero_grad()
        loss(tree.unflatten(treedef, params), x).backward()
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("kind, zero", [(Lion, 0), (Signum, 1), (Lion, 2), (Signum, 3)])
def test_parts_of_every_shape_are_those_of_one_device(kind, zero):
    """Scalars, one element, none, and ranks that have none of a unit."""
    optimizer = ff.from_torch(kind, elementwise=True, **WORDS[kind])
    made = optimizer if zero == 1 else ff.step_in_backward(optimizer)

    def main():
        step = ff.shard(made(ff.value_and_grad(loss)), MESH, "data", zero=zero)
        step, cut = ff.donate(step), [ff.local_batch(x, MESH, "data") for x in BATCHES]
        state = ff.init_state(step, init(), made, cut[0])
        for x in cut:
            state, _ = step(state, x)
        return ff.unshard(state.params)

    expected = alone(kind)
    for found in ff.spmd(main, MESH)():
        assert_bits(expected, found)


class Own(torch.optim.Optimizer):
    """A user's optimizer with a fault."""

    def __init__(self, params, fault=""):
        super().__init__(params, {"lr": 0.1, "fault": fault, "steps": 0})
        self.fault, self.calls, self.past = fault, 0, []

    @torch.no_grad()
    def step(self, closure=None):
        fault, group = self.fault, self.param_groups[0]
        self.calls += fault == "calls"
        self.past += [self.calls] * (fault == "past")
        group["steps"] += fault == "group"
        if fault == "shared":
            self.state["total"] = {"x": 1}  # type: ignore
        for p in group["params"]:
            state = self.state[p]
            state["n"], state["m"] = state.get("n", 0) + 1, torch.zeros_like(p)
            state |= {
                "one": {"more": torch.zeros(1)},
                "rows": {"more": torch.zeros(3, 3)},
                "list": {"more": [p]},
                "wide": {"m": p.double()},
                "tensor": {"n": torch.tensor(1, dtype=torch.int32)},
                "unsaid": {"more": torch.zeros_like(p)},
                "values": {"n": float(p.sum())},
            }.get(fault, {})
            if fault == "gone":
                del state["n"]


W = torch.ones(3)
WORD = {"moments": {"m": 0.0}, "numbers": {"n": 0}}
LION = ff.from_torch(Lion, elementwise=True, **WORDS[Lion])
own = functools.partial(ff.from_torch, Own, elementwise=True, **WORD)
FAULTS = {
    "calls": r"carries calls from step to step.*state\[parameter\]",
    "past": "carries past from",
    "group": r"carries param_groups\[0\]\['steps'\]",
    "shared": "carries state of its own",
    "one": r"keeps .*'more': 'torch.Size\(\[1\]\)'.* told",
    "rows": r"keeps .*'more': 'torch.Size\(\[3, 3\]\)'.* told",
    "list": r"keeps .*'more': 'list'.* told",
    "wide": "keeps .*'m': 'torch.float64 for each.* told .*'torch.float32 for each",
    "tensor": "'n': 'a number in torch.int32 on cpu'.* told .*'n': 'a number'",
    "unsaid": "'more': 'torch.float32 for each element'}.*elementwise=True, moments=",
    "gone": "keeps {'m': 'torch.float32 for each element'} .* told .*'n'",
    "values": "not elementwise: its number 'n' follows from parameters",
}


def stepped(optimizer):
    return lambda: optimizer.apply(W, optimizer.init(W), W)


@refusals({fault: (stepped(own(fault=fault)), ValueError, FAULTS[fault])
           for fault in FAULTS} | {
    "no word": (lambda: ff.from_torch(Own), ValueError,
                r"say from_torch\(Own, elementwise=True, moments="),
    "a word too many": (lambda: ff.from_torch(torch.optim.SGD, **WORD), ValueError,
                        "what SGD keeps is known"),
    "no elementwise one": (lambda: ff.from_torch(torch.optim.LBFGS, elementwise=True),
                           ValueError, "LBFGS cannot run on shards"),
    "text": (lambda: ff.from_torch(Own, elementwise=True, numbers={"n": "0"}),
             TypeError, "n is '0', a str"),
    "another state": (lambda: own().apply(W, LION.init(W), W), ValueError,
                      "and Own keeps"),
})  # fmt: skip
def test_what_is_not_as_it_was_said_is_refused_unwritten(call, error, way_out):
    with donated(), unchanged(W):
        refused(call, error, way_out)


def test_the_word_is_kept_in_what_ranks_compare():
    assert repr(own()) == repr(own()) != repr(ff.from_torch(Own, elementwise=True))
    first = ff.from_torch(Signum, elementwise=True, **WORDS[Signum]).init(W)
    assert first.numbers == {"step": 0.0} and type(own().init(W).numbers["n"]) is int
