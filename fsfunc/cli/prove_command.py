"""``python -m fsfunc prove``: a script's step on a mesh, and the plain one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.cli.build_scripts import (
    RETURNS,
    Refused,
    build_of,
    checked,
    put,
    refusing,
    started,
)
from fsfunc.cli.plan_command import MESH, mesh_axes
from fsfunc.comm.launch import local_batch, make_mesh, spmd
from fsfunc.comm.mesh import Mesh
from fsfunc.state.initialization import init_state
from fsfunc.testing.finite_field import NoExactRule
from fsfunc.testing.proofs import prove
from fsfunc.testing.step_runs import batch_axes


def add_prove(commands: Any) -> None:
    """Adds ``prove`` to argparse's subparsers."""
    about = "that a script's step on a mesh computes what its plain step does"
    one = commands.add_parser(
        "prove",
        help=about,
        description=f"Proves {about}, in exact arithmetic on simulated ranks. The "
        f"script defines build(mesh) -> {RETURNS}; build(None) returns the plain step "
        "of one device, and the batch of all ranks, whose rows differ. What follows -- "
        "are its own options: small models, as each rank runs here.",
        example=[
            "prove examples/train_gpt.py --mesh data=2,pipe=2",
            "-- --remat --layers 2 --dim 16 --heads 2 --seq 8 --batch 8",
        ],
    )
    one.set_defaults(run=_run, parser=one, takes_script=True)
    add = one.add_argument
    add("script", type=Path, metavar="SCRIPT", help="a Python file with build(mesh)")
    add("--mesh", required=True, type=mesh_axes, metavar="AXES", help=MESH)
    add("--calls", type=int, default=2, metavar="N", help="steps to take (default: 2)")
    add(
        "--draws",
        type=int,
        default=2,
        metavar="N",
        help="of all numbers, at least (default: 2)",
    )


def _run(options: argparse.Namespace) -> None:
    script, mesh = options.script, make_mesh(options.mesh, "simulated")
    with started(script, options.passed):
        build = build_of(script)
        with _refusing(script):
            one, init, optimizer, batch, _ = checked(build(None), script)
            step, _, _, own, layouts = checked(build(mesh), script)
            state = init_state(one, init, optimizer, batch)
            axes = batch_axes(step, mesh)
            _check_rows(script, mesh, axes, batch, own)
            put(
                prove(
                    one, step, mesh, state, batch, axis=axes, layouts=layouts,
                    calls=options.calls, draws=options.draws,
                    goes_on=lambda out: out[0],
                )
            )  # fmt: skip


@contextmanager
def _refusing(script: Path) -> Iterator[None]:
    """Shows what is not proven without a traceback."""
    try:
        with refusing(script):
            yield
    except (AssertionError, NoExactRule) as error:
        raise Refused(str(error)) from error


def _check_rows(
    script: Path, mesh: Mesh, axes: tuple[str, ...], batch: Any, own: Any
) -> None:
    """Refuses batches of which ranks are given something else than rows."""

    def cut() -> Any:
        return local_batch(batch, mesh, axes) if axes else batch

    given = spmd(cut, mesh)()[0]
    shapes = [
        [x.shape for x in tree.leaves(each) if isinstance(x, Tensor)]
        for each in (given, own)
    ]
    if shapes[0] != shapes[1]:
        said = [", ".join(str([*shape]) for shape in each) for each in shapes]
        raise Refused(
            f"{script}: rows of build(None)'s batch, cut over {mesh.axes}, are "
            f"{said[0]} for a rank, and build(mesh) returns a batch of {said[1]}: "
            "prove gives ranks rows, and nothing else"
        )
    if _alike(batch):
        raise Refused(
            f"{script}: all rows of build(None)'s batch are alike, so that none could "
            "be told from another: draw its integers (floats are drawn anew)"
        )


def _alike(batch: Any) -> bool:
    """Returns whether no tensor has floats, or integers that differ from row to row."""
    tensors = [x for x in tree.leaves(batch) if isinstance(x, Tensor) and x.ndim]
    if any(x.is_floating_point() for x in tensors):
        return False
    return all(torch.equal(x, x[:1].expand_as(x)) for x in tensors)
