"""A module whose layers a plan splits is the module, and sends what its layers send.

Llama and its like, as transformers has them, on simulated ranks: loss and gradients,
and a training with clipping, are those of one device.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsfunc as ff
from fsfunc import tree
from fsfunc.interop.split_values import SplitTensor
from fsfunc.sharded.leaf import is_sharded
from tests.checks import close, refusals, refused, simulated
from tests.interop.models import (
    LENGTH,
    WIDTH,
    Block,
    Stack,
    hugging_face,
    language_loss,
    llama,
    mixtral,
    text,
)

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

    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **options)).double()


MODELS = {
    "llama": (llama, {}, PLAN),
    "auto": (llama, {}, "auto"),
    "qwen3 auto": (qwen3, {}, "auto"),
    "mixtral auto": (mixtral, {"num_local_experts": 4,
        "experts_implementation": "batched_mm"}, "auto"),
    "biases": (llama, {"attention_bias": True, "mlp_bias": True}, PLAN),
    "tied": (llama, {"tie_word_embeddings": True}, PLAN),
    "eager": (llama, {"attn_implementation": "eager"}, PLAN),
    "qwen3": (qwen3, {}, PLAN | {"model.layers.*.self_attn.[qk]_norm": "whole"}),
    "mixtral": (mixtral, {"num_local_experts": 4,
        "experts_implementation": "batched_mm"}, ATTENTION | EXPERTS),
    "mixtral over both": (mixtral, {"num_local_experts": 4,
        "experts_implementation": "batched_mm"}, ATTENTION | dict.fromkeys(EXPERTS,
        ("expert", "data"))),
    "sequence": (llama, {"attention_bias": True},
        PLAN | {"model.layers.*": "sequence"}),
}  # fmt: skip


def made(name="llama", units="model.layers.*", **plan):
    """(apply, params, loss) of a model, and its batch."""
    make, options, whole = MODELS[name]
    module = hugging_face(make, vocab_size=WORDS, num_hidden_layers=LAYERS, **options)
    for p in module.parameters():  # biases and norms too
        p.data += 0.1 * torch.randn_like(p)
    plan = whole if whole == "auto" else whole | plan
    apply, params, buffers = ff.from_module(module, units, plan=plan, axis="model")

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
    mesh = simulated(**axes)

    def main():
        mine = ff.local_batch(batch, mesh, "data") if "data" in axes else batch
        step = transform(ff.value_and_grad(loss), mesh)
        placed = ff.place(step, params, mine, layouts=apply.layouts)
        parts = tree.leaves(placed, is_leaf=is_sharded)
        split = [x for x in parts if is_sharded(x) and x.layout.splits]
        assert len(split) == len(apply.layouts)
        with ff.ledger() as log:
            found = step(placed, mine)
        return ff.unshard(found), log

    return ff.spmd(main, mesh)()


TRANSFORMS = {
    "no shard": (lambda step, mesh: step, {"model": 2}),
    "zero=0": (lambda step, mesh: ff.shard(step, mesh, "data", zero=0), None),
    "zero=3": (lambda step, mesh: ff.shard(step, mesh, "data", zero=3), None),
    "zero=3 remat": (lambda step, mesh: ff.shard(ff.remat(step), mesh, "data", zero=3),
        None),
    "pipeline": (lambda step, mesh: ff.pipeline(step, mesh, "pipe", n_microbatches=2),
        {"pipe": 2, "model": 2}),
}  # fmt: skip
CASES = [("llama", how) for how in TRANSFORMS]
CASES += [(name, "zero=3") for name in MODELS if name != "llama"]
CASES += [("qwen3", "no shard"), ("mixtral", "pipeline"), ("sequence", "pipeline")]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_split_model_has_the_gradients_of_one_device(name, how):
    for found, _ in on_ranks(name, how, 2):
        close(found, alone(name), 1e-10)


@pytest.mark.parametrize(
    ("name", "data"), [("llama", 1), ("llama", 2), ("sequence", 2)]
)
def test_a_layer_sends_four_sums_of_an_activation(name, data):
    """And the embedding and the head one each, and the head gathers its logits.

    Where sequences are split a sum is a gather and a scatter, and beside them go half a
    sum into the first layer (backward) and out of the last, and gradients of norms and
    row biases.
    """
    found = on_ranks(name, "zero=3", data)
    n, tokens = 2, ROWS // data * LENGTH
    reduced = 2 * (n - 1) * tokens * WIDTH * ITEM // n
    logits = (n - 1) * tokens * WORDS // n * ITEM
    split = name == "sequence"
    vectors = split * LAYERS * 3 * 2 * (n - 1) * WIDTH * ITEM // n
    for _, log in found:
        sums = 4 * LAYERS + 2
        assert log.bytes("model") == (sums + split) * reduced + logits + vectors
        ops = ("psum", "all_gather", "psum_scatter")
        assert [log.count(op, axis="model") for op in ops] == (
            [2 + 3 * LAYERS, 4 * LAYERS + 3, 4 * LAYERS] if split else [sums, 1, 0]
        )


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

    def main():
        step, mine = ff.value_and_grad(loss), batch
        if axis == "data":
            step, mine = ff.shard(step, mesh, "data"), ff.local_batch(batch, mesh, axis)
        layouts = apply.layouts
        placed = ff.place(step, params, mine, layouts=layouts, record=record)
        with ff.ledger() as log:
            found = step(placed, mine)
        return ff.unshard(found), log

    for found, log in ff.spmd(main, mesh)():
        close(found, expected, 1e-10 if dtype == torch.float64 else 1e-5)
        assert log.count("all_to_all", axis=axis) == 4 * LAYERS
        sent = 4 * rows * (n - 1) * WIDTH * dtype.itemsize
        assert log.bytes(axis, "all_to_all") == sent


def test_a_planned_step_sends_what_the_step_sends():
    apply, params, loss, batch = made("sequence")
    mine = {name: x[: ROWS // 2] for name, x in batch.items()}

    def build(backend):
        mesh = ff.make_mesh({"data": 2, "model": 2}, backend)

        def main():
            step = ff.shard(ff.value_and_grad(loss), mesh, "data")
            placed = ff.place(step, params, mine, layouts=apply.layouts)
            if backend == "abstract":
                return ff.plan(step, placed, mine).ranks[0].records
            with ff.ledger() as log:
                step(placed, mine)
            return [record for record in log.records if record.rank == 0]

        records = ff.spmd(main, mesh)()[0]
        return [(record.op, record.axis, record.bytes) for record in records]

    assert build("abstract") == build("simulated")


def test_a_split_model_trains_with_clipping_and_goes_back_into_its_module():
    optimizer = ff.chain(ff.clip_by_global_norm(0.1), ff.sharded_adam(1e-2))
    apply, params, loss, batch = made()

    def train_step(state, batch):
        value, grads = ff.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads, optimizer), value

    def trained(step, batch, **more):
        state = ff.init_state(step, params, optimizer, batch, **more)
        for _ in range(2):
            state, value = step(state, batch)
        return ff.unshard(state.params), value

    expected, mesh = trained(train_step, batch), simulated(data=2, model=2)

    def main():
        step = ff.shard(ff.accumulate(train_step, 2), mesh, "data")
        mine = ff.local_batch(batch, mesh, "data")
        return trained(step, mine, layouts=apply.layouts)

    for found in ff.spmd(main, mesh)():
        close(found, expected, 1e-9)


def knowing(apply, buffers, batch):
    logits = apply(*buffers, **batch).logits[:, :-1] * 2 - torch.ones(())
    return ff.nn.vocab_cross_entropy(logits, batch["input_ids"][:, 1:])


def plain(apply, buffers, batch):
    return language_loss(apply(*buffers, **batch).logits, batch)


def its_own(apply, buffers, batch):
    return apply(*buffers, **batch, labels=batch["input_ids"]).loss


@pytest.mark.parametrize(
    ("loss", "bound"), [(knowing, 1e-10), (plain, 1e-10), (its_own, 1e-5)]
)
def test_logits_may_stay_split_and_the_loss_is_that_of_whole_ones(loss, bound):
    """Also where every target is among each rank's classes, by their count."""
    apply, params, _, batch = made("tied", lm_head="vocab")
    module = hugging_face(llama, vocab_size=WORDS, num_hidden_layers=LAYERS)
    _, _, buffers = ff.from_module(module)
    batch["input_ids"] %= WORDS // 2
    own = ff.value_and_grad(lambda p, batch: loss(apply, (p, buffers), batch))
    expected = own(params, batch)
    mesh = simulated(data=2, model=2)

    def main():
        step = ff.shard(own, mesh, "data")
        mine = ff.local_batch(batch, mesh, "data")
        placed = ff.place(step, params, mine, layouts=apply.layouts)
        with ff.ledger() as log:
            found = step(placed, mine)
        assert log.count("all_gather", axis="model") == 0
        return ff.unshard(found)

    for found in ff.spmd(main, mesh)():
        close(found, expected, bound)


