"""torch's own layers as they run where their weights come split."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsfunc import _torch, tree
from fsfunc.comm.collectives import all_gather
from fsfunc.comm.groups import axis_size, group
from fsfunc.interop.arguments import Signature, is_object
from fsfunc.interop.split_flow import SplitFlow
from fsfunc.interop.split_shapes import run_shapes
from fsfunc.interop.split_values import SplitTensor
from fsfunc.interop.stubs import Absent
from fsfunc.nn.tensor_parallel import part_of, row_linear, vocab_embedding
from fsfunc.sharded.leaf import is_sharded


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
                "averages: the ranks' rows would meet; split layers over an axis that "
                "shard has not"
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
