"""A module whose layers a plan splits is the module, and sends what its layers send.

Llama and its like, as transformers has them, on simulated ranks: loss and gradients,
and a training with clipping, are those of one device. A plan that cannot split a module
says why, before anything is sent.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsfunc as ff
from fsfunc.sharded.leaf import NotATensor
from tests.checks import all_refused, close, simulated, with_ledger
from tests.interop.models import (
    LENGTH,
    SIZES,
    WIDTH,
    Block,
    Stack,
    hugging_face,
    language_loss,
    llama,
    mixtral,
    splits_as_one_device,
    text,
)


class Between(nn.Module):
    """Two layers, and what may happen to what is between them."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain = Gain()

    def forward(self, x):
        h = self.up(self.norm(x) if self.case == "norm" else x)
        h = self.gain(h) if self.case == "gain" else h
        y = self.down(h)
        return y + h.mean() if self.case == "output" else y


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


class ScaledTable(nn.Embedding):
    def forward(self, x):
        return super().forward(x) * 3.0


class OwnLookup(nn.Embedding):
    def forward(self, x):
        return F.embedding(x, self.weight) * 3.0


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


test_bad_plans_are_refused = all_refused({
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
    "a lookup of its own": (running(OwnLookup(8, 4), {"": "vocab"}, x=torch.arange(4)),
        NotATensor, "'weight' .* is this rank's block of a split .*vocab_embedding"),
    "too few features": (running(Between("norm"), {"down": "row"}), ValueError,
        "'down.weight' is given 8 features, and a rank has 4: the layer before it"),
})  # fmt: skip


def test_rows_that_a_table_scales_are_those_of_one_device():
    torch.manual_seed(0)
    module, x = ScaledTable(8, 4), torch.arange(8)
    apply, params, buffers = ff.from_module(module, plan={"": "vocab"}, axis="model")
    mesh = simulated(data=1, model=2)
    forward = ff.shard(lambda p, x: apply(p, buffers, x), mesh, "data")

    def main(mesh):
        return forward(ff.place(forward, params, x, layouts=apply.layouts), x)

    for rows in ff.spmd(main, mesh)(mesh):
        assert torch.equal(rows, module(x))


def test_a_whole_module_between_has_the_gradient_of_one_device():
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    plan, module = {**PAIR, "gain": "whole"}, Between("gain").double()
    mean = lambda y, _: y.square().mean()  # noqa: E731
    splits_as_one_device(module, {"x": x}, mean, "", plan)


LAYERS, WORDS, ROWS = 2, 32, 8
ITEM = 8  # bytes of an element
ATTENTION = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.[qkv]_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "lm_head": "column_gathered",
}
EXPERTS = {"model.layers.*.mlp.experts": "expert"}
PLAN = ATTENTION | {
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
}


def qwen3(**options):
    """Llama with a norm over each head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"}
    return Qwen3ForCausalLM(Qwen3Config(**sizes | {"head_dim": 4} | options)).double()


MODELS = {
    "llama": (llama, {}, PLAN),
    "biases": (llama, {"attention_bias": True, "mlp_bias": True}, PLAN),
    "tied": (llama, {"tie_word_embeddings": True}, PLAN),
    "qwen3": (qwen3, {}, PLAN | {"model.layers.*.self_attn.[qk]_norm": "whole"}),
    "mixtral": (mixtral, {"num_local_experts": 4,
        "experts_implementation": "batched_mm"}, ATTENTION | EXPERTS),
    "mixtral over both": (mixtral, {"num_local_experts": 4,
        "experts_implementation": "batched_mm"}, ATTENTION | dict.fromkeys(EXPERTS,
        ("expert", "data"))),
    "mixtral folded": (mixtral, {"num_local_experts": 4,
        "experts_implementation": "batched_mm"}, ATTENTION | dict.fromkeys(EXPERTS,
        ("expert", "all"))),
}  # fmt: skip


def made(name="llama", **plan):
    """(apply, params, loss) of a model, and its batch."""
    make, options, whole = MODELS[name]
    module = hugging_face(make, vocab_size=WORDS, num_hidden_layers=LAYERS, **options)
    for p in module.parameters():  # biases and norms too
        p.data += 0.1 * torch.randn_like(p)
    plan = {"plan": whole | plan, "axis": "model"}
    apply, params, buffers = ff.from_module(module, "model.layers.*", **plan)

    def loss(params, batch):
        return language_loss(apply(params, buffers, **batch).logits, batch)

    return apply, params, loss, text(ROWS)


@functools.cache
def alone(name):
    """A model's loss and gradients on one device."""
    _, params, loss, batch = made(name)
    return ff.value_and_grad(loss)(params, batch)


@functools.cache
def on_ranks(name, how, data=2):
    """(loss and whole gradients, ledger) by rank."""
    apply, params, loss, batch = made(name)
    transform, axes = TRANSFORMS[how]
    axes = axes or {"data": data, "model": 2}
    folded = {"all": data * 2} if name == "mixtral folded" else None
    mesh = ff.make_mesh(axes, "simulated", folded=folded)
    wrap = lambda mesh: transform(ff.value_and_grad(loss), mesh)  # noqa: E731
    return with_ledger(wrap, params, batch, mesh=mesh, layouts=apply.layouts)


def over_data(step):
    """A step whose data axis, where there is one, is sharded over."""
    return lambda mesh: ff.shard(step, mesh, "data") if "data" in mesh.axes else step


