"""``precision``: compute in one dtype, keep and update in another.

It sets the `Casts` of the frame, and nothing else: units cast their arguments by it,
``shard`` casts a rank's part before the gather, and sums gradients in its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.casts import Casts
from fsfunc.core.frames import Transformed, frame, inside
from fsfunc.sharded.inputs import check_function

_P = ParamSpec("_P")
_R = TypeVar("_R")


@api_boundary
def precision(
    f: Callable[_P, _R],
    compute: torch.dtype,
    reduce: torch.dtype | None = None,
    *,
    output: torch.dtype | None = None,
    gradients: torch.dtype | None = None,
    overrides: Mapping[str, torch.dtype | None] | None = None,
) -> Callable[_P, _R]:
    """Runs the units of ``f`` in ``compute``, on parameters kept as they are.

    A unit's parameters and floating inputs are cast; under ``shard`` the rank's part is
    cast before the gather, which then moves the smaller dtype, and no full-size copy in
    the wider one exists. Gradients are reduced in ``reduce`` and given in the dtype of
    the parameters, or in ``gradients``. Complex leaves compute, and are reduced and
    given, as they are: torch has no complex numbers in bfloat16. Buffers of a module
    (`from_module`) are left as they are too: running statistics and counters would not
    survive a narrow dtype. What a ``torch.autocast`` around a unit casts, it casts too.

    Args:
        f: a unit, a loss, or a train step.
        compute: the dtype of units' arithmetic, such as ``torch.bfloat16``.
        reduce: the dtype of the reductions, and of the sums of microbatches that come
            before them; by default that of the arithmetic.
        output: the dtype of floating tensors that units return; else as they come.
        gradients: under ``shard``, the dtype in which a rank holds the gradients of
            units' parameters, until a step reads them. With ``torch.bfloat16`` Adam has
            14 bytes a float32 parameter over the ranks at zero=3, 16 without. Each is
            rounded once it is the mean over ranks; where a buffer's gradient is a sum
            of several (of units that share it, of microbatches of an ``accumulate``
            around), these are added in it. Of a ``pipeline`` all are given in that of
            the ``precision`` around the gradient call.
        overrides: pattern to dtype, for what computes in another one, or (None) in the
            one it is given: ``{"**/norm/**": torch.float32}``. A pattern is compared
            with the name of a unit (``block``, or ``block/norm`` within one), for its
            inputs, and with the names of parameters below it (``block/norm/scale``);
            ``*`` is one name, ``**`` any number. The first that fits is taken.

    Raises:
        ValueError: a dtype that is not floating.

    Warns:
        UserWarning: gradients in float16 without a loss scale.

    Cost: under ``shard``, parameters of a unit that compute in different dtypes have a
    buffer for each. A state that was laid out for other overrides works, but leaves of
    different dtypes in one buffer are gathered in that of the parameters, some twice.

    >>> import torch, fsfunc as ff
    >>> unit = ff.unit(lambda p, x: p * x)
    >>> ff.precision(unit, torch.bfloat16)(torch.ones(2), torch.ones(2)).dtype
    torch.bfloat16
    """
    check_function(f, "precision")
    by_pattern = {} if overrides is None else dict(overrides)
    # Pairs, as a pattern may be named as an argument is.
    dtypes = [("compute", compute), ("reduce", reduce), ("output", output)]
    dtypes += [*by_pattern.items(), ("gradients", gradients)]
    for i, (name, dtype) in enumerate(dtypes):
        if dtype is None and i:  # a default, or an override to none
            continue
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"{name}={dtype!r}: it is a floating dtype, such as torch.bfloat16"
            )
    casts = Casts(compute, reduce, output, tuple(by_pattern.items()), gradients)

    shown = [(name, x) for name, x in dtypes if x is not None]

    @functools.partial(Transformed, f, "precision", lambda: shown)
    def run(*args: Any, **keywords: Any) -> Any:
        with inside(frame().replace(casts=casts)):
            return f(*args, **keywords)

    return run
