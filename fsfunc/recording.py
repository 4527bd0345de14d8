"""Reading off a step which leaves belong together.

The step runs once on fake tensors, moving nothing. Its leaves are :class:`Recorded`:
they pass for tensors, and note who reads them. The unit calls then say which leaves
share a buffer, in which order buffers are wanted, and which leaves no unit takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch, tree
from fsfunc.accounting import silence, source_line, traceback_line
from fsfunc.backends.abstract import AbstractLink
from fsfunc.frames import frame, inside
from fsfunc.layout import Layout
from fsfunc.mesh import NoMesh, here, place_here
from fsfunc.recorded import Recorded, plain, whole
from fsfunc.sharded import is_sharded

__all__ = ["Group", "Recorder", "common", "record"]


@dataclass(frozen=True)
class Group:
    """Leaves that share a buffer.

    Args:
        buffer: its name: the unit that owns it, and its first leaf.
        paths: the leaves, in the tree's order.
        dtype: theirs.
    """

    buffer: str
    paths: tuple[str, ...]
    dtype: torch.dtype


@dataclass
class _Taken:
    path: tuple[str, ...]  # names of the units around, and the unit's own
    numbers: tuple[int, ...]
    leaves: list[str]


_Reading = tuple[str, tuple[int, ...]]  # a leaf, and the numbers of the unit call
_Where = tuple[str, bool]  # file and line, and whether a gradient call was around


@dataclass
class Recorder:
    """What one run of a step showed.

    ``groups`` are made of ``taken`` (which unit calls took which leaves), ``inside``
    (which unit's own body read a leaf), ``outside`` (leaves read by a loss outside
    every unit, and where), ``stock`` (those that ``torch.func`` differentiates there)
    and ``trained``.
    """

    layouts: dict[str, Layout] = field(default_factory=dict)
    taken: list[_Taken] = field(default_factory=list)
    inside: dict[_Reading, _Where] = field(default_factory=dict)
    outside: dict[str, _Where] = field(default_factory=dict)
    stock: dict[str, str] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    handlers: list[Any] = field(default_factory=list)
    differentiated: bool = False
    _known: dict[int, str] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)

    def know(self, x: Tensor, path: str) -> None:
        self._known[id(x)] = path
        self._alive.append(x)

    def path_of(self, x: Any) -> str | None:
        if isinstance(x, Recorded):
            return x.layout.name
        if not isinstance(x, Tensor):
            return None
        found = self._known.get(id(x))
        if found is None and _torch.is_wrapped(x):
            found = self._known.get(id(_torch.unwrapped(x)))
        return found

    def unit(self, handler: Any, run: Callable[..., Any], call: Any):
        """A unit call under recording: its leaves become plain tensors again."""
        if handler not in self.handlers:
            self.handlers.append(handler)

        def recorded(params: Any, *inputs: Any, **keywords: Any) -> Any:
            leaves, treedef = tree.flatten(params, is_leaf=is_sharded)
            names = []
            for i, leaf in enumerate(leaves):
                path = self.path_of(leaf)
                if path is None:
                    leaves[i] = whole(leaf)
                    continue
                names.append(path)
                leaves[i] = x = plain(leaf)
                self.know(x, path)
                if _torch.is_wrapped(x) or x.requires_grad:
                    self.trained.add(path)
                    self.differentiated = True
            numbers = call.numbers
            self.taken.append(_Taken(call.path, numbers, names))
            out = run(tree.unflatten(treedef, leaves), *inputs, **keywords)
            with inside(replace(call.frame, path=call.path, numbers=numbers)):
                return tree.map(self._given, out, is_leaf=is_sharded)

        return recorded

    def _given(self, x: Any) -> Any:
        """An output; a leaf that a unit returns as it is, is no leaf any more."""
        return x if self.path_of(x) is None else plain(x).view_as(plain(x))

    def read(self, values: Any) -> None:
        """A torch function read these values, in a unit's own body or outside."""
        f = frame()
        for x in tree.leaves(values, is_leaf=is_sharded):
            path = self.path_of(x)
            if path is None or (path, f.numbers) in self.inside:
                continue
            local = plain(x)
            inner = _torch.is_wrapped(local)
            if inner and local.requires_grad and not (f.in_loss or f.path):
                self.stock.setdefault(path, source_line())
            if f.path or path not in self.outside:
                where = source_line(), f.in_loss or inner
                if f.path:
                    self.inside[path, f.numbers] = where
                else:
                    self.outside[path] = where

    # What follows from it

    def whole(self) -> set[str]:
        """Leaves that stay whole: a loss reads them, and no unit does."""
        found = self.outside | {
            path: where
            for (path, numbers), where in self.inside.items()
            if not self._takes(path, numbers)  # it came in as an input
        }
        inner = any(in_loss for _, in_loss in found.values())
        read = {
            path: where
            for path, (where, in_loss) in found.items()
            if in_loss or not (inner or self.differentiated)
        }
        taken = {path for t in self.taken for path in t.leaves}
        for path, where in read.items():
            if path in taken:
                raise ValueError(
                    f"the loss reads {path!r} outside a unit, at {where}, and a unit "
                    "takes it too: under shard it is only whole inside the unit. Move "
                    "the reading into a unit, whose first argument it is part of; for "
                    "a sum over elements, such as a penalty, use ff.tree_sum or "
                    "weight_decay"
                )
        for path, where in self.stock.items():
            if path not in taken:
                raise ValueError(
                    f"torch.func differentiates {path!r}, which the loss reads outside "
                    f"every unit, at {where}: its gradient would be this rank's own, "
                    "not that of the mean over the ranks. Use ff.value_and_grad, or "
                    "move the reading into a unit"
                )
        return set(read)

    def _takes(self, path: str, numbers: tuple[int, ...]) -> bool:
        """Whether this unit call, or one around it, has the leaf as a parameter."""
        return any(
            path in t.leaves and t.numbers == numbers[: len(t.numbers)]
            for t in self.taken
        )

    def groups(self, min_bytes: int = 0) -> list[Group]:
        """The buffers, in the order in which units first want them."""
        whole = self.whole()
        calls: dict[str, list[_Taken]] = defaultdict(list)
        for t in self.taken:
            for path in t.leaves:
                calls[path].append(t)
        found: dict[Any, list[str]] = {}
        for path, layout in self.layouts.items():
            if path in whole:
                continue
            mine = [t for t in calls[path] if self._owns(t, path, calls[path])]
            key = (
                tuple(t.numbers for t in mine),
                common([t.path for t in mine]),
                layout.dtype,
                path in self.trained,
            )
            found.setdefault(key, []).append(path)
        ordered = sorted(found.items(), key=lambda item: item[0][0] or ((1 << 30,),))
        merged = _merged(ordered, min_bytes, self.layouts)
        return [
            Group(f"{'/'.join(owner)}:{name}", tuple(paths), dtype)
            for owner, dtype, name, paths in merged
        ]

    def _owns(self, t: _Taken, path: str, calls: list[_Taken]) -> bool:
        """Whether ``t`` gathers the leaf: no unit around it, and no inner one, does."""
        n, reads = len(t.numbers), (path, t.numbers) in self.inside
        outer = [t.numbers[:k] for k in range(1, n)]
        if any((path, numbers) in self.inside for numbers in outer):
            return False
        inner = [o for o in calls if len(o.numbers) > n and o.numbers[:n] == t.numbers]
        return reads or not inner

    def order(self, groups: list[Group]) -> list[tuple[str, ...]]:
        """The buffers that each unit call wants, call by call."""
        buffer = {path: g.buffer for g in groups for path in g.paths}
        order = []
        for t in self.taken:
            name = "/".join(t.path) + "/"
            wanted = [buffer[p] for p in t.leaves if p in buffer]
            mine = [b for b in wanted if not b.partition(":")[0].startswith(name)]
            if mine:
                order.append(tuple(dict.fromkeys(mine)))
        return order


