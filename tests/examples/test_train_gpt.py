"""The example as its user runs it: a program of its own, on real text."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.examples.programs import (
    SCRIPT,
    SIZES,
    Run,
    check_losses,
    numbers_held,
    numbers_sent,
    table_below,
    train,
    train_as_program,
)

STEPS = 12
FEW = ["--steps", "2", "--layers", "1"]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on two simulated ranks, which the others are compared with."""
    folder = tmp_path_factory.mktemp("simulated")
    return train_as_program(folder, "--ranks", "2", "--steps", str(STEPS))


def test_validation_loss_falls_from_chance(simulated: Run) -> None:
    shown = [float(x) for x in re.findall(r"val loss (\d+\.\d{4})", simulated.out)]
    held = [loss for _, loss in simulated.losses["validation"]]
    assert shown == [round(loss, 4) for loss in held]
    assert abs(shown[0] - math.log(256)) < 0.1
    assert shown[-1] < 4.2
    assert [step for step, _ in simulated.losses["validation"]][::6] == [0, STEPS]
    assert len(simulated.losses["train"]) == STEPS
    bars = re.findall(r"training .* 12/12 loss .* tokens/s", simulated.out)
    assert len(bars) == 1
    first, second = simulated.losses["samples"]
    assert first == second and first in simulated.out
    assert first.startswith("def ") and len(first) > 4


def test_tables_of_what_each_rank_holds_and_sends(simulated: Run) -> None:
    rows = table_below(simulated.out, "what each rank holds")
    numbers = 256 * 32 + 32 * 32  # embedding
    numbers += 2 * (12 * 32 * 32 + 2 * 32)  # blocks
    numbers += 256 * 32 + 32  # head
    half = numbers // 2
    assert [row[0] for row in rows] == ["0", "1"]
    assert numbers_held(rows) == [[half, half, 2 * half]] * 2
    (counts,) = numbers_sent(simulated.out)
    # 4 units: the last stays gathered and the first reads nothing in its backward
    assert counts["all_gather", "data"] == 2 * 4 - 1 - 1
    assert counts["psum_scatter", "data"] == 4
    assert counts["psum", "data"] == 2  # the loss, and the norm that clips
    assert counts["all", ""] == sum(counts.values()) // 2


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a few steps on one rank, which is drawn, too."""
    folder = tmp_path_factory.mktemp("few")
    picture = folder / "losses.png"
    run = train(folder, "--plot", picture, "--ranks", "1", *FEW)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    # one rank sends nothing
    assert table_below(run.out, "sent in one step") == [["all", "", "0"]]
    return run


@pytest.mark.parametrize(
    ("mesh", "sent"),
    [
        # of the block two sums forward and two backward; and the embedding's
        ("data=1,model=2", {("psum", "model"): 4 + 1}),
        # of the block keys and values, backward these again and their gradients
        ("data=1,context=2", {("ppermute", "context"): 6}),
        ("data=1,model=2,pipe=2", {}),
    ],
)
def test_split_layers_and_sequences_train_as_whole_ones(
    mesh: str, sent: dict, few: Run, tmp_path: Path
) -> None:
    run = train(tmp_path, "--mesh", mesh, *FEW)
    check_losses(run.losses, few.losses, 1e-4)
    counts, *_ = numbers_sent(run.out)
    assert {kind: counts[kind] for kind in sent} == sent


BAD_OPTIONS = {
    "--batch 6 --ranks 4": "--batch 6 must be a multiple of 4 ranks",
    "--dim 30 --heads 4": "--dim 30 must be a multiple of --heads 4",
    "--steps 0": "--steps must be at least 1",
    "--zero 4": "invalid choice: 4",
    "--text no/such/text": "no such file or folder",
    "--ranks 4 --pipe 3": "--pipe 3 must divide the 4 ranks",
    "--pipe 0": "--pipe must be at least 1",
    "--pipe 2 --microbatches 0": "--microbatches must be at least 1",
    "--pipe 4 --layers 1": "makes 4 stages, but the model has 3 units",
    "--pipe 4 --schedule zb_v": "makes 8 stages, but the model has 6 units",
    "--pipe 2 --schedule best": "invalid choice: 'best'",
    "--pipe 2 --batch 3": "--batch 3 must be a multiple of 2 ranks",
    "--pipe 4 --batch 8 --microbatches 9": "--microbatches 9 of 8 rows",
    "--pipe 2 --batch 8 --accumulate 2 --microbatches 3": "--microbatches 3 of 2 rows",
    "--schedule gpipe": "--schedule is for a pipeline: add --pipe N",
    "--microbatches 4": "--microbatches is for a pipeline",
    "--trace t.json": "--trace is for a pipeline",
    "--mesh data=2,model": "write axes as data=2,model=2",
    "--mesh data=2,data=2": "write axes as data=2,model=2, each once",
    "--mesh data=2,model=2 --experts 4": "their products are not split",
    "--experts 6": "--experts 6 must be a multiple of data=4",
    "--context 3": "--context 3 must divide the 4 ranks",
    "--context 2 --seq 30": "--seq 30 must be a multiple of 4",
}


BAD_MESHES = [
    ({"data": 4, "expert": 2}, "", "the axis expert, of which this script knows"),
    ({"data": 1, "model": 8}, "", "--heads 4 must be a multiple of model=8"),
    ({"pipe": 4}, "", "the mesh pipe=4 lacks the axis data"),
    ({"data": 4}, "--pipe 2", "--pipe 2, but the mesh data=4 has pipe=1"),
    ({"data": 4, "pipe": 4}, "--pipe 2", "the mesh data=4, pipe=4 has pipe=4"),
    ({"data": 64}, "--batch 32", "--batch 32 must be a multiple of 64 ranks"),
    ({"data": 1, "pipe": 8}, "", "makes 8 stages, but the model has 6 units"),
]


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [*[(None, *row) for row in BAD_OPTIONS.items()], *BAD_MESHES],
)
def test_bad_options_and_meshes_are_refused(
    axes, options, message, examples, capsys
) -> None:
    with pytest.raises(SystemExit) as refused:
        examples["options"].parse("", options.split(), axes)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.processes
def test_processes_train_like_simulated_ranks(
    simulated: Run, processes, tmp_path: Path
) -> None:
    path = tmp_path / "losses.json"
    out = processes(SCRIPT, 2, *SIZES, "--steps", str(STEPS), "--losses", str(path))
    check_losses(json.loads(path.read_text()), simulated.losses, 1e-5)
    for title in ("what each rank holds", "sent in one step"):
        assert table_below(out, title) == table_below(simulated.out, title)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "steps", "to"),
    [("data=2", STEPS, 4.5), ("data=1,context=2,pipe=2", 4, 5.2)],
)
def test_experts_learn(mesh: str, steps: int, to: float, tmp_path: Path) -> None:
    few = ["--layers", "1"] if "pipe" in mesh else []
    given = ["--experts", "4", "--mesh", mesh, "--steps", str(steps), *few]
    run = train(tmp_path, *given)
    assert run.losses["validation"][-1][1] < to
    counts, *_ = numbers_sent(run.out)
    if mesh == "data=2":  # of each block two forward and two backward
        assert counts["all_to_all", "data"] == 2 * 4
