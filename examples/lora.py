"""Adapters (LoRA): a frozen model, and two thin matrices beside each linear layer.

`ff.from_module` gives frozen parameters among the buffers, so that adapters alone have
gradients and moments; as `extra` of a state the frozen ones are sharded as well.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoRA(nn.Module):
    """A linear layer as it is, plus alpha / rank times a product of two matrices."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.layer, self.scale = layer, alpha / rank
        self.down = nn.Parameter(torch.empty(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))  # begins as none
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


def add_adapters(model: nn.Module, rank: int, alpha: float) -> nn.Module:
    """Freezes a model of transformers; adds adapters to its linear layers but the head.

    They are float32, whatever the model is.

    Raises: ValueError where there is no such layer.
    """
    head = model.get_output_embeddings()
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to put one beside")
    model.requires_grad_(False)
    for name, layer in layers:
        model.set_submodule(name, LoRA(layer, rank, alpha))
    return model


def merge_adapters(model: nn.Module) -> nn.Module:
    """The model without adapters, whose linear layers compute what both did.

    But for rounding: the new weights have the dtype of the frozen ones.
    """
    for name, adapted in list(model.named_modules()):
        if isinstance(adapted, LoRA):
            layer = adapted.layer
            added = adapted.scale * adapted.up.float() @ adapted.down.float()
            layer.weight.data = (layer.weight + added).to(layer.weight.dtype)
            model.set_submodule(name, layer)
    return model
