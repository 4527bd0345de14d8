"""``value``: the loss of a gradient call, without its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.autodiff import interpreted
from fsfunc.core.frames import Transformed, frame
from fsfunc.core.outcomes import Argnums, GradientCall, batch_arguments
from fsfunc.runtime.scopes import refuse_compiled
from fsfunc.sharded.inputs import check_function


@api_boundary
def value(
    fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: Argnums | None = None,
) -> Callable[..., Any]:
    """A function that returns the value of ``value_and_grad(fn)``, without gradients.

    For evaluation. Under ``shard`` each rank's loss is a mean over its own rows, and
    the value the mean over the ranks; under ``accumulate`` and ``pipeline`` it is the
    mean over microbatches too; of losses that are ``Weighted``, the sum of totals over
    the sum of weights. (A sharded function that returns the loss itself,
    ``shard(loss, ...)``, returns each rank's own.) Like ``value_and_grad`` it belongs
    inside the transforms: ``shard(value(loss), mesh, "data")``.

    The loss runs as under ``torch.no_grad()``, and may be called in
    ``torch.inference_mode()``. What a loss differentiates itself by
    ``value_and_grad`` or ``torch.func`` is differentiated there too; what it does by
    ``torch.autograd.grad`` wants a ``torch.enable_grad()`` around.

    Args:
        fn: returns a scalar, or ``Weighted(total, weight)``.
        has_aux: ``fn`` returns ``(loss, aux)``, and so is what is returned. In ``aux``,
            floating scalars are averaged as the loss is, ``Summed(tree)`` is summed,
            of ``Max(tree)`` the largest are taken, and the rest is this rank's own.
        batch_argnums: the arguments, by position or keyword, that ``accumulate`` and
            ``pipeline`` cut into microbatches; by default the second one of two.

    Raises:
        TypeError, ValueError: the loss is no scalar tensor.

    The result is differentiable where that of ``value_and_grad`` is: inside another
    gradient call's function, inside a unit, and where a tensor among the arguments
    requires grad (and gradients are on).

    Cost: one forward pass, which keeps nothing for a backward one; at ``zero=3`` one
    all-gather for each unit call; a pipeline runs the forward actions of its schedule.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda w, x: x @ w)
    >>> loss = lambda w, x: layer(w, x).square().mean()
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> evaluate = ff.shard(ff.value(loss), mesh, "data")
    >>> def main():
    ...     x = ff.local_batch(torch.arange(4.0)[:, None], mesh, "data")
    ...     w = ff.place(evaluate, torch.ones(1, 1), x)
    ...     return evaluate(w, x).item()
    >>> ff.spmd(main, mesh)()
    [3.5, 3.5]
    """
    check_function(fn, "value")
    batch = batch_arguments(batch_argnums)

    shown = [("has_aux", True)] if has_aux else []

    @functools.partial(Transformed, fn, "value", lambda: shown)
    def run(*args: Any, **keywords: Any) -> Any:
        refuse_compiled("ff.value")
        if (f := frame()).around is not None:
            again = value(fn, has_aux, batch_argnums=batch_argnums)
            return f.around(again, args, keywords)  # `run` would hold itself
        call = GradientCall(fn, (), has_aux, args, keywords, batch_argnums=batch)
        outcome = interpreted(call, f)
        return (outcome.total, outcome.aux) if has_aux else outcome.total

    return run
