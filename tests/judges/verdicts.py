"""Right, or refused in our words: what a case of a database is judged to be."""

import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import fsfunc as ff
from fsfunc import tree

ROOT = str(Path(ff.__file__).parent)
MESH = ff.make_mesh({"data": 2}, "simulated")
SHARES = torch.tensor([0.5, 1.5])  # of the ranks: each scales its loss; 1 in mean
TOLERANCE = 1e-7


class Unjudged(Exception):
    """torch itself has no one answer here."""


def tensors(values: Any) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """The floating tensors of arguments, and what puts others in their place."""
    leaves, treedef = tree.flatten(values)
    at = [i for i, x in enumerate(leaves) if _is_real(x)]

    def rebuilt(new: Iterable[Any]) -> Any:
        made = list(leaves)
        for i, x in zip(at, new, strict=True):
            made[i] = x
        return tree.unflatten(treedef, made)

    return [leaves[i].detach().clone() for i in at], rebuilt


def _is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def score(out: Any) -> torch.Tensor:
    """A number of all floating outputs, in which no two elements count alike."""
    total = torch.zeros((), dtype=torch.float64)
    for y in tree.leaves(out):
        if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex()):
            y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
            weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64)
            total = total + (y.double() * weights.view(y.shape)).sum()
    return total


def derived(f: Callable[[list[torch.Tensor]], torch.Tensor], given: Any) -> list[Any]:
    """torch's gradients of ``f(leaves)``.

    Raises:
        Unjudged: it raises, draws, or gives what is not finite.
    """
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        leaves = [x.clone().requires_grad_() for x in given]
        try:
            found = torch.autograd.grad(f(leaves), leaves, allow_unused=True)
        except Exception as error:
            raise Unjudged(f"torch raises {type(error).__name__}") from None
        pairs = zip(leaves, found, strict=True)
        runs.append([torch.zeros_like(x) if g is None else g for x, g in pairs])
    try:
        alike = all(map(torch.equal, *runs))
    except NotImplementedError:
        raise Unjudged("its gradient is sparse, of a layout without equality") from None
    if not alike:
        raise Unjudged("it draws, or is not finite")
    return runs[0]


def near(found: Any, expected: Any) -> bool:
    """True if trees of tensors are of one shape, and near."""
    ours, theirs = tree.leaves(found), tree.leaves(expected)
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return False
    each = zip(ours, theirs, strict=True)
    return all(
        torch.allclose(a, b, TOLERANCE, TOLERANCE, equal_nan=True) for a, b in each
    )


def verdict(run: Callable[[], Any], expected: Any) -> str:
    """ "right", "WRONG", or how it was refused: "ours: ..." or "torch: ..."."""
    try:
        found = run()
    except Exception as error:
        return refused(error)
    return "right" if all(near(one, expected) for one in found) else "WRONG"


def refused(error: Exception) -> str:
    """The beginning of an error, and whose words it is in."""
    last = traceback.extract_tb(error.__traceback__)[-1]  # a mode's, where torch raises
    mine = last.filename.startswith(ROOT) and (last.line or "").startswith("raise")
    words = " ".join(str(error).split())[:90]
    return f"{'ours' if mine else 'torch'}: {type(error).__name__} {words}"


def drawn(cases: list[Any], arguments: list[str]) -> list[Any]:
    """All cases; with ``--sample N SEED`` some; with ``--part I N`` a part of them."""
    if not arguments:
        return cases
    how, a, b = arguments
    if how == "--sample":
        return random.Random(int(b)).sample(cases, int(a))
    return cases[int(a) :: int(b)]


def told(name: str, verdicts: dict[tuple[str, str], str]) -> int:
    """Prints the counts by place, and the refused by cause; returns how many are wrong.

    Args:
        verdicts: by (case, place).
    """
    counts: dict[str, Counter[str]] = {}
    for (_, place), v in verdicts.items():
        counts.setdefault(place, Counter())[v.partition(":")[0]] += 1
    for place, kinds in sorted(counts.items()):
        said = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        print(f"{name}, {place}: {said}")
    causes: dict[str, list[str]] = {}
    for (case, place), v in verdicts.items():
        if v != "right":
            causes.setdefault(v, []).append(f"{case} ({place})")
    for cause, cases in sorted(causes.items(), key=lambda item: -len(item[1])):
        some = ", ".join(cases[:4]) + (", ..." if len(cases) > 4 else "")
        print(f"  {len(cases):4} {cause}: {some}")
    sys.stdout.flush()
    return sum(v == "WRONG" for v in verdicts.values())
