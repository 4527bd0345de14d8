"""The ten commonest mistakes of sharding, as explanations of a leaf that differs.

Each rule compares what ranks have with what one device gives, in float64, and returns a
sentence that names the mistake, or "".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fsfunc.comm.backends.interrupts import reraising_interrupts
from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.testing.comparing import far
from fsfunc.testing.finite_field import exact_ratio, is_exact


@dataclass(frozen=True)
class Case:
    """A leaf that differs from that of one device.

    Args:
        expected: the leaf on one device.
        found: that of each rank, in rank order.
        mesh: that of the ranks.
        before: the leaf of the state that this one replaces.
        axes: the axes over which the batch is cut; ``rows``: the rows of each rank.
        alone: returns the leaf of one device for each rank's own rows.
    """

    expected: Tensor
    found: Sequence[Tensor]
    mesh: Mesh
    before: Tensor | None = None
    axes: tuple[str, ...] = ()
    rows: Sequence[int] = ()
    alone: Callable[[], Sequence[Tensor]] = tuple

    @cached_property
    @reraising_interrupts()
    def own(self) -> list[Tensor]:
        """The results of each rank's own rows; empty where there are none."""
        if not self.axes or self.mesh.axis_size(self.axes) == 1:
            return []
        try:
            found = [_wide(x) for x in self.alone()]
        except Exception:  # a diagnosis may fail; what it is of was found already
            return []
        return found if _all_like(found, self.expected) else []

    @property
    def sizes(self) -> list[tuple[Axis, int]]:
        """Each axis of several ranks with its size, and all of them together."""
        names = list(self.mesh.axes)
        axes: list[Axis] = [*names, tuple(names)] if len(names) > 1 else [*names]
        return [(a, n) for a in axes if (n := self.mesh.axis_size(a)) > 1]


def explain(case: Case) -> str:
    """A sentence on the first mistake of the list that gives what was found."""
    if case.expected.is_complex() or not _all_like(case.found, case.expected):
        return _another_shape(case)
    case = replace(
        case,
        expected=_wide(case.expected),
        found=[_wide(x) for x in case.found],
        before=None if case.before is None else _wide(case.before),
    )
    of_all = (_not_finite, _last_bits)
    differ = not all(near(x, case.found[0]) for x in case.found)
    for rule in (*of_all, _not_reduced) if differ else (*of_all, _of_own_rows, _of_one):
        if said := rule(case):
            return said
    return "no common mistake gives these values"


def _another_shape(case: Case) -> str:
    shape, found = tuple(case.expected.shape), tuple(case.found[0].shape)
    if len(shape) == len(found):
        for dim, (n, m) in enumerate(zip(shape, found, strict=True)):
            for axis, size in case.sizes:
                if m * size == n != m:
                    return (
                        f"dim {dim} is {size} times too short, as if it were a part: "
                        f"it was not gathered over {named(axis)}, or gathered along "
                        "another dim"
                    )
                if m == n * size != n:
                    return (
                        f"dim {dim} is {size} times too long, as if it were gathered "
                        f"over {named(axis)} once too often, or along another dim"
                    )
    return "the values have other shapes than on one device"


def _not_finite(case: Case) -> str:
    bad = [r for r, x in enumerate(case.found) if not bool(x.isfinite().all())]
    if not bad or not bool(case.expected.isfinite().all()):
        return ""
    return (
        f"not finite on {_ranks(bad)}, finite on one device: unwritten memory "
        "is read (under poison it holds NaN): a stale buffer, or padding; or "
        "something is divided by what an empty part, or a fully masked one, gives"
    )


def _last_bits(case: Case) -> str:
    if is_exact():
        return ""  # there nothing is rounded
    gaps = [float((x - case.expected).abs().amax()) for x in case.found if x.numel()]
    if not gaps or max(gaps) > 1e-5 * float(case.expected.abs().max()):
        return ""
    return (
        "it differs in the last bits: another order of sums, or products. Use "
        "integers as data, and powers of two of rows, ranks and microbatches; or "
        "pass tolerance="
    )


