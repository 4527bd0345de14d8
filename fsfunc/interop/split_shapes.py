"""Shape rules of split features, checked on a run of a module without data.

Between a column layer and its row layer a rank has some of the features, or heads, in
place of all. A forward that mixes features of several ranks, or counts them, would be
silently wrong. So the module around both layers is run once on meta tensors, for each
signature of a call, with the number of features multiplied by a large prime p:

    [batch, seq, 64 p]  view  [batch, seq, 4 p, 16]  softmax over dim 3: fine
                                                     mean over dim 2: refused

A size that p divides marks the split dim of every tensor that is made of split
features. It must be one dim, and no function may mix what lies along it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsfunc import _torch, tree
from fsfunc.core.casts import HasDtype, differentiable
from fsfunc.interop.stubs import AbsentTensor
from fsfunc.tree.structure import TreeDef
from fsfunc.tree.types import Leaf, PyTree

_MARK = 1_000_003  # a prime that no other size has as a factor


class Signature(NamedTuple):
    """All that a forward can tell of its arguments, without the values of tensors.

    Args:
        leaves: a `TensorSpec` of each tensor; None in place of an object, such as a
            cache; all else as it is.
        key: equal for calls whose runs on shapes are equal.
    """

    treedef: TreeDef
    leaves: tuple[Any, ...]
    key: Hashable

    @classmethod
    def of(cls, values: PyTree) -> Signature:
        leaves, treedef = tree.flatten(values, is_leaf=is_object)
        specs = tuple(None if is_object(x) else TensorSpec.of(x) for x in leaves)
        hashable = tuple(x if x.__hash__ else repr(x) for x in specs)
        # The tensors in a cache grow with each call: one run on shapes stands for all.
        key = treedef if any(map(is_object, leaves)) else (treedef, hashable)
        return cls(treedef, specs, key)


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor that a forward was given, without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(x: Leaf) -> Leaf:
        """Returns the spec of a tensor; any other leaf as it is."""
        if not isinstance(x, Tensor):
            return x
        return TensorSpec(x.shape, x.dtype, x.requires_grad)


def is_object(x: Leaf) -> bool:
    """Returns whether a leaf is no tensor, and may have some in attributes."""
    return hasattr(x, "__dict__") and not isinstance(x, Tensor | type)


def run_shapes(
    module: nn.Module,
    words: Mapping[str, str],
    signature: Signature,
    ranks: int,
    dtypes: Mapping[str, torch.dtype],
) -> list[bool]:
    """Runs a module around split layers on shapes alone, and checks what it does.

    Args:
        module: a copy without tensors, which is used up.
        words: how its layers are split, by their names within it.
        signature: that of (args, keywords).
        ranks: the size of the axis that splits it.
        dtypes: by a parameter's name, the dtype that it has in the call.

    Returns:
        for each leaf of its output, whether it is made of split features.

    Raises:
        RuntimeError: features, or heads, are not taken each by itself.
    """
    params: dict[int, _Param] = {}
    leaves = [_meta(*x) if isinstance(x, TensorSpec) else x for x in signature.leaves]
    args, keywords = tree.unflatten(signature.treedef, leaves)
    for path, m in module.named_modules():
        _fill(m, words.get(path) == "whole", dtypes, params)
    for path, word in words.items():
        m: Any = module.get_submodule(path)
        if word in ("column", "row"):
            m.forward = partial(
                _column_forward if word == "column" else _row_forward, m, path
            )
    # With gradients, as what requires them tells whose gradients would be wrong.
    try:
        with torch.enable_grad(), _SplitDim(params, ranks):
            out = module.forward(*args, **keywords)
    except _NotSplit:
        raise
    except Exception as error:
        raise _NotSplit(
            "a forward around split layers cannot run on a rank's part of the features "
            f"({error}). It is given sizes of that part: let it say -1 in place of a "
            "number of heads, x.view(*shape, -1, self.head_dim), or leave its layers "
            "out of the plan"
        ) from error
    return [_is_marked(x) for x in tree.leaves(out, is_leaf=is_object)]


class _Param(NamedTuple):
    """A parameter's name, and whether the plan has its module as "whole"."""

    name: str
    is_whole: bool


class _NotSplit(RuntimeError):
    """An error: a forward cannot run on a rank's part of the features."""

    def __init__(self, text: str):
        super().__init__(f"plan: {text}")


