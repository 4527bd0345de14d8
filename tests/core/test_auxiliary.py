"""What a loss returns beside its value: averaged, summed, joined, or the last."""

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.losses import Summed
from fsfunc.tree.structure import TreeMismatch
from tests.checks import all_refused, on_ranks, same, simulated, with_ledger

X = torch.arange(-6.0, 10.0).view(16, 1)
W = torch.tensor(2.0)
MESH = simulated(4)


@ff.unit
def scaled(w, x):
    return x * w


def sums(y):
    """Summed as it comes: under names, in tuples, of several dtypes and shapes."""
    return {
        "positive": Summed((y > 0).sum()),
        "moments": Summed((y.sum(0), {"squares": (y * y).double().sum()})),
        "histogram": Summed((y.long() == torch.arange(-12, 20)).sum(0)),
        "largest": ff.Max((y.amax(0), {"lowest": (-y).double().max()})),
        "longest": ff.Max(y.long().max()),
    }


def loss(w, x):
    y = scaled(w, x)
    rest = {"mean": y.mean(), "each": y, "last": torch.tensor(len(y)), "name": "n"}
    return (y * y).mean(), (sums(y), rest)


GRAD = ff.value_and_grad(loss, has_aux=True)
(VALUE, (SUMS, REST)), _ = GRAD(W, X)

A = ff.accumulate


def sharded(f, zero):
    return ff.shard(f, MESH, "data", zero=zero)


@pytest.mark.parametrize(
    ("step", "n"), [(A(GRAD, 1), 1), (A(GRAD, 8), 8), (A(A(GRAD, 2), 2), 4)]
)
def test_sums_do_not_depend_on_the_number_of_microbatches(step, n) -> None:
    (value, (found, rest)), _ = step(W, X)
    same((value, found), (VALUE, SUMS))
    same((rest["mean"], rest["each"]), (REST["mean"], REST["each"]))
    assert rest["name"] == "n" and rest["last"].item() == len(X) // n
    assert isinstance(found["positive"], Summed) and not rest["each"].requires_grad


STACKS = {
    "shard": sharded(GRAD, 0),
    "shard(accumulate)": sharded(A(GRAD, 2), 3),
    "accumulate(shard)": A(sharded(GRAD, 0), 2),
    "accumulate(shard(accumulate))": A(sharded(A(GRAD, 2), 3), 2),
    "shard(remat)": sharded(ff.remat(GRAD), 1),
}


@pytest.mark.parametrize("stack", STACKS)
def test_sums_do_not_depend_on_the_ranks(stack) -> None:
    outs = on_ranks(STACKS[stack], W, X, mesh=MESH)
    outs = [
        (value, found, rest["mean"], rest["each"]) for (value, (found, rest)), _ in outs
    ]
    for value, found, mean, _ in outs:
        same((value, found, mean), (VALUE, SUMS, REST["mean"]))
    same(torch.cat([out[3] for out in outs]), REST["each"])  # each rank's own


def test_one_psum_more_for_each_dtype_and_none_without() -> None:
    def counted(aux):
        loss = lambda w, x: ((x * w).sum(), aux)  # noqa: E731
        step = sharded(ff.value_and_grad(loss, has_aux=True), 3)
        log = with_ledger(lambda mesh: step, W, X, mesh=MESH)[0][1]
        return [(r.op, r.phase, int(r.bytes)) for r in log.records]

    a, b = torch.ones(2), torch.ones(3)
    plain = counted({"a": a, "n": 1})
    assert [phase for _, phase, _ in plain] == ["loss", "plain gradients"]
    assert counted({"a": Summed(()), "n": 1}) == plain
    ring = 2 * 3 / 4  # the bytes of a psum over four ranks, for one
    assert sorted(counted({"a": Summed(a), "n": [Summed(b)]})) == sorted(
        [*plain, ("psum", "sums", int(ring * 5 * 4))]
    )
    both = Summed((a, b, torch.tensor(3), torch.tensor(4)))
    assert sorted(counted(both)) == sorted(
        [
            *plain,
            ("psum", "sums", int(ring * 5 * 4)),
            ("psum", "sums", int(ring * 2 * 8)),
        ]
    )


