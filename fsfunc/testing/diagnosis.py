"""Which of the classic mistakes of sharding would explain a leaf that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fsfunc.comm.mesh import Mesh
from fsfunc.testing.mistakes import Shares, multiple, named, near, over_axes, said_of

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
        axes: over which the batch is cut; ``rows``: how many each rank has.
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
            return list(self.alone())
        except Exception:  # a diagnosis may fail; what it is of was found already
            return []

    @cached_property
    def own_alike(self) -> list[Tensor]:
        """The same, where it has the leaf's shape."""
        return self.own if _all_like(self.own, self.expected) else []

    @cached_property
    def alike(self) -> bool:
        """Whether all ranks have the same."""
        return all(near(x, self.found[0]) for x in self.found)

    @cached_property
    def shares(self) -> Shares:
        """Who has which rows of a batch."""
        return Shares(self.mesh, self.axes, tuple(self.rows))


def _all_like(xs: Sequence[Tensor], like: Tensor) -> bool:
    return bool(xs) and all(x.shape == like.shape for x in xs)


def explain(case: Case) -> str:
    """A sentence on what would give these values, or on where they differ.

    The first mistake of a list that gives exactly what was found.
    """
    if case.expected.is_complex() or not _all_like(case.found, case.expected):
        return _shapes(case)
    given = {k: x for k, x in case.given.items() if not x.is_complex()}
    case = replace(
        case,
        expected=_wide(case.expected),
        found=[_wide(x) for x in case.found],
        given={path: _wide(x) for path, x in given.items()},
        before=None if case.before is None else _wide(case.before),
        alone=lambda alone=case.alone: [_wide(x) for x in alone()],
    )
    for said in (_nothing_finite, _last_bits, _unlike_ranks, _like_ranks):
        if found := next(said(case), ""):
            return found
    return "no common mistake gives these values"


def _wide(x: Tensor) -> Tensor:
    return x.detach().double()


def _shapes(case: Case) -> str:
    """Ranks have other shapes than one device."""
    shape, found = tuple(case.expected.shape), tuple(case.found[0].shape)
    if len(shape) == len(found):
        for dim, (n, m) in enumerate(zip(shape, found, strict=True)):
            for axis in over_axes(case.mesh):
                size = case.mesh.axis_size(axis)
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
    if case.found[0].numel() == case.expected.numel():
        return (
            "it has as many elements, in another shape: one dim was cut where another "
            "is to be, or parts were joined along another"
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
    if not case.expected.numel():
        return
    gaps = [(x - case.expected).abs().max() for x in case.found]
    if bool(max(gaps) <= 1e-5 * case.expected.abs().max()):
        yield (
            "it differs in the last bits: another order of sums, or products. Use "
            "integers as data, and powers of two of rows, ranks and microbatches; or "
            "pass tolerance="
        )


def _unlike_ranks(case: Case) -> Iterator[str]:
    """Ranks differ from each other."""
    if case.alike:
        return
    expected, found, own = case.expected, case.found, case.own_alike
    over = _varies(case)
    if own and all(near(x, y) for x, y in zip(found, own, strict=True)):
        yield (
            "each rank has what its own rows alone give: nothing was reduced over "
            f"{named(case.axes)}"
        )
    for axis in over_axes(case.mesh):
        n = case.mesh.axis_size(axis)
        groups = {case.mesh.members(axis, r) for r in range(case.mesh.size)}
        sums = [torch.stack([found[r] for r in ranks]).sum(0) for ranks in groups]
        for name, by in (("pmean", n), ("psum", 1)):
            if n > 1 and all(near(x / by, expected) for x in sums):
                yield (
                    f"the {name[1:]} over {named(axis)} of what the ranks have is "
                    f"right: a {name} is missing"
                )
    wrong = [r for r, x in enumerate(found) if not near(x, expected)]
    if own and (some := [r for r in wrong if near(found[r], own[r])]):
        yield (
            f"{_ranks(some)} {'has' if len(some) == 1 else 'have each'} what its own "
            f"rows alone give: left out of a reduction over {named(case.axes)}"
        )
    for said in said_of(found[wrong[0]], expected, case.before, case.shares):
        yield f"on {_ranks(wrong)}: {said}"
    yield (
        f"ranks differ along {over}, where the value is claimed to be one: something "
        "of a rank's own (rows, a part, a random draw) came in after the last "
        "reduction, or was never reduced"
    )


def _like_ranks(case: Case) -> Iterator[str]:
    """All ranks have the same wrong value."""
    expected, found, own = case.expected, case.found[0], case.own_alike
    if not case.alike:
        return
    if own:
        yield from _of_own_rows(case, found, own)
    elif _joined(case, found):
        yield (
            "each rank's rows are what they give alone: something that is of the whole "
            "batch (statistics, a maximum, other rows) saw the rank's own rows only"
        )
    yield from said_of(found, expected, case.before, case.shares, parts=False)
    for path, old in case.given.items():
        by = multiple(found - expected, old)
        if by is not None:
            times = "once" if abs(by) == 1 else f"{abs(by):g} times"
            how = "too often" if by > 0 else "too seldom"
            yield f"{path!r} is in it {times} {how}: as if added on every rank"
    yield from said_of(found, expected, case.before, case.shares)


def _of_own_rows(case: Case, found: Tensor, own: list[Tensor]) -> Iterator[str]:
    n, total = len(own), torch.stack(own).sum(0)
    one = [r for r, x in enumerate(own) if near(x, found)]
    if one and len(one) < n:
        yield (
            f"it is what the rows of rank {one[0]} alone give: the others' are left out"
        )
    if near(total / n, found) and not near(total, case.expected):
        if len(set(case.rows)) > 1:
            yield (
                f"it is the mean of the means of ranks with {case.shares} rows: "
                "unequal parts are weighed alike; weigh each by its rows (ff.Weighted)"
            )
        yield (
            "it is the mean of what each rank makes of its own rows: something that is "
            "not linear (a clip, a norm, a softmax, a maximum) ran before the "
            "reduction, or on a part; or each rank drew, or numbered, its rows as if "
            "they were the first"
        )
    if near(total, found) and not near(total / n, case.expected):
        yield "it is the sum over ranks of what each one's rows alone give"


def _joined(case: Case, found: Tensor) -> bool:
    own = case.own
    if not own or not found.ndim or any(x.ndim != found.ndim for x in own):
        return False
    if any(x.shape[1:] != found.shape[1:] for x in own):
        return False
    return near(torch.cat(own), found)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _varies(case: Case) -> str:
    """Along which axes ranks have unlike values."""
    mesh, found = case.mesh, case.found
    unlike = [
        axis
        for axis in mesh.axes
        if any(
            not near(found[r], found[mesh.members(axis, r)[0]])
            for r in range(mesh.size)
        )
    ]
    return named(tuple(unlike))
