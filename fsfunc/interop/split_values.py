"""Split logits, sequences and experts in a module's forward.

A plain tensor does not show that it is a part: the mean of its rows, or the class of
the largest logit, would silently be one rank's.

Experts run the module's own forward, on the tokens that were sent to a rank's experts,
each for one of them, with a weight of 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsfunc import tree
from fsfunc.comm.collective_ops import over
from fsfunc.comm.collectives import all_gather
from fsfunc.comm.groups import axis_index, axis_size, group
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.typed_maps import pcast
from fsfunc.nn.cross_entropy import vocab_cross_entropy
from fsfunc.nn.experts import expert_layer
from fsfunc.nn.routing import route
from fsfunc.sharded.leaf import is_sharded


class SplitTensor:
    """A tensor that is split over an axis, of which a rank has a part.

    What takes each element by itself is done to the part; the cross-entropy of logits
    whose classes are split is that of the whole ones. All else is refused.

    Args:
        local: this rank's part.
        axis: of the mesh.
        along: the dim that is split, counted from the end; -1 of logits alone.
        ranks: the size of the axis.
    """

    __slots__ = ("local", "axis", "along", "ranks")

    def __init__(self, local: Any, axis: str, along: int, ranks: int | None = None):
        self.local, self.axis, self.along = local, axis, along
        self.ranks = axis_size(axis) if ranks is None else ranks

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        sizes = list(self.local.shape)
        sizes[self.along] *= self.ranks
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self) -> str:
        return f'SplitTensor({tuple(self.shape)} over "{self.axis}", dim {self.along})'

    def view(self, *sizes: Any) -> SplitTensor:
        """In another shape: of logits, whose classes stay as they are."""
        sizes = (*sizes[0],) if isinstance(sizes[0], tuple | list) else sizes
        if self.along != -1 or sizes[-1] not in (-1, self.shape[-1]):
            self._refuse("view")
        last = self.local.shape[-1] if sizes[-1] != -1 else -1
        return self._cut(self.local.reshape(*sizes[:-1], last), "view")

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> SplitTensor:
        return self._cut(self.local.flatten(start_dim, end_dim), "flatten")

    def __getitem__(self, index: Any) -> SplitTensor:
        items = [*index] if isinstance(index, tuple) else [index]
        dots = [i for i, x in enumerate(items) if x is Ellipsis]
        taken = items[dots[0] + 1 :] if dots else items
        dims = [getattr(x, "ndim", 1) if _is_mask(x) else x is not None for x in taken]
        reaches = bool(taken) if dots else sum(dims) >= self.local.ndim
        if reaches and not (isinstance(taken[-1], slice) and taken[-1] == slice(None)):
            self._refuse("an index of what is split")
        return self._cut(self.local[index], "an index")

    def _cut(self, y: Tensor, what: str) -> SplitTensor:
        """Some rows of logits; the classes are as they were."""
        if self.along != -1 or y.shape[-1:] != self.local.shape[-1:]:
            self._refuse(what)
        return SplitTensor(y, self.axis, -1, self.ranks)

    def _each(self, do: Callable[..., Any], args: Any, keywords: Any) -> SplitTensor:
        """A function of each element by itself."""
        if keywords.keys() - {"dtype", "device", "alpha"}:
            self._refuse(", ".join(keywords))
        y = do(*map(self._met, args), **keywords)
        return SplitTensor(y, self.axis, self.along, self.ranks)

    def _met(self, x: Any) -> Any:
        """Another operand: split alike, or the same for all parts."""
        if isinstance(x, SplitTensor):
            alike = (x.axis, x.along) == (self.axis, self.along)
            if alike and x.local.shape[x.along] == self.local.shape[x.along]:
                return x.local
        elif not isinstance(x, Tensor):
            return x
        elif x.ndim < -self.along or x.shape[self.along] == 1:
            return pcast(x, self.axis, to="V") if x.is_floating_point() else x
        return self._refuse(f"what is with a tensor of shape {tuple(x.shape)}")

    def __getattr__(self, name: str) -> Any:
        if name in _TOLD:
            return getattr(self.local, name)
        if name in _ELEMENTWISE:
            do = getattr(Tensor, name)
            return lambda *args, **keywords: self._each(do, (self, *args), keywords)
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given, keywords = [*args, *(kwargs or {}).values()], dict(kwargs or {})
        given += [y for x in given if isinstance(x, list | tuple) for y in x]
        self: SplitTensor = next(x for x in given if isinstance(x, SplitTensor))
        if func is F.cross_entropy and "input" in keywords:
            args = (keywords.pop("input"), *args)
        losses = F.cross_entropy, vocab_cross_entropy
        if func in losses and args and args[0] is self:
            return self._cross_entropy(func, *args[1:], **keywords)
        name = getattr(func, "__name__", str(func))
        if name in _ELEMENTWISE or name[:2] == "__" and name[2:-2] in _ELEMENTWISE:
            return self._each(func, args, keywords)
        return self._refuse(name)

    def _cross_entropy(self, func: Any, target: Any, *args: Any, **keywords: Any):
        if self.along != -1:
            self._refuse("cross_entropy")
        if func is F.cross_entropy:
            keywords |= dict(zip(_OPTIONS, args, strict=False))
            others = [
                keywords.pop(x, None) for x in ("weight", "size_average", "reduce")
            ]
            if any(x is not None for x in others) or self.local.ndim > 2:
                self._refuse("cross_entropy with weights, or of dims behind classes,")
        elif (args or (keywords.pop("axis", None),))[0] not in (None, self.axis):
            self._refuse("vocab_cross_entropy over another axis")
        return vocab_cross_entropy(self.local, target, self.axis, **keywords)

    def _refuse(self, what: str) -> Any:
        if self.along == -1:
            raise RuntimeError(
                f'{what} of {self}: the plan has a head as "vocab", whose logits stay '
                "split: F.cross_entropy(logits.flatten(0, -2), targets.flatten()) and "
                "ff.nn.vocab_cross_entropy take them, and .local is this rank's part;"
                ' for whole logits plan it as "column_gathered"'
            )
        raise RuntimeError(
            f'{what} of {self}: the plan has a unit as "sequence", which returns this '
            "rank's positions: what is done to them belongs into a unit, which has "
            'them whole unless it is a "sequence" too; .local is this rank\'s part'
        )


def is_split(x: Any) -> bool:
    """True if ``x`` is a `SplitTensor`."""
    return isinstance(x, SplitTensor)


def joined(x: Any) -> Any:
    """A sequence that comes split, whole; split logits stay so."""
    if not is_split(x) or x.along == -1:
        return x
    return all_gather(x.local, x.axis, dim=x.along, to="I")


def own_positions(x: Any, axis: str) -> Tensor:
    """This rank's part of a sequence, which comes split or whole."""
    n = axis_size(axis)
    if is_split(x) and (x.axis, x.along) == (axis, 1 - x.ndim):
        return x.local
    if not isinstance(x, Tensor) or x.ndim < 3 or not x.is_floating_point():
        raise TypeError(
            'plan: a "sequence" unit takes hidden states [batch, sequence, ...] as its '
            f"first argument, not by keyword; got {getattr(x, 'shape', x)}"
        )
    length = x.shape[1]
    if length % n or n > 1 and length < 2 * n:  # one position would broadcast
        near = [k * n for k in (length // n, length // n + 1) if k > 1] or [2 * n]
        raise ValueError(
            f'plan: a sequence of {length} positions is not split over axis "{axis}" '
            f"of size {n}, which needs a multiple of {n} from {2 * n}: pad it to "
            f'{near[-1]}, or plan no "sequence"'
        )
    return over(x, axis, lambda *_: LinearMap("slice", "I", "V", dim=1))


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


_TOLD = {"dtype", "device", "ndim", "dim", "is_floating_point", "requires_grad"}
_ELEMENTWISE = {
    "add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "true_divide",
    "rtruediv", "neg", "tanh", "to", "float", "double", "half", "bfloat16", "clone",
    "contiguous", "detach",
}  # fmt: skip


_OPTIONS = (
    "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip


def _operator(name: str) -> Any:
    def method(self: SplitTensor, *args: Any) -> Any:
        return self._each(getattr(Tensor, name), (self, *args), {})

    return method


def _refused(name: str) -> Any:
    def method(self: SplitTensor, *_: Any) -> Any:
        return self._refuse(name)

    return method


for _name in "add radd sub rsub mul rmul truediv rtruediv neg".split():
    setattr(SplitTensor, f"__{_name}__", _operator(f"__{_name}__"))
for _name in "len iter bool matmul rmatmul pow setitem eq ne lt le gt ge".split():
    setattr(SplitTensor, f"__{_name}__", _refused(_name))

tree.register_node(
    SplitTensor,
    lambda x: ([x.local], (x.axis, x.along, x.ranks)),
    lambda how, parts: SplitTensor(parts[0], *how),
)


_TAKES = ["self", "hidden_states", "top_k_index", "top_k_weights"]


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


def check_experts(name: str, m: nn.Module) -> None:
    """Raises unless a module is a stack of experts, as far as it shows."""
    what, takes = f'plan: {name!r} is "expert"', inspect.signature(type(m).forward)
    if list(takes.parameters) != _TAKES:
        raise TypeError(
            f"{what}, and its forward takes {', '.join([*takes.parameters][1:])}: it "
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
