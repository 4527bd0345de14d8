"""``elementwise``: a learned rule of one element, mapped over the parts of leaves.

A rank holds parts of leaves, in flat buffers with padding and at any cut. A function of
one element, mapped by ``torch.func.vmap`` over whatever elements a rank holds, cannot
see where an element lies: it is the same on any mesh. What the rule learns, ``meta``,
is one value on all ranks that becomes a factor of parts, as in ``tree_scale``; so its
gradient is the sum over all elements of all ranks.

Before a rule first runs on a kind of leaves, it runs once on a single element, where
each of its operators is looked at: `_SingleElement` says what is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal, source_line
from fsfunc.comm.collective_ops import Watcher, claim_equal, watching
from fsfunc.comm.descriptions import describe_value
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.core.frames import recording
from fsfunc.optim.leaves import (
    Tree,
    describe_leaf,
    first_mismatch,
    flatten_like,
    local_tensor,
    trainable,
)
from fsfunc.optim.reductions import spread_into_parts
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.operators import (
    COPIES,
    OperatorMode,
    class_of_call,
    comparable,
    flatten_lists,
    is_random,
)
from fsfunc.tree.types import Leaf, PyTree

Rule = Callable[..., PyTree]  # (meta, *elements) -> a tree of 0-dim tensors


def elementwise(rule: Rule) -> Callable[..., PyTree]:
    """Returns ``rule``, a function of one element, as one of sharded trees.

    For learned optimizers: ``ff.elementwise(rule)(meta, grads, params)`` is, at each
    element of each leaf, ``rule(meta, g, w)``. It may be differentiated to any order,
    by ``meta`` and by the trees, mapped by ``torch.func.vmap`` over many ``meta``, and
    used in each of several steps. (Not both at once: a gradient by parameters that
    ``vmap`` has made several of is refused, as any per-sample one; loop over ``meta``.)

    Args:
        rule: ``rule(meta, *elements)`` returns a 0-dim tensor, or a tree of them, as
            ``(update, moment)``. The elements are 0-dim tensors, one of each tree. It
            reads no other tensor: what it learns or is told is in ``meta``.

    Returns:
        a function ``(meta, *trees)``:

        - ``meta``: any tree, with whole tensors that are the same on every rank (under
          stock ``torch.func`` they enter by ``ff.pcast(meta, axis, to="V")``, as any
          parameter that no unit reads);
        - ``trees``: one or more, of one structure, shapes and layouts. At a leaf one
          may have None, where nothing is computed, or a number (0-dim, such as
          ``ff.leaf_norms`` has), the same on every rank, for all of its elements.

        It returns a tree as the rule does, and in place of each 0-dim tensor a tree
        like ``trees``, laid out as they are, with None where one has None, or where
        the first one has no number that can be differentiated.

    Raises:
        ValueError: before the rule first runs on a kind of leaves, if it draws random
            numbers, reduces or sorts the element, reads its value in Python, reads a
            tensor that it was not given, writes into one that it was, calls a
            collective, or returns something else.
        TypeError: a leaf of ``meta`` in parts.
        TreeMismatch: trees that do not fit; names the path.

    Transpose: of ``meta``, n times the sum over the rank's own parts, n ranks holding
    one each; where it was made one value over the ranks the mean is taken, by the
    collective of any whole parameter.

    Cost: nothing is sent; backward, along axes of leaves on which no ``shard`` averages
    the loss, one psum for each tensor of ``meta``. A rule keeps for its backward what
    it computes for all elements of a leaf that the rank holds: of a hidden layer of h
    numbers, h times the leaf's part. Some 0.4 ms of Python a leaf on a CPU.

    A step learned by unrolling two steps, on a mesh or on one device:

    >>> import torch, fsfunc as ff
    >>> from fsfunc import tree
    >>> def rule(meta, g, w):  # a small network of two features of an element
    ...     features = torch.stack([g, g.sign()])
    ...     return -0.1 * torch.tanh(features @ meta["in"]) @ meta["out"]
    >>> target = torch.tensor([1.0, -2.0])
    >>> loss = lambda params: (params["w"] - target).square().sum()
    >>> def after_two_steps(meta, params):
    ...     for _ in range(2):
    ...         _, grads = ff.value_and_grad(loss)(params)
    ...         updates = ff.elementwise(rule)(meta, grads, params)
    ...         params = tree.map(torch.add, params, updates)
    ...     return loss(params)
    >>> meta = {"in": torch.ones(2, 3), "out": torch.full((3,), 0.5)}
    >>> step, params = ff.value_and_grad(after_two_steps), {"w": torch.zeros(2)}
    >>> losses = []
    >>> for _ in range(20):
    ...     value, by_meta = step(meta, params)
    ...     meta = tree.map(lambda m, g: m - 0.1 * g, meta, by_meta)
    ...     losses.append(value.item())
    >>> losses[-1] < losses[0] / 3
    True
    """
    check_function(rule, "elementwise")
    name = _name_of(rule)
    known: dict[Hashable, list[str]] = {}  # operators of the rule, by kind of leaves

    @functools.wraps(rule)
    def over_trees(meta: PyTree, first: Tree, /, *others: Tree) -> PyTree:
        metas, meta_def = _flatten_meta(meta)
        rows, treedef = _match(first, others)
        taking_part = [row for row in rows if row is not None]
        for x in chain(metas, *(row.numbers.values() for row in taking_part)):
            claim_equal(x, "elementwise")
        # While a step is recorded each rank looks for itself, as a rule that depends on
        # the rank has other constants.
        operators = {} if recording() else known
        for row in taking_part:
            if (kind := _kind_of(metas, row)) not in operators:
                operators[kind] = _check_rule(rule, metas, meta_def, row)
            claim_equal(operators[kind], f"the rule of elementwise, {name!r}")

        # One spread of `meta` for all leaves over the same axes: what the leaves owe it
        # is summed on the rank first.
        spread: dict[tuple[str, ...], list[Leaf]] = {}
        results: list[list[Leaf] | None] = []
        result_def: tree.TreeDef | None = None
        for row in rows:
            if row is None:
                results.append(None)
                continue
            if (axes := row.axes) not in spread:
                spread[axes] = [_spread(m, axes) for m in metas]
            numbers = {i: _spread(x, axes) for i, x in row.numbers.items()}
            bound = _BoundRule(rule, tree.unflatten(meta_def, spread[axes]), numbers)
            with internal():  # each element stays at its place, whatever the rule does
                parts, structure = bound.over(row.parts, spread[axes])
            if result_def not in (None, structure):
                raise ValueError(
                    f"elementwise: {name!r} returns {structure} for the elements of "
                    f"{describe_leaf(row.leaf)}, and {result_def} for those of others"
                )
            result_def = structure
            results.append([row.with_part(y) for y in parts])

        if result_def is None:  # nothing takes part: the rule never says what it gives
            return tree.unflatten(treedef, [None] * len(rows))
        columns = [
            tree.unflatten(treedef, [None if r is None else r[i] for r in results])
            for i in range(result_def.num_leaves)
        ]
        return tree.unflatten(result_def, columns)

    return over_trees


class _Elements(NamedTuple):
    """What the trees have at the place of one leaf.

    Args:
        leaf: the first that has elements: the results are laid out as it is.
        parts: by the number of the tree: this rank's elements.
        numbers: by the number of the tree: one number for all elements.
    """

    leaf: Leaf
    parts: dict[int, Tensor]
    numbers: dict[int, Leaf]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the elements are spread over."""
        return self.leaf.layout.axes if is_sharded(self.leaf) else ()

    def with_part(self, part: Tensor) -> Leaf:
        return self.leaf.with_local(part) if is_sharded(self.leaf) else part


