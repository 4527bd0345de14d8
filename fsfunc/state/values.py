"""Checks that a mesh and its tensors have values, to save, to load or to give away."""

from __future__ import annotations

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.mesh import Here, Mesh, maybe_here
from fsfunc.sharded.layout import Coordinates
from fsfunc.sharded.leaf import Sharded


def mesh_for(verb: str) -> Here | None:
    """Returns the rank and mesh in sight, to act on; None without a mesh.

    Raises:
        RuntimeError: the mesh holds no values of its own.
    """
    here = maybe_here()
    if here is not None and here.mesh.backend in ("abstract", "vmap"):
        raise RuntimeError(
            f"cannot {verb} on {here.mesh}, which holds no values of its own: {verb} "
            "on a simulated mesh or on processes"
        )
    return here


def check_real(path: str, part: Tensor, verb: str) -> None:
    """Raises where a tensor has no values to save, load or give away."""
    if isinstance(part, _torch.FakeTensor) or part.device.type == "meta":
        reason = "on the meta device" if part.device.type == "meta" else "fake"
        raise ValueError(
            f"cannot {verb} {path!r}: it is {reason} and has no values; give a state "
            "made by init_state on a simulated mesh or on processes"
        )
    if part.layout != torch.strided or part.is_quantized or _torch.is_wrapped(part):
        raise ValueError(
            f"cannot {verb} {path!r}, a tensor of layout {part.layout}, quantized or "
            "under a torch.func transform: give a plain, dense one"
        )


def check_mesh(leaf: Sharded, here: Here | None, verb: str) -> None:
    """Raises if a leaf lies on another mesh than that in sight.

    Its layout names the axes and their sizes. A packed buffer also knows where on them
    its rank is: on a mesh with the same axes in another order that is another place.
    """
    axes, layout = {} if here is None else here.mesh.axes, leaf.layout
    for axis, size in layout.sizes.items():
        if axes.get(axis) != size:
            raise ValueError(
                f"cannot {verb} {layout}: it is laid out over {axis!r} of size {size}, "
                f"and this mesh has {dict(axes)}; {verb} it inside spmd(fn, mesh) on "
                "its own mesh"
            )
    if here is None:
        return
    coordinates = here.mesh.coordinates(here.rank)
    if not lies_on(leaf, here.mesh, coordinates):
        buffer_coordinates = {} if leaf.packed is None else leaf.packed.coordinates
        raise ValueError(
            f"cannot {verb} {layout} on {here.mesh}: the part of this rank is that at "
            f"{dict(buffer_coordinates)}, and here the rank is at {coordinates}; "
            f"{verb} it inside spmd(fn, mesh) on its own mesh, or move it, by "
            "ff.place(fn, t, ..., on=its_mesh)"
        )


def lies_on(leaf: Sharded, mesh: Mesh, coordinates: Coordinates) -> bool:
    """Returns whether a leaf may lie on a mesh, at a rank's coordinates.

    A leaf in no buffer does not say where its rank is: only axes and sizes are compared
    then.
    """
    fits = all(mesh.axes.get(axis) == n for axis, n in leaf.layout.sizes.items())
    if leaf.packed is not None:
        buffer_coordinates = leaf.packed.coordinates.items()
        fits = fits and all(coordinates.get(a) == i for a, i in buffer_coordinates)
    return fits
