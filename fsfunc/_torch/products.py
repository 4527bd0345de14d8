"""Nodes of matrix products and lookups in the autograd graph, and their factors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# A matrix product's node: which of its edges leads to the second factor, and under
# which name it saves the first.
_PRODUCTS = {"MmBackward0": (1, "_saved_self"), "AddmmBackward0": (2, "_saved_mat1")}
_NAMES = {
    **dict.fromkeys(_PRODUCTS, "product"),
    "EmbeddingBackward0": "lookup",
    "AccumulateGrad": "leaf",
    "TBackward0": "turn",
    "ViewBackward0": "view",
}


# Their input and weight gradients are two products, each made only where it is wanted.
_TWO_PRODUCTS = {
    f"{name}Backward"
    for name in (
        *("Mm", "Mv", "Bmm", "Addmm", "Addmv", "Addbmm", "Baddbmm", "Linear"),
        *("Convolution", "ConvolutionOverrideable", "MkldnnConvolution"),
    )
}


def has_two_products(node: Any) -> bool:
    """True if a node can give its input gradients first, its weight gradients later."""
    return node.name().rstrip("0123456789") in _TWO_PRODUCTS


class _Kinds(dict[type, str | None]):
    def __missing__(self, kind: type) -> str | None:
        self[kind] = found = _NAMES.get(kind.__name__)
        return found


KINDS = _Kinds()  # by the type of a node; graphs are walked node by node


def kind_of(node: Any) -> str | None:
    """The kind of a node: a product, lookup, leaf, turn (transpose) or view."""
    return KINDS[type(node)]


def weight_edge(node: Any) -> Any:
    """The edge of a plain product to its second factor, of a lookup to its rows.

    None where that needs no gradient, or where the node does more than that.
    """
    kind, at = kind_of(node), 0
    if kind == "product":
        at = _PRODUCTS[type(node).__name__][0]
        plain = getattr(node, "_saved_alpha", 1) == 1
    elif kind == "lookup":
        rare = node._saved_scale_grad_by_freq or node._saved_sparse
        # -1, which is no row: nothing is left out. On CUDA adding rows has no order.
        plain = not rare and node._saved_padding_idx in (-1, 2**64 - 1)
        plain = plain and node._saved_indices.device.type == "cpu"
    else:
        return None
    edge = node.next_functions[at]
    return edge if plain and edge[0] is not None else None


def first_factor(node: Any) -> Tensor:
    """The first factor of a matrix product, saved for the gradient of the second."""
    return getattr(node, _PRODUCTS[type(node).__name__][1])


def is_hooked(leaf: Tensor) -> bool:
    """True if a hook is registered on a leaf, which sees its gradient."""
    return bool(leaf._backward_hooks)


def looked_up(node: Any) -> Tensor:
    """The numbers of the rows that a lookup took."""
    return node._saved_indices