def _flatten_meta(meta: PyTree) -> tuple[list[Leaf], tree.TreeDef]:
    """Returns the leaves of ``meta``, all whole, and its structure.

    Raises:
        TypeError: a leaf is in parts.
    """
    paths, leaves, treedef = tree.flatten_with_paths(meta, is_leaf=is_sharded)
    for path, x in zip(paths, leaves, strict=True):
        if is_sharded(x) and x.layout.parts:
            raise TypeError(
                f"elementwise: {path!r} of meta is in parts ({describe_leaf(x)}), and "
                "each element needs all of it: leaves that no unit reads stay whole, "
                "and ff.unshard(meta) is whole"
            )
    return [local_tensor(x) if is_sharded(x) else x for x in leaves], treedef


def _is_number(x: Leaf) -> bool:
    """Returns whether ``x`` is one number, for all elements of a leaf beside it."""
    is_scalar = isinstance(x, Tensor) and not x.ndim
    return is_scalar or isinstance(x, (int, float, complex))


def _match(
    first: Tree, others: Sequence[Tree]
) -> tuple[list[_Elements | None], tree.TreeDef]:
    """Matches the leaves of trees; None for a leaf that takes no part.

    Raises:
        TreeMismatch: structures, shapes or layouts differ; names the path.
    """
    # None counts as a leaf, in any of the trees.
    leaves, treedef = tree.flatten(first, lambda x: x is None or is_sharded(x))
    columns = [leaves]
    columns += [flatten_like(treedef, x, "trees of elementwise") for x in others]
    rows: list[_Elements | None] = []
    for place, row in enumerate(zip(*columns, strict=True)):
        tensors = [x for x in row if isinstance(x, Tensor)]
        leaf = next((x for x in row if not _is_number(x)), (*tensors, row[0])[0])
        if any(x is None for x in row) or not trainable(leaf):
            rows.append(None)
            continue
        numbers = {i: x for i, x in enumerate(row) if _is_number(x)}
        if _is_number(leaf):  # all are: each is a leaf of one element
            numbers = {i: x for i, x in numbers.items() if not isinstance(x, Tensor)}
        beside = {i: x for i, x in enumerate(row) if i not in numbers}
        for x in beside.values():
            if first_mismatch([leaf], [x], [0]) is not None:
                raise tree.TreeMismatch(
                    "trees of elementwise do not fit at "
                    f"{tree.paths_of(treedef)[place]!r}: one has "
                    f"{describe_leaf(leaf)}, another {describe_leaf(x)}; or give a "
                    "0-dim tensor, for all elements of the leaf"
                )
        parts = {i: local_tensor(x) for i, x in beside.items()}
        rows.append(_Elements(leaf, parts, numbers))
    return rows, treedef


