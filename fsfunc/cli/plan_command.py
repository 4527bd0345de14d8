"""``python -m fsfunc plan``: what a script's step will do, before it runs.

For each mesh it plans the step of a script, or of a Hugging Face model; prints the plan
and, with --hardware, an estimate of its time; and draws and writes what options ask.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from fsfunc import show
from fsfunc.cli.build_scripts import (
    RETURNS,
    Refused,
    load_build,
    plan_build,
    print_table,
    refusing_errors,
    reporting_write,
    script_arguments,
    write_json,
)
from fsfunc.cli.hugging_face import HuggingFaceStep
from fsfunc.cli.parsers import Commands
from fsfunc.comm.launch import make_mesh
from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.comm.traffic import Ledger
from fsfunc.core.frames import title
from fsfunc.planning import hardware as machines
from fsfunc.planning.allocation import fits
from fsfunc.planning.attention_kernels import find_generation
from fsfunc.planning.calibration import measure_hardware
from fsfunc.planning.estimation import Estimate, estimate
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.printing.tables import of_count
from fsfunc.sharded.placements import describe_tensor
from fsfunc.show.estimates import comparison
from fsfunc.show.estimates import estimate as estimate_tables
from fsfunc.testing.step_runs import batch_axes

HF_OPTIONS = (
    "its options follow --, and -- --help lists them. Axes are data, node (replicas), "
    "model (split layers) and pipe (stages), or named by its options"
)
THIS_MACHINE = "this"  # as a hardware's name: the machine at hand
MESH_HELP = "an axis is NAME=SIZE, such as data=1024 or data=128,pipe=8"
ANY_MESH_HELP = "or, to --search all meshes of so many ranks, their number"


def add_plan(commands: Commands) -> None:
    """Adds ``plan`` to argparse's subparsers."""
    about = "what a script's step will do on a mesh of any size, before it runs"
    parser = commands.add_parser(
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
    parser.set_defaults(run=_run_plan, parser=parser, takes_script=True)
    _add_step_options(parser.add_argument)
    _add_estimate_options(parser.add_argument)
    _add_output_options(parser.add_argument)


def _add_step_options(add: Callable[..., object]) -> None:
    """Adds what is planned, and on which meshes, to a parser's ``add_argument``."""
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
        help="in place of a script: the config.json of a Hugging Face model, "
        f"of which a step is planned; {HF_OPTIONS}",
    )
    add(
        "--mesh",
        required=True,
        action="append",
        type=_parse_mesh,
        metavar="AXES",
        help=f"{MESH_HELP}; given again, the script is planned on each; "
        f"{ANY_MESH_HELP}",
    )


def _add_estimate_options(add: Callable[..., object]) -> None:
    """Adds what a step's time is estimated from."""
    names = ", ".join(known.name for known in machines.GIVEN)
    add(
        "--hardware",
        metavar="NAME",
        help=f"estimate the step's time on {names}, on what a JSON file describes, or "
        f'on "{THIS_MACHINE}" machine, measured',
    )
    add("--tokens", type=float, metavar="N", help="of a step, over all ranks")
    add(
        "--attention",
        metavar="WORD",
        help="the generation of FlashAttention: 1, 2 or 3; or the version of torch, or "
        "the year, that says which one it was (default: the hardware's likeliest)",
    )
    add(
        "--search",
        action="store_true",
        help="with --hf: the stacks of transforms that are fastest there, and fit",
    )


def _add_output_options(add: Callable[..., object]) -> None:
    """Adds what of a plan is shown, and where it is written."""
    add("--rank", type=int, metavar="R", help="the rank to show (default: 0)")
    add("--memory", action="store_true", help="show the memory over the step")
    add("--streams", action="store_true", help="show what the estimate does when")
    add("--png", type=Path, metavar="DIR", help="draw memory and streams there")
    add("--html", type=Path, metavar="PATH", help="write all as a page to hover over")
    add("--trace", type=Path, metavar="PATH", help="write the estimate for a viewer")
    add("--json", type=Path, metavar="PATH", help="write all numbers")