TRANSFORMS = {
    "no shard": (lambda step, mesh: step, {"model": 2}),
    "remat": (lambda step, mesh: ff.remat(step), {"model": 2}),
    "zero=3": (lambda step, mesh: ff.shard(step, mesh, "data", zero=3), None),
    "zero=3 remat": (lambda step, mesh: ff.shard(ff.remat(step), mesh, "data", zero=3),
        None),
    "pipeline": (lambda step, mesh: ff.pipeline(step, mesh, "pipe", n_microbatches=2),
        {"pipe": 2, "model": 2}),
}  # fmt: skip
CASES = [("llama", how) for how in ("no shard", "remat", "zero=3 remat")]
CASES += [("biases", "pipeline")]
CASES += [(name, "zero=3") for name in MODELS if name != "tied"]  # as logits are


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_split_model_has_the_gradients_of_one_device(name, how):
    for found, _ in on_ranks(name, how, 2):
        close(found, alone(name), 1e-10)


@pytest.mark.parametrize("data", [1, 2])
def test_a_layer_sends_four_sums_of_an_activation(data):
    """And the embedding and the head one each, and the head gathers its logits."""
    found = on_ranks("llama", "zero=3", data)
    n, tokens = 2, ROWS // data * LENGTH
    reduced = 2 * (n - 1) * tokens * WIDTH * ITEM // n
    logits = (n - 1) * tokens * WORDS // n * ITEM
    for _, log in found:
        sums = 4 * LAYERS + 2
        assert log.bytes("model") == sums * reduced + logits
        ops = ("psum", "all_gather", "psum_scatter")
        assert [log.count(op, axis="model") for op in ops] == [sums, 1, 0]


@pytest.mark.parametrize(
    ("axis", "kind", "dtype", "record"),
    [
        ("data", "eager", torch.float64, "real"),
        ("model", "grouped_mm", torch.float32, "fake"),
    ],
)
def test_experts_send_their_tokens_there_and_back(axis, kind, dtype, record):
    """Of each layer, in four all-to-alls; also a rank whose experts nobody asks for.

    Forwards that pick experts by value make nothing, there, of nothing.
    """
    sizes = {"vocab_size": WORDS, "num_hidden_layers": LAYERS, "num_local_experts": 4}
    module = hugging_face(mixtral, **sizes, experts_implementation=kind).to(dtype)
    module.model.layers[1].mlp.gate.weight.data.zero_()  # all to the first two
    apply, params, buffers = ff.from_module(
        module, "model.layers.*", plan=EXPERTS, axis=axis
    )
    n, batch, mesh = 2, text(3 * 2), simulated(**{axis: 2})

    def loss(params, batch):
        return language_loss(apply(params, buffers, **batch).logits, batch)

    expected = ff.value_and_grad(loss)(params, batch)
    rows = 0  # that a rank sends to each, as many as any to any
    for logits in module(**batch, output_router_logits=True).router_logits:
        chosen = logits.topk(2).indices.view(n, -1)
        rows += max(int(((x // 2) == to).sum()) for x in chosen for to in range(n))

    how = {"mesh": mesh, "layouts": apply.layouts, "record": record}
    wrap = over_data(ff.value_and_grad(loss))
    for found, log in with_ledger(wrap, params, batch, **how):
        close(found, expected, 1e-10 if dtype == torch.float64 else 1e-5)
        assert log.count("all_to_all", axis=axis) == 4 * LAYERS
        sent = 4 * rows * (n - 1) * WIDTH * dtype.itemsize
        assert log.bytes(axis, "all_to_all") == sent


ROUTED = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "Cohere2": {},
    "DeepseekV3": ROUTED | LATENT | {"n_routed_experts": 4, "n_group": 1},
    "Gemma2": {"head_dim": 4},  # an embedding whose rows are scaled
    "GPTNeoX": {"hidden_dropout": 0.0},  # queries, keys and values of a head in one
    "Olmo2": {},  # a norm over all heads
    "Phi3": {},  # a gate beside values
    "Qwen3Moe": ROUTED | {"head_dim": 4, "num_experts": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_split_by_their_own_plan(family):
    import transformers

    options = {"attention_dropout": 0.0, "topk_group": 1, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")
    settings = config(**SIZES | {"vocab_size": WORDS} | options | FAMILIES[family])
    module = hugging_face(
        lambda: getattr(transformers, f"{family}ForCausalLM")(settings).double()
    )
    if "Moe" in family or "Deepseek" in family:
        module.set_experts_implementation("batched_mm")
    units = f"{module.base_model_prefix}.layers.*"
    # Norms of some are in fp32.
    splits_as_one_device(module, text(4), language_loss, units, plan="auto")


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


def test_split_layers_keep_nothing_of_a_recompute():
    """Of remat's own, each layer more holds its input, and gradients: nothing else."""
    rows, plan = 1000, {"*.up": "column", "*.down": "row"}
    mesh = ff.make_mesh({"data": 2, "model": 2}, "abstract")

    def peak(n):
        module = torch.nn.Sequential(*(Layer() for _ in range(n)))
        how = {"plan": plan, "axis": "model"}
        apply, params, buffers = ff.from_module(module, "*", **how)
        optimizer = ff.sharded_adam(1e-3)
        step = ff.value_and_grad(lambda p, x: apply(p, buffers, x).square().mean())
        step = ff.shard(ff.remat(optimizer(step)), mesh, "data", zero=3)
        batch, layouts = torch.zeros(rows, WIDTH), apply.layouts
        given = step, lambda: params, optimizer, batch
        return ff.plan(*given, mesh=mesh, layouts=layouts).peak_bytes

    assert peak(6) - peak(3) < 3 * 2 * rows * WIDTH * 4
