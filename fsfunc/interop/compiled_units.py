"""Units of a module as functions that ``jit`` compiles.

What runs a module's unit plainly, copies whose tables look up tensors, is nothing that
a compiler takes. It gets a copy without data, which torch's ``functional_call`` runs on
the call's tensors, by names within the unit: equal layers share what is compiled.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsfunc import _torch
from fsfunc.interop.attributes import Attributes
from fsfunc.interop.stubs import Absent, hook_tables, without_caches

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiled_unit(
    module: nn.Module, copied: list[Any], who: str, compile: Compile
) -> Callable[..., Any]:
    """The function of a unit, ``(params, buffers, *args, **keywords)``, compiled.

    Args:
        module: a copy of the unit's, with placeholders of its tensors, which is kept.
        copied: what was copied with it.
        who: what messages call it.

    Raises:
        ValueError: it writes buffers as it runs.
    """
    for path, m in module.named_modules():
        if m.training and getattr(m, "track_running_stats", False):
            raise ValueError(
                f"{who} holds {path or type(m).__name__!r}, which writes running "
                f"statistics: {_LEFT_OUT}, or call eval() of it before from_module"
            )
    without_caches(copied)
    for hooks in _torch.hook_tables(module, before=False):
        hooks.clear()  # they run on the unit's output, outside it
    names = _with_meta_tensors(module)
    attributes = Attributes(module, copied, (), who)
    like = module.state_dict(keep_vars=True)
    kind = type(module), *((k, x.shape, x.dtype) for k, x in like.items())
    # No guard looks at hooks, and what they hold is not for a cache to keep.
    make = _caller_of.__wrapped__ if _has_hooks(module) else _caller_of
    run = compile(make(kind))

    def called(params: Any, buffers: Any, /, *args: Any, **keywords: Any) -> Any:
        given = {**params, **buffers}
        tensors = {here: given[name] for here, name in names.items()}
        try:
            return run(module, tensors, args, keywords)
        finally:
            if (left := attributes.restored(False)) is not None:
                raise RuntimeError(left)

    return called


def refuse_compiled_unit(who: str, why: str) -> None:
    """Raises for a unit that ``jit`` is to compile, and cannot."""
    raise ValueError(f"{who} {why}: {_LEFT_OUT}")


_LEFT_OUT = "jit compiles no such unit; leave it out, jit(..., only=other names)"


@functools.cache
def _caller_of(kind: tuple[Any, ...]) -> Callable[..., Any]:
    """A caller of modules of one class and shapes, with code of its own.

    The compiler keeps what it makes of a code, a few at most.
    """
    code = _called.__code__.replace(co_name=kind[0].__name__)
    return types.FunctionType(code, _called.__globals__)


def _has_hooks(module: nn.Module) -> bool:
    """True if a module, or one in it, has hooks."""
    return any(table for m in module.modules() for table in hook_tables(m))


def _called(module: nn.Module, tensors: Any, args: Any, keywords: Any) -> Any:
    return torch.func.functional_call(module, tensors, args, keywords)


def _with_meta_tensors(module: nn.Module) -> dict[str, str]:
    """The names in the whole of a module's tensors, by their names in it.

    Its placeholders become tensors without data, tied ones one.
    """
    made: dict[str, Tensor] = {}
    names = {}
    for path, m in module.named_modules():
        parameters, buffers = _torch.tables(m)
        for table in (parameters, buffers):
            for name, x in table.items():
                if not isinstance(x, Absent):
                    continue
                if x.name not in made:
                    empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
                    if table is parameters:
                        empty = nn.Parameter(empty, requires_grad=False)
                    made[x.name] = empty
                    names[f"{path}.{name}" if path else name] = x.name
                table[name] = made[x.name]
    return names
