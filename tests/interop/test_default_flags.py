"""Models of transformers with the flags of their own configs, only their sizes reduced.

Each is a causal, masked, translating or picture model, or a classifier with its labels;
each is recorded on fake tensors and compared with the module itself.
"""

import copy
import functools

import pytest
import torch
import transformers as hf

import fsfunc as ff
from tests.checks import with_ledger
from tests.interop.models import VOCABULARY, WIDTH, close, hugging_face, seeded

MESH = ff.make_mesh({"data": 2}, "simulated")
HIDDEN = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = HIDDEN | {
    "intermediate_size": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 16,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2}
PICTURE = HIDDEN | {"intermediate_size": 32, "image_size": 8, "patch_size": 4}
TRANSLATING = {
    "d_model": WIDTH, "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
}  # fmt: skip
WHISPER = TRANSLATING | {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 8,
    "pad_token_id": 0,
}  # fmt: skip


def tokens(*shape):
    return torch.randint(3, VOCABULARY, shape, generator=seeded(1))


def labels():
    return torch.randint(5, (4,), generator=seeded(2))


def pictures(size=8):
    return torch.randn(4, 3, size, size, generator=seeded(3), dtype=torch.float64)


IDS = {"input_ids": tokens(4, 6)}
NEXT = IDS | {"labels": tokens(4, 6)}
CLASS = IDS | {"labels": labels()}
SEEN = {"pixel_values": pictures(), "labels": labels()}


def model(kind, config, batch, units, config_of=None, **options):
    """How to make one, what it is given, and which of its modules are units."""
    name = config_of or kind.removesuffix("LMHeadModel")
    for tail in ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM"):
        name = name.removesuffix(tail)
    for tail in ("ForSequenceClassification", "ForImageClassification"):
        name = name.removesuffix(tail)

    def make(**more):
        settings = getattr(hf, f"{name}Config")(**config, **options, **more)
        return getattr(hf, kind)(settings)

    return make, batch, units


BLOCKS = ["encoder.block.*", "decoder.block.*"]
MODELS = {
    "gpt2": model("GPT2LMHeadModel", {"n_embd": WIDTH, "n_layer": 2, "n_head": 2,
        "vocab_size": VOCABULARY}, NEXT, "transformer.h.*", n_positions=8,
        bos_token_id=0, eos_token_id=0),
    "llama": model("LlamaForCausalLM", GROUPED, NEXT, "model.layers.*"),
    "mixtral in balance": model(  # its loss reads what the routers return
        "MixtralForCausalLM", GROUPED, NEXT, "model.layers.*", num_local_experts=3,
        output_router_logits=True, router_aux_loss_coef=0.5,
    ),
    "t5 with labels": model("T5ForConditionalGeneration", TRANSLATING, NEXT, BLOCKS,
        d_kv=4, d_ff=32, num_layers=2, num_heads=4),
    "whisper": model("WhisperForConditionalGeneration", WHISPER,
        {"input_features": pictures(20)[:, 0, :8], "labels": tokens(4, 5)},
        ["model.encoder.layers.*", "model.decoder.layers.*"]),
    "bert with classes": model("BertForSequenceClassification", TEXT, CLASS,
        "bert.encoder.layer.*", num_labels=5),
    "vit": model("ViTForImageClassification", PICTURE, SEEN, "vit.layers.*",
        num_labels=5),
    "clip": model("CLIPModel", {}, IDS | {"pixel_values": pictures(),
        "return_loss": True}, ["text_model.encoder.layers.*",
        "vision_model.encoder.layers.*"], "CLIP", text_config=TEXT | {"bos_token_id": 0,
        "eos_token_id": 2, "pad_token_id": 1}, vision_config=PICTURE, projection_dim=8),
    "mamba": model("MambaForCausalLM", {"hidden_size": WIDTH, "num_hidden_layers": 2},
        NEXT, "backbone.layers.*", vocab_size=VOCABULARY, state_size=4,
        intermediate_size=32),
    "resnet": model("ResNetForImageClassification", {},
        SEEN | {"pixel_values": pictures(32)}, "resnet.encoder.stages.*",
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5),
}  # fmt: skip
WRITES = {"resnet"}  # batch statistics
SINGLE = {"mixtral in balance"}  # torch multiplies groups in no double precision


def made(name):
    make, batch, units = MODELS[name]
    module = hugging_face(make)
    return (module if name in SINGLE else module.double()), batch, units


def called(name, apply, buffers):
    """The module's output, and the buffers that it wrote."""
    how = {"mutable": True} if name in WRITES else {}

    def call(params, batch):
        out = apply(params, buffers, **batch, **how)
        return out if how else (out, buffers)

    return call


def loss_of(out):
    return out.logits.square().mean() if out.loss is None else out.loss


def halves(batch):
    def half(x, k):
        return x[2 * k : 2 * k + 2] if isinstance(x, torch.Tensor) else x

    return [{name: half(x, k) for name, x in batch.items()} for k in (0, 1)]


