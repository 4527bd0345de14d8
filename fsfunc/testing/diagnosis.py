"""Which of the classic mistakes of sharding would explain a leaf that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fsfunc.comm.mesh import Mesh
from fsfunc.testing.comparing import far

__all__ = ["Case", "explain"]


@dataclass(frozen=True)
class Case:
    """A leaf that is not that of one device.

    Args:
        expected: what one device gives.
        found: what each rank gives, in rank order.
        mesh: that of the ranks.
        given: the leaves that the call was given, by path: the state's.
        before: the one of them in whose place this one is returned.
        rows: over which axes the batch is cut, and how many rows each rank has.
        alone: what one device makes of each rank's own rows; asked for late.
    """

    expected: Tensor
    found: Sequence[Tensor]
    mesh: Mesh
    given: Mapping[str, Tensor] = field(default_factory=dict)
    before: Tensor | None = None
    axes: tuple[str, ...] = ()
    rows: Sequence[int] = ()
    alone: Callable[[], Sequence[Tensor]] = tuple

    @cached_property
    def own(self) -> list[Tensor]:
        """What each rank's own rows give, or nothing where that cannot be said."""
        if not self.axes or self.mesh.axis_size(self.axes) == 1:
            return []
        try:
            own = list(self.alone())
        except Exception:  # a diagnosis may fail; what it is of was found already
            return []
        return own if _all_like(own, self.expected) else []

    @cached_property
    def alike(self) -> bool:
        """Whether all ranks have the same."""
        return all(near(x, self.found[0]) for x in self.found)


def near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and not bool(far(a, b, 1e-6).any())


def _all_like(xs: Sequence[Tensor], like: Tensor) -> bool:
    return bool(xs) and all(x.shape == like.shape for x in xs)


def explain(case: Case) -> str:
    """A sentence on what would give these values, or on where they differ.

    The first mistake of a list that gives exactly what was found.
    """
    if case.expected.is_complex() or not _all_like(case.found, case.expected):
        return _shapes(case)
    wide = [x.detach().double() for x in case.found]
    given = {k: x for k, x in case.given.items() if not x.is_complex()}
    case = replace(
        case,
        expected=case.expected.detach().double(),
        found=wide,
        given={path: x.detach().double() for path, x in given.items()},
        before=None if case.before is None else case.before.detach().double(),
        alone=lambda alone=case.alone: [x.detach().double() for x in alone()],
    )
    for said in (_nothing_finite, _last_bits, _unlike_ranks, _like_ranks, _where):
        if found := next(said(case), ""):
            return found
    return "no common mistake gives these values"


def _shapes(case: Case) -> str:
    """Ranks have other shapes than one device."""
    shape, found = tuple(case.expected.shape), tuple(case.found[0].shape)
    if len(shape) == len(found):
        for dim, (n, m) in enumerate(zip(shape, found, strict=True)):
            for axis in _axes(case.mesh):
                size = case.mesh.axis_size(axis)
                if m * size == n:
                    return (
                        f"dim {dim} is {size} times too short, as if it were a part: "
                        f"it was not gathered over {_named(axis)}, or gathered along "
                        "another dim"
                    )
                if m == n * size:
                    return (
                        f"dim {dim} is {size} times too long, as if it were gathered "
                        f"over {_named(axis)} once too often, or along another dim"
                    )
    return "the values have other shapes than on one device"


def _nothing_finite(case: Case) -> Iterator[str]:
    if not bool(case.expected.isfinite().all()):
        return
    bad = [r for r, x in enumerate(case.found) if not bool(x.isfinite().all())]
    if bad:
        yield (
            f"not finite on {_ranks(bad)}, finite on one device: memory that nobody "
            "wrote is read (under poison it holds NaN): a stale buffer, or padding; or "
            "something is divided by what an empty part, or a fully masked one, gives"
        )


def _last_bits(case: Case) -> Iterator[str]:
    scale = case.expected.abs().max() if case.expected.numel() else torch.zeros(())
    gaps = [(x - case.expected).abs().max() for x in case.found if x.numel()]
    if gaps and bool(max(gaps) <= 1e-5 * scale):
        yield (
            "it differs in the last bits: another order of sums, or products. Use "
            "integers as data, or pass tolerance="
        )


