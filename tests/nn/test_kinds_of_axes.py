"""Every layer that takes an axis, over one that ``shard`` averages over and others.

Over an averaged axis each rank has values of its own. Over another one the work of one
loss is split: a layer is given what is one value on all ranks, or each rank's own, and
to take one for the other would count it n times. Loss, gradients and norms equal those
of one device, to the last bit of an exact run, or the layer says what it takes.
"""

import inspect
import re

import pytest
import torch

import fsfunc as ff
from fsfunc import nn
from fsfunc.testing import assert_equal, check_types, exact, residues
from fsfunc.tracing.rules import LawError
from tests.checks import simulated

D = 4
MESH = simulated(data=2, model=2)
DRAW = torch.Generator().manual_seed(5)


def drawn(*shape):
    return torch.randn(shape, generator=DRAW, dtype=torch.float64)


class Way:
    """How a layer is given its values.

    Args:
        axis: that of the layer: None on one device.
        cuts: whether what is one value over it is cut, each rank's own, and joined.
    """

    def __init__(self, axis=None, cuts=False):
        self.axis, self.cuts = axis, cuts

    def cut(self, x, dim):
        if not self.cuts:
            return x
        x = ff.pcast(x, self.axis, to="V")
        return x.chunk(ff.axis_size(self.axis), dim)[ff.axis_index(self.axis)]

    def join(self, y, dim):
        return ff.all_gather(y, self.axis, dim=dim, to="I") if self.cuts else y

    def whole(self, w):
        """A parameter that meets what is each rank's own."""
        return ff.pcast(w, self.axis, to="V") if self.cuts else w

    def dim(self, dim):
        return dim if self.cuts else None


def mix(w, x):
    return torch.tanh(x @ w)


def experts(p, x, way):
    x = way.cut(x, 0)
    routing = nn.top_k_gating(x @ way.whole(p["gate"]), 2)
    return way.join(nn.expert_layer(x, routing, mix, p["experts"]), 0)


def experts_by_hand(p, x, way):
    x, part = way.cut(x, 0), p["experts"]
    part = part.local if ff.is_sharded(part) else part
    routing = nn.top_k_gating(x @ way.whole(p["gate"]), 2, capacity_factor=4.0)
    places = mix(part, nn.dispatch(x, routing, way.axis))
    return way.join(nn.combine(places, routing, way.axis), 0)


def batch_norm(p, x, way):
    """The statistics are over the axis of the rows, too."""
    over = way.axis if way.axis in (None, "data") else ("data", way.axis)
    x = way.cut(x, 0)
    return way.join(nn.sync_batch_norm({"weight": p["w"]}, x, over)[0], 0)


def normed(norm):
    def layer(p, x, way):
        return way.join(norm(way.cut(x, 1), p["w"], axis=way.axis), 1)

    return layer


def attention(attend):
    def layer(p, x, way):
        x = way.cut(x, 2)
        q, k, v = (x @ way.whole(w) for w in p["qkv"])
        return way.join(attend(q, k, v, way.axis), 2)

    return layer


def features(p, x, way):
    x, dim = way.cut(x, 1), way.dim(1)
    h = torch.tanh(nn.column_linear(x, p["up"], sequence_dim=dim))
    return way.join(nn.row_linear(h, p["down"], sequence_dim=dim), 1)


def row_alone(p, x, way):
    """Of whole features, which are cut where the weight is."""
    part = way.cut(x, 2)
    return nn.row_linear(part, p["down"])


def vocabulary(p, x, way):
    dim = way.dim(1)
    h = torch.tanh(nn.vocab_embedding(p["table"], x, sequence_dim=dim))
    return nn.linear_cross_entropy(h, p["head"], x, sequence_dim=dim, axis=way.axis)


def logits_in_parts(p, x, way):
    z = nn.column_linear(p["table"][x], p["head"])
    return nn.vocab_cross_entropy(z, x, way.axis)


def whole_logits(p, x, way):
    """One value, of the size of a part: targets are below it."""
    z = way.cut(p["table"][x] @ p["table"].T, -1)
    return nn.vocab_cross_entropy(z, x, way.axis)


