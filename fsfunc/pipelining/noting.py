"""The unit calls of a loss that runs on fake tensors, noted one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import source_line, traceback_line
from fsfunc.fake_errors import asks_for_a_value
from fsfunc.frames import Counter
from fsfunc.pipelining.flowing import Body, Flow, Leaf, tensors
from fsfunc.pipelining.naming import below
from fsfunc.pipelining.programs import (
    Loss,
    Origins,
    Outputs,
    Program,
    Spec,
    UnitCall,
    Value,
)
from fsfunc.pipelining.valuing import run_on_data

__all__ = ["Tracer"]


class Tracer:
    """The ``stage`` of a frame whose unit calls are noted.

    Args:
        flow: what depends on what.
        fake: the mode that makes fake tensors; None where somebody else put it on.
    """

    def __init__(self, flow: Flow, fake: Any):
        self.flow, self.fake = flow, fake
        self.counter = Counter()
        self.calls: list[UnitCall] = []
        self.leaves: dict[int, Leaf] = {}

    def unit(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """A unit call of the loss: run, noted, and its outputs set apart."""
        name, line, flow = call.unit.__name__, source_line(), self.flow
        if _torch.functorch_active() or call.frame.counter is not self.counter:
            raise RuntimeError(
                f"the loss itself differentiates or maps unit {name!r}, at {line}: no "
                "stage of a pipeline could. Move the whole of it into one unit"
            )
        text = flow.names.call((params, *inputs), keywords)
        taken: dict[str, Tensor] = {}
        others: list[Tensor] = []
        for x in tensors((params, inputs, keywords)):
            leaf = self.leaves.get(id(x))
            if leaf is not None and leaf.parameter:
                taken[leaf.name] = x
            else:
                others.append(x)
        fed, own = flow.of(others), frozenset(taken)
        with self._opened(name) as body:
            out = self._run(body, call, params, inputs, keywords)
            captured = body.origins | flow.of(out)
            returned, outputs = self._apart(body, out, len(self.calls))
        done = UnitCall(
            number=len(self.calls),
            name=name,
            params=own,
            outputs=outputs,
            origins=fed | replace(captured, reads=captured.reads - own),
            flops=body.flops,
            activations=sum(s.nbytes() for s in body.kept.values()),
            weights=sum(x.numel() * x.element_size() for x in taken.values()),
            line=line,
            text=text,
        )
        self.calls.append(done)
        flow.counted = len(self.calls)
        return returned

    @contextmanager
    def _opened(self, name: str) -> Iterator[Body]:
        self.flow.body = body = Body(name)
        try:
            yield body
        finally:
            self.flow.body = None

    def _run(self, body: Body, call: Any, params: Any, inputs: Any, keywords: Any):
        """The unit's function on fake tensors, or else on stand-ins with data."""
        try:
            out = call.body(params, *inputs, **keywords)
        except Exception as error:
            if not asks_for_a_value(error):
                raise
            where = traceback_line(error)
            try:
                return run_on_data(self.flow, self.fake, call, params, inputs, keywords)
            except Exception as second:
                raise RuntimeError(
                    f"unit {call.name!r} asks for a tensor's value at {where} "
                    "(.item(), `if tensor`, a boolean mask), which a program made on "
                    "fake tensors has not, and it does not run on tensors of ones "
                    f"either ({second}). Make it a torch.where"
                ) from error
        body.keep_saved((params, inputs, keywords), out)
        return out

    def _apart(self, body: Body, out: Any, number: int) -> tuple[Any, Outputs]:
        """A unit's outputs, each in a storage of its own, and what they are."""
        tree.shown(out, f"unit {body.name!r}", "returns")
        flow, (paths, leaves, treedef) = self.flow, tree.flatten_with_paths(out)
        specs, apart = list(leaves), defaultdict[int, list[Tensor]](list)
        for i, x in enumerate(leaves):
            if not isinstance(x, Tensor):
                continue
            specs[i] = Spec(tuple(x.shape), x.dtype, x.requires_grad, x.device)
            body.keep(x)
            sharing = apart[_torch.storage_key(x)]
            with torch.set_grad_enabled(x.requires_grad):
                leaves[i] = y = x.clone()
            value = Value(number, i)
            flow.know(y, Origins(needs=frozenset((value,))), value)
            flow.names.give(y, below(f"%{number}", paths[i]))
            sharing += [x, y]
        for sharing in apart.values():
            if len(sharing) > 2 or flow.knows(sharing[0]):
                flow.share(sharing, body.name)
        for key in [k for k in body.kept if k in flow.owner]:
            del body.kept[key]  # somebody else's: a parameter, or what came in
        return tree.unflatten(treedef, leaves), Outputs(treedef, tuple(specs))

    def finished(self, name: str, out: Any) -> Program:
        """The program of a loss that returned ``out``."""
        leaves, treedef = tree.flatten(out)
        specs = [
            Spec(tuple(x.shape), x.dtype, x.requires_grad, x.device)
            if isinstance(x, Tensor)
            else x
            for x in leaves
        ]
        flow = self.flow
        loss = Loss(Outputs(treedef, tuple(specs)), flow.of(out), flow.names.tree(out))
        return Program(
            name=name,
            leaves=flow.names.params,
            calls=tuple(self.calls),
            glue=tuple(flow.glue),
            loss=loss,
            mutated=frozenset(flow.mutated),
            draws=tuple(flow.draws),
        )
