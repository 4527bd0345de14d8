"""What the axes of a mesh do in the step of a Hugging Face model.

An axis says it by its name: "data", "node", "model" or "pipe", as in `ff.search`. Other
names are told by an option (``--tensor tp``); one that nobody told is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fsfunc.cli.build_scripts import Refused
from fsfunc.comm.mesh import Mesh
from fsfunc.planning.stacks import DATA, NODE, PIPE
from fsfunc.tree.structure import did_you_mean

MODEL = "model"  # the usual name of the axis that splits layers


class _Word(NamedTuple):
    """One thing that axes do, the option that names them, and their usual name."""

    option: str
    name: str
    does: str


WORDS = (
    _Word("data", DATA, "cuts the batch and shards the state"),
    _Word("replicate", NODE, "cuts the batch, and has whole copies of the state"),
    _Word("tensor", MODEL, "splits layers by the model's own tensor parallel plan"),
    _Word("stages", PIPE, "has stages of layers, a pipeline"),
)


class ModelAxes(NamedTuple):
    """The axes of one mesh by what they do; None, or (), where there is none.

    Args:
        data: cut the batch and shard the state.
        replicate: cuts the batch, and has whole copies of the state.
        tensor: splits layers.
        stages: has the stages of a pipeline.
    """

    data: tuple[str, ...] = ()
    replicate: str | None = None
    tensor: str | None = None
    stages: str | None = None

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes whose ranks have sequences of their own."""
        return (*self.data, *([self.replicate] if self.replicate else []))

    def describe(self, mesh: Mesh) -> str:
        """Describes what each axis does, in words."""
        by_option = {"data": self.data, "replicate": (self.replicate,)}
        by_option |= {"tensor": (self.tensor,), "stages": (self.stages,)}
        words = (
            f"{name}={mesh.axes[name]} {word.does}"
            for word in WORDS
            for name in by_option[word.option]
            if name is not None
        )
        return "; ".join(words)


def add_axis_options(add: Callable[..., object]) -> None:
    """Adds an option for each word to a parser's ``add_argument``."""
    for word in WORDS:
        several = "NAME[,NAME]" if word.option == "data" else "NAME"
        axis_help = f"the axis that {word.does} (default: {word.name})"
        add(f"--{word.option}", metavar=several, help=axis_help)


def assign_axes(mesh: Mesh, options: argparse.Namespace) -> ModelAxes:
    """Returns what the axes of a mesh do, by their names and by the options.

    Raises:
        Refused: an axis that has no word, or two; an option that names no axis;
            replicas of what is not sharded.
    """
    given = {word.option: getattr(options, word.option) for word in WORDS}
    names = {
        word.option: [word.name] if given[word.option] is None
        # An axis may be given another word than that of its name.
        else [name.strip() for name in given[word.option].split(",")]
        for word in WORDS
    }  # fmt: skip
    taken = {name for option, text in given.items() if text for name in names[option]}
    by_option: dict[str, tuple[str, ...]] = {}
    for word in WORDS:
        is_given = given[word.option] is not None
        axes = [
            name for name in names[word.option]
            if name in mesh.axes and (is_given or name not in taken)
        ]  # fmt: skip
        if is_given and len(axes) < len(names[word.option]):
            absent = next(name for name in names[word.option] if name not in mesh.axes)
            raise Refused(
                f"--{word.option} {given[word.option]}: the mesh has no axis "
                f"{absent}{did_you_mean(absent, mesh.axes)}; it has "
                f"{', '.join(mesh.axes)}"
            )
        if len(axes) > 1 and word.option != "data":
            raise Refused(f"--{word.option} names one axis, got {', '.join(axes)}")
        by_option[word.option] = tuple(axes)
    _check_each_has_one_word(mesh, by_option)
    if by_option["replicate"] and not by_option["data"]:
        raise Refused(
            f"the axis {by_option['replicate'][0]} has whole copies of what an axis of "
            "the data shards, and the mesh has none: name it data, or add one"
        )
    first = {option: next(iter(axes), None) for option, axes in by_option.items()}
    return ModelAxes(
        by_option["data"], first["replicate"], first["tensor"], first["stages"]
    )


def _check_each_has_one_word(
    mesh: Mesh, by_option: Mapping[str, tuple[str, ...]]
) -> None:
    """Raises Refused unless each axis of the mesh is named by exactly one option."""
    for axis in mesh.axes:
        options = [f"--{option}" for option, axes in by_option.items() if axis in axes]
        if len(options) > 1:
            raise Refused(f"the axis {axis} is named by {' and by '.join(options)}")
        if not options:
            usual = [word.name for word in WORDS]
            words = "; ".join(f"{word.name} {word.does}" for word in WORDS)
            others = " or ".join(f"--{word.option} {axis}" for word in WORDS)
            raise Refused(
                f"nobody says what the axis {axis} of {dict(mesh.axes)} does"
                f"{did_you_mean(axis, usual)}. By their names: {words}. Or tell it "
                f"behind --: {others}"
            )
