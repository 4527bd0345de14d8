"""A state, laid out: ``TrainState``, ``init_state``, ``place`` and ``unshard``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.accounting import label
from fsfunc.collectives import group
from fsfunc.layout import Layout, pack_flat
from fsfunc.mesh import here
from fsfunc.pieces import assemble, take
from fsfunc.recording import Group, Recorder, common, record
from fsfunc.sharded import Home, Sharded, is_sharded
from fsfunc.transforms.donation import refuse_spent
from fsfunc.transforms.sharding import Sharding

__all__ = ["TrainState", "init_state", "place", "unshard"]


@dataclass(frozen=True)
class TrainState:
    """Parameters, the optimizer's state, the step count, and whatever else is carried.

    It is a pytree. Any other pytree is as good a state; this one knows how to apply
    gradients.
    """

    params: Any
    opt_state: Any = None
    step: int = 0
    extra: Any = field(default_factory=dict)

    def apply_gradients(self, grads: Any, optimizer: Any, **changes: Any) -> TrainState:
        """The state after one update by ``optimizer`` (of the state's own make)."""
        tree.check_same_structure(
            self.params, grads, what="gradients", against="the parameters",
            is_leaf=lambda x: x is None or is_sharded(x),  # None: not differentiated
        )  # fmt: skip
        if self.opt_state is None:
            raise ValueError(
                "this state has no optimizer state: make it by ff.init_state(step, "
                "params, optimizer, batch), or TrainState(params, optimizer.init("
                "params))"
            )
        params, opt_state = optimizer.apply(grads, self.opt_state, self.params)
        return replace(
            self, params=params, opt_state=opt_state, step=self.step + 1, **changes
        )

    def replace(self, **changes: Any) -> TrainState:
        """The state with some fields changed."""
        return replace(self, **changes)


tree.register_node(
    TrainState,
    lambda s: ((s.params, s.opt_state, s.step, s.extra), None),
    lambda _, children: TrainState(*children),
    names=("params", "opt_state", "step", "extra"),
)


def init_state(
    step: Callable[..., Any],
    params_or_init_fn: Any,
    optimizer: Any,
    batch: Any,
    record: str = "fake",
) -> TrainState:
    """The first state of ``step``, each rank holding its part.

    The step is run once on fake tensors to see which leaves its units take.

    Args:
        step: ``(state, batch) -> (state, metrics)``, transformed.
        params_or_init_fn: the whole parameters, or a function that returns them; on
            every rank the same.
        optimizer: its ``init`` gives the optimizer's state, made on the parts alone.
        batch: of the shapes that the step will see (its values are not read).
        record: ``"real"`` runs one real call, where fake tensors cannot go on.

    Raises:
        RuntimeError: the step asks a fake tensor for its value; names the line.
        ValueError: a leaf is read inside and outside units.

    Cost: nothing is sent. One run on fake tensors, one copy of the rank's part.
    """
    params = params_or_init_fn
    if callable(params_or_init_fn):
        params = params_or_init_fn()

    def run(params: Any, batch: Any) -> Any:
        return step(TrainState(params, optimizer.init(params)), batch)

    run.interpretations = getattr(step, "interpretations", ())  # type: ignore
    placed = _placed(run, params, (batch,), record)
    return TrainState(placed, optimizer.init(placed))


def place(fn: Callable[..., Any], t: Any, *rest: Any, record: str = "fake") -> Any:
    """``t``, whole on every rank, as the call ``fn(t, *rest)`` expects it.

    The inverse of :func:`unshard`. Leaves that units take lie in flat buffers over the
    axis of the ``shard`` around them; a leaf that only mirrors another (a moment: the
    same path but for its head, the same shape) lies as that one; what no unit takes
    stays whole, and what is laid out already stays as it is. No memory is shared with
    ``t``.

    Cost: nothing is sent; one copy of the rank's part.
    """
    return _placed(fn, t, rest, record)


def _placed(fn: Callable[..., Any], t: Any, rest: tuple[Any, ...], how: str) -> Any:
    recorder = _recorded(fn, t, rest, how)
    if not recorder.handlers:
        return tree.map(_own, t, is_leaf=is_sharded)
    handler = recorder.handlers[0]
    if len(recorder.handlers) > 1:
        axes = [h.axes for h in recorder.handlers]
        raise ValueError(
            f"several shard transforms, over {axes}: give one of them a tuple of axes, "
            "or replicate="
        )
    at = here(handler.mesh)
    groups = recorder.groups(handler.min_bytes)
    handler.expect(at.rank, recorder.order(groups))
    paths, leaves, treedef = tree.flatten_with_paths(t, is_leaf=is_sharded)
    where = {path: i for i, path in enumerate(paths)}
    coordinates = at.mesh.coordinates(at.rank)
    for g in _mirrored(groups, recorder, leaves, where):
        chosen = [where[p] for p in g.paths]
        home = _home(handler, g, [leaves[i] for i in chosen], coordinates)
        for i, leaf in zip(chosen, home.leaves(), strict=True):
            leaves[i] = leaf
    return tree.unflatten(treedef, [_own(x) for x in leaves])


def _recorded(fn: Callable[..., Any], t: Any, rest: Any, how: str) -> Recorder:
    """What ``fn`` shows: simulated ranks, which run one program, record it once.

    A rank takes another's record where it is at the same call, with the same shapes,
    and its own function names the one ``shard`` that the record is of.
    """
    known = [h for h in getattr(fn, "interpretations", ()) if isinstance(h, Sharding)]
    if len(known) != 1 or (notes := here(known[0].mesh).link.notes) is None:
        return record(fn, t, rest, how)
    mine, rank = known[0], here(known[0].mesh).rank
    leaves, treedef = tree.flatten((t, rest), is_leaf=is_sharded)
    count = notes["records", rank] = notes.get(("records", rank), 0) + 1
    shapes = tuple(_kind(x) for x in leaves)
    key = ("record", count, how, treedef, shapes, mine.configuration)
    if key not in notes:
        found = record(fn, t, rest, how)
        if found.handlers != [mine]:
            return found
        notes[key] = found
    return replace(notes[key], handlers=[mine])


def _kind(x: Any) -> Any:
    return (x.shape, x.dtype) if isinstance(x, Tensor | Sharded) else type(x)


def _own(x: Any) -> Any:
    """A whole leaf in memory of its own: a donated step may write into the state."""
    return x.detach().clone() if isinstance(x, Tensor) else x


def _mirrored(
    groups: list[Group], recorder: Recorder, leaves: list[Any], where: dict[str, int]
) -> list[Group]:
    """The groups that units take, and those of leaves that mirror theirs (moments).

    A leaf mirrors another of its shape whose path is the same but for its head: what
    the paths of all parameters have in common, and at least the first word.
    """
    taken = {p for t in recorder.taken for p in t.leaves}
    if not taken:
        return groups
    out = [g for g in groups if set(g.paths) & taken]
    whole, split = recorder.whole(), {p: tuple(p.split("/")) for p in where}
    head = max(1, len(common([split[p] for p in sorted(taken)])))
    alone = len(taken) == 1  # then any leaf of its shape mirrors it
    tail = {p: split[p][head:] or (() if alone else split[p]) for p in taken}
    found: dict[Any, Group] = {}
    for g in out:
        for p in g.paths:
            found.setdefault((tail[p], leaves[where[p]].shape), g)
    mirrors: dict[Any, dict[int, str]] = {}
    for path, i in where.items():
        if path in taken or path in whole or not _real(leaves[i]):
            continue
        parts, shape = split[path], leaves[i].shape
        for n in range(len(parts) + 1):
            g = found.get((parts[n:], shape))
            if g is not None:
                at = [tail[p] for p in g.paths].index(parts[n:])
                key = parts[:n], g.buffer, leaves[i].dtype
                mirrors.setdefault(key, {})[at] = path
                break
    return out + [
        Group(buffer, tuple(p for _, p in sorted(paths.items())), dtype)
        for (_, buffer, dtype), paths in mirrors.items()
    ]


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _home(
    handler: Any, g: Group, full: list[Tensor], coordinates: dict[str, int]
) -> Home:
    """This rank's part of whole tensors, as views of one flat buffer."""
    axes = handler.axis if handler.zero else ()
    sizes = [handler.mesh.axes[a] for a in axes]
    layouts = pack_flat(
        [x.shape for x in full], g.dtype, g.paths, axes, sizes, g.buffer
    )
    own = {a: coordinates[a] for a in axes}
    place = layouts[0].flat
    if place is None:
        raise RuntimeError(f"{layouts[0]} lies in no buffer")
    keeps = handler.zero in (1, 2)
    size = place.size * place.chunk if keeps else place.chunk
    whole = full[0].new_zeros(size, dtype=g.dtype)
    index = handler.mesh.coordinate(axes) if axes else 0
    flat = whole[index * place.chunk : (index + 1) * place.chunk] if keeps else whole
    home = Home(layouts, flat, own, whole if keeps else None)
    with torch.no_grad():
        for leaf, layout, x in zip(home.leaves(), layouts, full, strict=True):
            leaf.local.copy_(take(x, layout, own))
    return home  # its whole buffer does not show it yet: the first use gathers


def unshard(
    t: Any, *, to: torch.device | str | None = None, only: int | None = None
) -> Any:
    """``t`` with every sharded leaf whole: the inverse of :func:`place`.

    Leaf by leaf, for any tree (states included): values carry their layout. Every rank
    calls it.

    Args:
        to: the device of the result.
        only: the one rank that gets the result; the others get None for those leaves.

    Cost: one all-gather for each leaf, (n-1) times the rank's largest part.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> unit = ff.unit(lambda p, x: x @ p)
    >>> def main():
    ...     f = ff.shard(lambda p, x: unit(p, x).sum(), mesh, "data")
    ...     params = ff.place(f, torch.arange(3.0), torch.ones(1, 3))
    ...     return ff.unshard(params).tolist()
    >>> ff.spmd(main, mesh)()
    [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    """

    def whole(x: Any) -> Any:
        if not isinstance(x, Sharded):
            return x
        full = _whole(x)
        if only is not None and here().rank != only:
            return None
        return full if to is None else full.to(to)

    refuse_spent(t)
    with label("", "unshard"), torch.no_grad():
        return tree.map(whole, t, is_leaf=is_sharded)


def _whole(x: Sharded) -> Tensor:
    layout, at = x.layout, here()
    local = x.local.detach()
    if not layout.axes:
        return local.reshape(layout.shape).clone()
    where = group(layout.axes, at)
    size = max(_count(layout, at.mesh.coordinates(r)) for r in where.ranks)
    sent = local.new_zeros(size)
    sent[: local.numel()] = local.reshape(-1)
    every = sent if where.size == 1 else where.start("all_gather", sent).wait()
    parts = []
    for k, rank in enumerate(where.ranks):
        coordinates = at.mesh.coordinates(rank)
        shape = layout.local_shape(coordinates)
        count = torch.Size(shape).numel()
        parts.append((coordinates, every[k * size : k * size + count].view(shape)))
    return assemble(parts, layout)


def _count(layout: Layout, coordinates: dict[str, int]) -> int:
    return torch.Size(layout.local_shape(coordinates)).numel()