def on_parts(do, dim):
    """What is done to a tensor that is split, joined again; and to the whole."""
    whole = torch.arange(48.0).view(2, 4, 6)

    def main():
        part = whole.chunk(2, dim)[ff.axis_index("model")]
        y = do(SplitTensor(part, "model", dim))
        return (y.shape, ff.all_gather(y.local, "model", dim=dim)) if dim else y

    return ff.spmd(main, simulated(model=2))()[0], do(whole)


@pytest.mark.parametrize(
    "do",
    [
        lambda x: 1 - x / 2,
        lambda x: torch.tanh(x).to(torch.float64) + x.float(),
        lambda x: x * torch.ones(4, 1) + torch.ones(()),
        lambda x: torch.ones(()) * x,
        lambda x: x[:, -1, None],
        lambda x: x[..., 1:3, :],
        lambda x: x[torch.tensor([[True, False, True, True]] * 2)],
        lambda x: x[None, 0, [1, 2]],
        lambda x: x.view(-1, x.size(-1)),
        lambda x: x.reshape(x.shape[0] * 4, -1),
        lambda x: x.flatten(0, 1).contiguous(),
    ],
)
def test_what_is_done_to_split_logits_is_done_to_the_whole(do):
    (shape, found), expected = on_parts(do, -1)
    assert shape == expected.shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(
    "do",
    [
        lambda x: x.argmax(-1),
        lambda x: torch.softmax(x, -1),
        lambda x: x.mean(),
        lambda x: x == x,
        lambda x: x + torch.ones(4, 6),
        lambda x: x + torch.ones(3, 3),
        lambda x: torch.ones(4, 6).add_(x),
        lambda x: x[..., 0],
        lambda x: x[:, :2, :3],
        lambda x: x[..., None],
        lambda x: x.view(2, -1),
        lambda x: x.flatten(),
        lambda x: x.transpose(0, 1),
        lambda x: list(x),
        lambda x: F.cross_entropy(x, torch.zeros(2, 6, dtype=torch.long)),
        lambda x: F.cross_entropy(
            x[0], torch.zeros(4, dtype=torch.long), weight=torch.ones(6)
        ),
        lambda x: ff.nn.vocab_cross_entropy(x, torch.zeros(2, 4).long(), "data"),
    ],
)
def test_what_a_part_cannot_know_is_refused(do, dim):
    way = "column_gathered" if dim == -1 else "belongs into a unit"
    with pytest.raises(RuntimeError, match=f"{way}|.local is"):
        on_parts(do, dim)