X, SEQUENCES = drawn(8, D), drawn(4, 8, D)
HEADS, TOKENS = drawn(4, 2, 8, D), torch.arange(32).view(4, 8) % 4
EXPERTS = {"gate": drawn(D, 4), "experts": drawn(4, D, 3)}
QKV = {"qkv": [drawn(D, D) for _ in range(3)]}
MLP = {"up": drawn(6, D), "down": drawn(3, 6)}
VOCABULARY = {"table": drawn(4, D), "head": drawn(4, D)}
OWN = "takes each rank's own along 'model', and is given one value.*ff.pcast"
MEAN = 'over axis "data" shard averages the ranks. losses'
FITS = ""
# name: layer, parameters, how they are split, batch, the dim that ranks have parts of;
# what comes of it over an averaged axis, and of equal and of own values over another
CASES = {
    "expert_layer": (experts, EXPERTS, {"experts": 0}, X, 0, FITS, OWN, FITS),
    "dispatch, combine": (
        experts_by_hand, EXPERTS, {"experts": 0}, X, 0, FITS, OWN, FITS),
    "sync_batch_norm": (batch_norm, {"w": drawn(D)}, {}, X, 0, FITS, OWN, FITS),
    "layer_norm": (
        normed(nn.layer_norm), {"w": drawn(D)}, {"w": 0}, X, 1, FITS,
        f"this rank has 4 features|{OWN}", FITS),
    "rms_norm": (
        normed(nn.rms_norm), {"w": drawn(D)}, {"w": 0}, X, 1, FITS,
        f"this rank has 4 features|{OWN}", FITS),
    "ring_attention": (
        attention(nn.ring_attention), QKV, {}, HEADS, 2, FITS, OWN, FITS),
    "all_to_all_attention": (
        attention(nn.all_to_all_attention), QKV, {}, HEADS, 2, FITS, OWN, FITS),
    "column_linear, row_linear": (
        features, MLP, {"up": 0, "down": 1}, SEQUENCES, 0, MEAN, FITS, FITS),
    "row_linear": (
        row_alone, {"down": drawn(3, D)}, {"down": 1}, SEQUENCES, 0, MEAN,
        rf"{OWN}|same reduction dim|cannot be multiplied", FITS),
    "vocab_embedding, linear_cross_entropy": (
        vocabulary, VOCABULARY, {"table": 0, "head": 0}, TOKENS, 0, MEAN, FITS, FITS),
    "vocab_cross_entropy": (
        logits_in_parts, VOCABULARY, {"head": 0}, TOKENS, 0, MEAN, FITS, FITS),
    "vocab_cross_entropy of whole logits": (
        whole_logits, {"table": drawn(4, D)}, {}, TOKENS, None, "", OWN, FITS),
}  # fmt: skip
WAYS = {"averaged": Way("data"), "equal": Way("model"), "own": Way("model", True)}
ROWS = [
    (name, way)
    for name, case in CASES.items()
    for way in WAYS
    if case[4] is not None or way != "averaged"
]


def stepped(layer, way):
    unit = ff.unit(lambda p, x: layer(p, x, way))

    def loss(p, x):
        y = unit(p, x)
        return y.square().mean() + y.mean()

    def step(p, x):
        value, grads = ff.value_and_grad(loss)(p, x)
        return value, grads, ff.global_norm(grads), ff.leaf_norms(grads)

    return step


def given(name, way, values=None):
    """The step, and what it is given on a rank: the case's, or other values."""
    layer, params, splits, x, dim = CASES[name][:5]
    params, x = values or (params, x)
    dim = dim if way == "averaged" else 0
    axis, zero = WAYS[way].axis, len(name) % 4
    step = ff.shard(stepped(layer, WAYS[way]), MESH, "data", zero=zero)
    layouts = {key: ff.Split(at, axis) for key, at in splits.items()}
    mine = lambda: x.chunk(2, dim)[ff.axis_index("data")]  # noqa: E731
    return step, params, layouts, mine


@pytest.mark.parametrize(("name", "way"), ROWS)
def test_a_layer_equals_one_device_or_says_what_it_takes(name, way):
    layer, params, _, x, _, *outcomes = CASES[name]
    values = residues((params, x))
    step, _, layouts, mine = given(name, way, values)

    def main():
        placed = ff.place(step, values[0], mine(), layouts=layouts)
        value, grads, *norms = step(placed, mine())
        return value, ff.unshard(grads), *norms

    with exact():
        if refusal := outcomes[list(WAYS).index(way)]:
            with pytest.raises((ValueError, RuntimeError), match=refusal):
                ff.spmd(main, MESH)()
            return
        expected = stepped(layer, Way())(*values)
        for found in ff.spmd(main, MESH)():
            assert_equal(found, expected)


