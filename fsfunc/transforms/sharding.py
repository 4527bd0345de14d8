"""``shard``: parameters, gradients and moments in parts, one per rank (ZeRO 0 to 3).

Only its arguments and their documentation stand here: `sharded_calls` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, ParamSpec, TypeVar

from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import transformed
from fsfunc.tracing.rules import describe_rules
from fsfunc.tracing.type_check import TypeCheck
from fsfunc.transforms.messages.wire import Gather, Reduction
from fsfunc.transforms.shard_options import ShardOptions
from fsfunc.transforms.sharded_calls import Sharding

_P = ParamSpec("_P")
_R = TypeVar("_R")


@api_boundary
def shard(
    f: Callable[_P, _R],
    mesh: Mesh,
    axis: Axis,
    *,
    zero: Literal[0, 1, 2, 3] = 3,
    replicate: Axis | None = None,
    reshard_after_forward: bool | Mapping[str, bool] = True,
    min_bytes: int | None = None,
    reduce_each: bool = False,
    gather: Gather | None = None,
    reduction: Reduction | None = None,
    equal_batches: Axis | None = None,
) -> Callable[_P, _R]:
    """Splits the parameters of the units of ``f`` over ``axis``, one part per rank.

    Each unit gathers its parameters, runs, and frees them; its backward gathers them
    again, without recomputing, and reduces the gradients. The loss is the mean over
    this rank's rows. ``value_and_grad`` in ``f`` returns the value and the gradients of
    the mean over the ranks, and ``ff.value`` the value alone; what ``f`` computes
    without them is this rank's own, and ``ff.pmean(x, axis)`` its mean. So
    ``shard(ff.value(loss), mesh, axis)`` evaluates a loss, and ``shard(loss, mesh,
    axis)`` returns that of this rank's rows.

    Args:
        f: a unit, a loss, or a train step.
        axis: the mesh axis, or several, over which the data vary.
        zero: 3: parameters, gradients and moments in parts. 2: parameters whole,
            gradients reduced in the backward, unit by unit. 1: the same, reduced when
            the backward ends. 0: everything whole, gradients all-reduced unit by unit.
        replicate: a further axis over which the parts are repeated (HSDP).
        reshard_after_forward: at zero=3, False keeps gathered parameters for the
            backward. Or a mapping of patterns to values, as in ``{"head": False,
            "blocks/[01]/**": False}``, which are matched with the name of a unit call,
            as in ``precision``, and with the paths of the parameters that it gathers.
            The first match counts; the default is True.
        min_bytes: neighbouring units below this size share one buffer, and with it one
            message, until it has as many bytes (DDP's buckets have 25 MB). By default
            at zero=0, of exact reductions, an eighth of the bytes of all trained units,
            at most 1 MiB: so a step of up to eight equal units sends one message for
            each, and one of many small units about eight. Else 0: none are joined.
        reduce_each: with an ``accumulate`` inside, reduces each microbatch's gradients
            over ``axis``, and holds parts of their sum; that is summed over
            ``replicate`` once. By default whole gradients are summed, and reduced once.
        gather, reduction: messages in other encodings, such as
            ``ff.QuantizedGather()``: see ``Gather``, ``Reduction``. Complex leaves are
            sent as they are where these encode.
        equal_batches: those of the axes along which ranks are given equal batches on
            purpose: each cuts them in the step, say, or draws its own data there.

    Warns where all ranks along another axis are given equal batches in the first call
    of a step: they would all train on the same rows, as without ``ff.local_batch``.

    Raises:
        TypeError: another value of ``reshard_after_forward``.
        ValueError: an unknown axis, ``zero`` outside 0..3, an axis taken twice;
            ``reduce_each`` at zero=1, which reduces when the backward ends; a pattern
            that fits no unit call and no parameter (when a state is laid out); a
            ``gather`` or ``reduction`` that is not for these.

    Cost, a rank and step, for P bytes of parameters and a = (n-1)/n: zero=3 gathers
    each unit twice, except for the last one, those whose backward needs no parameter
    and those that are kept, and reduces each once: at most 3aP. zero 1 and 2: one
    gather and one reduction a unit, 2aP. zero=0: one all-reduce a unit, or for several
    small ones (``min_bytes``), 2aP. And one psum of the loss. Over r replicas one
    all-reduce of each part, 2(r-1)/r of its bytes. Reductions overlap with the backward
    of the units that follow; those of a
    stage, in a ``pipeline`` inside, begin when it has sent its last derivative, beside
    what the stages before it compute. Ranks compare what must be equal, batches along
    other
    axes, replicated leaves, optimizers with their numbers and rates, in calls 1,
    2, 4,
    8 and so on of a state that was laid out: gathers of 16 bytes, in no ledger.

    What is checked: the first call of each structure of arguments and each set of True
    and False among them, and with each set of shapes if the step itself combines leaves
    or gradients outside units (``w - rate * g``), is run without data before it, and
    refused where it breaks one of the rules below. A comparison that the step makes of
    a number or a word among its arguments (``if state.step % 10 == 0``) is answered
    both ways there. A branch that first runs in a later call, as an attribute or a
    clock chooses it, is not seen at once: that would cost a Python function for every
    operator of every call. Calls 17, 65, 257 and so on of a state that was laid out are
    checked too, with the branches that run by then, which takes as long as Python in
    about fifteen steps; so are calls 3, 5 and 9 of a step that itself combines numbers
    with leaves or gradients (``w - rate * g``), which ranks compare; and a branch shows
    where it makes replicated leaves differ. Give the step what chooses it as an
    argument.

    The rules, which refusals name, each with what breaks it and a way out. Between the
    units of a step ``w`` is a tree of leaves that units take, of which a rank has a
    part; ``s`` is a replicated number, ``x`` this rank's rows, ``each`` is
    ``ff.tree.map``, ``loss(w, x)`` and ``unit(w["a"], x)`` are made of units, and
    ``grads`` are gradients of the loss, one of each row. In units there are whole
    tensors, and none of this holds.

    {rules}

    Source: ZeRO (Rajbhandari et al., 2020), sections 5 and 7; FairScale's FSDP.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> unit = ff.unit(lambda p, x: x @ p["w"])
    >>> def main():
    ...     f = ff.shard(lambda p, x: unit(p, x).sum(), mesh, "data")
    ...     params = ff.place(f, {"w": torch.ones(3, 1)}, torch.ones(2, 3))
    ...     return params["w"].local.tolist(), f(params, torch.ones(2, 3)).item()
    >>> ff.spmd(main, mesh)()
    [([1.0, 1.0], 6.0), ([1.0], 6.0)]
    """
    options = ShardOptions.of(
        mesh,
        axis,
        replicate,
        zero=zero,
        reshard_after_forward=reshard_after_forward,
        min_bytes=min_bytes,
        reduce_each=reduce_each,
        gather=Gather() if gather is None else gather,
        reduction=Reduction() if reduction is None else reduction,
        equal_batches=() if equal_batches is None else mesh.check(equal_batches),
    )
    if other := {*options.equal_batches} - {*options.axes}:
        raise ValueError(
            f"equal_batches={equal_batches!r}: {sorted(other)} is none of the axes "
            f"over which this shard takes a mean, {options.axes}"
        )
    return transformed(f, Sharding(options, TypeCheck(options.equal_batches)))


# Not written twice: a rule's words are where it is made.
shard.__doc__ = (shard.__doc__ or "").replace(
    "{rules}", describe_rules().replace("\n", "\n    ")
)
