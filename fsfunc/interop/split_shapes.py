"""Shape rules of split features, checked on a run of a module without data.

Between a column layer and its row layer a rank has some of the features, or heads, in
place of all. The module around both is run once for each signature of a call on meta
tensors, where the features are so many times a large prime. That prime marks the split
dim of every tensor that is made of them: it has to be in one dim, and stay there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsfunc import _torch, tree
from fsfunc.core.casts import differentiable
from fsfunc.interop.stubs import Absent

_MARK = 1_000_003  # a prime that no other size has as a factor


class Signature(NamedTuple):
    """All that a forward can tell of what it is given, without its values.

    A cache, say, is left out of it.
    """

    treedef: Any
    leaves: tuple[Any, ...]
    key: Any

    @classmethod
    def of(cls, values: Any) -> Signature:
        leaves, treedef = tree.flatten(values, is_leaf=is_object)
        found = tuple(None if is_object(x) else GivenTensor.of(x) for x in leaves)
        # What is held in a cache has shapes of its own: they are looked at once.
        told = tuple(x if x.__hash__ else repr(x) for x in found)
        key = treedef if any(map(is_object, leaves)) else (treedef, told)
        return cls(treedef, found, key)


class GivenTensor(NamedTuple):
    """The shape and dtype of a tensor that a forward was given, without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return GivenTensor(x.shape, x.dtype, x.requires_grad)


def is_object(x: Any) -> bool:
    """True if a leaf is no tensor, and may hold some."""
    return hasattr(x, "__dict__") and not isinstance(x, Tensor | type)


def run_shapes(
    module: nn.Module, words: Mapping[str, str], given: Signature, ranks: int
) -> list[bool]:
    """Runs a module around split layers on shapes alone, and checks what it does.

    Args:
        module: a copy without tensors, which is used up.
        words: how its layers are split, by their names within it.
        given: the signature of (args, keywords).
        ranks: the size of the axis that splits it.

    Returns:
        for each leaf of its output, whether it is made of split features.

    Raises:
        RuntimeError: features, or heads, are not taken each by itself.
    """
    names: dict[int, tuple[str, bool]] = {}
    leaves = [_meta(*x) if isinstance(x, GivenTensor) else x for x in given.leaves]
    args, keywords = tree.unflatten(given.treedef, leaves)
    for path, m in module.named_modules():
        _fill(m, words.get(path) == "whole", names)
    for path, word in words.items():
        m = module.get_submodule(path)
        if word in ("column", "row"):
            m.forward = partial(_column if word == "column" else _row, m, path)
    try:
        with torch.enable_grad(), _SplitDim(names, ranks):
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


class _NotSplit(RuntimeError):
    def __init__(self, text: str):
        super().__init__(f"plan: {text}")


def _meta(shape: Any, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def _fill(m: nn.Module, whole: bool, names: dict[int, tuple[str, bool]]) -> None:
    """Puts tensors without data into the tables and attributes of a copy's module."""
    params, buffers = _torch.tensor_tables(m)
    for table in (params, buffers, vars(m)):
        for key, x in table.items():
            if isinstance(x, Absent) and x.dtype is not None:
                grad = table is params and differentiable(x)
                table[key] = _meta(x.shape, x.dtype, grad)
                if table is params:
                    names[id(table[key])] = x.name, whole
            elif isinstance(x, Tensor):
                table[key] = _meta(x.shape, x.dtype)
    for hooks in _torch.hook_tables(m, before=False):
        hooks.clear()


def _column(m: Any, path: str, x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], m.out_features * _MARK, requires_grad=True)


def _row(m: Any, path: str, x: Tensor) -> Tensor:
    if x.shape[-1] != m.in_features * _MARK:
        raise _NotSplit(
            f'the "row" layer {path!r} is not given the features that a "column" layer '
            f"makes, but a tensor in which they are {_said(x)}"
        )
    return x.new_empty(*x.shape[:-1], m.out_features, requires_grad=True)


