"""``python -m fsfunc names``: public names, found by the words that users bring."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import fsfunc as ff
from fsfunc.cli.build_scripts import Refused
from fsfunc.cli.parsers import Commands

ROOMS = ("nn", "schedules", "hardware", "graphs", "show", "testing")
SENTENCES = {  # on objects without a docstring of their own
    "is_sharded": "True for a Sharded leaf: `is_leaf=ff.is_sharded`",
    "hardware.A100_40": "An A100 of 40 GB, eight to a node",
    "hardware.A100_80": "An A100 of 80 GB, eight to a node",
    "hardware.CPU": "A small machine of processors, for examples",
    "hardware.H100": "An H100 of 80 GB, eight to a node",
    "hardware.H200": "An H200 of 141 GB, eight to a node",
    "schedules.Schedule": "A tuple of actions for each rank",
}


# What torch, its peers and papers call what a name does.
WORDS = {
    "Own": "hidden state rank local",
    "Split": "tensor parallel layout shard placement dtensor",
    "Weighted": "token mean padding uneven batches ignore_index",
    "Summed": "aux metrics count log",
    "Max": "aux metrics largest maximum",
    "abstract_state": "meta device template resume",
    "accumulate": "gradient accumulation no_sync microbatches grad_accum",
    "all_gather": "all gather allgather",
    "all_to_all": "all to all alltoall",
    "axis_index": "rank get_rank",
    "axis_size": "world size get_world_size",
    "batches": "dataloader data loader distributed sampler epoch position resume",
    "clip_by_global_norm": "gradient clipping clip_grad_norm_",
    "clip_by_value": "gradient clipping clip_grad_value_",
    "consolidate": "full state dict merge checkpoint",
    "donate": "in place memory donate_argnums",
    "ema": "exponential moving average evaluation",
    "eval_params": "evaluation ema average",
    "export": "save_pretrained hugging face transformers huggingface safetensors vllm "
    "inference",
    "fits": "oom out of memory enough margin",
    "from_module": "nn.Module model wrap auto_wrap functional_call hugging face "
    "transformers eval mode train mode frozen freeze requires_grad lora adapter peft",
    "from_torch": "torch.optim optimizer",
    "global_norm": "grad norm gradient clip_grad_norm_ log",
    "init_state": "initialize train state meta device extra frozen buffers",
    "jit": "torch.compile inductor compiled",
    "latest": "resume newest last",
    "ledger": "bytes sent communication profile",
    "load": "resume restore load_state_dict checkpoint warm start",
    "local_batch": "scatter rows split batch distributed sampler",
    "loss_scale": "grad scaler gradscaler float16 amp",
    "make_mesh": "device mesh init_process_group init_device_mesh cuda gpu nccl gloo "
    "timeout deadlock hang",
    "masked": "frozen freeze parameters trained",
    "nn.column_linear": "tensor parallel megatron colwise",
    "nn.row_linear": "tensor parallel megatron rowwise",
    "nn.expert_layer": "mixture of experts moe expert parallel",
    "nn.ring_attention": "context parallel sequence long",
    "nn.all_to_all_attention": "context parallel ulysses sequence",
    "nn.sync_batch_norm": "syncbatchnorm",
    "offload": "cpu offload nvme zero-offload",
    "pbroadcast": "broadcast",
    "pipeline": "pipe gpipe 1f1b pp stages microbatches",
    "plan": "dry run memory estimate oom",
    "pmax": "all reduce max",
    "pmean": "all reduce mean average",
    "ppermute": "send recv p2p",
    "master_weights": "bf16 mixed precision",
    "precision": "mixed precision bf16 float16 autocast amp",
    "prove": "verify proof equal correct",
    "psum": "all reduce allreduce sum",
    "psum_scatter": "reduce scatter reduce_scatter",
    "remat": "activation checkpointing recompute checkpoint_wrapper",
    "save": "state dict state_dict checkpoint",
    "save_async": "checkpoint asynchronous",
    "search": "autotune auto parallel",
    "shard": "fsdp fsdp2 fully_shard ddp zero zero-3 hsdp oss deepspeed data parallel "
    "inference predict generate",
    "stochastic_rounding": "bf16",
    "sharded_adam": "adamw optimizer distributed fused",
    "spmd": "launch mp.spawn run ranks simulate",
    "to_module": "nn.Module export model",
    "unit": "layer block wrap granularity",
    "unshard": "full parameters summon_full_params full_tensor generate export gather",
    "whole_leaves": "vllm load_weights inference engine stream summon_full_params "
    "full_tensor export gather sglang rollout",
    "value": "evaluate evaluation validation loss no_grad eval",
    "value_and_grad": "backward loss gradient grad",
    "warmup_cosine": "lr scheduler learning rate schedule",
}

# What no name stands for, in a checkout's examples: (what one is, and its words).
EXAMPLES = {
    "finetune.py": (
        "a Hugging Face model, whole or by adapters (LoRA)",
        "lora adapter peft frozen freeze transformers generate tqdm sft instructions",
    ),
    "loop.py": (
        "a training loop to copy: data, evaluation, a log, samples, resuming",
        "logging tensorboard wandb metrics accuracy eval evaluate validation generate "
        "predict resume checkpoint cuda bf16 grad norm",
    ),
    "restart.py": (
        "a run that goes on after ranks were killed",
        "resume checkpoint elastic fault tolerance crash max-restarts",
    ),
}


def add_names(commands: Commands) -> None:
    """Adds ``names`` to argparse's subparsers."""
    about = "every public name, with a sentence on each"
    parser = commands.add_parser(
        "names",
        help=about,
        description=f"Prints {about}. Words are those of torch and of papers too: "
        "fsdp, all reduce, gradient clip, eval.",
        example=["names gradient clip"],
    )
    parser.set_defaults(run=_run_names, parser=parser, takes_script=False)
    words_help = "print only the names that every WORD is said of"
    parser.add_argument("words", nargs="*", metavar="WORD", help=words_help)


