"""Transfers in both directions, of many shapes and dtypes, beside collectives."""

import torch

import fsfunc as ff
from fsfunc.comm.attribution import label
from fsfunc.comm.groups import group

SHAPES = [(), (1,), (0, 3), (2, 0), (5, 7), (300, 41)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def value(shape, dtype, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def everything(axis):
    """Every pair at once, both ways; {what: tensor} of this rank, and its ledger."""
    where = group(axis)
    others = [i for i in range(where.size) if i != where.index]
    kinds = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    found, sent, received = {}, [], {}
    with ff.ledger() as log, label("blocks/3", "forward"):
        for number, (shape, dtype) in enumerate(kinds):
            for i in others:  # some receives are asked for before the send, some after
                if (number + i) % 2:
                    received[number, i] = where.receive(shape, dtype, "cpu", i)
                x = value(shape, dtype, number + 100 * where.index + 10 * i)
                sent.append(where.send(x, i))
                if not (number + i) % 2:
                    received[number, i] = where.receive(shape, dtype, "cpu", i)
            if number % 7 == 0:
                total = where.start("psum", torch.ones(5 + number), any_order=True)
                found[f"sum {number}"] = total.wait()
        for (number, i), work in reversed(received.items()):  # in any order
            found[f"{kinds[number]} from {i}"] = work.wait()
        for work in sent:
            work.wait()
    if not all(work.done() for work in sent):
        raise AssertionError("a send that was waited for is not done")
    for (number, i), (shape, dtype) in ((key, kinds[key[0]]) for key in received):
        expected = value(shape, dtype, number + 100 * i + 10 * where.index)
        x = found[f"{kinds[number]} from {i}"]
        if x.dtype != dtype or x.shape != shape or not torch.equal(x, expected):
            raise AssertionError(f"{kinds[number]} from {i}: {x} is not {expected}")
    records = [(r.op, r.axis, r.bytes, r.dtype, r.unit, r.phase) for r in log.of()]
    return found, records
