"""torch's own layers with split weights.

Each rank has features of its own between column and row layers, and, in a "sequence"
unit, positions of its own around them. Whole values that are combined with these enter
as each rank's own, so that their gradients are summed over the axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsfunc import _torch, tree
from fsfunc.comm.collectives import all_gather
from fsfunc.comm.groups import axis_size, group
from fsfunc.comm.typed_maps import pcast
from fsfunc.interop.split_shapes import run_shapes
from fsfunc.interop.split_values import SplitTensor, is_split, joined, own_positions
from fsfunc.interop.stubs import Absent, Signature, is_object
from fsfunc.nn.tensor_parallel import part_of, row_linear, vocab_embedding
from fsfunc.sharded.leaf import is_sharded


class SplitFlow:
    """The split features of one call of a unit.

    Args:
        params: the call's, by name.
        column: the name of a weight whose layout shows whether features are split.
        meeting: the whole parameters that are combined with split values.
        is_sequence: whether positions are split where features are.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        column: str | None,
        meeting: frozenset[str],
        is_sequence: bool,
    ):
        weight: Any = None if column is None else params.get(column)
        splits = weight.layout.splits if is_sharded(weight) else ()
        #: The axis over which features are split; that over which the sequence is.
        self.axis = splits[0].axis if splits else None
        self.sequence = self.axis if is_sequence else None
        self._meeting = meeting
        #: Which leaves of a module's output are made of a rank's features.
        self.withheld: dict[int, list[bool]] = {}
        self._last: tuple[Tensor, Any, Tensor, int] | None = None

    def read(self, name: str, x: Any) -> Any:
        """A parameter that the unit reads: cast, where it meets parts."""
        if self.axis is None or name not in self._meeting:
            return x
        return pcast(x, self.axis, to="V")

    def entered(self, x: Tensor, axis: str) -> Tensor:
        """An input that meets split weights; once, for layers that are called in a row.

        So what comes back to it is summed over the axis once. Of a split sequence the
        module around them has been given the whole.
        """
        return x if self.sequence else self._once(x, axis, partial(pcast, to="V"))

    def _once(self, x: Tensor, axis: str, do: Callable[..., Tensor]) -> Tensor:
        if x.is_inference():  # no version tells whether it is what it was
            return do(x, axis)
        key = x._version, torch.is_grad_enabled(), axis
        if self._last is not None:
            given, known, y, version = self._last
            if given is x and known == key and y._version == version:
                return y
        y = do(x, axis)
        self._last = x, key, y, y._version
        return y

    def taken(self, args: Any, keywords: Any) -> tuple[Any, Any]:
        """Arguments of the unit as its forward takes them.

        A split sequence is this rank's part where the unit's sequence is split, and
        whole elsewhere.

        Raises:
            ValueError: a sequence that the axis does not divide.
            TypeError: none comes first, or another too.
        """
        if self.sequence is None:
            if any(map(is_split, tree.leaves((args, keywords), is_leaf=is_split))):
                return tree.map(joined, (args, keywords), is_leaf=is_split)
            return args, keywords
        x = own_positions(args[0] if args else None, self.sequence)
        rest, keywords = tree.map(self._beside, (args[1:], keywords), is_leaf=is_split)
        self._length = x.shape[1]
        self._whole = {id(y): y for y in tree.leaves((rest, keywords))}
        return (x, *rest), keywords

    def _beside(self, x: Any) -> Any:
        """An argument that comes whole, as it meets parts of a sequence."""
        if is_split(x):
            raise TypeError(
                f'plan: a "sequence" unit is given {x} after its first argument: '
                "give it one split sequence, or leave it out of the plan"
            )
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        return pcast(x, self.sequence, to="V")  # type: ignore[arg-type]

    def gathered(self, args: Any, keywords: Any) -> tuple[Any, Any]:
        """Arguments of a module around split layers, with a whole sequence.

        Raises:
            RuntimeError: it is given what is neither this rank's part of the sequence
                nor what the unit was given.
        """
        if self.sequence is None:
            return args, keywords
        return tree.map(self._gathered, (args, keywords))

    def _gathered(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) in self._whole:
            return x
        if x.ndim < 3 or x.shape[1] != self._length:
            raise RuntimeError(
                f"plan: a module around split layers is given {tuple(x.shape)}, which "
                f"is neither the sequence, of {self._length} positions a rank along "
                'dim 1, nor what its unit was given: leave "sequence" out'
            )
        return self._once(x, self.sequence, partial(all_gather, dim=1))  # type: ignore

    def check_row(self, x: Tensor, row: str) -> None:
        """Raises RuntimeError where a row layer takes no sequence to be split."""
        if self.sequence is None:
            return
        length = self._length * axis_size(self.sequence)
        if x.ndim < 3 or x.shape[1] != length:
            raise RuntimeError(
                f"plan: {row!r} takes {tuple(x.shape)}, of which dim 1 is to be the"
                f' sequence of {length} positions: leave "sequence" out'
            )

    def returned(self, out: Any, seen: Any) -> Any:
        """The result of the unit: this rank's part, where the sequence is split.

        Args:
            seen: what is shown of modules within.

        Raises:
            TypeError: it returns something else, or more.
            RuntimeError: something is shown, or made of a rank's own features.
        """
        if any(map(any, self.withheld.values())):
            raise RuntimeError(
                "plan: a unit returns what is made of split features, such as the "
                "attention of a rank's own heads, which is another on every rank: "
                "return it joined, or leave these layers out of the plan"
            )
        if self.sequence is None:
            return out
        if seen:
            raise RuntimeError(
                f'plan: a hook is hung on {seen[0][0]!r} within a "sequence" unit as '
                "the module runs, and would see this rank's positions: leave it out (of"
                " a Hugging Face model: output_attentions and output_hidden_states)"
            )
        found = tree.leaves(out)
        x = found[0] if len(found) == 1 else None
        if not isinstance(x, Tensor) or x.ndim < 3 or x.shape[1] != self._length:
            shapes = [tuple(getattr(x, "shape", ())) for x in found]
            raise TypeError(
                f'plan: a "sequence" unit returns {shapes}, and is to return one '
                f"tensor, of {self._length} positions a rank along dim 1: leave its "
                '"sequence" out of the plan'
            )
        axis = self.sequence
        return tree.map(lambda x: SplitTensor(x, axis, 1 - x.ndim), out)


