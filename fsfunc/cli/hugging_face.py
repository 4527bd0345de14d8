"""A train step of a Hugging Face model, made from its config.json alone.

`plan --hf CONFIG` takes a `HuggingFaceStep` where it takes a script's ``build``
otherwise. The model has no data, so a plan of any size needs no download.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsfunc.cli.build_scripts import FSFUNC, Refused
from fsfunc.cli.model_axes import (
    MODEL,
    WORDS,
    ModelAxes,
    add_axis_options,
    assign_axes,
)
from fsfunc.cli.model_tasks import (
    LONGEST_SEQUENCE,
    TASKS,
    Task,
    arguments,
    complete_config,
    describe_loss,
    find_task,
)
from fsfunc.cli.parsers import CommandParser
from fsfunc.comm.mesh import Mesh
from fsfunc.core.autodiff import value_and_grad
from fsfunc.interop.modules import from_module
from fsfunc.interop.split_layers import are_experts
from fsfunc.optim.adam import sharded_adam
from fsfunc.optim.optimizer import Optimizer
from fsfunc.pipelining import schedules
from fsfunc.pipelining.pipelines import pipeline
from fsfunc.planning.machines import Hardware
from fsfunc.planning.search_results import Search
from fsfunc.planning.stack_search import search
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.transforms.casting import precision
from fsfunc.transforms.donation import donate
from fsfunc.transforms.rematerialization import remat
from fsfunc.transforms.sharding import shard
from fsfunc.tree.structure import nearest
from fsfunc.tree.types import PyTree

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_v")


class _Model(NamedTuple):
    """A model as a function, its optimizer, its parameters, and how they are split."""

    loss_fn: Callable[[PyTree, PyTree], Tensor]
    optimizer: Optimizer
    params: PyTree
    layouts: LayoutRules | None


class HuggingFaceStep:
    """The train step of a model of transformers, for any mesh: AdamW, in bfloat16.

    Its units are the layers that the model itself says are not to be split. What axes
    of the mesh do, `model_axes` says; what the model is trained for, `model_tasks`.

    Args:
        path: a config.json, or the folder of one.
        passed: the arguments after ``--``, see ``--hf CONFIG -- --help``.

    Raises:
        Refused: no such file, no model that transformers knows, no loss that is known,
            or no transformers.
    """

    def __init__(self, path: Path, passed: Sequence[str]):
        self.path: Path = path / "config.json" if path.is_dir() else path
        self.options: argparse.Namespace = _parse_options(passed)
        self.config: Any = _load_config(self.path)
        self.task: Task = find_task(self.config, self.options.task, self.path)
        complete_config(self.config, self.task)
        self._models: dict[str | None, _Model] = {}  # by the axis that splits layers
        positions = self._positions()
        self.length: int = self.options.length or min(
            positions or LONGEST_SEQUENCE, LONGEST_SEQUENCE
        )
        if positions is not None and self.length > positions:
            raise Refused(
                f"--length {self.length}: the model of {self.path} has positions for "
                f"{positions} (max_position_embeddings)"
            )

    def axes(self, mesh: Mesh) -> ModelAxes:
        """Returns what the axes of a mesh do.

        Raises:
            Refused: an axis of which nobody says it.
        """
        return assign_axes(mesh, self.options)

    def tokens(self, mesh: Mesh) -> int | None:
        """Returns the number of tokens of a step over all ranks of a mesh.

        None for what is no text. Of pairs a source's tokens, or a target's: those that
        one half of the parameters meets.
        """
        if not self.task.counts_tokens:
            return None
        ranks = self._batch_ranks(mesh)
        return ranks * self.sequences(mesh) * self.length

    def sequences(self, mesh: Mesh) -> int:
        """Returns the sequences of a rank's batch: one, or one for each microbatch."""
        if self.options.sequences is not None:
            return self.options.sequences
        return self.microbatches(mesh) if self.axes(mesh).stages else 1

    def microbatches(self, mesh: Mesh) -> int:
        """Returns the microbatches of a pipeline: by default four for each stage."""
        stages = self.axes(mesh).stages
        return self.options.microbatches or 4 * (mesh.axes[stages] if stages else 1)

    @cached_property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(p.numel() for p in self.module.parameters())

    @cached_property
    def inactive_parameters(self) -> int | None:
        """The number of parameters that a token does not pass; None if unknown.

        They are those of experts that it is not sent to.
        """
        config = self._text_config()
        if not any(getattr(config, name, None) for name in _EXPERT_COUNTS):
            return 0
        used_experts = getattr(config, "num_experts_per_tok", None)
        # transformers marks its own stacks of experts, whatever their forward takes.
        modules = [
            m
            for m in self.module.modules()
            if are_experts(m) or hasattr(m, "_is_expert_parallel")
        ]
        # The first dim of each of these parameters is that of the experts.
        params = [p for m in modules for p in m.parameters()]
        if used_experts is None or not params:
            return None
        return sum(p.numel() // len(p) * (len(p) - used_experts) for p in params)

    def describe(self, mesh: Mesh) -> dict[str, str]:
        """Describes the model, its loss, and what the axes of a mesh do, in lines."""
        axes = self.axes(mesh)
        kernels = getattr(self._text_config(), "_attn_implementation", None)
        attention = f", attention by transformers' {kernels!r}" if kernels else ""
        lines = {
            "model": type(self.module).__name__ + attention,
            "loss": describe_loss(self.task, self.config),
            "axes": axes.describe(mesh),
        }
        if axes.tensor:
            # Of a path such as model.layers.0.mlp.up_proj.weight the layer's own name.
            paths = self._model(axes).layouts or {}
            split = dict.fromkeys(str(path).split(".")[-2] for path in paths)
            lines["split"] = f"{', '.join(split)}; all else is whole"
        if axes.stages:
            lines["stages"] = (
                f"{self.options.schedule}, {self.microbatches(mesh)} microbatches, cut "
                f"between the modules of {', '.join(self._stage_lists())} by FLOPs"
            )
        return lines

    def __call__(self, mesh: Mesh) -> tuple[Any, ...]:
        """Returns what a script's build(mesh) returns."""
        axes = self.axes(mesh)
        model = self._model(axes)
        step: Callable[..., Any] = model.optimizer(value_and_grad(model.loss_fn))
        step = remat(step) if self.options.remat else step
        sequences = self.sequences(mesh)
        if axes.stages:
            self._stage_lists()
            microbatches = self.microbatches(mesh)
            if sequences < microbatches:
                raise Refused(
                    f"--sequences {sequences}: a rank's batch is cut into "
                    f"{microbatches} microbatches of one sequence or more: give more "
                    "sequences, or fewer --microbatches"
                )
            step = pipeline(
                step,
                mesh,
                axes.stages,
                n_microbatches=microbatches,
                schedule=getattr(schedules, self.options.schedule),
            )
        step = precision(step, torch.bfloat16, reduce=torch.float32)
        if axes.data:
            replicate = axes.replicate or None
            step = shard(
                step, mesh, axes.data, zero=self.options.zero, replicate=replicate
            )
        batch = self._batch(sequences)
        init = lambda: model.params  # noqa: E731
        return donate(step), init, model.optimizer, batch, model.layouts

    @contextmanager
    def refusing_errors(self) -> Iterator[None]:
        """Turns errors of transformers' own code into Refused; others pass."""
        try:
            yield
        except Refused:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            file = Path(frame.filename)
            if file.is_relative_to(FSFUNC):
                raise
            said = str(error).strip().partition("\n")[0]
            raise Refused(
                f"{self.path}: a {type(self.module).__name__} does not run so. At "
                f"{'/'.join(file.parts[-2:])}:{frame.lineno}: {type(error).__name__}: "
                f"{said}"
            ) from error

    def search(self, mesh: Mesh | int, hardware: Hardware) -> Search:
        """Finds the best stacks of transforms on a mesh, or on any of so many ranks.

        Each rank has as many sequences as the options say. If any mesh may be chosen,
        the batch is the one of a mesh that cuts the batch alone.
        """
        is_any_mesh = isinstance(mesh, int)
        renamed = [w for w in WORDS if getattr(self.options, w.option) is not None]
        if renamed:
            raise Refused(
                f"--search knows axes by their usual names, {renamed[0].name} and not "
                f"--{renamed[0].option}: leave that out"
            )
        model = self._splittable_model(mesh)
        ranks = mesh if is_any_mesh else self._batch_ranks(mesh)
        sequences = self.options.sequences or 1
        try:
            return search(
                model.loss_fn,
                model.optimizer,
                lambda: model.params,
                lambda: self._batch(sequences * ranks),
                mesh if is_any_mesh else dict(mesh.axes),
                hardware,
                compute=torch.bfloat16,
                reduce=torch.float32,
                layouts=model.layouts,
                plans=12,
            )
        except ValueError as error:
            raise Refused(f"{self.path}, over {mesh}: {error}") from None

    def _splittable_model(self, mesh: Mesh | int) -> _Model:
        """Makes the model on a mesh; for any mesh, splittable if it has a plan."""
        if not isinstance(mesh, int):
            return self._model(self.axes(mesh))
        try:
            return self._model(ModelAxes(tensor=MODEL))
        except Refused:
            return self._model(ModelAxes())

    def _batch_ranks(self, mesh: Mesh) -> int:
        """Returns how many ranks have a batch of their own."""
        return math.prod(mesh.axes[name] for name in self.axes(mesh).batch)

    def _batch(self, sequences: int) -> PyTree:
        return self.task.batch(self.config, sequences, self.length)

    def _text_config(self) -> Any:
        """Returns the part of the config that is of the language model."""
        return self.config.get_text_config(decoder=True)

    def _positions(self) -> int | None:
        """Returns how many positions a sequence may have; None if that is not said."""
        config = self._text_config()
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        limits = [x for name in names if (x := getattr(config, name, None))]
        # Of an encoder's positions and a decoder's the fewer.
        positions = min(limits, default=None)
        return positions and positions - self._unused_positions(positions)

    def _unused_positions(self, positions: int) -> int:
        """Returns how many rows of an embedding of positions no token has.

        RoBERTa and others of its kind count from the index of padding, plus one.
        """
        for m in self.module.modules():
            table = getattr(m, "position_embeddings", None)
            if isinstance(table, nn.Embedding) and table.num_embeddings == positions:
                return 0 if table.padding_idx is None else table.padding_idx + 1
        return 0

    @cached_property
    def module(self) -> nn.Module:
        """The model on the meta device.

        Raises:
            Refused: fields that contradict each other; a model with recurrences.
        """
        import transformers

        with torch.device("meta"):
            try:
                auto = getattr(transformers, self.task.auto)
                module = auto.from_config(self.config, dtype=torch.float32)
            except Exception as error:  # of fields that contradict each other
                raise Refused(f"{self.path} is no model: {error}") from error
        if module._is_stateful:
            raise Refused(
                f"{self.path}: a {type(module).__name__} carries a state from token to "
                "token, which GPUs scan by kernels of other packages and transformers "
                "itself by a loop over tokens: neither is planned here. A SCRIPT with "
                "build(mesh) plans what a module of yours runs (plan --help)"
            )
        return module

    def _stage_lists(self) -> list[str]:
        """Returns the names of what stages are cut from: of the model's own plan.

        Without a plan they are its lists of layers.

        Raises:
            Refused: it has neither.
        """
        planned = getattr(self.module, "_pp_plan", None) or {}
        stages = [name for name, _ in self.module.named_modules() if name in planned]
        if not stages:
            classes = self._layer_classes()
            stages = [name for name, cls in self._lists() if cls in classes]
        if not stages:
            raise Refused(
                f"{self.path}: a {type(self.module).__name__} has no pipeline plan "
                "(base_model_pp_plan) and no list of layers that stages could be cut "
                "from: leave the axis of --stages out"
            )
        return stages

    def _lists(self) -> list[tuple[str, str]]:
        """Returns the lists of several modules of one class, and that class's name."""
        lists = (
            (name, {type(layer).__name__ for layer in m})
            for name, m in self.module.named_modules()
            if isinstance(m, nn.ModuleList) and len(m) > 1
        )
        return [(name, classes.pop()) for name, classes in lists if len(classes) == 1]

    def _layer_classes(self) -> set[str]:
        """Returns the names of the classes of layers.

        They are those between which transformers itself cuts a model for devices; of a
        model that says none, those in its lists.
        """
        named: Any = self.module._no_split_modules
        classes = set[str](named or ())
        return classes or {cls for _, cls in self._lists()}

    def _model(self, axes: ModelAxes) -> _Model:
        """Returns the model, its layers split over an axis if there is one for that."""
        if axes.tensor not in self._models:
            self._models[axes.tensor] = self._make_model(axes)
        return self._models[axes.tensor]

    def _make_model(self, axes: ModelAxes) -> _Model:
        model: Any = self.module
        unit_classes = self._layer_classes()
        if axes.tensor and not self._text_config().base_model_tp_plan:
            raise Refused(
                f"{self.path}: a {type(model).__name__} has no tensor parallel plan of "
                f"its layers (base_model_tp_plan) to split them over {axes.tensor}: "
                "leave that axis out, or give it to the data; or write a plan, in a "
                "SCRIPT with build(mesh) (ff.from_module(plan=))"
            )
        split = {"plan": "auto", "axis": axes.tensor} if axes.tensor else {}
        try:
            apply, params, buffers = from_module(
                model, units=lambda _, m: type(m).__name__ in unit_classes, **split
            )
        except (TypeError, ValueError) as error:
            over = f", over {axes.tensor}" if axes.tensor else ""
            raise Refused(f"{self.path}{over}: {error}") from None
        takes = inspect.signature(type(model).forward).parameters
        use_cache = {"use_cache": False} if "use_cache" in takes else {}

        def loss_fn(params: PyTree, batch: PyTree) -> Tensor:
            return apply(params, buffers, **arguments(batch), **use_cache).loss

        return _Model(loss_fn, sharded_adam(1e-4), params, apply.layouts)


# Fields of a config that say that a layer has several experts.
_EXPERT_COUNTS = (
    "num_experts_per_tok", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_num_experts",
)  # fmt: skip


def _parse_options(passed: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m fsfunc plan --hf CONFIG --mesh AXES --",
        description="Plans a step of AdamW in bfloat16, on a Hugging Face model.",
        example=["plan --hf config.json --mesh data=64 -- --length 2048 --zero 2"],
    )
    add = parser.add_argument
    add("--sequences", type=int, help="of a rank's batch (default: 1, or one for each "
        "microbatch)")  # fmt: skip
    add("--length", type=int, help=f"of each (the model's, {LONGEST_SEQUENCE} at most)")
    add("--zero", type=int, default=3, choices=range(4), help="of shard (default: 3)")
    add("--no-remat", dest="remat", action="store_false", help="keep all residuals")
    add("--task", help="what the model is trained for (default: as its architectures "
        f"say): {', '.join(task.word for task in TASKS)}")  # fmt: skip
    add_axis_options(add)
    add("--microbatches", type=int, help="of a pipeline (default: 4 for each stage)")
    add("--schedule", default="one_f_one_b", help=f"{', '.join(SCHEDULES)} "
        "(default: one_f_one_b)")  # fmt: skip
    options = parser.parse_args(list(passed))
    for name in ("sequences", "length", "microbatches"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} is 1 or more: {value}")
    words = {"task": [task.word for task in TASKS], "schedule": SCHEDULES}
    for name, known in words.items():
        if (value := getattr(options, name)) is not None and value not in known:
            parser.error(f"--{name} {value}: there are {nearest(value, known)}")
    return options


def _load_config(path: Path) -> Any:
    """Returns the ``PretrainedConfig`` of a file; transformers is optional."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise Refused(f"--hf needs transformers: {error}") from None
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{path} is no config.json of a model: {error}") from None
    model_type = str(fields.pop("model_type", None)) if isinstance(fields, dict) else ""
    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # of transformers' own checks of each field
        reason = str(error).partition("\n")[0]
        raise Refused(
            f"{path}: model_type {model_type!r} is no model: {reason}"
        ) from error