def _parse_mesh(text: str) -> Mesh | int:
    """Parses --mesh: axes, or a number of ranks for --search."""
    if text.isdecimal() and int(text):
        return int(text)
    return make_mesh(parse_mesh_axes(text), "abstract")


def parse_mesh_axes(text: str) -> dict[str, int]:
    """Returns the axes of a mesh, as an option names them."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not (equals and name.isidentifier() and size.isdecimal() and int(size)):
            raise argparse.ArgumentTypeError(
                f"{text!r}: {MESH_HELP}, got {part.strip()!r}"
            )
        if name in axes:
            raise argparse.ArgumentTypeError(f"{text!r} names the axis {name} twice")
        axes[name] = int(size)
    return axes


def _mesh_text(mesh: Mesh | int) -> str:
    if isinstance(mesh, int):
        return str(mesh)
    return ",".join(f"{name}={size}" for name, size in mesh.axes.items())


def _run_plan(options: argparse.Namespace) -> None:
    _check_options(options)
    machine = _load_hardware(options.hardware)
    attention = _attention_of(options.attention, machine)
    plans: list[tuple[Plan, Estimate | None]] = []
    models: list[ModelFacts | None] = []
    script = options.hf or options.script
    with _open_builder(options) as build:
        for mesh in options.mesh:
            if isinstance(mesh, int):
                _run_search(build, mesh, machine, attention)
                continue
            device = "cpu" if machine is None else machine.device
            is_model = isinstance(build, HuggingFaceStep)
            with build.refusing_errors() if is_model else nullcontext():
                plan, step = plan_build(build, mesh, script, device)
            times, tokens, model = None, options.tokens, None
            if is_model:
                tokens = build.tokens(mesh) if tokens is None else tokens
                model = describe_model(build, mesh)
            if machine is not None:
                with refusing_errors(script):
                    times = _estimate(plan, machine, tokens, attention, model)
            plans.append((plan, times))
            models.append(model)
            print(format_heading(plan, step, tokens, model), end="\n\n")
            _show_plan(plan, times, machine, options)
            if options.search:
                _run_search(build, mesh, machine, attention)
    if len(plans) > 1:
        print_table(comparison(plans))
    if options.json:
        about = {"script": str(script), "arguments": options.passed}
        facts = [plan_facts(plan, times, machine) for plan, times in plans]
        for plan, model in zip(facts, models, strict=True):
            plan |= {} if model is None else {"model": model._asdict()}
        write_json(options.json, {**about, "plans": facts})


class ModelFacts(NamedTuple):
    """What is said of a model beside its plan.

    Args:
        lines: what the model, its loss and the axes of the mesh are, by their titles.
        parameters: the number of elements of all parameters.
        active: how many of them a token passes, of a mixture of experts those that it
            is sent to; None if unknown.
    """

    lines: Mapping[str, str]
    parameters: int
    active: int | None


def describe_model(build: HuggingFaceStep, mesh: Mesh) -> ModelFacts:
    """Returns what is said of a model beside its plan on a mesh."""
    inactive = build.inactive_parameters
    active = None if inactive is None else build.parameters - inactive
    return ModelFacts(build.describe(mesh), build.parameters, active)


def _estimate(
    plan: Plan,
    machine: Hardware,
    tokens: float | None,
    attention: str | None,
    model: ModelFacts | None,
) -> Estimate:
    """Estimates a plan, with the rule of thumb of what a token passes, if known."""
    active = None if model is None else model.active
    known = {"tokens": tokens, "attention": attention, "active": active}
    times = estimate(plan, machine, **known)
    if model is not None and model.active is None:
        times = replace(times, rule_of_thumb=None)
    return times


def _attention_of(word: str | None, machine: Hardware | None) -> str | None:
    """Returns the generation of attention's kernels that --attention names."""
    if word is None or machine is None:
        return None
    try:
        return find_generation(word, machine)
    except ValueError as error:
        raise Refused(f"--attention {word}: {error}") from None