def _unlike_ranks(case: Case) -> Iterator[str]:
    """Ranks differ from each other."""
    if case.alike:
        return
    expected, found, own = case.expected, case.found, case.own
    over = _varies(case)
    if own and all(near(x, y) for x, y in zip(found, own, strict=True)):
        yield (
            "each rank has what its own rows alone give: nothing was reduced over "
            f"{_named(case.axes)}"
        )
    for axis in _axes(case.mesh):
        groups = {case.mesh.members(axis, r) for r in range(case.mesh.size)}
        for name, power in (("mean", 1), ("sum", 0)):
            n = case.mesh.axis_size(axis) ** power
            sums = [
                torch.stack([found[r] for r in ranks]).sum(0) / n for ranks in groups
            ]
            if n and all(near(x, expected) for x in sums):
                yield (
                    f"the {name} over {_named(axis)} of what the ranks have is right: "
                    f"a p{name} is missing"
                    + (" or came before the last local step" if power else "")
                )
    parts = [bool(near(x, expected)) for x in found]
    wrong = [r for r, right in enumerate(parts) if not right]
    if own and any(near(found[r], own[r]) for r in wrong):
        some = [r for r in wrong if near(found[r], own[r])]
        yield f"{_ranks(some)} have what their own rows alone give: left out of a sum"
    bad = found[wrong[0]]
    for said in _like_one(case, bad):
        yield f"on {_ranks(wrong)} alone: {said}"
    if 0 < len(wrong) < len(found):
        yield f"only {_ranks(wrong)} are wrong: the ranks differ along {over}"
    yield (
        f"the ranks differ along {over}, where the value is claimed to be one: "
        "something of a rank's own (rows, a part, a random draw) came in after the "
        "last reduction, or was never reduced"
    )


def _like_ranks(case: Case) -> Iterator[str]:
    """All ranks have the same wrong value."""
    if not case.alike:
        return
    expected, found, own = case.expected, case.found[0], case.own
    yield from _like_one(case, found)
    n = len(own)
    if n > 1:
        total = torch.stack(own).sum(0)
        if near(total, found):
            yield "it is the sum over ranks of what each one's rows alone give"
        if near(total / n, found):
            if len(set(case.rows)) > 1:
                yield (
                    f"it is the mean of the means of ranks with {_counts(case)} rows"
                    ": unequal parts are weighed alike; weigh each by its rows "
                    "(ff.Weighted)"
                )
            yield (
                "it is the mean of what each rank makes of its own rows: something "
                "that is not linear (a clip, a norm, a softmax, a maximum) ran before "
                "the reduction, or on a part"
            )
        for r, x in enumerate(own):
            if near(x, found):
                yield (
                    f"it is what the rows of rank {r} alone give: the others' are "
                    "left out"
                )
    for path, old in case.given.items():
        by = _multiple(found - expected, old)
        if by is not None:
            times = "once" if abs(by) == 1 else f"{abs(by):g} times"
            how = "too often" if by > 0 else "too seldom"
            yield f"{path!r} is in it {times} {how}: as if added on every rank"


def _like_one(case: Case, found: Tensor) -> Iterator[str]:
    """What one wrong value is, beside the right one."""
    expected, old = case.expected, case.before
    if not bool(found.any()) and bool(expected.any()):
        yield (
            "it is zero: lost on its way (a detached tensor, one captured by closure, "
            "a custom backward that returns nothing), or never summed"
        )
    if old is not None and near(found, old) and not near(expected, old):
        yield "it is what the call was given: never updated, or an old copy is returned"
    if (by := _ratio(found, expected)) is not None:
        yield from _times(case, by, "it")
    if old is not None and (by := _ratio(found - old, expected - old)) is not None:
        yield from _times(case, by, "its change")
    low = expected.to(torch.bfloat16).double()
    gap = (found - expected).abs().max()
    if bool(gap > 0) and expected.numel():
        scale = expected.abs().max()
        if near(found, low) or near(found, expected.half().double()):
            yield "it is rounded to 16 bits: cast, or reduced, in bfloat16 or float16"
        coarse = near(found, found.to(torch.bfloat16).double())
        if bool(gap <= 0.05 * scale) and coarse and not near(expected, low):
            yield "it has 8 bits of precision: reduced, or added up, in bfloat16"
    if found.ndim == 2 and near(found, expected.T):
        yield "it is transposed: cut, or joined, along the other dim"
    same = near(found.flatten().sort().values, expected.flatten().sort().values)
    if same and found.numel() > 1:
        yield (
            "it has the right elements in another order: parts joined along another "
            "dim, or in another order of ranks"
        )


