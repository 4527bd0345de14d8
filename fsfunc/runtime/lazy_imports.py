"""Names of a package that are imported when they are first asked for.

``fsfunc`` and ``fsfunc.testing`` have some of theirs so, and import in less time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the ``__getattr__`` and ``__dir__`` of a package with such names.

    They are made here, so that ``help`` does not list them with the package's
    functions.

    Args:
        package: its name.
        names: by name the module that has it; or that is it, if it ends so.

    >>> get, _ = lazy_names("fsfunc.runtime", {"spooled": "fsfunc.runtime.no_module"})
    >>> get("spoiled")
    Traceback (most recent call last):
    AttributeError: module 'fsfunc.runtime' has no attribute 'spoiled'
    """
    module = sys.modules[package]

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source = import_module(names[name])
        is_module = names[name].endswith(f".{name}")
        value = source if is_module else getattr(source, name)
        vars(module)[name] = value  # this function is not called for it again
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(module), *names})

    return __getattr__, __dir__
