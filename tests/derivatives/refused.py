"""Steps that have no one meaning: what each is told, by name, and how it is mended.

``step(w, x)`` gets matrices "a" and "b" in parts, and this rank's rows.
"""

import torch
from torch.func import grad, hessian, jacfwd, vmap
from torch.utils.checkpoint import checkpoint

import fsfunc as ff
from fsfunc import tree
from tests.derivatives.worlds import ByHand, by_units, unit

each = tree.map


def gradient(step):
    """The gradient of a loss by its parameters."""
    return lambda w, x: ff.value_and_grad(step)(w, x)[1]


@ff.unit
def around(w, x, slope=grad):
    """A unit that differentiates one within it, which gathers for itself."""
    inner = lambda m: unit(m, x).sum()  # noqa: E731
    return slope(inner)(w["a"]).sum() + w["b"].sum()


def by_around(w, x):
    return around(w, x, slope=lambda inner: inner)


def around_ours(w, x):
    return around(w, x, slope=lambda inner: lambda m: ff.value_and_grad(inner)(m)[0])


def by_hand(w, x):
    return ByHand.apply(x, w["a"]).sum() + by_units(w, x)


def checkpointed(reentrant):
    def loss(w, x):
        tracked = x.clone().requires_grad_()
        again = checkpoint(by_units, w, tracked, use_reentrant=reentrant)
        return again + by_units(w, x)

    return gradient(loss)


class Whole(torch.autograd.Function):
    """It reads no unit, but the whole leaf."""

    @staticmethod
    def forward(ctx, x, w):
        return x @ ff.unshard(w)

    @staticmethod
    def backward(ctx, g):
        return None, None


def by_whole(w, x):
    return Whole.apply(x, w["a"]).sum() + by_units(w, x)


def hidden_noise(w, x):
    return each(lambda a: a + torch.randn_like(a), w)


def own_factor(w, x):
    return by_units(each(lambda a: a * x.mean(), w), x)


def a_range(w, x):
    n = 5 - ff.axis_index("data")  # of nine
    return each(lambda a: a + torch.arange(n, dtype=a.dtype), w)


def filled_in_part(w, x):
    row = torch.zeros(5 - ff.axis_index("data"), dtype=x.dtype)
    row[:2] = 1
    return each(lambda a: a + row, w)


def by_each_element(w, x):
    return jacfwd(ff.tree_sum)(w)


def by_each_element_of_a_norm(w, x):
    return jacfwd(ff.global_norm)(w)


def by_dims(w, x):
    return each(lambda a: a * 0.9 if a.ndim > 1 else a, w)


def by_length(w, x):
    return each(lambda a: a / len(a), w)


def sum_of_parts(w, x):
    return by_units(w, x) + sum((a * a).sum() for a in tree.leaves(w))


def sorted_parts(w, x):
    return each(lambda a: a.sort()[0], w)


def factor_by_hand(w, x):
    return by_units(each(lambda a: a * (1 + ff.global_norm(w)), w), x)


def part_as_an_input(w, x):
    full = ff.unshard(w)["b"]
    return unit(full, tree.leaves(w["a"])[0]).sum()


def laid_own(w, x):
    full = ff.unshard(w)
    return ff.lay_like({k: full[k] * x.mean() for k in full}, w)


def psum_of_parts(w, x):
    return each(lambda a: ff.psum(a, "data"), w)


def gathered_as_one(w, x):
    every = ff.all_gather(x, "data", to="I")
    return ff.value_and_grad(lambda e: (e * x.sum()).mean())(every)[1]


def hessian_of_units(w, x):
    return hessian(lambda w: by_units(w, x))(w)


def per_sample(w, x):
    return vmap(grad(lambda w, one: by_units(w, one[None])), (None, 0))(w, x)


def per_sample_sum(w, x):
    """Beside units: of a sum over the parts, times the sample."""
    return vmap(grad(lambda w, one: ff.tree_sum(w) * one.sum()), (None, 0))(w, x)


def per_sample_whole(w, x):
    """Beside units: of the whole leaf."""
    loss = lambda w, one: (ff.unshard(w)["a"] @ one).sum()  # noqa: E731
    return vmap(grad(loss), (None, 0))(w, x)


def plain_by_torch(s, x):
    return grad(lambda s: (s * x).mean())(s)


def born_here(w, x):
    delta = torch.zeros(3, dtype=x.dtype)
    return ff.value_and_grad(lambda d: by_units(w, x + d))(delta)[1]


def returned_apart(s, x):
    g = ff.value_and_grad(lambda s: (s * x).mean())(s)[1]
    return s - g * x.mean()


def noise_of_the_rank(s, x):
    """The ranks' default generators are their own."""
    g = ff.value_and_grad(lambda s: (s * x).mean())(s)[1]
    return s - g + torch.randn_like(s)


def own_rate(w, x):
    g = ff.value_and_grad(by_units)(w, x)[1]
    return each(lambda a, g: a - x.mean() * g, w, g)


def by_count(w, x):
    return each(lambda a: a / torch.numel(a), w)


def by_expanding(w, x):
    return each(lambda a: a / torch.ones(1, dtype=a.dtype).expand_as(a).sum(), w)