def _run_names(options: argparse.Namespace) -> None:
    words = " ".join(options.words).lower().split()
    # Names before sentences: ``zero`` also stands in sentences on other things.
    named, mentioned = [], []
    for name, value in sorted(public_objects().items()):
        line = f"ff.{name}: {first_sentence(name, value)}"
        names = f"{name} {name.replace('_', ' ')} {WORDS.get(name, '')}".lower()
        if all(word in names for word in words):
            named.append(line)
        elif all(word in f"{names} {line}".lower() for word in words):
            mentioned.append(line)
    for file, (about, other_words) in EXAMPLES.items() if words else ():
        if all(word in f"{file} {about} {other_words}".lower() for word in words):
            mentioned.append(f"examples/{file}: {about}")
    if not named and not mentioned:
        raise Refused(
            f"no public name, and no sentence on one, has {' '.join(words)!r}"
            f"{_nearest_words(words)}; fewer words find more, and none find all"
        )
    print("\n".join([*named, *mentioned]))


def _nearest_words(words: list[str]) -> str:
    """Returns advice: known words that are close to those of ``words`` that are not."""
    text = " ".join([*public_objects(), *WORDS.values()]).lower().replace(".", " ")
    known = {*text.split(), *text.replace("_", " ").split()}
    matches = [get_close_matches(word, known, 1) for word in words if word not in known]
    nearest = [match[0] for match in matches if match]
    return f" (there is: {', '.join(nearest)})" if nearest else ""


def public_objects() -> dict[str, Any]:
    """Returns what users reach as ``ff.name`` or ``ff.room.name``, by that name."""
    from fsfunc import nn  # noqa: F401  # a room that is imported by its name

    objects = {}
    for name in dir(ff):
        value = getattr(ff, name)
        if name in ROOMS:
            members = {
                *getattr(value, "__all__", ()),
                *filter(_is_public_in(value), dir(value)),
            }
            objects |= {
                f"{name}.{member}": getattr(value, member) for member in members
            }
        elif name == "is_sharded" or _is_public_in(ff)(name):
            objects[name] = value
    # Those that are reached under a shorter name too.
    repeated = [name for name in objects if name.partition(".")[2] in objects]
    return {name: value for name, value in objects.items() if name not in repeated}


def _is_public_in(room: ModuleType) -> Callable[[str], bool]:
    """Makes a test whether a room's name is public, and defined by fsfunc."""

    def is_public(name: str) -> bool:
        module = str(getattr(getattr(room, name), "__module__", ""))
        return name[0] != "_" and module.startswith("fsfunc")

    return is_public


def first_sentence(name: str, value: object) -> str:
    """Returns the first sentence of an object's docstring, as plain text."""
    if name in SENTENCES:
        return SENTENCES[name]
    text = (inspect.getdoc(value) or "").partition("\n\n")[0]
    text = text.replace(":func:", "").replace(":class:", "").replace("``", "`")
    return " ".join(text.split()).rstrip(".")
