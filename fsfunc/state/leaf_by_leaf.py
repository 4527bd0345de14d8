"""``whole_leaves``: a tree's tensors whole, one after another, in bounded memory.

An inference engine, or a file of another library, wants (name, whole tensor), one at a
time. `collect_leaves` says what there is, without a message; `stream` puts one leaf
together when it is asked for the next (`whole_tensors`).

A gather needs all ranks, and a consumer may stop after any leaf. So before each leaf
the ranks tell each other, in 16 bytes beside every ledger, whether they go on. Nobody
waits for a rank that has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import label
from fsfunc.comm.backends.baton import Aborted
from fsfunc.comm.comparison import RanksDiffer, Section, agree, run_everywhere
from fsfunc.comm.descriptions import checksums
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import maybe_here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import frame
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import Own, describe_tensor
from fsfunc.sharded.plain_leaves import lay_leaf, placement_of
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.state.layout_rules import check_distinct
from fsfunc.state.values import check_mesh, check_real, mesh_for
from fsfunc.state.whole_tensors import check_only, gather_whole
from fsfunc.tree.types import PyTree

Rename = Callable[[str], str | None]
WholeLeaves = Generator[tuple[str, Tensor], None, None]


class NamedLeaf(NamedTuple):
    """A tensor leaf of a tree, under the name that it is to have.

    Args:
        path: where it lies in the tree.
        dtype: that of the whole tensor, after a cast.
    """

    name: str
    path: str
    leaf: Sharded | Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


@api_boundary
def whole_leaves(
    t: PyTree,
    *,
    to: torch.device | str | None = None,
    only: int | None = None,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
) -> WholeLeaves:
    """Returns an iterator of (name, whole tensor), of which one is made at a time.

    It is `unshard` for what takes one tensor after another, such as the
    ``load_weights`` of an inference engine. The tensors are no views of the state:
    training may go on between two of them, and of a donated state too once the last
    one is taken. Names are paths; those of ``ff.from_module`` are the module's own.

    Every rank calls it and runs the iterator to its end, those that get nothing by
    ``for _ in leaves: pass``. A ``break`` out of a ``for`` over the call, or
    ``close()``, stops the others too. With ``only`` their iterators end. Without, each
    rank must stop after the same leaf, and one that asks for another raises.

    Args:
        t: any tree, such as ``state.params``. Leaves that are no tensors are left out.
        to: the device of the tensors.
        only: the one rank that gets them; for the others the iterator has nothing.
        dtype: what floating leaves are cast to, before they are sent.
        rename: returns a leaf's name, of its path; None leaves the leaf out.

    Yields:
        in the tree's order each leaf under its name, those that are tied under each of
        theirs.

    Raises (on every rank, before anything is sent):
        ValueError: a leaf that is each rank's own, of which there is no whole, or that
            has no values; two leaves of one name; no such rank, or floating dtype.
        RanksDiffer: the ranks have other trees, names or options, or plain tensors
            that nobody has laid out and that differ; a rank stopped, and others go on.
        RuntimeError: a leaf that was donated; inside of a step, where `unshard` is for
            that.

    Cost: in each ledger that of ``ff.unshard(t, only=only)``, in the dtype that is
    sent; beside it 16 bytes a leaf. Memory, beside the state and what the caller keeps
    (a ``for`` keeps the leaf before, too): twice the leaf that is made and this rank's
    part of it. On the one rank of ``only`` once the leaf if it is not split along a
    dim, and on the others their part.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> unit = ff.unit(lambda p, x: x @ p["w"] + p["b"])
    >>> def main():
    ...     f = ff.shard(lambda p, x: unit(p, x).sum(), mesh, "data")
    ...     params = {"w": torch.ones(3, 2), "b": torch.zeros(2)}
    ...     params = ff.place(f, params, torch.ones(1, 3))
    ...     leaves = ff.whole_leaves(params, only=0, rename="model.{}".format)
    ...     return [(name, tuple(x.shape)) for name, x in leaves]
    >>> ff.spmd(main, mesh)()
    [[('model.b', (2,)), ('model.w', (3, 2))], []]
    """
    group = ranks_in_sight("unshard")
    named = run_alone(group, lambda: collect_leaves(t, "whole_leaves", rename, dtype))
    return stream(list(named.values()), group, to=to, only=only)


def ranks_in_sight(verb: str) -> RankGroup | None:
    """Returns the group of all ranks; None where there is no other rank.

    Raises:
        RuntimeError: the mesh holds no values of its own; inside of a step.
    """
    here = mesh_for(verb)
    if frame().handlers or frame().tracer is not None:
        raise RuntimeError(
            f"cannot {verb} leaves inside of a step, which may run in parts and again: "
            "do it between two calls of the step; inside of one ff.unshard(t) returns "
            "the whole tensors"
        )
    if here is None or here.mesh.size == 1:
        return None
    return get_group(tuple(here.mesh.axes), here)


def run_alone(
    group: RankGroup | None, action: Callable[[], Mapping[str, NamedLeaf]]
) -> Mapping[str, NamedLeaf]:
    """Runs a check on each rank, and raises any rank's error on all; in no ledger."""
    with silence(), label("", "whole_leaves"):
        return run_everywhere(action, group)


