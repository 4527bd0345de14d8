"""``accumulate``: one gradient call as several, on microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.core.frames import Interpretation, frame, inside
from fsfunc.core.losses import added, added_weights
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.runtime.stores import added_beside, lies
from fsfunc.sharded.inputs import arguments, refuse, rows_of
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.packing import split_alike
from fsfunc.transforms.ownership import storage_of
from fsfunc.transforms.transforming import transformed

__all__ = ["Microbatches", "accumulate"]


def accumulate(
    f: Callable[..., Any], n: int, *, batch_argnums: int | Sequence[int] | None = None
) -> Callable[..., Any]:
    """``f`` with each gradient call made on ``n`` microbatches, one after another.

    It equals the plain loop: the mean of the microbatches' values and gradients (with
    ``Weighted`` losses, the sums of totals over the sums of weights). Of what a loss
    returns beside its value, floating scalars are averaged, what is ``Summed(tree)`` is
    summed, other tensors are joined along dim 0, and of the rest the last is given.

    Cut along dim 0 are the tensors among the arguments of the gradient call, but for
    scalars, sharded leaves, and whatever lies in the memory of the first argument of
    ``f``: its state, frozen parameters and buffers too. What a loss captures is not
    cut. An argument that is differentiated and was made in ``f`` is cut only where
    ``batch_argnums`` says so. The gradients by what is cut, such as a batch, are those
    of the mean over the microbatches, joined along dim 0: the rows of what the whole
    batch would have, where the loss is a mean over rows.

    Where it stands decides when gradients are reduced: ``shard(accumulate(f, n))``
    reduces once and holds whole gradients meanwhile, ``accumulate(shard(f), n)``
    reduces each microbatch and holds parts.

    Args:
        f: a train step.
        n: the number of microbatches.
        batch_argnums: which positional arguments of its gradient calls are cut, where
            the rule above does not say what is meant.

    Raises:
        ValueError: ``n`` does not divide dim 0 of the batch; batch leaves that differ
            in it; an argument of which it cannot be known whether it is cut.

    >>> import torch, fsfunc as ff
    >>> grad = ff.accumulate(ff.value_and_grad(lambda w, x: (w * x).mean()), 2)
    >>> grad(torch.tensor(1.0), torch.arange(4.0))
    (tensor(1.5000), tensor(1.5000))
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"accumulate(f, {n!r}): the number of microbatches is >= 1")
    chosen = None
    if batch_argnums is not None:
        given = [batch_argnums] if isinstance(batch_argnums, int) else batch_argnums
        chosen = tuple(given)
    handler = _Accumulate(n, chosen)
    return transformed(f, handler)


class _Accumulate(Interpretation):
    called = "accumulate"

    def __init__(
        self,
        n: int,
        chosen: tuple[int, ...] | None,
        given: Any = None,
        once: bool = False,
    ):
        self.n, self.chosen, self.given, self.once = n, chosen, given, once

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        said = () if self.chosen is None else (("batch_argnums", self.chosen),)
        return (("n", self.n), *said)

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Runs ``f`` in reach of one like this, which knows what ``f`` was given."""
        given = args, keywords
        outer, one = frame(), _Accumulate(self.n, self.chosen, given, self.once)
        try:
            with inside(replace(outer, handlers=(*outer.handlers, one))):
                return f(*args, **keywords)
        finally:
            one.given = None  # frames outlive the call in graphs

    def on(self, given: Any) -> Interpretation:
        return _Accumulate(self.n, self.chosen, given, self.once)

    def recorded(self, recorder: Any) -> Interpretation:
        return _Accumulate(self.n, self.chosen, once=True)  # others show the same

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def accumulated(call: GradientCall) -> Outcome:
            args, keywords = self.given
            cut = Microbatches(call, self.n, self.chosen, args, keywords)
            own: list[Any] = []
            if self.once:
                outcome = cut.apart(run(cut.part(0)), own)
                return cut.joined(outcome, own * self.n)
            f, sums = frame(), _Sums()
            for i in range(self.n):
                with inside(replace(f, micro=(*f.micro, (i, self.n)))):
                    sums.add(cut.apart(run(cut.part(i)), own))
            return cut.joined(sums.outcome(), own)

        return accumulated


class _Sums:
    """Outcomes, added up one by one."""

    def __init__(self) -> None:
        self.first: Outcome | None = None
        self.grads: Any = None
        self.ours = False  # whether nobody else holds the memory of ``grads``

    def add(self, outcome: Outcome) -> None:
        """Adds one; what it holds is not written into."""
        if self.first is None:
            self.first, self.grads = outcome, outcome.grads
            self.ours = outcome.owns
            return
        a, b = self.first, outcome
        if (a.scale, len(a.due)) != (b.scale, len(b.due)):
            raise ValueError(
                "accumulate: a transform within changes the gradients, or what the "
                "backward starts from, of some microbatches alone: let it give all of "
                "them outcome.with_mean(...), of the same gradients where none change"
            )
        weight = added_weights(a.weight, b.weight)
        self.grads = self._added(outcome.grads)
        aux = added(a.aux, b.aux)
        total, count = a.total + b.total, a.count + b.count
        self.first = replace(a, total=total, weight=weight, aux=aux, count=count)

    def _added(self, grads: Any) -> Any:
        ours, theirs = split_alike(self.grads, grads)
        out = list(ours.tensors)
        at = [i for i, x in enumerate(out) if isinstance(x, Tensor)]
        if not at:
            return self.grads
        xs, ys = [out[i] for i in at], [theirs.tensors[i] for i in at]
        if self.ours:
            torch._foreach_add_(xs, ys)  # pyright: ignore
            return self.grads
        # Autograd may hand out one tensor twice, an expanded one, or the caller's own:
        # only sums that we made ourselves are written into.
        if _torch.functorch_active() or any(x.requires_grad for x in (*xs, *ys)):
            sums = [x + y for x, y in zip(xs, ys, strict=True)]  # foreach has no vmap
        else:
            if any(lies(x) is not None for x in xs):
                sums = [added_beside(x, y) for x, y in zip(xs, ys, strict=True)]
            else:
                sums = torch._foreach_add(xs, ys)  # pyright: ignore
            self.ours = True
        for i, x in zip(at, sums, strict=True):
            out[i] = x
        return ours.rebuild(out)

    def outcome(self) -> Outcome:
        """The sum, and of how many."""
        if self.first is None:
            raise RuntimeError("no microbatch was run")
        own = self.grads if self.ours else None
        return replace(self.first, grads=self.grads, own=own)


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
        return outcome.but(tuple(grads))

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
        return outcome.but(tuple(grads))


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