def _not_reduced(case: Case) -> str:
    """Explains ranks that differ from each other."""
    own, axes = case.own, named(case.axes)
    if own and all(near(x, y) for x, y in zip(case.found, own, strict=True)):
        return (
            "each rank has what its own rows alone give: nothing was reduced over "
            f"{axes}"
        )
    for axis, n in case.sizes:
        groups = {case.mesh.members(axis, r) for r in range(case.mesh.size)}
        sums = [torch.stack([case.found[r] for r in ranks]).sum(0) for ranks in groups]
        for name, by in (("pmean", n), ("psum", 1)):
            if all(near(x / by, case.expected) for x in sums):
                return (
                    f"the {name[1:]} over {named(axis)} of what the ranks have is "
                    f"right: a {name} is missing"
                )
    wrong = [r for r, x in enumerate(case.found) if not near(x, case.expected)] or [0]
    if lonely := [r for r in wrong if own and near(case.found[r], own[r])]:
        return (
            f"{_ranks(lonely)} {'has' if len(lonely) == 1 else 'have each'} what its "
            f"own rows alone give: left out of a reduction over {axes}"
        )
    said = _of_one(replace(case, found=[case.found[wrong[0]]]))
    return f"on {_ranks(wrong)}: {said}" if said else (
        "ranks differ where the value is claimed to be one: something of a rank's own "
        "(rows, a part, a random draw) came in after the last reduction, or was never "
        "reduced"
    )  # fmt: skip


def _of_own_rows(case: Case) -> str:
    """Explains one wrong value on all ranks by what each one's rows give."""
    if not case.own:
        return ""
    found, total = case.found[0], torch.stack(case.own).sum(0)
    alone = [r for r, x in enumerate(case.own) if near(x, found)]
    if alone and len(alone) < len(case.own):
        return (
            f"it is what the rows of rank {alone[0]} alone give: the others' are left "
            "out"
        )
    if not near(total / len(case.own), found) or near(total, case.expected):
        return ""
    if len(set(case.rows)) > 1:
        return (
            f"it is the mean of means of ranks with {str([*case.rows])[1:-1]} rows: "
            "unequal parts have equal weights; weigh each by its rows (ff.Weighted)"
        )
    return (
        "it is the mean of what each rank makes of its own rows: something that is "
        "not linear (a clip, a norm, a softmax, a maximum) ran before the "
        "reduction, or on a part; or each rank drew, or numbered, its rows as if "
        "they were the first"
    )


def _of_one(case: Case) -> str:
    """Explains a wrong value by the right one."""
    found, expected, before = case.found[0], case.expected, case.before
    if not bool(found.any()) and bool(expected.any()):
        return (
            "it is zero: lost on its way (a detached tensor, one captured by closure, "
            "a custom backward that returns nothing), or never summed"
        )
    if before is not None and before.shape == found.shape:
        if near(found, before):
            return "it is what the call was given: never updated, or an old copy"
        if by := ratio(found - before, expected - before):
            return _scaled(by, "its change", case)
    if by := ratio(found, expected):
        return _scaled(by, "it", case)
    same = near(found.flatten().sort().values, expected.flatten().sort().values)
    if same and found.numel() > 1:
        return (
            "it has the right elements in another order: parts joined along another "
            "dim, or in another order of ranks"
        )
    return ""


def _scaled(by: float, what: str, case: Case) -> str:
    """Explains a value that is so many times the right one."""
    for axis, n in case.sizes:
        if math.isclose(by, n, rel_tol=1e-6):
            return (
                f"{what} is {n} times too large, the size of {named(axis)}: a sum in "
                "the place of a mean, a part counted on every rank, or reduced twice"
            )
        if math.isclose(by * n, 1, rel_tol=1e-6):
            return (
                f"{what} is {n} times too small, the size of {named(axis)}: a mean in "
                "the place of a sum, or divided twice"
            )
    return (
        f"{what} is {by:.6g} times that of one device: the wrong sign, or microbatches "
        "accumulated without division, or divided once too often"
    )


def _wide(x: Tensor) -> Tensor:
    return x.detach().double()


def _all_like(xs: Sequence[Tensor], like: Tensor) -> bool:
    return bool(xs) and all(x.shape == like.shape for x in xs)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def near(a: Tensor, b: Tensor) -> bool:
    """True where two tensors are equal but for rounding."""
    return a.shape == b.shape and not bool(far(a, b, 1e-6).any())


def ratio(a: Tensor, b: Tensor) -> float | None:
    """k, where a = k b, and k is neither 0 nor 1."""
    if not a.numel() or not bool(b.any()) or not bool(a.any()):
        return None
    if is_exact():
        return exact_ratio(a, b)
    at = int(b.abs().argmax())
    k = float(a.flatten()[at] / b.flatten()[at])
    scale = float(a.abs().max())  # near to zero all is near
    return k if k not in (0.0, 1.0) and near(a / scale, k * b / scale) else None


def named(axis: Axis) -> str:
    """An axis as messages show it."""
    names = (axis,) if isinstance(axis, str) else axis
    return ", ".join(f'"{name}"' for name in names)