T = TypeError
test_what_cannot_be_summed_is_refused = all_refused([
    (lambda: Summed(3), T, r"Summed holds 3: only tensors"),
    (lambda: ff.Max({"a": Summed(W)}), T, r"Max holds Summed\(.*at 'a'"),
    (lambda: Summed({"a": W, "b": [1.5]}), T, r"Summed holds 1.5 at 'b/0'"),
    (lambda: Summed({"a": X > 0}), T, r"a tensor of torch.bool at 'a'.*mask.sum\(\)"),
    (lambda: ff.Max({"a": X > 0}), T, r"Max holds a tensor of torch.bool at 'a'"),
    (lambda: ff.Max(W.cfloat()), T, r"torch.complex64: only .* have maxima"),
])  # fmt: skip


def test_microbatches_that_differ_are_refused() -> None:
    def of(aux):
        grad = ff.value_and_grad(lambda w, x: ((x * w).sum(), aux(x)), has_aux=True)
        return ff.accumulate(grad, 2)(W, X)

    with pytest.raises(ValueError, match=r"\(3, 1\) in one microbatch and \(2, 1\)"):
        of(lambda x: Summed(x[: 2 if x[0] > 0 else 3]))
    with pytest.raises(TreeMismatch, match="one before.*'b'"):
        of(lambda x: Summed({"a": W} if x[0] > 0 else {"a": W, "b": W}))
    with pytest.raises(TreeMismatch):
        of(lambda x: W if x[0] > 0 else Summed(W))


COUNTS = {
    "tensor": lambda y: (y > 3).sum(),
    "number": lambda y: int((y > 3).sum()),
    "boolean": lambda y: (y > 3).any(),
}


@pytest.mark.parametrize("count", COUNTS)
def test_integers_that_differ_between_microbatches_are_refused(count) -> None:
    grad = ff.value_and_grad(
        lambda w, x: (w * x.mean(), COUNTS[count](x)), has_aux=True
    )
    for step in (grad, ff.accumulate(grad, 1)):
        assert step(W, X)[0][1] == COUNTS[count](X)
    with pytest.raises(ValueError, match=r"neither a mean.*ff\.Summed"):
        ff.accumulate(grad, 4)(W, X)
    assert ff.accumulate(grad, 2)(W, X * 0)[0][1] == 0  # equal in both


@pytest.mark.parametrize("inner", [ff.accumulate, None])
def test_integers_that_differ_are_refused_under_shard(inner) -> None:
    grad = ff.value_and_grad(lambda w, x: (scaled(w, x).mean(), (x > 3).sum()), 0, True)
    step = sharded(A(grad, 2), 3) if inner else A(sharded(grad, 0), 2)
    with pytest.raises(Exception, match=r"neither a mean.*ff\.Summed"):
        on_ranks(step, W, X, mesh=MESH)


COMBINED = {  # what rank 0 returns beside the loss, and what the others do
    "averages": lambda x: ({"a": x.mean()}, {"b": x.mean()}),
    "maxima": lambda x: ({"a": ff.Max(x), "b": ff.Max(-x)}, {"b": ff.Max(-x)}),
    "within": lambda x: (Summed({"a": x}), Summed({"b": x})),
    "kinds": lambda x: (Summed(x), ff.Max(x)),
}


@pytest.mark.parametrize("call", [ff.value, ff.value_and_grad])
@pytest.mark.parametrize("combined", COMBINED)
def test_ranks_that_return_other_names_are_refused(combined, call) -> None:
    """Ranks combine them one by one: names would get values of others."""

    def loss(w, x):
        return (w * x).mean(), COMBINED[combined](x)[MESH.rank > 0]

    def main():
        step, x = ff.shard(call(loss, has_aux=True), MESH, "data"), torch.ones(4)
        return step(ff.place(step, torch.ones(4), x), x)

    with pytest.raises(LawError, match="other names, or is combined in another way"):
        ff.spmd(main, MESH)()


def test_what_is_a_ranks_own_may_differ() -> None:
    def loss(w, x):
        own = {"a": x} if MESH.rank else {"b": x[:1], "c": 3}
        return (w * x).mean(), {"mean": x.mean(), "own": own}

    def main():
        step, x = ff.shard(ff.value(loss, has_aux=True), MESH, "data"), torch.ones(4, 1)
        return sorted(step(ff.place(step, torch.ones(1), x), x)[1]["own"])

    assert ff.spmd(main, MESH)() == [["b", "c"], ["a"], ["a"], ["a"]]
