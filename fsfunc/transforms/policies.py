"""Policies of ``remat``, as data, and the names that they refer to.

A policy of named values works by counting: the `Tape` of a unit call numbers the
operators that its function runs. The first run saves the outputs that the policy names,
by these numbers; the second returns them in place of running the operators again::

    op 0  op 1  op 2  op 3          h = checkpoint_name(op 1's output, "hidden")
     run   run   run   run          first run: saves the output of op 1
     run  (saved) run   run         second run

`rematerialization` chooses by them, and `repeated_calls` uses the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import internal, is_internal
from fsfunc.runtime.generators import States, generator_states, set_generators
from fsfunc.runtime.memory import StorageTable
from fsfunc.runtime.scopes import Scoped

Mode: TypeAlias = Literal["always", "except_last", "never"]
MODES: tuple[Mode, ...] = get_args(Mode)


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
        share: how much of what is kept at 1 to keep, beside the unit's inputs; above 0,
            at most 1.

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
    """Returns whether a call made in the microbatches ``micro`` is recomputed.

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


# Of the unit calls around, outermost first: a name is told to each.
_TAPES: ContextVar[tuple[Tape, ...]] = ContextVar("fsfunc_tapes", default=())


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """Names ``x`` for the policy of a ``remat`` around the unit; returns it.

    What is kept is the output of the op that made ``x``. A value that was changed in
    place, or is a view of the unit's input, is recomputed whatever the policy says.

    >>> import torch
    >>> checkpoint_name(torch.ones(2), "hidden").tolist()
    [1.0, 1.0]
    """
    for tape in _TAPES.get():
        # Else tapes would count the operators of `name` among the unit's, in the first
        # run alone.
        with internal():
            tape.name(x, name)
    return x


@dataclass(frozen=True)
class _OpOutput:
    """One output of an op of the first run, without its memory.

    Args:
        number: the op's number in the run; ``func``: the op.
        sequence: the type of sequence that it returned; None: one tensor.
        other_outs: all that it returned, but None in the place of this output.
        index: that place.
        geometry: (size, stride, offset, dtype) of this output.
        states: how the generators stood afterwards, for an op that draws.
    """

    number: int
    func: _torch.OpOverload
    sequence: type | None
    other_outs: tuple[Any, ...]
    index: int
    geometry: tuple[Any, ...]
    states: States


class Tape:
    """The saved values of one unit call, by the number of the op that made them.

    The first run counts the unit's ops and remembers which made which storage; a named
    value is saved under its op's number. The second run counts again, and in place of
    such an op returns what was saved; its autograd node is made all the same. Ops of
    transforms and collectives on the way do not count.

    Attributes:
        makers: by storage, the op that made it; None: it was written since.
        saved: by the op's number, the outputs that are saved.
        values: their values with the version of each, until :meth:`take_values`.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.makers: StorageTable[_OpOutput | None] = StorageTable()
        self.saved: dict[int, _OpOutput] = {}
        self.values: dict[int, tuple[Tensor, int]] = {}

    def name(self, x: Tensor, name: str) -> None:
        """Saves the op's output that ``x`` lies in, if the policy says so."""
        # None: it is the unit's input, or a view of it, or was written since: no op's
        # output has its value.
        made = self.makers.get(x)
        if made is None or not self.policy.keeps(name):
            return
        size, stride, offset, dtype = made.geometry
        # As the op returned it: `x` may be a view of that, and the second run returns
        # the op's output. (From a view in another dtype it cannot be made again.)
        if x.dtype == dtype:
            value = x.detach().as_strided(size, stride, offset)
            self.values[made.number] = (value, value._version)
            self.saved[made.number] = made

    def take_values(self) -> list[Tensor]:
        """Returns the saved values, for the caller to hold until :meth:`replay`."""
        for number, (value, version) in list(self.values.items()):
            if value._version != version:  # changed in place after it was named
                del self.values[number], self.saved[number]
        values = [value for value, _ in self.values.values()]
        self.values.clear()
        return values

    def _run_first(
        self,
        number: int,
        func: _torch.OpOverload,
        args: _torch.Args,
        kwargs: _torch.Kwargs,
    ) -> Any:
        """Runs an op of the first run, and notes what it made."""
        out = func(*args, **kwargs)
        if not _torch.makes_memory(func):
            for x in _torch.tensors_written(func, args, kwargs):
                self.makers[x] = None
            return out  # a view's storage has its maker already
        sequence = type(out) if isinstance(out, (list, tuple)) else None
        outs = (out,) if sequence is None else tuple(out)
        # An op that is not run again must move the generators on as it did.
        draws = torch.Tag.nondeterministic_seeded in func.tags
        states = generator_states() if draws else []
        # The others are kept along with one that is named: the op, which returns all of
        # them, is not run again.
        for i, x in enumerate(outs):
            if isinstance(x, Tensor):
                others = (*outs[:i], None, *outs[i + 1 :])
                shape = x.size(), x.stride(), x.storage_offset(), x.dtype
                made = _OpOutput(number, func, sequence, others, i, shape, states)
                self.makers[x] = made
        return out

    @contextmanager
    def record(self) -> Iterator[None]:
        """Inside, the unit's function runs for the first time."""
        try:
            with Scoped(_TAPES, (*_TAPES.get(), self)), _OpCounter(self._run_first):
                yield
        finally:
            self.makers = StorageTable()  # whose entries hold the ops' other outputs

    def replay(self, values: Sequence[Tensor]) -> _OpCounter:
        """Inside, it runs again: an op whose output was saved returns that instead."""
        saved_values = dict(zip(self.saved, values, strict=True))

        def run_again(
            number: int,
            func: _torch.OpOverload,
            args: _torch.Args,
            kwargs: _torch.Kwargs,
        ) -> Any:
            made = self.saved.get(number)
            if made is None:
                return func(*args, **kwargs)
            # The numbers run apart if the unit does something else this time, and its
            # gradient would be wrong with no error.
            if made.func is not func:
                raise RuntimeError(
                    f"the recompute of a unit called {func} where its first run called "
                    f"{made.func}: a unit under remat must do the same again"
                )
            outs = list(made.other_outs)
            outs[made.index] = saved_values[number]
            # New tensors, to which autograd, above this mode, gives the op's node.
            outs = [x.detach() if isinstance(x, Tensor) else x for x in outs]
            set_generators(made.states)
            return outs[0] if made.sequence is None else made.sequence(outs)

        return _OpCounter(run_again)


class _OpCounter(_torch.OperatorMode):
    """Numbers the ops of the user's function, and has ``run`` run each.

    Args:
        run: ``run(number, func, args, kwargs)``.
    """

    run: Callable[[int, _torch.OpOverload, _torch.Args, _torch.Kwargs], Any]
    count: int

    def __init__(
        self, run: Callable[[int, _torch.OpOverload, _torch.Args, _torch.Kwargs], Any]
    ) -> None:
        super().__init__()
        self.run, self.count = run, 0

    def operator(
        self, func: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
    ) -> Any:
        # These may be fewer in the second run: asking for a device, and the detached
        # copies that autograd saves. Nor do a transform's own ops count.
        uncounted = func.namespace == "prim" or func is torch.ops.aten.detach.default
        if uncounted or is_internal():
            return func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        return self.run(number, func, args, kwargs)