SIZES = {
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": WIDTH, "intermediate_size": 32, "vocab_size": WORDS,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
ROUTED = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "Cohere2": {},
    "DeepseekV3": ROUTED | LATENT | {"n_routed_experts": 4, "n_group": 1},
    "GPTNeoX": {"hidden_dropout": 0.0},  # queries, keys and values of a head in one
    "Glm4": {"head_dim": 4},
    "Olmo2": {},  # a norm over all heads
    "Phi": {},
    "Phi3": {},  # a gate beside values
    "Qwen3Moe": ROUTED | {"head_dim": 4, "num_experts": 4},
    "Starcoder2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_split_by_their_own_plan(family):
    import transformers

    options = {"attention_dropout": 0.0, "topk_group": 1}
    config = getattr(transformers, f"{family}Config")
    settings = config(**SIZES | options | FAMILIES[family])
    module = hugging_face(
        lambda: getattr(transformers, f"{family}ForCausalLM")(settings).double()
    )
    if "Moe" in family or "Deepseek" in family:
        module.set_experts_implementation("batched_mm")
    apply, params, buffers = ff.from_module(
        module, f"{module.base_model_prefix}.layers.*", plan="auto", axis="model"
    )
    step = ff.value_and_grad(
        lambda p, batch: language_loss(apply(p, buffers, **batch).logits, batch)
    )
    batch = text(4)
    expected = step(params, batch)

    def main():
        return ff.unshard(
            step(ff.place(step, params, batch, layouts=apply.layouts), batch)
        )

    assert apply.layouts
    for found in ff.spmd(main, simulated(model=2))():
        close(found, expected, 1e-6)  # norms of some are in fp32


def test_stock_derivatives_are_those_of_one_device():
    apply, params, loss, batch = made("qwen3")
    expected = torch.func.grad(loss)(params, batch)

    def main():
        placed = ff.place(loss, params, batch, layouts=apply.layouts)
        return ff.unshard(torch.func.grad(loss)(placed, batch))

    for found in ff.spmd(main, simulated(model=2))():
        close(found, expected, 1e-10)


def test_parameters_that_come_whole_run_as_the_module_itself():
    module = hugging_face(llama, vocab_size=WORDS)
    apply, params, buffers = ff.from_module(module, "**.layers.*", plan=PLAN, axis="m")
    batch = text()
    assert torch.equal(
        apply(params, buffers, **batch).logits, module(**batch).logits.detach()
    )
    lies = {name: split.dim for name, split in apply.layouts.items() if ".0." in name}
    assert lies == {
        f"model.layers.0.{name}.weight": dim
        for name, dim in {
            "self_attn.q_proj": 0,
            "self_attn.k_proj": 0,
            "self_attn.v_proj": 0,
            "self_attn.o_proj": 1,
            "mlp.gate_proj": 0,
            "mlp.up_proj": 0,
            "mlp.down_proj": 1,
        }.items()
    }


# What is refused


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


class Part(nn.Module):
    """[B, L, 4] -> [B, L, 4], by two layers in a module of their own."""

    def __init__(self, what="", p=0.0):
        super().__init__()
        self.what, self.pair, self.drop = what, Between(""), nn.Dropout(p)
        self.weight = nn.Parameter(torch.ones(4))
        if what == "mixer":
            self.mix = nn.Conv1d(4, 4, 1)
        if what == "statistics":
            self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, x):
        y = self.pair(x.flatten(0, 1) if self.what == "flat" else x)
        y = self.drop(x * self.weight) + y
        return (y, y) if self.what == "two" else y


