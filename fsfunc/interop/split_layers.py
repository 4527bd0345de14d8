"""torch's own layers with split weights, and experts that are spread over ranks.

A plan (`layer_plans`) puts these classes in place of a module's layers:

    x, whole -> ColumnLinear -> this rank's features -> RowLinear -> y, summed, whole

Between column and row layers each rank has features of its own. Whole values that are
combined with these are cast to rank-local ones (`pcast`), so that their gradients are
summed over the axis. Experts run the module's own forward on the tokens that were sent
to a rank's experts: each token for one expert, with a weight of 1.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsfunc import _torch, tree
from fsfunc.comm.collectives import all_gather
from fsfunc.comm.folding import as_axis
from fsfunc.comm.groups import axis_index, axis_size, get_group
from fsfunc.comm.mesh import Axis
from fsfunc.comm.typed_maps import pcast
from fsfunc.interop.split_shapes import Signature, is_object, run_shapes
from fsfunc.interop.stubs import AbsentTensor
from fsfunc.nn.experts import expert_layer
from fsfunc.nn.routing import route
from fsfunc.nn.tensor_parallel import local_part, row_linear, vocab_embedding
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf, PyTree


class SplitFlow:
    """The split features of one call of a unit.

    Args:
        params: the call's, by name.
        column: the name of a weight whose layout shows whether features are split.
        meets_split: the whole parameters that are combined with split values.
    """

    def __init__(
        self,
        params: Mapping[str, Leaf],
        column: str | None,
        meets_split: frozenset[str],
    ):
        weight: Any = None if column is None else params.get(column)
        cuts = weight.layout.cuts if is_sharded(weight) else ()
        #: The axis over which features are split; None if they are not.
        self.axis: Axis | None = as_axis(cuts[0][1]) if cuts else None
        self._meets_split = meets_split
        #: By the id of a `SplitModule` that runs, which leaves of its output are made
        #: of a rank's features.
        self.withheld: dict[int, list[bool]] = {}
        # The last input, the state it was in, its cast, and the version of that.
        self._last: tuple[Tensor, tuple[int, bool, Axis], Tensor, int] | None = None

    def read_param(self, name: str, x: Leaf) -> Leaf:
        """Returns a parameter that the unit reads, cast if it meets split values."""
        if self.axis is None or name not in self._meets_split:
            return x
        return pcast(x, self.axis, to="V")

    def enter_split(self, x: Tensor, axis: Axis) -> Tensor:
        """Returns an input that meets split weights, cast to a rank-local value."""
        # An inference tensor has no version that tells whether it was written since.
        if x.is_inference():
            return pcast(x, axis, to="V")
        # Layers that follow each other on one input, such as queries, keys and values,
        # share its cast: so what comes back to it is summed over the axis once.
        state = x._version, torch.is_grad_enabled(), axis
        if self._last is not None:
            last, last_state, y, version = self._last
            if last is x and last_state == state and y._version == version:
                return y
        y = pcast(x, axis, to="V")
        self._last = x, state, y, y._version
        return y

    def check_returned(self) -> None:
        """Raises RuntimeError if the unit returns what is made of split features.

        `SplitModule.leave` has removed the entries of modules within the unit: what is
        left is of the unit itself, whose output nobody withheld.
        """
        if any(map(any, self.withheld.values())):
            raise RuntimeError(
                "plan: a unit returns what is made of split features, such as the "
                "attention of a rank's own heads, which is another on every rank: "
                "return it joined, or leave these layers out of the plan"
            )


class ColumnLinear(nn.Linear):
    """A Linear whose output is this rank's features."""

    def forward(self, input: Tensor) -> Tensor:
        return _column(self, input)[0]


class GatheredLinear(nn.Linear):
    """A Linear whose output is whole: the ranks' features beside each other."""

    def forward(self, input: Tensor) -> Tensor:
        y, axis = _column(self, input)
        if axis is None:
            return y
        # A gather has the gathered dim outermost. A Linear has its features beside each
        # other, without which no fused attention takes them.
        return all_gather(y, axis, dim=-1, to="I").contiguous()


class RowLinear(nn.Linear):
    """A Linear whose input is this rank's features."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = _weight(self)
        if not (is_sharded(weight) and weight.layout.splits):
            return row_linear(input, weight, self.bias)
        _check_input(weight, input)
        return row_linear(input, weight, self.bias)


class VocabEmbedding(nn.Embedding):
    """An Embedding whose rows are spread over the ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return vocab_embedding(_weight(self), input, padding_idx=self.padding_idx)


