"""Trees of values: flattened, mapped, named by path and compared.

functions.py nodes.py   flatten, map, paths; registered classes
structure.py        how two trees differ; tensors hidden in leaves
types.py            PyTree and Leaf, for annotations
"""

from typing import TYPE_CHECKING

from fsfunc.tree.functions import (
    are_shown,
    check_same_structure,
    fitted,
    flatten,
    flatten_with_paths,
    leaves,
    map,
    map_with_path,
    paths,
    shown,
    unflatten,
)
from fsfunc.tree.nodes import register_node
from fsfunc.tree.structure import TreeDef, TreeMismatch, paths_of
from fsfunc.tree.types import Leaf, PyTree

# What a checker takes for public; at run time `help` and `*` go by the names there are.
if TYPE_CHECKING:
    __all__ = [
        "are_shown",
        "check_same_structure",
        "fitted",
        "flatten",
        "flatten_with_paths",
        "Leaf",
        "leaves",
        "map",
        "map_with_path",
        "paths",
        "paths_of",
        "PyTree",
        "register_node",
        "shown",
        "TreeDef",
        "TreeMismatch",
        "unflatten",
    ]