def _meta(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def _fill(
    m: nn.Module,
    is_whole: bool,
    dtypes: Mapping[str, torch.dtype],
    names: dict[int, _Param],
) -> None:
    """Puts tensors without data into the tables and attributes of a copy's module."""
    params, buffers = _torch.tensor_tables(m)
    for table in (params, buffers, vars(m)):
        for key, x in table.items():
            if isinstance(x, AbsentTensor) and x.dtype is not None:
                is_param = table is params
                requires_grad = is_param and differentiable(cast(HasDtype, x))
                dtype = dtypes.get(x.name, x.dtype) if is_param else x.dtype
                table[key] = _meta(cast(torch.Size, x.shape), dtype, requires_grad)
                if table is params:
                    names[id(table[key])] = _Param(x.name, is_whole)
            elif isinstance(x, Tensor):
                table[key] = _meta(x.shape, x.dtype)
    for hooks in _torch.hook_tables(m, before=False):
        hooks.clear()


def _column_forward(m: nn.Linear, path: str, x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], m.out_features * _MARK, requires_grad=True)


def _row_forward(m: nn.Linear, path: str, x: Tensor) -> Tensor:
    if x.shape[-1] != m.in_features * _MARK:
        raise _NotSplit(
            f'the "row" layer {path!r} is not given the features that a "column" layer '
            f"makes, but a tensor in which they are {_describe_sizes(x)}"
        )
    return x.new_empty(*x.shape[:-1], m.out_features, requires_grad=True)


def _is_marked(x: Any) -> bool:
    """Returns whether a value is a tensor that is made of split features."""
    return isinstance(x, Tensor) and x.numel() % _MARK == 0 and x.numel() > 0


def _split_dim(x: Tensor) -> int:
    """Returns the split dim of a marked tensor; raises if it has several."""
    dims = [i for i, n in enumerate(x.shape) if n % _MARK == 0]
    if len(dims) != 1 or x.shape[dims[0]] % _MARK**2 == 0:
        raise _NotSplit(
            f"split features are combined with each other, in {_describe_sizes(x)}, "
            "and a rank has only its own: leave these layers out of the plan"
        )
    return dims[0]


def _describe_sizes(x: Tensor) -> str:
    """Describes sizes without the mark: ``[2, 4/rank, 16]``."""
    sizes = [f"{n // _MARK}/rank" if n % _MARK == 0 else str(n) for n in x.shape]
    return f"[{', '.join(sizes)}]"


