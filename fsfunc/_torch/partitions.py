"""The partition of a compiled function into its forward and its backward.

The compiler traces both as one joint graph. What the forward then saves for the
backward is decided here: `transforms.compilation` asks for it, for ``remat`` under
``jit``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch._functorch import config
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy


class Partitioner(CustomPartitionerFn):
    """Makes a forward save a share of what its backward cannot cheaply recompute.

    What kernels of the backward can recompute beside other work on the same memory is
    not saved, even if a product reads it then; torch's own choice saves that. Of a
    block of a GPT it saves 10 bytes where torch saves 16, at 1.02 of the time.

    Args:
        share: from 0 to 1. At 0 only the inputs are saved, and the backward recomputes
            all else. What is drawn is always saved, and never drawn again.
    """

    def __init__(self, share: float):
        self.share = share

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        saved = set()
        for node in _forward_of(gm):
            if _draws(node) or node.target is getitem and node.args[0] in saved:
                saved.add(node)
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif not self.share:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = 0
        with config.patch(
            ban_recompute_materialized_backward=False,
            activation_memory_budget=self.share or 1.0,
        ):
            return min_cut_rematerialization_partition(gm, joint_inputs, **options)

    def uuid(self) -> Any:
        # Part of the key of the compiler's cache: another share is another function.
        return get_hash_for_files((__file__,), str(self.share))


# One object for each share: the compiler finds by it what it has compiled before.
partitioner = functools.cache(Partitioner)


def partitioned(fn: Callable[..., Any], share: float | None) -> Callable[..., Any]:
    """Returns a function with the compiler's partition, run operator by operator.

    Its forward saves what a compiled one does, and its backward recomputes the rest. It
    is traced at its first call, on tensors without data. Plans run it.

    Args:
        fn: a function of tensors.
        share: that of a `Partitioner`; None: torch's own choice.
    """
    from torch._inductor.decomposition import select_decomp_table

    part = min_cut_rematerialization_partition if share is None else partitioner(share)
    return aot_function(
        fn,
        fw_compiler=_one_by_one,
        bw_compiler=_one_by_one,
        partition_fn=part,
        decompositions=select_decomp_table(),
    )


def _one_by_one(
    gm: GraphModule, example_inputs: Sequence[object]
) -> Callable[[list[Any]], Any]:
    """Returns a function that runs a graph's operators, and frees values when read."""

    def run(args: list[Any]) -> Any:
        return torch.fx.Interpreter(gm).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def options_saving_share(options: dict[str, Any], share: float) -> dict[str, Any]:
    """Returns ``options`` of torch.compile for functions that save a share.

    Args:
        options: those of the user.
        share: that of a `Partitioner`.
    """
    new_options = dict(options)
    # torch refuses a mode beside options: it becomes the options that it stands for.
    mode = new_options.pop("mode", None)
    modes = list_mode_options(mode) if mode else {}
    partition_option = {"custom_partitioner_fn": partitioner(share)}
    new_options["options"] = {
        **modes,
        **(new_options.get("options") or {}),
        **partition_option,
    }
    return new_options


def _forward_of(gm: GraphModule) -> Iterator[Node]:
    """Yields the operators of a joint graph that no cotangent reaches."""
    backward_nodes = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" and "tangents" in node.name:
            backward_nodes.add(node)
        elif not backward_nodes.isdisjoint(node.all_input_nodes):
            backward_nodes.add(node)
        elif node.op == "call_function":
            yield node


def _draws(node: Node) -> bool:
    """Returns whether a node draws random numbers; a dropout of 0 does not."""
    target: Any = node.target
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    argument_names = [a.name for a in target._schema.arguments]
    if "dropout_p" not in argument_names:
        return True
    index = argument_names.index("dropout_p")
    probability = (
        node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", 0)
    )
    return bool(probability)