def test_every_layer_that_takes_an_axis_is_here():
    """Or leaves that are split, whose axis it takes."""
    takes = {
        name
        for name, f in vars(nn).items()
        if inspect.isfunction(f)
        and {"axis", "weight"} & set(inspect.signature(f).parameters)
    }
    tried = set(re.findall(r"\w+", " ".join(CASES)))
    drawing = {"own_draws", "dropout"}  # what is drawn differs; see test_draws.py
    assert takes - drawing <= tried, takes - tried


def test_check_types_sees_it_and_a_loss_that_is_each_ranks_own():
    step, params, layouts, _ = given("expert_layer", "equal")
    with pytest.raises(LawError, match=OWN):
        check_types(step, MESH, params, X, layouts=layouts)

    @ff.unit
    def own(p, x):
        x = ff.pcast(x, "model", to="V")
        routing = nn.top_k_gating(x @ ff.pcast(p["gate"], "model", to="V"), 2)
        return nn.expert_layer(x, routing, mix, p["experts"])

    loss = lambda p, x: own(p, x).square().mean()  # noqa: E731
    sharded = ff.shard(ff.value_and_grad(loss), MESH, "data")
    with pytest.raises(
        LawError, match="loss of .* each rank's own along 'model'.*psum"
    ):
        check_types(sharded, MESH, params, X, layouts=layouts)


scaled = ff.unit(lambda w, x: w * x)
summed = ff.unit(lambda w, x: ff.psum(w * x, "model"))
averaged = ff.unit(lambda w, x: ff.pmean(w * x, "model"))
cast_within = ff.unit(lambda w, x: ff.psum(own(w) * x, "model"))


def own(x):
    return ff.pcast(x, "model", to="V")


ONE_VALUE = {
    "psum in a unit": lambda w, x: summed(w, x).sum(),
    "pmean in a unit": lambda w, x: averaged(w, x).sum(),
    "psum in glue": lambda w, x: ff.psum(scaled(w, x).sum(), "model"),
    "pmean in glue": lambda w, x: ff.pmean(scaled(w, x).sum(), "model"),
    "psum over both axes": lambda w, x: ff.psum(scaled(w, x).sum(), ("data", "model")),
    "all_gather": lambda w, x: ff.all_gather(scaled(w, x), "model", to="I").sum(),
}


def of_rows(loss):
    """The value and the gradient by ``w`` of a rank's rows of 1 to 4."""

    def main():
        step = ff.shard(ff.value_and_grad(loss), MESH, "data")
        x = ff.local_batch(torch.arange(1.0, 5.0), MESH, "data")
        value, grad = step(ff.place(step, torch.tensor(3.0), x), x)
        return value.item(), ff.unshard(grad).item()

    return ff.spmd(main, MESH)()


@pytest.mark.parametrize("name", ONE_VALUE)
def test_a_differentiated_sum_of_one_value_is_refused(name):
    """Its value is n times, and its gradient was not; a mean's was an nth."""
    op = name.split()[0]
    with pytest.raises(LawError, match=rf"{op} at .* ff\.pcast\(x, 'model'"):
        of_rows(ONE_VALUE[name])


@pytest.mark.parametrize(
    ("loss", "times"),
    [
        (lambda w, x: ff.psum(own(scaled(w, x).sum()), "model"), 2),
        (lambda w, x: ff.pmean(own(scaled(w, x).sum()), "model"), 1),
        (lambda w, x: cast_within(w, x).sum(), 2),
        (lambda w, x: scaled(w, x).sum() / ff.psum(torch.ones(()), "model"), 0.5),
        (lambda w, x: scaled(w, x).sum() * ff.psum(x.int() * 0 + 1, "model")[0], 2),
        (lambda w, x: scaled(w, x * ff.psum(torch.ones(()), "model")).sum(), 2),
    ],
)
def test_a_sum_of_own_values_and_one_that_is_not_differentiated_are_right(loss, times):
    assert of_rows(loss) == [(15.0 * times, 5.0 * times)] * 4
