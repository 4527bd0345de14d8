"""The autograd graph: its nodes, what they save, and which of them runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsfunc._torch.dispatch import beneath_all_modes
from fsfunc._torch.internals import storage_key


def sequence_number(node: Any) -> int:
    """The number of an autograd node, in the order of making, per thread."""
    return node._sequence_nr()


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread will have, or above it."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]


def current_node() -> Any:
    """The autograd node whose backward runs in this thread, if one does."""
    return torch._C._current_autograd_node()


#: Whether the backward that is under way keeps what its nodes saved.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]


def output_shape(node: Any, k: int) -> tuple[int, ...]:
    """The shape of the ``k``-th tensor that an autograd node's op made."""
    return tuple(node._input_metadata[k].shape)


#: Whether operators take tangents along: torch turns that off in the forward of an
#: ``autograd.Function``, and in inference mode.
takes_tangents: Callable[[], bool] = torch._C._is_fwd_grad_enabled  # type: ignore[attr-defined]


def function_runs() -> bool:
    """True inside the forward of an ``autograd.Function``, of ours too.

    Not in inference mode, where nothing is recorded that a Function could hide.
    """
    return not (takes_tangents() or torch.is_inference_mode_enabled())


def hides_tensors() -> str:
    """What around us keeps autograd from what it closes over, in words, or "".

    The forward of an ``autograd.Function``, or torch's checkpoint, which runs a
    function again.
    """
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    hooks = autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        return "torch.utils.checkpoint"
    if torch.is_grad_enabled() or not function_runs():
        return ""
    return "the forward of an autograd.Function (a reentrant checkpoint is one)"


def reverse_mode_around() -> bool:
    """True if a ``torch.func`` transform that takes gradients is running.

    Also inside the forward of an ``autograd.Function``, where torch leaves the
    transforms' levels for its time; they forbid hooks on saved tensors there too.
    """
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    return "torch.func" in (
        autograd._saved_tensors_hooks_get_disabled_error_message() or ""
    )


def is_function_node(node: Any) -> bool:
    """True if an autograd node is of an ``autograd.Function``."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def graph_nodes(roots: Iterable[Any], stop: set[Any]) -> list[Any]:
    """The autograd nodes reached from ``roots`` without entering ``stop``."""
    seen, found, todo = {None, *stop}, [], list(roots)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        found.append(node)
        for n, _ in node.next_functions:
            todo.append(n)
    return found


def reaches_leaves(root: Tensor, stop: set[Any]) -> bool:
    """True if ``root`` depends on leaves that require grad, past the nodes ``stop``."""
    return any(hasattr(n, "variable") for n in graph_nodes([root.grad_fn], stop))


class _SavedNames(dict[type, list[tuple[str, str]]]):
    """By the type of a node: (name of the handle, name of the value) it saves."""

    def __missing__(self, kind: type) -> list[tuple[str, str]]:
        raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        many = {"_raw_saved_tensors": "saved_tensors"}
        found = self[kind] = [(name, many.get(name, name[4:])) for name in raw]
        return found


_SAVED = _SavedNames()


def _handles(node: Any, name: str) -> Any:
    """The handles of what a node saves under a name."""
    found = getattr(node, name)
    return found if isinstance(found, (tuple, list)) else (found,)


def saved_tensors_hooked() -> bool:
    """True if ``saved_tensors_hooks`` are on in this thread."""
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    return autograd._top_saved_tensors_default_hooks(True) is not None


class _Looking(threading.local):
    """``on`` while saved tensors are only looked at, and any will do."""

    on = False


LOOKING = _Looking()


def hook_saved(
    nodes: Iterable[Any],
    storage: int,
    pack: Callable[[Tensor], Any],
    unpack: Callable[[Any], Tensor],
) -> int:
    """Puts hooks on the saved tensors of ``nodes`` that lie in ``storage``.

    Returns how many there were. A tensor under somebody else's hooks is left alone:
    it then keeps what those hooks kept. While ``LOOKING.on``, ``unpack`` does nothing
    and gives any tensor.
    """
    count = 0
    unpack.looks = True  # type: ignore[attr-defined]
    for node in nodes:
        for raw, value in _saved(node):
            if isinstance(value, Tensor) and storage_key(value) == storage:
                try:
                    raw.register_hooks(pack, unpack)
                except RuntimeError as error:
                    if "hooks" not in str(error):
                        raise
                    continue
                count += 1
    return count


def saved_tensors(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that ``nodes`` save as they are, without hooks."""
    for node in nodes:
        for _, value in _saved(node):
            if isinstance(value, Tensor):
                yield value


