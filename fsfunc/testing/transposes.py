"""``check_collective``: a map over ranks and its derivatives, by typed dot products.

For a linear map f and its transpose f', <f(x), g> = <x, f'(g)>, each side over the
ranks by its type: V varies (a sum over ranks), I is one value (counted once), P is in
parts and R equal with a cotangent in parts (the parts are summed first), M varies under
a mean over the ranks. See `fsfunc.comm.linear_maps`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from fsfunc.comm.launch import PerRank, make_mesh, spmd
from fsfunc.comm.mesh import Axis, Mesh

COTANGENT = {"V": "V", "I": "I", "R": "P", "P": "R", "M": "M"}
_UNIT = 840.0**2  # means of means over up to 8 ranks are exact too
UNDER = ("linear", "vjp", "grad", "jvp", "vmap", "twice")


def check_collective(
    fn: Callable[[Tensor], Tensor],
    axis: str = "data",
    *,
    of: str = "V",
    to: str = "V",
    shape: Sequence[int] = (12, 2),
    sizes: Sequence[int] = (2, 3, 4),
    transpose: Callable[[Tensor], Tensor] | None = None,
    under: Sequence[str] = UNDER,
    mesh: Mesh | None = None,
) -> None:
    """Raises unless ``fn`` is a linear map over ranks that differentiates as one.

    For a linear map f and its transpose f', <f(x), g> = <x, f'(g)>, each side summed
    over the ranks by its type. On integers both sides are exactly equal. That is
    checked under ``vjp``; ``grad`` must give the same, ``jvp`` must be ``fn`` of the
    tangent, ``vmap`` must map it and its transpose, and ``twice`` the transpose of the
    transpose must be ``fn`` again. Values of types I and R, and their cotangents, must
    be equal on every rank.

    Args:
        fn: takes this rank's tensor; it is called on every rank of a simulated mesh.
        axis: the axis of its collectives.
        of, to: the types of its argument and result: V varies from rank to rank, I is
            one value, R is replicated with a cotangent in parts, P is in parts.
        shape: the shape of the argument.
        sizes: the sizes of the axis, tried from the smallest.
        transpose: its transpose, if you know it: a function of the cotangent.
        under: the derivatives to check.
        mesh: a mesh with further axes, instead of ``sizes``.

    Raises:
        ValueError: an unknown type or derivative; a shape without elements, or nothing
            to check.
        AssertionError: names the mesh, the derivative, both sides, and their ratio.

    >>> import fsfunc as ff
    >>> check_collective(lambda x: ff.psum(x, "data"), to="I")
    >>> wrong = lambda x: ff.psum(x, "data", to="I")
    >>> check_collective(wrong, to="V")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: the transpose of <lambda>, V -> V over "data" of size 2, is wrong...
    """
    if not math.prod(shape):
        raise ValueError(f"shape={tuple(shape)} has no elements: any map passes")
    if not under or not (sizes or mesh):
        raise ValueError(f"under={under!r}, sizes={sizes!r}: nothing would be asked")
    drawn = (make_mesh({axis: n}, "simulated") for n in sizes)
    for at in drawn if mesh is None else [mesh]:
        _Check(fn, axis, of, to, tuple(shape), transpose, at).run(under)


@dataclass(eq=False)
class _Check:
    """One collective on one mesh."""

    fn: Any
    axis: str
    of: str
    to: str
    shape: tuple[int, ...]
    transpose: Any
    mesh: Mesh

    def __post_init__(self) -> None:
        fn, axis, of, to, mesh = self.fn, self.axis, self.of, self.to, self.mesh
        for kind in (of, to):
            if kind not in "VIRP":
                raise ValueError(f"type {kind!r}: it is V, I, R or P")
        self.draw = torch.Generator().manual_seed(0)
        name = getattr(fn, "__name__", type(fn).__name__)
        n = mesh.axis_size(axis)
        self.name = f'{name}, {of} -> {to} over "{axis}" of size {n}'
        self.alike = of in "IR"
        self.x, self.z = (
            typed(self.alike, self.shape, mesh, axis, self.draw) for _ in "xz"
        )
        self.y = self.on_ranks(fn, self.x)
        out = self.y[0].shape
        dual = COTANGENT[to] in "IR"
        self.g, self.h = (typed(dual, out, mesh, axis, self.draw) for _ in "gh")

    def on_ranks(self, fn: Callable[..., Any], *args: Any) -> PerRank:
        return spmd(fn, self.mesh)(*args)

    def groups(self) -> list[tuple[int, ...]]:
        return sorted({self.mesh.members(self.axis, r) for r in range(self.mesh.size)})

    def run(self, under: Sequence[str]) -> None:
        for what in under:
            if what not in UNDER:
                raise ValueError(f"under={what!r}: it is one of {UNDER}")
        self.claim("what it returns", self.to, self.y)
        with warnings.catch_warnings():
            # The first jvp of a process lets torch compile its own decompositions.
            warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
            for what in UNDER:
                if what in under:
                    self.take(what)

    def take(self, what: str) -> None:
        try:
            getattr(self, what)()
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(
                f"{self.name}, cannot be taken under {what}: "
                f"{type(error).__name__}: {error}"
            ) from error

    # The claims

    def linear(self) -> None:
        both = self.on_ranks(lambda x, z: self.fn(2 * x - 3 * z), self.x, self.z)
        zs = self.on_ranks(self.fn, self.z)
        due = PerRank([2 * y - 3 * z for y, z in zip(self.y, zs, strict=True)])
        self.equal("is not linear: f(2x - 3z) is not 2f(x) - 3f(z)", both, due)

    def vjp(self) -> None:
        self.pulled = self.on_ranks(self._pull, self.x, self.g)
        self.claim("its cotangent", COTANGENT[self.of], self.pulled)
        self.paired("the transpose", self.y, self.g, self.x, self.pulled)
        if self.transpose is not None:
            due = self.on_ranks(self.transpose, self.g)
            self.equal("has another transpose than you gave", self.pulled, due)

    def grad(self) -> None:
        take = lambda x, g: grad(lambda x: (self.fn(x) * g).sum())(x)  # noqa: E731
        found = self.on_ranks(take, self.x, self.g)
        due = self.on_ranks(self._pull, self.x, self.g)
        self.equal("has another gradient under grad than under vjp", found, due)

    def jvp(self) -> None:
        found = self.on_ranks(lambda x, z: jvp(self.fn, (x,), (z,))[1], self.x, self.z)
        due = self.on_ranks(self.fn, self.z)
        self.equal("has a wrong jvp: a linear map's is f of the tangent", found, due)

    def vmap(self) -> None:
        stack = lambda a, b: torch.stack([a, b])  # noqa: E731
        found = self.on_ranks(lambda x, z: vmap(self.fn)(stack(x, z)), self.x, self.z)
        due = self.on_ranks(lambda x, z: stack(self.fn(x), self.fn(z)), self.x, self.z)
        self.equal("is wrong under vmap", found, due)
        two = lambda x, z, g, h: vmap(self._pull)(stack(x, z), stack(g, h))  # noqa: E731
        one = lambda x, z, g, h: stack(self._pull(x, g), self._pull(z, h))  # noqa: E731
        args = self.x, self.z, self.g, self.h
        said = "has a wrong transpose under vmap"
        self.equal(said, self.on_ranks(two, *args), self.on_ranks(one, *args))

    def twice(self) -> None:
        def again(x: Tensor, g: Tensor) -> Tensor:
            return vjp(lambda g: self._pull(x, g), g)[1](x)[0]

        found = self.on_ranks(again, self.x, self.g)
        said = "the transpose of its transpose"
        self.paired(
            said, found, self.g, self.x, self.on_ranks(self._pull, self.x, self.g)
        )

    def _pull(self, x: Tensor, g: Tensor) -> Tensor:
        return vjp(self.fn, x)[1](g)[0]

    # What they come down to

    def paired(self, what: str, ys: Any, gs: Any, xs: Any, gxs: Any) -> None:
        """<y, g> = <x, gx> in every group."""
        for ranks in self.groups():
            y, g, x, gx = ([v[r] for r in ranks] for v in (ys, gs, xs, gxs))
            left, right = pairing(self.to, y, g), pairing(self.of, x, gx)
            if left != right:
                raise AssertionError(
                    f"{what} of {self.name}, is wrong: <f(x), g> = {float(left):g}, "
                    f"<x, f'(g)> = {float(right):g}{self._ratio(left, right, gx)}"
                )

    def _ratio(self, left: Fraction, right: Fraction, pulled: Sequence[Tensor]) -> str:
        n, k = self.mesh.axis_size(self.axis), right / left if left else Fraction(0)
        if k == n:
            return f", {n} times too large: it sums over ranks what is one value"
        if k and k * n == 1:
            return f", {n} times too small: it takes a mean, or one rank's, for a sum"
        if not any(bool(g.any()) for g in pulled):
            return ": it loses the cotangent"
        return ": its transpose moves, or sums, something else"

    def claim(self, what: str, kind: str, values: Sequence[Tensor]) -> None:
        """Raises where values of type I or R are not one value in a group."""
        if kind not in "IR":
            return
        for ranks in self.groups():
            for r in ranks[1:]:
                if not torch.equal(values[r], values[ranks[0]]):
                    raise AssertionError(
                        f"{what} of {self.name}, is of type {kind}, one value on all "
                        f"ranks, and differs between ranks {ranks[0]} and {r}"
                    )

    def equal(self, what: str, found: Sequence[Tensor], due: Sequence[Tensor]) -> None:
        for rank, (a, b) in enumerate(zip(found, due, strict=True)):
            if a.shape != b.shape or not torch.equal(a, b):
                raise AssertionError(
                    f"{self.name}, {what}; on rank {rank} it is\n{a}\nand not\n{b}"
                )


def pairing(kind: str, xs: Sequence[Tensor], gs: Sequence[Tensor]) -> Fraction:
    """<x, g> over the ranks of one group, where x is of this type and g of its dual.

    >>> import torch
    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> int(pairing("V", [one, two], [one, two]))
    5
    >>> int(pairing("I", [two, two], [two, two]))
    4
    """
    each = [Fraction((x * g).sum().item()) for x, g in zip(xs, gs, strict=True)]
    if kind == "I":
        return each[0]
    if kind == "P":  # g is equal on all ranks, x in parts: <sum of parts, g>
        return Fraction((sum(xs) * gs[0]).sum().item())
    if kind == "R":
        return Fraction((xs[0] * sum(gs)).sum().item())
    return sum(each, Fraction(0)) / (len(each) if kind == "M" else 1)


def typed(
    alike: bool, shape: Sequence[int], mesh: Mesh, axis: Axis, draw: torch.Generator
) -> PerRank:
    """Integers in float64 for every rank; with ``alike``, equal within a group."""
    keys = [mesh.members(axis, r) if alike else r for r in range(mesh.size)]
    made: dict[object, Tensor] = {}
    for key in keys:
        if key not in made:
            made[key] = _UNIT * torch.randint(
                -3, 4, tuple(shape), generator=draw, device="cpu"
            )
    return PerRank([made[key].double() for key in keys])
