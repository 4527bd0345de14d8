"""The rules that the first call of a sharded step is held to, and their error messages.

Each `Rule` of `RULES` has a name, one sentence, a program that breaks it, one that is
right, and the message of each of its cases. ``help(ff.shard)`` lists the rules.

To add a rule, add an entry to `RULES`, and raise `rule_error` (or `operand_error`,
which fills in the operator and its operands) with the name of one of its cases where
the rule is found broken: in `checker` and `typed_operators`, mostly. ``tests/tracing/
test_rules.py`` runs both examples of each rule: the first must be refused under the
rule's name, the second must run and give what one device gives.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsfunc.comm.attribution import source_line
from fsfunc.comm.typed_maps import LawError
from fsfunc.sharded.leaf import NotATensor
from fsfunc.tracing.knowledge import TensorFacts
from fsfunc.tracing.types import PARTS, Kind


class RowsApart(LawError):
    """Gradients of single rows are combined, and are means over the ranks already."""


class Unsteady(RuntimeError):
    """A step does not do the same each time that it is run."""


@dataclass(frozen=True)
class Rule:
    """A rule that the first call of a step holds it to.

    Args:
        name: a word or two, which ends each of its error messages.
        sentence: the rule, in one sentence.
        refused_example: a program that breaks it.
        accepted_example: the same, as it should be written.
        texts: its error messages by case, as formats.
        error: the class of its errors, unless the caller gives another.
    """

    name: str
    sentence: str
    refused_example: str
    accepted_example: str
    texts: Mapping[str, str]
    error: type[Exception] = LawError


RULES: tuple[Rule, ...] = (
    # Parts of leaves, between units
    Rule(
        "own value",
        "What differs from rank to rank is not put together with parts of leaves.",
        "each(lambda a: a * x.mean(), w)",
        'ff.tree_scale(w, ff.pmean(x.mean(), "data"))',
        {
            "own": (
                "{call} puts together this rank's part of {part} and {varying}, which "
                "differs from rank to rank: the parts would be of no one tensor. Take "
                "ff.pmean of it first, and ff.tree_scale(tree, factor) where it is a "
                "factor; or work on whole tensors, in a unit or by ff.unshard and "
                "ff.lay_like or ff.reduce_like"
            )
        },
    ),
    Rule(
        "noise",
        "Noise on parts is drawn for the whole leaf.",
        "each(lambda a: a + torch.randn_like(a), w)",
        "each(torch.add, w, ff.randn_like(w))",
        {
            "random": (
                "{call} draws on this rank's part of {part}: every rank would draw the "
                "same for another part. Use ff.randn_like(tree), which draws the whole "
                "leaf's numbers"
            )
        },
    ),
    Rule(
        "positions",
        "A part meets other parts and single numbers, not tensors of other places.",
        "each(lambda a: a + torch.arange(8.0), w)",
        "ff.lay_like(each(lambda a: a + torch.eye(4), ff.unshard(w)), w)",
        {
            "positions": (
                "{call} puts together this rank's part of {part} and a tensor that is "
                "no single number ({other}): the part is a range of the leaf's "
                "elements, 1-D, and not the same on every rank. Use ff.unshard(tree) "
                "and ff.lay_like(result, tree), or zeros_like and the like of the part"
            )
        },
    ),
    Rule(
        "sums",
        "A sum over leaves is a sum over all ranks' parts.",
        "sum((a * a).sum() for a in ff.tree.leaves(w))",
        "ff.tree_sum(each(torch.square, w))",
        {
            "sums": (
                "{call} sums over this rank's part of {part} alone: use "
                "ff.tree_sum(tree), or ff.global_norm(tree), which sum over all of it"
            ),
            "parts": (
                "{op} is given this rank's part of {first}: use ff.tree_sum or "
                "ff.global_norm for sums, ff.unshard(tree) for whole tensors"
            ),
            "lost": (
                "{op} at {line} is given this rank's part of {first} as a plain "
                "tensor: its layout was lost, as tree.leaves and a list of its results "
                "lose it, and the sum would be over this part alone. Give trees of "
                "leaves: ff.tree_sum(tree.map(fn, t)), or tree.leaves(t, "
                "is_leaf=ff.is_sharded)"
            ),
            "no part": "{op}: expected this rank's part of a leaf, found {first}",
        },
    ),
    Rule(
        "elements",
        "What moves elements, or works along dims, is given whole tensors.",
        "each(lambda a: a.sort()[0], w)",
        "ff.lay_like(each(lambda a: a.sort()[0], ff.unshard(w)), w)",
        {
            "mixes": (
                "{call} mixes the elements of this rank's part of {part}, which is a "
                "range of the leaf's, 1-D: use ff.unshard(tree) for whole tensors and "
                "ff.lay_like(result, tree) for the way back; ff.tree_sum and "
                "ff.global_norm for sums. What has a derivative for each element "
                "(jacrev, hessian) is taken in a unit that has the leaf whole: "
                "ff.unit(fn, whole=True)"
            ),
            "dims": (
                "{call} is given this rank's part of {part}, a range of the leaf's "
                "elements, which is 1-D whatever dims the leaf has, and raises "
                "{raised}. Use ff.unshard(tree) for whole tensors and "
                "ff.lay_like(result, tree) for the way back, or do it in a unit, whose "
                "parameters are whole"
            ),
            "pairs": (
                "{call} reads the dims of torch.view_as_real of this rank's part of "
                "{part}, or works along them: the part is a range of the leaf's "
                "elements, 1-D. w.real and w.imag are parts as w is; "
                "torch.view_as_real(w) of the whole leaf is taken in a unit, whose "
                "parameters are gathered, or of ff.unshard(tree)"
            ),
        },
    ),
    Rule(
        "shape",
        "Shapes are read of leaves, not of parts.",
        "each(lambda a: a / a.numel(), w)",
        "each(lambda a: a.numel(), w, is_leaf=ff.is_sharded)",
        {
            "shape": (
                "{op} at {line} reads this rank's part of {first}, which is a row of "
                "its elements: read the shape of the leaf, by tree.map(fn, t, "
                "is_leaf=ff.is_sharded), or before the step; zeros_like and the like "
                "make tensors of the same layout"
            )
        },
    ),
    Rule(
        "factor",
        "A number that multiplies parts, and has a derivative, is spread over them.",
        "grad(lambda w: loss(each(lambda a: a * ff.global_norm(w), w), x))(w)",
        "grad(lambda w: loss(ff.tree_scale(w, ff.global_norm(w)), x))(w)",
        {
            "term": (
                "a sum over this rank's part alone, in {call}, is taken for the whole: "
                "a number that multiplies parts of {part} is differentiated. Multiply "
                "by ff.tree_scale(tree, factor)"
            ),
            "no term": "{op}: expected a sum over parts, found {first}",
        },
    ),
    Rule(
        "each element",
        "Derivatives by each element, and vmap over leaves, are of whole leaves.",
        "jacfwd(ff.tree_sum)(w)",
        'ff.unit(jacfwd(torch.sum), whole=True)(w["a"])',
        {
            "rows": (
                "a derivative along each element of a sharded leaf (jacfwd, hessian) "
                "at {call}: row k would be element k of every rank's part. Take it "
                "inside a unit that has the leaf whole: ff.unit(fn, whole=True)"
            ),
            "mapped": (
                "{raised}: outside units a leaf of the step's first argument is this "
                "rank's part of it, a row of elements, which vmap does not map as it "
                "maps the whole: map in a unit that has it whole, ff.unit(lambda "
                "params, x: vmap(fn, (0, None))(params, x), whole=True)"
            ),
        },
    ),
    # Units, and what is one value on all ranks
    Rule(
        "units",
        "A unit is given leaves as its parameters.",
        'unit(w["a"], ff.tree.leaves(w["b"])[0])',
        'unit(w["a"], ff.unshard(w)["b"])',
        {
            "input": (
                "unit {op!r} is given this rank's part of {part} as an input: give the "
                "leaf in its parameters, where it is whole, or ff.unshard(tree)"
            )
        },
    ),
    Rule(
        "one value",
        "What is laid out, or is a unit's parameter, is one value on all ranks.",
        "ff.lay_like(each(lambda a: a * x.mean(), ff.unshard(w)), w)",
        "ff.reduce_like(each(lambda a: a * x.mean(), ff.unshard(w)), w)",
        {
            "disagrees": (
                "{op} at {line} takes {first}, which differs from rank to rank, for "
                "the same on all of them: take ff.pmean of it, or ff.reduce_like of "
                "whole gradients; what is a rank's own goes into a unit as an input"
            ),
            "parameters": (
                "unit {op!r} at {line} is given as its parameters {first}, which "
                "differs from rank to rank: parameters are one value on all ranks, "
                "whose gradient is a mean. What is a rank's own goes into a unit as an "
                "input, unit(params, x, weights); or one unit makes the weights and "
                "uses them (a hypernetwork: ff.unit(lambda h, z, x: net(make(h, z), "
                "x))); or take ff.pmean of it"
            ),
        },
    ),
    Rule(
        "unlike ranks",
        "Ranks make what is one value by the same operators, of the same numbers.",
        'each(lambda a: a * 2, w) if ff.axis_index("data") else w',
        "each(lambda a: a * 2, w)",
        {
            "one more": (
                "only rank {rank} computes {op} at {line}, of what should be one value "
                "on all ranks. What depends on the rank may only go into own values: "
                "data, or a unit's inputs"
            ),
            "unlike": (
                "ranks {rank} and {other} compute what should be one value in other "
                "ways: {op} at {line}, and {second}. What depends on the rank may only "
                "go into own values: data, or a unit's inputs"
            ),
            "numbers": (
                "{op} is not the same on every rank, and what it is applied to is one "
                "value: at {line} it is {text} here"
            ),
            "beside": (
                "what a loss returns beside its value to be combined over the ranks "
                "has other names, or is combined in another way, on other ranks: at "
                "{line} it is {text} here. Of averages, ff.Summed and ff.Max each rank "
                "must return the same; what is a rank's own, as rows are, may differ"
            ),
        },
    ),
    Rule(
        "split work",
        "Along an axis without a mean, a value is one until ff.pcast says otherwise.",
        'ff.value_and_grad(lambda w: ff.psum(loss(w, x), "model"))(w)',
        "ff.value_and_grad(lambda w: loss(w, x))(w)",
        {
            "enters": (
                "{op} at {line} takes each rank's own along {axis!r}, and is given one "
                "value, the same on all of its ranks, as no shard averages over "
                "{axis!r}: its gradient would be that of this rank's share alone. "
                "Leave {op} out where one value is meant; or, of it or of what is each "
                'rank\'s own already, take ff.pcast(x, {axis!r}, to="V"), whose '
                "gradient is the sum over the ranks"
            ),
            "counted": (
                "{op} takes each rank's own along {axis!r}, and is given one value, "
                "the same on all of its ranks, as no shard averages over {axis!r}: it "
                "would be counted as often as there are ranks, its derivatives too. "
                "Give each rank its share, mine = ff.pcast(x, {axis!r}, "
                'to="V").chunk(n, dim)[ff.axis_index({axis!r})], and ff.all_gather(y, '
                '{axis!r}, dim=dim, to="I") of what comes out; or leave the axis out, '
                "or average over it, ff.shard(step, mesh, (..., {axis!r})). Of what is "
                'each rank\'s own already ff.pcast(x, {axis!r}, to="V") says so'
            ),
            "loss": (
                "the loss of the gradient call at {line} is each rank's own along "
                "{axis!r}, which no shard averages over: there it is one value. Take "
                "ff.psum of it over {axis!r} where the ranks have parts of a sum, or "
                "ff.pmean; or average over it, ff.shard(step, mesh, (..., {axis!r}))"
            ),
        },
    ),
    # Gradients
    Rule(
        "gradients",
        "A gradient by one value is the ranks' mean; by a rank's own, its own.",
        "grad(lambda s: (s * x).mean())(s)",
        "ff.value_and_grad(lambda s: (s * x).mean())(s)[1]",
        {
            "own gradient": (
                "the gradient by {first} would be this rank's own: {second} reached it "
                "outside every unit. Use the leaf in a unit, or ff.unshard(tree)"
            ),
            "unaveraged": (
                "the gradient by {first}, one value on all ranks, is this rank's own: "
                "it is read outside every unit, where no mean over the ranks is taken. "
                "An ff.value_and_grad of the step itself takes it, of what is made of "
                'parameters after ff.assume(x, axis, "I"), which declares that it is '
                "one value; else read it in a unit, or let it enter by ff.pcast(x, "
                'axis, to="V")'
            ),
            "made of one": (
                "{first} is made of parameters, and differentiated where no mean over "
                "the ranks is taken: its gradient, {second}, would be this rank's own. "
                'Declare that it is one value, by ff.assume(x, axis, "I") or in a '
                "unit; or that it is the rank's own, by ff.pcast(x, axis, "
                'to="V")'
            ),
            "whose": (
                "a tensor made in the step ({first}) is differentiated, and its "
                "gradient differs from rank to rank: declare its type. If it is each "
                "rank's own, make it from the rank's data (zeros_like(x)) or "
                'ff.pcast(x, axis, to="V"); if it is a parameter, pass it in the first '
                "argument"
            ),
            "one value": (
                'the gradient of one value, made by to="I", differs from rank to rank: '
                "combine it with the ranks' own values by ff.pcast(x, axis, "
                'to="V"), or leave out to='
            ),
        },
    ),
    Rule(
        "rows",
        "Means of gradients of other rows are added before all that is not linear.",
        "sum(map(ff.global_norm, grads))",
        "ff.global_norm(each(lambda *g: sum(g), *grads))",
        {
            "apart": (
                "{op} at {line} puts together gradients by one value of the parameters "
                "that were taken of other rows of {rows}{changed}. Under shard each is "
                "the mean over the ranks by then, of a row of every rank, where on one "
                "device it is of one row alone (per-sample clipping, a step of a "
                "task's own). Take them where derivatives are this rank's own, and "
                "take the mean of what comes out: ff.reduce_like(ff.unit(fn, "
                "whole=True)(params, rows), params). Sums of gradients, changed "
                "afterwards, are fine; what belongs together on all ranks (the rows of "
                "one task) comes as a tensor of its own"
            )
        },
        RowsApart,
    ),
    Rule(
        "functions",
        "An autograd.Function is given whole tensors, and sends back what it took.",
        "ff.value_and_grad(lambda w: checkpoint(loss, w, x))(w)",
        "ff.value_and_grad(lambda w: loss(w, x))(w)  # in ff.remat(step)",
        {
            "cut": (
                "{reader} reads the placed leaf {leaf}, at {line}, within {around}: "
                "autograd does not see the leaf there, and its gradient would be lost. "
                "Call the Function in a unit, whose parameters are tensors; in place "
                "of torch.utils.checkpoint use ff.remat(step)"
            ),
            "unanswered": (
                "the backward of {op}, an autograd.Function around a collective, sends "
                "nothing: the gradients of the other ranks' losses are lost. Return "
                "what the collective's own transpose gives: the psum of the cotangents "
                "for a psum, their pmean for a pmean, their psum_scatter for an "
                "all_gather"
            ),
        },
    ),
    Rule(
        "graph",
        "Derivatives are of what requires grad: leaves of a state do not.",
        "torch.autograd.grad(loss(w, x), ff.tree.leaves(w))",
        "ff.value_and_grad(loss)(w, x)[1]",
        {
            "no graph": (
                "{op} at {line} asks for the derivative of what does not depend on "
                "anything that requires grad: the leaves of a state do not, and no "
                ".grad is read. ff.value_and_grad(loss_fn)(params, batch) returns the "
                "loss and its gradients; within a loss, x.requires_grad_() first"
            )
        },
        RuntimeError,
    ),
    # The state that a step returns
    Rule(
        "state",
        "What is returned in the place of one value, or written into it, is one value.",
        "s.mul_(x.mean())",
        's.mul_(ff.pmean(x.mean(), "data"))',
        {
            "returned": (
                "the step returns, in the place of {first}, a value that differs from "
                "rank to rank ({second}): the ranks' parameters would part. Take "
                "ff.pmean of it, or use ff.value_and_grad for the gradient"
            ),
            "written": (
                "the step writes a value that differs from rank to rank ({first}) into "
                "a leaf of its state that is one value on all ranks: return it, in the "
                "place of a leaf that was laid out by layouts={{path: "
                'ff.Own("data")}}'
            ),
        },
    ),
    Rule(
        "layouts",
        "Leaves are returned as leaves, of the shapes in which they came.",
        "ff.tree.leaves(each(lambda a: 2 * a, w))",
        "each(lambda a: 2 * a, w)",
        {
            "bare": (
                "the step returns this rank's part of {first} as a plain tensor: its "
                "layout was lost, as tree.leaves and a list of its results lose it. "
                "Return trees of leaves, tree.map(fn, t), or ff.unshard(t)"
            ),
            "reshaped": (
                "the step returns {leaf!r}, which is {came}, as {shape}: a sharded "
                "leaf keeps its shape. Reshape it where it is read, in a unit; or "
                "before the state is made; or return ff.unshard(tree), reshaped, "
                "beside the state"
            ),
            "hidden": (
                "the step writes into {leaf!r} by .data, which no version counter "
                "shows, and returns the leaf as it came: what ranks have gathered of "
                "it would be read on. Write into the part under torch.no_grad(), or "
                "return the tree that ff.tree.map makes"
            ),
        },
    ),
    # Runs without data
    Rule(
        "again",
        "A step does the same each time it is run, and keeps nothing of a run.",
        "each(lambda a: a * next(count), w)",
        "each(lambda a: a * (1 if ff.recording() else next(count)), w)",
        {
            "count": (
                "{op} at {line} is given {first} when the step is run once, and "
                "{second} when it is run again: Python state that the step changes may "
                "be why (a counter, an attribute). It is run on tensors without data "
                "before its first call, to be recorded and checked, and would be ahead "
                "by as many runs. Keep what lasts from step to step in the state "
                "(state.step counts), or change it only where ff.recording() is False"
            ),
            "kept": (
                "the step returns a tensor without data at {path!r}: it has kept one "
                "in Python's own state (a list, an attribute) as it was recorded, "
                "which runs it on such tensors. Keep what lasts from step to step in "
                "the state, or keep it only where ff.recording() is False"
            ),
        },
        Unsteady,
    ),
    Rule(
        "without data",
        "A step is run on tensors without data: what it does needs none outside units.",
        "x.clone().apply_(abs)",
        "x.abs()",
        {
            "python": (
                "{op} at {line} calls a function of Python with each element, and a "
                "step is recorded on tensors that have none: use torch's operators, or "
                "call it in a unit"
            )
        },
        RuntimeError,
    ),
    Rule(
        "scripts",
        "What torch.jit.script made is given tensors, which in a unit leaves are.",
        "each(scripted, w, is_leaf=ff.is_sharded)",
        "each(scripted, w)",
        {
            "scripts": (
                "at {line} a function of torch.jit.script, which takes nothing but "
                "tensors, is given a leaf of the step's first argument outside units: "
                "call it in an @ff.unit, or for each leaf by ff.tree.map(fn, ...)"
            )
        },
        NotATensor,
    ),
)

_RULES: dict[str, Rule] = {case: rule for rule in RULES for case in rule.texts}


def rule_error(
    case: str, error: type[Exception] | None = None, **words: Any
) -> Exception:
    """Returns the error for a case of a rule; its message ends with the rule's name.

    Args:
        case: a key of the rule's ``texts``.
        error: the class of the error, if not the rule's.
        words: the fields of the text.
    """
    rule = _RULES[case]
    text = rule.texts[case].format(**words)
    return (error or rule.error)(f"{text} (rule {rule.name!r} of help(ff.shard))")


def operand_error(
    case: str,
    op: str,
    facts: Sequence[TensorFacts],
    forward: tuple[str, str] | None = None,
    error: Exception | None = None,
) -> Exception:
    """Returns the error for an operator, or a collective, and the operands it refuses.

    The fields of the text are found among the facts about the operands: the first part
    of a leaf, the first that is none, the first that varies from rank to rank.

    Args:
        case: a key of a rule's ``texts``.
        op: the operator's name; "" for a gradient that is taken by torch itself.
        facts: the facts about the operands.
        forward: in a backward pass, the name and line of the forward operator.
        error: what torch raised, if it did.
    """
    line = source_line()
    # A user cannot find a backward operator: the line is that of its forward.
    where = forward[1] if forward else line
    call = f"{op} at {where}" if op else f"the derivative at {where}"
    return rule_error(
        case,
        call=f"{forward[0]}'s derivative, of {where}" if forward else call,
        op=op,
        line=line,
        part=next((x for x in facts if x.kind in PARTS or x.flat), None),
        other=next((x for x in facts if x.kind not in PARTS), None),
        varying=next((x for x in facts if x.kind is Kind.V), None),
        first=facts[0] if facts else None,
        second=facts[-1] if facts else None,
        raised=repr(error),
    )


def describe_rules() -> str:
    """Returns the rules and their examples as ``help(ff.shard)`` shows them."""
    lines: list[str] = []
    for rule in RULES:
        headline = f"- {rule.name}: {rule.sentence}"
        lines += textwrap.wrap(headline, 80, subsequent_indent="  ")
        lines += [f"    refused: {rule.refused_example}"]
        lines += [f"    instead: {rule.accepted_example}"]
    return "\n".join(lines)
