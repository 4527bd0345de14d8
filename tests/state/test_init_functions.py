"""States of functions: made in parts, and the same bits wherever they are made."""

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsfunc as ff
from fsfunc import _torch, tree
from fsfunc.runtime import random_blocks
from fsfunc.sharded.leaf import is_sharded
from fsfunc.state import init_tape
from tests.checks import same
from tests.covering import examples
from tests.models import chain
from tests.probes import LiveBytes

pytestmark = pytest.mark.filterwarnings("ignore:.*moments have 16 bits")
SIZES = [2, 1, 3, 5]
optimizer = ff.sharded_adam(0.1)


def read(params, x):
    total = x.sum()
    for p in tree.leaves(params):
        total = total + 0 * p.double().sum() if p.is_floating_point() else total
    return total


unit = ff.unit(read)
X = torch.ones(2)


def step_of(names, optimizer=optimizer):
    """A step whose units are the entries of a dict, each one's leaves a buffer."""
    loss = lambda p, x: sum(unit(p[k], x) for k in names)  # noqa: E731
    return optimizer(ff.value_and_grad(loss))


@contextmanager
def small_blocks(block, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_blocks, "BLOCK", block)
        patch.setattr(init_tape, "PIECE", piece)
        yield


def alone(init, names, seed=5):
    torch.manual_seed(seed)
    state = ff.init_state(step_of(names), init, optimizer, X)
    return state.params, torch.random.get_rng_state()


def everywhere(init, names, sizes=SIZES, zeros=(0, 1, 2, 3), seed=5):
    """The whole parameters as every mesh makes them: nothing is sent."""
    for n in sizes:
        for zero in zeros:
            mesh = ff.make_mesh({"data": n}, "simulated")

            def main(mesh=mesh, zero=zero):
                torch.manual_seed(seed)
                step = ff.shard(step_of(names), mesh, "data", zero=zero)
                with ff.ledger() as log:
                    state = ff.init_state(step, init, optimizer, X)
                assert log.records == []
                after = torch.random.get_rng_state()
                for x in tree.leaves(state.params, is_leaf=is_sharded):
                    assert not isinstance(x, _torch.FakeTensor)
                    assert is_sharded(x)
                    shard = x.packed
                    assert not shard.flat[max(b for _, b in shard.ranges) :].any()
                return ff.unshard(state.params), after

            yield from ff.spmd(main, mesh)()


# Laws

SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (4, 4), (2, 3, 4), (40,)])
MAKERS = {
    "zeros": lambda s: torch.zeros(s),
    "randn": lambda s: torch.randn(s),
    "double": lambda s: torch.rand(s, dtype=torch.float64),
    "bfloat16": lambda s: torch.randn(s).bfloat16(),
    "filled": lambda s: torch.empty(s).normal_(1, 2).clamp_(min=0.5),
    "computed": lambda s: torch.exp(torch.rand(s)) * 0.3 + torch.randn(s) ** 2,
    "normed": lambda s: torch.randn(s) / math.prod(s or (1,)) ** 0.5 + torch.ones(()),
    "scaled by itself": lambda s: (lambda x: x * x.abs().sum())(torch.randn(s)),
    "transposed": lambda s: torch.randn(s[::-1]).permute(tuple(range(len(s)))[::-1]),
    "a chunk": lambda s: (
        torch.randn(3 * math.prod(s)).chunk(3)[1].view(s)
        if math.prod(s)
        else torch.zeros(s)
    ),
    "a row zero": lambda s: _first_zero(torch.rand(s)),
    "in halves": lambda s: _halves(torch.empty(math.prod(s))).mul_(3).view(s),
    "whole numbers": lambda s: torch.randint(-4, 9, s).float(),
    "a permutation": lambda s: torch.randperm(math.prod(s)).float().view(s),
    "broadcast": lambda s: torch.randn(s) * torch.rand(s[-1:]),
    "exponential": lambda s: torch.empty(s).exponential_(),
    "coins": lambda s: torch.empty(s).bernoulli_(0.5),
    "unlike coins": lambda s: torch.empty(s).bernoulli_(torch.rand(s)),
}


def _first_zero(x):
    if x.ndim and len(x):
        x[0].fill_(0)
    return x


