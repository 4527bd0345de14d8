"""Two views of one mesh: the finest axes that both are made of.

The ranks of one job may be counted in two ways: attention by data, context and model,
experts by expert_data and expert (Megatron's parallel folding). Each view numbers the
same ranks row by row, so an axis of one view is a stretch of finer ones:

    view        data=4                model=2
    folded      expert_data=2   expert=4
    finest      expert_data=2   data&expert=2   model=2

Here "data" is a name for ("expert_data", "data&expert"), and "expert" for
("data&expert", "model"). A :class:`~fsfunc.comm.mesh.Mesh` has the finest axes, and
knows the other names. So whatever asks which axes two things share, or what remains of
one beside the other, compares names, as on any mesh: gradients of experts are summed
over ``expert_data``, the ranks that hold the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from fsfunc.comm.mesh import Axis, axis_names, maybe_here

Names = dict[str, tuple[str, ...]]


def fold_axes(
    axes: Mapping[str, int], folded: Mapping[str, int]
) -> tuple[dict[str, int], Names]:
    """Returns the finest axes of two views, and the names for several of them.

    An axis that is in both views has one name. What is an axis of one view, whole, has
    its name, that of ``axes`` first; the overlap of two axes is named by both.

    Args:
        axes, folded: name to size, the first varying slowest, over the same ranks.

    Returns:
        The sizes of the finest axes, and, by name, the axes of every name that is none
        of these.

    Raises:
        ValueError: views of unlike numbers of ranks; one name for two sets of ranks;
            axes that overlap in no number of whole rows, as 2 x 3 ranks seen as 3 x 2.

    >>> fold_axes({"data": 2, "model": 2}, {"expert": 4})
    ({'data': 2, 'model': 2}, {'expert': ('data', 'model')})
    >>> fold_axes({"data": 4, "model": 2}, {"expert_data": 2, "expert": 4})[0]
    {'expert_data': 2, 'data&expert': 2, 'model': 2}
    """
    size, folded_size = math.prod(axes.values()), math.prod(folded.values())
    if size != folded_size:
        raise ValueError(
            f"folded={dict(folded)} counts {folded_size} ranks, and the mesh "
            f"{dict(axes)} has {size}: a folded view has all of them; an axis that is "
            "in both views, such as that of a pipeline, is named in both"
        )
    stretches, folded_stretches = _stretches(axes), _stretches(folded)
    for name in stretches.keys() & folded_stretches.keys():
        is_same = stretches[name] == folded_stretches[name]
        if not is_same and (axes[name], folded[name]) != (1, 1):
            raise ValueError(
                f'folded={dict(folded)}: "{name}" is an axis of {dict(axes)} too, and '
                "its ranks are others there: give it another name"
            )
    both = [*stretches.items(), *folded_stretches.items()]
    finest: dict[str, int] = {}
    names: Names = {}
    # Of one rank an axis has no overlap with others: it stays as it is.
    alone = {name: 1 for name, (start, stop) in both if start == stop}
    for start, stop in pairwise(sorted({cut for _, ends in both for cut in ends})):
        parents = [
            next(name for name, (a, b) in view.items() if a <= start < b)
            for view in (stretches, folded_stretches)
        ]
        if stop % start:
            raise ValueError(
                f'folded={dict(folded)}: its "{parents[1]}" and "{parents[0]}" of '
                f"{dict(axes)} overlap, but not in whole rows of ranks ({start} of "
                f"{stop}): choose sizes of which one divides the other"
            )
        whole = [name for name, ends in both if ends == (start, stop)]
        finest[atom := whole[0] if whole else "&".join(parents)] = stop // start
        for name in dict.fromkeys(parents):
            names[name] = (*names.get(name, ()), atom)
    names = {name: parts for name, parts in names.items() if name not in finest}
    finest |= alone
    if axes.keys() <= finest.keys():  # none was cut: in the order that was given
        finest = {**axes, **finest}
    return finest, names


def expand_here(axis: Axis) -> tuple[str, ...]:
    """Returns the axes that names stand for on the mesh of the rank that runs."""
    current = maybe_here()
    return axis_names(axis) if current is None else current.mesh.expand(axis)


def as_axis(names: tuple[str, ...]) -> Axis:
    """Returns one name as a string, several as they are: the form that costs least."""
    return names[0] if len(names) == 1 else names


def axis_text(axis: Axis) -> str:
    """Returns the names in ``axis`` as messages quote them.

    >>> print(axis_text(("data", "node")))
    "data", "node"
    """
    return ", ".join(f'"{name}"' for name in axis_names(axis))


def _stretches(axes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Returns for each axis the number of its slices, before it and after it.

    >>> _stretches({"data": 2, "model": 4})
    {'data': (1, 2), 'model': (2, 8)}
    """
    stretches, count = {}, 1
    for name, n in axes.items():
        stretches[name] = count, count * n
        count *= n
    return stretches