class Parts(nn.Module):
    """Two of them, and a norm."""

    def __init__(self, what=""):
        super().__init__()
        self.blocks = nn.ModuleList(Part(what) for _ in range(2))
        self.what, self.norm = what, nn.LayerNorm(4)
        if what == "shared":
            self.blocks[1].pair.norm = self.blocks[0].pair.norm

    def forward(self, x):
        for block in self.blocks:
            x = block(x=x) if self.what == "keyword" else block(x)
            x = x.cumsum(1) if self.what == "glue" else x
        return self.norm(x)


PAIR = {"up": "column", "down": "row"}
PARTS = {
    "blocks.*": "sequence",
    "blocks.*.pair.up": "column",
    "blocks.*.pair.down": "row",
}
X = torch.ones(2, 4)
LONG = torch.ones(2, 4, 4)


def taking(module, plan, units="", axis="model"):
    return lambda: ff.from_module(module, units, plan=plan, axis=axis)


def with_plan(module, **plan):
    module._tp_plan = plan
    return module


def running(
    module, plan=PAIR, units="", layouts=None, over=None, x=X, grads=True, **axes
):
    """Places, and runs with gradients, or without, on simulated ranks."""

    def call():
        made = ff.from_module(module, units, plan=plan, axis=over or "model")
        apply, params, buffers = made
        mesh = simulated(**(axes or {"data": 1, "model": 2}))

        def main():
            def step(p, x):
                return apply(p, buffers, x).square().mean()

            step = ff.value_and_grad(step) if grads else step
            step = ff.shard(step, mesh, "data") if "data" in mesh.axes else step
            table = apply.layouts if layouts is None else layouts
            step(ff.place(step, params, x, layouts=table), x)

        ff.spmd(main, mesh)()

    return call


