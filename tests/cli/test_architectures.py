"""``plan --hf`` over the architectures of transformers that are most used.

Each is planned for what it is trained for, in small: over an axis of the data, with its
layers split, and in stages. What cannot be planned is refused, with the way out.
"""

from __future__ import annotations

import json
import logging
import re
import warnings

import pytest

import fsfunc as ff
from fsfunc.cli.build_scripts import Refused, plan_build
from fsfunc.cli.hugging_face import HuggingFaceStep
from fsfunc.cli.plan_command import describe_model

pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 32,
}  # fmt: skip
ROTARY = SMALL | {"num_key_value_heads": 2}
HEADS = ROTARY | {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_heads": 4,
}  # fmt: skip
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 32,
}  # fmt: skip
DEEPSEEK = SMALL | {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
IMAGES = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 48, "image_size": 16, "patch_size": 8,
}  # fmt: skip
WHISPER = BART | {
    "max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

NO_PLAN = r"no tensor parallel plan of its layers .base_model_tp_plan."
# What a row says: the config; what it is trained for; the attention that a GPU runs for
# it; why its layers are not split, and why it has no stages, if that is refused.
FLASH, EFFICIENT, EAGER = ("flash",), ("efficient",), ()

TABLE = {
    "llama": (ROTARY, "causal-lm", FLASH, None, None),
    "qwen2": (ROTARY, "causal-lm", FLASH, None, None),
    "qwen3": (HEADS, "causal-lm", FLASH, None, None),
    "mistral": (ROTARY, "causal-lm", FLASH, None, None),
    "gemma": (HEADS, "causal-lm", FLASH, None, None),
    "gemma2": (HEADS, "causal-lm", EAGER, None, None),
    "gemma3_text": (HEADS, "causal-lm", FLASH, None, None),
    "phi": (SMALL, "causal-lm", FLASH, None, None),
    "phi3": (ROTARY | {"pad_token_id": 0}, "causal-lm", FLASH, None, None),
    "olmo2": (ROTARY, "causal-lm", FLASH, None, None),
    "starcoder2": (ROTARY, "causal-lm", FLASH, None, None),
    "granite": (ROTARY, "causal-lm", FLASH, None, None),
    "gpt2": (GPT2, "causal-lm", FLASH, NO_PLAN, None),
    "gpt_neox": (SMALL, "causal-lm", FLASH, None, None),
    "opt": (
        SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "causal-lm", FLASH, NO_PLAN, None,
    ),
    "bloom": (
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 4},
        "causal-lm", EAGER, NO_PLAN, None,
    ),
    # Its model makes the causal mask itself, for biases that most do not have.
    "falcon": (SMALL, "causal-lm", EFFICIENT, NO_PLAN, None),
    "mixtral": (ROTARY | {"num_local_experts": 4}, "causal-lm", FLASH, None, None),
    "qwen2_moe": (
        ROTARY | EXPERTS | {"shared_expert_intermediate_size": 16},
        "causal-lm", FLASH, None, None,
    ),
    "qwen3_moe": (HEADS | EXPERTS, "causal-lm", FLASH, None, None),
    "deepseek_v3": (DEEPSEEK, "causal-lm", EFFICIENT, None, None),
    "gpt_oss": (
        HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "causal-lm", EAGER, NO_PLAN, None,
    ),
    "t5": (T5, "seq2seq-lm", EFFICIENT, NO_PLAN, None),
    "bart": (BART, "seq2seq-lm", FLASH, NO_PLAN, None),
    "whisper": (WHISPER, "speech-seq2seq", FLASH, NO_PLAN, None),
    "bert": (SMALL, "masked-lm", FLASH, NO_PLAN, None),
    "roberta": (SMALL | {"pad_token_id": 1}, "masked-lm", FLASH, NO_PLAN, None),
    "modernbert": (
        SMALL | {"pad_token_id": 0}, "masked-lm", FLASH, NO_PLAN, None,
    ),
    "vit": (IMAGES, "image-classification", FLASH, NO_PLAN, None),
}  # fmt: skip
# By model, the parameters that a token does not pass, of mixtures: layers with experts,
# unused experts of each, and the elements of one.
INACTIVE = {
    "mixtral": 4 * 2 * 3 * 32 * 48, "qwen2_moe": 4 * 2 * 3 * 32 * 16,
    "qwen3_moe": 4 * 2 * 3 * 32 * 16, "deepseek_v3": 3 * 2 * 3 * 32 * 16,
    "gpt_oss": 4 * 2 * (3 * 32 * 48 + 2 * 48 + 32),
}  # fmt: skip
# They carry a state from token to token.
RECURRENT = {
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
    "mamba2": {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8,
        "head_dim": 8, "n_groups": 1,
    },
    "jamba": ROTARY | {"num_experts": 4},
}  # fmt: skip
QUICK = ("llama", "t5", "bert", "gpt_oss")
# Of one kind each: lists of several attentions, tied tables, a parallel block, layers
# that are dense and of experts, an encoder with a decoder, positions of pictures.
STAGED = (
    "gemma3_text", "gpt2", "phi", "bloom", "deepseek_v3", "gpt_oss", "t5", "whisper",
    "modernbert", "vit",
)  # fmt: skip
AXES = ({"data": 2}, {"data": 2, "model": 2}, {"data": 2, "pipe": 2})


@pytest.fixture
def config(tmp_path, caplog):
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def write(model_type, fields):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": model_type, **fields}))
        return path

    return write


def cases():
    """An architecture that has a plan to split its layers by is run so, others plainly.

    Stages are cut of those in `STAGED`, whose layers or whose lists differ; a Llama's
    are in ``test_hugging_face``.
    """
    for name, (*_, unsplit, _) in TABLE.items():
        for axes in AXES:
            kind, is_quick = [*axes][-1], name in QUICK
            # A split step over data runs all that one over data alone does.
            is_same = kind == "data" and unsplit is None
            if is_same or kind == "pipe" and name not in STAGED:
                continue
            marks = [] if is_quick and kind != "pipe" else [pytest.mark.slow]
            yield pytest.param(name, axes, marks=marks, id=f"{name} {kind}")


@pytest.mark.parametrize("name, axes", list(cases()))
def test_an_architecture_is_planned_as_what_it_is(name, axes, config):
    fields, task, kernels, *refusals = TABLE[name]
    path = config(name, fields)
    said = dict(zip(("data", "model", "pipe"), (None, *refusals), strict=True))
    mesh = ff.make_mesh(axes, "abstract")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' advice
        build = HuggingFaceStep(path, [])
        if (reason := said[[*axes][-1]]) is not None:
            with pytest.raises(Refused) as caught, build.refusing_errors():
                plan_build(build, mesh, path, "cuda")
            assert re.search(reason, str(caught.value))
            return
        with build.refusing_errors():
            plan, _ = plan_build(build, mesh, path, "cuda")
    model = describe_model(build, mesh)
    assert model.lines["loss"].startswith(f"{task}: ")
    assert model.active == model.parameters - INACTIVE.get(name, 0)
    ran = {r.op.name for rank_plan in plan.ranks for r in rank_plan.ran}
    picked = {
        x for x in ("flash", "efficient") if any(f"{x}_attention" in n for n in ran)
    }
    assert picked == set(kernels)
    used = {axis for p in plan.ranks for r in p.records for axis in r.axis}
    assert used >= set(axes)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_model_with_a_state_from_token_to_token_is_refused(name, config):
    path = config(name, RECURRENT[name])
    with pytest.raises(Refused, match=r"carries a state.* SCRIPT with build"):
        HuggingFaceStep(path, []).module  # noqa: B018
