"""The ten commonest mistakes of sharding, as explanations of a leaf that differs.

``assert_equals_one_device`` asks ``explain`` about the first leaf that differs. Each
rule below compares the ranks' values with that of one device, in float64, and returns a
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
from fsfunc.testing.comparing import differing_elements
from fsfunc.testing.finite_field import exact_ratio, is_exact


@dataclass(frozen=True)
class Case:
    """A leaf that differs from that of one device.

    Args:
        expected: the leaf on one device.
        actual: the leaf on each rank, in rank order.
        mesh: the mesh of the ranks.
        before: the leaf of the state that this one replaces.
        axes: the axes over which the batch is cut.
        rows: the number of rows of each rank.
        run_on_rows: returns, for each rank, the leaf that one device makes of its rows.
    """

    expected: Tensor
    actual: Sequence[Tensor]
    mesh: Mesh
    before: Tensor | None = None
    axes: tuple[str, ...] = ()
    rows: Sequence[int] = ()
    run_on_rows: Callable[[], Sequence[Tensor]] = tuple

    @cached_property
    @reraising_interrupts()
    def results_alone(self) -> list[Tensor]:
        """What one device makes of each rank's rows; empty if that is not known."""
        if not self.axes or self.mesh.axis_size(self.axes) == 1:
            return []
        try:
            results = [_to_float64(x) for x in self.run_on_rows()]
        except Exception:  # a diagnosis may fail: the difference is reported anyway
            return []
        return results if _all_have_shape(results, self.expected) else []

    @property
    def sizes(self) -> list[tuple[Axis, int]]:
        """Each axis of several ranks with its size, and all of them together."""
        names = list(self.mesh.axes)
        axes: list[Axis] = [*names, tuple(names)] if len(names) > 1 else [*names]
        return [
            (axis, size) for axis in axes if (size := self.mesh.axis_size(axis)) > 1
        ]


def explain(case: Case) -> str:
    """Returns a sentence on the first mistake in the list that gives these values."""
    if case.expected.is_complex() or not _all_have_shape(case.actual, case.expected):
        return _explain_shape(case)
    case = replace(
        case,
        expected=_to_float64(case.expected),
        actual=[_to_float64(x) for x in case.actual],
        before=None if case.before is None else _to_float64(case.before),
    )
    always = (_explain_not_finite, _explain_rounding)
    ranks_differ = not all(near(x, case.actual[0]) for x in case.actual)
    for rule in (
        (*always, _explain_unlike_ranks)
        if ranks_differ
        else (*always, _explain_by_own_rows, _explain_by_expected)
    ):
        if explanation := rule(case):
            return explanation
    return "no common mistake gives these values"


def _explain_shape(case: Case) -> str:
    """Explains a shape by a gather that is missing, or one too many."""
    expected_shape = tuple(case.expected.shape)
    actual_shape = tuple(case.actual[0].shape)
    if len(expected_shape) == len(actual_shape):
        for dim, (expected_size, actual_size) in enumerate(
            zip(expected_shape, actual_shape, strict=True)
        ):
            for axis, size in case.sizes:
                if actual_size * size == expected_size != actual_size:
                    return (
                        f"dim {dim} is {size} times too short, as if it were a part: "
                        f"it was not gathered over {quote_axis(axis)}, or gathered "
                        "along another dim"
                    )
                if actual_size == expected_size * size != expected_size:
                    return (
                        f"dim {dim} is {size} times too long, as if it were gathered "
                        f"over {quote_axis(axis)} once too often, or along another dim"
                    )
    return "the values have other shapes than on one device"


def _explain_not_finite(case: Case) -> str:
    """Explains NaN or infinity where one device has finite values."""
    bad = [r for r, x in enumerate(case.actual) if not bool(x.isfinite().all())]
    if not bad or not bool(case.expected.isfinite().all()):
        return ""
    return (
        f"not finite on {_name_ranks(bad)}, finite on one device: unwritten memory "
        "is read (under poison it holds NaN): a stale buffer, or padding; or "
        "something is divided by what an empty part, or a fully masked one, gives"
    )


def _explain_rounding(case: Case) -> str:
    """Explains a difference in the last bits."""
    if is_exact():
        return ""  # an exact run rounds nothing
    gaps = [float((x - case.expected).abs().amax()) for x in case.actual if x.numel()]
    if not gaps or max(gaps) > 1e-5 * float(case.expected.abs().max()):
        return ""
    return (
        "it differs in the last bits: another order of sums, or products. Use "
        "integers as data, and powers of two of rows, ranks and microbatches; or "
        "pass tolerance="
    )