def common(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The beginning that all ``paths`` share."""
    if not paths:
        return ()
    first = paths[0]
    same = 0
    while same < len(first) and all(p[: same + 1] == first[: same + 1] for p in paths):
        same += 1
    return first[:same]


def _merged(ordered: list[Any], min_bytes: int, layouts: dict[str, Layout]):
    """Neighbouring small groups as one, until they reach ``min_bytes``."""
    out: list[tuple[tuple[str, ...], torch.dtype, str, list[str]]] = []
    open_key: Any = None
    size = 0
    for (numbers, owner, dtype, trained), paths in ordered:
        nbytes = sum(layouts[p].nbytes for p in paths)
        single = len(numbers) == 1
        key = (numbers[0][:-1], owner[:-1], dtype, trained) if single else None
        small = single and nbytes < min_bytes
        if small and key == open_key and size < min_bytes:
            _, _, name, so_far = out[-1]
            out[-1] = (owner[:-1], dtype, f"{name} + {paths[0]}", [*so_far, *paths])
            size += nbytes
            continue
        out.append((owner, dtype, paths[0], list(paths)))
        open_key, size = (key, nbytes) if small else (None, 0)
    return out


_READS_NOTHING = {
    "__get__", "detach", "requires_grad_", "is_floating_point", "dim", "size", "numel",
    "element_size", "stride", "storage_offset", "is_contiguous", "untyped_storage",
    "is_complex", "__len__", "_is_view", "is_inference", "zeros_like", "empty_like",
    "ones_like", "new_zeros", "new_empty", "grad", "_make_dual", "_unpack_dual",
    "split",
}  # fmt: skip


class _Watch(TorchFunctionMode):
    """Sees which leaves are read outside every unit."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name not in _READS_NOTHING:
            self.recorder.read((args, kwargs or {}))
        args, kwargs = tree.map(plain, (args, kwargs or {}), is_leaf=is_sharded)
        return func(*args, **kwargs)


@contextmanager
def _told_where(real: bool) -> Iterator[None]:
    """Turns a refusal of fake tensors into the line that asked for a value."""
    try:
        yield
    except Exception as error:
        if real or not _torch.is_data_dependent(error):
            raise
        raise RuntimeError(
            f"recording the step on fake tensors stopped at {traceback_line(error)}, "
            "which asks for a tensor's value (.item(), `if tensor`, a boolean mask). "
            "Move it out of the step or make it a torch.where; or record one real call "
            'with record="real"'
        ) from error


def record(
    fn: Callable[..., Any], params: Any, rest: tuple[Any, ...], how: str = "fake"
) -> Recorder:
    """What ``fn(params, *rest)`` shows of its leaves, moving nothing.

    Args:
        how: ``"fake"`` runs on fake tensors; ``"real"`` runs one real call, for steps
            that read a tensor's value.

    Raises:
        RuntimeError: the step asks a fake tensor for its value; names the line.
        ValueError: a leaf is read by a unit and by the loss outside one.
    """
    if how not in ("fake", "real"):
        raise ValueError(f'record={how!r}: it is "fake" or "real"')
    recorder = Recorder()
    generator = torch.random.default_generator
    with ExitStack() as stack:
        stack.callback(generator.set_state, generator.get_state())
        stack.enter_context(silence())
        convert: Callable[[Any], Any] = lambda x: x  # noqa: E731
        if how == "fake" and not _torch.fake_active():
            mode = _torch.fake_mode_of(tree.leaves((params, rest)))
            convert = lambda x: _torch.fake_of(mode, x)  # noqa: E731
            stack.enter_context(mode)
        try:
            at = here()
            link = AbstractLink(at.rank)
            stack.enter_context(place_here(replace(at, link=link)))
        except NoMesh:
            pass  # the step names its own mesh, or none
        f = replace(frame(), recorder=recorder)
        stack.enter_context(inside(f))
        paths, leaves, treedef = tree.flatten_with_paths(params, is_leaf=is_sharded)
        for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
            if isinstance(x, Tensor):
                layout = Layout(tuple(x.shape), x.dtype, (), path)
                recorder.layouts[path] = layout
                leaves[i] = Recorded(convert(x.detach()), layout)
        others = tree.map(
            lambda x: convert(x) if isinstance(x, Tensor) else x,
            rest,
            is_leaf=is_sharded,
        )
        with _Watch(recorder), _told_where(how == "real"):
            fn(tree.unflatten(treedef, leaves), *others)
    return recorder