def _spread(x: Leaf, axes: tuple[str, ...]) -> Leaf:
    """Returns what all ranks share as a factor of parts, if it has a derivative."""
    return spread_into_parts(x, axes) if axes and trainable(x) else x


class _BoundRule(NamedTuple):
    """A rule with all that is the same for each element of a leaf.

    Args:
        rule: a function of ``meta`` and one element of each tree.
        meta: its first argument.
        numbers: by the number of the tree, those that are one for the whole leaf.
    """

    rule: Rule
    meta: PyTree
    numbers: dict[int, Leaf]

    def __call__(self, elements: dict[int, Tensor]) -> tuple[list[Any], tree.TreeDef]:
        """Returns the results for one element, and their structure."""
        row = elements | self.numbers
        return tree.flatten(self.rule(self.meta, *(row[i] for i in sorted(row))))

    def over(
        self, parts: dict[int, Tensor], spread: Sequence[Leaf]
    ) -> tuple[list[Tensor], tree.TreeDef]:
        """Returns the results for all elements of parts, of the parts' shape.

        Args:
            parts: of one shape.
            spread: the leaves of ``meta``.
        """
        shape = next(iter(parts.values())).shape
        if shape.numel():
            flat = {i: x.reshape(-1) for i, x in parts.items()}
            results, structure = self._mapped(flat)
            # A result that no element is in is one number, expanded.
            return [y.contiguous().view(shape) for y in results], structure
        # An empty part has results of the same dtypes, and the same history: each rank
        # must take part in the backward of what is made of them. An element that stands
        # in has no part in the history, as its derivative may not be finite.
        with torch.no_grad():
            results, structure = self._mapped(
                {i: x.new_ones(1) for i, x in parts.items()}
            )
        factors = [x for x in (*spread, *self.numbers.values()) if trainable(x)]
        total = sum([x.sum() for x in factors]) if factors else 1
        ties = [x * total for x in parts.values() if trainable(x)]
        tied = functools.reduce(torch.add, ties)
        return [_as_dtype(tied, y.dtype) for y in results], structure

    def _mapped(self, flat: dict[int, Tensor]) -> tuple[list[Tensor], tree.TreeDef]:
        """Returns the results for each row of 1-D tensors."""
        structure: list[tree.TreeDef] = []

        def one(*elements: Tensor) -> tuple[Tensor, ...]:
            results, treedef = self(dict(zip(flat, elements, strict=True)))
            structure.append(treedef)
            return tuple(results)

        # Positional, as torch takes a third less time than for a dict.
        return list(torch.func.vmap(one)(*flat.values())), structure[0]


