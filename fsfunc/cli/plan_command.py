"""``python -m fsfunc plan``: what a script's step will do, before it runs."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fsfunc import show
from fsfunc.cli.build_scripts import (
    RETURNS,
    Refused,
    build_of,
    plan_of,
    put,
    refusing,
    started,
    write_json,
    writing,
)
from fsfunc.cli.hugging_face import HuggingFaceStep
from fsfunc.comm.launch import make_mesh
from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.comm.traffic import Ledger
from fsfunc.core.frames import title
from fsfunc.planning import hardware as machines
from fsfunc.planning.allocation import fits, needed_bytes
from fsfunc.planning.calibration import measure_hardware
from fsfunc.planning.estimation import Estimate, estimate
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.printing.tables import of_count
from fsfunc.sharded.placements import describe_tensor
from fsfunc.show.estimates import comparison
from fsfunc.show.estimates import estimate as estimate_tables
from fsfunc.testing.step_runs import batch_axes

HF_OPTIONS = "its options follow --: --sequences, --length, --zero, --no-remat"
THIS = "this"  # as a hardware's name: the machine at hand
MESH = "an axis is NAME=SIZE, such as data=1024 or data=128,pipe=8"
ANY = "or, to --search all meshes of so many ranks, their number"


def add_plan(commands: Any) -> None:
    """Adds ``plan`` to argparse's subparsers."""
    about = "what a script's step will do on a mesh of any size, before it runs"
    one = commands.add_parser(
        "plan",
        help=about,
        description=f"Prints {about}: its units, collectives, FLOPs and memory. The "
        f"script defines build(mesh) -> {RETURNS}; it is imported, not run as a "
        "program. What follows -- are its own options.",
        example=[
            "plan examples/train_gpt.py --mesh data=1024 --hardware a100-80",
            "-- --layers 48 --dim 2048 --heads 16",
        ],
    )
    one.set_defaults(run=_run, parser=one, takes_script=True)
    add = one.add_argument
    add(
        "script",
        type=Path,
        nargs="?",
        metavar="SCRIPT",
        help="a Python file with build(mesh)",
    )
    add(
        "--hf",
        type=Path,
        metavar="CONFIG",
        help="in place of a script: the config.json of a Hugging Face language model, "
        f"of which a step is planned; {HF_OPTIONS}",
    )
    add(
        "--mesh",
        required=True,
        action="append",
        type=_mesh,
        metavar="AXES",
        help=f"{MESH}; given again, the script is planned on each; {ANY}",
    )
    names = ", ".join(known.name for known in machines.GIVEN)
    add(
        "--hardware",
        metavar="NAME",
        help=f"estimate the step's time on {names}, on what a JSON file describes, or "
        f'on "{THIS}" machine, measured',
    )
    add("--tokens", type=float, metavar="N", help="of a step, over all ranks")
    add("--attention", metavar="NAME", help="the generation of its kernels: fa2, fa3")
    add("--rank", type=int, metavar="R", help="the rank to show (default: 0)")
    add(
        "--search",
        action="store_true",
        help="with --hf: the stacks of transforms that are fastest there, and fit",
    )
    add("--memory", action="store_true", help="show the memory over the step")
    add("--streams", action="store_true", help="show what the estimate does when")
    add("--png", type=Path, metavar="DIR", help="draw memory and streams there")
    add("--html", type=Path, metavar="PATH", help="write all as a page to hover over")
    add("--trace", type=Path, metavar="PATH", help="write the estimate for a viewer")
    add("--json", type=Path, metavar="PATH", help="write all numbers")


def _mesh(text: str) -> Mesh | int:
    if text.isdecimal() and int(text):
        return int(text)
    return make_mesh(mesh_axes(text), "abstract")


