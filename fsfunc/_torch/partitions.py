"""The partition of a compiled function into its forward and its backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import torch
from functorch.compile import (
    aot_function,
    min_cut_rematerialization_partition,
)
from torch._functorch import config
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy


class Partitioner(CustomPartitionerFn):
    """Has a forward keep a share of what its backward cannot compute again for little.

    What kernels of the backward can compute beside other work on the same memory is
    not kept, even if a product reads it then, as torch's own choice would: of a block
    of a GPT 10 bytes are kept where that keeps 16, at 1.02 of the time.

    At 0 it keeps its inputs alone, and the backward computes all else again that it
    reads. What is drawn is always kept, and never drawn again.
    """

    def __init__(self, share: float):
        self.share = share

    def __call__(self, gm: Any, joint_inputs: Any, **how: Any) -> tuple[Any, Any]:
        kept = set()
        for node in _forward_of(gm):
            if _draws(node) or node.target is getitem and node.args[0] in kept:
                kept.add(node)
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif not self.share:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = 0
        with config.patch(
            ban_recompute_materialized_backward=False,
            activation_memory_budget=self.share or 1.0,
        ):
            return min_cut_rematerialization_partition(gm, joint_inputs, **how)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,), str(self.share))


# Of one object: what the compiler made with it is found again by it.
partitioner = functools.cache(Partitioner)


def parted(fn: Callable[..., Any], share: float | None) -> Callable[..., Any]:
    """A function of tensors as the compiler parts it, run operator by operator.

    Its forward keeps what a compiled one does, and its backward computes the rest
    again. It is traced at its first call, on tensors without data.

    Args:
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


def _one_by_one(gm: Any, example_inputs: Any) -> Callable[[list[Any]], Any]:
    """A graph's operators, each value let go of when the last has read it."""

    def run(args: list[Any]) -> Any:
        return torch.fx.Interpreter(gm).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def keeping_share(options: dict[str, Any], share: float) -> dict[str, Any]:
    """``options`` of torch.compile, for functions that keep a share of residuals."""
    kept = dict(options)
    mode = kept.pop("mode", None)  # torch takes none beside options
    modes = list_mode_options(mode) if mode else {}
    own = {"custom_partitioner_fn": partitioner(share)}
    kept["options"] = {**modes, **(kept.get("options") or {}), **own}
    return kept


def _forward_of(gm: Any) -> Iterator[Any]:
    """The operators of a joint graph that no cotangent comes to."""
    back = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" and "tangents" in node.name:
            back.add(node)
        elif not back.isdisjoint(node.all_input_nodes):
            back.add(node)
        elif node.op == "call_function":
            yield node


def _draws(node: Any) -> bool:
    """True if a node draws random numbers."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    named = [a.name for a in node.target._schema.arguments]
    if "dropout_p" not in named:
        return True
    at = named.index("dropout_p")
    given = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0)
    return bool(given)
