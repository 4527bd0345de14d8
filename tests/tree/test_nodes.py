"""Dataclasses that hold tensors are nodes at first sight; what hides one is refused."""

import dataclasses
import enum
import functools
from collections import UserDict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import assert_equals_one_device
from tests.checks import same
from tests.covering import examples
from tests.models import layers as plain_layers

MESH = ff.make_mesh({"data": 2}, "simulated")
T = TypeVar("T")


def held(**options):
    """A dataclass of its own for whoever asks: a class is seen first only once."""

    @dataclass(**options)
    class Held:
        x: Any
        name: str = "h"
        more: Any = None

    return Held


# What a dataclass is as a node


@dataclass
class Plain:
    x: Any
    scale: float = 1.0
    count: int = field(default=0, init=False)
    names: list = field(default_factory=lambda: ["a"])
    limit: ClassVar[int] = 3
    start: InitVar[int] = 5

    def __post_init__(self, start):
        self.count += start  # run again it would differ


@dataclass(frozen=True)
class Frozen:
    x: Any
    act: Callable = torch.relu


@dataclass(slots=True, kw_only=True)
class Slotted:
    x: Any
    note: str = ""


@dataclass(frozen=True, slots=True)
class Both(Frozen):
    y: Any = None


@dataclass
class Below(Plain):
    z: Any = 0


@dataclass(eq=False)
class Of(Generic[T]):
    value: T


class Base:
    __slots__ = ("tag",)


@dataclass(slots=True)
class Tagged(Base):
    x: Any


def tagged(x):
    made = Tagged(x)
    made.tag = "kept"
    return made


MADE = {
    "plain": (Plain, ["x", "scale", "count", "names/0"]),
    "frozen": (Frozen, ["x", "act"]),
    "slots": (lambda x: Slotted(x=x), ["x", "note"]),
    "inherited slots": (lambda x: Both(x, y=x), ["x", "act", "y"]),
    "inherited": (Below, ["x", "scale", "count", "names/0", "z"]),
    "generic": (Of[Any], ["value"]),
    "beside": (tagged, ["x"]),
}


@pytest.mark.parametrize("kind", MADE)
def test_its_fields_are_its_children_in_order_with_their_names(kind):
    make, names = MADE[kind]
    value = make(torch.ones(2))
    found, leaves, treedef = tree.flatten_with_paths(value)
    assert found == names
    again = tree.unflatten(treedef, leaves)
    assert type(again) is type(value) and again is not value
    for f in dataclasses.fields(value):
        mine, theirs = getattr(value, f.name), getattr(again, f.name)
        assert mine is theirs or mine == theirs
    assert getattr(again, "tag", "kept") == "kept"
    assert isinstance(hash(treedef), int)
    assert treedef == tree.flatten(make(torch.zeros(3)))[1]
    nested = tree.map(lambda x: x, {"a": [value]})
    assert tree.paths(nested) == [f"a/0/{name}" for name in names]


VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=2), st.just(torch.ones(1))),
    lambda below: st.one_of(
        st.lists(below, max_size=2),
        st.dictionaries(st.sampled_from("ab"), below, max_size=2),
        st.builds(Frozen, below),
        st.builds(lambda x: Slotted(x=x), below),
    ),
    max_leaves=4,
)


@settings(max_examples=examples(15))
@given(st.lists(VALUES, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_a_drawn_dataclass_is_rebuilt_as_it_was(values, frozen, slots):
    names = [f"f{i}" for i in range(len(values))]
    made = dataclasses.make_dataclass("Drawn", names, frozen=frozen, slots=slots)
    value = made(*values)
    leaves, treedef = tree.flatten(value)
    if not any(isinstance(x, torch.Tensor) for x in tree.leaves(values)):
        assert leaves == [value] and leaves[0] is value  # a config
        return
    expected = tree.leaves(values)
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))
    again = tree.unflatten(treedef, leaves)
    assert type(again) is made
    for name, v in zip(names, values, strict=True):
        assert tree.flatten(getattr(again, name))[1] == tree.flatten(v)[1]


def test_a_tensor_beside_the_fields_is_refused():
    @dataclass
    class Masked:
        x: Any

        def __post_init__(self):
            self.mask = self.x > 0

    with pytest.raises(TypeError, match=r"Masked holds tensors in 'mask'.*init=False"):
        tree.leaves([Masked(torch.ones(1))])


def test_it_is_as_a_named_tuple_where_trees_are_compared():
    left, right = Frozen(torch.ones(1)), Frozen([torch.ones(1)])
    with pytest.raises(tree.TreeMismatch, match="at 'x': expected a leaf"):
        tree.check_same_structure(left, right)
    with pytest.raises(tree.TreeMismatch, match="at 'a': expected a leaf"):
        tree.check_same_structure({"a": 1}, {"a": left})


# Whoever registered the class


