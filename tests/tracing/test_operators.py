"""What the table of elementwise operators claims is what torch's operators do.

An operator is elementwise if it gives, of a part of what it is given, that part of what
it gives of the whole. All that are claimed to be are tried.
"""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fsfunc.tracing.operators import FLOPS, class_of

N, PART = 12, slice(4, 8)
DTYPES = [torch.float64, torch.int64, torch.bool, torch.complex128, torch.float32]
NONE, MEAN, SUM = range(3)  # of a loss, its reductions
# Numbers, by the names of arguments; of "other" and "tensor2" there are both kinds.
NUMBERS = {"scalar", "value", "lr", "grad_scale", "inv_scale"}
aten = torch.ops.aten
NEW = {"_foreach_mm"}  # since torch 2.13


def every_operator():
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(aten, packet), overload or "default")


def claimed():
    """The elementwise ones, but for those that write into an argument ``out``.

    Nor one that gives no values at all.
    """
    for operator in every_operator():
        op = class_of(operator)
        if op.elementwise and op.name != "empty_like":
            if not any(a.is_out for a in operator._schema.arguments):
                yield operator


def drawn(dtype):
    values = torch.rand(N, dtype=torch.float64) * 0.8 + 0.1
    if dtype == torch.bool:
        return values > 0.5
    return values.to(dtype) if is_real(dtype) else (values * 5 + 1).to(dtype)


def is_real(dtype):
    return dtype.is_floating_point or dtype.is_complex


def argument(a, dtype, number):
    """What is given for one argument; ``number``: as a tensor of one element."""
    if a.name == "reduction":
        return NONE
    if a.name in ("state_steps", "found_inf"):
        return [torch.ones(()), torch.ones(())]
    if a.name == "scalars" and str(a.type) == "Tensor":
        return torch.tensor([2.0, 3.0])
    one = 0.5 if is_real(dtype) else 2
    tensor = torch.tensor(one, dtype=dtype) if number else drawn(dtype)
    return {
        "Tensor": tensor,
        "Optional[Tensor]": tensor,
        "List[Tensor]": [drawn(dtype), drawn(dtype)],
        "number": one,
        "Optional[number]": one,
        "float": 0.5,
        "int": 2,
        "List[number]": [2.0, 3.0],
        "bool": True,
        "str": "none",
    }.get(str(a.type))


def given_to(operator, dtype, number):
    """Arguments by name, of those that have no default, and what bounds them."""
    wanted = {"min", "max", "value", "reduction"}
    return {
        a.name: argument(a, dtype, a.name in NUMBERS or number and a.name in _LAST)
        for a in operator._schema.arguments
        if not a.has_default_value() or a.name in wanted
    }


_LAST = {"other", "tensor2"}


def mapped(f, values):
    if isinstance(values, (list, tuple)):
        return [mapped(f, x) for x in values]
    return f(values) if isinstance(values, Tensor) else values


def cut(x):
    return x[PART].clone() if x.shape == (N,) else x.clone()


def called(operator, given):
    """What it returns, and its arguments, into which it may have written."""
    out = operator(**given)
    return flat(out), flat(list(given.values()))


def flat(values):
    if isinstance(values, (list, tuple)):
        return [y for x in values for y in flat(x)]
    return [values]


def is_part(part, whole, counts=True):
    """``counts``: whether it may be one number, of the whole as of a part."""
    if not isinstance(whole, Tensor):
        return counts or whole is None
    if whole.shape == (N,):
        return torch.allclose(whole[PART], part, equal_nan=True)
    return counts and torch.equal(whole, part)


def keeps_to_places(operator, given):
    """Whether the part's results are the parts of the results."""
    out, after = called(operator, {k: mapped(torch.clone, v) for k, v in given.items()})
    of_part, then = called(operator, {k: mapped(cut, v) for k, v in given.items()})
    counts = "_fused_" in str(operator)  # of steps, which it returns too
    made = [is_part(a, b, counts) for a, b in zip(of_part, out, strict=True)]
    return all(made) and all(is_part(a, b) for a, b in zip(then, after, strict=True))


def tried(operator):
    """The same of the first arguments that it takes; None: it takes none of them."""
    for number in (False, True):
        for dtype in DTYPES:
            torch.manual_seed(0)
            try:
                return keeps_to_places(operator, given_to(operator, dtype, number))
            except (RuntimeError, TypeError, IndexError):
                continue
    return None


def test_all_that_are_claimed_to_be_are_elementwise():
    found = {str(operator): tried(operator) for operator in claimed()}
    assert len(found) > 500
    assert [name for name, kept in found.items() if kept is False] == []
    # It takes a device; what is run in its place is tried.
    assert [name for name, kept in found.items() if kept is None] == ["aten.to.device"]


def test_what_gives_python_a_value_is_not_elementwise():
    told = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    found = [op for op in every_operator() if told & set(op.tags)]
    assert {aten.equal.default, aten.allclose.default, aten.nonzero.default} < {*found}
    assert not any(class_of(op).elementwise for op in found)


@pytest.mark.parametrize(
    "name",
    [
        "_foreach_max.default", "_foreach_norm.Scalar", "max.default", "mean.default",
        "_foreach_powsum.Scalar", "_foreach_mm.default", "cumsum.default",
        "_amp_foreach_non_finite_check_and_unscale_.default",
    ],
)  # fmt: skip
def test_what_reduces_is_not(name):
    packet, _, overload = name.partition(".")
    if not hasattr(aten, packet):
        assert packet in NEW
        pytest.skip(f"this torch has no {packet}")
    assert not class_of(getattr(getattr(aten, packet), overload)).elementwise


def test_products_have_the_flops_that_torch_counts():
    a, b, c = torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 5)
    x, y, z = (t.expand(4, *t.shape) for t in (a, b, c))
    calls = {"mm": (a, b), "addmm": (c, a, b), "bmm": (x, y), "baddbmm": (z, x, y)}
    for name, given in calls.items():
        counted = FLOPS[getattr(aten, name)](*given, out_val=None)
        assert counted == flop_registry[getattr(aten, name)](*given, out_val=c)
    assert FLOPS[aten.mm](a, b, torch.float32) == 2 * 2 * 3 * 5
