"""What a user adds to fsfunc is written on public names alone: one of each kind.

That only these are used is read off this file.
"""

import ast
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device, check_collective, integers

layer = ff.unit(lambda w, x: x @ w)
mesh = ff.make_mesh({"data": 2}, "simulated")


def loss(params, x):
    for w in params:
        x = layer(w, x)
    return x.sum() / len(x)


def given():
    return [integers(3, 3), integers(3, 3, seed=1)], integers(4, 3, seed=2)


def on_ranks(fn, params, x):
    """What ``fn(params, rows)`` gives each rank, whole."""

    def main():
        rows = ff.local_batch(x, mesh, "data")
        return ff.unshard(fn(ff.place(fn, params, rows), rows))

    return ff.spmd(main, mesh)()


def steps(optimizer, stack):
    """A step over ranks, from a state that it is made for."""
    step, (params, x) = optimizer(stack), given()

    def main():
        rows = ff.local_batch(x, mesh, "data")
        return step(ff.init_state(step, params, optimizer, rows), rows)

    return ff.spmd(main, mesh)()


class Units(ff.Interpretation):
    """Of what a unit takes."""

    called = "changed units"

    def __init__(self, change):
        self.change = change

    def unit(self, run, call):
        return lambda w, x: run(self.change(w), x)


class Gradients(ff.Interpretation):
    """``how(run, call)``: of a gradient call."""

    def __init__(self, how):
        self.how = how

    def gradient(self, run):
        return lambda call: self.how(run, call)


PLAIN = ff.value_and_grad(loss)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("around", [lambda f: f, ff.remat])
def test_a_transform(around, zero):
    """Within shard of what a unit takes, and around it of parts."""
    signed = ff.transformed(PLAIN, Units(lambda w: w + (w.sign() - w).detach()))
    mine = around(ff.shard(signed, mesh, "data", zero=zero))
    assert_equals_one_device(signed, mine, mesh, *given())
    params, x = given()
    by_hand = PLAIN([w.sign() for w in params], x)
    assert torch.equal(signed(params, x)[0], by_hand[0])
    tripled = Units(lambda w: ff.tree.map(lambda part: 3 * part, w))
    mine = ff.transformed(ff.shard(PLAIN, mesh, "data", zero=zero), tripled)
    one = ff.transformed(PLAIN, tripled)
    assert_equals_one_device(one, around(mine), mesh, *given())


class Whole(ff.Interpretation):
    """``how(run, w, x)``: of unit calls, with what only whole parameters have."""

    called = "of whole parameters"

    def __init__(self, how):
        self.how = how

    def unit(self, run, call):
        return lambda w, x: self.how(run, w, x)


WHOLE = {
    "weight standardisation": lambda run, w, x: run((w - w.mean(0)) / w.std(0), x),
    "a spectral norm": lambda run, w, x: run(w / torch.linalg.svdvals(w)[0], x),
    "outputs": lambda run, w, x: x + run(w, x) * w[0].norm(),
    "two runs": lambda run, w, x: run(w, x) - run(w.T, x.flip(1)),
    "another call": lambda run, w, x: x @ w.softmax(1),
}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("name", WHOLE)
def test_a_transform_within_shard_computes_with_whole_parameters(name, zero):
    mine = ff.transformed(PLAIN, Whole(WHOLE[name]))
    params, x = given()
    params, x = [w.double().sin() for w in params], x.double().cos()
    for stack in (mine, ff.remat(mine), ff.accumulate(mine, 2)):
        sharded = ff.shard(stack, mesh, "data", zero=zero)
        assert_equals_one_device(mine, sharded, mesh, params, x, tolerance=1e-12)


def reading(seen):
    """Reads the gradients, and takes them again with the loss as it stands."""

    def read(run, call):
        value, (grads,) = run(call).mean()
        seen.append((value, ff.unshard(grads)))
        return run(call)

    return Gradients(read)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_transform_reads_means_outside_of_shard(weighted):
    def total(params, x):
        x = loss(params, x) * len(x)
        return ff.Weighted(x, torch.tensor(4.0)) if weighted else x

    plain, seen = ff.value_and_grad(total), []
    two = ff.accumulate(plain, 2)
    for stack in (two, ff.shard(two, mesh, "data"), ff.shard(plain, mesh, "data")):
        mine = ff.transformed(stack, reading(seen))

        def main(mine=mine):
            rows = ff.local_batch(given()[1], mesh, "data")
            found = ff.unshard(mine(ff.place(mine, given()[0], rows), rows))
            return found, seen[-1]

        for found, read in ff.spmd(main, mesh)():
            ff.testing.assert_equal(read, found)