def _tensors(values: PyTree) -> Iterator[Tensor]:
    """Yields the tensors in values, lists and tuples."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for x in values:
            yield from _tensors(x)


class _SplitDim(TorchFunctionMode):
    """Follows the split dim through functions, and refuses what does not keep it.

    Args:
        params: the parameters, by id, and what is made of one parameter alone.
        ranks: the size of the axis that splits the module.
    """

    def __init__(self, params: dict[int, _Param], ranks: int):
        super().__init__()
        self.params, self.ranks = params, ranks
        self.alive: list[list[Tensor]] = []  # so that no id is another tensor's

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        inputs, outputs = [*_tensors((args, [*kwargs.values()]))], [*_tensors(out)]
        # A property that is no tensor, such as x.shape; or a function of none.
        if name == "__get__" and not outputs or not (inputs or outputs):
            return out
        split = [x for x in inputs if _is_marked(x)]
        if split and name == "__setitem__":
            self._refuse(name, split[0])
        if not outputs or name.startswith("new_") or name in _LIKE:
            return out
        self._check_types(inputs, outputs)
        if split:
            if _draws(name, args, kwargs):
                raise _NotSplit(_drawn_message(name))
            for x in split:
                self._check_along(name, x, args, kwargs)
            for y in outputs:
                self._check_dim(name, split, y)
        # Made of a number of features, such as torch.arange(n): another on each rank.
        elif any(map(_is_marked, outputs)) and name not in _ALIKE:
            self._refuse(name, next(filter(_is_marked, outputs)))
        return out

    def _refuse(self, name: str, x: Tensor) -> None:
        raise _NotSplit(
            f"{name} of split features {_describe_sizes(x)} may mix those of several "
            "ranks, or take the number that a rank has for that of all: compute on "
            "each feature, or each head, by itself. A Linear whose features are "
            "several things in "
            "one (keys and queries, a gate and values) cannot be split: make a Linear "
            "of each, or leave these layers out of the plan"
        )

    def _check_dim(self, name: str, split: list[Tensor], y: Tensor) -> None:
        """Raises if an output does not have the split dim as its inputs have it.

        A reshape may cut the dim, or join it with the dims behind it.
        """
        if not _is_marked(y):
            self._refuse(name, split[0])
        dim, sizes = _split_dim(y), {x.shape[_split_dim(x)] for x in split}
        size = y.shape[dim]
        if name in _RESHAPES:
            # What lies before the split dim is as it was: so is the order of heads.
            x = split[0]
            if math.prod(x.shape[: _split_dim(x)]) != math.prod(y.shape[:dim]):
                self._refuse(name, x)
        elif size not in sizes and name != "repeat_interleave":
            self._refuse(name, split[0])
        heads = size // _MARK
        if heads % self.ranks:
            fits = [str(k) for k in range(1, heads + 1) if not heads % k]
            raise _NotSplit(
                f"a forward takes split features as {heads} heads, which an axis of "
                f"size {self.ranks} does not divide: give it a size of "
                f"{', '.join(fits)}; or leave these layers out of the plan"
            )

    def _check_along(
        self, name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raises if a function mixes or counts what lies along the split dim."""
        shown, name = name, name.strip("_").removeprefix("special_")
        dims: Sequence[int] = []  # along which the function mixes, or may mix
        if name in ("layer_norm", "rms_norm"):
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
            dims = range(x.ndim - len(shape), x.ndim)
        elif name in ("tril", "triu", "scaled_dot_product_attention"):
            dims = [x.ndim - 2, x.ndim - 1]
        elif name == "pad":
            # Two widths for each dim, from the last one on.
            widths = kwargs.get("pad", args[1] if len(args) > 1 else ())
            dims = [x.ndim - 1 - i // 2 for i, n in enumerate(widths) if n]
        elif name == "batch_norm":
            dims = [i for i in range(x.ndim) if i != 1]
        elif name.startswith("conv"):
            groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
            if groups == x.shape[_split_dim(x)]:  # each channel by itself
                return
            dims = range(x.ndim)
        elif name == "einsum":
            dims = [] if _einsum_keeps(x, args) else [_split_dim(x)]
        elif name in _ALONG:
            position, default = _ALONG[name]
            dim = args[position] if len(args) > position else default
            dim = kwargs.get("dim", kwargs.get("axis", dim))
            dims = range(x.ndim) if dim is None else [dim % x.ndim]
        # Of a function that is not known any dim may be mixed.
        elif not (name in _MOVES or name in _RESHAPES or _is_pointwise(name)):
            dims = range(x.ndim)
        counts = (
            name not in _MOVES
            and name not in _RESHAPES
            and _has_feature_count(args, kwargs)
        )
        if _split_dim(x) in dims or counts:
            self._refuse(shown, x)

    def _check_types(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Raises if a value that is the same on all ranks is combined with split ones.

        Each rank would compute its gradient from its own part, and nobody the sum. Of
        "whole" parameters the plan sums it.
        """
        params = [self.params.get(id(x), _NO_PARAM) for x in inputs]
        whole = [name for name, is_whole in params if is_whole]
        if any(map(_is_marked, [*inputs, *outputs])):
            for x, (parameter, is_whole) in zip(inputs, params, strict=True):
                if x.requires_grad and not is_whole and not _is_marked(x):
                    raise _NotSplit(_combined_message(parameter))
        # What is made of one parameter alone, such as 1 + weight, stands for it.
        elif all(n == params[0][0] for n, _ in params) and params and params[0][0]:
            self.alive += [inputs, outputs]
            self.params |= {id(y): params[0] for y in outputs}
        elif whole:
            raise _NotSplit(
                f'{whole[0]!r} is "whole", which is for modules that see split '
                "features, and sees others: leave it out of the plan"
            )


_NO_PARAM = _Param("", False)


def _einsum_keeps(x: Tensor, args: tuple[Any, ...]) -> bool:
    """Returns whether an einsum's result has the split dim of an operand."""
    inputs, _, out = args[0].replace(" ", "").partition("->")
    operands = args[1:] if isinstance(args[1], Tensor) else args[1]
    letters = next(
        n for n, y in zip(inputs.split(","), operands, strict=True) if y is x
    )
    before, dots, after = letters.partition("...")
    dim = _split_dim(x)
    if dots and dim >= len(before):
        # From the end, as dots stand for any number of dims; all of these are one here.
        dim = max(dim - x.ndim, -len(after) - 1)
        return "..." in out if dim < -len(after) else after[dim] in out
    return letters[dim] in out


def _is_pointwise(name: str) -> bool:
    """Returns whether a function is of each element by itself, by torch's own tags."""
    for x in (name, name[name[0] in "ri" :]):  # as in __radd__ and __iadd__
        packet = getattr(torch.ops.aten, _ATEN_NAMES.get(x, x), None)
        for overload in packet.overloads() if packet is not None else ():
            if torch.Tag.pointwise in getattr(packet, overload).tags:
                return True
    return name in _POINTWISE


def _has_feature_count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an argument is a number of split features.

    Or its inverse, its square root, or the inverse of that: as in a mean, or a scale of
    attention. A rank would take its own number for that of all.
    """
    numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float) and x]
    powers = [abs(v) / _MARK for n in numbers for v in (n, n * n, 1 / n, 1 / n / n)]
    return any(0.5 < v < _MARK and abs(v - round(v)) < 1e-7 for v in powers)


def _combined_message(parameter: str) -> str:
    if parameter:
        return (
            f"{parameter!r}, which is whole, is combined with split features, so that "
            "its gradient would be one rank's part: add "
            f'{parameter.rpartition(".")[0]!r}: "whole" to the plan'
        )
    return (
        "an input of a module with split layers is combined with split features "
        "without passing a column layer, so that its gradient would be one rank's "
        "part: leave these layers out of the plan"
    )


def _drawn_message(name: str) -> str:
    return (
        f"random numbers are drawn for split features, by {name}, and all ranks would "
        "draw the same: set its p to 0 (of a Hugging Face model: attention_dropout=0), "
        "or have it after the row layer"
    )


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call draws random numbers."""
    if name == "scaled_dot_product_attention":
        return (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
    if "dropout" not in name:
        return name in _RANDOM
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return p > 0 and kwargs.get("training", args[2] if len(args) > 2 else True)


_ATEN_NAMES = {"truediv": "div", "floordiv": "div", "mod": "remainder", "invert": "neg",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}  # fmt: skip
# Pointwise functions that have no operator of their name, or one without the tag.
_POINTWISE = set(
    "hardswish log_sigmoid logsigmoid softsign tanhshrink floor_divide copy fill zero "
    "bucketize real imag conj view_as_real view_as_complex dropout dropout1d dropout2d "
    "alpha_dropout feature_alpha_dropout rrelu".split()
)
# Functions that move, copy or leave out whole features; and reductions, whose output
# lacks the dim that they reduce (`_check_dim` refuses that of the split one).
_MOVES = set(
    "get getitem cat concat stack chunk split tensor_split unbind select narrow "
    "transpose permute movedim moveaxis swapaxes swapdims t adjoint contiguous clone "
    "detach float double half bfloat16 int long bool type cpu cuda expand expand_as "
    "broadcast_to unsqueeze squeeze repeat repeat_interleave tile requires_grad "
    "zeros_like ones_like empty_like full_like sum nansum mean nanmean amax amin max "
    "min prod var std var_mean std_mean norm vector_norm linalg_vector_norm logsumexp "
    "any all argmax argmin median count_nonzero aminmax matmul rmatmul bmm mm baddbmm "
    "linear".split()
)
_RESHAPES = set("view reshape flatten unflatten view_as reshape_as ravel".split())
# By name: the position of the argument dim, and its default.
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys("sort argsort glu".split(), (1, -1)), "topk": (2, -1),
    **dict.fromkeys("softmax log_softmax softmin".split(), (1, None)),
    **dict.fromkeys("cumsum cumprod cummax cummin logcumsumexp".split(), (1, 0)),
    **dict.fromkeys("index_fill index_copy index_add index_select".split(), (1, 0)),
    **dict.fromkeys("gather scatter scatter_add scatter_reduce".split(), (1, 0)),
    "take_along_dim": (2, None), "gumbel_softmax": (4, -1), "normalize": (2, 1),
    **{f"fft_{name}": (2, -1) for name in "fft ifft rfft irfft hfft ihfft".split()},
}  # fmt: skip
# Functions that draw, whatever their arguments are.
_RANDOM = {
    "rrelu", "bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like",
    "uniform_", "normal_", "exponential_", "random_", "multinomial", "poisson",
}  # fmt: skip
# Functions whose output is the same for each feature; and those that take only a dtype
# or a device from another tensor.
_ALIKE = {"zeros", "ones", "full", "empty", "expand", "expand_as", "broadcast_to"}
_LIKE = {"type_as", "to"}
