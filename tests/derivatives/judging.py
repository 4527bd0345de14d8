"""Running a program in both worlds, and holding one against the other."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests import checks
from tests.derivatives.worlds import AXIS, Law, Ranks, by_units

D = 3
DRAW = torch.Generator().manual_seed(7)
W = {k: torch.randn(D, D, generator=DRAW, dtype=torch.float64) for k in "ab"}
X = torch.randn(12, D, generator=DRAW, dtype=torch.float64)
MESHES = {n: checks.simulated(n) for n in (1, 2, 3, 4)}
# zero, or None: whole parameters, which units are given as they are
WAYS = [0, 1, 2, 3, None]


def by_turns(names, zeros=(0, 3)):
    """Parametrizes over names, each with one of these, which all come up."""
    pairs = [(name, zeros[i % len(zeros)]) for i, name in enumerate(names)]
    return pytest.mark.parametrize(("name", "zero"), pairs)


def beside_units(w, x):
    """What lays parameters out whole."""
    return x.square().mean()


def on(n, way, step, w=W, laid=None, x=X, wrap=lambda f: f, route="fake"):
    """What ``step(w, x)`` returns on each of ``n`` simulated ranks, whole.

    Args:
        laid: what parameters are laid out for: by default for units, or beside them.
        route: recorded on tensors without data; "real": as it really runs; "odd":
            where neither can go.
    """
    return ff.spmd(
        rank_main(MESHES[n], way, step, w, laid, x, wrap, route), MESHES[n]
    )()


def rank_main(mesh, way, step, w=W, laid=None, x=X, wrap=lambda f: f, route="fake"):
    """What one rank runs."""
    laid = laid or (beside_units if way is None else by_units)

    def shard(f):
        return ff.shard(wrap(f), mesh, AXIS, zero=3 if way is None else way)

    def odd(w, x):
        return step(w, x + 0 * torch.unique(x.detach()).sum())

    def main():
        mine, f = ff.local_batch(x, mesh, AXIS), shard(odd if route == "odd" else step)
        if route == "real" and way is not None or laid is step:
            given = ff.place(f, w, mine, record="fake" if route == "odd" else route)
        else:
            given = ff.place(shard(laid), w, mine)
        return ff.unshard(f(given, mine))

    return main


def of_ranks(program):
    """``program(o, w, x)`` as a step."""
    return lambda w, x: program(Ranks(), w, x)


def by_law(program, n, parts=True, w=W, x=X, placed=True):
    """What the law says that each rank gets; ``parts``: whether parameters are cut."""
    w = {k: a.clone().requires_grad_() for k, a in w.items()}
    out = program(
        Law(n, parts, placed=placed), w, [part.clone() for part in x.chunk(n)]
    )
    return [tree.map(lambda a: a.detach(), _of_rank(out, r)) for r in range(n)]


def _of_rank(out, r):
    if isinstance(out, dict):
        return {k: _of_rank(v, r) for k, v in out.items()}
    if isinstance(out, tuple):
        return tuple(_of_rank(v, r) for v in out)
    return out[r] if isinstance(out, list) else out


def assert_lawful(found, expected, tolerance=1e-9):
    for one, right in zip(found, expected, strict=True):
        checks.close(tree.leaves(one), tree.leaves(right), tolerance)


def gradient(loss):
    return lambda w, x: ff.value_and_grad(loss)(w, x)[1]
