"""Every lesson runs, and what it prints is what it teaches.

A lesson asserts its own claims, equal to one device and bytes by their formula; here it
is looked at what a reader sees.
"""

import re
import runpy
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from tests.examples.programs import SCRIPT

COURSE = SCRIPT.parent / "course"
LESSONS = sorted(path.name for path in COURSE.glob("*.py"))

SAYS = {
    "01": [r"with psum( +\d\.\de-0\d){4}\n", r"without( +\d\.\de\+00){4}\n"],
    "02": [r"pmean\(own\(w\)\) .* wrong", r"pmean\(cast\(w\)\) .* 12 bytes +right"],
    "03": ["\n  0   1.50 +1.00", "\n  3   2.16 +0.25"],
    "04": ["16 KiB each", "plain .* 54 +54 ", "k = 8 .* 19 +19 "],
    "05": [
        "F forward; B backward, .* ░ waits",
        "one_f_one_b\n.*\nrank 0 │F0│F1│F2│F3│░",
    ],
    "06": ["bytes a rank sends", "   64 +36864 +36864 +36864 +36864"],
    "07": [
        "16 places: loss 2.6120,  0 dropped, 9216 bytes",
        "y = 0, if dropped, has loss 2.2233; random experts do worse",
    ],
    "08": [
        r"clipped at 4\.0: row 7 moves the sum of all by 4\.00",
        r"by_parts +1 x psum_scatter +1536 bytes sent by a rank",
    ],
    "09": [
        r"eigenvalue 0.4944 of H as a matrix\n +0.4890 by 8 products Hv",
        r"by_parts: the same; 19 sums of gradients, .*\n +9 x psum +108 bytes",
    ],
    "10": [
        "by_hand own_norms  9e-02 off,   0 bytes",
        "train   leaf_norms [1-9]e-07 off, 960 bytes by psum",
    ],
    "11": [
        "clipped after the mean: no example breaks the law",
        '(?s)reduced twice:.*Mesh.*2 times too large, the size of "data"',
        "(?s)clipped before the mean:.*something that is not linear",
        "(?s)one leaf forgotten:.*'b' f32.*own rows",
        "(?s)rank 0 alone:.*what the rows of rank 0 alone give",
        "(?s)nothing back:.*the transpose of halo",
    ],
    "12": ["1024    3  1024     1.796", " 1024    3     8     9.714    24.444"],
    "13": [
        "floats: by_hand equals .* to 1e-6, and the fault is not seen",
        r"(?s)modulo p .*by_hand on .* is not value_and_grad\(loss\) on one device\s+"
        r"'0' f64.. differs",
        r"mended on .* equals value_and_grad\(loss\) on one device\n3 leaves, 2 calls, "
        "2 draws; wrong",
        "(?s)two ways to write it:.*the value f64.3, 2. differs",
    ],
    "14": [
        "mean of means 0.5030 wrong\n.* 0.4947 right\n +ff.value +0.4947 right",
        "resumed on 4 ranks +off by 0e.00\nresumed on 2 ranks +off by .e.0[0789]",
        r"without position +off by .e-0[1-3]\n.*without generator off by .e-0[1-3]",
    ],
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_shows_what_it_says(name, capsys):
    lesson = runpy.run_path(str(COURSE / name))
    printed = capsys.readouterr().out
    for said in SAYS[name[:2]]:
        assert re.search(said, printed), f"{said!r} is not in\n{printed}"
    if name.startswith("10"):  # norms of parts are refused, as it says
        mesh = lesson["mesh"]
        with pytest.raises(TypeError, match="cannot read .norm: '0'"):
            ff.spmd(lesson["train"], mesh)(lesson["own_norms"], mesh)


def test_a_transform_of_one_s_own(capsys):
    example = runpy.run_path(str(SCRIPT.parent / "your_own_transform.py"))
    example["main"]()
    printed = capsys.readouterr().out
    assert "gradients of one device" in printed and "sharpness-aware" in printed


def test_it_leaves_a_donated_state_alone_until_it_is_updated():
    example = runpy.run_path(str(SCRIPT.parent / "your_own_transform.py"))
    sharpness_aware, optimizer = example["sharpness_aware"], ff.sgd(0.1, momentum=0.9)
    step = optimizer(ff.value_and_grad(example["loss"]))
    mesh = ff.make_mesh({"data": 2}, "simulated")
    params = [torch.randn(3, 3, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(4, 3, dtype=torch.float64)
    ff.testing.assert_equals_one_device(
        sharpness_aware(step),
        ff.donate(sharpness_aware(ff.shard(step, mesh, "data"))),
        mesh,
        ff.TrainState(params, optimizer.init(params)),
        x,
        goes_on=lambda out: out[0],
        tolerance=1e-9,
    )


def test_there_are_fourteen_lessons_of_a_page_that_are_listed():
    assert [name[:2] for name in LESSONS] == sorted(SAYS)
    listed = (Path(COURSE).parent / "README.md").read_text()
    for name in LESSONS:
        lines = (COURSE / name).read_text().splitlines()
        assert len(lines) <= 80, f"{name} has {len(lines)} lines"
        assert lines[0].startswith(f'"""Lesson {int(name[:2])}. ')
        assert f"    python examples/course/{name}" in lines
        assert re.search(rf"[`/]{name.removesuffix('.py')}[`.]", listed)
