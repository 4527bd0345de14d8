"""The autograd graph: its nodes, what they save, and which of them runs.

A node stands for an operator of the forward pass. It saves tensors for its backward
behind handles (attributes ``_raw_saved_*``), on which hooks may be put: so gathered
parameters are let go of, and gathered again when the backward reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node, saved_tensors_hooks

from fsfunc._torch.dispatch import beneath_all_modes
from fsfunc._torch.internals import storage_key


def sequence_number(node: Node) -> int:
    """Returns the number of an autograd node, in the order of making, per thread."""
    return node._sequence_nr()


def next_sequence_number() -> int:
    """Returns a number that the next node of this thread will have, or will exceed."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]


def current_node() -> Node | None:
    """Returns the autograd node whose backward runs in this thread, if one does."""
    return torch._C._current_autograd_node()


#: Whether the backward that is under way keeps what its nodes saved.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]


def output_shape(node: Node, k: int) -> tuple[int, ...]:
    """Returns the shape of the ``k``-th tensor that a node's operator made."""
    return tuple(node._input_metadata[k].shape)


#: Whether operators take tangents along: torch turns that off in the forward of an
#: ``autograd.Function``, and in inference mode.
takes_tangents: Callable[[], bool] = torch._C._is_fwd_grad_enabled  # type: ignore[attr-defined]


def function_runs() -> bool:
    """Returns whether the forward of an ``autograd.Function`` runs, of ours too.

    Not in inference mode, where nothing is recorded that a Function could hide.
    """
    return not (takes_tangents() or torch.is_inference_mode_enabled())


def hides_tensors() -> str:
    """Returns, in words, what hides captured tensors from autograd here; "" if nothing.

    The forward of an ``autograd.Function`` does, and torch's checkpoint, which runs a
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
    """Returns whether a ``torch.func`` transform that takes gradients is running.

    Also inside the forward of an ``autograd.Function``, where torch takes off the
    transforms' levels: that they forbid hooks on saved tensors still shows there.
    """
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    return "torch.func" in (
        autograd._saved_tensors_hooks_get_disabled_error_message() or ""
    )


def is_function_node(node: Node) -> bool:
    """Returns whether a node is of an ``autograd.Function``."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def graph_nodes(
    roots: Iterable[Node | None], stop: Collection[Node | None]
) -> list[Node]:
    """Returns the nodes reached from ``roots`` without entering ``stop``."""
    visited, nodes, pending = {None, *stop}, [], list(roots)
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        nodes.append(node)
        for next_node, _ in node.next_functions:  # type: ignore[union-attr]
            pending.append(next_node)
    return nodes


def reaches_leaves(root: Tensor, stop: Collection[Node | None]) -> bool:
    """Returns whether ``root`` depends on leaves that require grad, past ``stop``."""
    return any(hasattr(n, "variable") for n in graph_nodes([root.grad_fn], stop))


class _SavedNames(dict[type, list[tuple[str, str]]]):
    """By the type of a node: (handle, value), the names of each attribute it saves."""

    def __missing__(self, kind: type) -> list[tuple[str, str]]:
        handle_names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        value_names = {"_raw_saved_tensors": "saved_tensors"}
        names = self[kind] = [
            (name, value_names.get(name, name[4:])) for name in handle_names
        ]
        return names


_SAVED = _SavedNames()


def _handles(node: Node, name: str) -> Sequence[Any]:
    """Returns the handles of what a node saves under a name."""
    handles = getattr(node, name)
    return handles if isinstance(handles, (tuple, list)) else (handles,)


def saved_tensors_hooked() -> bool:
    """Returns whether ``saved_tensors_hooks`` are on in this thread."""
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    return autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def outside_saved_tensors_hooks() -> Iterator[None]:
    """Inside, no ``saved_tensors_hooks`` that were on see what autograd saves."""
    if not saved_tensors_hooked():  # torch.func forbids hooks, and these too
        yield
        return
    # Torch asks the innermost hooks alone.
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


class _Inspecting(threading.local):
    """``on`` while saved tensors are read only for torch's check of their versions.

    Hooks may give any tensor then, and need not gather what they stand for.
    """

    on = False


INSPECTING = _Inspecting()


def hook_saved(
    nodes: Iterable[Node],
    storage: int,
    pack: Callable[[Tensor], Any],
    unpack: Callable[[Any], Tensor],
) -> int:
    """Puts hooks on the saved tensors of ``nodes`` that lie in ``storage``.

    Returns how many there were. A tensor under other hooks is left alone: what those
    have saved of it stays.

    Args:
        nodes: the nodes.
        storage: the `storage_key` of the memory.
        pack: is called with each saved tensor; what it returns is saved in its place.
        unpack: returns the tensor again; while ``INSPECTING.on`` any tensor.
    """
    count = 0
    unpack.can_inspect = True  # type: ignore[attr-defined]
    for node in nodes:
        for handle, value in _saved(node):
            if isinstance(value, Tensor) and storage_key(value) == storage:
                try:
                    handle.register_hooks(pack, unpack)
                except RuntimeError as error:
                    if "hooks" not in str(error):
                        raise
                    continue
                count += 1
    return count


