"""``unit``: a function whose calls transforms may reinterpret.

A unit is a pure function of ``(params, *inputs)``. Without a transform around it,
calling a unit calls the function. A transform changes what the call does: gather the
parameters first, recompute it in the backward pass, run it on another rank::

    Unit.__call__ -> Call(unit, frame, number).run
                  -> a.unit(b.unit(Call.body))     of handlers (a, b) of the frame
                  -> Call.body: seeds the generators, casts, opens an inner frame
                  -> Unit.checked: calls the function; the first time, checks it

The first call for each kind of arguments checks that the function is pure.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal, label, warn
from fsfunc.comm.tracebacks import api_boundary, leave_out
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.casts import Casts, cast
from fsfunc.core.execution_context import running
from fsfunc.core.frames import Counter, Frame, frame, inside, recording
from fsfunc.core.outcomes import is_marked_input
from fsfunc.runtime.generators import RankDraws, States, generator_states, seed63
from fsfunc.runtime.scopes import in_one_thread, refuse_compiled
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import row_major
from fsfunc.tree.types import Args, Keywords, Leaf, PyTree

_Tree = TypeVar("_Tree")

_P = ParamSpec("_P")
_R = TypeVar("_R")


@api_boundary
def unit(fn: Callable[_P, _R], *, whole: bool = False) -> Callable[_P, _R]:
    """Makes ``fn`` a unit: a function whose calls transforms may reinterpret.

    Units are the granularity of gathers, recomputation, offload and pipeline stages.
    Without a transform around it, calling a unit calls ``fn``.

    Inside, parameters are plain tensors, and a derivative that is taken there is this
    rank's own; the mean over the ranks is taken once, of the parameters' cotangents, as
    they leave the unit.

    Args:
        fn: a pure function of ``(params, *inputs, **keywords)``: any pytrees in, any
            pytree out. Units nest; an outer one gathers the parameters that no inner
            one takes. ``fn`` may be compiled, ``unit(torch.compile(fn))``, if it calls
            no unit; steps are recorded and planned with the plain function.
        whole: gather the parameters of this unit and of all nested units on entry, and
            run nested units as plain functions. Needed to differentiate with respect to
            parameters inside the unit (per-sample gradients, MAML's inner loop). Cost:
            one gather, kept until the unit returns, and one reduction in its backward.

    Raises (when called):
        RuntimeError: ``fn`` captured a differentiated tensor by closure, or changed an
            input in place by ``.data`` (checked on the first call for each set of
            shapes, booleans and strings) or openly; or the unit is called inside a
            compiled function.

    >>> import torch, fsfunc as ff
    >>> @ff.unit
    ... def layer(params, x):
    ...     return torch.tanh(x @ params["w"])
    >>> layer({"w": torch.eye(2)}, torch.zeros(3, 2)).shape
    torch.Size([3, 2])

    Per-sample gradients, each rank's own, of a loss that is made of units:

    >>> from torch.func import grad, vmap
    >>> loss = lambda params, x: layer(params, x[None]).sum()
    >>> each = ff.unit(lambda p, x: vmap(grad(loss), (None, 0))(p, x), whole=True)
    >>> each({"w": torch.eye(2)}, torch.zeros(3, 2))["w"].shape
    torch.Size([3, 2, 2])
    """
    check_function(fn, "unit")
    return fn if isinstance(fn, Unit) and fn.whole == whole else Unit(fn, whole)


class Unit:
    """A function of ``(params, *inputs)`` that transforms may reinterpret."""

    def __init__(self, fn: Callable[..., Any], whole: bool = False):
        functools.update_wrapper(self, fn)
        self.whole = whole
        self.__name__: str = getattr(fn, "__name__", type(fn).__name__)
        self.fn = fn
        # How many of the first inputs ``precision`` does not cast: buffers of a module.
        self.uncast_inputs: int = getattr(fn, "uncast_inputs", 0)
        self._checked_kinds: set[Any] = set()  # the kinds of arguments of checked calls
        # What `transforms.repeated_calls` learns of recomputed calls, by their kind:
        # how their residuals are dropped, and which draw nothing from Python's and
        # numpy's generators, so that these need not be set again.
        self.residual_modes: dict[Any, Any] = {}
        self.drawless_keys: set[Any] = set()

    def __call__(self, params: Any, /, *inputs: Any, **keywords: Any) -> Any:
        refuse_compiled(self)
        f = frame()
        call = Call(self, f, f.counter.next())
        # A unit may be called with no transform around it: then an error leaves the
        # library here, and loses its frames. Inside another public function of the
        # library `leave_out` does nothing.
        try:
            return call.run(params, *inputs, **keywords)
        except BaseException as error:
            leave_out(error)
            raise

    def __repr__(self) -> str:
        return f"unit({self.__name__})"

    def checked(
        self, params: PyTree, inputs: Args, keywords: Keywords, fn: Callable[..., Any]
    ) -> PyTree:
        """Calls ``fn``, and raises if it captured tensors or changed its inputs.

        Changes that autograd sees, by a tensor's version, raise in every call. Captures
        and changes by ``.data`` are looked for once for each kind of arguments, as that
        takes a walk of the graph and a dispatch mode.
        """
        arguments = tree.shown(
            (params, inputs, keywords), self, "is given", _PARTS, is_sharded
        )
        # The parts of sharded leaves are not watched: a gather for a unit within may
        # write beside them, into the same storage (`FlatShard.whole`).
        watched, kinds, is_untracked = [], [], False
        for x in arguments:
            if isinstance(x, Tensor):
                watched.append(x)
                kinds.append((x.shape, x.dtype, x.requires_grad))
                is_untracked = is_untracked or x.is_inference()
            elif is_sharded(x):
                kinds.append((x.layout.shape, x.layout.dtype))
                # Of a packed leaf not `x.local`, which would make the part.
                part = x.local if x.packed is None else x.packed.flat
                is_untracked = is_untracked or part.is_inference()
            elif isinstance(x, bool | str):  # which may choose a branch
                kinds.append(x)
        # An inference tensor has no version counter, and no graph leads to it.
        watched = [] if is_untracked else watched
        versions, key = list(map(_VERSION, watched)), tuple(kinds)
        # The check for captures turns grad on. Where a unit turned it off around this
        # one, `remat` would refuse the outer unit: its first run would be checked, and
        # save more tensors than its second.
        grad_is_off = not torch.is_grad_enabled() and len(frame().path) > 1
        checked = self._checked_kinds
        # Nothing is checked under torch.func either: its wrappers have no storage to
        # watch, and the graph is that of the innermost level, where captures of tensors
        # of the other levels do not show.
        if is_untracked or grad_is_off or key in checked or _torch.functorch_active():
            out = fn(params, *inputs, **keywords)
        elif (is_recorded := recording()) and (is_recorded, key) in checked:
            out = fn(params, *inputs, **keywords)
        else:
            raise_changed = functools.partial(self._changed, params, inputs, keywords)
            # Without data nothing is written, and a recording would see the mode. The
            # guards of compiled code would see it too, and compile each call anew.
            is_compiled = frame().compiler or _torch.is_compiled_function(self.fn)
            watches = not (is_recorded or is_compiled)
            with (
                _torch.WriteWatcher(watched, raise_changed)
                if watches
                else nullcontext()
            ):
                out = self._check_captures(
                    _tensors(arguments), params, inputs, keywords, fn
                )
            # A recorded call has not looked for writes: a real one is checked too.
            checked.add((is_recorded, key) if is_recorded else key)
        for x, version in zip(watched, versions, strict=True):
            if x._version != version:
                self._changed(params, inputs, keywords, x)
        return out

    def _changed(
        self, params: PyTree, inputs: Args, keywords: Keywords, x: Tensor
    ) -> None:
        """Raises, and names the argument that ``x`` lies in.

        It returns if `_lies_in` finds none: ``x`` has no elements, or begins outside of
        every leaf's range.
        """
        names = ("params", *[f"input {i}" for i in range(len(inputs))], *keywords)
        values = (params, *inputs, *keywords.values())
        for name, value in zip(names, values, strict=True):
            paths, leaves, _ = tree.flatten_with_paths(value)
            for path, leaf in zip(paths, leaves, strict=True):
                if _lies_in(x, leaf):
                    name = f"{name} at {path!r}" if path else name
                    raise RuntimeError(
                        f"unit {self.__name__!r} changed its {name} of shape "
                        f"{tuple(leaf.shape)} in place: a unit may be run again, so it "
                        "must leave its inputs as they are; work on a copy"
                    )

    def _check_captures(
        self,
        tensors: list[Tensor],
        params: PyTree,
        inputs: Args,
        keywords: Keywords,
        fn: Callable[..., Any],
    ) -> PyTree:
        """Calls ``fn``, and raises if its output depends on a captured tensor.

        The autograd graph of the output is walked back to the inputs. What the walk
        reaches beside them was captured, if it was made before the call.

        Args:
            tensors: the tensors among the arguments.
        """
        was_enabled = torch.is_grad_enabled()
        # Transforms thread a token through unit calls, to order their backwards: an
        # input too, though not among the arguments.
        token = running().token
        sources = tensors if token is None else [*tensors, token.latest]
        # By edge, not by node: of ``a, b = x.unbind()`` one may be an input, and the
        # other captured.
        visited = {(x.grad_fn, x.output_nr) for x in sources if x.grad_fn is not None}
        leaves = {id(x) for x in sources}
        # There must be a graph, whatever mode the caller is in. `inference_mode` turns
        # autograd's threads on again, and each of them numbers nodes of its own.
        with torch.inference_mode(False), in_one_thread(), torch.enable_grad():
            # Nodes are numbered as they are made: one below this was there before.
            start = _torch.next_sequence_number()
            out = fn(params, *inputs, **keywords)
            roots = tree.shown(out, self, "returns")
            roots = [x for x in roots if isinstance(x, Tensor) and x.requires_grad]
            todo = [("", x.grad_fn, x.output_nr) for x in roots if x.grad_fn]
            # Nothing tells whether an autograd leaf was captured or made in the call by
            # `requires_grad_()`, as its node has no number: both are refused.
            for x in roots:
                if x.grad_fn is None and id(x) not in leaves:
                    self._captured("", tuple(x.shape))
            while todo:
                user, node, k = todo.pop()
                if (node, k) in visited:
                    continue
                visited.add((node, k))
                variable = getattr(node, "variable", None)  # of an autograd leaf
                if variable is not None:
                    if id(variable) not in leaves:
                        self._captured(user, tuple(variable.shape))
                elif _torch.sequence_number(node) < start:
                    self._captured(user, _torch.output_shape(node, k))
                # Behind an input of a gradient call within lies what that closes over,
                # which it differentiates itself.
                if not is_marked_input(node):
                    edges = [(n, i) for n, i in node.next_functions if n]
                    todo += [(node.name(), n, i) for n, i in edges]
        # The caller had turned grad off, and must get no graph of it.
        if not was_enabled:
            out = tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)
        return out

    def _captured(self, user: str, shape: tuple[int, ...]) -> None:
        """Raises: ``user``, the name of an autograd node, reads a captured tensor."""
        op = user.rstrip("0123456789").removesuffix("Backward")
        raise RuntimeError(
            f"unit {self.__name__!r} uses, in {op or 'its output'}, a differentiated "
            f"tensor of shape {shape} captured by closure: its gradient would be lost "
            "where the unit is recomputed or sharded; pass it as an argument. In place "
            "of one made by requires_grad_(), take gradients by it with torch.func.grad"
        )


def _lies_in(x: Tensor, leaf: Leaf) -> bool:
    """Returns whether ``x`` begins in a leaf's memory.

    That of a strided leaf is taken to be ``leaf.nbytes`` from its first byte on.
    """
    if not (isinstance(x, Tensor) and isinstance(leaf, Tensor)):
        return False
    x, leaf = _torch.unwrapped(x), _torch.unwrapped(leaf)
    if _torch.storage_key(x) != _torch.storage_key(leaf):
        return False
    # A tensor of bytes may be another's whole storage, viewed so: it may begin before
    # the leaf that it holds, and counts wherever it begins.
    start, first_byte = (t.storage_offset() * t.element_size() for t in (leaf, x))
    return x.element_size() == 1 or start <= first_byte < start + leaf.nbytes


class Call:
    """A unit call: the unit, the frame in which it was called, and its number there.

    Attributes:
        path: the names of the units around it, and its own.
        name: the same in one string: ``block`` or, inside another, ``loss_fn/block``.
        numbers: its number within each unit around it, outermost first.
        savers: tensors whose autograd nodes save its arguments for a second run. Its
            outputs do not lead to these nodes.
    """

    def __init__(self, unit: Unit, frame: Frame, number: int):
        self.unit = unit
        self.frame = frame
        self.number = number
        self.path: tuple[str, ...] = (*frame.path, unit.__name__)
        self.numbers: tuple[int, ...] = (*frame.numbers, number)
        self.name: str = "/".join(self.path)
        self.savers: list[Tensor] = []

    def run(self, params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
        """Runs the call through the interpretations of its frame."""
        run = self.body
        for handler in reversed(self.frame.handlers):
            run = handler.unit(run, self)
        if self.frame.tracer is not None:
            run = self.frame.tracer.wrap_call(self, run)
        # Recordings treat operators of transforms as the library's, until `body` enters
        # the user's function.
        with internal():
            return run(params, *inputs, **keywords)

    def body(self, params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
        """Runs the unit's function: the innermost of all interpretations."""
        f, numbers = self.frame, self.numbers
        inner = f.replace(
            path=self.path,
            numbers=numbers,
            counter=Counter(),
            whole=f.whole or self.unit.whole,
            functorch_level=f.functorch_level if f.path else _torch.current_level(),
        )
        states: States = []
        rank_draws: RankDraws | None = None
        failed = True
        try:
            if f.tracer is not None and not f.tracer.draws:
                pass  # fake tensors get no numbers, whatever the seed
            elif f.seed is not None:
                # The seed is mixed from the gradient call, the unit call and the
                # microbatch of the global batch: so a recompute draws the same, and so
                # does any schedule or number of microbatches.
                states = generator_states()
                numbers = numbers[f.seed_depth :]
                index = row_major((*f.batch_places, *(f.rows or f.micro)))
                seed = seed63(f.seed, index, len(numbers), *numbers)
                for g, _ in states:
                    g.manual_seed(seed)
            elif f.batch_places and not f.path and _differs(f):
                # Outside a gradient call the default generators are equal on all ranks,
                # and the rows are not: so this call draws each rank's own numbers.
                # Of a unit that is known to draw, the states need not be compared.
                draws = self.unit.__name__ in f.drawing_units
                index = row_major((*f.batch_places, *f.micro))
                rank_draws = RankDraws(index, draws=draws)
            current_pass = running()
            phase = "recompute" if current_pass.recompute else "forward"
            with inside(inner, is_user_code=f.tracer is None), label(self.name, phase):
                casts = f.casts
                # `inside` has entered the user's code; casts are the library's.
                if casts is not None:
                    with internal():
                        arguments = params, inputs, keywords
                        params, inputs, keywords = self._cast(casts, *arguments)
                if f.tracer is not None:
                    out = f.tracer.run_body(self, params, inputs, keywords)
                else:
                    fn = self.unit.fn
                    # Compiled code has no second derivatives.
                    if f.compiler is not None and not f.composable:
                        fn = f.compiler.of(self)
                    if current_pass.run_unit_fn is not None:
                        fn = functools.partial(current_pass.run_unit_fn, fn)
                    out = self.unit.checked(params, inputs, keywords, fn)
                if casts is not None and casts.output is not None:
                    with internal():
                        out = _cast(out, casts.output)
                failed = False
                return out
        except Exception as error:
            if (refusal := _alignment_error(error, self.name, params)) is not None:
                raise refusal from error
            _note_unit(error, self.name)
            raise
        finally:
            # The seeds are the unit's alone: the caller's generators go on as if it had
            # drawn nothing, or, if it drew numbers of the rank's own, one.
            for g, state in states:
                g.set_state(state)
            if rank_draws is not None:
                rank_draws.end(failed)

    def _cast(
        self, casts: Casts, params: PyTree, inputs: Args, keywords: Keywords
    ) -> tuple[PyTree, Args, Keywords]:
        """Returns the arguments, cast as ``precision`` says."""
        f, dtype = self.frame, casts.of(self.name)
        # Only where gradients will be computed: an evaluation in float16 loses nothing.
        if dtype == torch.float16 and f.in_loss and torch.is_grad_enabled():
            if not any(handler.scales for handler in f.handlers):
                warn(_UNSCALED)
        uncast = inputs[: self.unit.uncast_inputs]
        other_inputs, keywords = _cast((inputs[len(uncast) :], keywords), dtype)
        leaves, treedef = tree.flatten(params, is_leaf=is_sharded)
        dtypes = casts.each(self.name, treedef)
        params = tree.unflatten(treedef, map(cast, leaves, dtypes))
        return params, (*uncast, *other_inputs), keywords


_UNSCALED = (
    "gradients are computed in float16, where numbers below 6e-8 become 0: scale the "
    "loss, by ff.loss_scale(optimizer)(grad_fn), or compute in bfloat16"
)
_PARTS = ("params", "inputs", "keywords")
_VERSION = operator.attrgetter("_version")


def _differs(f: Frame) -> bool:
    """Returns whether other ranks have other rows, and what is drawn now is used."""
    return any(count > 1 for _, count in f.batch_places) and not _torch.fake_active()


def inside_unit(path: tuple[str, ...], leaf: str, gathers: str) -> LawError:
    """Returns the error of a derivative by a leaf that only a nested unit gathers.

    Args:
        path: the names of the units around.
        leaf: the leaf, in words.
        gathers: what gathers it, in words.
    """
    return LawError(
        f"a derivative is taken inside unit {'/'.join(path)!r} by {leaf}, which only "
        f"{gathers} within it gathers: it would be that of the mean over the ranks, "
        f"where a unit's derivatives are the rank's own. Make {path[0]!r} ff.unit(fn, "
        "whole=True), which gathers all of its parameters, or take the derivative "
        "outside"
    )


def _note_unit(error: Exception, name: str) -> None:
    """Notes the innermost unit on an error: torch's own says shapes, and not where."""
    notes = getattr(error, "__notes__", ())
    if not any(str(note).startswith("in unit ") for note in notes):
        error.add_note(f"in unit {name!r}")


def _alignment_error(
    error: Exception, name: str, params: PyTree
) -> RuntimeError | None:
    """Returns what to raise for torch's refusal of a wider view; None of other errors.

    In a packed buffer a leaf may begin at any element, and torch views it as one of
    wider numbers only at a multiple of their size.
    """
    if (match := _UNALIGNED.search(str(error))) is None:
        return None
    paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=is_sharded)
    tensors = [(p, x) for p, x in zip(paths, leaves, strict=True) if _is_dense(x)]
    starts = {p: int(_torch.unwrapped(x).storage_offset()) for p, x in tensors}
    odd = [f"{p!r} at element {n}" for p, n in starts.items() if n % int(match[1])]
    return RuntimeError(_VIEWS.format(name, match[1], ", ".join(odd))) if odd else None


_UNALIGNED = re.compile(r"storage_offset.*divisible by (\d+)")  # in torch's message
_VIEWS = (
    "unit {!r} views a tensor as one of wider numbers (torch.view_as_complex, "
    "x.view(dtype)), which must begin at a multiple of {} of its elements. Parameters "
    "lie in a packed buffer, one after another, and these do not: {}. View a copy, "
    "torch.view_as_complex(w.clone()); or let the parameter itself have that dtype"
)


def _is_dense(x: Leaf) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.layout == torch.strided


def _tensors(leaves: list[Leaf]) -> list[Tensor]:
    """Returns the tensors among leaves, and the parts of sharded ones."""
    return [x for x in tree.leaves(leaves) if isinstance(x, Tensor)]


def _cast(values: _Tree, dtype: torch.dtype | None) -> _Tree:
    return tree.map(lambda x: cast(x, dtype), values, is_leaf=is_sharded)
