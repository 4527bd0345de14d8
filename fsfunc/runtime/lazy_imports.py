"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the ``__getattr__`` and ``__dir__`` of a package with such names.

    Made here and not there, they do not stand among its functions in ``help``.

    Args:
        package: its name.
        names: those of the modules that have them, or are them.

    >>> get, _ = later_names("fsfunc.runtime", {"spooled": "fsfunc.runtime.no_module"})
    >>> get("spoiled")
    Traceback (most recent call last):
    AttributeError: module 'fsfunc.runtime' has no attribute 'spoiled'
    """
    module = sys.modules[package]

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(names[name])
        itself = names[name].endswith(f".{name}")
        value = home if itself else getattr(home, name)
        vars(module)[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(module), *names})

    return __getattr__, __dir__
