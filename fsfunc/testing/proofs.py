"""prove: shows in a finite field that a transformed step computes what the plain does.

Each draw runs ``one_device.Comparison`` on random residues, where equal programs agree
to the last bit and unequal ones by chance alone. ``prove`` counts what that chance
depends on, and returns it with what was compared: a ``Proof``, which prints as a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, TypeVar

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import title
from fsfunc.printing.folding import group_alike, name_group
from fsfunc.printing.tables import Printed, Table
from fsfunc.sharded.placements import describe_tensor
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.testing.finite_field import PRIME, exact, residues
from fsfunc.testing.one_device import Comparison
from fsfunc.tree.types import PyTree

_State = TypeVar("_State", bound=Any)

_MAX_DRAWS = 8  # after these, comparisons with one answer alone are reported instead


@dataclass(frozen=True, repr=False)
class Proof(Printed):
    """What ``prove`` compared, and how sure it is; it prints as a table.

    Attributes:
        step, transformed: their names, with the transforms around them.
        mesh: the mesh of the ranks.
        leaves: (path, shape and dtype) of each leaf that a call returns.
        calls: the number of calls that were compared in each draw.
        draws: the number of runs, each from new random residues and functions.
        functions: the number of calls of random functions in a draw on one device.
        divisions: the number of divisions there.
        decided: the number of comparisons of single numbers there (a clipped norm, a
            skipped step).
        one_way: how many of these had the same answer in every draw: what depends on
            the other answer was not compared.
    """

    step: str
    transformed: str
    mesh: Mesh
    leaves: tuple[tuple[str, str], ...]
    calls: int
    draws: int
    functions: int
    divisions: int
    decided: int
    one_way: int

    @property
    def chance(self) -> float:
        """Roughly the chance that a transformed step that is wrong passes.

        In a draw two values that differ become equal with a probability near 1/PRIME,
        at each call of a random function and at each division; the draws are
        independent.
        """
        places = self.functions + self.divisions + 1
        return min(1.0, places / PRIME) ** self.draws

    def pieces(self, width: int | None) -> list[Table | str]:
        calls = f"{self.calls} call{'s' * (self.calls != 1)}"
        pieces: list[Table | str] = [
            f"{self.transformed} on {self.mesh} equals {self.step} on one device",
            f"{len(self.leaves)} leaves, {calls}, {self.draws} draws; wrong with a "
            f"chance of about {self.chance:.0e}",
        ]
        if self.one_way:
            pieces.append(
                f"{self.one_way} of {self.decided} comparisons of single numbers had "
                "one answer in every draw: what depends on the other one was not seen"
            )
        groups = group_alike(
            (path, description, description) for path, description in self.leaves
        )
        rows = [
            (name_group(paths, "the value"), description)
            for paths, (description, *_) in groups
        ]
        return [*pieces, Table("", ("<equal", "<shape"), rows)]


@api_boundary
def prove(
    step: Callable[Concatenate[_State, ...], Any],
    transformed: Callable[..., Any],
    mesh: Mesh,
    state: _State,
    *batch: PyTree,
    axis: Axis | tuple[()] | None = None,
    layouts: LayoutRules | None = None,
    calls: int = 2,
    goes_on: Callable[[Any], Any] | None = None,
    draws: int = 2,
    uneven: bool = False,
) -> Proof:
    """Returns a proof that ``transformed`` on every rank computes what ``step`` does.

    Both run in a finite field (:func:`ff.testing.exact`), from random residues in place
    of the floats of ``state`` and ``batch``. Equal programs agree there to the last
    bit, whatever the order of their sums. Programs that differ, even by 1e-12, agree by
    accident alone. Values are drawn again until each comparison of single numbers (of a
    norm that is clipped, of a step that is skipped) has had both answers.

    Proven is the algebra: which values are summed, scaled and sent where. Casts change
    nothing there, and kernels are their formulas: rounding, overflow, and what a kernel
    computes are not proven. Nonlinear functions are random ones, which satisfy no
    identity but those of powers, roots, exponentials and logarithms. Two programs that
    are equal by another identity (sin^2 + cos^2 = 1) are reported as different.

    Args:
        step: the step of one device; any function of (state, \\*batch).
        transformed: the same for ranks.
        mesh: of simulated ranks, or of processes.
        state: a tree, whole, the same on every rank. Only the shapes of its floats
            count: their values are drawn. Integers stay: let tokens differ from row to
            row.
        batch: trees of tensors, cut along dim 0.
        axis, layouts, calls, goes_on, uneven: as for
            :func:`ff.testing.assert_equals_one_device`.
        draws: the least number of draws.

    Raises:
        ValueError: no draws; what ``assert_equals_one_device`` refuses.
        AssertionError: they differ; it names the leaf, the common mistake that gives
            it, and the first value inside that differs, as ``assert_equals_one_device``
            does.
        NoExactRule: an operator has no rule: it draws numbers, or works on bits (codes
            of 8 bits).

    Cost: as many runs on one device and on all ranks as there are draws, each some ten
    to twenty times as long as one in float64.

    Source: Schwartz, 1980, and Zippel, 1979, for polynomials; random functions in the
    place of other functions: Wu et al., 2025 (Mirage), for kernels.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda w, x: torch.tanh(x @ w))
    >>> @ff.value_and_grad
    ... def step(w, x):
    ...     return layer(w, x).mean()
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> w, x = torch.zeros(3, 2), torch.zeros(4, 3)
    >>> ff.prove(step, ff.shard(step, mesh, "data"), mesh, w, x)
    shard(value_and_grad(step), data=2, zero=3) on Mesh({'data': 2}, 'simulated') ...
    2 leaves, 2 calls, 2 draws; wrong with a chance of about 2e-14
    equal  shape
    0      f64[]
    1      f64[3, 2]
    """
    comparison = Comparison(
        step, transformed, mesh, axis, layouts, calls, goes_on, uneven=uneven
    )
    if draws < 1:
        raise ValueError(f"draws={draws}: nothing would be compared")
    answers: list[list[bool]] = []
    last_output, functions, divisions = None, 0, 0
    for draw in range(max(draws, _MAX_DRAWS)):
        if draw >= draws and not _count_one_way(answers):
            break
        with exact(draw) as field:
            drawn_state, drawn_batch = residues((state, batch), draw)
            expected = comparison.run_on_one_device(drawn_state, drawn_batch)
            answers.append([*field.decisions])
            functions, divisions = field.functions, field.divisions
            comparison.check_ranks(drawn_state, drawn_batch, expected)
            last_output = expected[-1]
    paths, leaves, _ = tree.flatten_with_paths(last_output)
    return Proof(
        title(step), title(transformed), mesh,
        tuple(
            (path,
             describe_tensor(x.shape, x.dtype) if isinstance(x, Tensor) else repr(x))
            for path, x in zip(paths, leaves, strict=True)
        ),
        calls, len(answers), functions, divisions, len(answers[0]),
        _count_one_way(answers),
    )  # fmt: skip


def _count_one_way(answers: list[list[bool]]) -> int:
    """Returns how many comparisons had the same answer in all draws.

    Where draws made different numbers of comparisons, only those that all draws made
    can be seen to have had both answers.
    """
    count = len(answers[0])
    with_both_answers = sum(
        len(set(by_draw)) == 2 for by_draw in zip(*answers, strict=False)
    )
    return count - with_both_answers