def _run_search(
    build: HuggingFaceStep,
    mesh: Mesh | int,
    machine: Hardware | None,
    attention: str | None,
) -> None:
    """Prints the search of a model's step, and the code of the fastest stack."""
    # `_check_options` has seen to it that there is hardware.
    if attention is not None:  # a search takes the first generation of the hardware
        shares: Any = machine.attention  # type: ignore[union-attr]
        only = {attention: shares[attention]} | dict(shares)
        machine = machines.replace(machine, attention=only)  # type: ignore[arg-type]
    results = build.search(mesh, machine)  # type: ignore[arg-type]
    print_table(results)
    print(f"\nThe fastest, around train_step:\n{results.best.code}")


@contextmanager
def _open_builder(options: argparse.Namespace) -> Iterator[Any]:
    """Yields the function that makes a step for a mesh: a script's, or a config's."""
    if options.hf is not None:
        yield HuggingFaceStep(options.hf, options.passed)
        return
    with script_arguments(options.script, options.passed):
        yield load_build(options.script)


def _check_options(options: argparse.Namespace) -> None:
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
                raise Refused(
                    f"--mesh {mesh} names no axes: {MESH_HELP}; {ANY_MESH_HELP}"
                )
            continue
        if options.rank is not None and not 0 <= options.rank < mesh.size:
            raise Refused(
                f"--rank {options.rank}: the ranks of --mesh {_mesh_text(mesh)} are "
                f"0 to {mesh.size - 1}"
            )
        if options.hardware == THIS_MACHINE and mesh.size > 1:
            raise Refused(
                f"--hardware {THIS_MACHINE} measures one process, which has no links: "
                "measure them by `torchrun --nproc-per-node 2 -m fsfunc hardware "
                "--json PATH`, and give --hardware PATH"
            )


def _load_hardware(name: str | None) -> Hardware | None:
    """Returns the hardware of a name or a file, or this machine, measured."""
    if name is None:
        return None
    if name == THIS_MACHINE:
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