GLOBAL = optree.registry.__GLOBAL_NAMESPACE
KNOWN = {
    "optree": (lambda cls: optree.register_pytree_node(cls, lambda h: ((h.x,), None),
        lambda _, c: cls(*c), namespace=GLOBAL), ["0"]),
    "dataclass": (lambda cls: torch_pytree.register_dataclass(cls,
        field_names=["x", "more"], drop_field_names=["name"]), ["x", "more/0"]),
    "node": (lambda cls: torch_pytree.register_pytree_node(cls,
        lambda h: ([h.x, h.more], ["unhashable"]), lambda c, _: cls(c[0])),
        ["0", "1/0"]),
    "export": (torch.export.register_dataclass, ["x", "name", "more/0"]),
}  # fmt: skip


@pytest.mark.parametrize("how", KNOWN)
def test_a_class_that_others_knew_before_is_what_it_was(how):
    cls, (register, expected) = held(), KNOWN[how]
    register(cls)
    value = cls(torch.ones(1), "other", [2])
    paths, leaves, treedef = tree.flatten_with_paths(value)
    assert isinstance(hash(treedef), int) and paths == expected
    assert leaves[0] is value.x and all(x in ("other", 2) for x in leaves[1:])
    again = tree.unflatten(treedef, leaves)
    assert again.name == ("other" if how == "export" else "h")


# Units, states and batches of them


@dataclass
class Hidden:
    x: torch.Tensor
    name: str = "h"


@dataclass(frozen=True)
class Layer:
    w: torch.Tensor
    b: torch.Tensor
    name: str = "layer"


@dataclass
class Model:
    layers: list
    head: Layer


RAN = []
OPTIMIZER, X = ff.sgd(0.25), torch.arange(12.0).reshape(4, 3)


def affine(w, b, x):
    return torch.relu(x @ w) + b


@ff.unit
def of_classes(p, h):
    RAN.append(h.x.dtype)
    return Hidden(affine(p.w, p.b, h.x), h.name)


def model():
    *layers, head = [Layer(**p) for p in plain_layers(4, 3)]
    return Model(layers, head)


def loss_of_classes(params, batch):
    h = Hidden(batch)
    for p in [*params.layers, params.head]:
        h = of_classes(p, h)
    return h.x.sum(-1).mean()


STACKS = {
    "zero=0": lambda s: ff.shard(s, MESH, "data", zero=0),
    "shard(remat)": lambda s: ff.shard(ff.remat(s), MESH, "data"),
    "donate": lambda s: ff.donate(ff.shard(ff.accumulate(s, 2), MESH, "data", zero=2)),
}


@pytest.mark.parametrize("stack", STACKS)
def test_a_state_of_dataclasses_is_that_of_one_device(stack):
    step = OPTIMIZER(ff.value_and_grad(loss_of_classes))
    state = ff.TrainState(model(), OPTIMIZER.init(model()))
    goes_on = {"goes_on": lambda out: out[0]}
    assert_equals_one_device(step, STACKS[stack](step), MESH, state, X, **goes_on)


def test_precision_casts_what_one_holds():
    RAN.clear()
    ff.precision(ff.remat(ff.value_and_grad(loss_of_classes)), torch.bfloat16)(
        model(), X
    )
    assert set(RAN) == {torch.bfloat16} and len(RAN) >= 8  # each twice


# What is out of sight


class Opaque:
    def __init__(self, x):
        self.x = x


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@dataclass
class Listed(list):
    x: Any = None


HIDES = {
    "an object": Opaque,
    "slots": Slots,
    "a namespace": lambda x: SimpleNamespace(x=x),
    "nested": lambda x: Opaque([{"a": Slots(x)}]),
    "a mapping": lambda x: UserDict(x=x),
    "a set": lambda x: {x},
    "a dataclass that is a list": lambda x: Listed(x),
}


@pytest.mark.parametrize("kind", HIDES)
def test_what_hides_a_tensor_is_refused_with_the_way_out(kind):
    value = HIDES[kind](torch.ones(4, 3))
    identity = ff.unit(lambda p, x: x)
    opened = ff.unit(lambda p, x: torch.ones(2))
    way = "holds a tensor out of sight.*fsfunc.tree.register_node"
    with pytest.raises(TypeError, match=rf"unit\(.*is given .* at 'inputs/0/a'.*{way}"):
        opened({}, {"a": value})
    with pytest.raises(TypeError, match=f"is given.*at 'keywords/x'.*{way}"):
        opened({}, x=value)
    gives = ff.unit(lambda p, x: {"y": HIDES[kind](x)})
    with pytest.raises(TypeError, match=f"returns .* at 'y'.*{way}"):
        gives({}, torch.ones(4, 3))
    with pytest.raises(
        TypeError, match=f"value_and_grad is given.*'argument 0/p'.*{way}"
    ):
        ff.value_and_grad(lambda p: torch.ones(()))({"p": value})

    def place():
        step = ff.shard(lambda p, x: identity({}, x), MESH, "data")
        ff.place(step, {"p": value}, torch.ones(1))

    with pytest.raises(TypeError, match=f"place is given.*at 'p'.*{way}"):
        ff.spmd(place, MESH)()
    with pytest.raises(TypeError, match=f"local_batch is given.*at 'b'.*{way}"):
        ff.spmd(lambda: ff.local_batch({"b": value}, MESH, "data"), MESH)()


