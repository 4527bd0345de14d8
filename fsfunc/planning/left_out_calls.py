"""Unit calls that a plan leaves out, as they are equal to those before and after them.

Of a run of equal calls (`equal_calls.EqualRun`), such as the layers of a model, a plan
runs the first and the last `KEPT` alone::

    call 0 to 5    run
    call 6 to n-7  return what they were given; in the backward, too
    call n-6 ...   run, as if they came next: the library prefetches their buffers

The events of those that ran are copied into their places when the plan is over
(`call_copies`), which compares what the calls on both sides did. Meanwhile what stays
of a call needs something that stands for it: the gradient of its parameters, and what a
state keeps gathered. Such tensors have numbers of their own, by `events.Reserved`.

Where calls turn out to be unlike, `UnlikeCalls` is raised, and all of them are run.
So they are where the step raises: a loss may have caught it, and gone on without.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch.fake_results import new_fakes
from fsfunc.comm.backends.link import Done, Handle
from fsfunc.comm.ledgers import is_silent
from fsfunc.core.frames import Interpretation
from fsfunc.core.reduction_hooks import (
    GradientObserver,
    GradientSteps,
    ReductionFeedback,
)
from fsfunc.core.units import Call
from fsfunc.planning.events import (
    Allocated,
    CallBegan,
    Reserved,
    ReservedTransfer,
    Started,
)
from fsfunc.runtime.memory import StorageTable
from fsfunc.runtime.memory_spaces import any_offloaded
from fsfunc.sharded.leaf import FlatShard, is_sharded
from fsfunc.tracing.groups import EqualRun
from fsfunc.transforms.gradient_sums import GradientSums
from fsfunc.transforms.shard_runtime import ShardRuntime
from fsfunc.tree.types import Leaf, PyTree

# So many calls run at each end of a run. The outermost three differ from the others:
# the first one's neighbour is another unit, and what a call gathers ahead, or begins to
# reduce, is over within two more. The next three are compared with each other.
KEPT, OUTERMOST = 6, 3


# A packed buffer, and the numbers of a unit call that reads it.
_BufferOfCall: TypeAlias = tuple[FlatShard, tuple[int, ...]]


class UnlikeCalls(Exception):
    """Calls of a run are not equal after all: the plan has to run each of them."""


class CallsBook(Protocol):
    """An `observer.Book`, as far as calls that are left out read and write it."""

    events: list[Any]
    kinds: dict[int, str]
    sizes: list[int]
    storage_numbers: StorageTable[int]


class CallsObserver(Protocol):
    """An `observer.Observer`, as far as calls that are left out read and write it."""

    calls: Counter[tuple[str, str]]
    link: Any

    @property
    def book(self) -> CallsBook: ...


class _Place(NamedTuple):
    """Where a storage or transfer was made: by which call, as which of its own."""

    index: int
    place: int


@dataclass(eq=False)
class _Pass:
    """One pass through the calls of a run: a forward, and its backward.

    Args:
        run: identifies the run; ``count``: its calls on this rank.
        links: see `EqualRun`.
        signature: of the parameters of each call; ``retained``: which of their buffers
            stay gathered for the backward.
        runtimes: of the transforms that gather.
        begun_at: how many events there were when the pass began.

    Attributes:
        shards: by call, its packed buffers; ``keys``: the numbers of its unit call.
        inputs: by position, the tensors among the inputs and keywords of the last call
            that ran; ``constants``: what it returned, without its tensors.
        handed_on: its results, and those of each call that was left out since.
        calls_before: how often units had run when the latest call began.
        forward_calls, backward_calls: how often units run in one call.
        storages, transfers: where those in use were made, since the pass or its
            backward began.
    """

    run: int
    count: int
    links: dict[int, int]
    signature: Any
    retained: list[bool]
    runtimes: Sequence[tuple[Interpretation, ShardRuntime]]
    begun_at: int
    shards: dict[int, list[FlatShard]] = field(default_factory=dict)
    keys: dict[int, tuple[int, ...]] = field(default_factory=dict)
    inputs: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    constants: tuple[list[Leaf], tree.TreeDef] | None = None
    handed_on: list[list[weakref.ref[Tensor]]] = field(default_factory=list)
    calls_before: Counter[tuple[str, str]] = field(default_factory=Counter)
    forward_calls: Counter[tuple[str, str]] | None = None
    backward_calls: Counter[tuple[str, str]] | None = None
    storages: dict[int, _Place] = field(default_factory=dict)
    transfers: dict[int, _Place] = field(default_factory=dict)

    @property
    def last_left_out(self) -> int:
        return self.count - KEPT - 1


class LeftOutCalls:
    """Runs the unit calls of a planned step, or leaves them out.

    Args:
        observer: the plan's.
        runs: the runs of equal calls in its loss.

    Attributes:
        buffers: the buffers of calls that are left out.
        is_used: whether there are marks of calls among the events.
        refused: the first `UnlikeCalls` that was raised; a loss may have caught it.
    """

    def __init__(self, observer: CallsObserver, runs: Iterable[EqualRun]):
        # Of a shorter run the copies would cost as much as they save.
        self.runs = [x for x in runs if x.count >= 2 * KEPT + 2]
        self.observer = observer
        self.buffers: set[str] = set()
        self.is_used = False
        self.refused: UnlikeCalls | None = None
        self._pass: _Pass | None = None
        self._runs_left_out: set[int] = set()
        # The calls that were left out whose backward has to come.
        self._awaited: set[tuple[_Pass, int]] = set()

    def refusal(self, text: str) -> UnlikeCalls:
        """Returns the error to raise where calls are unlike, and keeps it."""
        error = UnlikeCalls(text)
        self.refused = self.refused or error
        return error

    def check_over(self) -> None:
        """Raises, once the step is over, if calls turned out to be unlike."""
        if self._awaited and self.refused is None:
            raise self.refusal("the backward of a call never came")
        if self.refused is not None:
            raise self.refused

    def wrap_call(
        self, call: Call, run: Callable[..., PyTree]
    ) -> Callable[..., PyTree]:
        """Returns the function that runs a call, or what stands for it."""
        f = call.frame
        # A stage of a pipeline has few calls, each with a token of its own.
        if f.path or f.staged or is_silent():
            return run
        for equal_run in self.runs:
            index = call.number - equal_run.first
            if not 0 <= index < equal_run.count:
                continue
            if index == 0:
                self._pass = None
                return partial(self._begin, equal_run, call, run)
            if (this_pass := self._pass) is None:
                return run
            is_kept = not KEPT <= index < this_pass.count - KEPT
            runner = self._keep if is_kept else self._leave_out
            return partial(runner, this_pass, index, call, run)
        return run

    # Calls that run

    def _begin(
        self,
        equal_run: EqualRun,
        call: Call,
        run: Callable[..., PyTree],
        params: PyTree,
        /,
        *inputs: PyTree,
        **keywords: PyTree,
    ) -> PyTree:
        """Runs the first call of a run, and decides whether others are left out."""
        f, count, shards = call.frame, equal_run.count, _shards_of(params)
        can_leave_out = (
            bool(shards)
            and not (f.composable or any_offloaded())
            and not (f.compiler is not None and f.compiler.whole)
            and all(map(_repeats, f.handlers))
            and len(f.runtimes) == 1
        )
        if can_leave_out:
            # The order of gathers tells the buffers of the calls that will come.
            _, runtime = f.runtimes[0]
            start = runtime.call_counts.get(f.micro, runtime.first_index)
            names = shards[0].members[0].order[start : start + count]
            can_leave_out = len(names) == count and names[0] == _names(shards)
            self.buffers.update(x for xs in names[KEPT:-KEPT] for x in xs)
        if not can_leave_out:
            # Its buffers would not be prefetched.
            if equal_run.first in self._runs_left_out:
                raise self.refusal("calls are left out in one pass, and not in another")
            return run(params, *inputs, **keywords)
        self._runs_left_out.add(equal_run.first)
        this_pass = self._pass = _Pass(
            call.number, count, equal_run.links, _signature(params),
            _retained(call, shards, f.runtimes), f.runtimes,
            len(self.observer.book.events),
        )  # fmt: skip
        return self._keep(this_pass, 0, call, run, params, *inputs, **keywords)

    def _keep(
        self,
        this_pass: _Pass,
        index: int,
        call: Call,
        run: Callable[..., PyTree],
        params: PyTree,
        /,
        *inputs: PyTree,
        **keywords: PyTree,
    ) -> PyTree:
        """Runs a call, and marks where it begins, forward and backward."""
        self._check_call(this_pass, index, call, params)
        self._began(this_pass, index, False)
        out = run(params, *inputs, **keywords)
        leaves, treedef = tree.flatten(out, is_leaf=is_sharded)
        _mark_tensors(leaves, partial(self._began, this_pass, index, True))
        if index == KEPT - 1:
            leaves_in = tree.leaves((inputs, keywords), is_leaf=is_sharded)
            this_pass.inputs = {
                i: weakref.ref(x)
                for i, x in enumerate(leaves_in)
                if isinstance(x, Tensor)
            }
            this_pass.handed_on = [[weakref.ref(leaves[i]) for i in this_pass.links]]
            constants = [
                None if i in this_pass.links else y for i, y in enumerate(leaves)
            ]
            this_pass.constants = constants, treedef
        if index == this_pass.count - 1:
            self._began(this_pass, this_pass.count, False)
            self._pass = None
        return tree.unflatten(treedef, leaves)

    def _began(self, this_pass: _Pass, index: int, is_backward: bool) -> None:
        """Marks, in the events, that a call begins, or its backward."""
        if is_backward and index == this_pass.count - 1:
            this_pass.begun_at = len(self.observer.book.events)
        self.is_used = True
        buffers = tuple(shard.name for shard in this_pass.shards.get(index, ()))
        self.observer.book.events.append(
            CallBegan(this_pass.run, index, this_pass.count, is_backward, buffers)
        )
        is_left_out = KEPT <= index <= this_pass.last_left_out
        if not is_left_out:
            this_pass.calls_before = self.observer.calls.copy()

    def _check_call(
        self, this_pass: _Pass, index: int, call: Call, params: PyTree
    ) -> None:
        """Raises if the parameters of a call differ from those of the first one."""
        shards = _shards_of(params)
        # A pattern may name the leaves of one call, whose buffer is kept gathered.
        if _signature(params) != this_pass.signature or this_pass.retained != _retained(
            call, shards, this_pass.runtimes
        ):
            raise self.refusal(f"call {call.number} has other parameters")
        this_pass.shards[index] = shards
        this_pass.keys[index] = call.numbers

    # Calls that are left out

    def _leave_out(
        self,
        this_pass: _Pass,
        index: int,
        call: Call,
        run: Callable[..., PyTree],
        params: PyTree,
        /,
        *inputs: PyTree,
        **keywords: PyTree,
    ) -> PyTree:
        """Returns what a call was given by the one before, in place of its results."""
        self._check_call(this_pass, index, call, params)
        leaves_in = tree.leaves((inputs, keywords), is_leaf=is_sharded)
        self._check_inputs(this_pass, leaves_in)
        self._began(this_pass, index, False)
        if this_pass.forward_calls is None:
            this_pass.forward_calls = self.observer.calls - this_pass.calls_before
            this_pass.storages, this_pass.transfers = self._find_places(
                this_pass, False
            )
        self.observer.calls.update(this_pass.forward_calls)
        like, shards = this_pass.shards[KEPT - 2], this_pass.shards[index]
        stand_in = partial(self._stand_in, this_pass, index - (KEPT - 2))
        micro = call.frame.micro
        for _, runtime in this_pass.runtimes:
            counts, first = runtime.call_counts, runtime.first_index
            counts[micro] = counts.get(micro, first) + 1
        for ours, theirs in zip(shards, like, strict=True):
            if theirs.whole is not None:  # at zero 1 and 2 the state keeps it
                ours.cache_gathered(stand_in(theirs.whole, ours.whole))
        assert this_pass.constants is not None, "the last call that ran has set them"
        leaves, treedef = list(this_pass.constants[0]), this_pass.constants[1]
        results = list(this_pass.links)
        for i in results:
            leaves[i] = leaves_in[this_pass.links[i]].detach()
        tracked = [i for i in results if leaves_in[this_pass.links[i]].requires_grad]
        if tracked and torch.is_grad_enabled():
            self._awaited.add((this_pass, index))
            pass_back = partial(self._pass_back, this_pass, index)
            tensors = _LeftOut.apply(
                pass_back, *(leaves_in[this_pass.links[i]] for i in tracked)
            )
            for i, y in zip(tracked, tensors, strict=True):
                leaves[i] = y
        this_pass.handed_on.append([weakref.ref(leaves[i]) for i in results])
        return tree.unflatten(treedef, leaves)

    def _check_inputs(self, this_pass: _Pass, leaves_in: Sequence[Leaf]) -> None:
        """Raises if a call is not given what the recorded one was.

        That is: the results of the call before, and else what all calls are given. And
        nothing but that call has used these results.
        """
        results = zip(this_pass.links.values(), this_pass.handed_on[-1], strict=True)
        expected = this_pass.inputs | dict(results)
        for i, x in enumerate(leaves_in):
            if isinstance(x, Tensor) and x is not expected[i]():
                raise self.refusal("a call has other inputs than it was recorded with")
        earlier = this_pass.handed_on[-2] if len(this_pass.handed_on) > 1 else []
        if any(ref() is not None for ref in earlier):
            raise self.refusal("the result of a call is in use after the next one")

    def _pass_back(self, this_pass: _Pass, index: int) -> None:
        """Does what the backward of a call that was left out leaves behind."""
        self._awaited.discard((this_pass, index))
        self._began(this_pass, index, True)
        if index == this_pass.last_left_out:
            this_pass.backward_calls = self.observer.calls - this_pass.calls_before
            this_pass.storages, this_pass.transfers = self._find_places(this_pass, True)
        assert this_pass.backward_calls is not None, "the last call left out sets them"
        self.observer.calls.update(this_pass.backward_calls)
        # Of a call two later all that its backward has started is over.
        like = this_pass.count - KEPT + 2
        shift = index - like
        stand_in = partial(self._stand_in, this_pass, shift)
        stand_in_transfer = partial(self._stand_in_transfer, this_pass, shift)
        for _, runtime in this_pass.runtimes:
            pairs = zip(this_pass.shards[index], this_pass.shards[like], strict=True)
            for ours, theirs in pairs:
                done = _add_gradient_like(
                    runtime.sums,
                    (ours, this_pass.keys[index]),
                    (theirs, this_pass.keys[like]),
                    stand_in,
                    stand_in_transfer,
                )
                if not done:
                    raise self.refusal("a reduction takes longer than two calls")

    def _find_places(
        self, this_pass: _Pass, is_backward: bool
    ) -> tuple[dict[int, _Place], dict[int, _Place]]:
        """Returns where the storages and transfers of the calls that ran were made."""
        storages: dict[int, _Place] = {}
        transfers: dict[int, _Place] = {}
        index = n_storages = n_transfers = -1
        for event in self.observer.book.events[this_pass.begun_at :]:
            if isinstance(event, CallBegan):
                is_here = (
                    event.run == this_pass.run and event.is_backward == is_backward
                )
                index = event.index if is_here else -1
                n_storages = n_transfers = 0
            elif isinstance(event, Allocated) and index >= 0:
                storages[event.storage] = _Place(index, n_storages)
                n_storages += 1
            elif isinstance(event, Started) and index >= 0:
                transfers[event.number] = _Place(index, n_transfers)
                n_transfers += 1
        return storages, transfers

    def _stand_in(
        self, this_pass: _Pass, shift: int, x: Tensor, before: Tensor | None
    ) -> Tensor:
        """Returns what stands for the tensor that another call has in place of ``x``.

        Args:
            shift: by how much later a call.
            before: what has stood for it until now. It still does where ``x`` was there
                before the pass.
        """
        book = self.observer.book
        number = book.storage_numbers.get(x)
        place = None if number is None else this_pass.storages.get(number)
        if number is None or place is None:
            if before is None:
                raise self.refusal("a call keeps a tensor that it did not make")
            return before
        (y,) = new_fakes(_torch.fake_mode(), [(x.shape, x.stride(), x.dtype)])  # type: ignore[arg-type]
        book.storage_numbers[y] = reserved = len(book.sizes)
        book.sizes.append(y.untyped_storage().nbytes())
        if (kind := book.kinds.get(number)) is not None:
            book.kinds[reserved] = kind
        book.events.append(Reserved(reserved, place.index + shift, place.place))
        return y

    def _stand_in_transfer(
        self, this_pass: _Pass, shift: int, handle: Any, x: Tensor
    ) -> Handle:
        """Returns what stands for a transfer under way, of ``x``; as `_stand_in`."""
        place = this_pass.transfers.get(handle.number)
        if place is None or handle.is_over:
            raise self.refusal("a call keeps a transfer that it did not start")
        link = self.observer.link
        arrived = handle.work.wait()
        is_own = arrived is not handle.x
        work = Done(self._stand_in(this_pass, shift, arrived, None) if is_own else x)
        self.observer.book.events.append(
            ReservedTransfer(link.count, place.index + shift, place.place)
        )
        link.count += 1
        return type(handle)(work, link.count - 1, self.observer, x)


def _add_gradient_like(
    sums: GradientSums,
    call: _BufferOfCall,
    like: _BufferOfCall,
    stand_in: Callable[[Tensor, Tensor | None], Tensor],
    stand_in_transfer: Callable[[Handle, Tensor], Handle],
) -> bool:
    """Adds the gradient of a unit call that is left out, where another's lies.

    Args:
        like: a call whose gradient has come.
        stand_in: returns what stands for a tensor, given what does so far.
        stand_in_transfer: the same for a transfer, of the tensor that is given.

    Returns:
        whether that gradient was where it stays until the backward is over.
    """
    (shard, key), (other, other_key) = call, like
    before = sums.accumulating.pop((id(shard), key), None)
    if (summed := sums.grads.get(id(other))) is not None:
        sums.grads[id(shard)] = stand_in(summed, sums.grads.get(id(shard)))
    stays = [sums.accumulating.values(), sums.deferred, sums.held]
    passing = [sums.summing_replicas]
    (stays if sums.most_in_flight > 1 else passing).append(sums.reducing)
    for gradients in stays:
        for gradient in [g for g in gradients if g.shard is other]:
            if gradient.key[1] != other_key:
                continue
            twin = replace(gradient, shard=shard, key=(id(shard), key))
            twin.tensor = stand_in(
                gradient.tensor, None if before is None else before.tensor
            )
            if gradient.handle is not None:
                twin.handle = stand_in_transfer(gradient.handle, twin.tensor)
            if isinstance(gradients, list):
                gradients.append(twin)
            else:
                sums.accumulating[twin.key] = twin
    return not any(g.shard is other for gs in passing for g in gs)


class _LeftOut(torch.autograd.Function):
    """Returns what it is given, forward and backward, in the place of a unit call."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, pass_back: Callable[[], None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pass_back = pass_back
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.pass_back()
        return (None, *grads)


