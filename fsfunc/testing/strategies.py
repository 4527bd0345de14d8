"""Hypothesis strategies for tests of sharding: meshes, layouts, models, stacks.

Each shrinks to the smallest example that still fails: one axis, of size 2, one leaf,
zeros. Values are integers, so that equal results have equal bits where sizes are powers
of two. ``help(fsfunc.testing)`` begins with a property test of one's own transform.
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
except ImportError as error:  # fsfunc itself does not depend on hypothesis
    raise ImportError(
        "fsfunc.testing.strategies needs hypothesis: pip install hypothesis"
    ) from error


Strategy = st.SearchStrategy
seeds: Strategy[int] = st.integers(0, 2**20)


@st.composite
def meshes(
    draw: st.DrawFn,
    names: Sequence[str] = ("data", "node", "model"),
    *,
    max_axes: int = 2,
    max_size: int = 8,
    powers: bool = True,
) -> Mesh:
    """Draws simulated meshes; they shrink to ``{"data": 2}``.

    Args:
        names: the names of the axes; the first is always there.
        max_axes: the most axes.
        max_size: the most ranks.
        powers: whether sizes are powers of two, over which means are exact.
    """
    remaining, sizes = max_size, {}
    for name in names[: draw(st.integers(1, max_axes))]:
        fitting = [
            n
            for n in ((2, 4, 8) if powers else (2, 3, 4, 5, 6, 7, 8))
            if n <= remaining
        ]
        sizes[name] = draw(st.sampled_from([*fitting, 1]))
        remaining //= sizes[name]
    return make_mesh(sizes, "simulated")


@st.composite
def axes(draw: st.DrawFn, mesh: Mesh) -> Axis:
    """Draws one axis of a mesh, or several in any order; shrinks to its first one."""
    names = list(mesh.axes)
    if len(names) == 1 or not draw(st.booleans()):
        return draw(st.sampled_from(names))
    count = draw(st.integers(2, len(names)))
    return tuple(draw(st.permutations(names))[:count])


def shapes(
    *, max_dims: int = 3, max_size: int = 5, multiple: int = 1
) -> Strategy[tuple[int, ...]]:
    """Draws shapes, scalars and empty ones among them, of multiples of a number.

    With ``multiple=mesh.size`` every dim can be cut over any axes of a mesh.
    """
    sizes = st.integers(0, max_size).map(lambda n: n * multiple)
    return st.lists(sizes, max_size=max_dims).map(tuple)


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: Mesh,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    flat: bool = True,
) -> Layout:
    """Draws layouts of one tensor over any axes of a mesh; they shrink to a whole one.

    Args:
        flat: whether some axes cut a flat buffer, which other tensors share.
    """
    names = draw(st.lists(st.sampled_from(list(mesh.axes)), unique=True))
    outer_count = draw(st.integers(0, len(names))) if flat else len(names)
    parts = []
    for axis in names[:outer_count]:
        size = mesh.axes[axis]
        if shape and not draw(st.booleans()):
            parts.append(Split(draw(st.integers(0, len(shape) - 1)), axis, size))
        else:
            parts.append(Owned(axis, size, draw(st.integers(0, size - 1))))
    if outer_count == len(names):
        return Layout(tuple(shape), dtype, tuple(parts), "w")
    shapes_in_buffer = [draw(shapes()), tuple(shape), draw(shapes())]
    sizes = [mesh.axes[a] for a in names[outer_count:]]
    outer_parts = [(), tuple(parts), ()]
    leaf_names = ["before", "w", "after"]
    return pack_flat(
        shapes_in_buffer,
        dtype,
        leaf_names,
        names[outer_count:],
        sizes,
        "unit",
        outer=outer_parts,
    )[1]


@st.composite
def tensors(
    draw: st.DrawFn, shape: Strategy[tuple[int, ...]], dtype: torch.dtype
) -> Tensor:
    """Draws tensors of integers in a dtype; they shrink to zeros."""
    drawn_shape = draw(shape)
    seed = draw(st.one_of(st.none(), seeds))
    if seed is None:
        return torch.zeros(drawn_shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, drawn_shape, generator=generator, device="cpu").to(
        dtype
    )


def trees(*, max_leaves: int = 5, multiple: int = 1) -> Strategy[Any]:
    """Draws trees of tensors: dicts, lists and tuples, empty ones and None among them.

    They shrink to one leaf.

    Args:
        multiple: every size is a multiple of it, so that leaves can be cut.
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
    """Draws batches for drawn models, with as many rows for each rank along ``axis``.

    Args:
        rows_each: a rank has a multiple of it, for microbatches.
    """
    size = mesh.size if axis is None else mesh.axis_size(axis)
    count = st.integers(1, 2).map(lambda k: k * rows_each * size)
    return st.builds(rows, count, seeds)