class ColumnLinear(nn.Linear):
    """Its output is this rank's features."""

    def forward(self, input: Tensor) -> Tensor:
        return _column(self, input)[0]


class VocabLinear(nn.Linear):
    """Its output is this rank's logits, for `vocab_cross_entropy`."""

    def forward(self, input: Tensor) -> Tensor:
        y, axis = _column(self, input)
        return y if axis is None else SplitTensor(y, axis, -1)  # type: ignore


class GatheredLinear(nn.Linear):
    """Its output is whole: the ranks' features beside each other."""

    def forward(self, input: Tensor) -> Tensor:
        y, axis = _column(self, input)
        return y if axis is None else all_gather(y, axis, dim=-1, to="I")


class RowLinear(nn.Linear):
    """Its input is this rank's features."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = _weight(self)
        if not (is_sharded(weight) and weight.layout.splits):
            return row_linear(input, weight, self.bias)
        _check_input(weight, input)
        flow = _flow(self)
        flow.check_row(input, weight.name)
        return row_linear(
            input, weight, self.bias, sequence_dim=1 if flow.sequence else None
        )


class VocabEmbedding(nn.Embedding):
    """Its rows lie on the ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return vocab_embedding(_weight(self), input, padding_idx=self.padding_idx)


# The word of a plan, and the class of the layer: the class that runs in its place.
KINDS: dict[tuple[str, type], type[nn.Module]] = {
    ("column", nn.Linear): ColumnLinear,
    ("column_gathered", nn.Linear): GatheredLinear,
    ("row", nn.Linear): RowLinear,
    ("vocab", nn.Embedding): VocabEmbedding,
    ("vocab", nn.Linear): VocabLinear,
}