def by_hand(how):
    """Changes gradients by hand, which within shard are not there."""

    def changed(run, call):
        outcome = run(call)
        return replace(outcome, grads=(how(*outcome.grads, call.args[0]),))

    return Gradients(changed)


HANDS = {
    "by their values": lambda grads, _: ff.tree.map(lambda g: g / 2, grads),
    "by others": lambda _, params: ff.tree.map(lambda p: p / 2, params),
}


@pytest.mark.parametrize("how", HANDS.values(), ids=HANDS)
def test_a_transform_changes_gradients_around_shard(how):
    params, x = given()
    around = ff.transformed(ff.shard(PLAIN, mesh, "data"), by_hand(how))
    changed = how(PLAIN(params, x)[1], params)
    found = on_ranks(around, params, x)[0][1]
    ff.testing.assert_equal(found, changed, tolerance=1e-9)
    kept = ff.transformed(ff.accumulate(PLAIN, 2), by_hand(lambda _, params: params))
    for _ in range(2):  # what it holds stays as it is
        assert torch.equal(kept(params, x)[1][0], params[0] / 2)
    ff.testing.assert_equal(params, given()[0])


def with_mean(change):
    """Gradients made anew of means; what is not linear is written in the same way."""

    def changed(run, call):
        outcome = run(call)
        _, (grads,) = outcome.mean()
        return outcome.with_mean((ff.tree.map(change, grads, call.args[0]),))

    return Gradients(changed)


@pytest.mark.parametrize("within", [False, True])
def test_a_transform_gives_other_gradients(within):
    def weighted(params, x):  # microbatches and ranks weigh 4, 2, 2 and 8
        w = x[:, 0].abs().max() * 2
        return ff.Weighted(w * loss(params, x), w)

    def stack(f):
        return ff.accumulate(halves(f), 2) if within else halves(ff.accumulate(f, 2))

    halves = lambda f: ff.transformed(f, with_mean(lambda g, _: g / 2))  # noqa: E731
    plain, (params, x) = ff.value_and_grad(weighted), given()
    x[:, 0] = torch.tensor([2.0, 1.0, 1.0, 4.0])
    value, grads = ff.accumulate(plain, 2)(params, x)
    found = stack(plain)(params, x)
    ff.testing.assert_equal(found, (value, [g / 2 for g in grads]), 1e-6)
    mine = halves(ff.shard(ff.accumulate(plain, 2), mesh, "data"))
    one = ff.accumulate(plain, 4)(params, x)
    for out in on_ranks(mine, params, x):
        ff.testing.assert_equal(out, (one[0], [g / 2 for g in one[1]]), 1e-6)


@pytest.mark.parametrize(
    "stack",
    [lambda f: f, lambda f: ff.accumulate(f, 2), lambda f: ff.shard(f, mesh, "data")],
)
def test_a_transform_within_a_loss_scale_reads_means(stack):
    plain, (params, x) = stack(PLAIN), given()

    def stepped(optimizer):
        step = optimizer(ff.transformed(plain, with_mean(torch.add)))  # not linear
        state = lambda: ff.init_state(step, params, optimizer, x)  # noqa: E731
        return lambda: ff.unshard(step(state(), x)[0].params)

    scaled = ff.spmd(stepped(ff.loss_scale(ff.sgd(1.0), initial=8.0)), mesh)()
    ff.testing.assert_equal(scaled[0], ff.spmd(stepped(ff.sgd(1.0)), mesh)()[0])


def test_a_collective():
    def halo(x):
        """The rank's rows, after the last one of the rank before."""
        n = ff.axis_size("data")
        back = ff.ppermute(x[-1:], "data", [(r, r + 1) for r in range(n - 1)])
        return torch.cat([back, x])

    def back(g):
        n = ff.axis_size("data")
        owed = ff.ppermute(g[:1], "data", [(r + 1, r) for r in range(n - 1)])
        return torch.cat([g[1:-1], g[-1:] + owed])

    check_collective(halo, transpose=back)
    check_collective(ff.collective(halo, back), transpose=back, sizes=(3,))
    with pytest.raises(AssertionError, match="the transpose of halo"):
        check_collective(ff.collective(halo, lambda g: g[1:]), under=["vjp"])