def _is_marked(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() % _MARK == 0 and x.numel() > 0


def _dim(x: Tensor) -> int:
    """The split dim of a tensor."""
    found = [i for i, n in enumerate(x.shape) if n % _MARK == 0]
    if len(found) != 1 or x.shape[found[0]] % _MARK**2 == 0:
        raise _NotSplit(
            f"split features are combined with each other, in {_said(x)}, and a rank "
            "has only its own: leave these layers out of the plan"
        )
    return found[0]


def _said(x: Tensor) -> str:
    sizes = [f"{n // _MARK}/rank" if n % _MARK == 0 else str(n) for n in x.shape]
    return f"[{', '.join(sizes)}]"


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for x in values:
            yield from _tensors(x)


class _SplitDim(TorchFunctionMode):
    """Follows the split dim through functions, and refuses what does not keep it.

    Args:
        names: parameters, by id: their name, and whether the plan has them "whole".
        ranks: as for `run_shapes`.
    """

    def __init__(self, names: dict[int, tuple[str, bool]], ranks: int):
        super().__init__()
        self.names, self.ranks = names, ranks
        self.kept: list[Any] = []  # so that no id is another's

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        given, found = [*_tensors((args, [*kwargs.values()]))], [*_tensors(out)]
        if name == "__get__" and not found or not (given or found):
            return out
        split = [x for x in given if _is_marked(x)]
        if split and name == "__setitem__":
            self._refuse(name, split[0])
        if not found or name.startswith("new_") or name in _LIKE:
            return out
        self._check_types(given, found)
        if split:
            if _draws(name, args, kwargs):
                raise _NotSplit(_drawn(name))
            for x in split:
                self._check_along(name, x, args, kwargs)
            for y in found:
                self._check_dim(name, split, y)
        elif any(map(_is_marked, found)) and name not in _ALIKE:
            self._refuse(name, next(filter(_is_marked, found)))
        return out

    def _refuse(self, name: str, x: Tensor) -> None:
        raise _NotSplit(
            f"{name} of split features {_said(x)} may mix those of several ranks, or "
            "take the number that a rank has for that of all: compute on each feature, "
            "or each head, by itself. A Linear whose features are several things in "
            "one (keys and queries, a gate and values) cannot be split: make a Linear "
            "of each, or leave these layers out of the plan"
        )

    def _check_dim(self, name: str, split: list[Tensor], y: Tensor) -> None:
        """The split dim stays as it is; a reshape may cut it, or join what follows."""
        if not _is_marked(y):
            self._refuse(name, split[0])
        at, sizes = _dim(y), {x.shape[_dim(x)] for x in split}
        size = y.shape[at]
        if name in _RESHAPES:
            x = split[0]
            if math.prod(x.shape[: _dim(x)]) != math.prod(y.shape[:at]):
                self._refuse(name, x)
        elif size not in sizes and name != "repeat_interleave":
            self._refuse(name, split[0])
        count = size // _MARK
        if count % self.ranks:
            fits = [str(k) for k in range(1, count + 1) if not count % k]
            raise _NotSplit(
                f"a forward takes split features as {count} heads, which an axis of "
                f"size {self.ranks} does not divide: give it a size of "
                f"{', '.join(fits)}; or leave these layers out of the plan"
            )

    def _check_along(self, name: str, x: Tensor, args: Any, kwargs: Any) -> None:
        """Functions that mix what lies along a dim, or number it, or may do so."""
        given, name = name, name.strip("_").removeprefix("special_")
        dims: Sequence[int] = []
        if name in ("layer_norm", "rms_norm"):
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
            dims = range(x.ndim - len(shape), x.ndim)
        elif name in ("tril", "triu", "scaled_dot_product_attention"):
            dims = [x.ndim - 2, x.ndim - 1]
        elif name == "pad":
            ends = kwargs.get("pad", args[1] if len(args) > 1 else ())
            dims = [x.ndim - 1 - i // 2 for i, n in enumerate(ends) if n]
        elif name == "batch_norm":
            dims = [i for i in range(x.ndim) if i != 1]
        elif name.startswith("conv"):
            groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
            if groups == x.shape[_dim(x)]:  # each channel by itself
                return
            dims = range(x.ndim)
        elif name == "einsum":
            dims = [] if _is_kept(x, args) else [_dim(x)]
        elif name in _ALONG:
            place, default = _ALONG[name]
            dim = args[place] if len(args) > place else default
            dim = kwargs.get("dim", kwargs.get("axis", dim))
            dims = range(x.ndim) if dim is None else [dim % x.ndim]
        elif not (name in _MOVES or name in _RESHAPES or _is_pointwise(name)):
            dims = range(x.ndim)
        counted = name not in _MOVES and name not in _RESHAPES and _counts(args, kwargs)
        if _dim(x) in dims or counted:
            self._refuse(given, x)

    def _check_types(self, given: list[Tensor], found: list[Tensor]) -> None:
        """One value on all ranks that meets parts would get one part's gradient."""
        known = [self.names.get(id(x), ("", False)) for x in given]
        whole = [n for n, is_whole in known if is_whole]
        if any(map(_is_marked, [*given, *found])):
            for x, (parameter, is_whole) in zip(given, known, strict=True):
                if x.requires_grad and not is_whole and not _is_marked(x):
                    raise _NotSplit(_meeting(parameter))
        elif all(n == known[0][0] for n, _ in known) and known and known[0][0]:
            self.kept += [given, found]
            self.names |= {id(y): known[0] for y in found}
        elif whole:
            raise _NotSplit(
                f'{whole[0]!r} is "whole", which is for modules that see split '
                "features, and sees others: leave it out of the plan"
            )


def _is_kept(x: Tensor, args: Any) -> bool:
    """True if an einsum's result has the split dim of an operand."""
    inputs, _, out = args[0].replace(" ", "").partition("->")
    operands = args[1:] if isinstance(args[1], Tensor) else args[1]
    letters = next(
        n for n, y in zip(inputs.split(","), operands, strict=True) if y is x
    )
    before, dots, after = letters.partition("...")
    at = _dim(x)
    if dots and at >= len(before):
        at = max(at - x.ndim, -len(after) - 1)  # the last of the dots, if it is one
        return "..." in out if at < -len(after) else after[at] in out
    return letters[at] in out


def _is_pointwise(name: str) -> bool:
    """True for a function of each element by itself, by torch's own tags."""
    for x in (name, name[name[0] in "ri" :]):  # as in __radd__ and __iadd__
        packet = getattr(torch.ops.aten, _DUNDERS.get(x, x), None)
        for overload in packet.overloads() if packet is not None else ():
            if torch.Tag.pointwise in getattr(packet, overload).tags:
                return True
    return name in _POINTWISE


def _counts(args: Any, kwargs: Any) -> bool:
    """True if a number is that of split features, its inverse, or a root of these."""
    numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float) and x]
    powers = [abs(v) / _MARK for n in numbers for v in (n, n * n, 1 / n, 1 / n / n)]
    return any(0.5 < v < _MARK and abs(v - round(v)) < 1e-7 for v in powers)