def mesh_axes(text: str) -> dict[str, int]:
    """Returns the axes of a mesh, as an option names them."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not (equals and name.isidentifier() and size.isdecimal() and int(size)):
            raise argparse.ArgumentTypeError(f"{text!r}: {MESH}, got {part.strip()!r}")
        if name in axes:
            raise argparse.ArgumentTypeError(f"{text!r} names the axis {name} twice")
        axes[name] = int(size)
    return axes


def _text(mesh: Mesh | int) -> str:
    if isinstance(mesh, int):
        return str(mesh)
    return ",".join(f"{name}={size}" for name, size in mesh.axes.items())


def _run(options: argparse.Namespace) -> None:
    _check(options)
    machine = _machine(options.hardware)
    seen: list[tuple[Plan, Estimate | None]] = []
    script = options.hf or options.script
    with _builder(options) as build:
        for mesh in options.mesh:
            if isinstance(mesh, int):
                _search(build, mesh, machine)
                continue
            device = "cpu" if machine is None else machine.device
            (found, step), times = plan_of(build, mesh, script, device), None
            tokens, idle = options.tokens, 0
            if isinstance(build, HuggingFaceStep):
                tokens = build.tokens(mesh) if tokens is None else tokens
                idle = build.idle
            if machine is not None:
                with refusing(script):
                    how = {"tokens": tokens, "attention": options.attention}
                    times = estimate(found, machine, **how)
            seen.append((found, times))
            print(heading(found, step, tokens, idle), end="\n\n")
            _show(found, times, machine, options)
            if options.search:
                _search(build, mesh, machine)
    if len(seen) > 1:
        put(comparison(seen))
    if options.json:
        about = {"script": str(script), "arguments": options.passed}
        plans = [facts(found, times, machine) for found, times in seen]
        write_json(options.json, {**about, "plans": plans})


def _search(build: Any, mesh: Mesh | int, machine: Hardware | None) -> None:
    best = build.search(mesh, machine)
    put(best)
    print(f"\nThe fastest, around train_step:\n{best.best.code}")


@contextmanager
def _builder(options: argparse.Namespace) -> Iterator[Any]:
    """The function that makes the step for a mesh: a script's build, or a config's."""
    if options.hf is not None:
        yield HuggingFaceStep(options.hf, options.passed)
        return
    with started(options.script, options.passed):
        yield build_of(options.script)


def _check(options: argparse.Namespace) -> None:
    """Refuses options that contradict each other."""
    if (options.script is None) == (options.hf is None):
        raise Refused("name a SCRIPT with build(mesh), or --hf CONFIG: one of the two")
    if options.search and options.hf is None:
        raise Refused("--search is of a model that --hf names; in Python: ff.search")
    for name in ("streams", "trace", "tokens", "attention", "search"):
        if getattr(options, name) and not options.hardware:
            names = ", ".join(known.name for known in machines.GIVEN)
            raise Refused(
                f"--{name} is of an estimate: say on what, by --hardware ({names})"
            )
    if options.tokens is not None and options.tokens <= 0:
        raise Refused(f"--tokens is above 0: {options.tokens:g}")
    for name in ("trace", "html"):
        if getattr(options, name) and len(options.mesh) > 1:
            raise Refused(f"--{name} writes one plan: give one --mesh")
    for mesh in options.mesh:
        if isinstance(mesh, int):
            if not options.search:
                raise Refused(f"--mesh {mesh} names no axes: {MESH}; {ANY}")
            continue
        if options.rank is not None and not 0 <= options.rank < mesh.size:
            raise Refused(
                f"--rank {options.rank}: the ranks of --mesh {_text(mesh)} are 0 to "
                f"{mesh.size - 1}"
            )
        if options.hardware == THIS and mesh.size > 1:
            raise Refused(
                f"--hardware {THIS} measures one process, which has no links: measure "
                "them by `torchrun --nproc-per-node 2 -m fsfunc hardware --json PATH`, "
                "and give --hardware PATH"
            )


def _machine(name: str | None) -> Hardware | None:
    """The hardware of a name or a file, or this machine."""
    if name is None:
        return None
    if name == THIS:
        return measure_hardware()
    path = Path(name)
    try:
        if path.suffix == ".json" or path.is_file():
            return machines.from_json(path.read_text())
        return machines.named(name)
    except OSError as error:
        raise Refused(f"--hardware {name}: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise Refused(f"--hardware {name}: {error}") from None


def _show(
    plan: Plan,
    times: Estimate | None,
    machine: Hardware | None,
    options: argparse.Namespace,
) -> None:
    """Print, draw and write a plan, as the options say."""
    rank = options.rank
    put(show.plan(plan, rank))
    if times is not None:
        put(estimate_tables(times, plan, machine))
    charts: dict[str, Any] = {}
    if options.memory or options.png:
        charts["memory"] = show.memory(plan, rank, estimate=times)
    if times is not None and (options.streams or options.png):
        ranks = None if rank is None else [plan[rank].rank]
        charts["streams"] = show.streams(times, ranks=ranks)
    for name, chart in charts.items():
        if getattr(options, name):
            put(chart)
        if options.png:
            path = options.png / f"{_text(plan.mesh)},{name}.png"
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                chart.save(path)
    if options.html:
        with writing(options.html):
            show.html(plan, times, machine, path=options.html)
    if options.trace and times is not None:
        with writing(options.trace):
            show.trace(times, options.trace, plan=plan)


def facts(
    plan: Plan, estimate: Estimate | None = None, hardware: Hardware | None = None
) -> dict[str, Any]:
    """A plan, and its estimate if given, as dicts, lists, numbers and names.

    With ``hardware`` also its memory, and whether the plan fits. Bytes and FLOPs are
    of one rank and step, times in seconds. Spans are left out: ``show.trace`` writes
    them.

    >>> from fsfunc.comm.mesh import Mesh
    >>> own = RankPlan(0, 8, {"data": 0}, [], {}, [], [])
    >>> found = facts(Plan(Mesh({"data": 8}, "abstract"), (own,)))
    >>> found["mesh"], found["programs"][0]["alike"], found["peak_bytes"]
    ({'data': 8}, 8, 0)
    """
    found = {
        "mesh": dict(plan.mesh.axes),
        "flops": plan.flops,
        "peak_bytes": plan.peak_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "derived": plan.derived,
        "programs": [_program(own) for own in plan.ranks],
    }
    if estimate is not None:
        times = asdict(replace(estimate, spans=[]))
        found["estimate"] = {name: x for name, x in times.items() if name != "spans"}
        found["estimate"] |= {"low": estimate.low, "high": estimate.high}
    if hardware is not None:
        found["memory"] = hardware.memory
        found["needed_bytes"] = needed_bytes(plan, hardware)
        found["fits"] = fits(plan, hardware)
    return found


def _program(own: RankPlan) -> dict[str, Any]:
    phases = dict.fromkeys(phase for _, phase in own.work)
    return {
        "rank": own.rank,
        "alike": own.alike,
        "coordinates": dict(own.coordinates),
        "flops": own.flops(),
        "flops_by_phase": {phase: own.flops(phase=phase) for phase in phases},
        "peak_bytes": own.peak_bytes,
        "peak_by_kind": own.peak,
        "bytes_sent": own.ledger.bytes(),
        "collectives": _collectives(own.records),
    }


def _collectives(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The count and bytes of each op over some axes in one phase."""
    found: dict[tuple[str, tuple[str, ...], str], list[Record]] = defaultdict(list)
    for record in records:
        found[record.op, record.axis, record.phase].append(record)
    return [
        {
            "op": op,
            "axes": list(axes),
            "phase": phase,
            "count": len(alike),
            "bytes": Ledger(alike).bytes(),
        }
        for (op, axes, phase), alike in found.items()
    ]


