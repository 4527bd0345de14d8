"""Schedules against torch's schedulers, count by count."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from fsfunc.optim import constant, cosine_decay, join, linear, warmup_cosine

STEPS = st.integers(1, 20)
RATES = st.floats(1e-4, 10)


def rates_by_torch(make, rate, n):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = make(optimizer)
    found = []
    for _ in range(n):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def assert_same(schedule, expected):
    found = [schedule(count) for count in range(len(expected))]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(rate=RATES, steps=STEPS, start=st.floats(0.01, 1), end=st.floats(0, 1))
def test_linear(rate, steps, start, end):
    make = functools.partial(
        lr_scheduler.LinearLR, start_factor=start, end_factor=end, total_iters=steps
    )
    expected = rates_by_torch(make, rate, steps + 5)
    assert_same(linear(start * rate, end * rate, steps), expected)


@given(rate=RATES, steps=STEPS, end=st.floats(0, 1e-4))
def test_cosine_decay(rate, steps, end):
    make = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=steps, eta_min=end)
    assert_same(cosine_decay(rate, steps, end), rates_by_torch(make, rate, steps + 1))
    assert cosine_decay(rate, steps, end)(steps + 7) == end


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR's own use
@given(rate=RATES, warmup=STEPS, decay=STEPS)
def test_warmup_cosine(rate, warmup, decay):
    def make(optimizer):
        rise = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, warmup)
        fall = lr_scheduler.CosineAnnealingLR(optimizer, decay)
        return lr_scheduler.SequentialLR(optimizer, [rise, fall], [warmup])

    schedule = warmup_cosine(rate, warmup, warmup + decay, start=0.1 * rate)
    assert_same(schedule, rates_by_torch(make, rate, warmup + decay + 1))


def test_join_restarts_the_count():
    def count(step):
        return step

    schedule = join([count, count, constant(9)], [2, 5])
    assert [schedule(step) for step in range(7)] == [0, 1, 0, 1, 2, 9, 9]


def test_a_tensor_is_counted_as_a_number_is():
    rate = join([constant(1.0), warmup_cosine(0.5, 2, 6, end=0.1)], [3])
    for count in range(12):
        found = rate(torch.tensor(count))
        assert isinstance(found, torch.Tensor)
        assert found.item() == pytest.approx(rate(count), abs=1e-6)