class SplitExperts(nn.Module):
    """A mixin for a stack of experts: it sends tokens to their ranks, and back."""

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        x, index, weights = hidden_states, top_k_index, top_k_weights
        leaves: dict[str, Any] = dict(self.named_parameters(recurse=False))
        leaf, forward = next(iter(leaves.values())), super().forward
        if not (is_sharded(leaf) and leaf.layout.splits):
            return forward(x, index, weights)

        def run_local(parts: dict[str, Tensor], rows: Tensor, ends: Tensor) -> Tensor:
            # Rows come sorted by expert, those of expert i before ends[i]. The module
            # takes a token with several experts: here a row with one.
            positions = torch.arange(len(rows), dtype=ends.dtype, device=rows.device)
            expert = torch.searchsorted(ends, positions, right=True)
            with _with_attributes(self, parts | {"num_experts": len(ends)}):
                return forward(rows, expert[:, None], weights.new_ones(len(rows), 1))

        def run_layer(
            x: Tensor, index: Tensor, weights: Tensor, used: Tensor | None
        ) -> Tensor:
            routing = route(index, weights, leaf.layout.shape[0], used_token=used)
            return expert_layer(x, routing, run_local, leaves, grouped=True)

        # Along an axis of the data each rank has tokens of its own.
        axes = leaf.layout.cuts[0][1]
        others = tuple(a for a in axes if not get_group(a).loss_is_mean)
        if not others:
            return run_layer(x, index, weights, None)
        # Along others all ranks have the same tokens. Each sends its share of them,
        # padded to equal sizes, and gathers what was made of all.
        axis = as_axis(others)
        ranks, count = get_group(axis), len(x)
        share = -(-count // ranks.size)
        start, padding = axis_index(axis) * share, ranks.size * share - count

        def take_share(rows: Tensor) -> Tensor:
            return F.pad(rows, (0, 0, 0, padding)).narrow(0, start, share)

        x, weights = pcast((x, weights), axis, to="V")
        used = start + torch.arange(share, device=x.device) < count
        y = run_layer(take_share(x), take_share(index), take_share(weights), used)
        return all_gather(y, axis, dim=0, to="I")[:count]


@cache
def split_class_of(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that runs in place of a class of experts."""
    return type(f"Split{cls.__name__}", (SplitExperts, cls), {})


# By the word of a plan and the class of the layer, the class that runs in its place.
SPLIT_CLASSES: dict[tuple[str, type], type[nn.Module]] = {
    ("column", nn.Linear): ColumnLinear,
    ("column_gathered", nn.Linear): GatheredLinear,
    ("row", nn.Linear): RowLinear,
    ("vocab", nn.Embedding): VocabEmbedding,
}


@cache
def scaled_class_of(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Returns what runs in place of an Embedding that changes its input or output.

    Its forward runs as it is; where it calls ``super().forward`` the rows are looked up
    that are spread over the ranks. One that looks them up itself gets a weight that no
    function of torch takes, which raises. None of another class.
    """
    if not issubclass(cls, nn.Embedding) or cls.forward is nn.Embedding.forward:
        return None
    bases: tuple[Any, ...] = (cls, VocabEmbedding)
    return type(f"Split{cls.__name__}", bases, {})


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
        tables = (_torch.tensor_tables(m)[0] for m in self._module.modules())
        params = [x for table in tables for x in table.values()]
        # Those of the unit: a call gives them by these names.
        self._params = [x.name for x in params if isinstance(x, AbsentTensor)]
        # By signature, number of ranks and dtypes of the parameters, what its run on
        # shapes told.
        self._checked_calls: dict[Hashable, list[bool]] = {}
        self._withheld = AbsentTensor(
            "what a module around split layers returns of a rank's own features, such "
            "as the attention of its heads (of a Hugging Face model: leave "
            "output_attentions out)"
        )

    def __deepcopy__(self, _: dict[int, Any]) -> SplitModule:
        return self  # one for all copies of the module

    def enter(
        self, m: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Checks the forward on shapes: a hook before it."""
        call = _current_call(m)
        flow: SplitFlow = call.flow
        if flow.axis is None or torch.compiler.is_compiling():
            return
        signature, ranks = Signature.of((args, keywords)), axis_size(flow.axis)
        # A cast gives a call other dtypes than the module has.
        dtypes = tuple(call.params[name].dtype for name in self._params)
        key = signature.key, ranks, dtypes
        if key not in self._checked_calls:
            by_name = dict(zip(self._params, dtypes, strict=True))
            self._checked_calls[key] = self._check(signature, ranks, by_name)
        flow.withheld[id(self)] = self._checked_calls[key]

    def _check(
        self, signature: Signature, ranks: int, dtypes: Mapping[str, torch.dtype]
    ) -> list[bool]:
        # What transforms do to values is not for this run, which has none: nor is it
        # a part of what a unit saves for its backward.
        with (
            _torch.outside_saved_tensors_hooks(),
            _torch.outside_modes(),
            _torch.outside_function_modes(),
            _torch.beneath_functorch(),
        ):
            module = copy.deepcopy(self._module)
            return run_shapes(module, self._words, signature, ranks, dtypes)

    def leave(self, m: nn.Module, args: tuple[Any, ...], out: PyTree) -> PyTree | None:
        """Withholds outputs that are made of a rank's features: a hook after forward.

        A placeholder takes their place, any use of which raises: they differ from rank
        to rank, and the module around does not know that.
        """
        are_split = _flow(m).withheld.pop(id(self), [])
        if not any(are_split):
            return None
        leaves, treedef = tree.flatten(out, is_leaf=is_object)
        pairs = zip(leaves, are_split, strict=True)
        leaves = [self._withheld if is_split else x for x, is_split in pairs]
        return tree.unflatten(treedef, leaves)


def _current_call(m: nn.Module) -> Any:
    """Returns the call (`call_tensors`) that a module's copy runs in."""
    table: Any = _torch.tensor_tables(m)[0]
    return table.tables.current_call


def _flow(m: nn.Module) -> SplitFlow:
    """Returns the split features of the call that a module's copy runs in."""
    return _current_call(m).flow


def _weight(m: Any) -> Any:
    """Returns a layer's weight.

    Raises:
        ValueError: it is split over an axis along which each rank has its own rows.
    """
    weight = m.weight
    for split in weight.layout.splits if is_sharded(weight) else ():
        if get_group(split.axis).loss_is_mean:
            raise ValueError(
                f'{weight.layout} is split over "{split.axis}", over which shard '
                "averages: rows of different ranks would be combined; split layers "
                "over an axis that shard does not have"
            )
    return weight


def _column(m: Any, x: Tensor) -> tuple[Tensor, Axis | None]:
    """Returns a layer's output, and the axis over which its features are split."""
    weight, bias = _weight(m), m.bias
    part, axis = local_part("column_linear", weight, (0,))
    if bias is not None:
        bias, _ = local_part("column_linear", bias, (0,), like=weight)
    if axis is not None:
        x = _flow(m).enter_split(x, axis)
    return F.linear(x, part, bias), axis


def _check_input(weight: Any, x: Tensor) -> None:
    expected = weight.layout.shape[1] // weight.layout.cuts[0][2]
    if x.shape[-1] != expected:
        raise ValueError(
            f'plan: the "row" layer of {weight.name!r} is given {x.shape[-1]} features,'
            f' and a rank has {expected}: the layer before it must be "column"'
        )


# The parameters of forward in transformers' modules of experts.
_EXPERTS_TAKE = ["self", "hidden_states", "top_k_index", "top_k_weights"]


def are_experts(m: nn.Module) -> bool:
    """Returns whether a module is a stack of experts, by what its forward takes."""
    return list(inspect.signature(type(m).forward).parameters) == _EXPERTS_TAKE


def check_experts(name: str, m: nn.Module) -> None:
    """Raises unless a module is a stack of experts, as far as it shows."""
    claim = f'plan: {name!r} is "expert"'
    if not are_experts(m):
        takes = [*inspect.signature(type(m).forward).parameters][1:]
        raise TypeError(
            f"{claim}, and its forward takes {', '.join(takes)}: it "
            f"must take {', '.join(_EXPERTS_TAKE[1:])}, as experts of transformers "
            "do, and return the sum over a token's experts of weight times what each "
            "makes of it; in other modules call ff.nn.expert_layer"
        )
    shapes = {n: tuple(p.shape) for n, p in m.named_parameters(recurse=False)}
    if len({shape[:1] or None for shape in shapes.values()} | {None}) != 2:
        params = ", ".join(f"{n} {shape}" for n, shape in shapes.items()) or "none"
        raise TypeError(
            f"{claim}, with one of each parameter along dim 0; it has {params}"
        )
    all_tensors = dict(m.named_parameters()) | dict(m.named_buffers())
    if others := all_tensors.keys() - shapes.keys():
        raise TypeError(
            f"{claim}, and holds {min(others)!r}, of which a rank's experts would not "
            "take their own part: leave it out of the plan"
        )


@contextmanager
def _with_attributes(m: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Gives a module other attributes for a while.

    Python finds what is in its ``__dict__`` before torch looks among its parameters.
    """
    instance = vars(m)
    before = {name: instance[name] for name in attributes if name in instance}
    instance.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del instance[name]
        instance.update(before)