def _show_plan(
    plan: Plan,
    times: Estimate | None,
    machine: Hardware | None,
    options: argparse.Namespace,
) -> None:
    """Prints, draws and writes a plan, as the options say."""
    rank = options.rank
    print_table(show.plan(plan, rank))
    if times is not None:
        print_table(estimate_tables(times, plan, machine))
    charts: dict[str, Any] = {}
    if options.memory or options.png:
        charts["memory"] = show.memory(plan, rank, estimate=times)
    if times is not None and (options.streams or options.png):
        ranks = None if rank is None else [plan[rank].rank]
        charts["streams"] = show.streams(times, ranks=ranks)
    for name, chart in charts.items():
        if getattr(options, name):
            print_table(chart)
        if options.png:
            path = options.png / f"{_mesh_text(plan.mesh)},{name}.png"
            with reporting_write(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                chart.save(path)
    if options.html:
        with reporting_write(options.html):
            show.html(plan, times, machine, path=options.html)
    if options.trace and times is not None:
        with reporting_write(options.trace):
            show.trace(times, options.trace, plan=plan)


def plan_facts(
    plan: Plan, estimate: Estimate | None = None, hardware: Hardware | None = None
) -> dict[str, Any]:
    """Returns a plan, and its estimate if given, as dicts, lists, numbers and names.

    With ``hardware`` also its memory, and whether the plan fits. Bytes and FLOPs are
    of one rank and step, times in seconds. Spans are left out: ``show.trace`` writes
    them.

    >>> from fsfunc.comm.mesh import Mesh
    >>> rank_plan = RankPlan(0, 8, {"data": 0}, [], {}, [], [])
    >>> facts = plan_facts(Plan(Mesh({"data": 8}, "abstract"), (rank_plan,)))
    >>> facts["mesh"], facts["programs"][0]["alike"], facts["peak_bytes"]
    ({'data': 8}, 8, 0)
    """
    facts = {
        "mesh": dict(plan.mesh.axes),
        "flops": plan.flops,
        "peak_bytes": plan.peak_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "derived": plan.derived,
        "programs": [_program_facts(rank_plan) for rank_plan in plan.ranks],
    }
    if estimate is not None:
        times = asdict(replace(estimate, spans=[]))
        facts["estimate"] = {name: x for name, x in times.items() if name != "spans"}
        facts["estimate"] |= {"low": estimate.low, "high": estimate.high}
    if hardware is not None:
        fit = fits(plan, hardware)
        facts |= {"memory": fit.memory, "margin": fit.margin, "fits": bool(fit)}
        facts |= {"needed_bytes": fit.needed, "retries": fit.retries}
    return facts


def _program_facts(rank_plan: RankPlan) -> dict[str, Any]:
    """Returns what the ranks with one program have in common."""
    phases = dict.fromkeys(phase for _, phase in rank_plan.work)
    return {
        "rank": rank_plan.rank,
        "alike": rank_plan.alike,
        "coordinates": dict(rank_plan.coordinates),
        "flops": rank_plan.flops(),
        "flops_by_phase": {phase: rank_plan.flops(phase=phase) for phase in phases},
        "peak_bytes": rank_plan.peak_bytes,
        "peak_by_kind": rank_plan.peak,
        "bytes_sent": rank_plan.ledger.bytes(),
        "collectives": _collective_facts(rank_plan.records),
    }


def _collective_facts(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Returns the count and bytes of each op over some axes in one phase."""
    groups: dict[tuple[str, tuple[str, ...], str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.op, record.axis, record.phase].append(record)
    return [
        {
            "op": op,
            "axes": list(axes),
            "phase": phase,
            "count": len(group),
            "bytes": Ledger(group).bytes(),
        }
        for (op, axes, phase), group in groups.items()
    ]


def format_heading(
    plan: Plan,
    step: Callable[..., Any],
    tokens: float | None = None,
    model: ModelFacts | None = None,
) -> str:
    """Describes the step of a plan, in lines.

    Args:
        step: what was planned, in its transforms.
        tokens: of a step over all ranks; None if unknown.
        model: what is known of the model, if one was named.
    """
    lines = {"step": title(step), "batch": _describe_batch(plan, step)}
    if tokens is not None:
        lines["tokens"] = f"{tokens:,.0f} a step, over all ranks"
    count = parameter_count(plan) if model is None else model.parameters
    lines["parameters"] = of_count(count)
    active = count if model is None else model.active
    if active is None:
        lines["parameters"] += " in all, of which nobody says how many a token passes"
    elif active != count:
        lines["parameters"] += f" in all, {of_count(active)} active per token"
    lines |= {} if model is None else model.lines
    return "\n".join(f"{name:<12}{line}" for name, line in lines.items() if line)


def parameter_count(plan: Plan) -> int:
    """Returns the number of elements of all parameters, whole."""
    return sum(
        math.prod(leaf.shape)
        for leaf in plan.ranks[0].leaves
        if leaf.kind == "parameters"
    )


def _describe_batch(plan: Plan, step: Callable[..., Any]) -> str:
    """Describes the leaves of a rank's batch, and counts the ranks with their own."""
    leaves = [x for x in plan.ranks[0].leaves if x.path.partition("/")[0] == "batch"]
    text = ", ".join(map(_describe_leaf, leaves))
    # The stages of a pipeline alone have one batch: no axis cuts it.
    ranks = math.prod(plan.mesh.axes[name] for name in batch_axes(step, plan.mesh))
    return f"{text} on each of {ranks} ranks" if text and ranks > 1 else text


def _describe_leaf(leaf: PlannedLeaf) -> str:
    return describe_tensor(leaf.shape, leaf.dtype, leaf.path.partition("/")[2])
