"""What stages take, get and send; and cuts that cannot be made."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.core.frames import Counter, Stage, frame, inside
from fsfunc.pipelining.stage_plans import StagePlan, cut
from fsfunc.tracing.programs import Value
from tests.pipelining.drawn import batch_of, losses, params_of


@ff.unit
def embed(p, x):
    return {"h": x * p, "mask": x > 0}


@ff.unit
def block(p, h):
    return h * p["w"] + p["b"]


@ff.unit
def head(p, h):
    return h * p


def loss(params, x):
    first = embed(params["embed"], x)
    h = first["h"]
    for p in params["blocks"]:
        h = block(p, h)
    h = torch.where(first["mask"], h, 0) * params["gain"]
    return head(params["embed"], h).sum() + params["extra"].sum() + first["h"].mean()


def model():
    one = torch.ones(2)
    blocks = [{"w": one, "b": one} for _ in range(3)]
    return {"embed": one, "blocks": blocks, "gain": one, "extra": one}


def shown():
    return ff.program(loss, model(), torch.ones(2))


def block_leaves(k):
    return frozenset({f"blocks/{k}/w", f"blocks/{k}/b"})


def test_a_stage_knows_what_it_takes_gets_and_sends():
    h, mask = Value(0, 0), Value(0, 1)
    found = cut(shown(), [2, 1, 2])
    first, second, third = map(block_leaves, range(3))
    glue, sent = frozenset({"gain", "extra"}), (h, mask, Value(2, 0))
    assert found.stages == (
        StagePlan(0, range(0, 2), (), {"embed"} | first, frozenset(), False),
        StagePlan(1, range(2, 3), (Value(1, 0),), second, frozenset(), False),
        StagePlan(2, range(3, 5), sent, {"embed"} | third, glue, True),
    )
    assert found.messages == {
        (0, 1): (Value(1, 0),),
        (0, 2): (h, mask),
        (1, 2): (Value(2, 0),),
    }
    assert cut(shown(), [5]).messages == {}


def spoiled(x):
    """``x`` as somebody sees it who must not use it."""
    return torch.full_like(x, torch.nan)


class Elsewhere(Stage):
    """Calls of other stages return what the stage receives, and else nonsense."""

    def __init__(self, plan, made):
        self.plan, self.made, self.seen = plan, made, {}

    def decide(self, call, params, inputs, keywords):
        found = tree.leaves((params, inputs, keywords))
        self.seen[call.number] = [x.clone() for x in found]
        leaves, treedef = tree.flatten(call.body(params, *inputs, **keywords))
        for i, x in enumerate(leaves):
            value = Value(call.number, i)
            if not isinstance(x, torch.Tensor):
                continue
            if self.plan is None:
                self.made[value] = x.clone()
            elif call.number not in self.plan.calls:
                known = value in self.plan.receives
                leaves[i] = self.made[value].clone() if known else spoiled(x)
        return tree.unflatten(treedef, leaves)

    def run(self, loss, params, batch):
        with inside(frame().but(handlers=(self,), counter=Counter())), torch.no_grad():
            return loss(params, batch)


@settings(max_examples=12)
@given(losses(), st.data())
def test_a_stage_computes_what_the_whole_does_from_what_it_has(drawn, data):
    params, batch = params_of(), batch_of()
    program = ff.program(drawn.loss, params, batch)
    count = len(program.calls)
    n = data.draw(st.integers(1, count))
    inner = data.draw(st.permutations(range(1, count))) if count > 1 else []
    ends = [0, *sorted(inner[: n - 1]), count]
    found = cut(program, [b - a for a, b in zip(ends, ends[1:], strict=False)])
    plans = found.stages
    whole = Elsewhere(None, {})
    expected = whole.run(drawn.loss, params, batch)
    sent = {(v, t) for (_, t), values in found.messages.items() for v in values}
    assert sent == {(v, plan.number) for plan in plans for v in plan.receives}
    assert all(v.call in plans[s].calls for (s, _), vs in found.messages.items()
               for v in vs)  # fmt: skip
    for plan in plans:
        has = plan.leaves | plan.reads
        mine = tree.map_with_path(lambda q, x: x if q in has else spoiled(x), params)  # noqa: B023
        run = Elsewhere(plan, whole.made)
        out = run.run(drawn.loss, mine, batch)
        for k in plan.calls:
            pairs = zip(run.seen[k], whole.seen[k], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        assert plan.makes_loss == (plan is plans[-1])
        if plan.makes_loss:
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("stages", "counts"),
    [
        ([1, 3, 1], [1, 3, 1]),
        (["embed", "block", "head"], [1, 3, 1]),
        (["embed", "block:1", "block:2"], [2, 1, 2]),
        (["embed:0", "head"], [4, 1]),
        (["embed"], [5]),
    ],
)
def test_stages_are_given_by_counts_or_by_names(stages, counts):
    plans = cut(shown(), stages).stages
    assert [len(plan.calls) for plan in plans] == counts
    assert [c for plan in plans for c in plan.calls] == list(range(5))


def test_stages_are_balanced_by_flops():
    @ff.unit
    def small(p, x):
        return x @ p[:, :4].repeat(1, 2)

    @ff.unit
    def large(p, x):
        return x @ p @ p

    def chain(p, x):
        for unit in (large, large, small, small, small, small):
            x = unit(p, x)
        return x

    program = ff.program(chain, torch.ones(8, 8), torch.ones(2, 8))
    assert [len(plan.calls) for plan in cut(program, n=2).stages] == [2, 4]
    assert [len(plan.calls) for plan in cut(program, n=4).stages] == [1, 1, 2, 2]