def heading(
    plan: Plan, step: Any, tokens: float | None = None, idle: int | None = 0
) -> str:
    """The step of a plan, in lines.

    Args:
        step: what was planned, in its transforms.
        tokens: of a step over all ranks; None: not known.
        idle: the parameters that a token does not pass, being of experts that it is
            not sent to; None: not known.
    """
    count = parameter_count(plan)
    lines = {"step": title(step), "batch": _batch(plan, step)}
    if tokens is not None:
        lines["tokens"] = f"{tokens:,.0f} a step, over all ranks"
    lines["parameters"] = of_count(count)
    if idle:
        lines["parameters"] += f" in all, {of_count(count - idle)} active per token"
    return "\n".join(f"{name:<12}{said}" for name, said in lines.items() if said)


def parameter_count(plan: Plan) -> int:
    """The elements of all parameters, whole."""
    return sum(
        math.prod(leaf.shape)
        for leaf in plan.ranks[0].leaves
        if leaf.kind == "parameters"
    )


def _batch(plan: Plan, step: Any) -> str:
    """The leaves of a rank's batch, and how many ranks have one of their own."""
    leaves = [x for x in plan.ranks[0].leaves if x.path.partition("/")[0] == "batch"]
    said = ", ".join(map(_leaf, leaves))
    ranks = plan.mesh.axis_size(batch_axes(step, plan.mesh))
    return f"{said} on each of {ranks} ranks" if said and ranks > 1 else said


def _leaf(leaf: PlannedLeaf) -> str:
    return describe_tensor(leaf.shape, leaf.dtype, leaf.path.partition("/")[2])
