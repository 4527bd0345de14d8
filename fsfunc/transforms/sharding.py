"""``shard``: parameters, gradients and moments in parts, one per rank (ZeRO 0 to 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.autodiff import GradientCall, Outcome
from fsfunc.comm.attribution import internal, label
from fsfunc.comm.collective_ops import Dense, apply_map
from fsfunc.comm.crossings import ENTER, GATHER, MEAN, REDUCE, LawError
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import Axis, Here, Mesh, check_mesh, here
from fsfunc.donated import refuse_spent
from fsfunc.frames import Frame, Interpretation, frame, inside, running
from fsfunc.homes import by_buffer, home_of, joined, settle
from fsfunc.inputs import arguments, refuse
from fsfunc.layout import Layout
from fsfunc.sharded import Home, Sharded, is_sharded
from fsfunc.tracing.recorder import Noted, Recorder
from fsfunc.tracing.trial import check, signature
from fsfunc.transforms.averaging import averaged, check_whole
from fsfunc.transforms.derivatives import check_derivatives
from fsfunc.transforms.gathering import (
    Arena,
    Gathered,
    Passage,
    Use,
    enter,
    leave,
    whole_shape,
)
from fsfunc.transforms.ownership import Ownership
from fsfunc.transforms.ports import collected, open_ports
from fsfunc.transforms.sessions import Session
from fsfunc.transforms.transforming import transformed

__all__ = ["Sharding", "shard"]


def shard(
    f: Callable[..., Any],
    mesh: Mesh,
    axis: Axis,
    *,
    zero: int = 3,
    replicate: Axis | None = None,
    reshard_after_forward: bool = True,
    min_bytes: int = 0,
) -> Callable[..., Any]:
    """``f`` with its units' parameters in parts over ``axis``, one part per rank.

    Each unit gathers its parameters, runs, and forgets them; its backward gathers
    again, without computing again, and reduces the gradients. The loss is this rank's
    own mean; value and gradient are those of the mean over the ranks.

    Args:
        f: a unit, a loss, or a train step.
        axis: the mesh axis, or several, over which the data vary.
        zero: 3: parameters, gradients and moments in parts. 2: parameters whole,
            gradients reduced as they appear. 1: the same, reduced when the backward
            ends. 0: everything whole, gradients all-reduced unit by unit.
        replicate: a further axis over which the parts are repeated (HSDP).
        reshard_after_forward: at zero=3, False keeps what the forward gathered.
        min_bytes: neighbouring units below this size share one buffer.

    Raises:
        ValueError: an unknown axis, ``zero`` outside 0..3, an axis taken twice.

    Cost, a rank and step, for P bytes of parameters and a = (n-1)/n: zero=3 gathers
    each unit twice, but for the last one and those whose backward reads no parameter,
    and reduces each once: at most 3aP. zero 1 and 2: one gather and one reduction a
    unit, 2aP. zero=0: one all-reduce a unit, 2aP. Besides, one psum of the loss.

    Source: ZeRO (Rajbhandari et al., 2020), sections 5 and 7; FairScale's FSDP.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> unit = ff.unit(lambda p, x: x @ p["w"])
    >>> def main():
    ...     f = ff.shard(lambda p, x: unit(p, x).sum(), mesh, "data")
    ...     params = ff.place(f, {"w": torch.ones(3, 1)}, torch.ones(2, 3))
    ...     return params["w"].local.tolist(), f(params, torch.ones(2, 3)).item()
    >>> ff.spmd(main, mesh)()
    [([1.0, 1.0], 6.0), ([1.0], 6.0)]
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r}: it is 0, 1, 2 or 3")
    names = check_mesh(mesh, "shard").check(axis)
    copies = () if replicate is None else mesh.check(replicate)
    if set(names) & set(copies):
        raise ValueError(f"replicate={replicate!r} repeats an axis of {axis!r}")
    handler = Sharding(mesh, names, zero, copies, reshard_after_forward, min_bytes)
    return transformed(f, handler)


