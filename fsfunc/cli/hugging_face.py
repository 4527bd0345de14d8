"""A train step of a Hugging Face model, made from its config.json alone.

`plan --hf CONFIG` takes a `HuggingFaceStep` where it takes a script's ``build``
otherwise. The model has no data, so a plan of any size needs no download.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.cli.build_scripts import Refused
from fsfunc.cli.parsers import CommandParser
from fsfunc.comm.launch import make_mesh
from fsfunc.comm.mesh import Mesh
from fsfunc.core.autodiff import value_and_grad
from fsfunc.interop.modules import from_module
from fsfunc.interop.split_layers import are_experts
from fsfunc.optim.adam import sharded_adam
from fsfunc.optim.optimizer import Optimizer
from fsfunc.planning.machines import Hardware
from fsfunc.planning.search_results import Search
from fsfunc.planning.stack_search import search
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.transforms.casting import precision
from fsfunc.transforms.donation import donate
from fsfunc.transforms.rematerialization import remat
from fsfunc.transforms.sharding import shard
from fsfunc.tree.types import PyTree

MODEL_AXIS = "model"  # an axis of this name splits layers, all others the data
LONGEST_SEQUENCE = 4096  # tokens, by default


class _Model(NamedTuple):
    """A model as a function, its optimizer, its parameters, and how they are split."""

    loss_fn: Callable[[PyTree, Tensor], Tensor]
    optimizer: Optimizer
    params: PyTree
    layouts: LayoutRules | None


class HuggingFaceStep:
    """The train step of a causal language model, for any mesh: AdamW, in bfloat16.

    Its units are the layers that the model itself says are not to be split. If the mesh
    has an axis "model", that splits the layers by the model's own tensor parallel plan.

    Args:
        path: a config.json, or the folder of one.
        passed: the arguments after ``--``, see ``--hf CONFIG -- --help``.

    Raises:
        Refused: no such file, no model that transformers knows, or no transformers.
    """

    def __init__(self, path: Path, passed: Sequence[str]):
        self.path: Path = path / "config.json" if path.is_dir() else path
        self.options: argparse.Namespace = _parse_options(passed)
        self.config: Any = _load_config(self.path)
        positions = (
            getattr(self.config, "max_position_embeddings", None) or LONGEST_SEQUENCE
        )
        self.length: int = self.options.length or min(positions, LONGEST_SEQUENCE)
        if self.length > positions:
            raise Refused(
                f"--length {self.length}: the model of {self.path} has positions for "
                f"{positions} (max_position_embeddings)"
            )

    def tokens(self, mesh: Mesh) -> int:
        """Returns the number of tokens of a step over all ranks of a mesh."""
        ranks = mesh.size // mesh.axes.get(MODEL_AXIS, 1)
        return ranks * self.options.sequences * self.length

    @cached_property
    def inactive_parameters(self) -> int | None:
        """The number of parameters that a token does not pass; None if unknown.

        They are those of experts that it is not sent to.
        """
        used_experts = getattr(self.config, "num_experts_per_tok", None)
        if used_experts is None:
            return 0
        modules = [m for m in self._module().modules() if are_experts(m)]
        # The first dim of each of these parameters is that of the experts.
        params = [p for m in modules for p in m.parameters()]
        inactive = sum(p.numel() // len(p) * (len(p) - used_experts) for p in params)
        return inactive if params else None

    def __call__(self, mesh: Mesh) -> tuple[Any, ...]:
        """Returns what a script's build(mesh) returns."""
        model = self._model(mesh)
        step: Callable[..., Any] = model.optimizer(value_and_grad(model.loss_fn))
        step = remat(step) if self.options.remat else step
        step = precision(step, torch.bfloat16, reduce=torch.float32)
        axes = tuple(name for name in mesh.axes if name != MODEL_AXIS)
        step = shard(step, mesh, axes, zero=self.options.zero) if axes else step
        batch = self._batch(self.options.sequences)
        init = lambda: model.params  # noqa: E731
        return donate(step), init, model.optimizer, batch, model.layouts

    def search(self, mesh: Mesh | int, hardware: Hardware) -> Search:
        """Finds the best stacks of transforms on a mesh, or on any of so many ranks.

        Each rank has as many sequences as the options say. If any mesh may be chosen,
        the batch is the one of a mesh that cuts the batch alone.
        """
        model = self._splittable_model(mesh)
        is_any_mesh = isinstance(mesh, int)
        ranks = mesh if is_any_mesh else mesh.size // mesh.axes.get(MODEL_AXIS, 1)
        try:
            return search(
                model.loss_fn,
                model.optimizer,
                lambda: model.params,
                lambda: self._batch(self.options.sequences * ranks),
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
            return self._model(mesh)
        meshes = (make_mesh(axes, "abstract") for axes in ({MODEL_AXIS: 1}, {}))
        with_model_axis, without_axes = meshes
        try:
            return self._model(with_model_axis)
        except Refused:
            return self._model(without_axes)

    def _batch(self, sequences: int) -> torch.Tensor:
        return torch.empty(sequences, self.length, dtype=torch.int64)

    def _module(self) -> torch.nn.Module:
        """Makes the model on the meta device."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            try:
                return AutoModelForCausalLM.from_config(
                    self.config, dtype=torch.float32
                )
            except Exception as error:  # of fields that contradict each other
                raise Refused(f"{self.path} is no model: {error}") from error

    def _model(self, mesh: Mesh) -> _Model:
        """Makes the model on a mesh."""
        model: Any = self._module()
        # Where transformers itself cuts a model between devices: its layers.
        unit_classes = set(model._no_split_modules or ())
        split = {"plan": "auto", "axis": MODEL_AXIS} if MODEL_AXIS in mesh.axes else {}
        try:
            apply, params, buffers = from_module(
                model, units=lambda _, m: type(m).__name__ in unit_classes, **split
            )
        except (TypeError, ValueError) as error:
            raise Refused(f"{self.path}, over {mesh.axes}: {error}") from None

        def loss_fn(params: PyTree, tokens: Tensor) -> Tensor:
            output = apply(
                params, buffers, input_ids=tokens, labels=tokens, use_cache=False
            )
            return output.loss

        return _Model(loss_fn, sharded_adam(1e-4), params, apply.layouts)


def _parse_options(passed: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m fsfunc plan --hf CONFIG --mesh AXES --",
        description="Plans a step of AdamW in bfloat16, on a Hugging Face model.",
        example=["plan --hf config.json --mesh data=64 -- --length 2048 --zero 2"],
    )
    add = parser.add_argument
    add("--sequences", type=int, default=1, help="of a rank's batch (default: 1)")
    add("--length", type=int, help=f"of each (the model's, {LONGEST_SEQUENCE} at most)")
    add("--zero", type=int, default=3, choices=range(4), help="of shard (default: 3)")
    add("--no-remat", dest="remat", action="store_false", help="keep all residuals")
    options = parser.parse_args(list(passed))
    for name in ("sequences", "length"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} is 1 or more: {value}")
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
