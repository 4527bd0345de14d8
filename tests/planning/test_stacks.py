"""A stack's data, its code and what it builds are one thing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.planning.stacks import Stack
from tests.checks import refused
from tests.models import chain

WIDTH, ROWS = 4, 8


@ff.unit
def layer(p, x):
    return torch.tanh(ff.checkpoint_name(x @ p, "product"))


OPTIMIZER = ff.sharded_adam(1e-2)
train_step = OPTIMIZER(ff.value_and_grad(chain(layer)))


def init():
    return [torch.zeros(WIDTH, WIDTH) for _ in range(4)]


@st.composite
def stacks(draw):
    zero = st.integers(0, 3)
    axes, keywords = draw(
        st.sampled_from(
            [
                ({}, {}),
                ({"data": 2}, {"zero": zero}),
                ({"node": 2, "data": 2}, {"zero": zero}),
                ({"pipe": 2}, {}),
                ({"data": 2, "pipe": 2}, {"zero": zero}),
                ({"pipe": 2, "data": 2}, {"zero": zero}),
            ]
        )
    )
    keywords = {name: draw(value) for name, value in keywords.items()}
    if "pipe" in axes:
        names = ["gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v"]
        keywords["schedule"] = draw(st.sampled_from(names))
        keywords["microbatches"] = draw(st.sampled_from([1, 2]))
    return Stack(
        tuple(axes.items()),
        remat=draw(st.sampled_from([None, "always", "except_last"])),
        accumulate=draw(st.sampled_from([1, 2])),
        compute=draw(st.sampled_from([None, torch.bfloat16])),
        reduce=draw(st.sampled_from([None, torch.float32])),
        offload=draw(st.sampled_from([(), ("moments",), ("activations",)])),
        donate=draw(st.booleans()),
        **keywords,
    )


def executed(code):
    """The mesh and the step that code makes."""
    make_mesh = lambda axes: ff.make_mesh(axes, "abstract")  # noqa: E731
    every = {name: getattr(ff, name) for name in dir(ff)}  # some come when asked for
    abstract = SimpleNamespace(**{**every, "make_mesh": make_mesh})
    names = {"ff": abstract, "torch": torch, "train_step": train_step}
    exec(code, names)
    return names["mesh"], names["step"]


def seen(step, mesh, parts):
    found = ff.plan(step, init, OPTIMIZER, torch.zeros(ROWS // parts, WIDTH), mesh=mesh)
    return [
        (r.rank, r.alike, [(e.op, e.axis, e.bytes, e.dtype) for e in r.records])
        + (r.peak_bytes, r.work)
        for r in found.ranks
    ]


@settings(max_examples=6)
@given(stacks())
def test_code_and_build_are_one_step(stack):
    mesh, written = executed(stack.code)
    built = stack.apply(train_step, mesh)
    assert mesh.axes == dict(stack.axes)
    kinds = [type(h) for h in getattr(written, "interpretations", ())]
    assert kinds == [type(h) for h in getattr(built, "interpretations", ())]
    assert seen(written, mesh, stack.parts) == seen(built, mesh, stack.parts)


@pytest.mark.parametrize("policy", [ff.SaveOnly("a", 'b"'), ff.SaveAllBut()])
def test_a_policy_is_written_as_it_is(policy):
    _, written = executed(Stack((("data", 2),), zero=3, remat=policy).code)
    assert written.__wrapped__.__wrapped__.interpretations[0].policy == policy


def test_a_mesh_of_other_axes_is_refused():
    mesh, stack = ff.make_mesh({"data": 4}, "abstract"), Stack((("data", 2),), zero=1)
    call = lambda: stack.apply(train_step, mesh)  # noqa: E731
    refused(call, ValueError, "for the axes {'data': 2}, not")
