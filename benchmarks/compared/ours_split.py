"""fsfunc's train steps of a model whose layers are split, as peers_split.py splits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from compared.models import Size, concatenate_flat
from compared.ours import advancing, mesh_of, train_step
from compared.peers import Competitor, Setting
from compared.peers_split import mixed, split_params
from torch import Tensor

import fsfunc as ff
from fsfunc.nn import column_linear, row_linear, vocab_cross_entropy, vocab_embedding

COLUMN, ROW = ff.Split(0, "model"), ff.Split(1, "model")
LAYOUTS = {
    "embed/w": COLUMN,
    "blocks/*/[qkv]": COLUMN,
    "blocks/*/out": ROW,
    "blocks/*/up": COLUMN,
    "blocks/*/down": ROW,
    "head/w": COLUMN,
}


def split_loss(size: Size, dim: int | None) -> Callable[..., Tensor]:
    """`loss_fn(params, batch)`; sequences are split along `dim` between layers."""
    width, features = size.width, size.width // size.heads

    def norm(x: Tensor, w: Tensor) -> Tensor:
        w = w if dim is None else ff.pcast(w, "model", to="V")
        return F.rms_norm(x, (width,), w)

    @ff.unit
    def embed(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return vocab_embedding(p["w"], tokens, sequence_dim=dim)

    @ff.unit
    def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = norm(x, p["norm1"])
        q, k, v = column_linear(h, (p["q"], p["k"], p["v"]), sequence_dim=dim)
        x = x + row_linear(mixed(q, k, v, features), p["out"], sequence_dim=dim)
        h = F.gelu(column_linear(norm(x, p["norm2"]), p["up"], sequence_dim=dim))
        return x + row_linear(h, p["down"], sequence_dim=dim)

    @ff.unit
    def head(p: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
        logits = column_linear(x, p["w"], sequence_dim=dim)
        return vocab_cross_entropy(logits, targets, "model")

    return concatenate_flat(embed, block, head)


def build(setting: Setting, *, dim: int | None, donate: bool = True) -> Competitor:
    """A competitor whose ranks share one batch, that of all ranks."""
    mesh_of(setting, "model")
    batch, step = setting.whole_batch(), train_step(split_loss(setting.size, dim))
    params = split_params(setting.size, device=setting.device)

    state = ff.init_state(step, params, step.optimizer, batch, layouts=LAYOUTS)
    return advancing(ff.donate(step) if donate else step, [state], batch)


def _builders() -> dict[str, Callable[[Setting], Competitor]]:
    made: dict[str, Callable[[Setting], Competitor]] = {}
    for name, dim in {"tensor_parallel": None, "sequence_parallel": 1}.items():
        kind = functools.partial(build, dim=dim)
        made[name] = kind
        made[f"{name}_pure"] = functools.partial(kind, donate=False)
    return made


BUILDERS = _builders()
