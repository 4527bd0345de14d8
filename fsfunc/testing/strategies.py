"""Hypothesis strategies for tests of sharding: meshes, layouts, models, stacks.

Each shrinks to the smallest that still fails: one axis, of size 2, one leaf, zeros.
Values are integers, so that what is equal is so bit for bit, where sizes are powers of
two. ``help(fsfunc.testing)`` begins with a property test of one's own transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.launch import make_mesh
from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.pipelining.actions import Action, Schedule
from fsfunc.sharded.layout import Layout, Owned, Split
from fsfunc.sharded.packed_layouts import pack_flat
from fsfunc.testing.drawn_models import EXTRAS, DrawnModel, DrawnStack, DrawnStep, rows

try:
    from hypothesis import strategies as st
except ImportError as error:  # hypothesis is no need of fsfunc's own
    raise ImportError(
        "fsfunc.testing.strategies needs hypothesis: pip install hypothesis"
    ) from error


Strategy = st.SearchStrategy
seeds = st.integers(0, 2**20)


@st.composite
def meshes(
    draw: Any,
    names: Sequence[str] = ("data", "node", "model"),
    *,
    max_axes: int = 2,
    max_size: int = 8,
    powers: bool = True,
) -> Mesh:
    """Simulated meshes; they shrink to ``{"data": 2}``.

    Args:
        names: those of the axes; the first is always there.
        max_size: of the mesh.
        powers: whether sizes are powers of two, over which means are exact.
    """
    left, sizes = max_size, {}
    for name in names[: draw(st.integers(1, max_axes))]:
        fit = [n for n in ((2, 4, 8) if powers else (2, 3, 4, 5, 6, 7, 8)) if n <= left]
        sizes[name] = draw(st.sampled_from([*fit, 1]))
        left //= sizes[name]
    return make_mesh(sizes, "simulated")


@st.composite
def axes(draw: Any, mesh: Mesh) -> Axis:
    """One axis of a mesh, or several in any order; they shrink to its first one."""
    names = list(mesh.axes)
    if len(names) == 1 or not draw(st.booleans()):
        return draw(st.sampled_from(names))
    count = draw(st.integers(2, len(names)))
    return tuple(draw(st.permutations(names))[:count])


def shapes(
    *, max_dims: int = 3, max_size: int = 5, multiple: int = 1
) -> Strategy[tuple[int, ...]]:
    """Shapes, scalars and empty ones among them; each size a multiple of a number.

    With ``multiple=mesh.size`` every dim can be cut over any axes of a mesh.
    """
    sizes = st.integers(0, max_size).map(lambda n: n * multiple)
    return st.lists(sizes, max_size=max_dims).map(tuple)


@st.composite
def layouts(
    draw: Any,
    mesh: Mesh,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    flat: bool = True,
) -> Layout:
    """Layouts of one tensor over any axes of a mesh; they shrink to a whole one.

    Args:
        flat: whether some axes cut a flat buffer, which other tensors share.
    """
    names = draw(st.lists(st.sampled_from(list(mesh.axes)), unique=True))
    outer = draw(st.integers(0, len(names))) if flat else len(names)
    parts = []
    for axis in names[:outer]:
        size = mesh.axes[axis]
        if shape and not draw(st.booleans()):
            parts.append(Split(draw(st.integers(0, len(shape) - 1)), axis, size))
        else:
            parts.append(Owned(axis, size, draw(st.integers(0, size - 1))))
    if outer == len(names):
        return Layout(tuple(shape), dtype, tuple(parts), "w")
    every = [draw(shapes()), tuple(shape), draw(shapes())]
    sizes = [mesh.axes[a] for a in names[outer:]]
    before = [(), tuple(parts), ()]
    called = ["before", "w", "after"]
    return pack_flat(every, dtype, called, names[outer:], sizes, "unit", outer=before)[
        1
    ]


@st.composite
def tensors(draw: Any, shape: Strategy[tuple[int, ...]], dtype: torch.dtype) -> Tensor:
    """Integers in any dtype; they shrink to zeros."""
    made = draw(shape)
    seed = draw(st.one_of(st.none(), seeds))
    if seed is None:
        return torch.zeros(made, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, made, generator=generator, device="cpu").to(dtype)


def trees(*, max_leaves: int = 5, multiple: int = 1) -> Strategy[Any]:
    """Trees of tensors: dicts, lists and tuples, empty ones and None among them.

    They shrink to one leaf.

    Args:
        multiple: of which every size is, for leaves to be cut.
    """
    shape = shapes(multiple=multiple, max_dims=2)
    leaf = st.sampled_from([torch.float32, torch.int64]).flatmap(
        lambda dtype: tensors(shape, dtype)
    )
    keys = st.sampled_from(["w", "b", "a b", "10", "9"])
    return st.recursive(
        leaf | st.none(),
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, max_size=3),
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=max_leaves,
    )


def batches(
    mesh: Mesh, axis: Axis | None = None, *, rows_each: int = 1
) -> Strategy[dict[str, Tensor]]:
    """Batches for drawn models, of which each rank along ``axis`` has equal rows.

    Args:
        rows_each: of which a rank has a multiple, for microbatches.
    """
    size = mesh.size if axis is None else mesh.axis_size(axis)
    count = st.integers(1, 2).map(lambda k: k * rows_each * size)
    return st.builds(rows, count, seeds)


def models(*, outside: bool = True, frozen: bool = True) -> Strategy[DrawnModel]:
    """Models of units that nest, share and repeat parameters; they shrink to a layer.

    They have relus: what is rounded on its way may come to the other side of one, so a
    codec is better held to a smooth loss of your own.

    Of one ``model.params(seed)``, ``model.frozen_params(seed)`` and
    ``model.loss(params, frozen, batch)``, a batch being one of `batches`.

    Args:
        outside: whether some read a leaf outside units; ``frozen``: whether some have
            parameters that are not differentiated.
    """
    names = st.lists(st.sampled_from(sorted(EXTRAS)), max_size=3, unique=True)
    each = names.map(lambda names: tuple(sorted(names)))
    maybe = lambda allowed: st.booleans() if allowed else st.just(False)  # noqa: E731
    drawn = st.builds(
        DrawnModel,
        layers=st.lists(each, min_size=1, max_size=2).map(tuple),
        nested=st.booleans(),
        tied=st.booleans(),
        twice=st.booleans(),
        outside=maybe(outside),
        frozen=maybe(frozen),
        whole=st.booleans(),
    )
    # A unit may gather what it is given; what is read outside units must stay whole.
    return drawn.filter(lambda m: not (m.outside and m.whole))


def train_steps(*, frozen: bool = False, outside: bool = True) -> Strategy[DrawnStep]:
    """Train steps of drawn models, with their state and data.

    Of what is drawn ``drawn.gradient(params, batch) -> (loss, grads)`` and
    ``drawn.step(state, batch) -> (state, loss)``, one step of descent, are functions;
    ``drawn.params``, ``drawn.state`` and ``drawn.batch(rows)`` what they take.
    Parameters are dicts and lists; some leaves are integers, whose gradient is None.

    Args:
        frozen, outside: as for `models`; frozen parameters are in ``state.extra``.
    """
    return st.builds(DrawnStep, models(frozen=frozen, outside=outside), seeds)


@st.composite
def orders(draw: Any, kinds: Sequence[str]) -> tuple[str, ...]:
    """Orders of transforms with "shard" among them, the innermost first.

    "donate", which is for train steps, comes last: around all others.
    """
    others = draw(st.lists(st.sampled_from(kinds), unique=True)) if kinds else []
    within = ["shard", *(name for name in others if name != "donate")]
    return (*draw(st.permutations(within)), *["donate"] * ("donate" in others))


@st.composite
def transform_stacks(
    draw: Any, mesh: Mesh, kinds: Sequence[str] = ("remat", "accumulate")
) -> DrawnStack:
    """Stacks of ``shard`` with any options, and others around and within it.

    They shrink to ``shard(step, mesh, axis)`` at zero=0. ``stack(f)`` is ``f`` under
    them, on ``stack.mesh``; ``stack.axes`` are those over which its batch is cut, and
    ``stack.rows`` the least that it takes, or a multiple of it.

    Args:
        kinds: which others, each once at most: "remat", "accumulate"; for train steps
            "donate"; and "pipeline", where the mesh has an axis for it beside one for
            ``shard``: of losses with no fewer unit calls than that axis has ranks.
    """
    names, pipe = list(mesh.axes), ""
    if "pipeline" in kinds and len(names) == 1:
        kinds = [name for name in kinds if name != "pipeline"]
    order = draw(orders(kinds))
    if "pipeline" in order:
        names.remove(pipe := draw(st.sampled_from(names)))
    copies, axis = None, names[0]
    if len(names) > 1 and draw(st.booleans()):
        copies, axis = draw(st.permutations(names))[:2]
    elif len(names) > 1 and not pipe:
        axis = draw(axes(mesh))
    options = {
        "zero": draw(st.integers(0, 3)),
        "reshard_after_forward": not draw(st.booleans()),
        "min_bytes": draw(st.sampled_from([0, 40, 10**6])),
    }
    if copies is not None:
        options["replicate"] = copies
    return DrawnStack(mesh, order, axis, options, pipe=pipe)


@st.composite
def valid_schedules(
    draw: Any,
    ranks: int | None = None,
    n_stages: int | None = None,
    n_microbatches: int | None = None,
) -> Schedule:
    """Valid schedules of a pipeline: actions in any order that its stages allow.

    They shrink to one rank and one microbatch, where these are not given.
    """
    n: int = ranks or draw(st.integers(1, 4))
    least, most = (0, 6 - n) if n_stages is None else (n_stages - n,) * 2
    extra = draw(st.lists(st.integers(0, n - 1), min_size=least, max_size=most))
    owner = draw(st.permutations([*range(n), *extra]))
    count: int = n_microbatches or draw(st.integers(1, 4))
    last, cells = len(owner) - 1, len(owner) * count
    halves = draw(st.lists(st.booleans(), min_size=cells, max_size=cells))
    open_now = {("F", 0, m) for m in range(count)}
    table: list[list[Action]] = [[] for _ in range(n)]
    while open_now:
        kind, stage, m = draw(st.sampled_from(sorted(open_now)))
        open_now.remove((kind, stage, m))
        table[owner[stage]].append(Action(kind, stage, m))
        if kind == "F" and stage < last:
            open_now.add(("F", stage + 1, m))
        if kind == "I":
            open_now.add(("W", stage, m))
        below = stage if kind == "F" and stage == last else stage - 1
        if below >= 0 and (kind in ("B", "I") or below == last):
            open_now.add(("I" if halves[below * count + m] else "B", below, m))
    return tuple(tuple(row) for row in table)


schedules = valid_schedules  # as `ff.schedules` is called, which are modules
