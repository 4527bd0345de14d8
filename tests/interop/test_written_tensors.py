"""Parameters and buffers that a forward writes, openly and not: never in silence."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsfunc as ff
from fsfunc.interop import call_tensors
from tests.checks import with_ledger
from tests.interop.models import close, seeded

X = torch.randn(4, 4, generator=seeded(3))


class Teacher(nn.Module):
    """A student and its teacher, an average of it that takes no gradient."""

    def __init__(self, write):
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher.requires_grad_(False)
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self)
        return self.student(x) - self.teacher(x)


def by_name(m):
    m.teacher.weight.mul_(0.9).add_(m.student.weight, alpha=0.1)


def by_data(m):
    m.teacher.weight.data.mul_(0.9).add_(m.student.weight.data, alpha=0.1)


@pytest.mark.parametrize("units", [(), Teacher])
@pytest.mark.parametrize(("write", "ranks"), [(by_name, 2), (by_data, 0), (by_data, 2)])
def test_a_parameter_that_is_written_is_told_and_left(write, ranks, units):
    module = nn.Sequential(Teacher(write))
    before = copy.deepcopy(module.state_dict())
    apply, params, buffers = ff.from_module(module, units)
    step = ff.value_and_grad(lambda p: apply(p, buffers, X).square().mean())
    wrap = lambda mesh: ff.shard(ff.remat(step), mesh, "data")  # noqa: E731
    for _ in range(2):
        with pytest.raises(RuntimeError, match="changes the parameter '0.*weight' in"):
            with_ledger(wrap, params) if ranks else apply(params, buffers, X)
    close(dict(module.state_dict()), dict(before), 0.0)


class Statistics(nn.Module):
    """Writes its buffers, in ways no version counter shows, when it is told to."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x, update=True):
        y = self.layer(x)
        if self.how == "data":
            self.mean.data.add_(1.0 if update else 0.0)
            return y * (1 + self.mean)
        return F.batch_norm(y, self.mean, self.var, training=update)


@pytest.fixture(params=["near", "far"])
def asked(request, monkeypatch):
    """The questions for which one waits; with "far", where tensors are on a device."""
    found, ask = [], call_tensors._read_flags
    said = lambda x: found.append(len(x)) or ask(x)  # noqa: E731
    monkeypatch.setattr(call_tensors, "_read_flags", said)
    if request.param == "far":
        monkeypatch.setattr(call_tensors, "_is_on_host", lambda x: False)
    return found


@pytest.mark.parametrize("units", [(), Statistics])
@pytest.mark.parametrize("how", ["data", "batch_norm"])
def test_hidden_writes_are_seen_in_every_call(how, units, asked):
    module = Statistics(how)
    apply, params, buffers = ff.from_module(copy.deepcopy(module), units)

    def loss(params, mutable):  # under torch.func too
        out = apply(params, buffers, X, mutable=mutable)
        out, new = out if mutable else (out, {})
        return out.square().mean(), new

    with pytest.raises(RuntimeError, match="writes the buffer"):
        torch.func.grad(loss, has_aux=True)(params, False)
    new = torch.func.grad(loss, has_aux=True)(params, True)[1]
    close(new, apply(params, buffers, X, mutable=True)[1], 1e-6)
    for update in (False, True, False, True):
        expected = module(X, update)
        if update:
            with pytest.raises(RuntimeError, match="writes the buffer 'mean'"):
                apply(params, buffers, X, update)
            out, buffers = apply(params, buffers, X, update, mutable=True)
        else:
            out = apply(params, buffers, X, update)
        close(out, expected, 0.0)
        close(buffers, dict(module.named_buffers()), 0.0)


class Read(nn.Module):
    """Reads three buffers, of which one has NaN and one is written if it is told to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("a", torch.tensor([torch.nan, 0.0, torch.inf, -1.0]))
        self.register_buffer("b", torch.arange(3))
        self.register_buffer("c", torch.ones(2, 2, dtype=torch.complex64))

    def forward(self, x, value=None):
        if value is not None:
            self.a.data[0] = value
        y = x * self.weight + self.a.nan_to_num(0.0, 0.0)
        return y + self.b.sum() + self.c.real.sum()


@pytest.mark.parametrize("units", [(), Read])
def test_buffers_are_compared_by_one_question_a_call(units, asked, request):
    """On a device; on the CPU by none that one waits for."""
    apply, params, buffers = ff.from_module(Read(), units)
    step = ff.remat(ff.value_and_grad(lambda p: apply(p, buffers, X).sum()))
    step(params)
    asked.clear()
    out, new = apply(params, buffers, X, mutable=True)
    assert new["a"] is buffers["a"] and new["c"] is buffers["c"]
    assert asked == ([3] if "far" in request.node.callspec.id else [])
    for value in (1.0, torch.nan):
        if value == value:
            with pytest.raises(RuntimeError, match="writes the buffer 'a'"):
                apply(params, buffers, X, value)
        else:
            apply(params, buffers, X, value)


class Checkpointing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=False)


@pytest.mark.parametrize("units", [(), Checkpointing])
def test_a_checkpoint_within_is_told_what_to_use_instead(units):
    apply, params, buffers = ff.from_module(nn.Sequential(Checkpointing()), units)
    loss = lambda p: apply(p, buffers, X).square().mean()  # noqa: E731
    with pytest.raises(RuntimeError, match=r"checkpoint.*ff\.remat\(step\)"):
        ff.value_and_grad(loss)(params)
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    with pytest.raises(RuntimeError, match=r"checkpoint.*ff\.remat\(step\)"):
        loss(leaves).backward()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.full((), 256.0))

    def forward(self, x):
        self.count += 1  # bf16 has no 257
        return self.layer(x)


@pytest.mark.parametrize("units", [(), ""])
@pytest.mark.parametrize("train", [True, False])
def test_under_precision_buffers_keep_their_dtype(train, units):
    torch.manual_seed(0)
    module = nn.Sequential(Counting(), nn.BatchNorm1d(4), nn.Linear(4, 4)).train(train)
    apply, params, buffers = ff.from_module(copy.deepcopy(module), units)

    def loss(params, x):
        out, new = apply(params, buffers, x, mutable=True)
        assert out.dtype == torch.bfloat16
        return out.float().square().mean(), new

    step = ff.precision(ff.value_and_grad(loss, has_aux=True), compute=torch.bfloat16)
    (value, new), grads = step(params, X)
    expected = module(X).square().mean()
    expected.backward()
    assert new["0.count"] == 257
    assert {n: x.dtype for n, x in new.items()} == {
        n: x.dtype for n, x in module.named_buffers()
    }
    close(new, dict(module.named_buffers()), 1e-2)
    close(value, expected.detach(), 2e-2)
    close(grads, {n: p.grad for n, p in module.named_parameters()}, 3e-2)
