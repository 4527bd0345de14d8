"""Plans of compiled units hold what the compiler's own partition keeps."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import fsfunc as ff
from fsfunc._torch import partitions
from fsfunc._torch.partitions import partitioner

WIDTH, ROWS = 32, 64


def block_of(p, x):
    hidden = F.layer_norm(x, (WIDTH,), p["norm"])
    return x + F.gelu(hidden @ p["up"]) @ p["down"]


block = ff.unit(block_of)


def params():
    up, down = torch.randn(WIDTH, 4 * WIDTH), torch.randn(4 * WIDTH, WIDTH)
    return {"norm": torch.ones(WIDTH), "up": up, "down": down}


def planned(transform, count=1):
    def loss(ps, x):
        for p in ps:
            x = block(p, x)
        return x.square().sum()

    step = transform(ff.value_and_grad(loss))
    return ff.plan(step, [params() for _ in range(count)], torch.randn(ROWS, WIDTH))


def kept(plan):
    """Bytes that the unit's forward has made and its backward is given."""
    own = plan[0]
    at = next(i for i, e in enumerate(own.events) if "backward" in str(e[-1]))
    held = [x for x in own.alive(at - 1) if x.phase == "forward" and x.unit]
    return sum(x.bytes for x in held)


SHARES = [None, 1.0, 0.5, 0.3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("share", SHARES)
def test_a_plan_keeps_what_a_compiled_unit_keeps(share):
    cut = min_cut_rematerialization_partition
    as_it_is = lambda graph, inputs: make_boxed_func(graph)  # noqa: E731
    backend = aot_autograd(
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        partition_fn=cut if share is None else partitioner(share),
        decompositions=select_decomp_table(),
    )
    p = {k: v.requires_grad_() for k, v in params().items()}
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = torch.compile(block_of, backend=backend, fullgraph=True, dynamic=False)(p, x)
    given = {v.untyped_storage()._cdata for v in (*p.values(), x, y)}
    saved = {v.untyped_storage()._cdata: v for v in y.grad_fn.saved_tensors}
    real = sum(v.nbytes for key, v in saved.items() if key not in given)

    def transform(step):
        return ff.jit(step if share is None else ff.remat(step, ff.MinCut(share)))

    assert real > 0
    assert kept(planned(transform)) == real + y.nbytes  # the loss has the output


def test_less_is_held_the_less_is_kept():
    peaks = [planned(lambda step: step, 4).peak_bytes]
    peaks += [planned(ff.jit, 4).peak_bytes]
    for share in (0.5, 0.2):
        how = lambda step, s=share: ff.jit(ff.remat(step, ff.MinCut(s)))  # noqa: E731
        peaks.append(planned(how, 4).peak_bytes)
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 1.2 * peaks[2]


def test_what_is_computed_again_is_counted():
    least = planned(lambda step: ff.jit(ff.remat(step, ff.MinCut(0.1))))
    assert least.flops > planned(ff.jit).flops == planned(lambda step: step).flops


def test_a_norm_is_composed_for_a_gpu_too():
    norm = ff.unit(lambda p, x: F.rms_norm(x @ p, (WIDTH,)))
    step = ff.jit(ff.value_and_grad(lambda p, x: norm(p, x).sum()))
    args = torch.randn(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    cpu, cuda = (ff.plan(step, *args, device=d).peak_bytes for d in ("cpu", "cuda"))
    assert cpu == cuda


def test_a_unit_that_is_not_parted_says_so(monkeypatch):
    def refuses(fn, share):
        raise RuntimeError("no such operator\nat all")

    monkeypatch.setattr(partitions, "partitioned", refuses)
    with pytest.warns(UserWarning, match="'block_of' is planned as if .*no such op"):
        found = planned(ff.jit)
    assert kept(found) == kept(planned(lambda step: step))


def test_a_unit_that_reads_a_coordinate_of_another_mesh_is_parted():
    mesh = ff.make_mesh({"data": 2}, "simulated")
    other = ff.make_mesh({"rows": 2}, "simulated")
    unit = ff.unit(lambda p, x: torch.tanh(x @ p) * (1 + other.rank % 2))
    grad = ff.value_and_grad(lambda p, x: unit(p, x).sum())
    step = ff.shard(ff.jit(grad), mesh, "data")
    ff.spmd(lambda: ff.plan(step, torch.ones(8, 8), torch.ones(4, 8)), mesh)()


def test_a_unit_that_sends_sends_once():
    """Such a unit does not compile; its plan has what it would send."""
    mesh, optimizer = ff.make_mesh({"data": 2, "model": 2}, "abstract"), ff.sgd(0.1)
    unit = ff.unit(lambda p, x: ff.psum(x @ p, "model"))
    step = optimizer(ff.value_and_grad(lambda p, x: unit(p, x).sum()))
    given = lambda: torch.ones(8, 8), optimizer, torch.ones(4, 8)  # noqa: E731
    plain = ff.plan(ff.shard(step, mesh, "data"), *given, mesh=mesh)
    with pytest.warns(UserWarning, match="it calls a collective"):
        found = ff.plan(ff.shard(ff.jit(step), mesh, "data"), *given, mesh=mesh)
    assert found.table() == plain.table()