def test_the_way_back_of_a_collective_may_run_on_another_thread():  # as on GPUs
    total = ff.collective(*[lambda x: ff.psum(x, "data", to="V")] * 2)

    def main():
        x = torch.ones(2, requires_grad=True)
        y = total(x)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.autograd.grad, y.sum(), x).result()[0].tolist()

    assert ff.spmd(main, ff.make_mesh({"data": 1}, "simulated"))() == [[1.0, 1.0]]


def test_a_codec_in_place_of_a_gather():
    class Bytes(ff.Gather):
        """Whole numbers travel in one byte each."""

        exact = False

        def encode(self, part, dtype):
            return part.to(torch.int8)

        def decode(self, arrived, dtype, count):
            return arrived.to(dtype)

    mine = ff.shard(PLAIN, mesh, "data", gather=Bytes())
    with ff.ledger() as log:
        assert_equals_one_device(PLAIN, mine, mesh, *given(), calls=1)
    # nine numbers over two ranks: five bytes from each
    assert {r.bytes for r in log.of() if r.op == "all_gather"} == {5}


def test_a_schedule():
    rows = ["F0 F1 B1 B0", "F0 B0 F1 B1"]  # stage 1 takes the microbatches in turns
    schedule = ff.schedules.parse(["F0 F1 B0 B1", "F0 B0 F1 B1"])
    ff.verify(schedule)
    with pytest.raises(ff.schedules.ScheduleError):
        ff.verify(["F0 B0 F1 B1", "F1 F0 B1"])
    pipe = ff.make_mesh({"pipe": 2}, "simulated")
    for one in (schedule, rows):
        mine = ff.pipeline(PLAIN, pipe, "pipe", n_microbatches=2, schedule=one)
        assert_equals_one_device(PLAIN, mine, pipe, *given(), axis=())


class Counted(ff.Store):
    """The host's memory, of which it is known how much was taken."""

    kind = "counted"

    def __init__(self):
        super().__init__()
        self.taken = []

    def allocate(self, count, dtype, device):
        self.taken.append(count)
        return torch.empty(count, dtype=dtype)


