"""``python -m fsfunc prove``: that a step on a mesh is the plain one.

It calls the script's ``build`` twice, without a mesh and with one, and hands both steps
to `testing.proofs.prove`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.cli.build_scripts import (
    RETURNS,
    Refused,
    check_build_values,
    load_build,
    print_table,
    refusing_errors,
    script_arguments,
)
from fsfunc.cli.parsers import Commands
from fsfunc.cli.plan_command import MESH_HELP, parse_mesh_axes
from fsfunc.comm.launch import local_batch, make_mesh, spmd
from fsfunc.comm.mesh import Mesh
from fsfunc.state.initialization import init_state
from fsfunc.testing.finite_field import NoExactRule
from fsfunc.testing.proofs import prove
from fsfunc.testing.step_runs import batch_axes
from fsfunc.tree.types import PyTree


def add_prove(commands: Commands) -> None:
    """Adds ``prove`` to argparse's subparsers."""
    about = "that a script's step on a mesh computes what its plain step does"
    parser = commands.add_parser(
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
    parser.set_defaults(run=_run_prove, parser=parser, takes_script=True)
    add = parser.add_argument
    add("script", type=Path, metavar="SCRIPT", help="a Python file with build(mesh)")
    add("--mesh", required=True, type=parse_mesh_axes, metavar="AXES", help=MESH_HELP)
    add("--calls", type=int, default=2, metavar="N", help="steps to take (default: 2)")
    add(
        "--draws",
        type=int,
        default=2,
        metavar="N",
        help="of all numbers, at least (default: 2)",
    )


def _run_prove(options: argparse.Namespace) -> None:
    script, mesh = options.script, make_mesh(options.mesh, "simulated")
    with script_arguments(script, options.passed):
        build = load_build(script)
        with _refusing_unproven(script):
            plain_step, init, optimizer, batch, _ = check_build_values(
                build(None), script
            )
            step, _, _, local, layouts = check_build_values(build(mesh), script)
            state = init_state(plain_step, init, optimizer, batch)
            axes = batch_axes(step, mesh)
            _check_rows(script, mesh, axes, batch, local)
            print_table(
                prove(
                    plain_step, step, mesh, state, batch, axis=axes, layouts=layouts,
                    calls=options.calls, draws=options.draws,
                    goes_on=lambda out: out[0],
                )
            )  # fmt: skip


@contextmanager
def _refusing_unproven(script: Path) -> Iterator[None]:
    """Shows that a step is not proven without a traceback."""
    try:
        with refusing_errors(script):
            yield
    except (AssertionError, NoExactRule) as error:
        raise Refused(str(error)) from error


def _check_rows(
    script: Path, mesh: Mesh, axes: tuple[str, ...], batch: PyTree, local: PyTree
) -> None:
    """Refuses batches of which ranks get something else than rows.

    Args:
        batch: of all ranks, by build(None).
        local: of one rank, by build(mesh).
    """

    def cut() -> PyTree:
        return local_batch(batch, mesh, axes) if axes else batch

    rows = spmd(cut, mesh)()[0]
    shapes = [
        [x.shape for x in tree.leaves(each) if isinstance(x, Tensor)]
        for each in (rows, local)
    ]
    if shapes[0] != shapes[1]:
        texts = [", ".join(str([*shape]) for shape in each) for each in shapes]
        raise Refused(
            f"{script}: rows of build(None)'s batch, cut over {mesh.axes}, are "
            f"{texts[0]} for a rank, and build(mesh) returns a batch of {texts[1]}: "
            "prove gives ranks rows, and nothing else"
        )
    if _rows_are_alike(batch):
        raise Refused(
            f"{script}: all rows of build(None)'s batch are alike, so that none could "
            "be told from another: draw its integers (floats are drawn anew)"
        )


def _rows_are_alike(batch: PyTree) -> bool:
    """Returns whether no tensor has floats, or integers that differ from row to row."""
    tensors = [x for x in tree.leaves(batch) if isinstance(x, Tensor) and x.ndim]
    if any(x.is_floating_point() for x in tensors):
        return False
    return all(torch.equal(x, x[:1].expand_as(x)) for x in tensors)
