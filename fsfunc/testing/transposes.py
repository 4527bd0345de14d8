"""``check_collective``: a map over ranks and its derivatives, by typed dot products.

For a linear map f and its transpose f', <f(x), g> = <x, f'(g)>. Each side is summed
over the ranks by its type: V varies (a sum over ranks), I is one value (counted once),
P is in parts, and R equal with a cotangent in parts (the parts are summed first), M
varies under a mean over the ranks. `fsfunc.comm.linear_maps` has all types and maps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from fsfunc.comm.launch import PerRank, make_mesh, spmd
from fsfunc.comm.mesh import Axis, Mesh

COTANGENT = {"V": "V", "I": "I", "R": "P", "P": "R", "M": "M"}  # of a value's type
# Drawn numbers are multiples of it. 840 is one of all numbers to 8: means over as many
# ranks, and means of means, are integers, and sums of these exact.
_UNIT = 840.0**2
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
        transpose: the expected transpose, if you know it: a function of the cotangent.
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
    meshes = (make_mesh({axis: size}, "simulated") for size in sizes)
    for each_mesh in meshes if mesh is None else [mesh]:
        _Check(fn, axis, of, to, tuple(shape), transpose, each_mesh).run(under)


@dataclass(eq=False)
class _Check:
    """The checks of one collective on one mesh.

    Attributes:
        x, z: two arguments, for all ranks.
        y: ``fn`` of x.
        g, h: two cotangents of the result.
        is_one_value: whether arguments are equal on all ranks of a group.
    """

    fn: Callable[[Tensor], Tensor]
    axis: str
    of: str
    to: str
    shape: tuple[int, ...]
    transpose: Callable[[Tensor], Tensor] | None
    mesh: Mesh

    def __post_init__(self) -> None:
        fn, axis, of, to, mesh = self.fn, self.axis, self.of, self.to, self.mesh
        for kind in (of, to):
            if kind not in "VIRP":
                raise ValueError(f"type {kind!r}: it is V, I, R or P")
        self.generator = torch.Generator().manual_seed(0)
        name = getattr(fn, "__name__", type(fn).__name__)
        size = mesh.axis_size(axis)
        self.name = f'{name}, {of} -> {to} over "{axis}" of size {size}'
        self.is_one_value = of in "IR"
        self.x, self.z = (
            draw_typed(self.is_one_value, self.shape, mesh, axis, self.generator)
            for _ in "xz"
        )
        self.y = self.on_ranks(fn, self.x)
        output_shape = self.y[0].shape
        cotangent_is_one_value = COTANGENT[to] in "IR"
        self.g, self.h = (
            draw_typed(cotangent_is_one_value, output_shape, mesh, axis, self.generator)
            for _ in "gh"
        )

    def on_ranks(self, fn: Callable[..., Tensor], *args: PerRank) -> PerRank:
        """Calls a function on every rank, each with its own arguments."""
        return spmd(fn, self.mesh)(*args)

    def groups(self) -> list[tuple[int, ...]]:
        """Returns the ranks of each group along the axis."""
        return sorted(
            {self.mesh.members(self.axis, rank) for rank in range(self.mesh.size)}
        )

    def run(self, under: Sequence[str]) -> None:
        """Checks the derivatives named, in the order of ``UNDER``."""
        for derivative in under:
            if derivative not in UNDER:
                raise ValueError(f"under={derivative!r}: it is one of {UNDER}")
        self.check_type("what it returns", self.to, self.y)
        with warnings.catch_warnings():
            # The first jvp of a process lets torch compile its own decompositions.
            warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
            for derivative in UNDER:
                if derivative in under:
                    self.check_derivative(derivative)

    def check_derivative(self, derivative: str) -> None:
        """Calls the method of this name; names the derivative in other errors."""
        try:
            getattr(self, derivative)()
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(
                f"{self.name}, cannot be taken under {derivative}: "
                f"{type(error).__name__}: {error}"
            ) from error

    # One method for each name in UNDER

    def linear(self) -> None:
        of_combination = self.on_ranks(
            lambda x, z: self.fn(2 * x - 3 * z), self.x, self.z
        )
        of_z = self.on_ranks(self.fn, self.z)
        expected = PerRank([2 * y - 3 * z for y, z in zip(self.y, of_z, strict=True)])
        self.check_equal(
            "is not linear: f(2x - 3z) is not 2f(x) - 3f(z)", of_combination, expected
        )

    def vjp(self) -> None:
        self.pulled_back = self.on_ranks(self._pull_back, self.x, self.g)
        self.check_type("its cotangent", COTANGENT[self.of], self.pulled_back)
        self.check_pairing("the transpose", self.y, self.g, self.x, self.pulled_back)
        if self.transpose is not None:
            expected = self.on_ranks(self.transpose, self.g)
            self.check_equal(
                "has another transpose than you gave", self.pulled_back, expected
            )

    def grad(self) -> None:
        take_gradient = lambda x, g: grad(lambda x: (self.fn(x) * g).sum())(x)  # noqa: E731
        by_grad = self.on_ranks(take_gradient, self.x, self.g)
        by_vjp = self.on_ranks(self._pull_back, self.x, self.g)
        self.check_equal(
            "has another gradient under grad than under vjp", by_grad, by_vjp
        )

    def jvp(self) -> None:
        actual = self.on_ranks(lambda x, z: jvp(self.fn, (x,), (z,))[1], self.x, self.z)
        expected = self.on_ranks(self.fn, self.z)
        self.check_equal(
            "has a wrong jvp: a linear map's is f of the tangent", actual, expected
        )

    def vmap(self) -> None:
        stack = lambda a, b: torch.stack([a, b])  # noqa: E731
        actual = self.on_ranks(lambda x, z: vmap(self.fn)(stack(x, z)), self.x, self.z)
        expected = self.on_ranks(
            lambda x, z: stack(self.fn(x), self.fn(z)), self.x, self.z
        )
        self.check_equal("is wrong under vmap", actual, expected)
        pull_mapped = lambda x, z, g, h: vmap(self._pull_back)(stack(x, z), stack(g, h))  # noqa: E731
        pull_back = self._pull_back
        pull_each = lambda x, z, g, h: stack(pull_back(x, g), pull_back(z, h))  # noqa: E731
        args = self.x, self.z, self.g, self.h
        message = "has a wrong transpose under vmap"
        self.check_equal(
            message,
            self.on_ranks(pull_mapped, *args),
            self.on_ranks(pull_each, *args),
        )

    def twice(self) -> None:
        def transpose_twice(x: Tensor, g: Tensor) -> Tensor:
            return vjp(lambda g: self._pull_back(x, g), g)[1](x)[0]

        actual = self.on_ranks(transpose_twice, self.x, self.g)
        title = "the transpose of its transpose"
        self.check_pairing(
            title,
            actual,
            self.g,
            self.x,
            self.on_ranks(self._pull_back, self.x, self.g),
        )

    def _pull_back(self, x: Tensor, g: Tensor) -> Tensor:
        return vjp(self.fn, x)[1](g)[0]

    # What these are made of

    def check_pairing(
        self,
        title: str,
        ys: Sequence[Tensor],
        gs: Sequence[Tensor],
        xs: Sequence[Tensor],
        gxs: Sequence[Tensor],
    ) -> None:
        """Raises unless <y, g> = <x, gx> in every group."""
        for ranks in self.groups():
            y, g, x, gx = ([v[r] for r in ranks] for v in (ys, gs, xs, gxs))
            left, right = pairing(self.to, y, g), pairing(self.of, x, gx)
            if left != right:
                raise AssertionError(
                    f"{title} of {self.name}, is wrong: <f(x), g> = {float(left):g}, "
                    "<x, f'(g)> = "
                    f"{float(right):g}{self._explain_ratio(left, right, gx)}"
                )

    def _explain_ratio(
        self, left: Fraction, right: Fraction, pulled_back: Sequence[Tensor]
    ) -> str:
        size = self.mesh.axis_size(self.axis)
        ratio = right / left if left else Fraction(0)
        if ratio == size:
            return f", {size} times too large: it sums over ranks what is one value"
        if ratio and ratio * size == 1:
            return (
                f", {size} times too small: it takes a mean, or one rank's, for a sum"
            )
        if not any(bool(g.any()) for g in pulled_back):
            return ": it loses the cotangent"
        return ": its transpose moves, or sums, something else"

    def check_type(self, title: str, kind: str, values: Sequence[Tensor]) -> None:
        """Raises if values of type I or R are not one value in a group."""
        if kind not in "IR":
            return
        for ranks in self.groups():
            for rank in ranks[1:]:
                if not torch.equal(values[rank], values[ranks[0]]):
                    raise AssertionError(
                        f"{title} of {self.name}, is of type {kind}, one value on all "
                        f"ranks, and differs between ranks {ranks[0]} and {rank}"
                    )

    def check_equal(
        self, message: str, actual: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> None:
        for rank, (x, y) in enumerate(zip(actual, expected, strict=True)):
            if x.shape != y.shape or not torch.equal(x, y):
                raise AssertionError(
                    f"{self.name}, {message}; on rank {rank} it is\n{x}\nand not\n{y}"
                )


def pairing(kind: str, xs: Sequence[Tensor], gs: Sequence[Tensor]) -> Fraction:
    """Returns <x, g> over the ranks of a group, for x of a type and g of its dual.

    >>> import torch
    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> int(pairing("V", [one, two], [one, two]))
    5
    >>> int(pairing("I", [two, two], [two, two]))
    4
    """
    products = [Fraction((x * g).sum().item()) for x, g in zip(xs, gs, strict=True)]
    if kind == "I":
        return products[0]
    if kind == "P":  # g is equal on all ranks, x in parts: <sum of parts, g>
        return Fraction((sum(xs) * gs[0]).sum().item())
    if kind == "R":
        return Fraction((xs[0] * sum(gs)).sum().item())
    return sum(products, Fraction(0)) / (len(products) if kind == "M" else 1)


def draw_typed(
    is_one_value: bool,
    shape: Sequence[int],
    mesh: Mesh,
    axis: Axis,
    generator: torch.Generator,
) -> PerRank:
    """Draws integers in float64 for every rank; equal in a group if one value."""
    keys = [mesh.members(axis, r) if is_one_value else r for r in range(mesh.size)]
    drawn: dict[object, Tensor] = {}
    for key in keys:
        if key not in drawn:
            drawn[key] = _UNIT * torch.randint(
                -3, 4, tuple(shape), generator=generator, device="cpu"
            )
    return PerRank([drawn[key].double() for key in keys])
