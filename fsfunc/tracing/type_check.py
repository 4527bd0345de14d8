"""A step tried on tensors without data, before it runs: has it one meaning?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch, tree
from fsfunc.comm.attribution import called_by_user
from fsfunc.comm.backends.abstract import AbstractLink
from fsfunc.comm.collective_ops import watching
from fsfunc.comm.comparison import unlike
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import Here
from fsfunc.core.frames import Interpretation, frame, inside
from fsfunc.sharded.leaf import NotATensor, is_sharded
from fsfunc.tracing.checker import Checker
from fsfunc.tracing.refusals import LawError
from fsfunc.tracing.runs import shadows, without_data
from fsfunc.tracing.typed_operators import SharedOp

__all__ = ["check", "knows", "learn", "signature", "unchecked"]


def check(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    at: Here,
    axes: tuple[str, ...],
    together: bool = False,
) -> Checker | None:
    """Raises where ``call(*args, **keywords)`` has no meaning under ``shard``.

    The first argument is one value on all ranks, the others are the rank's own. Where a
    step asks for a value it gets a stand-in, so one way through it is looked at; one
    that fake tensors cannot go through at all is not: what is refused as it runs is
    refused all the same. Of simulated ranks, which run one program, the first to come
    and the last of the mesh look; all of them where it asks for its rank.

    Args:
        at: the rank; ``axes``: those over which the loss is a mean.
        together: whether all ranks along ``axes`` look now. Then those over processes
            compare what each would compute.

    Returns:
        what was seen; None of a step that fake tensors cannot go through.

    Raises:
        LawError, NotATensor: names the line, the leaf, and the way out.
    """
    notes, last = at.link.notes, at.rank == at.mesh.size - 1
    key, known = None, None
    if notes is not None:
        count = notes["checks", at.rank] = notes.get(("checks", at.rank), 0) + 1
        key = "checked", count, tree.flatten((args, keywords), is_leaf=is_sharded)[1]
        known, asks = notes.get(key, (None, False))
        if known is not None and not (last or asks):
            return known
    asked: set[str] = set()
    others = group(axes, at) if together and notes is None else None
    try:
        found = _looked_at(call, args, keywords, at, axes, asked, known, others)
    except (LawError, NotATensor):
        raise
    except Exception as error:
        if (seen := _UNCHECKED.get()) is not None:
            seen.append(error)
        return None
    if notes is not None:
        notes.setdefault(key, (found, bool(asked & set(axes))))
    return found


def _looked_at(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    at: Here,
    axes: tuple[str, ...],
    asked: set[str],
    known: Checker | None,
    others: RankGroup | None,
) -> Checker:
    """What the step computes, which other ranks compute too.

    Args:
        known: what one of the ranks of this process has found.
        others: the ranks that look now, over processes.
    """
    try:
        found = there = _tried(call, args, keywords, at, axes, asked)
        other = at.rank
        if known is not None:
            there, other = known, known.rank
        elif at.link.notes is None and asked & set(axes):
            other = _neighbour(at, axes)
            elsewhere = replace(at, rank=other)
            there = _tried(call, args, keywords, elsewhere, axes, set())
        varying = differing(found.events, there.events, at.rank, other)
    except Exception:
        if others is not None:
            _across(None, others)  # which they wait for
        raise
    if others is not None:
        varying |= _across(found.events, others)
    if varying:
        _tried(call, args, keywords, at, axes, set(), varying)
    return found


_NOTHING = [("", "")]


def _across(events: Sequence[SharedOp] | None, where: RankGroup) -> set[int]:
    """Which events have other constants in another process: all of them call it.

    Args:
        events: None where the step could not be tried.

    Raises:
        LawError: they are not the same operators.
    """
    mine = [replace(e, constants=(repr(e.constants),)) for e in events or ()]
    lines = [(e.name, *e.constants) for e in mine] if events is not None else _NOTHING
    found: set[int] = set()
    for rank, said in unlike(lines, where).items():
        if events is not None and said != _NOTHING:
            theirs = [SharedOp(name, (text,), "the same place") for name, text in said]
            found |= differing(mine, theirs, where.rank, rank)
    return found


_UNCHECKED: ContextVar[list[Exception] | None] = ContextVar("unchecked", default=None)


@contextmanager
def unchecked() -> Iterator[list[Exception]]:
    """Gathers why calls inside could not be tried before they ran."""
    found: list[Exception] = []
    token = _UNCHECKED.set(found)
    try:
        yield found
    finally:
        _UNCHECKED.reset(token)


# By interpretation: the (rank, signature) of calls that were looked at.
_KNOWN: WeakKeyDictionary[Interpretation, set[Any]] = WeakKeyDictionary()


def knows(handler: Interpretation, rank: int, key: Any) -> bool:
    """Whether a call was looked at, or is like one in which nothing could be."""
    known = _KNOWN.get(handler, ())
    return (rank, key) in known or (rank, key[0]) in known


def learn(handler: Interpretation, rank: int, keys: Iterable[Any]) -> None:
    """Says of calls of these signatures that they were looked at."""
    _KNOWN.setdefault(handler, set()).update((rank, key) for key in keys)


def signature(args: Any, keywords: Any) -> Any:
    """What tells programs apart by what they are given: structure, shapes, dtypes."""
    leaves, treedef = tree.flatten((args, keywords), is_leaf=is_sharded)
    kinds: list[Any] = [treedef]
    for x in leaves:
        if isinstance(x, Tensor):
            kinds.append((x.shape, x.dtype, x.requires_grad))
        elif is_sharded(x):
            kinds.append((x.layout.shape, x.layout.dtype))
        else:
            kinds.append(type(x))
    return tuple(kinds)


def _neighbour(at: Here, axes: tuple[str, ...]) -> int:
    """Another rank, at another coordinate on each of ``axes`` that has several."""
    other = at.mesh.coordinates(at.rank)
    for axis in axes:
        other[axis] = (other[axis] + 1) % at.mesh.axes[axis]
    return at.mesh.rank_at(other)


def differing(events: Any, others: Any, rank: int, other: int) -> set[int]:
    """Which events of two ranks had other constants.

    Raises:
        LawError: they are not the same operators.
    """
    for a, b in zip(events, others, strict=False):
        if a.name != b.name:
            raise LawError(
                f"ranks {rank} and {other} compute what should be one value in other "
                f"ways: {a.name} at {a.where}, and {b.name} at {b.where}. What depends "
                "on the rank may only go into own values: data, or a unit's inputs"
            )
    if len(events) != len(others):
        more, who = (events, rank) if len(events) > len(others) else (others, other)
        extra = more[min(len(events), len(others))]
        raise LawError(
            f"only rank {who} computes {extra.name} at {extra.where}, of what should "
            "be one value on all ranks. What depends on the rank may only go into own "
            "values: data, or a unit's inputs"
        )
    pairs = enumerate(zip(events, others, strict=True))
    return {i for i, (a, b) in pairs if a.constants != b.constants}


def _tried(*how: Any) -> Checker:
    """The step run once; what raises may do so for what fakes remember, at first."""
    try:
        return _run(*how)
    except (LawError, NotATensor):
        raise
    except RuntimeError:
        return _run(*how, forget=True)


def _run(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    at: Here,
    axes: tuple[str, ...],
    asked: set[str],
    varying: set[int] | None = None,
    *,
    forget: bool = False,
) -> Checker:
    alone = at.mesh.axis_size(axes) == 1
    checker = Checker(at.rank, axes, alone, varying or ())
    now = replace(at, link=AbstractLink(at.rank))
    # Backward passes stay in this thread, whose modes see them.
    with (
        torch.autograd.set_multithreading_enabled(False),
        without_data((args, keywords), now, remembers=not forget, asked=asked) as mode,
        inside(frame().but(tracer=checker, at=now)),
        _torch.quiet_fakes(),
    ):
        coordinates = at.mesh.coordinates(at.rank)
        given, named = shadows(mode, (args, keywords), coordinates)
        with watching(checker), checker, _Asked(checker):
            out = call(*given, **named)
            checker.returned(given[:1], out)
    return checker


_SHAPES: dict[Any, str] = {
    Tensor.shape.__get__: "shape",  # type: ignore[attr-defined]
    Tensor.ndim.__get__: "ndim",  # type: ignore[attr-defined]
    Tensor.size: "size",
    Tensor.dim: "dim",
    Tensor.numel: "numel",
    Tensor.nelement: "nelement",
    Tensor.__len__: "len",
}


class _Asked(TorchFunctionMode):
    """Sees the gradients that autograd takes, and who asks for a tensor's shape."""

    def __init__(self, checker: Checker):
        super().__init__()
        self.checker = checker

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if name := _SHAPES.get(func):
            asker = sys._getframe(1)
            while asker.f_code.co_name in ("__len__", "handle_torch_function"):
                asker = asker.f_back or asker
            if called_by_user(asker):
                self.checker.measured(args[0], name)
            return func(*args, **(kwargs or {}))
        if func in (Tensor.backward, torch.autograd.backward):
            return self._backward(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if func is torch.autograd.grad:
            given = dict(zip(("outputs", "inputs"), args, strict=False)) | (
                kwargs or {}
            )
            inputs = given["inputs"]
            inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            self.checker.pulled(inputs, out)
        return out

    def _backward(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        roots = [x.grad_fn for x in tree.leaves(args) if isinstance(x, Tensor)]
        nodes = _torch.graph_nodes(roots, set())
        found = [getattr(node, "variable", None) for node in nodes]
        leaves = [x for x in found if x is not None]
        out = func(*args, **kwargs)
        self.checker.pulled(leaves, [x.grad for x in leaves])
        return out
