"""Where the modules of a copy look for their parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Buffers", "Parameters"]


class Parameters(dict):
    """The parameters of one module of a copy, by attribute.

    Args:
        like: the buffer whose dtype they are read in: batch norms take no other.
    """

    def __init__(self, copy: Any, table: Mapping[str, Any], like: str | None):
        super().__init__({k: None if x is None else x.name for k, x in table.items()})
        self.copy_of, self.like = copy, like

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        if name is None:
            return None
        given = self.copy_of.given
        x = given.parameter(name)
        return x if self.like is None else x.to(given.buffers[self.like].dtype)

    def get(self, attribute: str, default: Any = None) -> Any:
        return self[attribute] if attribute in self else default

    def items(self) -> Any:
        # Who lists them wants to know of dtypes and devices: nothing is gathered.
        given = self.copy_of.given
        return [(k, None if n is None else given.leaf(n)) for k, n in super().items()]

    def values(self) -> Any:
        return [x for _, x in self.items()]

    def __setitem__(self, attribute: str, _: Any) -> None:
        raise RuntimeError(
            f"the module's forward sets the parameter {attribute!r}: a parameter "
            "changes by the optimizer alone; compute with another tensor"
        )


class Buffers(dict):
    """The buffers of one module of a copy, by attribute."""

    def __init__(self, copy: Any, table: Mapping[str, Any]):
        super().__init__({k: None if x is None else x.name for k, x in table.items()})
        self.copy_of = copy

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        return None if name is None else self.copy_of.given.buffer(name)

    def get(self, attribute: str, default: Any = None) -> Any:
        return self[attribute] if attribute in self else default

    def items(self) -> Any:
        return [(k, self[k]) for k in self]

    def values(self) -> Any:
        return [self[k] for k in self]

    def __setitem__(self, attribute: str, value: Any) -> None:
        name = super().get(attribute)
        if name is None or value is None:
            raise RuntimeError(
                f"the module's forward registers or removes the buffer {attribute!r}: "
                "register it, with its shape, where the module is made"
            )
        self.copy_of.given.write(name, value)
