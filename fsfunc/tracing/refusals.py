"""Refusals of values and derivatives under ``shard``, and the way out of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch.fake_results import communicates
from fsfunc.comm.attribution import source_line, traceback_line
from fsfunc.comm.typed_maps import LawError
from fsfunc.sharded.leaf import NotATensor, is_sharded
from fsfunc.tracing.knowledge import Seen
from fsfunc.tracing.provenance import Gradient, Rows
from fsfunc.tracing.types import PARTS, Kind


class RowsApart(LawError):
    """Gradients that were taken row by row are means over the ranks by now."""


def apart(op: str, one: Gradient, other: Gradient, rows: Rows) -> RowsApart:
    """The error for combining two changed gradients that are of different rows."""
    where = [x.where for x in (one, other) if x.where]
    changed = f", each changed by what is not linear: {', '.join(where)}"
    return RowsApart(
        f"{op} at {source_line()} puts together gradients by one value of the "
        f"parameters that were taken of other rows of {rows.name}"
        f"{changed if where else ''}. Under shard each is the mean over the ranks by "
        "then, of a row of every rank, where on one device it is of "
        "one row alone (per-sample clipping, a step of a task's own). Take them where "
        "derivatives are this rank's own, and take the mean of what comes out: "
        "ff.reduce_like(ff.unit(fn, whole=True)(params, rows), params). Sums of "
        "gradients, changed afterwards, are fine; what belongs together on all ranks "
        "(the rows of one task) comes as a tensor of its own"
    )


def refusal(
    why: str,
    op: str,
    given: Sequence[Seen],
    forward: tuple[str, str] | None,
    error: Exception | None = None,
) -> LawError:
    """The error for one case.

    Args:
        op: the operator or collective.
        given: what it was given.
        forward: for the derivative of an operator, its name and line.
        error: what torch raised.
    """
    part = next((x for x in given if x.kind in PARTS or x.flat), None)
    other = next((x for x in given if x.kind not in PARTS), None)
    own = next((x for x in given if x.kind is Kind.V), None)
    where = forward[1] if forward else source_line()
    at = f"{op} at {where}" if op else f"the derivative at {where}"
    at = f"{forward[0]}'s derivative, of {where}" if forward else at
    text = _TEXTS[why].format(
        at=at,
        op=op,
        line=source_line(),
        part=part,
        other=other,
        own=own,
        first=given[0] if given else None,
        second=given[-1] if given else None,
        error=repr(error),
    )
    return LawError(text)


@contextmanager
def scripts_told() -> Iterator[None]:
    """Inside, what torch.jit.script made is told what it may be given, and where.

    Raises:
        NotATensor: in place of torch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if "instead found type 'Recorded'" not in str(error):
            raise
        raise NotATensor(
            f"at {traceback_line(error)} a function of torch.jit.script, which takes "
            "nothing but tensors, is given a leaf of the step's first argument outside "
            "units: call it in an @ff.unit, or for each leaf by ff.tree.map(fn, ...)"
        ) from error


