"""Checks of arguments: functions, integers, kinds of leaves, rows of a batch.

Public functions call them first, so that a wrong argument raises where it is given, and
names the leaf and the way out, and not later in torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf, PyTree


def _is_array(x: Leaf) -> bool:
    is_ours = isinstance(x, Tensor) or is_sharded(x)
    return not is_ours and hasattr(x, "__array_interface__") and x.ndim > 0


# By name: whether a leaf is of the kind, and what an error says of it.
_KINDS: dict[str, tuple[Callable[[Leaf], bool], str]] = {
    "array": (
        _is_array,
        "a numpy array {x.dtype}{shape}, which nothing cuts, gathers or "
        "differentiates: torch.from_numpy(x) is the tensor",
    ),
    "sparse": (
        lambda x: isinstance(x, Tensor) and x.layout != torch.strided,
        "a tensor with layout {x.layout}: only dense ones are cut; x.to_dense() is one",
    ),
    "meta": (
        lambda x: isinstance(x, Tensor) and x.is_meta,
        "a meta tensor, which has no values: make it on a device (ff.init_state takes "
        "a function that makes parameters), or fill it by ff.load",
    ),
    "float8": (
        lambda x: (
            isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize == 1
        ),
        "a tensor of {x.dtype}, which no rank can send and no optimizer update: "
        "x.to(torch.bfloat16) can be laid out",
    ),
    "dtensor": (
        lambda x: type(x).__name__ == "DTensor",
        "a DTensor{shape}, sharded already: x.full_tensor() is the whole, which "
        "ff.place lays out, and x.to_local() this rank's part",
    ),
    "inference": (
        lambda x: isinstance(x, Tensor) and x.is_inference(),
        "a tensor made under torch.inference_mode(), which autograd cannot track: give "
        "x.clone(), made outside that mode",
    ),
}


def check_function(f: object, who: str) -> None:
    """Raises if ``f`` cannot be called.

    Args:
        who: the function whose argument ``f`` is, for the message.

    Raises:
        TypeError: names what is given.
    """
    if not callable(f):
        raise TypeError(
            f"{who} takes a function, such as a unit, a loss or a step, and got {f!r} "
            f"of type {type(f).__name__}"
        )


def check_integer(value: Any, name: str, least: int | None = None) -> None:
    """Raises if an option is no integer, or below ``least``.

    Args:
        value: the option, whatever the user gave.
        name: its name.

    Raises:
        TypeError, ValueError: names the option and what is given.
    """
    # By `index`, which takes numpy's integers too, and tensors of one element.
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: it must be an integer") from None
    if least is not None and value < least:
        raise ValueError(f"{name}={value!r}: it is at least {least}")


def arguments(count: int, first: int = 0) -> list[str]:
    """Returns names of positional arguments, for messages."""
    return [f"argument {i}" for i in range(first, first + count)]


def refuse(kinds: str, who: str, values: PyTree, *parts: str) -> None:
    """Raises if a leaf of ``values`` is of one of these kinds.

    Args:
        kinds: names separated by spaces: array, sparse, meta, float8, inference;
            where there may be no array, there may be no DTensor.
        who: the function whose arguments they are, for the message.
        parts: the names of the children of ``values``, for the message.

    Raises:
        TypeError: names the path, what is there, and the way out.

    >>> import torch
    >>> given = [{"w": torch.ones(2).to_sparse()}]
    >>> refuse("array sparse", "f", given, "params")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    TypeError: f is given, as params at 'w', a tensor with layout torch.sparse_coo: ...
    """
    kinds = kinds.replace("array", "array dtensor")
    checks = [_KINDS[kind] for kind in kinds.split()]
    leaves = tree.leaves(values, is_leaf=is_sharded)
    # The usual case: sharded leaves were checked when they were laid out.
    if all(map(is_sharded, leaves)):
        return
    plain = [(i, x) for i, x in enumerate(leaves) if not is_sharded(x)]
    # A donated leaf raises when it is asked for its kind. It is refused elsewhere, and
    # the error says why it is gone.
    with _torch.as_plain_tensors():
        refused = [
            (i, text) for i, x in plain for is_kind, text in checks if is_kind(x)
        ]
    # Only the first is named. Paths are made for an error alone, as they cost the most.
    for i, text in refused:
        path, where = tree.paths(values, is_leaf=is_sharded)[i], ""
        if parts:
            first, _, path = path.partition("/")
            where = f" as {parts[int(first)]}"
        where += f" at {path!r}" if path else ""
        text = text.format(x=leaves[i], shape=list(leaves[i].shape))
        raise TypeError(f"{who} is given{where and f',{where},'} {text}")


def rows_of(batch: Mapping[str, Tensor], n: int, *, even: bool = False) -> int:
    """Returns the number of rows of a batch that is to be cut into ``n`` parts.

    Args:
        batch: path -> leaf, of one dim or more; may be empty.
        n: the number of parts.
        even: whether the parts must be of one size.

    Raises:
        ValueError: leaves that differ in dim 0, fewer rows than parts, or a number of
            rows that the parts do not divide.
    """
    rows = {path: x.shape[0] for path, x in batch.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"batch leaves differ in dim 0, along which microbatches are cut: {rows}; "
            "make what has no batch dim inside the loss; pass frozen parameters in the "
            "first argument, or let the loss capture them"
        )
    count = next(iter(rows.values()), n)
    if count >= n and not (even and count % n):
        return count
    shapes = {path: tuple(x.shape) for path, x in batch.items()}
    if count == 0:
        reason = "the batch is empty, and a mean over no rows is no number: skip it"
    elif count < n:
        reason = "give at least one row each"
    else:
        reason = f"{count} is not a multiple of {n}"
    raise ValueError(
        f"cannot cut {count} rows (dim 0 of the batch leaves {shapes}) into {n} "
        f"microbatches: {reason}"
    )
