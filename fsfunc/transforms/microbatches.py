"""Microbatches: the batch of a gradient call cut along dim 0.

`accumulate` runs the parts one after another, `pipeline` as its schedule says. The
batch is the second argument of ``f(params, batch)``, or what ``batch_argnums`` names.
All of its tensors with dims are cut, except for sharded leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import warn
from fsfunc.core.frames import frame
from fsfunc.core.outcomes import BatchArgnums, GradientCall, Outcome
from fsfunc.sharded.inputs import arguments, refuse, rows_of
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf, PyTree

# For each differentiated argument, its gradients by the leaves that are cut.
RowGradients = list[list[Leaf]]


class Microbatches:
    """A gradient call in ``n`` parts along dim 0.

    Args:
        call: the gradient call; its own ``batch_argnums`` take precedence.
        n: the number of parts, which are as even as possible, smaller ones last.
        batch_argnums: those of the transform.
        transform: its name, for errors.
        even: whether the parts must be of one size.

    Raises:
        ValueError: several arguments may be the batch, and none is named; what
            :func:`rows_of` refuses.
    """

    n: int

    def __init__(
        self,
        call: GradientCall,
        n: int,
        batch_argnums: BatchArgnums | None,
        transform: str,
        *,
        even: bool = False,
    ):
        self._call, self.n = call, n
        values = {i: x for i, x in enumerate(call.args)} | call.keywords
        names = [*arguments(len(call.args)), *call.keywords]
        refuse("array sparse", transform, [*values.values()], *names)
        # A call knows its arguments better than a transform far around it.
        named = call.batch_argnums if call.batch_argnums is not None else batch_argnums
        self._arguments = {key: _Argument(x, str(key)) for key, x in values.items()}
        found = self._find_batch(transform) if named is None and n > 1 else []
        batch = found if named is None else self._named_batch(named)
        leaves = {k: x for a in batch for k, x in self._arguments[a].named().items()}
        self._rows = rows_of(leaves, n, even=even)
        for key in batch:
            self._arguments[key].cut(n)

    def _named_batch(self, batch_argnums: BatchArgnums) -> list[int | str]:
        """Returns the arguments that ``batch_argnums`` names."""
        count, keys = len(self._call.args), []
        for key in batch_argnums:
            if isinstance(key, int) and -count <= key < count:
                key %= count
            elif key not in self._call.keywords:
                names = ", ".join(map(repr, self._call.keywords)) or "no"
                raise ValueError(
                    f"batch_argnums={batch_argnums}, but this gradient call has "
                    f"{count} positional arguments and {names} keywords: {key!r} is "
                    "none"
                )
            keys.append(key)
        return keys

    def _find_batch(self, transform: str) -> list[int | str]:
        """Returns the argument after the first that holds tensors, if there is one.

        Raises:
            ValueError: there are several, or it is differentiated.
        """
        # Not guessed where there is a choice: to cut parameters or a mask by rows would
        # give another gradient, with no error.
        keys = [k for k, a in self._arguments.items() if k != 0 and a.tensors]
        if len(keys) > 1 or any(k in self._call.argnums for k in keys):
            listed = ", ".join(map(repr, keys))
            raise ValueError(
                f"{transform} is to cut the batch of a gradient call along dim 0, of "
                f"which the arguments {listed} hold tensors: say which of them are the "
                "batch, and which are parameters or buffers that stay whole, by "
                f"batch_argnums=, of ff.value_and_grad or of {transform}"
            )
        return keys

    def part(self, m: int) -> GradientCall:
        """Returns the call on microbatch ``m``."""
        parts = {key: a.part(m) for key, a in self._arguments.items()}
        args = tuple(parts.pop(i) for i in range(len(self._call.args)))
        return self._call.replace(args=args, keywords=parts)

    def is_cut(self, i: int) -> bool:
        """Returns whether the positional argument ``i`` is cut."""
        return bool(self._arguments[i].pieces)

    def share(self, m: int) -> float:
        """Returns the rows of microbatch ``m``, divided by the mean number."""
        cut = [p for a in self._arguments.values() for p in a.pieces.values()]
        return len(cut[0][m]) * self.n / self._rows if cut else 1.0

    def take_row_gradients(
        self, outcome: Outcome, by_rows: list[RowGradients]
    ) -> Outcome:
        """Moves the gradients by cut arguments from an outcome to ``by_rows``.

        They are of different rows in each microbatch, so they are not added.
        """
        grads: list[PyTree] = list(outcome.grads)
        by_rows.append([])
        for k, i in enumerate(self._call.argnums):
            taken, a = [], self._arguments[i]
            if a.pieces:
                leaves: list[Leaf] = a.treedef.flatten_up_to(grads[k])  # type: ignore
                taken = [leaves[j] for j in a.pieces]
                for j in a.pieces:
                    leaves[j] = None
                grads[k] = tree.unflatten(a.treedef, leaves)
            by_rows[-1].append(taken)
        return outcome.with_grads(tuple(grads))

    def put_row_gradients(
        self, outcome: Outcome, by_rows: Sequence[RowGradients]
    ) -> Outcome:
        """Puts back what :meth:`take_row_gradients` took, concatenated along dim 0."""
        grads = list(outcome.grads)
        for k, i in enumerate(self._call.argnums):
            a = self._arguments[i]
            if a.pieces:
                leaves: list[Leaf] = a.treedef.flatten_up_to(grads[k])  # type: ignore
                columns = zip(*[taken[k] for taken in by_rows], strict=True)
                for j, parts in zip(a.pieces, columns, strict=True):
                    has_gradient = isinstance(parts[0], Tensor)  # none by integers
                    leaves[j] = torch.cat(parts) if has_gradient else None
                grads[k] = tree.unflatten(a.treedef, leaves)
        return outcome.with_grads(tuple(grads))


def warn_narrow(total: Tensor, n: int) -> None:
    """Warns where what each of ``n`` microbatches adds to a sum may be lost in it."""
    if total.is_floating_point() and n * torch.finfo(total.dtype).eps >= 1:
        warn(_NARROW.format(n, total.dtype))


_NARROW = (
    "gradients or losses of {} microbatches are added in {}, too narrow for so many "
    "terms: keep parameters and losses in float32, and give ff.precision(step, "
    "compute, reduce=torch.float32)"
)


@dataclass
class _Argument:
    """An argument: its leaves, and the pieces of those that are cut.

    Args:
        value: the argument; ``name``: its position or keyword.
        pieces: by the position of a leaf, its rows in each microbatch.

    Attributes:
        tensors: the positions of leaves that can be cut.
    """

    value: PyTree
    name: str
    pieces: dict[int, Sequence[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.leaves, self.treedef = tree.flatten(self.value, is_leaf=is_sharded)
        # While layouts are found every leaf is sharded, and a real call will cut those
        # that are each rank's own: the tracer gives these as plain tensors.
        if (tracer := frame().tracer) is not None:
            self.leaves = tracer.in_batch(self.leaves)
        self.tensors = [
            j for j, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.ndim
        ]

    def named(self) -> dict[str, Tensor]:
        """Returns the leaves that can be cut, by path."""
        paths = tree.paths(self.value, is_leaf=is_sharded)
        return {
            "/".join(filter(None, (self.name, paths[j]))): self.leaves[j]
            for j in self.tensors
        }

    def cut(self, n: int) -> None:
        self.pieces = {j: self.leaves[j].tensor_split(n) for j in self.tensors}

    def part(self, m: int) -> PyTree:
        """Returns the argument of microbatch ``m``."""
        if not self.pieces:
            return self.value
        leaves = list(self.leaves)
        for j, pieces in self.pieces.items():
            leaves[j] = pieces[m]
        return tree.unflatten(self.treedef, leaves)