def collect_leaves(
    t: PyTree, function: str, rename: Rename | None, dtype: torch.dtype | None
) -> dict[str, NamedLeaf]:
    """Returns the tensor leaves of ``t`` by name, checked as far as one rank can.

    Args: as `whole_leaves` has them.
        function: the public function that was given them, for messages.
    """
    check_floating(function, dtype)
    refuse_unusable(t)
    paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
    check_distinct(paths, "the tree")
    tensors = {
        path: x
        for path, x in zip(paths, leaves, strict=True)
        if isinstance(x, Sharded | Tensor)
    }
    named: dict[str, NamedLeaf] = {}
    for name, path in name_leaves(tensors, function, rename).items():
        x = tensors[path]
        if isinstance(own := placement_of(x), Own):
            raise rank_local_error(function, path, str(own))
        if isinstance(x, Sharded):
            check_mesh(x, maybe_here(), "unshard")
        part = x.local if isinstance(x, Sharded) else x
        check_real(path, part, "unshard")
        cast = dtype if part.dtype.is_floating_point else None
        named[name] = NamedLeaf(name, path, x, tuple(x.shape), cast or part.dtype)
    return named


def check_floating(function: str, dtype: torch.dtype | None) -> None:
    """Raises ValueError unless floating leaves can be cast to ``dtype``, or None."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"{function}(..., dtype={dtype}): floating leaves are cast to a floating "
            "dtype, such as torch.bfloat16"
        )


def name_leaves(
    paths: Iterable[str], function: str, rename: Rename | None
) -> dict[str, str]:
    """Returns the path of each leaf that has a name, by name.

    Raises:
        ValueError: two leaves of one name.
    """
    paths_by_name: dict[str, str] = {}
    for path in paths:
        if (name := path if rename is None else rename(path)) is None:
            continue
        if name in paths_by_name:
            raise ValueError(
                f"{function}: {paths_by_name[name]!r} and {path!r} would both be "
                f"called {name!r}; rename= gives each leaf a name of its own, or None"
            )
        paths_by_name[name] = path
    return paths_by_name


def rank_local_error(function: str, path: str, kind: str) -> ValueError:
    """Returns the error that is raised of a leaf without a whole tensor."""
    return ValueError(
        f"{function}: {path!r} is each rank's own ({kind}), so that there is no whole "
        "tensor of it; leave it out by rename=, or ff.pmean it in a step"
    )


def stream(
    leaves: list[NamedLeaf],
    group: RankGroup | None,
    *,
    to: torch.device | str | None,
    only: int | None,
) -> WholeLeaves:
    """Compares what ranks have, and returns the iterator of `whole_leaves`.

    Args:
        leaves: as `collect_leaves` returns them, in the order that is wanted.
        group: what `ranks_in_sight` returned.
    """
    check_only("whole_leaves", only)
    if group is not None:
        agree(group, Section(_TITLE, _lines(leaves, only), _ADVICE), waits=True)
    generator = _generate(leaves, group, to, only)
    next(generator)  # so that `close` reaches it, also before the first leaf is asked
    return generator


_TITLE = "the ranks unshard other leaves, or under other names or options"
_ADVICE = (
    "Every rank gives the same leaves. A plain tensor that differs is each rank's own: "
    "leave it out by rename=, or lay it out with ff.place or ff.init_state"
)


def _lines(leaves: list[NamedLeaf], only: int | None) -> list[tuple[str, str]]:
    """Returns a line for each leaf, which ranks compare."""
    # Of plain tensors only these are not known to be one value on all ranks.
    unknown = [
        x.leaf
        for x in leaves
        if not isinstance(x.leaf, Sharded) and placement_of(x.leaf) is None
    ]
    sums = {id(x): n for x, n in zip(unknown, checksums(unknown), strict=True)}
    lines = [("only=", str(only))]
    for x in leaves:
        value = f" of checksum {n:x}" if (n := sums.get(id(x.leaf))) is not None else ""
        axes = x.leaf.layout.axes if isinstance(x.leaf, Sharded) else ()
        over = f" over {', '.join(axes)}" if axes else ""
        lines.append((repr(x.name), describe_tensor(x.shape, x.dtype) + over + value))
    return lines


def _generate(
    leaves: list[NamedLeaf],
    group: RankGroup | None,
    to: torch.device | str | None,
    only: int | None,
) -> WholeLeaves:
    count = 0  # of the leaves that were made
    try:
        yield "", torch.empty(0)  # to `stream`
        for x in leaves:
            if not _all_go_on(group, only, count, leaves):
                return
            whole, count = _make_whole(x, to, only), count + 1
            if whole is not None:
                yield x.name, whole
            # What the caller does not keep is gone before the next leaf is made.
            del whole
    except GeneratorExit:
        if count < len(leaves):
            _tell_stopped(group)
        raise


_GOES_ON, _HAS_STOPPED = b"goes on".ljust(16), b"has stopped".ljust(16)


def _all_go_on(
    group: RankGroup | None, only: int | None, count: int, leaves: list[NamedLeaf]
) -> bool:
    """Returns whether all ranks ask for the next leaf, of which ``count`` were made.

    Raises:
        RanksDiffer: another rank does not, and its consumer is not the one that counts.
    """
    if group is None:
        return True
    (flags,) = agree(group, _GOES_ON, waits=True)
    stopped = [r for r, f in zip(group.ranks, flags, strict=True) if f == _HAS_STOPPED]
    if only in stopped:
        return False
    if stopped:
        some = ", ".join(map(str, stopped[:8])) + (", ..." if len(stopped) > 8 else "")
        raise RanksDiffer(
            f"rank{'s' if len(stopped) > 1 else ''} {some} stopped after {count} of "
            f"{len(leaves)} leaves, and rank {group.rank} asks for "
            f"{leaves[count].name!r}: all ranks take the same number of leaves; or "
            "with only= one rank gets them, and where it stops all do"
        )
    return True


def _tell_stopped(group: RankGroup | None) -> None:
    """Takes part in the next question of the others, if they ask it, as one that stops.

    Where the others cannot be reached the run has failed, which each rank raises by
    itself: a generator that is closed could not.
    """
    if group is not None:
        with suppress(Exception, Aborted):
            agree(group, _HAS_STOPPED, waits=True)


@torch.no_grad()
def _make_whole(
    x: NamedLeaf, to: torch.device | str | None, only: int | None
) -> Tensor | None:
    """Returns a leaf whole, in memory of its own; None on other ranks than ``only``."""
    if isinstance(x.leaf, Sharded):
        with label("", "whole_leaves"):
            whole = gather_whole(x.leaf.layout, x.leaf.local.to(x.dtype), only)
        if whole is None:
            return None
        whole = whole if to is None else whole.to(to)
    else:
        rank_here = maybe_here()
        if only is not None and rank_here is not None and only != rank_here.rank:
            return None
        whole = x.leaf.detach().to(to, x.dtype, copy=True)
    lay_leaf(whole)  # one value on all ranks
    return whole