@refusals({
    "no module": (taking(Stack(), {"blocks.*.upp": "column"}), ValueError,
        "no module matches 'blocks.\\*.upp'; there are 'blocks.2.up'"),
    "two patterns": (taking(Stack(), {"blocks.*.up": "column", "**.up": "row"}),
        ValueError,
        "'blocks.\\*.up' and '\\*\\*.up' both match 'blocks.0.up': let one"),
    "a norm": (taking(Block(), {"norm": "column"}), TypeError,
        "'norm' is a torch.nn.modules.normalization.LayerNorm, and 'column' splits "
        "torch.nn's own Linear. Where its forward calls ff.nn.column_linear"),
    "an embedding by rows": (taking(Stack(), {"embed": "row"}), TypeError,
        "'embed' is a .*Embedding, and 'row' splits torch.nn's own Linear"),
    "a word": (taking(Block(), {"up": "colwise"}), ValueError,
        "'up' is given 'colwise'; a layer is column, column_gathered, expert, row, "
        "sequence, vocab or whole"),
    "an axis of its own": (taking(Block(), PAIR | {"down": ("row", "data")}),
        ValueError,
        "'down' is split over 'data' and other layers over 'model': .* \"expert\""),
    "other experts": (taking(Block(), {"up": "expert"}), TypeError,
        "'up' is \"expert\", and its forward takes input: it must take "
        "hidden_states, top_k_index, top_k_weights, .* ff.nn.expert_layer"),
    "experts of no number": (taking(Experts(up=(2, 4), down=(3, 4)), {"": "expert"}),
        TypeError,
        "one of each parameter along dim 0; it has up \\(2, 4\\), down \\(3, 4\\)"),
    "experts and more": (taking(nn.Sequential(Experts(True, up=(2, 4))),
        {"0": "expert"}), TypeError,
        "holds 'scale', of which a rank's experts would not take their own part"),
    "no axis": (taking(Block(), PAIR, axis=None), TypeError,
        'give both, as in plan={"\\*\\*.q_proj": "column"}, axis="model"'),
    "no plan": (taking(Block(), None), TypeError, "give both"),
    "no plan of its own": (taking(Block(), "auto"), ValueError,
        "Block has no plan of its own, .* write one"),
    "another word": (taking(with_plan(Block(), up="mla_kv_a_proj"), "auto"), ValueError,
        "the plan of Block has 'up' as 'mla_kv_a_proj', .* no counterpart"),
    "a frozen layer": (taking(Block().requires_grad_(False), PAIR), TypeError,
        "'up.weight' does not require grad, .* ff.masked"),
    "a sparse embedding": (taking(nn.Embedding(4, 2, sparse=True), {"": "vocab"}),
        TypeError, "an Embedding with sparse"),
    "a computed weight": (taking(nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4))),
        {"0": "row"}), TypeError, "the weight of '0' is computed by a hook"),
    "a tie": (taking(Stack(), {"embed": "vocab"}), ValueError,
        "'embed' and 'head' must be split alike: .* \"column_gathered\""),
    "no row": (taking(Block(), {"up": "column"}), ValueError,
        "no \"row\" layer in its unit '' takes them"),
    "other units": (taking(Block(), PAIR, units=()), ValueError,
        "no \"row\" layer in its unit 'up' takes them: plan one, with units= that"),
    "whole alone": (taking(Block(), {"norm": "whole"}), ValueError,
        'no module around it has a "column" layer: leave it out'),
    "whole of nothing": (taking(Block(), {**PAIR, "drop": "whole"}), ValueError,
        "'drop' is \"whole\", and has no parameter of its own"),
    "a sequence without units": (taking(Parts(), {"blocks.*.pair": "sequence"},
        units="blocks.*"), ValueError,
        "'blocks.0.pair' is \"sequence\", .*, and is none of them: give units= so"),
    "a sequence with units": (taking(Parts(), PARTS, units=["blocks.*", "**.pair"]),
        ValueError, "and has the unit 'blocks.0.pair' in it: give units= so"),
    "what may mix positions": (taking(Parts("mixer"), PARTS, units="blocks.*"),
        ValueError, "'blocks.0.mix' is in 'blocks.0', a \"sequence\", .* split it as"),
    "what is of all positions": (taking(Parts("statistics"), PARTS, units="blocks.*"),
        ValueError,
        "'blocks.0' is .* has 'blocks.0.norm' in it, a BatchNorm1d, .* leave the"),
    "layers in the sequence itself": (taking(Stack(), {"blocks.*": "sequence",
        "**.up": "column", "**.down": "row"}, units="blocks.*"), ValueError,
        "'blocks.0.up' .* stand in 'blocks.0' itself, .* into a module of their"),
    "a sequence of nothing": (taking(nn.Sequential(nn.LayerNorm(4)), {"0": "sequence"},
        units="0"), ValueError,
        '\'0\' is "sequence", .* has no "column" layer|no "column" and'),
    "a shared norm": (taking(Parts("shared"), PARTS, units="blocks.*"), ValueError,
        "'blocks.1' is \"sequence\", and shares 'blocks.0.pair.norm' with another"),
    "positions": (running(Parts(), PARTS, "blocks.*", x=LONG[:, :3]), ValueError,
        'of 3 positions is not split over axis "model" of size 2, .* pad it to 4'),
    "one position": (running(Parts(), PARTS, "blocks.*", x=LONG[:, :2]), ValueError,
        "which needs a multiple of 2 from 4: pad it to 4"),
    "a sequence by keyword": (running(Parts("keyword"), PARTS, "blocks.*", x=LONG),
        TypeError, "as its first argument, not by keyword; got None"),
    "between sequences": (running(Parts("glue"), PARTS, "blocks.*", x=LONG),
        RuntimeError,
        'cumsum of SplitTensor\\(\\(2, 4, 4\\) over "model", dim -2\\).* unit'),
    "two sequences": (running(Parts("two"), PARTS, "blocks.*", x=LONG), TypeError,
        "returns .*(2, 2, 4).* is to return one tensor, of 2 positions a rank"),
    "rows alone": (running(Parts("flat"), PARTS, "blocks.*", x=LONG), RuntimeError,
        "is given \\(4, 4\\), which is neither the sequence, of 2 positions"),
    "features": (running(Block(), model=3), ValueError,
        "'up.weight' .* size 3: 8 is not a multiple of it; make it 6 or 9"),
    "other layouts": (running(Between(""), layouts={"up.*": ff.Split(0, "model")}),
        ValueError,
        "'down.weight' lies whole, and is to lie split over \"model\" along dim 1: "
        "place all parameters with layouts=apply.layouts"),
    "an axis of shard": (running(Between(""), over="data", data=2), ValueError,
        'split over "data", over which shard averages'),
    "a whole parameter between": (running(Between("gain")), RuntimeError,
        "'gain.weight', which is whole, meets split features, .* add 'gain': "
        '"whole" to the plan'),
    "whole elsewhere": (running(Between("norm"), {**PAIR, "norm": "whole"}),
        RuntimeError,
        "'norm.(weight|bias)' is \"whole\", .* and meets others: leave it out"),
    "an output between": (running(Between("output")), RuntimeError,
        "mean of split features"),
    "too few features": (running(Between("norm"), {"down": "row"}), ValueError,
        "'down.weight' is given 8 features, and a rank has 4: the layer before it"),
})  # fmt: skip
def test_bad_plans_are_refused(call, error, way_out):
    refused(call, error, way_out)