def tensors_of(out):
    found = [out.loss] if out.loss is not None else []
    key = "logits_per_image" if "logits_per_image" in out else "logits"
    return [*found, out[key]]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_what_it_is_by_itself(name):
    module, batch, units = made(name)  # in train mode: it drops what it drops
    call = called(name, *ff.from_module(module, units)[::2])
    given = {k: v.detach().clone() for k, v in ff.from_module(module)[1].items()}
    bound = 1e-5 if name in SINGLE else 1e-9

    def both(params):
        torch.manual_seed(5)
        out, buffers = call(params, batch)
        torch.manual_seed(5)
        own = copy.deepcopy(module)
        close(tensors_of(out), tensors_of(own(**batch)), bound)
        written = dict(own.named_buffers())
        close({k: buffers[k] for k in written}, written)

    both({k: v.requires_grad_() for k, v in given.items()})
    with torch.no_grad():
        both(given)

    # Gradients: each rank's half by itself, and their mean.
    if name not in WRITES:
        module.eval()
    apply, params, buffers = ff.from_module(module, units)
    call = called(name, apply, buffers)
    sum(loss_of(module(**part)) for part in halves(batch)).div(2).backward()
    grad = ff.value_and_grad(lambda p, batch: loss_of(call(p, batch)[0]))
    wrap = lambda mesh: ff.shard(ff.remat(grad), mesh, "data")  # noqa: E731
    ((_, grads), _), _ = with_ledger(wrap, params, batch)
    expected = {
        k: torch.zeros_like(p) if p.grad is None else p.grad
        for k, p in module.named_parameters()
        if k in params
    }
    close(grads, expected, 1e-5 if name in SINGLE else 1e-8)


# Caches of keys and values


def written_on(call, start, count=3):
    """The tokens that follow, each the likeliest, with a cache of what was read."""
    found, x, cache = [], start, None
    for _ in range(count):
        out = call(input_ids=x, past_key_values=cache)
        cache, x = out.past_key_values, out.logits[:, -1:].argmax(-1)
        found.append(x)
    return torch.cat(found, 1)


def test_a_cache_is_filled_where_no_gradients_are_on():
    module, _, units = made("gpt2")
    module.eval()
    apply, params, buffers = ff.from_module(module, units)
    start = IDS["input_ids"]

    def main():
        logits = lambda p, x: apply(p, buffers, input_ids=x).logits  # noqa: E731
        placed = ff.place(ff.shard(logits, MESH, "data"), params, start)
        call = ff.shard(lambda p, **k: apply(p, buffers, **k), MESH, "data")
        with torch.no_grad(), ff.ledger() as log:
            found = written_on(lambda **k: call(placed, **k), start)
        return found, log.count("all_gather")

    with torch.no_grad():
        expected = written_on(module, start)
    plainly = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = module.generate(start, max_new_tokens=3, **plainly)
    assert torch.equal(torch.cat([start, expected], 1), whole)
    for found, gathers in ff.spmd(main, MESH)():
        assert torch.equal(found, expected)
        assert gathers == 3 * sum("drop" not in unit for unit in apply.units)


@pytest.mark.parametrize("how", ["closed over", "given"])
def test_generate_runs_by_the_sharded_forward(how):
    """It makes an empty cache, which no check fills; buffers are as good as any."""
    module, *_ = made("llama")
    module.eval()
    start, plainly = IDS["input_ids"], {"do_sample": False, "pad_token_id": 0}
    apply, params, buffers = ff.from_module(module, "model.layers.*")

    def main():
        call = lambda p, b, **k: apply(p, b if b else buffers, **k)  # noqa: E731
        sharded = ff.shard(call, MESH, "data")
        logits = lambda p, x: apply(p, buffers, input_ids=x).logits  # noqa: E731
        placed = ff.place(ff.shard(logits, MESH, "data"), params, start)
        shell = copy.copy(module)
        given = {} if how == "closed over" else buffers
        shell.forward = functools.partial(sharded, placed, given)
        with ff.ledger() as log:
            found = shell.generate(start, max_new_tokens=3, **plainly)
        return found, log.count("all_gather")

    whole = module.generate(start, max_new_tokens=3, **plainly)
    for found, gathers in ff.spmd(main, MESH)():
        assert torch.equal(found, whole)
        assert gathers == 3 * len(apply.units)


@pytest.mark.parametrize("units", ["model.layers.*", ""])
def test_with_gradients_on_the_cache_is_left_out_or_refused(units):
    module, batch, _ = made("llama")
    apply, params, buffers = ff.from_module(module, units)
    assert apply(params, buffers, **batch).past_key_values is None
    with torch.no_grad():
        assert apply(params, buffers, **batch).past_key_values.get_seq_length() == 6
        assert apply(params, buffers, **batch, use_cache=False).past_key_values is None
    with pytest.raises(TypeError, match=r"DynamicCache.*torch.no_grad\(\) alone"):
        apply(params, buffers, **batch, use_cache=True)
    assert module.config.use_cache


# Experts


def test_experts_that_are_picked_by_value_are_told_the_way():
    """Which is that of test_huggingface.py."""
    module = hugging_face(MODELS["mixtral in balance"][0])
    module.set_experts_implementation("eager")
    apply, params, buffers = ff.from_module(module, "model.layers.*")
    step = ff.value_and_grad(lambda p, b: apply(p, buffers, **b).loss)
    with pytest.raises(RuntimeError, match='asks for a tensor\'s value.*record="real"'):
        with_ledger(lambda mesh: ff.shard(step, mesh, "data"), params, NEXT)
