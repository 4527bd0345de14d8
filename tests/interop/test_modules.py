"""A module as a function: the same values, and nothing of it is touched."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fsfunc as ff
from tests.checks import simulated, with_ledger
from tests.interop.models import Block, Stack, close, seeded

TOKENS = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 1, 4], [2, 0, 3]])


def model(make=Stack, *args, **options):
    torch.manual_seed(0)
    return make(*args, **options)


def loss_of(apply, buffers):
    return lambda params, x: apply(params, buffers, x).square().mean()


def gradients(module, x):
    """(loss, gradients by name) of the module itself."""
    names, params = zip(*module.named_parameters(), strict=True)
    loss = _first_of(module(x)).square().mean()
    found = torch.autograd.grad(loss, params)
    return loss.detach(), dict(zip(names, found, strict=True))


def _first_of(out):
    return out[0] if isinstance(out, tuple) else out


class Fetching(nn.Module):
    """Parameters read by the module around the units, and by a parent of their own."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))
        self.scales = nn.ParameterList([torch.full((4,), 2.0)])
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        assert self.shift.dtype == x.dtype and len(list(self.parameters())) == 4
        x = self.layer(x + self.shift) * self.scales[0]
        return nn.functional.linear(x, self.layer.weight)


class Calling(nn.Module):
    """A module that calls itself, and one of its parts under two names."""

    def __init__(self):
        super().__init__()
        self.first = Block()
        self.second = self.first

    def forward(self, x, depth=2):
        if depth:
            return self(self.second(self.first(x, scale=2)), depth - 1)
        return x


X = torch.randn(4, 4, generator=seeded(3))
CASES = {
    "tied": (Stack, (), TOKENS),
    "tied, blocks": (Stack, Block, TOKENS),
    "tied, nested": (Stack, [Block, nn.Linear], TOKENS),
    "tied, whole": (Stack, "", TOKENS),
    "read outside": (Fetching, (), X),
    "calls itself": (Calling, Block, X),
    "calls itself, whole": (Calling, [Calling, Block], X),
    "lstm": (lambda: nn.LSTM(4, 3, 2), (), X),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        (), X[:, None].expand(4, 3, 4)),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (),
        X),
    "unit parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))),
        "0", X,
    ),
}  # fmt: skip

# Two uses of one weight add up in another order; sums over keys that cancel.
ROUNDED = "tied, nested", "attention"


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_modules_bit_for_bit(case):
    make, units, x = CASES[case]
    module = model(make)
    before = copy.deepcopy(module.state_dict())
    loss, grads = gradients(module, x)
    apply, params, buffers = ff.from_module(module, units)

    def loss_fn(params, x):
        return _first_of(apply(params, buffers, x)).square().mean()

    for transform in (lambda f: f, ff.remat):
        found = transform(ff.value_and_grad(loss_fn))(params, x)
        assert torch.equal(found[0], loss)
        assert found[1].keys() == grads.keys()
        close(found[1], grads, 1e-6 if case in ROUNDED else 0.0)
    close(dict(module.state_dict()), dict(before), 0.0)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("case", "zero"),
    [*((c, 3) for c in CASES if c != "lstm"), *(("tied, blocks", z) for z in range(3))],
)
def test_shards_give_the_modules_loss_and_gradients(case, zero):
    make, units, x = CASES[case]
    module = model(make).double()
    x = x if x.dtype == torch.long else x.double()
    loss, grads = gradients(module, x)
    apply, params, buffers = ff.from_module(module, units)
    step = ff.remat(ff.value_and_grad(loss_of(apply, buffers)))
    wrap = lambda mesh: ff.shard(step, mesh, "data", zero=zero)  # noqa: E731
    for (value, found), log in with_ledger(wrap, params, x):
        close(value, loss)
        close(found, grads)
        assert (log.count("psum_scatter") > 0) == (zero > 0)


