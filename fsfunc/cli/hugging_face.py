"""A train step of a Hugging Face model, of its config.json alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

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

MODEL = "model"  # an axis of this name splits layers, all others the data
LONGEST = 4096


class _Model(NamedTuple):
    """A model as a function, its optimizer, its parameters, and how they are split."""

    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    params: Any
    layouts: LayoutRules | None


class HuggingFaceStep:
    """The train step of a causal language model, for any mesh: AdamW, in bfloat16.

    Its parameters have no data. Its units are the layers that the model itself does
    not split; of a mesh with an axis "model", that splits them by the model's own plan.

    Args:
        path: a config.json, or the folder of one.
        passed: options of the command line, see ``--hf CONFIG -- --help``.

    Raises:
        Refused: no such file, no model that transformers knows, or no transformers.
    """

    def __init__(self, path: Path, passed: Sequence[str]):
        self.path = path / "config.json" if path.is_dir() else path
        self.options = _options(passed)
        self.config = _config(self.path)
        known = getattr(self.config, "max_position_embeddings", None) or LONGEST
        self.length = self.options.length or min(known, LONGEST)
        if self.length > known:
            raise Refused(
                f"--length {self.length}: the model of {self.path} has positions for "
                f"{known} (max_position_embeddings)"
            )

    def tokens(self, mesh: Mesh) -> int:
        """The tokens of a step over all ranks of a mesh."""
        ranks = mesh.size // mesh.axes.get(MODEL, 1)
        return ranks * self.options.sequences * self.length

    @cached_property
    def idle(self) -> int | None:
        """The parameters that a token does not pass; None where that is not known.

        They are those of experts that it is not sent to.
        """
        used = getattr(self.config, "num_experts_per_tok", None)
        if used is None:
            return 0
        experts = [m for m in self._module().modules() if are_experts(m)]
        leaves = [p for m in experts for p in m.parameters()]
        idle = sum(p.numel() // len(p) * (len(p) - used) for p in leaves)
        return idle if leaves else None

    def __call__(self, mesh: Mesh) -> tuple[Any, ...]:
        """The values that a script's build(mesh) returns."""
        model = self._model(mesh)
        step: Callable[..., Any] = model.optimizer(value_and_grad(model.loss_fn))
        step = remat(step) if self.options.remat else step
        step = precision(step, torch.bfloat16, reduce=torch.float32)
        axes = tuple(name for name in mesh.axes if name != MODEL)
        step = shard(step, mesh, axes, zero=self.options.zero) if axes else step
        batch = self._batch(self.options.sequences)
        init = lambda: model.params  # noqa: E731
        return donate(step), init, model.optimizer, batch, model.layouts

    def search(self, mesh: Mesh | int, hardware: Hardware) -> Search:
        """The stacks that are best on a mesh, or on any of so many ranks.

        Of those that promise most. A rank has the options' sequences; of any mesh, all
        have as many as on one that cuts the batch alone.
        """
        model = self._splitting(mesh)
        any_mesh = isinstance(mesh, int)
        ranks = mesh if any_mesh else mesh.size // mesh.axes.get(MODEL, 1)
        try:
            return search(
                model.loss_fn,
                model.optimizer,
                lambda: model.params,
                lambda: self._batch(self.options.sequences * ranks),
                mesh if any_mesh else dict(mesh.axes),
                hardware,
                compute=torch.bfloat16,
                reduce=torch.float32,
                layouts=model.layouts,
                plans=12,
            )
        except ValueError as error:
            raise Refused(f"{self.path}, over {mesh}: {error}") from None

    def _splitting(self, mesh: Mesh | int) -> _Model:
        """The model on a mesh; on any, split where it has a plan of its own."""
        if not isinstance(mesh, int):
            return self._model(mesh)
        split, whole = (make_mesh(a, "abstract") for a in ({MODEL: 1}, {}))
        try:
            return self._model(split)
        except Refused:
            return self._model(whole)

    def _batch(self, sequences: int) -> torch.Tensor:
        return torch.empty(sequences, self.length, dtype=torch.int64)

    def _module(self) -> Any:
        """The model, without data."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            try:
                return AutoModelForCausalLM.from_config(
                    self.config, dtype=torch.float32
                )
            except Exception as error:  # of fields that contradict each other
                raise Refused(f"{self.path} is no model: {error}") from error

    def _model(self, mesh: Mesh) -> _Model:
        """The model on a mesh."""
        model = self._module()
        kinds = set(model._no_split_modules or ())
        split = {"plan": "auto", "axis": MODEL} if MODEL in mesh.axes else {}
        try:
            apply, params, buffers = from_module(
                model, units=lambda _, m: type(m).__name__ in kinds, **split
            )
        except (TypeError, ValueError) as error:
            raise Refused(f"{self.path}, over {mesh.axes}: {error}") from None

        def loss_fn(params: Any, tokens: Any) -> Any:
            found = apply(
                params, buffers, input_ids=tokens, labels=tokens, use_cache=False
            )
            return found.loss

        return _Model(loss_fn, sharded_adam(1e-4), params, apply.layouts)


def _options(passed: Sequence[str]) -> argparse.Namespace:
    one = CommandParser(
        prog="python -m fsfunc plan --hf CONFIG --mesh AXES --",
        description="Plans a step of AdamW in bfloat16, on a Hugging Face model.",
        example=["plan --hf config.json --mesh data=64 -- --length 2048 --zero 2"],
    )
    add = one.add_argument
    add("--sequences", type=int, default=1, help="of a rank's batch (default: 1)")
    add("--length", type=int, help=f"of each (the model's, {LONGEST} at most)")
    add("--zero", type=int, default=3, choices=range(4), help="of shard (default: 3)")
    add("--no-remat", dest="remat", action="store_false", help="keep all residuals")
    found = one.parse_args(list(passed))
    for name in ("sequences", "length"):
        if (value := getattr(found, name)) is not None and value < 1:
            one.error(f"--{name} is 1 or more: {value}")
    return found


def _config(path: Path) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise Refused(f"--hf needs transformers: {error}") from None
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{path} is no config.json of a model: {error}") from None
    kind = str(fields.pop("model_type", None)) if isinstance(fields, dict) else ""
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # of transformers' own checks of each field
        said = str(error).partition("\n")[0]
        raise Refused(f"{path}: model_type {kind!r} is no model: {said}") from error
