"""Names for the types of trees, which Python's type system cannot spell out.

A tree is any nesting of dicts, lists, tuples, named tuples and registered classes, so
a checker can know no more of it than that it is one: as in JAX, the alias tells the
reader, and stands for ``Any``. A function that returns a tree of the structure that it
was given says so with a ``TypeVar`` instead.
"""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""A tree of leaves: nested containers, or one leaf alone."""

Leaf: TypeAlias = Any
"""One leaf of a tree: a tensor, a ``Sharded``, a number, or any other value."""

Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of a call, each a tree."""

Keywords: TypeAlias = dict[str, Any]
"""The keyword arguments of a call, each a tree."""