def test_stages_follow_the_units_names():
    apply, params, buffers = ff.from_module(model().double(), Block)
    loss = loss_of(apply, buffers)
    program = ff.program(loss, params, TOKENS)
    assert [c.name for c in program.calls] == list(apply.units)
    grad, stages = ff.value_and_grad(loss), ["embed", "blocks.1"]

    def wrap(mesh):
        return ff.pipeline(grad, mesh, "pipe", n_microbatches=2, stages=stages)

    for found, log in with_ledger(wrap, params, TOKENS, mesh=simulated(pipe=2)):
        close(found, grad(params, TOKENS))
        assert log.count("all_gather") == 0


def test_ranks_and_calls_in_calls_have_copies_of_their_own():
    """Two ranks meet in the middle of one module; a third call runs inside."""
    mesh = simulated()

    class Meeting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            self.kept = None

        def forward(self, x, inner=None):
            self.kept = x
            if inner is not None:
                inner()
            total = ff.psum(x, "data")  # the other rank runs
            return self.kept + 0 * self.layer(total)

    apply, params, buffers = ff.from_module(Meeting())

    def called(x, **inner):
        return apply(params, buffers, x, mutable=True, **inner)[0]

    def main():
        x = torch.full((1,), float(mesh.coordinate("data")))
        return called(x, inner=lambda: called(x + 5))

    assert [x.item() for x in ff.spmd(main, mesh)()] == [0.0, 1.0]


def test_frozen_parameters_have_no_gradient_no_moment_and_no_reduction():
    module = model().double()
    module.blocks[1].requires_grad_(False)
    apply, params, buffers = ff.from_module(module, Block)
    assert not any(name.startswith("blocks.1.") for name in params)
    assert "blocks.1.up.weight" in buffers
    optimizer = ff.sharded_adam(1e-2)
    step = optimizer(ff.value_and_grad(loss_of(apply, buffers)))
    state = ff.TrainState(params, optimizer.init(params))
    wrap = lambda mesh: ff.shard(step, mesh, "data")  # noqa: E731
    ((found, _), log), *_ = with_ledger(wrap, state, TOKENS)
    trained = [p for p in module.parameters() if p.requires_grad]
    reference = torch.optim.AdamW(trained, 1e-2)
    module(TOKENS).square().mean().backward()
    reference.step()
    own = {n: p.detach() for n, p in module.named_parameters() if n in params}
    close(found.params, own)
    assert log.count("psum_scatter") == 4  # embed, two blocks, head