def _explain_unlike_ranks(case: Case) -> str:
    """Explains ranks that differ from each other."""
    results_alone, axes = case.results_alone, quote_axis(case.axes)
    if results_alone and all(
        near(x, y) for x, y in zip(case.actual, results_alone, strict=True)
    ):
        return (
            "each rank has what its own rows alone give: nothing was reduced over "
            f"{axes}"
        )
    for axis, size in case.sizes:
        groups = {case.mesh.members(axis, rank) for rank in range(case.mesh.size)}
        sums = [
            torch.stack([case.actual[rank] for rank in ranks]).sum(0)
            for ranks in groups
        ]
        for name, divisor in (("pmean", size), ("psum", 1)):
            if all(near(x / divisor, case.expected) for x in sums):
                return (
                    f"the {name[1:]} over {quote_axis(axis)} of what the ranks have is "
                    f"right: a {name} is missing"
                )
    wrong = [
        rank for rank, x in enumerate(case.actual) if not near(x, case.expected)
    ] or [0]
    if unreduced := [
        rank
        for rank in wrong
        if results_alone and near(case.actual[rank], results_alone[rank])
    ]:
        return (
            f"{_name_ranks(unreduced)} {'has' if len(unreduced) == 1 else 'have each'} "
            f"what its own rows alone give: left out of a reduction over {axes}"
        )
    explanation = _explain_by_expected(replace(case, actual=[case.actual[wrong[0]]]))
    return f"on {_name_ranks(wrong)}: {explanation}" if explanation else (
        "ranks differ where the value is claimed to be one: something of a rank's own "
        "(rows, a part, a random draw) came in after the last reduction, or was never "
        "reduced"
    )  # fmt: skip


def _explain_by_own_rows(case: Case) -> str:
    """Explains a value that is wrong and equal on all ranks, by each rank's rows."""
    if not case.results_alone:
        return ""
    actual, total = case.actual[0], torch.stack(case.results_alone).sum(0)
    matching = [rank for rank, x in enumerate(case.results_alone) if near(x, actual)]
    if matching and len(matching) < len(case.results_alone):
        return (
            f"it is what the rows of rank {matching[0]} alone give: the others' are "
            "left out"
        )
    if not near(total / len(case.results_alone), actual) or near(total, case.expected):
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


def _explain_by_expected(case: Case) -> str:
    """Explains a wrong value by the expected one."""
    actual, expected, before = case.actual[0], case.expected, case.before
    if not bool(actual.any()) and bool(expected.any()):
        return (
            "it is zero: lost on its way (a detached tensor, one captured by closure, "
            "a custom backward that returns nothing), or never summed"
        )
    if before is not None and before.shape == actual.shape:
        if near(actual, before):
            return "it is what the call was given: never updated, or an old copy"
        if factor := find_ratio(actual - before, expected - before):
            return _explain_factor(factor, "its change", case)
    if factor := find_ratio(actual, expected):
        return _explain_factor(factor, "it", case)
    is_permuted = near(actual.flatten().sort().values, expected.flatten().sort().values)
    if is_permuted and actual.numel() > 1:
        return (
            "it has the right elements in another order: parts joined along another "
            "dim, or in another order of ranks"
        )
    return ""


def _explain_factor(factor: float, subject: str, case: Case) -> str:
    """Explains a value that is ``factor`` times the right one."""
    for axis, size in case.sizes:
        if math.isclose(factor, size, rel_tol=1e-6):
            return (
                f"{subject} is {size} times too large, the size of {quote_axis(axis)}: "
                "a sum in the place of a mean, a part counted on every rank, or "
                "reduced twice"
            )
        if math.isclose(factor * size, 1, rel_tol=1e-6):
            return (
                f"{subject} is {size} times too small, the size of {quote_axis(axis)}: "
                "a mean in the place of a sum, or divided twice"
            )
    return (
        f"{subject} is {factor:.6g} times that of one device: the wrong sign, or "
        "microbatches accumulated without division, or divided once too often"
    )


def _to_float64(x: Tensor) -> Tensor:
    return x.detach().double()


def _all_have_shape(xs: Sequence[Tensor], like: Tensor) -> bool:
    return bool(xs) and all(x.shape == like.shape for x in xs)


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def near(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are equal up to rounding."""
    return a.shape == b.shape and not bool(differing_elements(a, b, 1e-6).any())


def find_ratio(a: Tensor, b: Tensor) -> float | None:
    """Returns k if a = k b, and k is neither 0 nor 1; else None."""
    if not a.numel() or not bool(b.any()) or not bool(a.any()):
        return None
    if is_exact():
        return exact_ratio(a, b)
    index = int(b.abs().argmax())
    k = float(a.flatten()[index] / b.flatten()[index])
    # ``near`` compares small numbers by their distance alone, so both are scaled to 1.
    scale = float(a.abs().max())
    return k if k not in (0.0, 1.0) and near(a / scale, k * b / scale) else None


def quote_axis(axis: Axis) -> str:
    """Returns an axis as messages show it: each name in quotes."""
    names = (axis,) if isinstance(axis, str) else axis
    return ", ".join(f'"{name}"' for name in names)
