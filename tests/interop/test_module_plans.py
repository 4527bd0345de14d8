"""A module whose layers a plan splits is the module, and sends what its layers send.

Llama and its like, as transformers has them, on simulated ranks: loss and gradients,
and a training with clipping, are those of one device.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.interop.split_values import SplitTensor
from tests.checks import close, simulated, with_ledger
from tests.interop.models import (
    LENGTH,
    SIZES,
    WIDTH,
    hugging_face,
    language_loss,
    llama,
    mixtral,
    splits_as_one_device,
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
    "sequence": (llama, {"attention_bias": True},
        PLAN | {"model.layers.*": "sequence"}),
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
    mesh = simulated(**(axes or {"data": data, "model": 2}))
    wrap = lambda mesh: transform(ff.value_and_grad(loss), mesh)  # noqa: E731
    return with_ledger(wrap, params, batch, mesh=mesh, layouts=apply.layouts)


def over_data(step):
    """A step whose data axis, where there is one, is sharded over."""
    return lambda mesh: ff.shard(step, mesh, "data") if "data" in mesh.axes else step


TRANSFORMS = {
    "no shard": (lambda step, mesh: step, {"model": 2}),
    "zero=3": (lambda step, mesh: ff.shard(step, mesh, "data", zero=3), None),
    "zero=3 remat": (lambda step, mesh: ff.shard(ff.remat(step), mesh, "data", zero=3),
        None),
    "pipeline": (lambda step, mesh: ff.pipeline(step, mesh, "pipe", n_microbatches=2),
        {"pipe": 2, "model": 2}),
}  # fmt: skip
CASES = [("llama", "no shard"), ("llama", "zero=3 remat"), ("sequence", "pipeline")]
CASES += [(name, "zero=3") for name in MODELS if name != "tied"]  # as logits are


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

    how = {"mesh": mesh, "layouts": apply.layouts, "record": record}
    wrap = over_data(ff.value_and_grad(loss))
    for found, log in with_ledger(wrap, params, batch, **how):
        close(found, expected, 1e-10 if dtype == torch.float64 else 1e-5)
        assert log.count("all_to_all", axis=axis) == 4 * LAYERS
        sent = 4 * rows * (n - 1) * WIDTH * dtype.itemsize
        assert log.bytes(axis, "all_to_all") == sent


def knowing(apply, buffers, batch):
    logits = apply(*buffers, **batch).logits[:, :-1] * 2 - torch.ones(())
    return ff.nn.vocab_cross_entropy(logits, batch["input_ids"][:, 1:])


def plain(apply, buffers, batch):
    return language_loss(apply(*buffers, **batch).logits, batch)


def its_own(apply, buffers, batch):
    return apply(*buffers, **batch, labels=batch["input_ids"]).loss


@pytest.mark.parametrize(
    ("loss", "axes", "bound"),
    [
        (knowing, {"model": 2}, 1e-10),
        (plain, {"data": 2, "model": 2}, 1e-10),
        (its_own, {"model": 2}, 1e-5),
    ],
)
def test_logits_may_stay_split_and_the_loss_is_that_of_whole_ones(loss, axes, bound):
    """Also where every target is among each rank's classes, by their count."""
    apply, params, _, batch = made("tied", lm_head="vocab")
    module = hugging_face(llama, vocab_size=WORDS, num_hidden_layers=LAYERS)
    _, _, buffers = ff.from_module(module)
    batch["input_ids"] %= WORDS // 2
    own = ff.value_and_grad(lambda p, batch: loss(apply, (p, buffers), batch))
    how = {"mesh": simulated(**axes), "layouts": apply.layouts}
    expected = own(params, batch)
    for found, log in with_ledger(over_data(own), params, batch, **how):
        close(found, expected, bound)
        assert log.count("all_gather", axis="model") == 0


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


ROUTED = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "Cohere2": {},
    "DeepseekV3": ROUTED | LATENT | {"n_routed_experts": 4, "n_group": 1},
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


def test_parameters_that_come_whole_run_as_the_module_itself():
    module = hugging_face(llama, vocab_size=WORDS)
    apply, params, buffers = ff.from_module(module, "**.layers.*", plan=PLAN, axis="m")
    batch = text()
    assert torch.equal(
        apply(params, buffers, **batch).logits, module(**batch).logits.detach()
    )
    lies = {name: split.dim for name, split in apply.layouts.items() if ".0." in name}
    columns = [f"self_attn.{k}_proj" for k in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    expected = dict.fromkeys(columns, 0) | {"self_attn.o_proj": 1, "mlp.down_proj": 1}
    assert lies == {f"model.layers.0.{k}.weight": dim for k, dim in expected.items()}
