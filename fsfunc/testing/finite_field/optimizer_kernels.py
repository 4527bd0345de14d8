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
from fsfunc.testing.finite_field.rules import Overload

aten: Any = torch.ops.aten

# The operator on each tensor, where its name is not that of the operator on lists.
_FOREACH: dict[str, Callable[..., Any]] = {
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


def run_foreach(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a ``_foreach_`` operator as one operator on each tensor."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    in_place = name.endswith("_")
    name = name.removesuffix("_")
    if name == "copy":
        for target, source in zip(*args[:2], strict=True):
            target.copy_(source)
        return None
    run: Callable[..., Any] = _FOREACH.get(name) or getattr(aten, name)
    lists = [x for x in args if isinstance(x, list | tuple)]
    results = []
    for i in range(len(lists[0])):
        tensor_args = [_argument_of(x, i, len(lists[0])) for x in args]
        tensor_kwargs = {
            k: _argument_of(x, i, len(lists[0])) for k, x in kwargs.items()
        }
        if name in ("addcmul", "addcdiv") and len(tensor_args) == 4:
            tensor_kwargs["value"] = tensor_args.pop()
        results.append(_run_one(run, tensor_args, tensor_kwargs))
    if not in_place:
        return results
    for target, result in zip(lists[0], results, strict=True):
        target.copy_(result)
    return None


def _argument_of(x: Any, i: int, count: int) -> Any:
    """Returns the argument for tensor ``i``: its element of a list, or a shared one."""
    if isinstance(x, list | tuple):
        return x[i]
    if isinstance(x, Tensor) and x.dim() == 1 and len(x) == count and count:
        return x[i]  # scalars of a list, as one tensor
    return x


def _run_one(run: Callable[..., Any], args: list[Any], named: dict[str, Any]) -> Any:
    value = named.get("value")
    if isinstance(value, Tensor):  # of addcmul and addcdiv, which take no tensor here
        product = aten.mul if run is aten.addcmul else aten.div
        return args[0] + product(args[1], args[2]) * named["value"]
    return run(*args, **named)


def kernel_equation(name: str) -> Callable[..., Any] | None:
    """Returns the equation of a fused optimizer kernel, by its name."""
    return _KERNEL_EQUATIONS.get(name)


# A kernel's equation is computed once, on all its tensors in one: exact runs are slow.


def _flatten_all(tensors: Sequence[Tensor]) -> Tensor:
    """Joins tensors into one of one dim."""
    return torch.cat([x.reshape(-1) for x in tensors])


def _write(targets: Sequence[Tensor], new: Tensor, options: dict[str, Any]) -> None:
    """Writes new values into tensors, unless the step is skipped."""
    parts = new.split([target.numel() for target in targets])
    found_inf = options.get("found_inf")
    for target, part in zip(targets, parts, strict=True):
        part = part.view(target.shape)
        target.copy_(
            part if found_inf is None else torch.where(found_inf == 0, part, target)
        )


def _gradient(
    grads: Sequence[Tensor], p: Tensor, options: dict[str, Any], decays: bool = True
) -> Tensor:
    """Returns the gradient that a kernel steps by."""
    g = _flatten_all(grads)
    if options.get("grad_scale") is not None:
        g = g / options["grad_scale"]
    if options["maximize"]:
        g = -g
    return g + p * options["weight_decay"] if decays and options["weight_decay"] else g


def _function_of_counts(
    counts: Sequence[Tensor], params: Sequence[Tensor], fn: Callable[[float], float]
) -> Tensor:
    """Returns a function of each tensor's count, for each of its elements.

    It is computed on Python's floats, as optimizers without a kernel do.
    """
    # A count may be a random residue: as a number from 0 to PRIME - 1 its power is
    # finite, as a negative one it would not be.
    by_tensor = torch.tensor(
        [fn(x.item() % PRIME) for x in counts], dtype=torch.float64
    )
    sizes = torch.tensor([x.numel() for x in params])
    return by_tensor.repeat_interleave(sizes)


def _adam(decoupled: bool) -> Callable[..., None]:
    """Returns the equation of Adam, or with ``decoupled`` weight decay of AdamW."""

    def step(
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        largest: Sequence[Tensor],
        counts: Sequence[Tensor],
        **options: Any,
    ) -> None:
        lr, b1, b2 = options["lr"], options["beta1"], options["beta2"]
        p, decay = _flatten_all(params), options["weight_decay"]
        g = _gradient(grads, p, options, not decoupled)
        q = p * (1 - lr * decay) if decoupled and decay else p
        mean, square = _flatten_all(means), _flatten_all(squares)
        mean = mean + (g - mean) * (1 - b1)
        square = square * b2 + g * g * (1 - b2)
        bias_correction = _function_of_counts(counts, params, lambda t: 1 - b1**t)
        root_correction = _function_of_counts(
            counts, params, lambda t: (1 - b2**t) ** 0.5
        )
        second_moment = square
        if options["amsgrad"]:
            second_moment = torch.maximum(_flatten_all(largest), square)
            _write(largest, second_moment, options)
        scale = (
            second_moment.sqrt() / root_correction + options["eps"]
        ) * bias_correction
        _write(params, q - lr * mean / scale, options)
        _write(means, mean, options)
        _write(squares, square, options)

    return step


def _sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    **options: Any,
) -> None:
    momentum, p = options["momentum"], _flatten_all(params)
    g = _gradient(grads, p, options)
    if momentum:
        buffer = g
        if not options["is_first_step"]:
            buffer = _flatten_all(buffers) * momentum + g * (1 - options["dampening"])
        _write(buffers, buffer, options)
        g = g + buffer * momentum if options["nesterov"] else buffer
    _write(params, p - g * options["lr"], options)


def _adagrad(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    counts: Sequence[Tensor],
    **options: Any,
) -> None:
    p = _flatten_all(params)
    g = _gradient(grads, p, options)
    total = _flatten_all(sums) + g * g
    slowdown = _function_of_counts(
        counts, params, lambda t: 1 + (t - 1) * options["lr_decay"]
    )
    rate = options["lr"] / slowdown
    _write(params, p - rate * g / (total.sqrt() + options["eps"]), options)
    _write(sums, total, options)


_KERNEL_EQUATIONS: dict[str, Callable[..., Any]] = {
    "_fused_adam_": _adam(False),
    "_fused_adamw_": _adam(True),
    "_fused_sgd_": _sgd,
    "_fused_adagrad_": _adagrad,
}
