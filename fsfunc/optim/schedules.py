"""Learning rates as plain functions of how many updates were made: 0 at the first.

Any function from a count to a number is a schedule; these are the usual ones. Given a
count that is a 0-dim tensor they return one. Optimizers ask by `rate_at`, once a step.
Below are the checks of optimizers' arguments (`check_ranges`), and what ranks compare
of schedules and masks, which are functions (`ask_schedules_and_masks`).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.backends.interrupts import reraising_interrupts
from fsfunc.comm.collective_ops import COMPARING
from fsfunc.comm.comparison import Lines
from fsfunc.comm.descriptions import Ask, describe_value
from fsfunc.optim.leaves import Tree
from fsfunc.runtime.scopes import is_in_graph, value_in_graph
from fsfunc.sharded.leaf import is_sharded

Schedule = Callable[[Any], Any]  # from a count of updates to a learning rate


def rate_at(learning_rate: float | Schedule, count: int | Tensor) -> Any:
    """Returns the learning rate at ``count``; calls the schedule if it is one.

    In a step that is compiled as one graph, the schedule is called before each run of
    the graph, outside of it.

    Raises:
        ValueError: the schedule gave a negative number, or none.

    >>> rate_at(0.1, 7), rate_at(lambda count: 1 / (count + 1), 1)
    (0.1, 0.5)
    """
    if not callable(learning_rate):
        return learning_rate
    if isinstance(count, _torch.FakeTensor) and is_in_graph():
        return value_in_graph(rate_at, learning_rate, count)
    # While a step is recorded the count is an int that reports its comparisons, as
    # branches of the step. A schedule may compare it, so it gets a plain one.
    rate = learning_rate(int(count) if isinstance(count, int) else count)
    if isinstance(rate, (int, float)) and not rate >= 0:
        raise ValueError(
            f"the schedule gave the learning rate {rate} at count {count}: "
            "it must be 0 or more"
        )
    # A schedule whose rate differs between ranks would train each part by another one.
    if (call := COMPARING.get()) is not None:
        number = rate.item() if isinstance(rate, Tensor) else rate
        call.claimed_equal(number, "the learning rate of a schedule")
    return rate


def constant(value: float) -> Schedule:
    """Returns the schedule that is always ``value``.

    >>> constant(0.1)(1000)
    0.1
    """
    return lambda count: value


def linear(start: float, end: float, steps: int) -> Schedule:
    """Returns the schedule on a straight line from ``start`` to ``end``, then ``end``.

    ``start + (end - start) min(count / steps, 1)``; ``torch.optim.lr_scheduler.
    LinearLR`` with the factors ``start / rate`` and ``end / rate``.

    Raises:
        ValueError: ``steps`` below 1.

    >>> [linear(0.0, 1.0, 4)(count) for count in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    check_ranges("linear", steps=steps)
    return lambda count: start + (end - start) * _clamp_to_1(count / steps)


def cosine_decay(start: float, steps: int, end: float = 0.0) -> Schedule:
    """Returns the schedule on half a cosine from ``start`` down to ``end``, then that.

    ``end + (start - end) (1 + cos(pi min(count / steps, 1))) / 2``; through ``steps``
    it is ``torch.optim.lr_scheduler.CosineAnnealingLR(T_max=steps, eta_min=end)``,
    which then rises again.

    Raises:
        ValueError: ``steps`` below 1.

    Source: Loshchilov and Hutter, SGDR, equation 5.

    >>> [round(cosine_decay(1.0, 4)(count), 3) for count in (0, 1, 2, 4, 9)]
    [1.0, 0.854, 0.5, 0.0, 0.0]
    """
    check_ranges("cosine_decay", steps=steps)

    def schedule(count: int | Tensor) -> float | Tensor:
        angle = math.pi * _clamp_to_1(count / steps)
        cosine = torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)
        return end + (start - end) * (1 + cosine) / 2

    return schedule


