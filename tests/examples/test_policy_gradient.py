"""Generation split over "model", training at zero 3: the digits of one device."""

import ast
import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsfunc as ff
from examples import policy_gradient as pg
from tests.checks import close, same, simulated
from tests.examples.programs import SCRIPT

STEPS = 3
PROGRAM = SCRIPT.with_name("policy_gradient.py")


def printed_steps(out: str) -> list[tuple[float, float, list[int]]]:
    """The loss, reward and first row of each line that tells of a step."""
    lines = re.findall(r"step +\d+  loss +(\S+)  reward (\S+)  (.*)", out)
    return [(float(x), float(y), [*map(int, row.split())]) for x, y, row in lines]


def code(function: Callable) -> list[str]:
    """The lines of a function without its docstring."""
    (node,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
    node.body = node.body[1:]
    return ast.unparse(node).splitlines()


def test_ten_lines_are_new() -> None:
    lines = difflib.ndiff(code(pg.train), code(pg.train_on_ranks))
    assert sum(line.startswith("+ ") for line in lines) == 9
    assert len(re.findall("^LAYOUTS = {.*}$", PROGRAM.read_text(), re.M)) == 1


def test_it_learns_to_count_on(capsys: pytest.CaptureFixture[str]) -> None:
    pg.main(pg.parse(["--devices", "1"]))
    steps = printed_steps(capsys.readouterr().out)
    rewards = [reward for _, reward, _ in steps]
    assert len(steps) == 9 and rewards == sorted(rewards)
    assert rewards[0] < 0.15 and rewards[-1] > 0.99
    assert steps[-1][2] == [8, 9, 0, 1, 2, 3, 4]


def test_the_reward_is_the_share_that_counts_on() -> None:
    rows = torch.tensor([[7, 8, 9, 0, 1, 2, 3], [3, 3, 4, 9, 9, 0, 5]])
    assert pg.reward(rows).tolist() == pytest.approx([1, 2 / 6])


def test_digits_are_drawn_with_their_probabilities() -> None:
    params, prompt = pg.init(), torch.tensor([[3]])
    params["head"]["digit"] *= 20  # at first they are nearly even
    noise = torch.cat([pg.draw_batch(i)["noise"] for i in range(40)])
    rows = len(noise)
    tokens = pg.write(params, {"prompt": prompt.expand(rows, 1), "noise": noise})
    shares = torch.bincount(tokens[:, 1], minlength=pg.DIGITS) / rows
    p = pg.log_probabilities(params, prompt)[0, 0].exp()
    assert ((shares - p).abs() < 4 * (p * (1 - p) / rows).sqrt()).all()


@pytest.fixture(scope="module")
def expected() -> list[tuple]:
    """What each step gives on one device."""
    return list(pg.train(STEPS))


@pytest.fixture(scope="module")
def ranks() -> list[list[tuple]]:
    """By rank, the same on simulated ranks, its state whole, and what it has sent."""
    mesh = simulated(data=2, model=2)

    def main() -> list[tuple]:
        found, steps = [], pg.train_on_ranks(STEPS, mesh)
        for _ in range(STEPS):
            with ff.ledger() as log:
                state, seen, tokens = next(steps)
            found.append((ff.unshard(state), seen, tokens, log))
        return found

    return ff.spmd(main, mesh)()


def test_ranks_write_and_learn_as_one_device(
    expected: list[tuple], ranks: list[list[tuple]]
) -> None:
    for (state, seen, tokens), *found in zip(expected, *ranks, strict=True):
        for its_state, its_seen, *_ in found:
            close((its_state.params, its_seen), (state.params, seen), 1e-9)
        # Each learns from rows of its own; in the order of ranks they are all rows.
        same(torch.cat([its_tokens for _, _, its_tokens, _ in found]), tokens)


@pytest.fixture(scope="module")
def lacked() -> list[int]:
    """By rank, the bytes that it needs to generate and has not at zero 3.

    Found without a move: a whole tree, each element of another value, is laid out anew
    in both ways.
    """
    mesh = simulated(data=2, model=2)
    leaves, treedef = ff.tree.flatten(pg.init())
    ends = torch.tensor([x.numel() for x in leaves]).cumsum(0)
    numbers = torch.arange(ends[-1], dtype=torch.float64).tensor_split(ends[:-1])
    whole = [n.view(x.shape) for n, x in zip(numbers, leaves, strict=True)]
    params = ff.tree.unflatten(treedef, whole)

    def main() -> int:
        def parts(f: Callable, x: Any, **how: Any) -> set[float]:
            placed = ff.tree.leaves(ff.place(f, params, x, **how))
            return {number for part in placed for number in part.flatten().tolist()}

        batch = ff.local_batch(pg.draw_batch(0), mesh, "data")
        loss = ff.shard(pg.loss_fn, mesh, ("data", "model"), zero=3)
        has = parts(loss, ff.local_batch(pg.write(params, batch), mesh, "model"))
        generate = ff.shard(pg.write, mesh, "data", zero=0)
        return 8 * len(parts(generate, batch, layouts=pg.LAYOUTS) - has)

    return ff.spmd(main, mesh)()


def test_a_step_sends_what_ranks_lack_and_what_its_layers_sum(
    ranks: list[list[tuple]], lacked: list[int]
) -> None:
    axes, sizes = ("data", "model"), {k: 0 for k in pg.init()}
    for unit, p in pg.init().items():
        sizes[unit] = sum(x.nbytes for x in ff.tree.leaves(p))
    logs = [[log for *_, log in found] for found in ranks]
    for by_rank in zip(*logs, strict=True):
        moved = [log.bytes(axes, "all_to_all") for log in by_rank]
        assert sum(moved) == sum(lacked)
        for log in by_rank:
            # Two sums for each digit, of all digits before it: on two ranks each sends
            # as many bytes as it has.
            rows = pg.PROMPTS * pg.GROUP // 2
            digits = sum(range(1, pg.LENGTH + 1))
            assert log.count("psum", axis="model") == 2 * pg.LENGTH
            assert log.bytes("model", "psum") == 2 * rows * digits * pg.DIM * 8
            # At zero 3; only the block's backward reads its weights again.
            assert log.bytes(axes, "psum_scatter") == 3 / 4 * sum(sizes.values())
            gathered = sum(sizes.values()) + sizes["block"]
            assert log.bytes(axes, "all_gather") == 3 / 4 * gathered


def test_a_plan_of_the_move_is_what_it_sends(lacked: list[int]) -> None:
    mesh = simulated(data=2, model=2)

    def main() -> tuple[list, list, tuple[int, int]]:
        (state, *_) = next(pg.train_on_ranks(1, mesh))
        generate = ff.shard(pg.write, mesh, "data", zero=0)
        batch = ff.local_batch(pg.draw_batch(0), mesh, "data")

        def move(params: Any, batch: Any) -> Any:
            return ff.place(generate, params, batch, layouts=pg.LAYOUTS)

        plan = ff.plan(move, state.params, batch)
        with ff.ledger() as log:
            move(state.params, batch)
        records = (plan.ranks[0].ledger.records, log.records)
        sent = [[(r.op, r.axis, r.bytes, r.what) for r in rs] for rs in records]
        return (*sent, pg.move_bytes(state.params, mesh))

    found = ff.spmd(main, mesh)()
    for planned, sent, (printed, _) in found:
        assert planned == sent and len(sent) == 7
        assert printed == sum(size for _, _, size, _ in sent)
    assert [bytes_lacked for *_, (_, bytes_lacked) in found] == lacked


@pytest.mark.parametrize("devices", ["2", "8"])
def test_other_meshes_print_the_same(
    devices: str, expected: list[tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    pg.main(pg.parse(["--devices", devices, "--steps", "2", "--every", "1"]))
    check_printed(capsys.readouterr().out, expected[:2])


def test_devices_that_would_part_a_group_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        pg.parse(["--devices", "3"])
    assert "--devices is 1, 2, 4, 8 or 16" in capsys.readouterr().err


@pytest.mark.processes
def test_four_processes_print_the_same(
    processes: Callable, expected: list[tuple], lacked: list[int]
) -> None:
    out = processes(PROGRAM, 4, "--steps", str(STEPS), "--every", "1")
    check_printed(out, expected)
    assert f"in all {sum(lacked):,}, and ranks lack {sum(lacked):,}\n" in out


def check_printed(out: str, expected: list[tuple]) -> None:
    steps = printed_steps(out)
    for (loss, reward, row), (_, seen, tokens) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(seen["loss"].item(), abs=6e-5)
        assert reward == pytest.approx(seen["reward"].item(), abs=6e-4)
        assert row == tokens[0].tolist()
