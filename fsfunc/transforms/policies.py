"""Policies of ``remat``, as data, and the names that they refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import internal, is_internal
from fsfunc.runtime.generators import States, generator_states, set_generators
from fsfunc.runtime.memory import StorageTable
from fsfunc.runtime.scopes import Scoped

MODES = ("always", "except_last", "never")


@dataclass(frozen=True)
class Policy:
    """A set of named values that ``remat`` keeps, or does not."""

    names: frozenset[str]

    def __init__(self, *names: str):
        flat = [
            n for name in names for n in ([name] if isinstance(name, str) else name)
        ]
        object.__setattr__(self, "names", frozenset(flat))

    def keeps(self, name: str) -> bool:
        raise NotImplementedError


class SaveOnly(Policy):
    """Keeps the values of these names, and recomputes the rest.

    >>> SaveOnly("attention").keeps("attention"), SaveOnly("attention").keeps("mlp")
    (True, False)
    """

    def keeps(self, name: str) -> bool:
        return name in self.names


class SaveAllBut(Policy):
    """Keeps every named value but these; what has no name is recomputed.

    >>> SaveAllBut("attention").keeps("attention"), SaveAllBut("attention").keeps("mlp")
    (False, True)
    """

    def keeps(self, name: str) -> bool:
        return name not in self.names


@dataclass(frozen=True)
class MinCut:
    """Keeps what costs least to keep, as the compiler of ``jit`` sees it.

    Of what a backward reads the compiler keeps the least that it cannot compute again
    for little; what becomes a part of a kernel of the backward it computes again. So it
    does at ``zero`` 1 to 3 without ``remat``; else it keeps what products read, too.
    Below a share of 1 it drops more: first what is no product, then, at the least cost
    in FLOPs, products and attention. Only units that ``jit`` compiles have this policy.

    Args:
        share: of that, beside the unit's inputs; above 0, at most 1.

    Raises:
        ValueError: another share.

    Cost: of a transformer's block of 256 wide on 1,024 tokens, on a CPU: without
    ``remat`` 16 times the block's input is held for its backward. Shares of 1, 0.7, 0.5
    and 0.3, and ``remat`` without a policy, hold 10, 6, 5, 2 and 1 times that, and take
    1.02, 1.12, 1.15, 1.18 and 1.21 of the time. What is gathered is as with ``remat``
    without a policy.

    Source: ``min_cut_rematerialization_partition`` of functorch.compile, with its
    ``activation_memory_budget``.

    >>> MinCut().share
    0.5
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(
                f"MinCut({self.share}): the share is above 0 and at most 1; remat "
                "without a policy keeps a unit's inputs alone"
            )


def recomputes(
    policy: Policy | MinCut | str | None, micro: Sequence[tuple[int, int]]
) -> bool:
    """True if a call is recomputed that was made in the microbatches ``micro``.

    ``"except_last"`` spares the last microbatch of the innermost loop: where all run
    forward first, its backward comes at once, and forgetting would free nothing.
    Outside any loop there is one microbatch, which is the last.

    Source: GPipe (Huang et al., 2019), as FairScale's Pipe has it.

    >>> [recomputes("except_last", micro) for micro in ((), ((0, 2),), ((1, 2),))]
    [False, True, False]
    """
    if policy == "except_last":
        index, count = micro[-1] if micro else (0, 1)
        return index < count - 1
    return policy != "never"


_TAPES: ContextVar[tuple[Tape, ...]] = ContextVar("fsfunc_tapes", default=())


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """``x``, known by ``name`` to the policy of a ``remat`` around the unit.

    What is kept is the output of the op that made ``x``. A value that was changed in
    place, or is a view of the unit's input, is recomputed whatever the policy says.

    >>> import torch
    >>> checkpoint_name(torch.ones(2), "hidden").tolist()
    [1.0, 1.0]
    """
    for tape in _TAPES.get():
        with internal():
            tape.name(x, name)
    return x