def _saved(node: Any) -> list[tuple[Any, Any]]:
    """The saved tensors of ``node``: the handle on each, and the data.

    Without unpacking: to unpack is to run other people's hooks, which compute a
    checkpoint again or gather an inner unit's parameters.
    """
    found = []
    for name, _ in _SAVED[type(node)]:
        raws = getattr(node, name)  # not by `_handles`: each unit call comes by here
        for raw in raws if isinstance(raws, (tuple, list)) else (raws,):
            if raw.unpack_hook is None:
                found.append((raw, raw.data))
    return found


def saves_early(node: Any) -> bool:
    """True of a node of an operator that saves memory before it has filled it."""
    return node.name().startswith("RreluWithNoise") and node._saved_training


def saved_handles(nodes: Iterable[Any]) -> list[Any]:
    """Handles on the tensors that ``nodes`` save, but for those under hooks.

    Raises:
        RuntimeError: one was changed in place since it was saved.
    """
    found = []
    for node in nodes:
        handles = [raw for raw, x in _saved(node) if isinstance(x, Tensor)]
        if handles:
            for _, name in _SAVED[type(node)]:
                getattr(node, name)
        found += handles
    return found


def saved_norms(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """A norm and a weighted sum of saved values; None where torch may not fill them.

    So it is with what stands beside them: states of generators, and of cuDNN.
    """
    if x.layout != torch.strided or isinstance(x, FakeTensor):
        return None
    # Nor does a mode of functions, for which all in a unit's body is the unit's.
    with beneath_all_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        floats = x.is_floating_point() and x.itemsize > 1
        if not floats and (x.dtype == torch.uint8 or x.numel() <= 2):
            return None
        norm = torch.linalg.vector_norm(x := x if floats else x.float())
        for n in reversed(x.shape):  # which a sign or an order changes
            x = x @ torch.arange(n, device=x.device).cos().to(x.dtype)
        return norm, x


def nearness(norms: tuple[Tensor, Tensor] | None, x: Tensor) -> Tensor | None:
    """Whether ``norms`` may be the `saved_norms` of ``x``, as kernels round.

    As a tensor on its device, where it may not be known yet; None where nothing is to
    be compared.
    """
    if norms is None or (again := saved_norms(x)) is None:
        return None
    with beneath_all_modes(), torch._C.DisableTorchFunction():
        near = torch.isclose(again[0], norms[0], rtol=1e-3, equal_nan=True)
        slack = 1e-2 * norms[0] + 1e-3 * norms[1].abs()
        return near & ~((again[1] - norms[1]).abs() > slack)


def all_true(answers: Sequence[Tensor]) -> bool:
    """True if all of these 0-dim tensors are; waits once for each device."""
    with beneath_all_modes(), torch._C.DisableTorchFunction():
        by_device: dict[torch.device, list[Tensor]] = {}
        for x in answers:
            by_device.setdefault(x.device, []).append(x)
        return all(bool(torch.stack(each).all()) for each in by_device.values())


def forbids_hooks(error: RuntimeError) -> bool:
    """True if a transform of ``torch.func`` refuses to run under hooks of autograd."""
    return "support saved tensor hooks" in str(error)


def hook_residuals(
    nodes: Iterable[Any],
    goes: Callable[[Tensor], bool],
    pack: Callable[[Tensor], Any],
    unpack: Callable[[Any], Tensor],
) -> None:
    """Puts hooks on the saved tensors of ``nodes`` of which ``goes`` says so.

    Left as they are: what is under somebody's hooks; and what was changed in place
    since it was saved, of which the backward is to say so: under hooks torch does not
    look.
    """
    for node in nodes:
        for raw_name, name in _SAVED[type(node)]:
            raws = _handles(node, raw_name)
            hooks = [raw.unpack_hook for raw in raws if raw.unpack_hook is not None]
            if not all(hasattr(hook, "looks") for hook in hooks):
                continue
            bare = [raw for raw in raws if raw.unpack_hook is None]
            chosen = [x for x in bare if isinstance(x.data, Tensor) and goes(x.data)]
            if not chosen:
                continue
            LOOKING.on = True
            try:
                getattr(node, name)
            except RuntimeError:
                continue
            finally:
                LOOKING.on = False
            for raw in chosen:
                raw.register_hooks(pack, unpack)
