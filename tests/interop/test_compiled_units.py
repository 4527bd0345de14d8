"""Units of modules under jit: the plain step, and equal layers compiled once."""

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.checks import close, same
from tests.core.test_compiled import RAN, counted, forgotten  # noqa: F401
from tests.interop.models import Block, on_mesh
from tests.models import floats
from tests.transforms.test_jit_remat import eager  # noqa: F401  # a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
WIDTH = 8


class Numbered(Block):
    def __init__(self, number, norm=nn.LayerNorm):
        super().__init__(WIDTH, norm=norm)
        self.number = number


class Counts(Numbered):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 1, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight[:1].detach().clone())

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def of(net, **options):
    apply, params, buffers = ff.from_module(net.double(), **options)
    return lambda p, x: apply(p, buffers, x), params


X = floats(8, WIDTH, seed=3, dtype=torch.float64)


def trained(net, transform, **options):
    loss, params = of(net, **options)
    optimizer = ff.sgd(0.1)
    step = optimizer(ff.value_and_grad(loss))
    return on_mesh(transform, {"data": 2}, params, step, optimizer, X)[:2]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net(*(Numbered(i) for i in range(4)))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_jitted_module_trains_as_it_does_plainly(net, zero):
    stack = lambda step, mesh: ff.shard(ff.remat(step), mesh, "data", zero=zero)  # noqa: E731
    expected = trained(net, stack, units="layers.*")
    assert not RAN
    jit = lambda step, mesh: ff.jit(stack(step, mesh), backend=counted)  # noqa: E731
    same(trained(net, jit, units="layers.*"), expected)
    assert len({id(graph) for graph in RAN}) == 3, "embed, the layers, head"


@pytest.mark.parametrize("policy", [None, ff.MinCut(0.3)])
def test_a_jitted_module_computes_again_within_its_backward(net, eager, policy):  # noqa: F811
    """Its layers run once, and share a graph; what is trained is the same."""

    def stack(step, mesh, policy=None):
        return ff.shard(ff.remat(step, policy), mesh, "data")

    expected = trained(net, stack, units="layers.*")
    jit = lambda step, mesh: ff.jit(stack(step, mesh, policy))  # noqa: E731
    same(trained(net, jit, units="layers.*"), expected)
    assert len(RAN) == 2 * 2 * 6, "on two ranks, two steps of six units"
    assert len({id(graph) for graph in RAN}) == 3, "embed, the layers, head"


def test_equal_layers_compile_once(net):
    """What differs between them and is not read, such as a number, does not tell."""
    loss, params = of(net, units="layers.*")
    step = ff.jit(ff.value_and_grad(loss), only="layers.*", backend=counted)
    close(step(params, X), ff.value_and_grad(loss)(params, X))
    assert len(RAN) == 4 and len({id(graph) for graph in RAN}) == 1


REFUSED = {
    "statistics": (
        lambda: Net(Numbered(0, nn.BatchNorm1d)), {"units": "layers.*"}, ValueError,
        r"'layers.0'.* holds 'norm', which writes running statistics.*only=",
    ),
    "units in it": (
        lambda: Net(Numbered(0)), {"units": ["layers.*", "layers.*.up"]}, ValueError,
        "holds other units.*only=",
    ),
    "what it leaves": (
        lambda: Net(Counts(0)), {"units": "layers.*"}, RuntimeError, "calls",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_unit_that_does_not_compile_is_refused(case):
    make, options, error, said = REFUSED[case]
    loss, params = of(make(), **options)
    with pytest.raises(error, match=said):
        ff.jit(ff.value_and_grad(loss), backend=counted)(params, X)


def test_a_tied_weight_and_an_eval_norm_compile(net):
    """A parameter under two names has one gradient; statistics are read."""
    net = Net(Numbered(0, nn.BatchNorm1d)).eval()
    net.layers[0].norm.weight = net.layers[0].norm.bias
    loss, params = of(net, units="layers.*")
    grad = ff.value_and_grad(loss)
    same(ff.jit(grad, backend=counted)(params, X), grad(params, X))
    assert RAN


def test_layers_with_hooks_have_graphs_of_their_own(net):
    """No guard of the compiler's looks at hooks."""
    net.layers[1].up.register_forward_hook(lambda m, args, out: out * 2)
    net.layers[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    loss, params = of(net, units="layers.*")
    grad = ff.value_and_grad(loss)
    jitted, expected = ff.jit(grad, backend=counted), grad(params, X)
    for _ in range(3):
        close(jitted(params, X), expected)


@pytest.mark.parametrize("units", ["", "layers.*"])
def test_a_hook_on_what_a_unit_returns_runs_under_jit_too(net, units):
    """Outside the unit; where the whole module is one, nobody is there to run it."""
    net.register_forward_hook(lambda m, args, out: out * 2)
    net.layers[0].register_forward_hook(lambda m, args, out: out + 1)
    loss, params = of(net, units=units)
    grad = ff.value_and_grad(loss)
    same(ff.jit(grad, backend=counted)(params, X), grad(params, X))
    assert RAN
