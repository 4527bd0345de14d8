"""Rules of torch's kernels for lists of tensors: ``_foreach_``, and fused optimizers.

Their equations are those of Kingma and Ba, 2015 (Adam), Loshchilov and Hutter, 2019
(AdamW), Duchi et al., 2011 (Adagrad), and torch's own SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc.testing.finite_field.field import PRIME

aten = torch.ops.aten

# What an operator on each tensor is called, where it is not by the list's own name.
_EACH: dict[str, Any] = {
    "norm": lambda x, ord=2, dtype=None: aten.linalg_vector_norm(x, ord),
    "max": aten.amax,
    "maximum": lambda a, b: (
        aten.maximum(a, b) if isinstance(b, Tensor) else aten.clamp_min(a, b)
    ),
    "minimum": lambda a, b: (
        aten.minimum(a, b) if isinstance(b, Tensor) else aten.clamp_max(a, b)
    ),
    "zero": aten.zeros_like,
    "clone": aten.clone,
}


def each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a ``_foreach_`` operator as one operator on each tensor."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    in_place = name.endswith("_")
    name = name.removesuffix("_")
    if name == "copy":
        for into, source in zip(*args[:2], strict=True):
            into.copy_(source)
        return None
    run: Callable[..., Any] = _EACH.get(name) or getattr(aten, name)
    lists = [x for x in args if isinstance(x, list | tuple)]
    results = []
    for i in range(len(lists[0])):
        mine = [_element(x, i, len(lists[0])) for x in args]
        named = {k: _element(x, i, len(lists[0])) for k, x in kwargs.items()}
        if name in ("addcmul", "addcdiv") and len(mine) == 4:
            named["value"] = mine.pop()
        results.append(_added(run, mine, named))
    if not in_place:
        return results
    for into, result in zip(lists[0], results, strict=True):
        into.copy_(result)
    return None


def _element(x: Any, i: int, count: int) -> Any:
    """Returns what is given to the tensor i: its own of a list, or what all are."""
    if isinstance(x, list | tuple):
        return x[i]
    if isinstance(x, Tensor) and x.dim() == 1 and len(x) == count and count:
        return x[i]  # scalars of a list, as one tensor
    return x


def _added(run: Any, args: list[Any], named: dict[str, Any]) -> Any:
    value = named.get("value")
    if isinstance(value, Tensor):  # of addcmul and addcdiv: no operator takes one
        product = aten.mul if run is aten.addcmul else aten.div
        return args[0] + product(args[1], args[2]) * named["value"]
    return run(*args, **named)


def fused(name: str) -> Callable[..., Any] | None:
    """Returns the equation of a fused optimizer kernel, by its name."""
    return _FUSED.get(name)


# A kernel's equation is computed once, on all its tensors laid end to end.


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _write(into: Sequence[Tensor], new: Tensor, options: dict[str, Any]) -> None:
    """Writes new values into tensors, unless the step is skipped."""
    parts = new.split([x.numel() for x in into])
    found = options.get("found_inf")
    for x, part in zip(into, parts, strict=True):
        part = part.view(x.shape)
        x.copy_(part if found is None else torch.where(found == 0, part, x))


def _gradient(
    grads: Sequence[Tensor], p: Tensor, options: dict[str, Any], decays: bool = True
) -> Tensor:
    """Returns the gradient that a kernel steps by."""
    g = _flat(grads)
    if options.get("grad_scale") is not None:
        g = g / options["grad_scale"]
    if options["maximize"]:
        g = -g
    return g + p * options["weight_decay"] if decays and options["weight_decay"] else g


def _counted(
    counts: Sequence[Tensor], params: Sequence[Tensor], fn: Callable[[float], float]
) -> Tensor:
    """Returns a function of each tensor's count, for each of its elements.

    It is computed in Python's numbers, as the same optimizers without a kernel do.
    """
    # A count that was drawn is a large number: never a negative one, whose power is.
    each = torch.tensor([fn(x.item() % PRIME) for x in counts], dtype=torch.float64)
    sizes = torch.tensor([x.numel() for x in params])
    return each.repeat_interleave(sizes)


def _adam(decoupled: bool) -> Callable[..., Any]:
    def step(
        params: Sequence[Tensor], grads: Any, means: Any, squares: Any, largest: Any,
        counts: Any, **options: Any,
    ) -> None:  # fmt: skip
        lr, b1, b2 = options["lr"], options["beta1"], options["beta2"]
        p, decay = _flat(params), options["weight_decay"]
        g = _gradient(grads, p, options, not decoupled)
        q = p * (1 - lr * decay) if decoupled and decay else p
        mean, square = _flat(means), _flat(squares)
        mean = mean + (g - mean) * (1 - b1)
        square = square * b2 + g * g * (1 - b2)
        first = _counted(counts, params, lambda t: 1 - b1**t)
        root = _counted(counts, params, lambda t: (1 - b2**t) ** 0.5)
        of = square
        if options["amsgrad"]:
            of = torch.maximum(_flat(largest), square)
            _write(largest, of, options)
        scale = (of.sqrt() / root + options["eps"]) * first
        _write(params, q - lr * mean / scale, options)
        _write(means, mean, options)
        _write(squares, square, options)

    return step


def _sgd(params: Sequence[Tensor], grads: Any, buffers: Any, **options: Any) -> None:
    momentum, p = options["momentum"], _flat(params)
    g = _gradient(grads, p, options)
    if momentum:
        buffer = g
        if not options["is_first_step"]:
            buffer = _flat(buffers) * momentum + g * (1 - options["dampening"])
        _write(buffers, buffer, options)
        g = g + buffer * momentum if options["nesterov"] else buffer
    _write(params, p - g * options["lr"], options)


def _adagrad(
    params: Sequence[Tensor], grads: Any, sums: Any, counts: Any, **options: Any
) -> None:
    p = _flat(params)
    g = _gradient(grads, p, options)
    total = _flat(sums) + g * g
    slower = _counted(counts, params, lambda t: 1 + (t - 1) * options["lr_decay"])
    rate = options["lr"] / slower
    _write(params, p - rate * g / (total.sqrt() + options["eps"]), options)
    _write(sums, total, options)


_FUSED: dict[str, Callable[..., Any]] = {
    "_fused_adam_": _adam(False),
    "_fused_adamw_": _adam(True),
    "_fused_sgd_": _sgd,
    "_fused_adagrad_": _adagrad,
}
