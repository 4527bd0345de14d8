"""A forward around split layers is that of one device, or refused by its shapes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsfunc as ff
from tests.interop.models import splits_as_one_device

BATCH, LENGTH, HEADS, SIZE = 2, 6, 4, 4
WIDTH = HEADS * SIZE
X = torch.randn(
    BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)
).double()


class Attention(nn.Module):
    """Four Linears, and what is done between them."""

    def __init__(self, do):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.qkv, self.do = nn.Linear(WIDTH, 3 * WIDTH), do

    def forward(self, x):
        out = self.do(self, x, *x.shape[:2])
        out, *rest = out if isinstance(out, tuple) else (out,)
        return self.o(out) + sum(rest)

    def heads(self, x, *shape):
        return (f(x).view(*shape).transpose(1, 2) for f in (self.q, self.k, self.v))


def attend(q, k, v, p=0.0):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


def joined(x, b, n):
    return x.transpose(1, 2).reshape(b, n, -1)


def scored(q, k, v, change=lambda s: s):
    return change(q @ k.transpose(-1, -2)).softmax(-1) @ v


def fused(m, x, b, n):
    return m.qkv(x).view(b, n, -1, 3 * SIZE).transpose(1, 2).chunk(3, -1)


def evens(m, x, b, n):
    q = m.q(x)
    return torch.cat([q[..., ::2], q[..., 1::2]], -1)


def alone(m, x, b, n):
    """Attention of each head, in the order of features."""
    return joined(attend(*m.heads(x, b, n, -1, SIZE)), b, n)


RIGHT = {
    "heads": alone,
    "one of each": lambda m, x, b, n: torch.tanh(m.q(x)) * F.silu(m.k(x) + 1),
    "scores": lambda m, x, b, n: joined(scored(*m.heads(x, b, n, -1, SIZE)), b, n),
    "all in each head": lambda m, x, b, n: joined(attend(*fused(m, x, b, n)), b, n),
    "a norm over a head": lambda m, x, b, n: F.normalize(F.layer_norm(m.q(x).view(b, n,
        -1, SIZE), (SIZE,)), dim=-1).flatten(2),
    "a product for each": lambda m, x, b, n: (torch.einsum("bnhd,bmhd->bhnm",
        m.q(x).view(b, n, -1, SIZE), m.k(x).view(b, n, -1,
        SIZE)).softmax(-1).matmul(m.v(x).view(b, n, -1, SIZE).transpose(1,
        2)).transpose(1, 2).flatten(2)),
}  # fmt: skip
RIGHT |= {
    "by numbers": lambda m, x, b, n: ((1e-6 + m.q(x) * 1e-12 - 3.0) / 1e4) ** 2,
    "written": lambda m, x, b, n: m.q(x).clone().mul_(2).masked_fill_(m.k(x) > 0, 0),
    "of a batch": lambda m, x, b, n: F.batch_norm(m.q(x).transpose(1, 2), None, None,
        training=True).transpose(1, 2),
    "means of positions": lambda m, x, b, n: m.q(x) - m.k(x).mean(1, keepdim=True),
    "padded": lambda m, x, b, n: F.pad(m.q(x), (0, 0, 1, 0))[:, :-1],
    "frequencies of positions": lambda m, x, b, n: torch.fft.irfft(torch.fft.rfft(
        m.q(x), dim=1) * torch.fft.fft(m.k(x), None, 1)[:, : n // 2 + 1], dim=1),
    "a convolution of each": lambda m, x, b, n: (lambda y, w: F.conv1d(y, w, padding=1,
        groups=y.shape[1]).transpose(1, 2))(m.q(x).transpose(1, 2),
        m.k(x)[0, :3].t()[:, None]),
    "dots": lambda m, x, b, n: torch.einsum("...nhd,...mhd->...nhd", *(f(x).view(b, n,
        -1, SIZE) for f in (m.q, m.k))).flatten(2),
}  # fmt: skip
HEADS_OF_ALL = {
    "in the place of a head's size": lambda m, x, b, n: joined(attend(*m.heads(x, b, n,
        HEADS, -1)), b, n),
    "beside positions": lambda m, x, b, n: joined(attend(*m.heads(x, b, -1, HEADS,
        SIZE)), b, n),
    "behind a transpose": lambda m, x, b, n: joined(attend(*(y.reshape(b * HEADS, -1,
        SIZE) for y in m.heads(x, b, n, -1, SIZE))).reshape(b, -1, n, SIZE), b, n),
    "counted": lambda m, x, b, n: joined(scored(*m.heads(x, b, n, -1, SIZE),
        lambda s: s + torch.arange(s.shape[1], device=s.device)[:, None, None]), b, n),
}  # fmt: skip
MIXED = {
    "a norm": lambda m, x, b, n: (lambda q: q / q.norm(dim=-1, keepdim=True))(m.q(x)),
    "a softmax": lambda m, x, b, n: m.q(x).softmax(-1),
    "a mean of heads": lambda m, x, b, n: m.q(x) * m.k(x).mean(-1, keepdim=True),
    "thirds": lambda m, x, b, n: m.qkv(x).chunk(3, -1)[0],
    "a slice": lambda m, x, b, n: m.q(x)[..., : WIDTH // 2].repeat(1, 1, 2),
    "a sum so far": lambda m, x, b, n: m.q(x).cumsum(-1),
    "evens first": evens,
    "heads with heads": lambda m, x, b, n: scored(*(f(x).view(b, n, -1,
        SIZE) for f in (m.q, m.k, m.v))).flatten(2),
    "a part that is written": lambda m, x, b, n: (m.q(x).clone().index_fill_(-1,
        torch.arange(2, device=x.device), 0.0)),
    "a mean that leaves": lambda m, x, b, n: (m.q(x), m.k(x).mean()),
}  # fmt: skip
MIXED |= {
    "one head": lambda m, x, b, n: attend(m.q(x), m.k(x), m.v(x)),
    "a special softmax": lambda m, x, b, n: torch.special.softmax(m.q(x), -1),
    "a sum along an axis": lambda m, x, b, n: torch.cumsum(m.q(x), axis=-1),
    "norms of channels": lambda m, x, b, n: F.group_norm(m.q(x), n),
    "norms of instances": lambda m, x, b, n: F.instance_norm(m.q(x)),
    "norms of positions": lambda m, x, b, n: F.batch_norm(m.q(x), None, None,
        training=True),
    "neighbours": lambda m, x, b, n: F.max_pool1d(m.q(x), 3, 1, 1),
    "frequencies": lambda m, x, b, n: torch.fft.fft(m.q(x)).real,
    "a convolution of all": lambda m, x, b, n: m.q(x) * F.conv1d(
        m.q(x).transpose(1, 2), m.k(x)[0, :1, :, None]).transpose(1, 2),
    "the other way round": lambda m, x, b, n: torch.rot90(m.q(x), 2, (1, 2)),
    "channels in turn": lambda m, x, b, n: F.channel_shuffle(m.q(x).transpose(1, 2)[...,
        None], 2)[..., 0].transpose(1, 2),
    "a product that sums": lambda m, x, b, n: torch.einsum("bnd,bme->bnd", m.q(x),
        m.k(x)),
    "by their number": lambda m, x, b, n: m.q(x) * m.q(x).shape[-1] ** -0.5,
    "by the number of heads": lambda m, x, b, n: joined(attend(*m.heads(x, b, n, -1,
        SIZE)) / m.q(x).view(b, n, -1, SIZE).shape[2], b, n),
}  # fmt: skip
TYPED = {
    "an input": lambda m, x, b, n: m.q(x) * x.sum(),
    "a parameter": lambda m, x, b, n: m.q(x) * m.o.bias.sum(),
    "a parameter for each": lambda m, x, b, n: m.q(x)
    + m.o.bias[:1].expand(m.q(x).shape[-1]),
    "dropout": lambda m, x, b, n: F.dropout(m.q(x), 0.1),
    "attention's dropout": lambda m, x, b, n: joined(attend(*m.heads(x, b, n, -1, SIZE),
        0.1), b, n),
}  # fmt: skip


def square(y, _):
    return y.square().mean()


def equals_one_device(do, size=2):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(do)).double()
    plan = {"1.[qkv]": "column", "1.qkv": "column", "1.o": "row"}
    splits_as_one_device(module, {"input": X}, square, "1", plan, size, 1e-10)


@pytest.mark.parametrize("name", RIGHT)
def test_what_takes_each_head_by_itself_is_that_of_one_device(name):
    equals_one_device(RIGHT[name])


@pytest.mark.parametrize("name", [*HEADS_OF_ALL, *MIXED, *TYPED])
def test_what_does_not_is_refused(name):
    says = "^plan: .*(out of the plan|to the plan|p to 0)"
    with pytest.raises(RuntimeError, match=says):
        equals_one_device((HEADS_OF_ALL | MIXED | TYPED)[name])


class Leaking(Attention):
    """Returns, beside its output, what a rank's own heads are."""

    def forward(self, x):
        y = self.q(x)
        return self.o(y), y