def saved_tensors(nodes: Iterable[Node]) -> Iterator[Tensor]:
    """Yields the tensors that ``nodes`` save as they are, without hooks."""
    for node in nodes:
        for _, value in _saved(node):
            if isinstance(value, Tensor):
                yield value


def _saved(node: Node) -> list[tuple[Any, Any]]:
    """Returns what ``node`` saves without hooks: the handle on each, and the data.

    Nothing is unpacked, which would run hooks: they compute a checkpoint again, or
    gather an inner unit's parameters.
    """
    saved = []
    for name, _ in _SAVED[type(node)]:
        # Not by `_handles`: this runs for each node of each unit call.
        handles = getattr(node, name)
        for handle in handles if isinstance(handles, (tuple, list)) else (handles,):
            if handle.unpack_hook is None:
                saved.append((handle, handle.data))
    return saved


def saves_before_filling(node: Node) -> bool:
    """Returns whether a node's operator saves memory before it has filled it."""
    return node.name().startswith("RreluWithNoise") and node._saved_training  # type: ignore[attr-defined]


def saved_handles(nodes: Iterable[Node]) -> list[Any]:
    """Returns handles on the tensors that ``nodes`` save, except those under hooks.

    Raises:
        RuntimeError: one was changed in place since it was saved.
    """
    all_handles = []
    for node in nodes:
        handles = [handle for handle, x in _saved(node) if isinstance(x, Tensor)]
        # To read the attribute is to have torch check the version.
        if handles:
            for _, name in _SAVED[type(node)]:
                getattr(node, name)
        all_handles += handles
    return all_handles


def saved_norms(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns a norm and a weighted sum of saved values; None if they say nothing.

    Such are states of generators, and of cuDNN, which an operator may save unfilled.
    """
    if x.layout != torch.strided or isinstance(x, FakeTensor):
        return None
    # Without modes of functions too, which would take this for the unit's own work.
    with beneath_all_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        floats = x.is_floating_point() and x.itemsize > 1
        if not floats and (x.dtype == torch.uint8 or x.numel() <= 2):
            return None
        norm = torch.linalg.vector_norm(x := x if floats else x.float())
        # Another sign, or order, of elements changes this sum, and not the norm.
        for n in reversed(x.shape):
            x = x @ torch.arange(n, device=x.device).cos().to(x.dtype)
        return norm, x


def norms_are_near(norms: tuple[Tensor, Tensor] | None, x: Tensor) -> Tensor | None:
    """Returns whether ``norms`` are near the `saved_norms` of ``x``, as kernels round.

    The answer is a tensor on the device of ``x``, for which nothing waits; None where
    nothing can be compared.
    """
    if norms is None or (norms_now := saved_norms(x)) is None:
        return None
    with beneath_all_modes(), torch._C.DisableTorchFunction():
        near = torch.isclose(norms_now[0], norms[0], rtol=1e-3, equal_nan=True)
        slack = 1e-2 * norms[0] + 1e-3 * norms[1].abs()
        return near & ~((norms_now[1] - norms[1]).abs() > slack)


def all_true(answers: Sequence[Tensor]) -> bool:
    """Returns whether all of these 0-dim tensors are true; waits once a device."""
    with beneath_all_modes(), torch._C.DisableTorchFunction():
        by_device: dict[torch.device, list[Tensor]] = {}
        for x in answers:
            by_device.setdefault(x.device, []).append(x)
        return all(bool(torch.stack(each).all()) for each in by_device.values())


def forbids_hooks(error: RuntimeError) -> bool:
    """Returns whether a ``torch.func`` transform raised as autograd has hooks on."""
    return "support saved tensor hooks" in str(error)


def hook_residuals(
    nodes: Iterable[Node],
    is_chosen: Callable[[Tensor], bool],
    pack: Callable[[Tensor], Any],
    unpack: Callable[[Any], Tensor],
) -> None:
    """Puts hooks on the saved tensors of ``nodes`` that ``is_chosen`` chooses.

    Left alone is what is under other hooks, and what was changed in place since it was
    saved: the backward must raise for that, and under hooks torch does not check.
    """
    for node in nodes:
        for handle_name, name in _SAVED[type(node)]:
            handles = _handles(node, handle_name)
            # Hooks of ours (`hook_saved`) can be read without their work being done.
            hooks = [
                handle.unpack_hook
                for handle in handles
                if handle.unpack_hook is not None
            ]
            if not all(hasattr(hook, "can_inspect") for hook in hooks):
                continue
            bare = [handle for handle in handles if handle.unpack_hook is None]
            chosen = [
                x for x in bare if isinstance(x.data, Tensor) and is_chosen(x.data)
            ]
            if not chosen:
                continue
            INSPECTING.on = True
            try:
                getattr(node, name)
            except RuntimeError:
                continue
            finally:
                INSPECTING.on = False
            for handle in chosen:
                handle.register_hooks(pack, unpack)