def _as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``x`` in a dtype; of complex numbers for a real one, the real parts."""
    return (x.real if x.is_complex() and not dtype.is_complex else x).to(dtype)


def _kind_of(metas: Sequence[Leaf], row: _Elements) -> Hashable:
    """Returns what the operators of a rule may depend on, beside values."""

    def kind(x: Leaf) -> Hashable:
        if isinstance(x, Tensor):
            return x.shape, x.dtype, _torch.device_of(x)
        return x if isinstance(x, (int, str)) else type(x)

    elements = ((i, x.dtype) for i, x in sorted(row.parts.items()))
    device = _torch.device_of(next(iter(row.parts.values())))
    numbers = ((i, kind(x)) for i, x in sorted(row.numbers.items()))
    return tuple(map(kind, metas)), device, *elements, *numbers


def _name_of(rule: Rule) -> str:
    return getattr(rule, "__name__", type(rule).__name__)


def _check_rule(
    rule: Rule, metas: Sequence[Leaf], meta_def: tree.TreeDef, row: _Elements
) -> list[str]:
    """Runs a rule on one element, by ones in place of all tensors.

    Returns:
        its operators, each with its constants.

    Raises:
        ValueError: it does what a rule may not do.
    """
    name = _name_of(rule)
    device = torch.get_default_device()
    # Beneath the modes of recordings and plans, which need not know of this run.
    with (
        _torch.outside_function_modes(),
        _torch.beneath_all_modes(),
        device,
        watching(_NoCollectives(name)),
        _SingleElement(name) as seen,
    ):

        def stand_in(x: Leaf, shape: Sequence[int]) -> Leaf:
            if not isinstance(x, Tensor):
                return x
            return torch.ones(tuple(shape), dtype=x.dtype, device=_torch.device_of(x))

        meta = [stand_in(x, getattr(x, "shape", ())) for x in metas]
        numbers = {i: stand_in(x, ()) for i, x in row.numbers.items()}
        elements = {i: stand_in(x, ()) for i, x in row.parts.items()}
        seen.begin(elements.values())
        bound = _BoundRule(rule, tree.unflatten(meta_def, meta), numbers)
        try:
            results, _ = bound(elements)
        except Exception as error:
            error.add_note(
                f"in {name!r}, the rule of ff.elementwise, which is given one element "
                "at a time, as 0-dim tensors"
            )
            raise
    for y in results:
        if not isinstance(y, Tensor) or y.ndim:
            found = f"shape {list(y.shape)}" if isinstance(y, Tensor) else repr(y)
            raise ValueError(
                f"elementwise: {name!r} returns {found} for one element: return a "
                "0-dim tensor, or a tree of them, each a new tree of leaves"
            )
    if not results:
        raise ValueError(
            f"elementwise: {name!r} returns nothing for an element; it returns a 0-dim "
            "tensor, or a tree of them"
        )
    return seen.operators


def _key(x: Tensor) -> int:
    return _torch.storage_key(_torch.unwrapped(x))


class _NoCollectives(Watcher):
    """Refuses that a rule calls a collective, which would be called for each leaf."""

    def __init__(self, name: str):
        self.name = name

    def collective_called(
        self, x: Tensor, linear_map: LinearMap, group: RankGroup
    ) -> None:
        raise ValueError(
            f"elementwise: {self.name!r} calls {linear_map.op} over {group.name} for "
            "an element: ranks hold other numbers of them. Call it before, and give "
            "what it returns in meta"
        )


class _SingleElement(OperatorMode):
    """Looks at each operator of a rule, which runs on one element.

    Args:
        name: the rule's.

    Attributes:
        elements: the storages that are made of the element.
        operators: those that have run, each with its constants, in a line.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name, self.elements = name, set[int]()
        self.operators: list[str] = []
        # By storage, what was made in this run; kept, so that no storage is reused.
        self._made: dict[int, Tensor] = {}
        self._given: set[int] = set()

    def begin(self, elements: Iterable[Tensor]) -> None:
        """Takes all that was made up to here for what the rule is given."""
        self._given = set(self._made)
        self.elements.update(map(_key, elements))
        self.operators.clear()

    def operator(
        self, func: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
    ) -> Any:
        tensors = _torch.tensors_in((args, kwargs))
        op = class_of_call(func, args, kwargs)
        of_element = [x for x in tensors if _key(x) in self.elements]
        # `torch.tensor(0.5)` makes a tensor where no mode sees it, and then lifts it.
        constants = [x for x in flatten_lists([args, kwargs]) if type(x) is not Tensor]
        if op.name == "lift_fresh":
            constants += [describe_value(x) for x in tensors]
        else:
            for x in tensors:
                if _key(x) not in self._made:
                    raise self._error(
                        f"{op.name} reads a tensor of shape {list(x.shape)} that the "
                        "rule was not given, whose gradient would be of this rank's "
                        "part alone: give it in meta"
                    )
        if is_random(func, args, kwargs):
            raise self._error(
                f"{op.name} draws random numbers, which would depend on how leaves are "
                "cut: draw noise = ff.randn_like(tree), and give it as another tree"
            )
        if of_element and _torch.data_dependence(func):
            raise self._error(
                f"{op.name} asks for the value of an element, and Python takes one way "
                "for all of them: torch.where(condition, a, b) takes both"
            )
        for x in _torch.tensors_written(func, args, kwargs):
            if _key(x) in self._given:
                raise self._error(
                    f"{op.name} changes in place what the rule is given, which is read "
                    "for other elements, and by others: work on a copy"
                )
        numbers = ", ".join(map(str, map(comparable, constants)))
        self.operators.append(f"{op.name}({numbers})")
        out = func(*args, **kwargs)
        results = _torch.tensors_in([out])
        keeps_place = (
            op.elementwise
            or op.joins
            or op.alike
            or op.name in COPIES
            or all(_key(y) in self.elements for y in results)  # a view
        )
        if not keeps_place and any(not x.ndim for x in of_element):
            raise self._error(
                f"{op.name} is not elementwise, and of one element it says nothing: "
                "what is summed or sorted over a leaf is made before, as by "
                "ff.leaf_norms(tree), and given as another tree; features of one "
                "element are joined by torch.stack([...])"
            )
        for y in results:
            self._made[_key(y)] = y
            if of_element and not op.alike:
                self.elements.add(_key(y))
        return out

    def _error(self, fault: str) -> ValueError:
        return ValueError(f"elementwise: in {self.name!r}, at {source_line()}, {fault}")