class Sharding(Interpretation):
    """What ``shard`` makes of unit and gradient calls."""

    lays_out = True
    called = "shard"

    def __init__(
        self,
        mesh: Mesh,
        axis: tuple[str, ...],
        zero: int,
        copies: tuple[str, ...],
        reshard: bool,
        min_bytes: int,
    ):
        self.mesh, self.axis, self.zero, self.copies = mesh, axis, zero, copies
        self.min_bytes = min_bytes
        self.keeps = not reshard
        self.checked: set[Any] = set()
        self.arenas: dict[int, Arena] = defaultdict(Arena)
        self.orders: dict[tuple[int, str], list[tuple[str, ...]]] = {}

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("axis", self.axis),
            ("zero", self.zero),
            ("replicate", self.copies),
            ("reshard_after_forward", not self.keeps),
            ("min_bytes", self.min_bytes),
        )

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.copies, *self.axis)

    def groups(self) -> tuple[RankGroup, RankGroup | None]:
        at = here(self.mesh)
        return group(self.axis, at), group(self.copies, at) if self.copies else None

    def expect(self, rank: int, order: list[tuple[str, ...]]) -> None:
        """Which buffers unit calls will want, in order: what to prefetch by."""
        self.orders[rank, "plain"] = self.orders[rank, "gradient"] = order

    # A call of the transformed function

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Runs ``f`` in reach of this interpretation; what it changed is packed."""
        found = self.entered(self, f, args, keywords)
        at = found.at or here(self.mesh)
        coordinates = at.mesh.coordinates(at.rank)
        with inside(found):
            args, keywords = settle((args, keywords), coordinates)
            session = self._session((args, keywords), "plain", at.rank, Ownership(args))
            sessions = (*found.sessions, (self, session))
            with inside(replace(found, sessions=sessions)):
                out = f(*args, **keywords)
            self._closed(session, "plain", at.rank)
            self.ran(at)
            return settle(out, coordinates)

    def entered(
        self, handler: Interpretation, f: Callable[..., Any], args: Any, keywords: Any
    ) -> Frame:
        """The frame in which a call of ``f`` runs, of which ``handler`` is one more."""
        before = frame()
        for other in before.handlers:
            taken = set(getattr(other, "axes", ())) & set(self.axes)
            if taken:
                raise ValueError(
                    f"two transforms over one axis: {sorted(taken)} is taken by an "
                    "outer one; shard each axis once"
                )
        at = self.here(self.mesh)
        self._check(f, args, keywords, at)
        at = replace(at, mean=(*at.mean, *self.axes))
        return replace(before, handlers=(*before.handlers, handler), at=at)

    def recorded(self, recorder: Recorder) -> Interpretation:
        return _Recorded(self, recorder)

    def _check(self, f: Any, args: Any, keywords: Any, at: Here) -> None:
        """Looks at a program that is new, before anything of it runs."""
        if at.link.moves:
            refuse(
                "array meta",
                "a sharded function",
                args[1:],
                *arguments(len(args) - 1, 1),
            )
        if self.mesh.backend == "vmap":
            return
        try:
            key = signature(args, keywords)
        except RuntimeError:
            for given in (*args, keywords):
                refuse_spent(given)
            raise
        if (tracer := frame().tracer) is not None:
            tracer.called(key, args, keywords, (*at.mean, *self.axes))
            return
        if _torch.functorch_active() or _torch.fake_active():
            return
        if not self.knows(at.rank, key):
            refuse(
                "array meta sparse",
                "a sharded function",
                args[:1],
                *arguments(1),
            )
            call = lambda *args, **keywords: self.call(f, args, keywords)  # noqa: E731
            check(call, args, keywords, at, (*at.mean, *self.axes))
            self.checked.add((at.rank, key))

    def knows(self, rank: int, key: Any) -> bool:
        """Whether a call was looked at, or is like one in which nothing could be."""
        return (rank, key) in self.checked or (rank, key[0]) in self.checked

    def _session(
        self, values: Any, kind: str, rank: int, ownership: Ownership
    ) -> Session:
        homes = [
            x.home
            for x in tree.leaves(values, is_leaf=is_sharded)
            if isinstance(x, Sharded) and x.home is not None and self._mine(x.layout)
        ]
        where, replicas = self.groups()
        at, tracer = self.mesh.coordinates(rank), frame().tracer
        tried = tracer is not None and not tracer.complete  # in another's place, too
        for home in () if tried else homes:
            theirs = dict(home.coordinates)
            if theirs != {a: at[a] for a in theirs} or home.place.size not in (
                1,
                where.size,
            ):
                raise ValueError(
                    f"{home.members[0]} is the part of {theirs} of {home.place.size} "
                    f"ranks, but this is {at} of {self.mesh}: give each rank its own "
                    "part (a list that spmd returned, passed on whole), or place the "
                    "whole tensors anew"
                )
        order = self._known_orders().get((rank, kind), [])
        arena = self.arenas[rank]
        return Session(self, where, replicas, arena, homes, order, ownership)

    def _closed(self, session: Session, kind: str, rank: int) -> None:
        session.close()
        if session.seen:
            self._known_orders()[rank, kind] = session.seen

    def _known_orders(self) -> dict[tuple[int, str], list[tuple[str, ...]]]:
        """What is learned of the calls' order: by a plan, for as long as it runs."""
        tracer = frame().tracer
        if tracer is None:
            return self.orders
        return tracer.orders.setdefault(id(self), dict(self.orders))

    def _mine(self, layout: Layout) -> bool:
        flat = layout.flat
        return flat is not None and flat.axes in (self.axis, ())

    # Unit calls

    def unit(self, run: Callable[..., Any], call: Any) -> Callable[..., Any]:
        if call.frame.whole:  # its parameters are plain tensors, and its own
            return run

        def sharded(params: Any, *inputs: Any, **keywords: Any) -> Any:
            leaves, treedef = tree.flatten(params, is_leaf=is_sharded)
            mine = [i for i, x in enumerate(leaves) if self._reads(x, call)]
            entered = not call.frame.path and self._enter_plain(
                leaves, call, (inputs, keywords)
            )
            if not mine:
                params = tree.unflatten(treedef, leaves) if entered else params
                return run(params, *inputs, **keywords)
            if call.frame.tracer is not None:
                call.frame.tracer.takes(call.name, [leaves[i] for i in mine])
            if _torch.functorch_active() or _torch.forward_ad_active():
                check_derivatives(call, [leaves[i] for i in mine], (inputs, keywords))
                self._compose(leaves, mine, call)
                return run(tree.unflatten(treedef, leaves), *inputs, **keywords)
            with label(call.name, "forward"):
                passage, views, token = self._enter(leaves, mine, call)
            out = run(tree.unflatten(treedef, leaves), *inputs, **keywords)
            flat, spec = tree.flatten(out)
            given = tree.leaves((inputs, keywords))
            thread = running().thread
            token = thread.token if thread is not None else token
            forget = not running().recompute and not self.keeps
            token, flat = leave(passage, token, views, given, flat, forget)
            if thread is not None and token is not None:
                thread.token = token
            return tree.unflatten(spec, flat)

        return sharded

    def _reads(self, leaf: Any, call: Any) -> bool:
        """Whether this call gathers the leaf: it is ours, and no inner unit's."""
        if not isinstance(leaf, Sharded) or not self._mine(leaf.layout):
            return False
        owner = leaf.layout.flat.buffer.partition(":")[0]  # type: ignore[union-attr]
        return call.unit.whole or not owner.startswith(call.name + "/")

    def _enter_plain(self, leaves: list[Any], call: Any, inputs: Any) -> bool:
        """Whole parameters as each rank's own: their gradients are means from here on.

        Not those that the gradient call around will average itself.
        """
        session, entered = call.frame.session(self), False
        functional = _torch.functorch_active()
        for i, x in enumerate(leaves):
            if not isinstance(x, Tensor) or not (x.requires_grad or functional):
                continue
            averaged = session is not None and session.averages(x)
            if x.is_floating_point() and not (averaged and not functional):
                if call.frame.staged:
                    raise LawError(_MADE.format(call.name))
                check_derivatives(call, [x], inputs)
                at = here(self.mesh)
                leaves[i], entered = apply_map(x, ENTER, group(self.axes, at)), True
        return entered

    def _enter(self, leaves: list[Any], mine: list[int], call: Any) -> Any:
        """Takes in a call's parameters; ``leaves`` then hold the views."""
        f = call.frame
        session = f.session(self)
        if session is None:
            raise RuntimeError(f"{call.name} runs outside the sharded function")
        uses = []
        for positions in by_buffer(leaves, mine):
            chosen = [leaves[i] for i in positions]
            home, flat = home_of(chosen, session.coordinates)
            layouts = [x.layout for x in chosen]
            uses.append(Use(home, positions, layouts, flat))
        staged = f.handlers[0].decides
        gathered = Gathered(call.numbers)
        passage = Passage(session, call.name, gathered, f.micro, uses, f.reduce, staged)
        session.take(passage, f.compute)
        thread = running().thread
        token, views = enter(passage, None if thread is None else thread.token)
        if thread is not None and token is not None:
            thread.token = token
        order = [i for use in uses for i in use.positions]
        for i, view in zip(order, views, strict=True):
            leaves[i] = view
        return passage, views, token

    def _compose(self, leaves: list[Any], mine: list[int], call: Any) -> None:
        """The same by differentiable collectives, of any order and under any map."""
        where, _ = self.groups()
        for positions in by_buffer(leaves, mine):
            chosen = [leaves[i] for i in positions]
            place, at = chosen[0].layout.flat, here(self.mesh)
            flat = joined(chosen, at.mesh.coordinates(at.rank))
            if call.frame.compute is not None and flat.is_floating_point():
                flat = flat.to(call.frame.compute)
            name = f"{call.name}({chosen[0].layout.name})"
            flat = self._spread(flat, where, place.size, name)
            for i, x in zip(positions, chosen, strict=True):
                start, shape = x.layout.flat.offset, whole_shape(x.layout)
                count = torch.Size(shape).numel()
                leaves[i] = Dense.apply(flat[start : start + count].view(shape))

    def _spread(self, flat: Tensor, where: RankGroup, size: int, name: str) -> Tensor:
        """A rank's range as the whole buffer, under the mean over ranks."""
        _, replicas = self.groups()
        enter = replace(ENTER, what=name)
        if replicas is not None:
            flat = apply_map(flat, enter, replicas)
        return apply_map(flat, replace(GATHER, what=name) if size > 1 else enter, where)

    def reduce(self, flat: Tensor, session: Session, home: Home) -> Tensor:
        """The transpose of :meth:`_spread`."""
        how, mean = (replace(m, what=home.name) for m in (REDUCE, MEAN))
        flat = apply_map(flat, how if self.zero else mean, session.where)
        return (
            flat
            if session.replicas is None
            else apply_map(flat, mean, session.replicas)
        )

    # Gradient calls

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def sharded(call: GradientCall) -> Outcome:
            at, f = here(self.mesh), frame()
            args = settle(call.args, at.mesh.coordinates(at.rank))
            composed = _torch.functorch_active() or _torch.forward_ad_active()
            ownership = f.session(self).ownership
            session = self._session(
                (args, call.keywords), "gradient", at.rank, ownership
            )
            session.differentiated = [args[i] for i in call.argnums]
            ports = {} if composed else open_ports(args, call.argnums, self._mine)
            if not at.compared and at.link.moves and not composed:
                check_whole(session, group(session.mean_axes, at))
            sizes = tuple((a, self.mesh.axes[a]) for a in self.axes)
            where = tuple((self.mesh.coordinate(a, at.rank), n) for a, n in sizes)
            # In place of the plain call's: a loss is under one mean of ours.
            others = [(h, kept) for h, kept in f.sessions if h is not self]
            within = replace(
                f,
                sessions=(*others, (self, session)),
                varies=(*f.varies, *where),
            )
            try:
                with inside(within):
                    outcome = run(replace(call, args=args))
                session.finish()
                if f.tracer is not None:
                    whose = ownership.is_one_value
                    by = tuple(session.differentiated)
                    f.tracer.gradient(by, outcome.grads, whose)
                with internal():
                    grads = collected(
                        outcome.grads, args, call.argnums, ports, session.mean_size
                    )
            finally:
                for port in ports.values():
                    port.home.port = None
            self._closed(session, "gradient", at.rank)
            if f.tracer is not None:
                f.tracer.reduced(tuple(session.differentiated), grads)
            return averaged(replace(outcome, grads=grads), session, at)

        return sharded


class _Recorded(Noted):
    """``shard`` while a step is recorded: unit calls are noted, nothing is gathered."""

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        with inside(self.handler.entered(self, f, args, keywords)):
            return f(*args, **keywords)


_MADE = (
    "unit {!r} of a pipelined loss has a parameter that was made in the loss: whether "
    "it is one value on all ranks, whose gradient is a mean, or this rank's own, "
    "nobody can tell there. Make it inside the unit, of the parameter itself"
)