class SplitModule:
    """A module that holds column layers and the row layers that follow them.

    Its forward runs once on shapes alone before it runs on a rank's part, for each
    signature of a call: see `split_shapes`.

    Args:
        template: the module that it is in, without tensors; its layers run split.
        name: its name there.
        words: by a layer's name there, how it is split.
    """

    def __init__(self, template: nn.Module, name: str, words: Mapping[str, str]):
        self._module = copy.deepcopy(template.get_submodule(name))
        within = f"{name}." if name else ""
        self._words = {
            x[len(within) :]: word
            for x, word in words.items()
            if x == name or x.startswith(within)
        }
        self._seen: dict[Any, list[bool]] = {}
        self._withheld = Absent(
            "what a module around split layers returns of a rank's own features, such "
            "as the attention of its heads (of a Hugging Face model: leave "
            "output_attentions out)"
        )

    def __deepcopy__(self, _: Any) -> SplitModule:
        return self  # one for all copies of the module

    def enter(self, m: nn.Module, args: Any, keywords: Any) -> Any:
        """A hook before its forward: gathers a split sequence, and checks shapes."""
        flow = _flow(m)
        if flow.axis is None:
            return None
        args, keywords = flow.gathered(args, keywords)
        if torch.compiler.is_compiling():
            return args, keywords
        given, ranks = Signature.of((args, keywords)), axis_size(flow.axis)
        key = given.key, flow.sequence, ranks
        if key not in self._seen:
            self._seen[key] = self._run(given, ranks, typed=not flow.sequence)
        flow.withheld[id(self)] = self._seen[key]
        return args, keywords

    def _run(self, given: Signature, ranks: int, typed: bool) -> list[bool]:
        with (
            _torch.outside_modes(),
            _torch.outside_function_modes(),
            _torch.beneath_functorch(),
        ):
            module = copy.deepcopy(self._module)
            return run_shapes(module, self._words, given, ranks, typed)

    def leave(self, m: nn.Module, args: Any, out: Any) -> Any:
        """A hook after its forward: what is made of a rank's features stays within."""
        split = _flow(m).withheld.pop(id(self), [])
        if not any(split):
            return None
        leaves, treedef = tree.flatten(out, is_leaf=is_object)
        both = zip(leaves, split, strict=True)
        kept = [self._withheld if is_part else x for x, is_part in both]
        return tree.unflatten(treedef, kept)


def _flow(m: nn.Module) -> SplitFlow:
    """The split features of the call that a module's copy runs in."""
    table: Any = _torch.tables(m)[0]
    return table.tensors.given.flow


def _weight(m: Any) -> Any:
    """A layer's weight.

    Raises:
        ValueError: it is split over an axis along which each rank has its own rows.
    """
    weight = m.weight
    for split in weight.layout.splits if is_sharded(weight) else ():
        if group(split.axis).mean:
            raise ValueError(
                f'{weight.layout} is split over "{split.axis}", over which shard '
                "averages: rows of different ranks would be combined; split layers "
                "over an axis that shard does not have"
            )
    return weight


def _column(m: Any, x: Tensor) -> tuple[Tensor, str | None]:
    """This rank's features, and the axis over which they are split."""
    weight, bias = _weight(m), m.bias
    part, axis = part_of("column_linear", weight, (0,))
    if bias is not None:
        bias, _ = part_of("column_linear", bias, (0,), like=weight)
    if axis is not None:
        x = _flow(m).entered(x, axis)
    return nn.functional.linear(x, part, bias), axis


def _check_input(weight: Any, x: Tensor) -> None:
    wanted = weight.layout.shape[1] // weight.layout.splits[0].size
    if x.shape[-1] != wanted:
        raise ValueError(
            f'plan: the "row" layer of {weight.name!r} is given {x.shape[-1]} features,'
            f' and a rank has {wanted}: the layer before it must be "column"'
        )