def _meeting(parameter: str) -> str:
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


def _drawn(name: str) -> str:
    return (
        f"random numbers are drawn for split features, by {name}, and all ranks would "
        "draw the same: set its p to 0 (of a Hugging Face model: attention_dropout=0), "
        "or have it after the row layer"
    )


def _draws(name: str, args: Any, kwargs: Any) -> bool:
    if name == "scaled_dot_product_attention":
        return (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
    if "dropout" not in name:
        return name in _RANDOM
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return p > 0 and kwargs.get("training", args[2] if len(args) > 2 else True)


_DUNDERS = {"truediv": "div", "floordiv": "div", "mod": "remainder", "invert": "neg",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}  # fmt: skip
_POINTWISE = set(
    "hardswish log_sigmoid logsigmoid softsign tanhshrink floor_divide copy fill zero "
    "bucketize real imag conj view_as_real view_as_complex dropout dropout1d dropout2d "
    "alpha_dropout feature_alpha_dropout rrelu".split()
)
# What moves, copies or leaves out whole features, or sums over other dims than theirs.
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
# By name: at which place the dim is given, and which it is by default.
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys("sort argsort glu".split(), (1, -1)), "topk": (2, -1),
    **dict.fromkeys("softmax log_softmax softmin".split(), (1, None)),
    **dict.fromkeys("cumsum cumprod cummax cummin logcumsumexp".split(), (1, 0)),
    **dict.fromkeys("index_fill index_copy index_add index_select".split(), (1, 0)),
    **dict.fromkeys("gather scatter scatter_add scatter_reduce".split(), (1, 0)),
    "take_along_dim": (2, None), "gumbel_softmax": (4, -1), "normalize": (2, 1),
    **{f"fft_{name}": (2, -1) for name in "fft ifft rfft irfft hfft ihfft".split()},
}  # fmt: skip
_RANDOM = {
    "rrelu", "bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like",
    "uniform_", "normal_", "exponential_", "random_", "multinomial", "poisson",
}  # fmt: skip
# The same for each feature; and what takes a dtype or a device alone from another.
_ALIKE = {"zeros", "ones", "full", "empty", "expand", "expand_as", "broadcast_to"}
_LIKE = {"type_as", "to"}
