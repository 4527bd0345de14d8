"""Hooks that a forward hangs on modules within units, to see what they return.

A unit runs on a copy of its own, where they do not hang: what they would have seen
comes out of the unit, and they run on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fsfunc import _torch

__all__ = ["Hook", "LateHooks", "Seen", "run_late", "shown_by"]

Hook = Callable[[nn.Module, Any, Any], Any]
Seen = list[tuple[str, Any, Any]]  # which module, what it was given, what it returned


class LateHooks:
    """The hooks below a module, and which of them are new.

    Looked at before every call of a unit: by one C function where there are none.
    """

    def __init__(self, m: nn.Module):
        self._modules = [(path, inner) for path, inner in m.named_modules() if path]
        both = [_tables(inner) for _, inner in self._modules]
        self._tables = [table for tables in both for table in tables]
        self._sizes = list(map(len, self._tables))
        self._before = [[set(table) for table in tables] for tables in both]

    def found(self) -> dict[str, list[Hook]]:
        """Forward hooks on the modules, by path, that were not there at first.

        Raises:
            RuntimeError: hooks of another kind.
        """
        found: dict[str, list[Hook]] = {}
        if list(map(len, self._tables)) == self._sizes:
            return found
        for (path, inner), before in zip(self._modules, self._before, strict=True):
            new = [
                [hook for key, hook in table.items() if key not in known]
                for table, known in zip(_tables(inner), before, strict=True)
            ]
            if any(new[1:]):
                raise RuntimeError(
                    f"the module hangs a hook on {path!r} within a unit as it runs, "
                    "which the unit alone could run: hang it there before from_module, "
                    "or make a unit of what is around both"
                )
            if new[0]:
                found[path] = new[0]
        return found


def _tables(m: nn.Module) -> list[dict[Any, Any]]:
    """Of forward hooks first."""
    after, before = (_torch.hook_tables(m, before=b) for b in (False, True))
    return [*after, *before]


def shown_by(m: nn.Module, paths: Sequence[str]) -> Seen:
    """A list that fills as the modules of these paths run."""
    seen: Seen = []
    for path in paths:

        def note(_: Any, given: Any, out: Any, path: str = path) -> None:
            seen.append((path, given, out))

        m.get_submodule(path).register_forward_hook(note)
    return seen


def run_late(m: nn.Module, hooks: Sequence[Hook], given: Any, out: Any) -> None:
    """Runs hooks on what a module was given and returned, somewhere else.

    Raises:
        RuntimeError: one changes what the module returned, which has gone on since.
    """
    for hook in hooks:
        if hook(m, given, out) is not None:
            raise RuntimeError(
                f"a hook that was hung on a {type(m).__name__} within a unit, as the "
                "module ran, changes what it returns: hang it there before from_module"
            )
