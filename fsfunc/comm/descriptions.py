"""Descriptions of values, equal in every process, to show and to compare.

Transforms and optimizers have a ``called`` and a ``configuration``, (name, value)
pairs. Tensors are described by their values, or by a checksum of their bits, functions
by their names, and everything else by its repr.
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

Ask = Callable[[str, Any], Lines]  # (name, function) -> lines of its results

_NUMBERS = (int, float, bool, type(None))
_FEW = 16  # elements of a tensor that are printed; else it is a checksum


def stated(value: Any) -> str:
    """A description of a value, without addresses and the like.

    >>> stated(len), stated(object()), stated({"lr": (0.1,)})
    ('<function len>', '<object object>', "{'lr': (0.1,)}")
    """
    if type(value) in _NUMBERS:
        return repr(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if type(value) in (list, tuple):
        inside = ", ".join(map(stated, value))
        if type(value) is list:
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{stated(k)}: {stated(v)}" for k, v in value.items())
        return f"{{{inside}}}"
    if (parts := _parts(value)) is not None:
        kind, items = parts
        return f"{kind}({', '.join(f'{k}={stated(v)}' for k, v in items)})"
    if name := getattr(value, "__qualname__", None):
        kind = "class" if isinstance(value, type) else "function"
        return f"<{kind} {name}>"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def told(name: str, value: Any, ask: Ask = lambda name, value: ()) -> Lines:
    """The same, a line for each part, by path.

    Args:
        ask: gives further lines for a function, by its name: results of calling it.

    >>> told("rates", {"first": 0.1, "others": (0.2,)})[1:]
    [('rates/first', '0.1'), ('rates/others', 'tuple of 1'), ('rates/others/0', '0.2')]
    """
    if type(value) in _NUMBERS:
        return [(name, repr(value))]
    kind, items = _parts(value) or ("", None)
    if items is None and isinstance(value, Mapping):
        items = [(str(key), value[key]) for key in sorted(value, key=str)]
    elif items is None and type(value) in (list, tuple):
        items = [(str(i), x) for i, x in enumerate(value)]
    if items is None:
        more = ask(name.rpartition("/")[2], value) if callable(value) else ()
        return [(name, stated(value)), *((f"{name} {k}", said) for k, said in more)]
    kind = kind or f"{type(value).__name__} of {len(items)}"
    below = [told(f"{name}/{key}", x, ask) for key, x in items]
    return [(name, kind), *chain.from_iterable(below)]


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]]] | None:
    """The name and the parts of a value that has a ``configuration``, or None."""
    if isinstance(value, functools.partial):
        given = [(str(i), x) for i, x in enumerate(value.args)]
        return stated(value.func), [*given, *value.keywords.items()]
    made = getattr(value, "configuration", None)
    if isinstance(value, type) or not isinstance(made, tuple | list):
        return None
    return getattr(value, "called", "") or type(value).__name__, list(made)


def _tensor(x: Tensor) -> str:
    """A tensor by its values; by a checksum of many; by its shape without data."""
    kind = f"tensor {describe_tensor(x.shape, x.dtype)}"
    if not has_values(x):
        return kind
    if x.numel() <= _FEW:
        return f"{kind} {x.tolist()}"
    return f"{kind} of checksum {checksums([x])[0] % 2**64:016x}"


# Values that must be equal

ALIKE = (
    "Make them equal: give every rank the same seed before they are made "
    "(torch.manual_seed), load one file, or send one rank's: ff.pbroadcast(params, "
    "axis, source=0)"
)


def whole_values(
    paths: Sequence[str],
    leaves: Sequence[Any],
    notes: dict[Any, Any] | None,
    title: str = "whole parameters differ between ranks",
    advice: str = ALIKE,
) -> Section:
    """The section of values that must be equal on every rank.

    Args:
        notes: the link's notes of ranks that share a process, to cache checksums in.
    """
    lines = [
        (repr(path), repr(leaf))
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, bool | int | float | complex | str | bytes)
    ]
    tensors = {p: x for p, x in zip(paths, leaves, strict=True) if has_values(x)}
    known = None if notes is None else notes.setdefault("checksums", {})
    sums = checksums(list(tensors.values()), known)
    for (path, x), n in zip(tensors.items(), sums, strict=True):
        text = f"{describe_tensor(x.shape, x.dtype)} of checksum {n % 2**64:016x}"
        lines.append((repr(path), text))
    return Section(title, lines, advice)


# Checksums


def has_values(x: Any) -> bool:
    """True if ``x`` is a tensor with data, dense and not on meta."""
    if not isinstance(x, Tensor) or isinstance(x, _torch.FakeTensor):
        return False
    return x.layout == torch.strided and x.device.type != "meta"


_ROW, _ROWS = 2048, 64  # words in a row; rows that fit a core's cache
_FAR_ROWS = 4096  # rows for which a GPU takes longer than Python for three launches
_weights: dict[torch.device, Tensor] = {}


def checksums(
    tensors: Sequence[Tensor], known: dict[int, Any] | None = None
) -> list[int]:
    """A checksum of each tensor's bits.

    Args:
        known: a cache for tensors that ranks of one process share.

    Cost: each tensor is read once, at some 3 GB/s a thread; one number a tensor is
    copied from the device.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> a, b, c = checksums([one, other, one.clone()])
    >>> a == c, a == b
    (True, False)
    """
    known = {} if known is None else known
    with torch.no_grad(), torch.inference_mode(False):
        folded = _Folded()
        return [_known(x, known, folded) for x in tensors]


def _known(x: Tensor, known: dict[int, Any], folded: _Folded) -> int:
    version = None if x.is_inference() else x._version
    seen, then, found = known.get(id(x), (None, None, 0))
    if seen is None or seen() is not x or version is None or version != then:
        with _torch.beneath_all_modes():  # unseen by modes that record the step
            found = int(folded(_words(x)).item())
        known[id(x)] = weakref.ref(x), version, found
    return found


def _words(x: Tensor) -> Tensor:
    """The bytes of a tensor as 32-bit integers, zeros after the last."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    data = x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # of one, any stride
    if data.storage_offset() % 4 or data.numel() % 4:
        padded = data.new_zeros(-(-data.numel() // 4) * 4)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int32)


class _Folded:
    """A weighted sum of words modulo 2^64: of rows, and then of the rows' sums.

    Weights are odd and of 62 bits, and words have 32: so two words that change in their
    highest bit, a sign, do not cancel.
    """

    def __init__(self) -> None:
        self.rooms: dict[torch.device, Tensor] = {}  # fresh memory costs page faults

    def __call__(self, words: Tensor) -> Tensor:
        weights = _weights_on(words.device)
        while words.numel() > _ROW:
            whole = words.numel() // _ROW * _ROW
            many = _ROWS if _on_host(words) else _FAR_ROWS
            rows = words[:whole].view(-1, _ROW).split(many)
            sums = torch.cat([self._summed(some, weights) for some in rows])
            words = torch.cat([sums.view(torch.int32), words[whole:]])
        return (words * weights[: words.numel()]).sum()

    def _summed(self, rows: Tensor, weights: Tensor) -> Tensor:
        room = self.rooms.get(rows.device)
        if room is None or len(room) < len(rows):
            room = weights.new_empty(max(_ROWS, len(rows)), _ROW)
            self.rooms[rows.device] = room
        wide = room[: len(rows)].copy_(rows)
        # Widened first: in half the time of a product of unlike kinds.
        if _on_host(wide):
            return torch.mv(wide, weights)
        return wide.mul_(weights).sum(1)  # CUDA multiplies no matrices of integers


def _on_host(x: Tensor) -> bool:
    return x.is_cpu


def _weights_on(device: torch.device) -> Tensor:
    if device not in _weights:
        draw = torch.Generator().manual_seed(0)
        wide = torch.randint(2**62, (_ROW,), generator=draw, device="cpu") * 2 + 1
        _weights[device] = wide.to(device)
    return _weights[device]
