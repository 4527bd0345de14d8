"""``remat``: forget a unit's residuals, and compute them again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.frames import Interpretation, Running, Thread, run_as, running
from fsfunc.sharded import Sharded, is_sharded
from fsfunc.transforms.policies import Policy, Tape
from fsfunc.transforms.transforming import transformed

__all__ = ["remat"]


def remat(f: Callable[..., Any], policy: Policy | None = None) -> Callable[..., Any]:
    """``f`` with each unit keeping its inputs alone, and computing again in backward.

    The recompute runs under the same autocast, with the same random numbers, and with
    the transforms that were in reach of the call.

    Args:
        f: a unit, a loss, or a train step.
        policy: ``SaveOnly(names)`` or ``SaveAllBut(names)``: values named by
            ``checkpoint_name`` that are kept, so that the op which made them does not
            run again. By default nothing is kept.

    Cost: one more forward of each unit; under ``shard``, in either order, each unit is
    gathered twice, the last one once. Under ``torch.func`` transforms the function runs
    as it is: they keep the whole backward differentiable, and a recompute with it.

    Source: Chen et al., 2016, Training deep nets with sublinear memory cost.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda p, x: torch.sin(x * p))
    >>> loss = ff.remat(lambda p: layer(p, torch.ones(2)).sum())
    >>> ff.value_and_grad(loss)(torch.tensor(0.0))[1].item()
    2.0
    """
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(
            f"policy={policy!r}: it is SaveOnly(names) or SaveAllBut(names), or None"
        )
    return transformed(f, _Remat(policy))


class _Remat(Interpretation):
    def __init__(self, policy: Policy | None):
        self.policy = policy

    def unit(self, run: Callable[..., Any], call: Any) -> Callable[..., Any]:
        if call.frame.recorder is not None:
            return run

        def recomputed(params: Any, *inputs: Any, **keywords: Any) -> Any:
            functional = _torch.functorch_active() or _torch.forward_ad_active()
            if functional or not torch.is_grad_enabled():
                return run(params, *inputs, **keywords)
            leaves, treedef = tree.flatten((params, inputs, keywords), is_sharded)
            tensors, places = [], []
            for i, x in enumerate(leaves):
                if isinstance(x, Sharded):
                    if x.home is None or x.home.port is None:
                        tensors.append(x.local)
                        places.append(i)
                elif isinstance(x, Tensor):
                    tensors.append(x)
                    places.append(i)
            thread = running().thread
            token = None if thread is None else thread.token
            if token is None and not any(x.requires_grad for x in tensors):
                return run(params, *inputs, **keywords)
            replay = _Replay(run, leaves, places, treedef, self.policy)
            token, *outs = _Recompute.apply(replay, token, *tensors)
            if thread is not None:
                thread.token = token
            return replay.output(outs)

        return recomputed


class _Replay:
    """How to run a unit call a second time."""

    def __init__(
        self,
        run: Callable[..., Any],
        leaves: list[Any],
        places: list[int],
        treedef: Any,
        policy: Policy | None,
    ):
        self.run, self.places, self.treedef = run, places, treedef
        held = set(places)
        # What is differentiated is saved by autograd, not here.
        self.leaves = [
            (x.with_local(None) if isinstance(x, Sharded) else None) if i in held else x
            for i, x in enumerate(leaves)
        ]
        self.tape = None if policy is None else Tape(policy)
        self.casts = [
            (k, torch.get_autocast_dtype(k))
            for k in ("cpu", "cuda")
            if torch.is_autocast_enabled(k)
        ]
        self.state = torch.random.default_generator.get_state()
        self.spec: Any = None
        self.rest: list[Any] = []

    def __call__(self, tensors: list[Tensor]) -> list[Any]:
        """The call's flat output."""
        leaves = list(self.leaves)
        for i, x in zip(self.places, tensors, strict=True):
            old = leaves[i]
            leaves[i] = old.with_local(x) if isinstance(old, Sharded) else x
        params, inputs, keywords = tree.unflatten(self.treedef, leaves)
        out = self.run(params, *inputs, **keywords)
        flat, self.spec = tree.flatten(out)
        return flat

    def again(self, tensors: list[Tensor]) -> list[Any]:
        """The same, with the casts and random numbers of the first time."""
        generator = torch.random.default_generator
        now = generator.get_state()
        generator.set_state(self.state)
        try:
            with ExitStack() as stack:
                for kind in ("cpu", "cuda"):
                    dtype = dict(self.casts).get(kind)
                    if dtype is not None or torch.is_autocast_enabled(kind):
                        on = dtype is not None
                        cast = torch.autocast(kind, dtype, enabled=on)
                        stack.enter_context(cast)
                if self.tape is not None:
                    stack.enter_context(self.tape.replay())
                return self(tensors)
        finally:
            generator.set_state(now)

    def output(self, outs: list[Tensor]) -> Any:
        """The call's output, from what came out of the Function."""
        found = iter(outs)
        flat = [next(found) if x is _TENSOR else x for x in self.rest]
        return tree.unflatten(self.spec, flat)


_TENSOR = object()


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, replay: _Replay, token, *tensors):  # type: ignore[override]
        with ExitStack() as stack:
            if replay.tape is not None:
                stack.enter_context(replay.tape.keep())
            stack.enter_context(run_as(Running()))
            flat = replay(list(tensors))
        replay.rest = [_TENSOR if isinstance(x, Tensor) else x for x in flat]
        ctx.replay, ctx.tracked = replay, token is not None
        ctx.leaves_unit = True
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        outs = []
        given = {id(x) for x in tensors}
        for x in flat:
            if isinstance(x, Tensor):
                outs.append(x.clone() if id(x) in given else x.detach())
        ctx.mark_non_differentiable(*[y for y in outs if not _real(y)])
        return (None if token is None else token.clone(), *outs)

    @staticmethod
    def backward(ctx, token, *grads):  # type: ignore[override]
        saved = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        needs = ctx.needs_input_grad[2:]
        tensors = [
            x if twice else x.detach().requires_grad_(need)
            for x, need in zip(saved, needs, strict=True)
        ]
        thread = Thread(saved[0].device if saved else None) if ctx.tracked else None
        with torch.enable_grad(), run_as(Running(thread, recompute=True)):
            flat = ctx.replay.again(list(tensors))
        outs = [x for x in flat if isinstance(x, Tensor)]
        pairs = [
            (y, g)
            for y, g in zip(outs, grads, strict=True)
            if g is not None and y.requires_grad
        ]
        if thread is not None and thread.token is not thread.start:
            pairs.append((thread.token, torch.zeros_like(thread.token)))
        wanted = [x for x, need in zip(tensors, needs, strict=True) if need]
        sources = wanted if thread is None else [*wanted, thread.start]
        found: Any = [None] * len(sources)
        if pairs and sources:
            ys, gs = zip(*pairs, strict=True)
            with run_as(Running(None, recompute=True)):
                found = torch.autograd.grad(
                    ys, sources, gs, allow_unused=True, create_graph=twice
                )
        each = iter(found)
        return (None, token, *[next(each) if need else None for need in needs])


def _real(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
