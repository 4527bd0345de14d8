"""torch's own database of operators (``op_db``), in exact runs.

    python -m tests.judges.exact_operators                all
    python -m tests.judges.exact_operators --sample 60 0  some, drawn by a seed

Each operator takes torch's own samples, rounded to small whole numbers, once in float64
and once as residues, with its derivative where it has one. What the field computes
without a random function must be what float64 gives, as a fraction; comparisons are
made by an order that is the usual one for small numbers. Nothing may end but in a
result or in words of ours. It prints the counts, and ends with 1 if something is wrong.
"""

import random
import re
import sys
import warnings
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import islice

import torch
from torch.testing._internal.common_methods_invocations import op_db

from fsfunc import tree
from fsfunc.testing import NoExactRule, exact
from fsfunc.testing.finite_field import PRIME, values
from fsfunc.testing.finite_field.field import NoResidue, constant

SAMPLES = 4  # of each operator

# Where float64 has another answer than the field, and rightly so.
_FRACTIONS = "a fraction is compared, by the order of the field"
_IRRATIONAL = "a constant of torch's is no fraction"
_LARGE = "the fractions are too large to be read from float64"
OTHERWISE = {
    "isclose": "nothing is near",
    "sort": "equal numbers keep their order",
    "argsort": "equal numbers keep their order",
    "cov": "torch asks whether weights are negative",
    "deg2rad": _IRRATIONAL,
    "rad2deg": _IRRATIONAL,
    "ldexp": _IRRATIONAL,
    "signbit": "0 has no sign",
    "linalg.tensorinv": _LARGE,
    "linalg.tensorsolve": _LARGE,
    "heaviside": _FRACTIONS,
    "quantile": _FRACTIONS,
    "nanquantile": _FRACTIONS,
    "renorm": _FRACTIONS,
    "nn.functional.gaussian_nll_loss": _FRACTIONS,
    "nn.functional.hardshrink": _FRACTIONS,
    "nn.functional.normalize": _FRACTIONS,
    "nn.functional.hardsigmoid": _FRACTIONS,
    "nn.functional.hardtanh": _FRACTIONS,
    "nn.functional.huber_loss": _FRACTIONS,
    "nn.functional.threshold": _FRACTIONS,
}


def whole(x):
    """Returns small whole numbers in place of floats."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
        return (x.detach() * 3).round().clamp(-7, 7)
    return x


def residue(x):
    if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
        return torch.remainder(x, PRIME)
    return x


def computed(op, args):
    """Returns an operator's results, and its derivatives by cotangents of ones."""
    taken = [x for x in tree.leaves(args) if _real(x)]
    for x in taken:
        x.requires_grad_(op.supports_autograd)
    # Not the leaves themselves: operators may write into their arguments.
    given, positional, named = tree.map(lambda x: x * 1 if _real(x) else x, args)
    results = tree.leaves(op.op(given, *positional, **named))
    results = [x for x in results if isinstance(x, torch.Tensor | float | int | bool)]
    if any(x.is_complex() for x in results if isinstance(x, torch.Tensor)):
        raise NotImplementedError("complex")
    last = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    if not last or not op.supports_autograd:
        return results
    ones = [torch.ones_like(x) for x in last]
    grads = torch.autograd.grad(last, taken, ones, allow_unused=True)
    return [*results, *(g for g in grads if g is not None)]


def _real(x):
    return isinstance(x, torch.Tensor) and x.dtype == torch.float64


def equals(ours, theirs):
    """Returns whether residues are what float64 says, as far as it can say it."""
    if not isinstance(theirs, torch.Tensor):
        theirs = torch.tensor(theirs)
        ours = torch.tensor(ours)
    if ours.shape != theirs.shape:
        return False
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    if not bool(theirs.isfinite().all()):
        return True  # the field has no limits: nothing is claimed of these
    ours = values(ours.double() % PRIME).flatten().tolist()
    pairs = zip(ours, map(float, theirs.flatten()), strict=True)
    return all(
        a in (constant(b), _quotient(b, 10**4), _quotient(b, 10**6)) for a, b in pairs
    )


def _quotient(x, most):
    """Returns the residue of the simple fraction that a rounded result is near to."""
    q = Fraction(x).limit_denominator(most)
    return float(q.numerator * pow(q.denominator, PRIME - 2, PRIME) % PRIME)


def judged(op, sample):
    """Returns the verdict on one operator with one of its samples, and a word on it."""
    args = tree.map(whole, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    copied = lambda x: x.clone() if isinstance(x, torch.Tensor) else x  # noqa: E731
    try:
        theirs = computed(op, tree.map(copied, args))
    except Exception:  # not of whole numbers, or not twice
        return "not judged", ""
    args = tree.map(residue, tree.map(copied, args))
    with exact() as field:
        field.order_factor = 1.0
        try:
            ours = computed(op, args)
        except (NoExactRule, NoResidue, NotImplementedError) as error:
            return "refused", str(error)
        except Exception as error:
            return "in torch's words", f"{type(error).__name__}: {error}"
    if field.functions:
        return "a function of its own", ""
    same = len(ours) == len(theirs) and all(map(equals, ours, theirs))
    return ("equal", "") if same else ("wrong", f"{ours} for {theirs}")


def main(operators):
    counts, said = Counter(), defaultdict(list)
    for op in operators:
        if torch.float64 not in op.dtypes or re.search("sparse|empty", op.name):
            continue
        samples = op.sample_inputs("cpu", torch.float64, requires_grad=False)
        for sample in islice(samples, SAMPLES):
            verdict, word = judged(op, sample)
            if verdict in ("wrong", "in torch's words") and op.name in OTHERWISE:
                verdict = "otherwise"
            counts[verdict] += 1
            said[verdict].append((f"{op.name} {op.variant_test_name}".strip(), word))
    for verdict, count in counts.most_common():
        print(f"{count:6} {verdict}")
    for verdict in ("wrong", "in torch's words"):
        for name, word in said[verdict]:
            print(f"{verdict}: {name}: {word[:300]}")
    print("refused:", ", ".join(sorted({name for name, _ in said["refused"]})))
    return int(bool(said["wrong"] or said["in torch's words"]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    chosen = list(op_db)
    if sys.argv[1:]:
        count, seed = map(int, sys.argv[2:])
        chosen = random.Random(seed).sample(chosen, count)
    sys.exit(main(chosen))