def _halves(x):
    x[: len(x) // 2].normal_()
    x[len(x) // 2 :].uniform_(2, 3)
    return x


@st.composite
def inits(draw):
    """(function, its units): leaves of many makes, some of them views."""
    groups = draw(
        st.lists(
            st.lists(st.tuples(st.sampled_from(sorted(MAKERS)), SHAPES), max_size=3),
            min_size=1,
            max_size=3,
        )
    )
    views = draw(st.booleans())

    def init():
        made = {
            f"u{i}": {f"{j}": MAKERS[kind](shape) for j, (kind, shape) in enumerate(g)}
            for i, g in enumerate(groups)
        }
        every = torch.randn(10, 3)
        made["u0"]["first"] = every[:5]
        if views:
            made["u0"]["turned"] = every[5:].t()
        every.mul_(2)  # all of them see it
        return made

    return init, [f"u{i}" for i in range(len(groups))]


@given(
    inits(),
    st.sampled_from(SIZES),
    st.integers(0, 3),
    # The third as on a GPU: a block is one piece.
    st.sampled_from([(5, 5), (16, 8), (24, 24), (64, 32), (1 << 17, 1 << 15)]),
)
@settings(max_examples=examples(12))
def test_the_values_do_not_depend_on_the_mesh(case, n, zero, blocks):
    init, names = case
    with small_blocks(*blocks):
        expected, after = alone(init, names)
        for found, then in everywhere(init, names, [n], [zero]):
            same(found, expected)
            assert torch.equal(then, after)


def test_a_gpu_draws_many_numbers_by_one_call(monkeypatch):
    """And any range of them has the same bits, as it is drawn by the same calls."""
    block = random_blocks.block_size(torch.device("cuda"))
    assert block > 16 * random_blocks.block_size(torch.device("cpu"))
    monkeypatch.setattr(random_blocks, "block_size", lambda device: block)
    sizes = []

    def fill(x, generator):
        """Values that depend on how many there are, as a GPU's do."""
        sizes.append(len(x))
        x.fill_(generator.initial_seed() % 1000 + len(x) / block)

    size = 2 * block + 12_345
    whole, part = torch.empty(size), torch.empty(block)
    random_blocks.draw(fill, (1, 2), whole, 0, size)
    assert sizes == [block, block, 12_345]
    random_blocks.draw(fill, (1, 2), part, size - block, size)
    assert sizes[3:] == [block, 12_345]
    assert torch.equal(part, whole[-block:]) and len(whole.unique()) == 3


def test_long_leaves_are_cut_alike():
    """Over several blocks, with what torch computes in other ways at a range's end."""

    def init():
        q = torch.randn(3 * 70_000)
        w = torch.empty(150_001)
        w[:100_003].normal_()
        w[100_003:].uniform_()
        return {
            "a": {
                "w": (torch.rand(200_003) ** 2.7).sinh_(),
                "w.t": torch.randn(300, 301).t(),
            },
            "b": {"w": w.tanh_(), **dict(zip("qkv", q.chunk(3), strict=True))},
        }

    expected, _ = alone(init, "ab")
    q = torch.cat([expected["b"][k] for k in "qkv"])
    one, other = q[:70_000], q[random_blocks.BLOCK :][:70_000]  # of two blocks
    assert torch.stack([one, other]).corrcoef()[0, 1].abs() < 0.02
    assert abs(q.mean()) < 0.01 and abs(q.std() - 1) < 0.01
    for found, _ in everywhere(init, "ab", [3], [3]):
        same(found, expected)


# What the function does


def test_a_function_that_draws_nothing_gives_what_it_returns():
    kept = torch.arange(6.0)

    def init():
        place = torch.arange(10.0)[:, None] * torch.tensor([1.0, 0.5])
        table = torch.zeros(10, 4)
        table[:, 0::2], table[:, 1::2] = place.sin(), place.cos()
        small = torch.tensor([1.0, 2.0])
        small[0] = 5
        x = torch.ones(3, 3, dtype=torch.complex64) * (1 + 2j)
        flat = torch.zeros(6)
        flat += kept
        late = torch.full((4,), 2.0)
        late.data = torch.full((3,), 7.0)
        moved = torch.zeros(2, 3).t_()
        moved[0] = 1
        return {
            "a": {
                "table": table, "small": small, "flat": flat, "late": late,
                "moved": moved, "real": x.conj().imag.clone(), "tri": torch.ones(4, 4)
                .tril(), "eye": torch.eye(3) @ torch.ones(3, 2), "half": table.half(),
                "wide": torch.ones(1, 3).expand(4, 3), "kept": kept,
                "stacked": torch.stack([table, table * 2]), "q": torch.linalg.qr(
                    torch.eye(4) + 0.5)[0], "channels": torch.ones(1, 2, 3, 4).to(
                    memory_format=torch.channels_last) * 2,
            }
        }  # fmt: skip

    expected = init()
    found, _ = alone(init, "a")
    same(found, expected)
    for found, _ in everywhere(init, "a", [3]):
        same(found, expected)
    assert torch.equal(kept, torch.arange(6.0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=2)
        self.linear, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.lstm, self.attention = nn.LSTM(4, 3), nn.MultiheadAttention(4, 2)
        self.long, self.square = nn.Linear(300, 300), nn.Linear(40, 40)
        nn.init.trunc_normal_(self.long.weight, std=0.5, a=-1, b=1)
        nn.init.kaiming_uniform_(self.linear.weight, a=5**0.5)
        nn.init.orthogonal_(self.square.weight)
        self.linear.to(torch.float64)


def test_modules_are_made_as_they_make_themselves():
    init = lambda: {"m": dict(Model().named_parameters())}  # noqa: E731
    expected, _ = alone(init, "m")
    for found, _ in everywhere(init, "m", [3], [3]):
        same(found, expected)
    m = expected["m"]
    plain = init()["m"]
    assert {k: (x.shape, x.dtype) for k, x in m.items()} == {
        k: (x.shape, x.dtype) for k, x in plain.items()
    }
    assert m["long.weight"].abs().max() <= 1
    assert abs(m["long.weight"].std() - plain["long.weight"].std()) < 0.01
    square = m["square.weight"]
    assert torch.allclose(square @ square.t(), torch.eye(40), atol=1e-5)
    assert m["linear.weight"].dtype == torch.float64
    assert not m["norm.bias"].any() and (m["norm.weight"] == 1).all()


def test_seeds_inside_the_function_count():
    own = torch.Generator()

    def init():
        own.manual_seed(1)
        a = torch.randn(5, generator=own)
        own.manual_seed(1)
        b, c = (torch.randn(5, generator=own) for _ in range(2))
        with torch.random.fork_rng():
            torch.manual_seed(9)
            d = torch.randn(5)
        return {"a": {"a": a, "b": b, "c": c, "d": d, "e": torch.randn(5)}}

    one, other = alone(init, "a", 1)[0]["a"], alone(init, "a", 2)[0]["a"]
    assert torch.equal(one["a"], one["b"]) and not torch.equal(one["b"], one["c"])
    for k in "abcd":
        assert torch.equal(one[k], other[k])
    assert not torch.equal(one["e"], other["e"])
    for found, _ in everywhere(init, "a", [2], [3], seed=1):
        same(found["a"], one)


def test_a_given_tensor_is_taken_from_and_left_as_it_is():
    weight, buffer = nn.Parameter(torch.ones(6)), torch.zeros(6)

    def init():
        kept = weight.detach() * 1  # before it is written
        with torch.no_grad():
            buffer.copy_(torch.full((6,), 3.0))
        twice = buffer * 2
        return {"a": {"w": weight, "kept": kept, "b": buffer, "twice": twice, "n": 3}}

    names, reads = "a", lambda p, x: unit({k: p[k] for k in p if k != "n"}, x)
    step = optimizer(ff.value_and_grad(lambda p, x: reads(p["a"], x)))
    a = ff.init_state(step, init, optimizer, X).params[names]
    assert a["b"].tolist() == [3.0] * 6 and a["twice"].tolist() == [6.0] * 6
    assert a["n"] == 3 and a["kept"].tolist() == a["w"].tolist() == [1.0] * 6
    a["w"].add_(1)
    assert weight.tolist() == [1.0] * 6 and buffer.tolist() == [0.0] * 6


@pytest.mark.parametrize("size", [8, 200_000])  # one block, and several
def test_of_a_given_tensor_what_is_not_written_stays(size):
    def init():
        copied, drawn, filled = (torch.tensor(range(size)).float() for _ in range(3))
        copied[:4] = torch.randn(4)
        drawn[2:5].normal_()
        filled[-1].fill_(torch.zeros(()))
        return {"a": {"copied": copied, "drawn": drawn, "filled": filled}}

    expected, _ = alone(init, "a")
    plain = torch.arange(float(size))
    assert torch.equal(expected["a"]["copied"][4:], plain[4:])
    assert torch.equal(expected["a"]["drawn"][:2], plain[:2])
    assert torch.equal(expected["a"]["drawn"][5:], plain[5:])
    for found, _ in everywhere(init, "a", [1, 3], [3]):
        same(found, expected)


def test_a_number_does_not_widen_a_leaf_of_one_element():
    numbers = torch.tensor([0.3, 0.1], dtype=torch.float64)

    def init():
        x, y = torch.rand(1), torch.rand(1)
        z, h = torch.rand(()), torch.rand((), dtype=torch.half)
        first, second = numbers
        made = {"x": x * first, "y": y * second, "z": z * second}
        drawn = {"x": x, "y": y, "z": z, "h": h}
        return {"a": {**made, "h": h * second.float()}, "b": drawn}

    for seed in range(8):
        found, _ = alone(init, "ab", seed)
        x, y, z, h = (found["b"][k] for k in "xyzh")
        assert torch.equal(found["a"]["x"], x * numbers[0])
        assert torch.equal(found["a"]["y"], y * numbers[1])
        assert torch.equal(found["a"]["z"], z * numbers[1])
        assert torch.equal(found["a"]["h"], h * numbers[1].float())


def test_numbers_that_the_function_asks_for_are_computed():
    def init():
        w = torch.randn(70_000)
        count = 0
        while not bool((w.abs() < 3).all()):
            w = torch.where(w.abs() < 3, w, torch.randn_like(w))
            count += 1
        assert count > 0
        scale = float(w.std())
        return {"a": {"w": w / scale, "s": torch.tensor(scale)}}

    expected, _ = alone(init, "a")
    assert abs(expected["a"]["w"].std() - 1) < 1e-5
    assert expected["a"]["w"].abs().max() <= 3 / expected["a"]["s"]
    for found, _ in everywhere(init, "a", [3], [3]):
        same(found, expected)


BAD = {
    "asks for a tensor's value at .*test_init_functions.py:.*init_fn\\(\\)": lambda: (
        torch.randn(9)[torch.randn(9) > 0]
    ),
    "numpy|asks for a tensor's value": lambda: torch.randn(9).numpy(),
    "issues psum over .*init_fn\\(\\) in place": lambda: ff.psum(torch.ones(2), "data"),
    "longer in place at .*test_init_functions.py": lambda: torch.zeros(2).resize_(9),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_functions_are_told_the_way_out(message):
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        step = ff.shard(step_of("a"), mesh, "data")
        ff.init_state(step, lambda: {"a": {"w": BAD[message]()}}, optimizer, X)

    with pytest.raises(RuntimeError, match=message):
        ff.spmd(main, mesh)()


# Memory


N, LEAF = 8, 1 << 18
MAKES = {
    "drawn": (lambda: torch.randn(LEAF), 0),
    "computed": (lambda: torch.randn(LEAF).mul_(0.02).clamp_(-1, 1), 0),
    "a module's": (lambda: nn.Linear(LEAF // 4, 4, bias=False).weight, 0),
    "asks for a number": (lambda: nn.init.trunc_normal_(torch.empty(LEAF)), 2),
    "normal": (lambda: nn.init.xavier_normal_(torch.empty(LEAF // 4, 4)), 0),
    "a row zero": (lambda: nn.Embedding(LEAF // 4, 4, padding_idx=2).weight, 0),
    "cast": (lambda: torch.randn(LEAF, dtype=torch.float64).float(), 0),
    "in halves": (lambda: _halves(torch.empty(LEAF)).mul_(3), 0),
    "whole": (lambda: torch.randn(2, LEAF // 2).flip(0), 2),
}


@pytest.mark.parametrize(
    "name, zero", [*((name, 3) for name in MAKES), ("drawn", 0), ("whole", 2)]
)
def test_beside_the_shards_one_leaf_is_held(name, zero):
    make, leaves = MAKES[name]
    names = [f"u{i}" for i in range(8)]
    mesh = ff.make_mesh({"data": N}, "simulated")
    whole = 8 * 4 * LEAF

    def main():
        step = ff.shard(step_of(names, ff.sgd(0.1)), mesh, "data", zero=zero)
        if mesh.rank not in (0, 5):
            return 0
        with LiveBytes(fakes=False) as seen:
            params = ff.init_state(
                step, lambda: {k: {"w": make()} for k in names}, ff.sgd(0.1), X
            ).params
        assert len(params) == 8
        return seen.peak

    shards = whole if zero < 3 else whole // N
    with small_blocks(1 << 15, 1 << 13):
        room = leaves * 4 * LEAF + 4 * 4 * random_blocks.BLOCK
        peaks = ff.spmd(main, mesh)()
    assert shards <= max(peaks) and all(peak <= shards + room for peak in peaks)
    assert room + whole // N < whole / 2  # the bound means something


# Shapes alone


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_abstract_state_is_laid_out_as_a_real_one(zero):
    made = [optimizer, ff.sgd(0.1, momentum=0.9)][zero % 2]
    mesh = ff.make_mesh({"data": 3}, "simulated")
    init = lambda: {"a": {"w": torch.randn(5, 3), "b": torch.zeros(5)}, "n": 3}  # noqa: E731
    step = made(ff.value_and_grad(lambda p, x: unit(p["a"], x)))

    def main():
        sharded = ff.shard(step, mesh, "data", zero=zero)
        before = torch.random.get_rng_state()
        empty = ff.abstract_state(sharded, init, made, X)
        given = ff.abstract_state(sharded, init(), made, X)
        torch.random.set_rng_state(before)
        ff.abstract_state(sharded, init, made, X)
        assert torch.equal(torch.random.get_rng_state(), before)
        real = ff.init_state(sharded, init, made, X)
        assert tree.paths(empty) == tree.paths(real) == tree.paths(given)
        for x, y, z in zip(*map(leaves_of, (empty, given, real)), strict=True):
            assert type(x) is type(y) is type(z)
            if isinstance(z, Tensor):
                assert x.shape == y.shape == z.shape and x.dtype == z.dtype
            elif is_sharded(z):
                assert x.layout == y.layout == z.layout
                assert x.local.shape == y.local.shape == z.local.shape
                assert x.local.device.type == y.local.device.type == "meta"
                assert x.packed.ranges == z.packed.ranges
                assert (x.packed.whole is None) == (z.packed.whole is None)
            else:
                assert x == y == z

    ff.spmd(main, mesh)()


def leaves_of(t):
    return tree.leaves(t, is_leaf=is_sharded)


@pytest.mark.parametrize("kind", ["abstract", "simulated"])
def test_the_state_of_six_billion_parameters_takes_no_memory(kind):
    mesh = ff.make_mesh({"data": 2 if kind == "simulated" else 1024}, kind)
    layer = ff.unit(lambda p, x: x + torch.relu(x @ p["up"]) @ p["down"])

    def init():
        rand = torch.randn
        shapes = [(16384, 65536), (65536, 16384)]
        return [{"up": rand(shapes[0]), "down": rand(shapes[1])} for _ in range(3)]

    step = ff.shard(optimizer(ff.value_and_grad(chain(layer))), mesh, "data")

    def main():
        make = ff.init_state if kind == "abstract" else ff.abstract_state
        state = make(step, init, optimizer, torch.ones(1, 16384))
        return sum(x.numel() for x in leaves_of(state.params)), state

    count, state = ff.spmd(main, mesh)()[0]
    assert count == 3 * 2 * 16384 * 65536 > 6e9
    shard = leaves_of(state.params)[0].packed
    assert shard.flat.numel() == 2 * 16384 * 65536 // mesh.size
    assert shard.flat.device.type == ("cpu" if kind == "abstract" else "meta")