@pytest.mark.parametrize("kind", ["params", "moments"])
def test_a_place_to_offload_to(kind):
    optimizer, store = ff.sharded_adam(0.1), Counted()
    plain = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
    beside, (params, x) = ff.offload(plain, **{kind: store}), given()

    def trained(step):
        rows = ff.local_batch(x, mesh, "data")
        state, _ = step(ff.init_state(step, params, optimizer, rows), rows)
        return ff.unshard(state.params)

    found, expected = (ff.spmd(trained, mesh)(step) for step in (beside, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert store.taken
    with pytest.raises(ValueError, match=f"{kind}='host', but .* to counted already"):
        ff.offload(beside, **{kind: "host"})


class Elsewhere(Counted):
    """Memory to and from which a driver of its own copies, always on time."""

    kind, copies_ahead = "elsewhere", False

    def __init__(self):
        super().__init__()
        self.addresses, self.elements = set(), {"in": 0, "out": 0}

    def allocate(self, count, dtype, device):
        x = super().allocate(count, dtype, device)
        self.addresses.add(x.untyped_storage().data_ptr())
        return x

    def copy(self, out, x, *, private=False):
        assert self.has(out) or self.has(x)
        if self.has(out) is not self.has(x):
            self.elements["in" if self.has(out) else "out"] += out.numel()
        return out.copy_(x)

    def copy_all(self, outs, xs, whole):
        for out, x in zip(outs, xs, strict=True):
            self.copy(out, x)

    def has(self, x):
        return x.untyped_storage().data_ptr() in self.addresses


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_place_with_copies_of_its_own(ranks, zero):
    """One class in one file: what ``offload`` copies, its ``copy`` copies.

    Gradients go in, and what an update has made; parameters come out for units, and
    with the gradients for the update. At zero=3 the second of three units reads its
    parameter again in the backward (the first needs none, the last one's is there). At
    zero=1 gradients lie there as a whole until they are reduced.
    """
    mesh = ff.make_mesh({"data": ranks}, "simulated")
    optimizer, x = ff.sharded_adam(0.1), integers(4, 4, seed=2)
    params = [integers(4, 4, seed=i) for i in range(3)]
    plain = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data", zero=zero)

    def trained(step, rows, elements):
        state = ff.init_state(step, params, optimizer, rows)
        before = dict(elements)
        state, _ = step(state, rows)
        copied = {way: elements[way] - before[way] for way in elements}
        return ff.unshard(state.params), copied

    own = 3 * 16 // ranks
    again, late = own // 3 if zero == 3 else 0, 3 * 16 if zero == 1 else 0

    def both():
        rows, store = ff.local_batch(x, mesh, "data"), Elsewhere()
        beside = ff.offload(plain, params=store)
        return trained(plain, rows, {}), trained(beside, rows, store.elements)

    for (expected, _), (found, copied) in ff.spmd(both, mesh)():
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert copied == {"in": 2 * own + late, "out": 3 * own + again + late}


STRANGE = {
    "another dtype": lambda count, dtype: torch.empty(count, dtype=torch.float16),
    "another shape": lambda count, dtype: torch.empty(count + 1, dtype=dtype),
    "a part": lambda count, dtype: torch.empty(count + 1, dtype=dtype)[1:],
    "nothing": lambda count, dtype: None,
    "the same again": None,
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_place_that_gives_other_memory_is_refused(case):
    class Strange(ff.Store):
        def __init__(self):  # and does not call what it derives from
            self.one = torch.empty(10**6).untyped_storage()

        def allocate(self, count, dtype, device):
            if STRANGE[case] is None:
                return torch.empty(0, dtype=dtype).set_(self.one, 0, (count,))
            return STRANGE[case](count, dtype)

    optimizer, (params, x) = ff.sharded_adam(0.1), given()
    step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
    stores = Strange(), Strange()
    step = ff.offload(step, params=stores[0], moments=stores[1])

    def main():
        ff.init_state(step, params, optimizer, ff.local_batch(x, mesh, "data"))

    with pytest.raises(
        TypeError, match="allocate of Strange is asked for torch.float32"
    ):
        ff.spmd(main, mesh)()
    for store in stores:
        store.one = None  # what lies in it would else stay known


def test_a_layout():
    grid = ff.make_mesh({"pipe": 2, "model": 2}, "simulated")
    parts = ff.Owned("pipe", 2, 1), ff.Split(1, "model", 2)
    layout = ff.Layout((3, 4), torch.float32, parts, "w")
    whole = integers(3, 4)

    def main():
        at = {axis: ff.axis_index(axis) for axis in grid.axes}
        mine = torch.empty(layout.local_shape(at))
        if at["pipe"] == 1:
            mine = whole.chunk(2, 1)[at["model"]].clone()
        leaf = ff.Sharded(mine, layout)
        return ff.unshard({"w": leaf})["w"], ff.global_norm({"w": leaf})

    for found, norm in ff.spmd(main, grid)():
        assert torch.equal(found, whole)
        torch.testing.assert_close(norm, whole.norm())


def test_an_optimizer():
    def update(grads, state, params=None):
        signs = ff.tree.map(torch.sign, grads)
        return ff.tree_scale(signs, -(2.0**-state)), state + 1

    slower = ff.Optimizer(lambda params: 0, update)
    step = slower(ff.value_and_grad(loss))
    params, x = given()
    mine, state = ff.shard(step, mesh, "data"), ff.TrainState(params, slower.init(0))
    goes_on = lambda out: out[0]  # noqa: E731
    assert_equals_one_device(step, mine, mesh, state, x, goes_on=goes_on)


def test_a_hardware():
    mine = ff.Hardware(
        "two boards",
        peak={"float32": 1e12},
        efficiency=((64, 0.5), (4096, 0.9)),
        attention=0.5,
        bandwidth=1e11,
        overhead=1e-6,
        levels=(ff.Level(ranks=0, bandwidth=1e9, latency=1e-5),),
        memory=2**33,
    )
    big = ff.make_mesh({"data": 16}, "abstract")
    optimizer = ff.sgd(0.1)
    step = ff.shard(optimizer(ff.value_and_grad(loss)), big, "data")
    init = lambda: [torch.zeros(512, 512) for _ in range(2)]  # noqa: E731
    plan = ff.plan(step, init, optimizer, torch.zeros(64, 512))
    took = ff.estimate(plan, mine)
    slower = plan.bytes() / 1e9  # what its links take, at least
    assert took.hardware == "two boards" and took.seconds > 0.9 * slower


def test_all_of_it_is_public():
    source = ast.parse(Path(__file__).read_text())
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            assert {a.name for a in node.names} <= {"ast", "fsfunc", "pytest", "torch"}
        if isinstance(node, ast.ImportFrom):
            assert (
                node.module.split(".")[0] != "fsfunc" or node.module == "fsfunc.testing"
            )
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr.startswith("__")
            if isinstance(node.value, ast.Name) and node.value.id == "ff":
                assert node.attr in dir(ff)


# What is refused


def scaled(run, call):
    """Some microbatches."""
    return run(replace(call, cotangent=2.0 if call.args[1][0, 0] > 0 else 1.0))


TWICE = Gradients(lambda run, call: run(call) and run(call))
LARGER = Gradients(lambda run, call: run(replace(call, cotangent=4.0)))


class Longer(ff.Gather):
    exact = False

    def encode(self, part, dtype):
        return torch.cat([part, part[:1]])


class Doubled(ff.Gather):
    exact = False

    def encode(self, part, dtype):
        return part.mul_(2)


def within(interpretation):
    """Of a transform within shard."""
    stack = ff.shard(ff.transformed(PLAIN, interpretation), mesh, "data")
    return lambda: on_ranks(stack, *given())


def gathered(codec):
    return lambda: on_ranks(ff.shard(PLAIN, mesh, "data", gather=codec), *given())


def some_microbatches():
    params, x = given()
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0])
    mine = ff.transformed(PLAIN, Gradients(scaled))
    ff.testing.assert_equal(mine(params, x), PLAIN(params, x))
    ff.accumulate(mine, 2)(params, x)


def writes():
    twice = ff.collective(
        lambda x: ff.psum(x.mul_(2), "data", to="V"),
        lambda g: ff.psum(2 * g, "data", to="V"),
    )
    ff.spmd(lambda: twice(torch.ones(2)), mesh)()


def reads(grad):
    """A collective's map reads what is differentiated."""

    def loss(w):
        scaled = ff.collective(
            lambda x: w * ff.psum(x, "data", to="V"),
            lambda g: w * ff.psum(g, "data", to="V"),
        )
        return scaled(torch.ones(3)).sum()

    return lambda: ff.spmd(lambda: grad(loss)(torch.tensor(2.0)), mesh)()


def delayed():
    """Keeps what was only recorded."""
    kept = {}

    def late(run, call):
        outcome, rank = run(call), ff.axis_index("data")
        before, kept[rank] = kept.get(rank), outcome.mean()[1]
        return outcome if before is None else outcome.with_mean(before)

    stack = ff.transformed(ff.shard(PLAIN, mesh, "data"), Gradients(late))
    steps(ff.sgd(0.5), stack)


def stepped_in_a_larger_backward():
    stack = ff.shard(ff.transformed(PLAIN, LARGER), mesh, "data")
    steps(ff.step_in_backward(ff.sgd(1.0)), stack)


def silent():
    decode = lambda self, arrived, dtype, n: arrived  # noqa: E731
    type("Silent", (ff.Gather,), {"decode": decode})


OUT = "before or after the collective"
REFUSED = {
    **{
        name: (within(by_hand(how)), RuntimeError, "outside, as")
        for name, how in HANDS.items()
    },
    "a mean": (within(reading([])), RuntimeError, "inside of the shard"),
    "twice": (within(TWICE), RuntimeError, "put it around"),
    "some microbatches": (some_microbatches, ValueError, "of some microbatches alone"),
    "what was recorded": (delayed, RuntimeError, "gradients without data: it kept"),
    "a larger backward": (
        stepped_in_a_larger_backward, ValueError,
        "the backward starts from another number",
    ),
    "a map that writes": (writes, RuntimeError, "in place.*work on a copy"),
    "a map that reads, func": (reads(torch.func.grad), ValueError, OUT),
    "a map that reads, ours": (reads(lambda f: ff.value_and_grad(f)), ValueError, OUT),
    "a map that reads, autograd": (
        reads(lambda f: lambda w: torch.autograd.grad(f(w.requires_grad_()), w)),
        ValueError, OUT,
    ),
    "an encode alone": (silent, TypeError, "Silent has an encode .* say exact = False"),
    "a longer code": (
        gathered(Longer()), ValueError,
        r"Longer\(\).decode returned \[12\] .* \[10\]",
    ),
    "a code in place": (
        gathered(Doubled()), RuntimeError, "in place: these are the parameters",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_right_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("cut", (lambda w: w[:1], lambda w: w, lambda w: w[:2].T))
@pytest.mark.parametrize("read", (ff.unshard, lambda leaf, to: ff.save(to, leaf)))
def test_a_part_that_its_layout_does_not_give_is_refused(cut, read, tmp_path):
    rows = ff.Layout((4, 3), torch.float32, (ff.Split(0, "data", 2),), "w")
    leaf = {"w": ff.Sharded(cut(integers(4, 3)), rows)}
    where = () if read is ff.unshard else (tmp_path / "a",)
    with pytest.raises(Exception, match=r"the part of w .* is \(2, 3\) on this rank"):
        ff.spmd(lambda: read(leaf, *where), mesh)()
