"""Nodes of matrix products and lookups in the autograd graph, and their factors.

The gradient of the second factor, a weight, can so be computed apart from the backward:
later, in a pipeline that splits it, or into memory that is there already.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

# By the type of a matrix product's node: which of its edges leads to the second factor,
# and the name under which it saves the first.
_PRODUCTS = {"MmBackward0": (1, "_saved_self"), "AddmmBackward0": (2, "_saved_mat1")}
_NAMES = {
    **dict.fromkeys(_PRODUCTS, "product"),
    "EmbeddingBackward0": "lookup",
    "AccumulateGrad": "leaf",
    "TBackward0": "turn",
    "ViewBackward0": "view",
}


# The gradients of input and weight are two products here, each computed only if it is
# wanted.
_TWO_PRODUCTS = {
    f"{name}Backward"
    for name in (
        *("Mm", "Mv", "Bmm", "Addmm", "Addmv", "Addbmm", "Baddbmm", "Linear"),
        *("Convolution", "ConvolutionOverrideable", "MkldnnConvolution"),
    )
}


def has_two_products(node: Node) -> bool:
    """Returns whether a node's weight gradient can be computed after its input's."""
    return node.name().rstrip("0123456789") in _TWO_PRODUCTS


class _Kinds(dict[type, str | None]):
    def __missing__(self, kind: type) -> str | None:
        self[kind] = name = _NAMES.get(kind.__name__)
        return name


# By the type of a node: looked up for every node of a graph.
NODE_KINDS = _Kinds()


def node_kind(node: Node) -> str | None:
    """Returns the kind of a node: a product, lookup, leaf, turn (transpose) or view."""
    return NODE_KINDS[type(node)]


def weight_edge(node: Any) -> tuple[Node | None, int] | None:
    """Returns the edge of a product to its second factor, of a lookup to its rows.

    None where that needs no gradient, or where the node does more than a plain product
    or lookup.

    Args:
        node: an autograd node, of which the attributes differ by its type.
    """
    kind, edge_index = node_kind(node), 0
    if kind == "product":
        edge_index = _PRODUCTS[type(node).__name__][0]
        is_plain = getattr(node, "_saved_alpha", 1) == 1
    elif kind == "lookup":
        has_options = node._saved_scale_grad_by_freq or node._saved_sparse
        # With a padding index of -1 (no row) no row is left out. On CUDA rows are added
        # in no fixed order, so that another way would give other bits.
        is_plain = not has_options and node._saved_padding_idx in (-1, 2**64 - 1)
        is_plain = is_plain and node._saved_indices.device.type == "cpu"
    else:
        return None
    edge = node.next_functions[edge_index]
    return edge if is_plain and edge[0] is not None else None


def first_factor(node: Node) -> Tensor:
    """Returns the first factor of a product, saved for the gradient of the second."""
    return getattr(node, _PRODUCTS[type(node).__name__][1])


def is_hooked(leaf: Tensor) -> bool:
    """Returns whether a hook is registered on a leaf, which sees its gradient."""
    return bool(leaf._backward_hooks)


def lookup_indices(node: Any) -> Tensor:
    """Returns the indices of the rows that a lookup took."""
    return node._saved_indices
