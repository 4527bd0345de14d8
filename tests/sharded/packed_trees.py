"""Trees whose leaves are packed again."""

from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.packing import repacked


def repack(t, coordinates):
    """A tree, its leaves packed again where one had lost its buffer."""
    leaves, treedef = tree.flatten(t, is_leaf=is_sharded)
    return tree.unflatten(treedef, leaves) if repacked(leaves, coordinates) else t