def _mark_tensors(leaves: list[Leaf], pass_back: Callable[[], None]) -> None:
    """Has ``pass_back`` called when the backward comes to these tensors, in place."""
    if not torch.is_grad_enabled():
        return
    tracked = [
        i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad
    ]
    if tracked:
        tensors = _LeftOut.apply(pass_back, *(leaves[i] for i in tracked))
        for i, y in zip(tracked, tensors, strict=True):
            leaves[i] = y


def _repeats(handler: Interpretation) -> bool:
    """Returns whether a transform does the same in each of some equal unit calls."""
    if isinstance(handler, GradientObserver | GradientSteps | ReductionFeedback):
        return False
    return handler.repeats_calls or type(handler).unit is Interpretation.unit


def _shards_of(params: PyTree) -> list[FlatShard]:
    """Returns the packed buffers of parameters; none if others are among them."""
    shards: dict[FlatShard, None] = {}
    for x in tree.leaves(params, is_leaf=is_sharded):
        if not is_sharded(x) or (shard := x.packed) is None or shard.is_shared:
            return []
        shards[shard] = None
    return list(shards)


def _names(shards: Iterable[FlatShard]) -> tuple[str, ...]:
    return tuple(shard.buffer for shard in shards)


def _retained(
    call: Call,
    shards: Sequence[FlatShard],
    runtimes: Sequence[tuple[Interpretation, ShardRuntime]],
) -> list[bool]:
    """Returns which buffers stay gathered, by ``reshard_after_forward``."""
    return [
        runtime.options.retains(call.name, shard)
        for _, runtime in runtimes
        for shard in shards
    ]


def _signature(params: PyTree) -> Any:
    """Returns what is equal of the parameters of equal calls."""
    leaves, treedef = tree.flatten(params, is_leaf=is_sharded)
    kinds = []
    for x in leaves:
        if not is_sharded(x) or (shard := x.packed) is None:
            return None
        layout, flat = x.layout, shard.flat
        kinds.append(
            (layout.shape, layout.dtype, layout.view, layout.compute, x.part_shape,
             flat.shape, flat.dtype, flat.requires_grad, shard.place.size,
             shard.split_axes, shard.whole is None, len(shard.members))
        )  # fmt: skip
    return treedef, *kinds