def test_a_whole_module_between_has_the_gradient_of_one_device():
    apply, params, buffers = ff.from_module(
        Between("gain").double(), "", plan={**PAIR, "gain": "whole"}, axis="model"
    )
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    step = ff.value_and_grad(lambda p, x: apply(p, buffers, x).square().mean())
    expected = step(params, x)

    def main():
        return ff.unshard(step(ff.place(step, params, x, layouts=apply.layouts), x))

    for found in ff.spmd(main, simulated(model=2))():
        close(found, expected, 1e-12)


def test_ranks_drop_positions_of_their_own():
    module = nn.Sequential(Part(p=0.5))
    module[0].pair.down.weight.data.zero_()
    module[0].pair.down.bias.data.zero_()
    plan = {"0": "sequence", "0.pair.up": "column", "0.pair.down": "row"}
    apply, params, buffers = ff.from_module(module, "0", plan=plan, axis="model")
    x = torch.ones(8, 4, 4)

    def main():
        placed = ff.place(
            lambda p, x: apply(p, buffers, x).local, params, x, layouts=apply.layouts
        )
        return apply(placed, buffers, x).local

    one, other = ff.spmd(main, simulated(model=2))()
    assert {*one.unique().tolist(), *other.unique().tolist()} == {0.0, 2.0}
    assert not torch.equal(one, other)
