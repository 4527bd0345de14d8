"""What stands in a copied module where a parameter or a buffer will be."""

from __future__ import annotations

from typing import Any

__all__ = ["Absent"]


class Absent:
    """The place of a tensor: who reads it reads what no call has put there."""

    __slots__ = ("name", "shape", "dtype", "__weakref__")

    def __init__(self, name: str, shape: Any, dtype: Any):
        self.name, self.shape, self.dtype = name, shape, dtype

    def __repr__(self) -> str:
        return f"Absent({self.name!r})"

    def __copy__(self) -> Absent:
        return self

    def __deepcopy__(self, _: Any) -> Absent:
        return self

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self._refuse()

    def _refuse(self) -> Any:
        raise RuntimeError(
            f"{self.name!r} is read where it is not: it is what the forward of a unit "
            "sets on its module, or a parameter that is kept in a list. Return the "
            "one, and read the other as the attribute that registers it; or make a "
            "unit of a module around both"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given += [y for x in given if isinstance(x, list | tuple) for y in x]
        return next(x for x in given if isinstance(x, Absent))._refuse()


def _arithmetic(name: str) -> Any:
    def method(self: Absent, *_: Any) -> Any:
        return self._refuse()

    return method


for _name in "add sub mul truediv matmul pow radd rsub rmul rtruediv rmatmul".split():
    setattr(Absent, f"__{_name}__", _arithmetic(_name))
for _name in "getitem setitem len iter neg bool float int".split():
    setattr(Absent, f"__{_name}__", _arithmetic(_name))