class Color(enum.Enum):
    RED = 1


@dataclass
class Config:
    width: int = 3
    act: Callable = torch.relu
    color: Color = Color.RED
    path: Path = Path("a")


HARMLESS = {
    "a config": Config(),
    "an object": Opaque({"a": [1, (2.0, None)]}),
    "a function": torch.relu,
    "a closure": functools.partial(torch.mul, torch.ones(1)),
    "a module": torch.nn.Linear(2, 2),
    "a class": Opaque,
    "a generator": torch.Generator(),
    "a path": Path("a"),
    "a mapping": UserDict(a=1),
    "an enum": Color.RED,
    "a dtype": torch.float32,
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_holds_no_tensor_goes_in_and_out_as_it_is(kind):
    value = HARMLESS[kind]
    unit = ff.unit(lambda p, x, beside: (x * p, beside))

    def loss(w, x):
        y, beside = unit(w, x, value)
        assert beside is value
        return y.sum()

    for transform in (lambda f: f, ff.remat):
        grad = transform(ff.value_and_grad(loss))(torch.ones(2), torch.ones(2))[1]
        assert torch.equal(grad, torch.ones(2))


# Fields of which torch's flatten function says nothing


def registered(**fields):
    """A dataclass of its own with these fields, as torch registers it."""
    cls = dataclasses.make_dataclass("Known", [(k, Any) for k in fields])
    torch_pytree.register_dataclass(cls)
    return cls(**fields)


FIELDS = {
    "a word": {"w": torch.ones(3), "b": torch.ones(2), "name": "x"},
    "a word first": {"name": "x", "w": torch.ones(3)},
    "a count": {"w": torch.ones(3), "n": torch.arange(2), "more": 3},
    "nothing": {"w": torch.ones(3), "b": None, "name": "x"},
    "a tree": {"w": [torch.ones(3), 1], "b": {"c": "x"}},
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_gradient_has_the_structure_of_what_torch_knows(name):
    """With None for what is not differentiated, which torch's own would leave out."""
    params, plain = registered(**FIELDS[name]), FIELDS[name]
    read = ff.unit(lambda p, x: sum(w.square().sum() for w in floats(p)) * x.mean())
    step, x = OPTIMIZER(ff.value_and_grad(read)), torch.ones(2)
    expected = step(ff.TrainState(plain, OPTIMIZER.init(plain)), x)[0].params
    state = ff.TrainState(params, OPTIMIZER.init(params))
    found = step(state, x)[0].params
    assert type(found) is type(params) and vars(found).keys() == plain.keys()
    same(vars(found), expected)
    paths, leaves, treedef = tree.flatten_with_paths(params)
    assert all(path.partition("/")[0] in plain for path in paths)
    assert tree.flatten(tree.unflatten(treedef, [None] * len(leaves)))[0] == []
    sharded = ff.shard(step, MESH, "data")
    goes_on = {"goes_on": lambda out: out[0]}
    assert_equals_one_device(step, sharded, MESH, state, X, **goes_on)


def floats(params):
    found = [x for x in tree.leaves(params) if isinstance(x, torch.Tensor)]
    return [x for x in found if x.is_floating_point()]


# Modules that hold parameters


@pytest.mark.parametrize(
    "module, way",
    [
        (torch.nn.ParameterDict({"w": torch.ones(3)}), r"Give dict\(...\) of it"),
        (torch.nn.ParameterList([torch.ones(3)]), r"Give list\(...\) of it"),
    ],
)
def test_parameters_in_a_module_are_told_with_the_way_out(module, way):
    read = ff.unit(lambda p, x: sum(w.sum() for w in tree.leaves(p)) * x.mean())
    step = OPTIMIZER(ff.value_and_grad(read))
    for params in (module, {"of": module}):
        with pytest.raises(TypeError, match=way):
            read(params, X)
        with pytest.raises(TypeError, match=way):
            ff.value_and_grad(read)(params, X)
        with pytest.raises(TypeError, match=f"(?i){way}"):
            ff.init_state(step, params, OPTIMIZER, X)


def test_a_module_is_no_function_that_makes_parameters():
    with pytest.raises(TypeError, match="Linear, a module, .*ff.from_module"):
        ff.init_state(lambda s, x: (s, x), torch.nn.Linear(2, 2), OPTIMIZER, X)