def bare(w, x):
    return tree.leaves(ff.value_and_grad(by_units)(w, x)[1])


def by_broadcasting(w, x):
    one = torch.ones(1, dtype=x.dtype)
    return each(lambda a: a / torch.broadcast_tensors(one, a)[0].sum(), w)


def another_rate_by_rank(w, x):
    rate = 0.1 * (1 + ff.axis_index("data"))
    return each(lambda a: a * rate, w)


def more_on_one_rank(w, x):
    w = each(lambda a: a + 1, w) if ff.axis_index("data") else w
    return by_units(w, x)


# name: the step, and what the error must say
STEPS = {
    "noise on parts": (hidden_noise, "rand.* draws on .*part of 'a'.*ff.randn_like"),
    "an own factor": (gradient(own_factor), "mul .*part of 'a'.*argument 1.*tree_scal"),
    "dims": (by_dims, "ndim at .*part of 'a'.*is_leaf=ff.is_sharded"),
    "length": (by_length, "len at .*part of 'a'.*is_leaf=ff.is_sharded"),
    "count": (by_count, "numel at .*part of 'a'.*is_leaf=ff.is_sharded"),
    "expanded": (by_expanding, "sum at .*part of 'a' alone: use ff.tree_sum"),
    "bare": (bare, "returns .*part of the gradient by 'a'.*plain tensor.*ff.unshard"),
    "broadcast": (by_broadcasting, "broadcast_tensors at .*part of 'a'.*zeros_like"),
    "a range": (a_range, "add .*no single number.*ff.unshard.*ff.lay_like"),
    "filled in part": (filled_in_part, "add .*no single number.*ff.unshard"),
    "each element": (by_each_element, "along each element of .* leaf.*whole=True"),
    "of a norm": (by_each_element_of_a_norm, "along each element of .*whole=True"),
    "a sum": (gradient(sum_of_parts), "sum .*part of 'a' alone: use ff.tree_sum"),
    "mixed": (sorted_parts, "sort .*mixes .*ff.unshard.tree. for whole tensors"),
    "a factor": (gradient(factor_by_hand), "sum over this rank's part .*ff.tree_scale"),
    "an input": (part_as_an_input, "unit .* part of 'a' as an input: give the leaf"),
    "laid own": (laid_own, "lay_like .*differs from rank to rank.*ff.reduce_like"),
    "psum of parts": (psum_of_parts, "psum is given .*part of 'a'.*ff.tree_sum"),
    "one value": (gathered_as_one, "gives .*one value.*by ff.pcast.x, axis, to="),
    "per sample": (per_sample, "per-sample .vmapped. .*'a'.*whole=True"),
    "per-sample sum": (per_sample_sum, "per-sample .*a sum over .* leaves.*whole=True"),
    "per-sample whole": (per_sample_whole, "per-sample .vmapped. .*'a'.*whole=True"),
    "hessian": (hessian_of_units, "for each element .jacrev, hessian.*whole"),
    "born here": (born_here, "made in the step .*zeros_like.x.*first argument"),
    "own rate": (own_rate, "mul .*part of the gradient by 'a'.*argument 1.*ff.pmean"),
    "another rate": (another_rate_by_rank, "mul .*part of 'a'.*a number .0.[12]"),
    "more on one rank": (gradient(more_on_one_rank), "only rank 1 computes add at .*"),
    "inside a unit": (gradient(around), "inside unit 'around' by .*whole=True"),
    "inside, ours": (
        gradient(around_ours),
        "inside unit .around. by .a..*whole=True",
    ),
    "a Function": (
        gradient(by_hand),
        "unit .* reads .*leaf .a., at .*autograd.Function.*in a unit",
    ),
    "a Function, stock": (lambda w, x: grad(by_hand)(w, x), "leaf .a., .*Function"),
    "a Function, whole": (gradient(by_whole), "unshard .*.a., .*Function.*unit"),
    "checkpoint": (checkpointed(False), "'a', .*torch.utils.checkpoint.*ff.remat"),
    "reentrant": (checkpointed(True), "'a', .*reentrant checkpoint.*ff.remat"),
}
# The same of a number that nobody placed, which is one value on all ranks.
PLAIN = {
    "unaveraged": (plain_by_torch, "no mean over the ranks.*ff.assume"),
    "returned": (returned_apart, "place of .*the ranks' parameters would part"),
    "noise": (noise_of_the_rank, "place of .*randn_like.*parameters would part"),
}


def attempt(step, mesh, zero, w, x, plain=False):
    """What one rank runs, and raises at."""
    shard = lambda f: ff.shard(f, mesh, "data", zero=zero)  # noqa: E731
    mine = ff.local_batch(x, mesh, "data")
    if plain:
        beside = shard(lambda w, x: w * x.mean())  # no unit: it stays whole
        given = ff.place(beside, torch.tensor(2.0, dtype=x.dtype), mine)
    else:
        inside = {STEPS["inside a unit"][0], STEPS["inside, ours"][0]}
        laid = by_around if step in inside else by_units
        given = ff.place(shard(laid), w, mine)
    shard(step)(given, mine)
