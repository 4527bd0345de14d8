"""Microbatches: the batch of a gradient call cut along dim 0.

The batch is the second argument of ``f(params, batch)``, or what ``batch_argnums``
names. All of its tensors with dims are cut, except for sharded leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import warn
from fsfunc.core.frames import frame
from fsfunc.core.outcomes import BatchArgnums, GradientCall, Outcome
from fsfunc.sharded.inputs import arguments, refuse, rows_of
from fsfunc.sharded.leaf import is_sharded


class Microbatches:
    """A gradient call in ``n`` parts along dim 0.

    Args:
        call: the gradient call; its own ``batch_argnums`` take precedence.
        n: the number of parts, which are as even as possible, smaller ones last.
        chosen: the ``batch_argnums`` of the transform.
        who: the name of the transform, for errors.
        even: whether the parts must be of one size.

    Raises:
        ValueError: several arguments may be the batch, and none is named; what
            :func:`rows_of` refuses.
    """

    def __init__(
        self,
        call: GradientCall,
        n: int,
        chosen: BatchArgnums | None,
        who: str,
        *,
        even: bool = False,
    ):
        self._call, self.n = call, n
        given = {i: x for i, x in enumerate(call.args)} | call.keywords
        names = [*arguments(len(call.args)), *call.keywords]
        refuse("array sparse", who, [*given.values()], *names)
        said = call.batch_argnums if call.batch_argnums is not None else chosen
        self._arguments = {key: _Argument(x, str(key)) for key, x in given.items()}
        cut = self._told(said) if said is not None else self._only(who) if n > 1 else []
        leaves = {k: x for key in cut for k, x in self._arguments[key].named().items()}
        self._rows = rows_of(leaves, n, even=even)
        for key in cut:
            self._arguments[key].cut(n)

    def _told(self, said: BatchArgnums) -> list[int | str]:
        """The arguments that ``batch_argnums`` names."""
        count, found = len(self._call.args), []
        for key in said:
            if isinstance(key, int) and -count <= key < count:
                key %= count
            elif key not in self._call.keywords:
                names = ", ".join(map(repr, self._call.keywords)) or "no"
                raise ValueError(
                    f"batch_argnums={said}, but this gradient call has {count} "
                    f"positional arguments and {names} keywords: {key!r} is none"
                )
            found.append(key)
        return found

    def _only(self, who: str) -> list[int | str]:
        """The argument after the first that holds tensors, if there is one.

        Raises:
            ValueError: there are several, or it is differentiated.
        """
        found = [k for k, a in self._arguments.items() if k != 0 and a.tensors]
        if len(found) > 1 or any(k in self._call.argnums for k in found):
            told = ", ".join(map(repr, found))
            raise ValueError(
                f"{who} is to cut the batch of a gradient call along dim 0, of which "
                f"the arguments {told} hold tensors: say which of them are the batch, "
                "and which are parameters or buffers that stay whole, by "
                f"batch_argnums=, of ff.value_and_grad or of {who}"
            )
        return found

    def part(self, m: int) -> GradientCall:
        """The call on microbatch ``m``."""
        made = {key: a.part(m) for key, a in self._arguments.items()}
        args = tuple(made.pop(i) for i in range(len(self._call.args)))
        return self._call.replace(args=args, keywords=made)

    def is_cut(self, i: int) -> bool:
        """True if the positional argument ``i`` is cut."""
        return bool(self._arguments[i].pieces)

    def share(self, m: int) -> float:
        """The rows of microbatch ``m``, divided by the mean number."""
        cut = [p for a in self._arguments.values() for p in a.pieces.values()]
        return len(cut[0][m]) * self.n / self._rows if cut else 1.0

    def apart(self, outcome: Outcome, own: list[list[list[Any]]]) -> Outcome:
        """The outcome without gradients by cut arguments, which ``own`` is given."""
        grads: list[Any] = list(outcome.grads)
        own.append([])
        for k, i in enumerate(self._call.argnums):
            found, a = [], self._arguments[i]
            if a.pieces:
                leaves: list[Any] = a.treedef.flatten_up_to(grads[k])  # type: ignore
                found = [leaves[j] for j in a.pieces]
                for j in a.pieces:
                    leaves[j] = None
                grads[k] = tree.unflatten(a.treedef, leaves)
            own[-1].append(found)
        return outcome.with_grads(tuple(grads))

    def joined(self, outcome: Outcome, own: Sequence[list[list[Any]]]) -> Outcome:
        """The outcome with the gradients that :meth:`apart` removed, concatenated."""
        grads = list(outcome.grads)
        for k, i in enumerate(self._call.argnums):
            a = self._arguments[i]
            if a.pieces:
                leaves: list[Any] = a.treedef.flatten_up_to(grads[k])  # type: ignore
                columns = zip(*[found[k] for found in own], strict=True)
                for j, parts in zip(a.pieces, columns, strict=True):
                    whole = isinstance(parts[0], Tensor)  # none by integers
                    leaves[j] = torch.cat(parts) if whole else None
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
    """An argument: its leaves, and the pieces of those that are cut."""

    value: Any
    name: str
    pieces: dict[int, Sequence[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.leaves, self.treedef = tree.flatten(self.value, is_leaf=is_sharded)
        if (tracer := frame().tracer) is not None:
            self.leaves = tracer.in_batch(self.leaves)
        self.tensors = [
            j for j, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.ndim
        ]

    def named(self) -> dict[str, Tensor]:
        """The leaves that can be cut, by path."""
        paths = tree.paths(self.value, is_leaf=is_sharded)
        return {
            "/".join(filter(None, (self.name, paths[j]))): self.leaves[j]
            for j in self.tensors
        }

    def cut(self, n: int) -> None:
        self.pieces = {j: self.leaves[j].tensor_split(n) for j in self.tensors}

    def part(self, m: int) -> Any:
        if not self.pieces:
            return self.value
        leaves = list(self.leaves)
        for j, pieces in self.pieces.items():
            leaves[j] = pieces[m]
        return tree.unflatten(self.treedef, leaves)