def _times(case: Case, by: float, what: str) -> Iterator[str]:
    """Why a value would be so many times the right one."""
    for axis in _axes(case.mesh):
        n = case.mesh.axis_size(axis)
        if n > 1 and math.isclose(by, n, rel_tol=1e-6):
            yield (
                f"{what} is {n} times too large, the size of {_named(axis)}: a sum in "
                "the place of a mean, a part counted on every rank, or reduced twice"
            )
        if n > 1 and math.isclose(by * n, 1, rel_tol=1e-6):
            yield (
                f"{what} is {n} times too small, the size of {_named(axis)}: a mean in "
                "the place of a sum, or divided twice"
            )
    if math.isclose(by, -1, rel_tol=1e-6):
        yield f"{what} has the wrong sign"
    elif _whole(by):
        yield (
            f"{what} is {by:.0f} times too large: counted {by:.0f} times, or "
            "accumulated without division"
        )
    elif _whole(1 / by):
        yield f"{what} is {1 / by:.0f} times too small: divided once too often"
    elif case.expected.numel() > 1:
        yield f"{what} is {by:.6g} times that of one device: scaled otherwise"


def _whole(x: float) -> bool:
    return x > 1 and math.isclose(x, round(x), rel_tol=1e-6)


def _where(case: Case) -> Iterator[str]:
    """Which part of the leaf is wrong."""
    apart = far(case.found[0], case.expected, 1e-6)
    for dim, n in enumerate(apart.shape):
        others = [d for d in range(apart.ndim) if d != dim]
        rows = apart.any(dim=others) if others else apart
        wrong = rows.nonzero().flatten().tolist()
        if 0 < len(wrong) < n and wrong == list(range(wrong[0], wrong[-1] + 1)):
            yield (
                f"only elements {wrong[0]}:{wrong[-1] + 1} of dim {dim} are wrong, on "
                "every rank"
            )


def _ratio(a: Tensor, b: Tensor) -> float | None:
    """k, where a = k b, and neither is zero."""
    if not a.numel() or not bool(b.any()) or not bool(a.any()):
        return None
    at = int(b.abs().argmax())
    k = float(a.flatten()[at] / b.flatten()[at])
    return k if k not in (0.0, 1.0) and near(a, k * b) else None


def _multiple(delta: Tensor, x: Tensor) -> float | None:
    """k, where delta = k x once x is repeated, and neither is zero."""
    if x.ndim > delta.ndim or not x.numel():
        return None
    try:
        wide = x.expand_as(delta)
    except RuntimeError:
        return None
    if near(delta, wide) and bool(delta.any()):
        return 1.0
    return _ratio(delta, wide)


def _axes(mesh: Mesh) -> list[str | tuple[str, ...]]:
    names = list(mesh.axes)
    return [*names, tuple(names)] if len(names) > 1 else list(names)


def _named(axis: str | tuple[str, ...]) -> str:
    names = (axis,) if isinstance(axis, str) else axis
    return ", ".join(f'"{name}"' for name in names)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _counts(case: Case) -> str:
    return ", ".join(map(str, case.rows))


def _varies(case: Case) -> str:
    """Along which axes ranks have unlike values."""
    mesh, found = case.mesh, case.found
    names = [
        axis
        for axis in mesh.axes
        if any(
            not near(found[r], found[mesh.members(axis, r)[0]])
            for r in range(mesh.size)
        )
    ]
    return _named(tuple(names))
