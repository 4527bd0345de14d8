"""The microbatches of one gradient call: what is cut, and what becomes of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.autodiff import GradientCall, Outcome
from fsfunc.sharded.inputs import arguments, refuse, rows_of
from fsfunc.sharded.leaf import is_sharded
from fsfunc.transforms.ownership import storage_of

__all__ = ["Microbatches"]


class Microbatches:
    """A gradient call in parts along dim 0.

    Args:
        call: the gradient call.
        n: how many parts.
        chosen: positions of the arguments that are cut, where the caller said so.
        args, keywords: those of the step in which the call is made. What lies in the
            memory of the first is its state; what lies in that of another is batch.

    Raises:
        ValueError: what :func:`rows_of` refuses; an argument that was made in the step,
            is differentiated, and has as many rows as the batch: it may be parameters.
    """

    def __init__(
        self,
        call: GradientCall,
        n: int,
        chosen: tuple[int, ...] | None,
        args: Sequence[Any],
        keywords: Mapping[str, Any],
    ):
        self._call, count = call, len(call.args)
        given = [*call.args, *call.keywords.values()]
        names = [*arguments(count), *call.keywords]
        refuse("array sparse", "accumulate", given, *names)
        if any(not -count <= k < count for k in chosen or ()):
            raise ValueError(
                f"batch_argnums={chosen}, but this gradient call has {count} "
                "positional arguments"
            )
        said = None if chosen is None else {k % count for k in chosen}
        state, batch = _storages(args[:1]), _storages((args[1:], keywords))
        self._args = [_Argument(x, str(i)) for i, x in enumerate(call.args)]
        self._keywords = {k: _Argument(x, k) for k, x in call.keywords.items()}
        made = []
        for i, a in enumerate([*self._args, *self._keywords.values()]):
            if said is not None and i < count:
                a.cut = a.tensors if i in said else []
                continue
            a.cut = [j for j in a.tensors if a.storage(j) not in state]
            if i in call.argnums and any(a.storage(j) not in batch for j in a.cut):
                # Parameters after an inner step, or rows that were changed: nobody
                # knows.
                made.append((i, a, a.cut))
                a.cut = [j for j in a.cut if a.storage(j) in batch]
        cut = [a for a in (*self._args, *self._keywords.values()) if a.cut]
        leaves = {k: v for a in cut for k, v in a.named().items()}
        rows = rows_of(leaves, n, even=True)
        for i, a, own in made:
            if leaves and all(a.leaves[j].shape[0] == rows for j in own):
                raise ValueError(
                    f"argument {i} of a gradient call under accumulate was made in the "
                    f"step, is differentiated, and has {rows} rows, as the batch has: "
                    "parameters, which are not cut, or rows? Say it: accumulate(f, "
                    f"{n}, batch_argnums=...) names what is cut, such as {i} for rows"
                )
        for a in cut:
            a.pieces = {j: a.leaves[j].tensor_split(n) for j in a.cut}

    def part(self, m: int) -> GradientCall:
        """The call on microbatch ``m``."""
        args = tuple(a.part(m) for a in self._args)
        keywords = {k: a.part(m) for k, a in self._keywords.items()}
        return replace(self._call, args=args, keywords=keywords)

    def apart(self, outcome: Outcome, own: list[list[list[Any]]]) -> Outcome:
        """The outcome without the gradients by what is cut; ``own`` has those more."""
        grads: list[Any] = list(outcome.grads)
        own.append([])
        for k, i in enumerate(self._call.argnums):
            found, a = [], self._args[i]
            if a.pieces:
                leaves: list[Any] = a.treedef.flatten_up_to(grads[k])  # type: ignore
                found = [leaves[j] for j in a.pieces]
                for j in a.pieces:
                    leaves[j] = None
                grads[k] = tree.unflatten(a.treedef, leaves)
            own[-1].append(found)
        return replace(outcome, grads=tuple(grads))

    def joined(self, outcome: Outcome, own: Sequence[list[list[Any]]]) -> Outcome:
        """What :meth:`apart` took from each part, in order, put back as one."""
        grads = list(outcome.grads)
        for k, i in enumerate(self._call.argnums):
            a = self._args[i]
            if a.pieces:
                leaves: list[Any] = a.treedef.flatten_up_to(grads[k])  # type: ignore
                columns = zip(*[found[k] for found in own], strict=True)
                for j, parts in zip(a.pieces, columns, strict=True):
                    whole = isinstance(parts[0], Tensor)  # none by integers
                    leaves[j] = torch.cat(parts) if whole else None
                grads[k] = tree.unflatten(a.treedef, leaves)
        return replace(outcome, grads=tuple(grads))


@dataclass
class _Argument:
    """One argument: its leaves, and which of them are cut."""

    value: Any
    name: str
    cut: list[int] = field(default_factory=list)
    pieces: dict[int, Sequence[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.leaves, self.treedef = tree.flatten(self.value, is_leaf=is_sharded)
        self.tensors = [
            j for j, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.ndim
        ]

    def storage(self, j: int) -> int:
        return storage_of(self.leaves[j])

    def named(self) -> dict[str, Tensor]:
        """path -> leaf, of what is cut."""
        paths = tree.paths(self.value, is_leaf=is_sharded)
        return {
            "/".join(filter(None, (self.name, paths[j]))): self.leaves[j]
            for j in self.cut
        }

    def part(self, m: int) -> Any:
        if not self.pieces:
            return self.value
        leaves = list(self.leaves)
        for j, pieces in self.pieces.items():
            leaves[j] = pieces[m]
        return tree.unflatten(self.treedef, leaves)


def _storages(values: Any) -> set[int]:
    leaves = tree.leaves(values, is_leaf=is_sharded)
    return {storage_of(x) for x in leaves if isinstance(x, Tensor)}
