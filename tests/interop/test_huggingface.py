"""Models of transformers, as they are: sharded, recomputed and in stages.

Each is compared with the module itself under torch.optim.AdamW, in fp64, on a batch
with an attention mask; what is sent is told by closed forms.
"""

import copy

import pytest

import fsfunc as ff
from tests.interop.models import (
    close,
    gpt2,
    hugging_face,
    llama,
    mixtral,
    on_mesh,
    step_of,
    text,
    trained,
)

MODELS = {
    "gpt2": (gpt2, {}, "transformer.h.*"),
    "llama": (llama, {}, "model.layers.*"),
    "llama tied": (llama, {"tie_word_embeddings": True}, "**.layers.*"),
    "mixtral": (mixtral, {"experts_implementation": "batched_mm"}, "model.layers.*"),
    "mixtral by value": (mixtral, {"experts_implementation": "eager"},
        "model.layers.*"),
}  # fmt: skip
TRANSFORMS = {
    "zero=3": ({"data": 2}, lambda step, mesh: ff.shard(step, mesh, "data")),
    "zero=1 remat": ({"data": 2}, lambda step, mesh: ff.shard(ff.remat(step), mesh,
        "data", zero=1)),
    "zero=3 remat accumulate": ({"data": 2}, lambda step,
        mesh: ff.shard(ff.accumulate(ff.remat(step), 2), mesh, "data")),
    "pipeline": ({"pipe": 2}, lambda step, mesh: ff.pipeline(step, mesh, "pipe",
        n_microbatches=2)),
    "pipeline of shards": ({"data": 2, "pipe": 2}, lambda step,
        mesh: ff.pipeline(ff.shard(ff.remat(step), mesh, "data"), mesh, "pipe",
        n_microbatches=2)),
}  # fmt: skip


@pytest.fixture(scope="module")
def references():
    """What each module itself does: made once, for all transforms of it."""
    found = {}

    def reference(name):
        if name not in found:
            make, options, units = MODELS[name]
            module = hugging_face(make, **options)
            made = ff.from_module(copy.deepcopy(module), units=units)
            batch = text()
            found[name] = made, batch, trained(module, batch)
        return found[name]

    return reference


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("llama", how) for how in TRANSFORMS if how != "pipeline"),
        ("gpt2", "zero=3"),
        ("gpt2", "pipeline"),
        ("llama tied", "pipeline of shards"),
        ("mixtral", "zero=3 remat accumulate"),
        ("mixtral by value", "zero=1 remat"),
    ],
)
def test_a_model_trains_as_by_itself(references, name, how):
    (apply, params, buffers), batch, (losses, expected) = references(name)
    optimizer = ff.sharded_adam(1e-2)
    step = step_of(apply, buffers, optimizer)
    axes, transform = TRANSFORMS[how]
    record = "real" if "value" in name else "fake"  # experts are asked who is wanted
    found, tensors, logs = on_mesh(
        transform, axes, params, step, optimizer, batch, record=record
    )
    count = lambda op: sum(log.count(op) for log in logs)  # noqa: E731
    close(found, losses)
    close(tensors, expected)
    n = sum(1 for u in apply.units if "drop" not in u)  # unit calls with parameters
    if how == "zero=3":  # the embeddings' backward, and the last unit, gather nothing
        embeddings = 2 if name == "gpt2" else 1
        assert count("all_gather") == 2 * (2 * n - 1 - embeddings)
        assert count("psum_scatter") == 2 * n
    elif how == "zero=3 remat accumulate":
        assert count("psum_scatter") == 2 * n
    elif how == "pipeline":
        assert count("all_gather") == count("psum_scatter") == 0