def warmup_cosine(
    peak: float,
    warmup_steps: int,
    total_steps: int,
    *,
    start: float = 0.0,
    end: float = 0.0,
) -> Schedule:
    """Returns the schedule that rises linearly to ``peak``, then falls by a cosine.

    Args:
        peak: the rate at ``warmup_steps``.
        warmup_steps: how long it rises from ``start``.
        total_steps: when it reaches ``end``, the warm-up counted in.
        start: the rate of the first update; 0 wastes it.
        end: the rate from ``total_steps`` on.

    Raises:
        ValueError: not ``1 <= warmup_steps < total_steps``.

    >>> rate = warmup_cosine(1.0, 2, 6)
    >>> [round(rate(count), 3) for count in range(8)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    if not 1 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps is {warmup_steps} of total_steps {total_steps}: it must be "
            "at least 1 and leave steps for the decay"
        )
    rise = linear(start, peak, warmup_steps)
    fall = cosine_decay(peak, total_steps - warmup_steps, end)
    return join([rise, fall], [warmup_steps])


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Returns the schedule that follows others in turn, each counting from 0.

    Args:
        schedules: at least one.
        boundaries: rising; at ``boundaries[i]`` schedule i + 1 takes over, as in
            ``torch.optim.lr_scheduler.SequentialLR``.

    Raises:
        ValueError: not one boundary between any two schedules, or boundaries that do
            not rise.

    >>> rate = join([constant(1.0), linear(1.0, 0.0, 2)], [3])
    >>> [rate(count) for count in range(6)]
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(
            f"cannot join {len(schedules)} schedules at {len(boundaries)} boundaries: "
            "give one boundary between any two"
        )
    starts = [0, *boundaries]
    if any(a >= b for a, b in zip(starts, boundaries, strict=False)):
        raise ValueError(f"boundaries {list(boundaries)} must rise and begin above 0")

    def schedule(count: Any) -> float | Tensor:
        # No branch on a tensor's value, which a recorded step does not have: all
        # schedules are computed. ``count - 0`` as a graph's count is no Tensor itself.
        if isinstance(count - 0, Tensor):
            rate, *later_rates = [
                torch.as_tensor(each(count - start), device=count.device)
                for each, start in zip(schedules, starts, strict=True)
            ]
            for boundary, later in zip(boundaries, later_rates, strict=True):
                rate = torch.where(count - boundary >= 0, later, rate)
            return rate
        k = bisect_right(boundaries, count)
        return schedules[k](count - starts[k])

    return schedule


def _clamp_to_1(share: float | Tensor) -> float | Tensor:
    return share.clamp(max=1.0) if isinstance(share, Tensor) else min(share, 1.0)


def check_numbers(**values: Any) -> None:
    """Raises TypeError where one of ``values`` is neither a number nor a tensor."""
    for name, value in values.items():
        if not isinstance(value, (Real, Tensor)):
            advice = f"float({value!r})" if isinstance(value, str) else "a float"
            raise TypeError(
                f"{name} is {value!r}, a {type(value).__name__}: it must be a number; "
                f"give {advice}"
            )


# What arguments must be, by name, or by function and name where one function differs.
RANGES: dict[str, str] = {
    **dict.fromkeys(
        "learning_rate weight_decay eps eps1 eps2 momentum dampening alpha beta "
        "min_norm minimum trust_coefficient weight_lr_power start "
        "max_consecutive_errors".split(),
        "at least 0",
    ),
    **dict.fromkeys("b1 b2 decay smoothing".split(), "at least 0 and below 1"),
    **dict.fromkeys("max_norm max_value p initial".split(), "above 0"),
    **dict.fromkeys("interval every block d scale steps".split(), "at least 1"),
    "growth": "above 1",
    "backoff": "above 0 and below 1",
    "beta2_decay": "at most 0",
    "ns_steps": "at least 0 and below 100",
    "schedule_free b1": "above 0 and below 1",
    "shampoo b2": "above 0 and at most 1",
    "shampoo eps": "above 0",
    "muon momentum": "at least 0 and at most 1",
    "adafactor eps": "",  # a pair
}
_FLOATS = torch.float64, torch.float32, torch.bfloat16, torch.float16
_DTYPES = {"dtype": _FLOATS, "moment_dtype": (*_FLOATS, torch.uint8)}  # 8 bits: codes
_COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}


def check_ranges(function: str, /, **values: Any) -> None:
    """Checks arguments of an optimizer or schedule by the table `RANGES`.

    A learning rate may be a schedule, which is not checked here.

    Args:
        function: its name.
        values: its arguments, by name.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: it is no number; or a dtype that is not among those allowed.

    >>> check_ranges("sgd", learning_rate=-1.0)
    Traceback (most recent call last):
    ValueError: learning_rate is -1.0: it must be at least 0
    """
    for name, value in values.items():
        if name in _DTYPES and value not in _DTYPES[name]:
            names = ", ".join(map(str, _DTYPES[name]))
            raise TypeError(f"{name} is {value}: give one of {names}")
        allowed = RANGES.get(f"{function} {name}", RANGES.get(name))
        if not allowed or name in _SCHEDULES and callable(value):
            continue
        check_numbers(**{name: value})
        # "at least 0 and below 1" is both what a message says and what is checked.
        bounds = [part.rsplit(" ", 1) for part in allowed.split(" and ")]
        if not all(_COMPARISONS[word](value, float(bound)) for word, bound in bounds):
            raise ValueError(f"{name} is {value}: it must be {allowed}")


def check_params_given(params: Tree, reader: str) -> None:
    """Raises ValueError where an update that reads the parameters is given None."""
    if params is None:
        raise ValueError(
            f"{reader} reads the parameters, so it needs them: call "
            "update(grads, state, params)"
        )


_ASKED_COUNTS = (0, 1, 2, 3, 10, 100, 1000, 10_000, 100_000)
_SCHEDULES = {"learning_rate", "lr"}
_MASKS = {"mask", "trust_mask", "labels"}


def ask_schedules_and_masks(params: Tree) -> Ask:
    """Returns what ranks compare of an optimizer's arguments that are functions.

    Schedules are asked for rates at some counts, and masks about each leaf: two
    functions cannot be compared. They are known by the names of the arguments; of
    another argument that is a function only its own name is compared.

    >>> import torch
    >>> from fsfunc.comm.descriptions import describe_lines
    >>> from fsfunc.optim.transformations import scale
    >>> halving = scale(1.0).described_as("sgd", {"learning_rate": lambda n: 0.5**n})
    >>> describe_lines("sgd", halving, ask_schedules_and_masks(torch.ones(2)))[2:4]
    [('sgd/learning_rate at count 0', '1.0'), ('sgd/learning_rate at count 1', '0.5')]
    """
    paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=is_sharded)
    pairs = zip(paths, leaves, strict=True)
    tensors = [(p, x) for p, x in pairs if is_sharded(x) or isinstance(x, Tensor)]

    def ask(name: str, fn: Callable[..., Any]) -> Lines:
        if name in _SCHEDULES:
            return [(f"at count {n}", _describe_answer(fn, n)) for n in _ASKED_COUNTS]
        if name in _MASKS:
            return [
                (f"of {path!r}", _describe_answer(fn, path, x)) for path, x in tensors
            ]
        return ()

    return ask


@reraising_interrupts()
def _describe_answer(fn: Callable[..., Any], *args: Any) -> str:
    """Returns what a user's function returns or raises, as ranks compare it."""
    try:
        return describe_value(fn(*args))
    except Exception as error:  # as a table of rates does beyond its end
        return f"raises {type(error).__name__}"