def models(*, outside: bool = True, frozen: bool = True) -> Strategy[DrawnModel]:
    """Draws models whose units nest, share and repeat parameters; shrinks to a layer.

    A drawn model has ``model.params(seed)``, ``model.frozen_params(seed)`` and
    ``model.loss(params, frozen, batch)``, for a batch of `batches`.

    Models have relus, and a rounded value may fall on the other side of one. So test a
    codec by a smooth loss of your own.

    Args:
        outside: whether some read a leaf outside units.
        frozen: whether some have parameters that are not differentiated.
    """
    names = st.lists(st.sampled_from(sorted(EXTRAS)), max_size=3, unique=True)
    layer_leaves = names.map(lambda names: tuple(sorted(names)))
    allow = lambda allowed: st.booleans() if allowed else st.just(False)  # noqa: E731
    drawn = st.builds(
        DrawnModel,
        layers=st.lists(layer_leaves, min_size=1, max_size=2).map(tuple),
        nested=st.booleans(),
        tied=st.booleans(),
        twice=st.booleans(),
        outside=allow(outside),
        frozen=allow(frozen),
        whole=st.booleans(),
    )
    # A leaf that is read outside units must stay whole; a loss that is a unit has none.
    return drawn.filter(lambda model: not (model.outside and model.whole))


def train_steps(*, frozen: bool = False, outside: bool = True) -> Strategy[DrawnStep]:
    """Draws train steps of models, with their state and data.

    A drawn step has the functions ``drawn.gradient(params, batch) -> (loss, grads)``
    and ``drawn.step(state, batch) -> (state, loss)``, one step of descent. Their
    arguments are ``drawn.params``, ``drawn.state`` and ``drawn.batch(rows)``.
    Parameters are dicts and lists; some leaves are integers, whose gradient is None.

    Args:
        frozen, outside: as for `models`; frozen parameters are in ``state.extra``.
    """
    return st.builds(DrawnStep, models(frozen=frozen, outside=outside), seeds)


@st.composite
def orders(draw: st.DrawFn, kinds: Sequence[str]) -> tuple[str, ...]:
    """Draws orders of transforms with "shard" among them, the innermost first.

    "donate", which is for train steps, comes last: around all others.
    """
    others = draw(st.lists(st.sampled_from(kinds), unique=True)) if kinds else []
    inner = ["shard", *(name for name in others if name != "donate")]
    return (*draw(st.permutations(inner)), *["donate"] * ("donate" in others))


@st.composite
def transform_stacks(
    draw: st.DrawFn, mesh: Mesh, kinds: Sequence[str] = ("remat", "accumulate")
) -> DrawnStack:
    """Draws ``shard`` with any options, and other transforms around and within it.

    They shrink to ``shard(step, mesh, axis)`` at zero=0. ``stack(f)`` is ``f`` under
    them, on ``stack.mesh``. ``stack.axes`` are the axes over which its batch is cut,
    and its batch has ``stack.rows`` rows, or a multiple of that.

    Args:
        kinds: the other transforms, each used once at most: "remat", "accumulate"; for
            train steps "donate"; and "pipeline", if the mesh has an axis for it beside
            one for ``shard``. The loss must have as many unit calls as that axis has
            ranks, or more.
    """
    names, pipe = list(mesh.axes), ""
    if "pipeline" in kinds and len(names) == 1:
        kinds = [name for name in kinds if name != "pipeline"]
    order = draw(orders(kinds))
    if "pipeline" in order:
        names.remove(pipe := draw(st.sampled_from(names)))
    replicate_axis, axis = None, names[0]
    if len(names) > 1 and draw(st.booleans()):
        replicate_axis, axis = draw(st.permutations(names))[:2]
    elif len(names) > 1 and not pipe:
        axis = draw(axes(mesh))
    options = {
        "zero": draw(st.integers(0, 3)),
        "reshard_after_forward": not draw(st.booleans()),
        "min_bytes": draw(st.sampled_from([0, 40, 10**6])),
    }
    if replicate_axis is not None:
        options["replicate"] = replicate_axis
    return DrawnStack(mesh, order, axis, options, pipe=pipe)


@st.composite
def valid_schedules(
    draw: st.DrawFn,
    ranks: int | None = None,
    n_stages: int | None = None,
    n_microbatches: int | None = None,
) -> Schedule:
    """Draws valid schedules of a pipeline: actions in any order that stages allow.

    They shrink to one rank and one microbatch, if these are not given.
    """
    n: int = ranks or draw(st.integers(1, 4))
    min_extra, max_extra = (0, 6 - n) if n_stages is None else (n_stages - n,) * 2
    extra = draw(
        st.lists(st.integers(0, n - 1), min_size=min_extra, max_size=max_extra)
    )
    rank_of_stage = draw(st.permutations([*range(n), *extra]))
    count: int = n_microbatches or draw(st.integers(1, 4))
    last, cell_count = len(rank_of_stage) - 1, len(rank_of_stage) * count
    is_split = draw(st.lists(st.booleans(), min_size=cell_count, max_size=cell_count))
    ready = {("F", 0, microbatch) for microbatch in range(count)}
    table: list[list[Action]] = [[] for _ in range(n)]
    while ready:
        kind, stage, microbatch = draw(st.sampled_from(sorted(ready)))
        ready.remove((kind, stage, microbatch))
        table[rank_of_stage[stage]].append(Action(kind, stage, microbatch))
        if kind == "F" and stage < last:
            ready.add(("F", stage + 1, microbatch))
        if kind == "I":
            ready.add(("W", stage, microbatch))
        previous = stage if kind == "F" and stage == last else stage - 1
        if previous >= 0 and (kind in ("B", "I") or previous == last):
            ready.add(
                (
                    "I" if is_split[previous * count + microbatch] else "B",
                    previous,
                    microbatch,
                )
            )
    return tuple(tuple(row) for row in table)


schedules = valid_schedules  # named like the module ``ff.schedules``
