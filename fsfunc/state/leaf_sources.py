"""Sources of the values of a tree that is laid out: given, deferred, or none.

Each kind makes the memory that a rank holds, writes a rank's part of a leaf into it,
and gives a leaf whole in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.backends.abstract import naming_value_reads
from fsfunc.comm.collective_ops import maps_run_by
from fsfunc.comm.comparison import Section
from fsfunc.comm.descriptions import ALIKE, section_of_values
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import take
from fsfunc.state.init_tape import InitTape, Replay


class GivenLeaves:
    """Leaves that are here whole."""

    def zeros(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return like.new_zeros(count, dtype=dtype)

    def empty(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return like.new_empty(count, dtype=dtype)

    def write(
        self, x: Tensor, layout: Layout, own: Mapping[str, int], out: Tensor
    ) -> None:
        """Writes a rank's part of ``x`` to ``out``, one range of its elements."""
        out.copy_(take(x, layout, own))

    def whole(self, x: Tensor) -> Tensor:
        """``x`` in memory of its own: a donated step may write into the state."""
        return x.detach().clone()

    def own(self, x: Any) -> Any:
        """Whatever a tree holds, in memory of its own."""
        return self.whole(x) if isinstance(x, Tensor) else x

    def release(self) -> None:
        """Lets go of what was kept for the next leaf."""

    def section(
        self, paths: Sequence[str], leaves: Sequence[Any], notes: Any
    ) -> Section:
        """A description of the values that must be equal on every rank.

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
        self, x: Tensor, layout: Layout, own: Mapping[str, int], out: Tensor
    ) -> None:
        pass

    def whole(self, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    def section(
        self, paths: Sequence[str], leaves: Sequence[Any], notes: Any
    ) -> Section:
        return section_of_values((), (), notes)


class Deferred(GivenLeaves):
    """Leaves that a function made, or will make when they are read."""

    def __init__(self, tape: InitTape):
        self.tape, self.replay = tape, Replay(tape)

    def zeros(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=_torch.device_of(like))

    def empty(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return torch.empty(count, dtype=dtype, device=_torch.device_of(like))

    def write(
        self, x: Tensor, layout: Layout, own: Mapping[str, int], out: Tensor
    ) -> None:
        found = self.tape.found(x)
        if found is None:
            super().write(x, layout, own, out)
        elif layout.splits:  # of rows, not one range of what the tape makes
            super().write(self.whole(x), layout, own, out)
        else:
            self.replay.write(found, *layout.span(own), out)

    def whole(self, x: Tensor) -> Tensor:
        found = self.tape.found(x)
        if found is None:
            return super().whole(x)
        if found.span is None:
            return self.replay.view(found).clone()
        out = torch.empty(x.shape, dtype=x.dtype, device=_torch.device_of(x))
        self.replay.write(found, 0, x.numel(), out.view(-1))
        return out

    def release(self) -> None:
        self.replay.release()

    def section(
        self, paths: Sequence[str], leaves: Sequence[Any], notes: Any
    ) -> Section:
        """The seeds, the operators and the given tensors of the init function."""
        given = [x if self._is_given(x) else None for x in leaves]
        lines = [*self.tape.lines(), *super().section(paths, given, notes).lines]
        return Section(
            "the init functions of ranks make unlike parameters", lines, ALIKE
        )

    def _is_given(self, x: Any) -> bool:
        return not isinstance(x, Tensor) or self.tape.found(x) is None


_INSTEAD = (
    ", and the init function runs on tensors without values: only this rank's part of "
    "what it returns is ever made. Make it a torch.where, or give the parameters whole:"
    " init_fn() in place of init_fn"
)


def defer(
    init_fn: Callable[[], Any], beside: Any, draws: bool = True
) -> tuple[Any, GivenLeaves]:
    """The result of ``init_fn`` on fake tensors, and the source of its values.

    Args:
        beside: the batch, as fake tensors of two modes cannot be combined.
        draws: whether generators are drawn from.

    Raises:
        RuntimeError: the function reads a value, or calls a collective; names the line.
    """
    if _torch.fake_active():
        return init_fn(), GivenLeaves()
    fake = fake_modes.fake_mode_of(tree.leaves(beside, is_leaf=is_sharded))
    tape = InitTape(fake, draws)
    with (
        torch.inference_mode(False),
        maps_run_by(_refuse),
        naming_value_reads("the init function", _INSTEAD),
    ):
        with fake, tape:
            made = init_fn()
    return made, Deferred(tape)


def _refuse(x: Tensor, move: Any, where: Any) -> Any:
    raise RuntimeError(
        f"the init function issues {move.op} over {where.name}: every rank makes its "
        "own part, and nothing is sent. Give the parameters whole: init_fn() in place "
        "of init_fn"
    )
