"""A plan that cannot split a module says why, before anything is sent."""

import torch
from torch import nn

import fsfunc as ff
from tests.checks import refusals, refused, simulated, with_ledger
from tests.interop.models import Block, Stack, splits_as_one_device
from tests.interop.test_module_plans import over_data


class Between(nn.Module):
    """Two layers, and what may happen to what is between them."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain = Gain()

    def forward(self, x):
        h = self.up(self.norm(x) if self.what == "norm" else x)
        h = self.gain(h) if self.what == "gain" else h
        y = self.down(h)
        return y + h.mean() if self.what == "output" else y


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))

    def forward(self, x):
        return x * self.weight


class Experts(nn.Module):
    def __init__(self, scaled=False, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        if scaled:
            self.register_buffer("scale", torch.ones(2))

    def forward(self, hidden_states, top_k_index, top_k_weights): ...


PAIR = {"up": "column", "down": "row"}
X = torch.ones(2, 4)


def taking(module, plan, units="", axis="model"):
    return lambda: ff.from_module(module, units, plan=plan, axis=axis)


def with_plan(module, **plan):
    module._tp_plan = plan
    return module


def running(module, plan=PAIR, units="", layouts=None, over="model", x=X, **axes):
    """Places, and runs with gradients on simulated ranks."""

    def call():
        apply, params, buffers = ff.from_module(module, units, plan=plan, axis=over)
        mesh = simulated(**(axes or {"data": 1, "model": 2}))
        grad = ff.value_and_grad(lambda p, x: apply(p, buffers, x).square().mean())
        table = apply.layouts if layouts is None else layouts
        with_ledger(over_data(grad), params, x, mesh=mesh, layouts=table)

    return call


@refusals({
    "no module": (taking(Stack(), {"blocks.*.upp": "column"}), ValueError,
        "no module matches 'blocks.\\*.upp'; there are 'blocks.2.up'"),
    "two patterns": (taking(Stack(), {"blocks.*.up": "column", "**.up": "row"}),
        ValueError, "both match 'blocks.0.up': let one"),
    "a norm": (taking(Block(), {"norm": "column"}), TypeError,
        "LayerNorm, and 'column' splits torch.nn's own Linear. .*column_linear"),
    "an embedding by rows": (taking(Stack(), {"embed": "row"}), TypeError,
        "'embed' is a .*Embedding, and 'row' splits torch.nn's own Linear"),
    "a word": (taking(Block(), {"up": "colwise"}), ValueError, "given 'colwise'; a la"),
    "an axis of its own": (taking(Block(), PAIR | {"down": ("row", "data")}),
        ValueError, "'down' is split over 'data' and other layers over 'model'"),
    "other experts": (taking(Block(), {"up": "expert"}), TypeError,
        "takes input: it must take hidden_states, top_k_index, top_k_weights"),
    "experts of no number": (taking(Experts(up=(2, 4), down=(3, 4)), {"": "expert"}),
        TypeError, "along dim 0; it has up \\(2, 4\\), down \\(3, 4\\)"),
    "experts and more": (taking(nn.Sequential(Experts(True, up=(2, 4))),
        {"0": "expert"}), TypeError, "holds 'scale', of which a rank's experts"),
    "no axis": (taking(Block(), PAIR, axis=None), TypeError, "give both, as in plan="),
    "no plan": (taking(Block(), None), TypeError, "give both"),
    "no plan of its own": (taking(Block(), "auto"), ValueError, "no plan of its own"),
    "another word": (taking(with_plan(Block(), up="mla_kv_a_proj"), "auto"), ValueError,
        "'up' as 'mla_kv_a_proj', .* no counterpart"),
    "a frozen layer": (taking(Block().requires_grad_(False), PAIR), TypeError,
        "'up.weight' does not require grad, .* ff.masked"),
    "a sparse embedding": (taking(nn.Embedding(4, 2, sparse=True), {"": "vocab"}),
        TypeError, "an Embedding with sparse"),
    "a computed weight": (taking(nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4))),
        {"0": "row"}), TypeError, "the weight of '0' is computed by a hook"),
    "a tie": (taking(Stack(), {"embed": "vocab"}), ValueError,
        "'embed' and 'head' must be split alike: .* \"column_gathered\""),
    "no row": (taking(Block(), {"up": "column"}), ValueError, "in its unit '' takes t"),
    "other units": (taking(Block(), PAIR, units=()), ValueError,
        "no \"row\" layer in its unit 'up' takes them: plan one, with units= that"),
    "whole alone": (taking(Block(), {"norm": "whole"}), ValueError,
        'no module around it has a "column" layer: leave it out'),
    "whole of nothing": (taking(Block(), {**PAIR, "drop": "whole"}), ValueError,
        "'drop' is \"whole\", and has no parameter of its own"),
    "features": (running(Block(), model=3), ValueError,
        "'up.weight' .* size 3: 8 is not a multiple of it; make it 9"),
    "other layouts": (running(Between(""), layouts={"up.*": ff.Split(0, "model")}),
        ValueError, "'down.weight' is whole, .* with layouts=apply.layouts"),
    "an axis of shard": (running(Between(""), over="data", data=2), ValueError,
        'split over "data", over which shard averages'),
    "a whole parameter between": (running(Between("gain")), RuntimeError,
        "is combined with split features, .* add 'gain': \"whole\" to the plan"),
    "whole elsewhere": (running(Between("norm"), {**PAIR, "norm": "whole"}),
        RuntimeError, "is \"whole\", .* and sees others: leave it out"),
    "an output between": (running(Between("output")), RuntimeError, "mean of split fe"),
    "too few features": (running(Between("norm"), {"down": "row"}), ValueError,
        "'down.weight' is given 8 features, and a rank has 4: the layer before it"),
})  # fmt: skip
def test_bad_plans_are_refused(call, error, way_out):
    refused(call, error, way_out)


def test_a_whole_module_between_has_the_gradient_of_one_device():
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    plan, module = {**PAIR, "gain": "whole"}, Between("gain").double()
    mean = lambda y, _: y.square().mean()  # noqa: E731
    splits_as_one_device(module, {"x": x}, mean, "", plan)
