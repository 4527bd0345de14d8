"""Descriptions of values, equal in every process, to show and to compare.

Transforms and optimizers have a name, ``called``, and a ``configuration`` of (name,
value) pairs. Tensors are described by their values, or by a checksum of their bits,
functions by their names, and everything else by its repr. `comparison.agree` compares
the lines between ranks; a checkpoint and ``repr`` of an optimizer print them.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.comparison import Lines, Section
from fsfunc.sharded.placements import describe_tensor

# (name, function) -> lines of its results: a schedule's rates at the first counts.
Ask = Callable[[str, Callable[..., Any]], Lines]

_NUMBERS = (int, float, bool, type(None))
_MOST_PRINTED = 16  # elements of a tensor; of more it is a checksum


def describe_value(value: Any) -> str:
    """Describes a value in one line, without addresses, so equal in every process.

    >>> describe_value(len), describe_value(object()), describe_value({"lr": (0.1,)})
    ('<function len>', '<object object>', "{'lr': (0.1,)}")
    """
    if type(value) in _NUMBERS:
        return repr(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    # Exactly these: a subclass, such as torch.Size, has a repr with its name.
    if type(value) in (list, tuple):
        inside = ", ".join(map(describe_value, value))
        if type(value) is list:
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Mapping):
        inside = ", ".join(
            f"{describe_value(k)}: {describe_value(v)}" for k, v in value.items()
        )
        return f"{{{inside}}}"
    if (parts := _parts(value)) is not None:
        kind, items = parts
        return f"{kind}({', '.join(f'{k}={describe_value(v)}' for k, v in items)})"
    # Functions and classes: their repr has an address.
    if name := getattr(value, "__qualname__", None):
        kind = "class" if isinstance(value, type) else "function"
        return f"<{kind} {name}>"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def describe_lines(name: str, value: Any, ask: Ask = lambda name, value: ()) -> Lines:
    """Describes a value in lines, one for each of its parts, by path.

    Args:
        name: the path of the value.
        ask: returns further lines for a function, by its name: results of calling it.

    >>> describe_lines("rates", {"first": 0.1, "others": (0.2,)})[1:]
    [('rates/first', '0.1'), ('rates/others', 'tuple of 1'), ('rates/others/0', '0.2')]
    """
    if type(value) in _NUMBERS:
        return [(name, repr(value))]
    kind, items = _parts(value) or ("", None)
    # Sorted, as ranks may have filled equal dicts in different orders.
    if items is None and isinstance(value, Mapping):
        items = [(str(key), value[key]) for key in sorted(value, key=str)]
    elif items is None and type(value) in (list, tuple):
        items = [(str(i), x) for i, x in enumerate(value)]
    if items is None:
        answers = ask(name.rpartition("/")[2], value) if callable(value) else ()
        return [
            (name, describe_value(value)),
            *((f"{name} {key}", text) for key, text in answers),
        ]
    kind = kind or f"{type(value).__name__} of {len(items)}"
    of_parts = [describe_lines(f"{name}/{key}", x, ask) for key, x in items]
    return [(name, kind), *chain.from_iterable(of_parts)]


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]]] | None:
    """Returns the name and the parts of a value with a ``configuration``, or None."""
    if isinstance(value, functools.partial):
        arguments = [(str(i), x) for i, x in enumerate(value.args)]
        return describe_value(value.func), [*arguments, *value.keywords.items()]
    configuration = getattr(value, "configuration", None)
    # A class has its property's object by that name, and no pairs.
    if isinstance(value, type) or not isinstance(configuration, tuple | list):
        return None
    return getattr(value, "called", "") or type(value).__name__, list(configuration)


def _tensor(x: Tensor) -> str:
    """Describes a tensor by its values, or a checksum of many; else by its shape."""
    kind = f"tensor {describe_tensor(x.shape, x.dtype)}"
    if not has_values(x):
        return kind
    if x.numel() <= _MOST_PRINTED:
        return f"{kind} {x.tolist()}"
    return f"{kind} of checksum {checksums([x])[0] % 2**64:016x}"


# Values that must be equal

ALIKE = (
    "Make them equal: give every rank the same seed before they are made "
    "(torch.manual_seed), load one file, or send one rank's: ff.pbroadcast(params, "
    "axis, source=0)"
)


def section_of_values(
    paths: Sequence[str],
    leaves: Sequence[Any],
    notes: dict[Any, Any] | None,
    title: str = "whole parameters differ between ranks",
    advice: str = ALIKE,
) -> Section:
    """Returns the section of values that must be equal on every rank, for `agree`.

    Args:
        paths, leaves: the values; only tensors, numbers and texts are compared.
        notes: the notes that the links of one process share, to cache checksums in:
            ranks there often have the same tensor.
    """
    lines = [
        (repr(path), repr(leaf))
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, bool | int | float | complex | str | bytes)
    ]
    tensors = {p: x for p, x in zip(paths, leaves, strict=True) if has_values(x)}
    cache = None if notes is None else notes.setdefault("checksums", {})
    sums = checksums(list(tensors.values()), cache)
    for (path, x), checksum in zip(tensors.items(), sums, strict=True):
        text = (
            f"{describe_tensor(x.shape, x.dtype)} of checksum {checksum % 2**64:016x}"
        )
        lines.append((repr(path), text))
    return Section(title, lines, advice)


# Checksums


def has_values(x: Any) -> bool:
    """Returns whether ``x`` is a tensor with data, dense and not on meta."""
    if not isinstance(x, Tensor) or isinstance(x, _torch.FakeTensor):
        return False
    return x.layout == torch.strided and x.device.type != "meta"


_ROW, _ROWS = 2048, 64  # words in a row; rows that fit a core's cache
_FAR_ROWS = 4096  # rows for which a GPU takes longer than Python for three launches
_weights: dict[torch.device, Tensor] = {}
# By id: the tensor (ids are given again), its version then, and its checksum.
_Cache = dict[int, tuple["weakref.ref[Tensor]", int | None, int]]


def checksums(tensors: Sequence[Tensor], cache: _Cache | None = None) -> list[int]:
    """Returns a checksum of each tensor's bits.

    Args:
        cache: for tensors that ranks of one process share.

    Cost: each tensor is read once, at some 3 GB/s a thread; one number a tensor is
    copied from the device.

    >>> x, y = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> a, b, c = checksums([x, y, x.clone()])
    >>> a == c, a == b
    (True, False)
    """
    cache = {} if cache is None else cache
    # Without inference mode, as the weights are cached: a first call inside of it would
    # make them inference tensors for the whole process.
    with torch.no_grad(), torch.inference_mode(False):
        weighted_sum = _WeightedSum()
        return [_checksum(x, cache, weighted_sum) for x in tensors]


def _checksum(x: Tensor, cache: _Cache, weighted_sum: _WeightedSum) -> int:
    """Returns the checksum of a tensor that was not written since it was cached."""
    version = None if x.is_inference() else x._version
    cached, cached_version, checksum = cache.get(id(x), (None, None, 0))
    is_new = cached is None or cached() is not x  # an id is given to another tensor
    # Without a version nobody knows whether an inference tensor was written since.
    if is_new or version is None or version != cached_version:
        with _torch.beneath_all_modes():  # unseen by modes that record the step
            checksum = int(weighted_sum(_words(x)).item())
        cache[id(x)] = weakref.ref(x), version, checksum
    return checksum


def _words(x: Tensor) -> Tensor:
    """Returns the bytes of a tensor as 32-bit integers, with zeros after the last."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    # Not `view(-1)`: a contiguous tensor of one element may have any stride.
    data = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
    # As integers of 4 bytes memory must begin at a multiple of 4, and end there.
    if data.storage_offset() % 4 or data.numel() % 4:
        padded = data.new_zeros(-(-data.numel() // 4) * 4)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int32)


class _WeightedSum:
    """A weighted sum of words modulo 2^64: of rows, and then of the rows' sums.

    Weights are odd and of 62 bits, and words have 32: so two words that change in their
    highest bit, a sign, do not cancel.
    """

    def __init__(self) -> None:
        # Buffers of widened rows, used again: fresh memory costs page faults.
        self.buffers: dict[torch.device, Tensor] = {}

    def __call__(self, words: Tensor) -> Tensor:
        weights = _weights_on(words.device)
        # A sum has 64 bits, two words: a round leaves a thousandth, and the words after
        # the last whole row.
        while words.numel() > _ROW:
            in_whole_rows = words.numel() // _ROW * _ROW
            rows_at_once = _ROWS if _on_host(words) else _FAR_ROWS
            pieces = words[:in_whole_rows].view(-1, _ROW).split(rows_at_once)
            sums = torch.cat([self._sum_rows(rows, weights) for rows in pieces])
            words = torch.cat([sums.view(torch.int32), words[in_whole_rows:]])
        return (words * weights[: words.numel()]).sum()

    def _sum_rows(self, rows: Tensor, weights: Tensor) -> Tensor:
        buffer = self.buffers.get(rows.device)
        # Of _ROWS at least, so that a small tensor's serves the larger ones after it.
        if buffer is None or len(buffer) < len(rows):
            buffer = weights.new_empty(max(_ROWS, len(rows)), _ROW)
            self.buffers[rows.device] = buffer
        # Widened first: a product of int32 with int64 takes twice the time.
        wide = buffer[: len(rows)].copy_(rows)
        if _on_host(wide):
            return torch.mv(wide, weights)
        return wide.mul_(weights).sum(1)  # CUDA multiplies no matrices of integers


def _on_host(x: Tensor) -> bool:
    return x.is_cpu


def _weights_on(device: torch.device) -> Tensor:
    # Drawn on the CPU: a generator of a GPU draws other numbers from the same seed.
    if device not in _weights:
        generator = torch.Generator().manual_seed(0)  # the same in every process
        odd = torch.randint(2**62, (_ROW,), generator=generator, device="cpu") * 2 + 1
        _weights[device] = odd.to(device)
    return _weights[device]