class Around(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.inner, self.reads = Leaking(None), reads

    def forward(self, x):
        out, own = self.inner(x)
        return out + own.sum() if self.reads else out


@pytest.mark.parametrize("grads", [True, False])
def test_split_features_do_not_leave_the_module_around_them(grads):
    def run(module, units=""):
        plan = {"**.q": "column", "**.o": "row"}
        step = ff.value_and_grad if grads else lambda loss: loss
        given = module.double(), {"x": X}, square, units, plan
        splits_as_one_device(*given, step=step)

    with pytest.raises(RuntimeError, match="returns what is made of split features"):
        run(Around(reads=False), "inner")
    with pytest.raises(RuntimeError, match="returns of a rank's own features, .* read"):
        run(Around(reads=True))
    run(Around(reads=False))


def test_heads_that_the_axis_does_not_divide_are_refused():
    def do(m, x, b, n):
        return m.q(x).view(b, n, -1, WIDTH // 2).flatten(2)

    with pytest.raises(RuntimeError, match="as 2 heads, which an axis of size 4 does"):
        equals_one_device(do, 4)


class NormedHeads(Attention):
    """Queries and keys, normed in each head by weights that all heads share."""

    def __init__(self):
        super().__init__(None)
        self.norm = nn.RMSNorm(SIZE)

    def forward(self, x):
        q, k, v = self.heads(x, *x.shape[:2], -1, SIZE)
        return self.o(joined(attend(self.norm(q), self.norm(k), v), *x.shape[:2]))


def test_shapes_are_run_in_the_dtypes_of_the_call():
    """A norm whose weights stay float32 would make float32 of queries, not values."""
    module = NormedHeads()
    plan = {"[qkv]": "column", "o": "row", "norm": "whole"}
    apply, params, buffers = ff.from_module(module, "", plan=plan, axis="model")
    loss = lambda p, x: apply(p, buffers, x.to(p["o.bias"].dtype)).float().sum()  # noqa: E731
    step = ff.precision(ff.value_and_grad(loss), torch.bfloat16, reduce=torch.float32)

    def main():
        state = ff.place(step, params, X.float(), layouts=apply.layouts)
        return step(state, X.float())[0]

    losses = ff.spmd(main, ff.make_mesh({"model": 2}, "simulated"))()
    with torch.no_grad():
        expected = module.to(torch.bfloat16)(X.bfloat16()).float().sum()
    torch.testing.assert_close(losses[0], expected, rtol=2e-2, atol=1e-1)


def test_gathered_features_lie_beside_each_other():
    """As a Linear makes them: fused attention takes no others."""
    strides = []

    class Gathered(Attention):
        def forward(self, x):
            y = self.q(x)
            strides.append(y.stride(-1))
            return y

    module = Gathered(None).double()
    splits_as_one_device(module, {"x": X}, square, "", {"q": "column_gathered"})
    assert set(strides) == {1}