@dataclass(frozen=True)
class _Made:
    """The output of an op of the first run, without its memory where possible.

    Args:
        number, func: which op it was; ``many``: whether it returned a sequence.
        outs: its outputs but the one that this entry is about, which is at ``place``.
        shape: (size, stride, offset, dtype) of that one.
        states: how the generators stood afterwards, for an op that draws.
    """

    number: int
    func: Any
    many: type | None
    outs: tuple[Any, ...]
    place: int
    shape: tuple[Any, ...]
    states: States


class Tape:
    """The kept values of one unit call, by the number of the op that made them.

    The first run counts the unit's ops and remembers which made which storage; where a
    named value is kept, it is kept under its op's number. The second run counts again,
    and in place of such an op returns what was kept; its autograd node is made all the
    same. Ops of transforms and collectives on the way do not count.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.makers = StorageTable[_Made | None]()  # until the first run ends
        self.kept: dict[int, _Made] = {}
        self.values: dict[int, tuple[Tensor, int]] = {}

    def name(self, x: Tensor, name: str) -> None:
        """Keeps ``x`` if the policy says so."""
        made = self.makers.get(x)
        if made is None or not self.policy.keeps(name):
            return
        size, stride, offset, dtype = made.shape
        if x.dtype == dtype:
            value = x.detach().as_strided(size, stride, offset)
            self.values[made.number] = (value, value._version)
            self.kept[made.number] = made

    def tensors(self) -> list[Tensor]:
        """The kept values: the caller holds them until :meth:`replay`."""
        for number, (value, version) in list(self.values.items()):
            if value._version != version:  # changed in place after it was named
                del self.values[number], self.kept[number]
        values = [value for value, _ in self.values.values()]
        self.values.clear()
        return values

    def _first(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an op of the first run, and notes what it made."""
        out = func(*args, **kwargs)
        if not _torch.makes_memory(func):
            for x in _torch.tensors_written(func, args, kwargs):
                self.makers[x] = None
            return out  # of a view the storage keeps its maker
        many = type(out) if isinstance(out, (list, tuple)) else None
        outs = (out,) if many is None else tuple(out)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        states = generator_states() if draws else []
        for i, x in enumerate(outs):
            if isinstance(x, Tensor):
                others = (*outs[:i], None, *outs[i + 1 :])
                shape = x.size(), x.stride(), x.storage_offset(), x.dtype
                self.makers[x] = _Made(number, func, many, others, i, shape, states)
        return out

    @contextmanager
    def keep(self) -> Iterator[None]:
        """The first run."""
        try:
            with Scoped(_TAPES, (*_TAPES.get(), self)), _Counting(self._first):
                yield
        finally:
            self.makers = StorageTable()

    def replay(self, values: Sequence[Tensor]) -> _Counting:
        """The second run: an op whose output was kept does not run, and returns it."""
        given = dict(zip(self.kept, values, strict=True))

        def again(number: int, func: Any, args: Any, kwargs: Any) -> Any:
            made = self.kept.get(number)
            if made is None:
                return func(*args, **kwargs)
            if made.func is not func:
                raise RuntimeError(
                    f"the recompute of a unit called {func} where its first run called "
                    f"{made.func}: a unit under remat must do the same again"
                )
            outs = list(made.outs)
            outs[made.place] = given[number]
            outs = [x.detach() if isinstance(x, Tensor) else x for x in outs]
            set_generators(made.states)
            return outs[0] if made.many is None else made.many(outs)

        return _Counting(again)


class _Counting(_torch.OperatorMode):
    """Numbers the ops of the user's function, and has ``run`` run each."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run, self.count = run, 0

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Asking for a device; and what autograd saves.
        apart = func.namespace == "prim" or func is torch.ops.aten.detach.default
        if apart or is_internal():
            return func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        return self.run(number, func, args, kwargs)
