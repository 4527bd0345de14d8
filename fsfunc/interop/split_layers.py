"""torch's own layers with split weights, and experts that are spread over ranks.

Each rank has features of its own between column and row layers. Whole values that are
combined with these enter as each rank's own, so that their gradients are summed over
the axis. Experts run the module's own forward, on the tokens that were sent to a rank's
experts, each for one of them, with a weight of 1.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsfunc import _torch, tree
from fsfunc.comm.collectives import all_gather
from fsfunc.comm.groups import axis_index, axis_size, group
from fsfunc.comm.typed_maps import pcast
from fsfunc.interop.split_shapes import Signature, is_object, run_shapes
from fsfunc.interop.stubs import Absent
from fsfunc.nn.experts import expert_layer
from fsfunc.nn.routing import route
from fsfunc.nn.tensor_parallel import part_of, row_linear, vocab_embedding
from fsfunc.sharded.leaf import is_sharded


class SplitFlow:
    """The split features of one call of a unit.

    Args:
        params: the call's, by name.
        column: the name of a weight whose layout shows whether features are split.
        meeting: the whole parameters that are combined with split values.
    """

    def __init__(
        self, params: Mapping[str, Any], column: str | None, meeting: frozenset[str]
    ):
        weight: Any = None if column is None else params.get(column)
        splits = weight.layout.splits if is_sharded(weight) else ()
        #: The axis over which features are split.
        self.axis = splits[0].axis if splits else None
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

        So what comes back to it is summed over the axis once.
        """
        if x.is_inference():  # no version tells whether it is what it was
            return pcast(x, axis, to="V")
        key = x._version, torch.is_grad_enabled(), axis
        if self._last is not None:
            given, known, y, version = self._last
            if given is x and known == key and y._version == version:
                return y
        y = pcast(x, axis, to="V")
        self._last = x, key, y, y._version
        return y

    def check_returned(self) -> None:
        """Raises RuntimeError where the unit returns what is made of split features."""
        if any(map(any, self.withheld.values())):
            raise RuntimeError(
                "plan: a unit returns what is made of split features, such as the "
                "attention of a rank's own heads, which is another on every rank: "
                "return it joined, or leave these layers out of the plan"
            )


class ColumnLinear(nn.Linear):
    """Its output is this rank's features."""

    def forward(self, input: Tensor) -> Tensor:
        return _column(self, input)[0]


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
        return row_linear(input, weight, self.bias)


class VocabEmbedding(nn.Embedding):
    """Its rows lie on the ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return vocab_embedding(_weight(self), input, padding_idx=self.padding_idx)


class SplitExperts(nn.Module):
    """Base that sends tokens to the ranks of their experts, and back."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Any):
        x, index, weights = hidden_states, top_k_index, top_k_weights
        leaves: dict[str, Any] = dict(self.named_parameters(recurse=False))
        leaf, forward = next(iter(leaves.values())), super().forward
        if not (is_sharded(leaf) and leaf.layout.splits):
            return forward(x, index, weights)

        def ours(parts: dict[str, Tensor], rows: Tensor, ends: Tensor) -> Tensor:
            at = torch.arange(len(rows), dtype=ends.dtype, device=rows.device)
            one = torch.searchsorted(ends, at, right=True)
            with _having(self, parts | {"num_experts": len(ends)}):
                return forward(rows, one[:, None], weights.new_ones(len(rows), 1))

        def layer(x: Tensor, index: Tensor, weights: Tensor, used: Any) -> Tensor:
            routing = route(index, weights, leaf.layout.shape[0], used_token=used)
            return expert_layer(x, routing, ours, leaves, grouped=True)

        where = group(leaf.layout.splits[0].axis)
        if where.mean:  # each rank has tokens of its own
            return layer(x, index, weights, None)
        # All have the same: each sends its share, and gets what was made of all.
        axis, count = where.axis, len(x)
        share = -(-count // where.size)
        start, padding = axis_index(axis) * share, where.size * share - count

        def mine(rows: Tensor) -> Tensor:
            return F.pad(rows, (0, 0, 0, padding)).narrow(0, start, share)

        x, weights = pcast((x, weights), axis, to="V")
        used = start + torch.arange(share, device=x.device) < count
        y = layer(mine(x), mine(index), mine(weights), used)
        return all_gather(y, axis, dim=0, to="I")[:count]


@cache
def kind_of(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that runs in the place of a class of experts."""
    return type(f"Split{cls.__name__}", (SplitExperts, cls), {})


# The word of a plan, and the class of the layer: the class that runs in its place.
KINDS: dict[tuple[str, type], type[nn.Module]] = {
    ("column", nn.Linear): ColumnLinear,
    ("column_gathered", nn.Linear): GatheredLinear,
    ("row", nn.Linear): RowLinear,
    ("vocab", nn.Embedding): VocabEmbedding,
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

    def enter(self, m: nn.Module, args: Any, keywords: Any) -> None:
        """A hook before its forward: checks shapes."""
        flow = _flow(m)
        if flow.axis is None or torch.compiler.is_compiling():
            return
        given, ranks = Signature.of((args, keywords)), axis_size(flow.axis)
        key = given.key, ranks
        if key not in self._seen:
            self._seen[key] = self._run(given, ranks)
        flow.withheld[id(self)] = self._seen[key]

    def _run(self, given: Signature, ranks: int) -> list[bool]:
        with (
            _torch.outside_modes(),
            _torch.outside_function_modes(),
            _torch.beneath_functorch(),
        ):
            module = copy.deepcopy(self._module)
            return run_shapes(module, self._words, given, ranks)

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
    table: Any = _torch.tensor_tables(m)[0]
    return table.tables.given.flow


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
    return F.linear(x, part, bias), axis


def _check_input(weight: Any, x: Tensor) -> None:
    wanted = weight.layout.shape[1] // weight.layout.splits[0].size
    if x.shape[-1] != wanted:
        raise ValueError(
            f'plan: the "row" layer of {weight.name!r} is given {x.shape[-1]} features,'
            f' and a rank has {wanted}: the layer before it must be "column"'
        )


_TAKES = ["self", "hidden_states", "top_k_index", "top_k_weights"]


def are_experts(m: nn.Module) -> bool:
    """Returns whether a module is a stack of experts, by what its forward takes."""
    return list(inspect.signature(type(m).forward).parameters) == _TAKES


def check_experts(name: str, m: nn.Module) -> None:
    """Raises unless a module is a stack of experts, as far as it shows."""
    what = f'plan: {name!r} is "expert"'
    if not are_experts(m):
        takes = [*inspect.signature(type(m).forward).parameters][1:]
        raise TypeError(
            f"{what}, and its forward takes {', '.join(takes)}: it "
            f"must take {', '.join(_TAKES[1:])}, as experts of transformers do, and "
            "return the sum over a token's experts of weight times what each makes of "
            "it; in other modules call ff.nn.expert_layer"
        )
    shapes = {n: tuple(p.shape) for n, p in m.named_parameters(recurse=False)}
    if len({shape[:1] or None for shape in shapes.values()} | {None}) != 2:
        said = ", ".join(f"{n} {shape}" for n, shape in shapes.items()) or "none"
        raise TypeError(
            f"{what}, with one of each parameter along dim 0; it has {said}"
        )
    held = dict(m.named_parameters()) | dict(m.named_buffers())
    if others := held.keys() - shapes.keys():
        raise TypeError(
            f"{what}, and holds {min(others)!r}, of which a rank's experts would not "
            "take their own part: leave it out of the plan"
        )


@contextmanager
def _having(m: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """A module, for a while with other attributes, which stand before parameters."""
    own = vars(m)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)
