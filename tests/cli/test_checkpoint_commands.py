"""`python -m fsfunc checkpoint` and `consolidate`: what they print and refuse."""

import os

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import fsfunc as ff
from fsfunc.cli import main


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step-3"
    tree = {"params": {"w": torch.arange(6.0).view(2, 3)}, "step": 3}
    ff.save(path, tree, metadata={"run": "a"})
    return path


def test_a_checkpoint_is_listed_and_proven(saved, capsys):
    assert main(["checkpoint", str(saved), "--prove"]) == 0
    shown = capsys.readouterr().out
    for part in ("params/w", "f32[2, 3]", "step", "3", "run", "every checksum is"):
        assert part in shown


def test_a_damaged_one_is_told(saved, capsys):
    file = next(saved.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["checkpoint", str(saved)]) == 0
    assert main(["checkpoint", str(saved), "--prove"]) == 2
    assert "is damaged between bytes" in capsys.readouterr().err


def test_a_subtree_becomes_one_file(saved, tmp_path, capsys):
    file = tmp_path / "w.safetensors"
    assert main(["consolidate", str(saved), str(file), "--at", "params"]) == 0
    assert load_file(file)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert main(["consolidate", str(saved), str(file)]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["checkpoint", "{}/none"], "there is no checkpoint"),
        (["checkpoint", "{}/step-3", "--at", "model"], "holds nothing at 'model'"),
        (["consolidate", "{}/none", "{}/file"], "there is no checkpoint"),
    ],
)
def test_what_is_not_there_is_refused(saved, capsys, arguments, said):
    given = [a.format(saved.parent) for a in arguments]
    assert main(given) == 2
    assert said in capsys.readouterr().err


# Letters that a terminal obeys: a colour, a title, a line written over, the end of one,
# another direction of writing, an escape of one byte.
OBEYED = "\x1b[31m\x1b]0;title\x07\r\n\b\u202e\x9b2J"


def shows_only_lines(text):
    return all(line.isprintable() for line in text.split("\n")) and "owned" in text


@pytest.fixture
def hostile(tmp_path):
    """Names, axes and texts that hold such letters; in a folder of such a name."""
    name = f"owned{OBEYED}"
    path = tmp_path / name.replace("\n", "") / "step-3"
    mesh = ff.make_mesh({name: 2}, "simulated")
    state = {name: torch.ones(2), "deep": {name: 1.0, "of a text": name}}

    def main():
        own = {"h": torch.ones(2) * mesh.rank, "flags": {name: True}}
        ff.save(path, state | own, metadata={name: {name: name}})

    ff.spmd(main, mesh)()
    return path, name


@pytest.mark.parametrize(
    "arguments",
    [
        ["checkpoint", "{}"],
        ["checkpoint", "{}", "--prove"],
        ["checkpoint", "{}", "--at", "none"],
        ["checkpoint", "{}/.."],
        ["checkpoint", "{}", "--damaged"],
        ["consolidate", "{}", "{}/fsfunc.json"],
        ["consolidate", "{}", "{}/none", "--at", "none"],
    ],
    ids=" ".join,
)
def test_no_name_is_obeyed_by_the_terminal(hostile, capsys, arguments):
    path, _ = hostile
    if "--damaged" in arguments:
        os.truncate(next(path.glob("*.safetensors")), 9)
        arguments = ["checkpoint", "{}", "--prove"]
    main([a.format(path) for a in arguments])
    out, err = capsys.readouterr()
    assert shows_only_lines(out + err)


def test_nor_by_whoever_prints_what_is_shown_or_raised(hostile):
    path, name = hostile
    path = path.parent.rename(path.parents[1] / "owned") / path.name  # the caller's own
    said = [str(ff.metadata(path)), str(ff.show.checkpoint(path))]
    console = Console(force_terminal=True, color_system=None, width=300)
    with console.capture() as capture:
        console.print(ff.show.checkpoint(path))
    said.append(capture.get().replace("\x1b[1m", "").replace("\x1b[0m", ""))
    ours = {name: torch.zeros(2), "deep": {name: 0.0, "of a text": ""}}
    ours |= {"h": torch.zeros(2), "flags": {name: False}}
    attempts = [
        (ours, {}),  # the axis is not there
        ({}, {}),
        ({"deep": ours["deep"]}, {}),
        ({"deep": ours["deep"]}, {"only": "deep", "rename": {"deep": name}}),
        (ours | {name: torch.zeros(3)}, {"only": lambda p: p != "h"}),
        (ours | {name: torch.zeros(2).long()}, {"strict": False}),
        (ours | {name: 3}, {"strict": False}),
        (ours | {f"{name}x": 3}, {}),
        ({"h": torch.zeros(2)}, {"only": "h"}),
        ({"x": torch.zeros(2)}, {"rename": {"x": name}}),
        ({"x": torch.zeros(2)}, {"strict": False}),
    ]
    for target, how in attempts:
        with pytest.raises(Exception) as raised:
            ff.load(path, target, **how)
        said.append(f"owned {raised.value}")
    with pytest.warns(RuntimeWarning) as warned, pytest.raises(Exception) as raised:
        os.truncate(next(path.glob("*.safetensors")), 9)
        ff.latest(path.parent)
    said += [str(raised.value), *(str(w.message) for w in warned)]
    for text in said:
        assert shows_only_lines(text), repr(text)


def test_of_a_long_text_the_beginning_is_shown(tmp_path):
    ff.save(tmp_path / "a", {"text": "x" * 10**6}, metadata={"text": "y" * 10**6})
    shown = str(ff.show.checkpoint(tmp_path / "a"))
    assert len(shown) < 10_000 and "letters more" in shown
