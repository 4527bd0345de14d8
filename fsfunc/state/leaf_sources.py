"""Sources of the values of a tree that is laid out: given, deferred, or none.

`leaf_groups` asks a source for the memory of a rank's part, and to write the part into
it. There are three:

`GivenLeaves`  whole tensors that the user gave: the part is copied
`Deferred`     an init function that ran on fake tensors: the part is computed
`Shapes`       shapes alone, for ``abstract_state``: nothing is written
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.backends.abstract import naming_value_reads
from fsfunc.comm.collective_ops import maps_run_by
from fsfunc.comm.comparison import Section
from fsfunc.comm.descriptions import ALIKE, section_of_values
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.slices import take
from fsfunc.state.init_tape import InitTape, Replay
from fsfunc.tree.types import Leaf, PyTree


class GivenLeaves:
    """Leaves that are here whole."""

    def zeros(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return like.new_zeros(count, dtype=dtype)

    def empty(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return like.new_empty(count, dtype=dtype)

    def write(
        self, x: Tensor, layout: Layout, coordinates: Mapping[str, int], out: Tensor
    ) -> None:
        """Writes a rank's part of ``x`` to ``out``, one range of its elements."""
        out.copy_(take(x, layout, coordinates))

    def whole(self, x: Tensor) -> Tensor:
        """Returns all of ``x`` in new memory, as a donated step may write there."""
        return x.detach().clone()

    def copied(self, x: Leaf) -> Leaf:
        """Returns a leaf of any kind; a tensor in new memory, as `whole` does."""
        return self.whole(x) if isinstance(x, Tensor) else x

    def release(self) -> None:
        """Frees what was stored for the next leaf."""

    def note_whole(self, path: str) -> None:
        """Notes a leaf that the optimizer whose state it is has whole on every rank."""

    def check_born(self, path: str, leaf: Sharded | Tensor | None) -> None:
        """Checks a leaf of an optimizer's state with what its ``init`` would make.

        Args:
            leaf: what ``init`` makes of the parameters as they are laid out; None where
                it makes another tree.
        """

    def section(
        self, paths: Sequence[str], leaves: Sequence[Leaf], notes: dict[Any, Any] | None
    ) -> Section:
        """Returns a description of the values that must be equal on every rank.

        Args:
            notes: of ranks that share a process, which may share tensors too.
        """
        return section_of_values(paths, leaves, notes)


class Shapes(GivenLeaves):
    """Leaves of which only the shapes are wanted."""

    def zeros(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return torch.empty(count, dtype=dtype, device="meta")

    empty = zeros

    def write(
        self, x: Tensor, layout: Layout, coordinates: Mapping[str, int], out: Tensor
    ) -> None:
        pass

    def whole(self, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    def section(
        self, paths: Sequence[str], leaves: Sequence[Leaf], notes: dict[Any, Any] | None
    ) -> Section:
        return section_of_values((), (), notes)


class Deferred(GivenLeaves):
    """Leaves that a function made, or will make when they are read."""

    def __init__(self, tape: InitTape):
        self.tape = tape
        self.replay: Replay = Replay(tape)

    def zeros(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=_torch.device_of(like))

    def empty(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return torch.empty(count, dtype=dtype, device=_torch.device_of(like))

    def write(
        self, x: Tensor, layout: Layout, coordinates: Mapping[str, int], out: Tensor
    ) -> None:
        ref = self.tape.ref_of_result(x)
        if ref is None:  # a tensor that the function was given, or holds
            super().write(x, layout, coordinates, out)
        elif layout.splits:  # of rows, not one range of what the tape makes
            super().write(self.whole(x), layout, coordinates, out)
        else:
            self.replay.write(ref, *layout.span(coordinates), out)

    def whole(self, x: Tensor) -> Tensor:
        ref = self.tape.ref_of_result(x)
        if ref is None:
            return super().whole(x)
        if ref.span is None:  # no range of its storage, such as a transpose
            return self.replay.view(ref).clone()
        out = torch.empty(x.shape, dtype=x.dtype, device=_torch.device_of(x))
        self.replay.write(ref, 0, x.numel(), out.view(-1))
        return out

    def release(self) -> None:
        self.replay.release()

    def section(
        self, paths: Sequence[str], leaves: Sequence[Leaf], notes: dict[Any, Any] | None
    ) -> Section:
        """Describes the seeds, the operators and the real tensors of the function.

        What it computes has no values to compare; equal operators on equal values give
        equal ones.
        """
        real = [x if self._is_real(x) else None for x in leaves]
        lines = [*self.tape.lines(), *super().section(paths, real, notes).lines]
        return Section(
            "the init functions of ranks make unlike parameters", lines, ALIKE
        )

    def _is_real(self, x: Leaf) -> bool:
        """Returns whether a leaf has its value, and the tape does not compute it."""
        return not isinstance(x, Tensor) or self.tape.ref_of_result(x) is None


_ADVICE = (
    ", and the init function runs on tensors without values: only this rank's part of "
    "what it returns is ever made. Make it a torch.where, or give the parameters whole:"
    " init_fn() in place of init_fn"
)


def defer(
    init_fn: Callable[[], PyTree], batch: PyTree, draws: bool = True
) -> tuple[PyTree, GivenLeaves]:
    """Returns the result of ``init_fn`` on fake tensors, and the source of its values.

    Args:
        batch: may have fake tensors already; their mode is used for the function too,
            as those of two modes cannot be combined.
        draws: whether generators are drawn from.

    Raises:
        RuntimeError: the function reads a value, or calls a collective; names the line.
    """
    if _torch.fake_active():  # a plan: all that is made here is fake already
        return init_fn(), GivenLeaves()
    fake = fake_modes.fake_mode_of(tree.leaves(batch, is_leaf=is_sharded))
    tape = InitTape(fake, draws)
    with (
        torch.inference_mode(False),
        maps_run_by(_refuse),
        naming_value_reads("the init function", _ADVICE),
    ):
        with fake, tape:
            params = init_fn()
    return params, Deferred(tape)


def _refuse(x: Tensor, move: LinearMap, where: RankGroup) -> NoReturn:
    raise RuntimeError(
        f"the init function issues {move.op} over {where.name}: every rank makes its "
        "own part, and nothing is sent. Give the parameters whole: init_fn() in place "
        "of init_fn"
    )