@contextmanager
def communication_told() -> Iterator[None]:
    """Inside, torch.distributed without its processes is told what to call instead.

    Raises:
        Communicates: in place of torch's own error.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if "Default process group has not been initialized" not in str(error):
            raise
        raise communicates(f"at {traceback_line(error)}") from error


MAPPED = (
    "outside units a leaf of the step's first argument is this rank's part of it, a "
    "row of elements, which vmap does not map as it maps the whole: map in a unit that "
    "has it whole, ff.unit(lambda params, x: vmap(fn, (0, None))(params, x), "
    "whole=True)"
)


UNCHECKED = (
    "a step, run without data to check it once more (as before calls 17, 65, 257, ...; "
    "see help(ff.shard)), raised {}. Its calls may not raise that, and this one runs "
    "unchecked: what the step does now that it did not do before is not known to be "
    "right. Let it run where ff.recording() is True, as it did before its first call"
)


def refuse_cut(reader: str, leaves: Iterable[tuple[str | None, Any]]) -> None:
    """Raises where autograd does not see who reads a differentiated leaf.

    A placed leaf is no tensor: ``Function.apply`` takes it for a constant.

    Args:
        leaves: the name of each, and this rank's part of it.

    Raises:
        LawError: an ``autograd.Function`` around the reader, or torch's checkpoint,
            would lose the gradient.
    """
    if not (around := _torch.hides_tensors()):
        return
    unwrapped = _torch.reverse_mode_around()  # what is differentiated is hidden then
    for name, x in leaves:
        if name is not None and isinstance(x, Tensor):
            if x.requires_grad or _torch.is_wrapped(x) or unwrapped:
                leaf = repr(name) if name else "of the first argument"
                raise LawError(_CUT.format(reader, leaf, source_line(), around))


def refuse_hidden(recorder: Any, given: Any, returned: Sequence[Any]) -> None:
    """Raises where a unit's leaves were written by ``.data`` and returned as they came.

    Args:
        recorder: of the step; ``given``: its arguments; ``returned``: its leaves.

    Raises:
        NotATensor: at zero=1 and 2 units would read what was gathered before.
    """
    if not recorder.hidden:
        return
    written = {p for t in recorder.taken for p in t.leaves} & recorder.hidden
    came = set(map(id, tree.leaves(given, is_leaf=is_sharded)))
    for x in returned:
        if is_sharded(x) and x.name in written and id(x) in came:
            raise NotATensor(
                f"the step writes into {x.name!r} by .data, which no version counter "
                "shows, and returns the leaf as it came: what ranks have gathered of "
                "it would be read on. Write into the part under torch.no_grad(), or "
                "return the tree that ff.tree.map makes"
            )


def refuse_reshaped(returned: Sequence[Any]) -> None:
    """Raises where a leaf of the state is returned in another shape than it came.

    Of this rank's part, a row of elements, that does not show: it would be taken for
    the part of a leaf of the old shape.
    """
    for x in returned:
        if not (is_sharded(x) and isinstance(x.local, Tensor)):
            continue
        shape, came = tuple(x.local.shape), tuple(x.layout.shape)
        if shape != came and x.local.numel() == math.prod(came):
            raise LawError(
                f"the step returns {x.name!r}, which is {list(came)}, as "
                f"{list(shape)}: a sharded leaf keeps its shape. Reshape it where it "
                "is read, in a unit; or before the state is made; or return "
                "ff.unshard(tree), reshaped, beside the state"
            )


_CUT = (
    "{} reads the placed leaf {}, at {}, within {}: autograd does not see the leaf "
    "there, and its gradient would be lost. Call the Function in a unit, whose "
    "parameters are tensors; in place of torch.utils.checkpoint use ff.remat(step)"
)

_TEXTS = {
    "random": (
        "{at} draws on this rank's part of {part}: every rank would draw the same for "
        "another part. Use ff.randn_like(tree), which draws the whole leaf's numbers"
    ),
    "own": (
        "{at} puts together this rank's part of {part} and {own}, which differs from "
        "rank to rank: the parts would be of no one tensor. Take ff.pmean of it first, "
        "and ff.tree_scale(tree, factor) where it is a factor; or work on whole "
        "tensors, in a unit or by ff.unshard and ff.lay_like or ff.reduce_like"
    ),
    "positions": (
        "{at} puts together this rank's part of {part} and a tensor that is no single "
        "number ({other}): the part is a range of the leaf's elements, 1-D, and not "
        "the same on every rank. Use ff.unshard(tree) and ff.lay_like(result, tree), "
        "or zeros_like and the like of the part"
    ),
    "sums": (
        "{at} sums over this rank's part of {part} alone: use ff.tree_sum(tree), or "
        "ff.global_norm(tree), which sum over all of it"
    ),
    "mixes": (
        "{at} mixes the elements of this rank's part of {part}, which is a range of "
        "the leaf's, 1-D: use ff.unshard(tree) for whole tensors and ff.lay_like("
        "result, tree) for the way back; ff.tree_sum and ff.global_norm for sums. What "
        "has a derivative for each element (jacrev, hessian) is taken in a unit that "
        "has the leaf whole: ff.unit(fn, whole=True)"
    ),
    "dims": (
        "{at} is given this rank's part of {part}, a range of the leaf's elements, "
        "which is 1-D whatever dims the leaf has, and raises {error}. Use "
        "ff.unshard(tree) for whole tensors and ff.lay_like(result, tree) for the way "
        "back, or do it in a unit, whose parameters are whole"
    ),
    "pairs": (
        "{at} reads the dims of torch.view_as_real of this rank's part of {part}, or "
        "works along them: the part is a range of the leaf's elements, 1-D. w.real and "
        "w.imag are parts as w is; torch.view_as_real(w) of the whole leaf is taken in "
        "a unit, whose parameters are gathered, or of ff.unshard(tree)"
    ),
    "shape": (
        "{op} at {line} reads this rank's part of {first}, which is a row of its "
        "elements: read the shape of the leaf, by tree.map(fn, t, "
        "is_leaf=ff.is_sharded), or before the step; zeros_like and the like make "
        "tensors of the same layout"
    ),
    "term": (
        "a sum over this rank's part alone, in {at}, is taken for the whole: a number "
        "that multiplies parts of {part} is differentiated. Multiply by "
        "ff.tree_scale(tree, factor)"
    ),
    "input": (
        "unit {op!r} is given this rank's part of {part} as an input: give the leaf in "
        "its parameters, where it is whole, or ff.unshard(tree)"
    ),
    "disagrees": (
        "{op} at {line} takes {first}, which differs from rank to rank, for the same "
        "on all of them: take ff.pmean of it, or ff.reduce_like of whole gradients; "
        "what is a rank's own goes into a unit as an input"
    ),
    "parameters": (
        "unit {op!r} at {line} is given as its parameters {first}, which differs from "
        "rank to rank: parameters are one value on all ranks, whose gradient is a "
        "mean. What is a rank's own goes into a unit as an input, unit(params, x, "
        "weights); or one unit makes the weights and uses them (a hypernetwork: "
        "ff.unit(lambda h, z, x: net(make(h, z), x))); or take ff.pmean of it"
    ),
    "lost": (
        "{op} at {line} is given this rank's part of {first} as a plain tensor: its "
        "layout was lost, as tree.leaves and a list of its results lose it, and the "
        "sum would be over this part alone. Give trees of leaves: "
        "ff.tree_sum(tree.map(fn, t)), or tree.leaves(t, is_leaf=ff.is_sharded)"
    ),
    "parts": (
        "{op} is given this rank's part of {first}: use ff.tree_sum or ff.global_norm "
        "for sums, ff.unshard(tree) for whole tensors"
    ),
    "one value": (
        'the gradient of one value, made by to="I", differs from rank to rank: combine '
        'it with the ranks\' own values by ff.pcast(x, axis, to="V"), or leave out to='
    ),
    "unanswered": (
        "the backward of {op}, an autograd.Function around a collective, sends "
        "nothing: the gradients of the other ranks' losses are lost. Return what the "
        "collective's own transpose gives: the psum of the cotangents for a psum, "
        "their pmean for a pmean, their psum_scatter for an all_gather"
    ),
    "rows": (
        "a derivative along each element of a sharded leaf (jacfwd, hessian) at {at}: "
        "row k would be element k of every rank's part. Take it inside a unit that has "
        "the leaf whole: ff.unit(fn, whole=True)"
    ),
    "no term": "{op}: expected a sum over parts, found {first}",
    "no part": "{op}: expected this rank's part of a leaf, found {first}",
    "own gradient": (
        "the gradient by {first} would be this rank's own: {second} reached it outside "
        "every unit. Use the leaf in a unit, or ff.unshard(tree)"
    ),
    "unaveraged": (
        "the gradient by {first}, one value on all ranks, is this rank's own: it is "
        "read outside every unit, where no mean over the ranks is taken. An "
        "ff.value_and_grad of the step itself takes it, of what is made of parameters "
        'after ff.assume(x, axis, "I"), which declares that it is one value; else read '
        'it in a unit, or let it enter by ff.pcast(x, axis, to="V")'
    ),
    "made of one": (
        "{first} is made of parameters, and differentiated where no mean over the "
        "ranks is taken: its gradient, {second}, would be this rank's own. Declare "
        'that it is one value, by ff.assume(x, axis, "I") or in a unit; or that it is '
        'the rank\'s own, by ff.pcast(x, axis, to="V")'
    ),
    "whose": (
        "a tensor made in the step ({first}) is differentiated, and its gradient "
        "differs from rank to rank: declare its type. If it is each rank's own, make "
        'it from the rank\'s data (zeros_like(x)) or ff.pcast(x, axis, to="V"); if it '
        "is a parameter, pass it in the first argument"
    ),
    "written": (
        "the step writes a value that differs from rank to rank ({first}) into a leaf "
        "of its state that is one value on all ranks: return it, in the place of a "
        'leaf that was laid out by layouts={{path: ff.Own("data")}}'
    ),
    "bare": (
        "the step returns this rank's part of {first} as a plain tensor: its layout "
        "was lost, as tree.leaves and a list of its results lose it. Return trees of "
        "leaves, tree.map(fn, t), or ff.unshard(t)"
    ),
    "returned": (
        "the step returns, in the place of {first}, a value that differs from rank to "
        "rank ({second}): the ranks' parameters would part. Take ff.pmean of it, or "
        "use ff.value_and_grad for the gradient"
    ),
}