def test_buffers_come_back_where_they_are_asked_for():
    module = model(lambda: nn.Sequential(Block(), nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    apply, params, buffers = ff.from_module(copy.deepcopy(module))
    given = {name: x.clone() for name, x in buffers.items()}
    out, new = apply(params, buffers, X, mutable=True)
    close(buffers, given, 0.0)
    close(out, module(X))
    close(new, dict(module.named_buffers()), 0.0)
    assert new["1.num_batches_tracked"] == 1
    assert new["1.running_mean"] is not buffers["1.running_mean"]
    again = ff.from_module(module.eval())[0]
    close(again(params, new, X), module(X))


class Counting(nn.Module):
    """Writes a buffer of a part of it, and calls that part twice."""

    def __init__(self):
        super().__init__()
        self.part = Adding()

    def forward(self, x):
        self.part.count += 10
        return self.part(self.part(x, params=1), params=2).y


@dataclass
class Pair:
    y: torch.Tensor
    n: int = 0

    def __post_init__(self):  # run again it would differ
        self.y = self.y * 2


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.constant = torch.full((4,), 2.0)

    def forward(self, x, params=0):
        self.count += 1
        x = x.y if isinstance(x, Pair) else x
        return Pair(self.layer(x) * self.count.clone() * self.constant + params)


@pytest.mark.parametrize("units", [(), Adding, Counting, [Counting, Adding]])
def test_buffers_keywords_and_dataclasses_go_through_units(units):
    module, x = model(Counting).double(), X.double()
    apply, params, buffers = ff.from_module(copy.deepcopy(module), units)
    f = ff.value_and_grad(
        lambda p, x: apply(p, buffers, x, mutable=True)[0].square().mean()
    )
    wrap = lambda mesh: ff.shard(ff.remat(f), mesh, "data")  # noqa: E731
    found, _ = with_ledger(wrap, params, x)[0]  # recorded: the constant is no fake one
    new = apply(params, buffers, x, mutable=True)[1]
    loss, grads = gradients(module, x)
    close(found, (loss, grads))
    assert new["part.count"] == module.part.count == 12


def test_a_parameter_read_without_gradients_is_read_again_with_them():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                norm = self.w.norm()
            return self.layer(x) * self.w / norm

    module = Twice()
    apply, params, buffers = ff.from_module(module)
    found = ff.value_and_grad(loss_of(apply, buffers))(params, X)
    close(found, gradients(module, X), 0.0)


def test_hooks_run_on_copies_and_a_units_own_on_its_output():
    module = model(lambda: nn.Sequential(Block(), nn.Linear(4, 4)))
    seen = []
    module[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    module[0].register_forward_hook(lambda m, args, out: seen.append(id(m)) or 2 * out)
    module[0].up.register_forward_hook(lambda m, args, out: out + 1)
    module.register_forward_hook(lambda m, args, out: out - 1)
    expected = gradients(module, X)
    apply, params, buffers = ff.from_module(module, Block)
    step = ff.value_and_grad(loss_of(apply, buffers))
    found = ff.remat(step)(params, X)
    assert torch.equal(found[0], expected[0])
    close(found[1], expected[1], 0.0)
    assert len(seen) == 2 and seen[1] != seen[0] == id(module[0])


def test_modes_are_those_of_the_module_then():
    module = model(Stack, p=0.9)
    train = ff.from_module(module, Block)
    module.eval()
    evaluate = ff.from_module(module, Block)
    assert torch.equal(evaluate[0](*evaluate[1:], TOKENS), module(TOKENS))
    assert not torch.equal(train[0](*train[1:], TOKENS), module(TOKENS))


def test_dropout_between_units_is_a_unit():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU())
    assert ff.from_module(module)[0].units == ("0", "1")
    assert ff.from_module(module.eval())[0].units == ("0",)


def test_a_module_on_meta_has_parameters_to_make():
    with torch.device("meta"):
        module = Stack()
    apply, params, buffers = ff.from_module(module, Block)
    assert all(x.is_meta for x in params.values())
    real = ff.from_module(model(), Block)[1]
    assert torch.equal(apply(real, buffers, TOKENS), model()(TOKENS))
    assert apply(params, buffers, TOKENS.to("meta")).is_meta


def test_to_module_is_the_inverse():
    module = model(lambda: nn.Sequential(Stack(), nn.BatchNorm1d(3)))
    module[0].blocks[0].requires_grad_(False)
    apply, params, buffers = ff.from_module(module)
    doubled = {name: 2 * x for name, x in params.items()}
    again = ff.to_module(module, doubled, buffers)
    assert again[0].head.weight is again[0].embed.weight
    with torch.no_grad():
        again[0].embed.weight.mul_(1.0)
        assert doubled["0.embed.weight"]._version == 0
    assert not again[0].blocks[0].up.weight.requires_grad
    assert again.state_dict().keys() == module.state_dict().keys()
    found = ff.from_module(again)
    close(found[1], doubled, 0.0)
    close(found[2], buffers, 0.0)
    close(ff.from_module(ff.to_module(module, params))[2], buffers, 0.0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("old", ["weight_norm", "spectral_norm", "prune"])
def test_weights_that_old_hooks_compute_go_to_a_module_and_back(old):
    def make():
        layer = nn.Linear(4, 4)
        if old == "prune":
            return nn.Sequential(prune.l1_unstructured(layer, "weight", 0.5))
        return nn.Sequential(getattr(nn.utils, old)(layer)).eval()

    module = model(make)
    apply, params, buffers = ff.from_module(module)
    found = ff.remat(ff.value_and_grad(loss_of(apply, buffers)))(params, X)
    close(list(found), list(gradients(module, X)), 0.0)
    double = {name: 2 * x for name, x in params.items()}
    for _ in range(2):
        found = ff.to_module(module, double, buffers)(X)
        assert torch.equal(found, apply(double, buffers, X))
        with torch.no_grad():
            module(X)  # leaves its weight in an attribute
        apply = ff.from_module(module)[0]
