"""Real processes: the bits and the ledger of simulated ranks, and nobody hangs."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("way", ["one host", "two hosts", "gloo"])
def test_processes_are_as_simulated_ranks(processes, way):
    """Every op, dtype and derivative; sums of three show the order of the ranks."""
    out = processes(
        """
        import os, sys, warnings; warnings.simplefilter("ignore", DeprecationWarning)
        import fsfunc as ff
        from fsfunc.comm.backends import same_host
        from tests.checks import same
        from tests.core.test_dtypes import over_processes
        from tests.comm.spmd_program import against_simulated
        from tests.comm.test_transfers import everything
        if sys.argv[1] == "two hosts":
            same_host.host = lambda: f"host{os.environ['RANK'] == '2'}"
        mesh = against_simulated({"data": 3}, ["data"], sys.argv[1] != "gloo")
        near = {} if mesh.link.neighbours is None else mesh.link.neighbours.by_rank
        due = {"one host": [2, 2, 2], "two hosts": [1, 1, 0], "gloo": [0, 0, 0]}
        assert len(near) == due[sys.argv[1]][mesh.rank], near
        assert sys.argv[1] == "two hosts" or over_processes(3) == []
        main, there = lambda: everything("data"), ff.make_mesh(mesh.axes, "simulated")
        same(ff.spmd(main, mesh)()[0], ff.spmd(main, there)()[mesh.rank])
        print(f"rank {mesh.rank}\\n", end="", flush=True)
        """,
        3,
        way,
    )
    assert sorted(out.splitlines()) == [f"rank {r}" for r in range(3)]


def test_natively_processes_are_as_plain_lists(processes):
    program = "from tests.core.test_dtypes import over_processes as f; print(f(2))"
    assert processes(program, 2) == "[]\n" * 2


def test_two_axes_and_groups_made_once(processes):
    out = processes(
        """
        import torch, torch.distributed as dist, fsfunc as ff
        made, new_group = [], dist.new_group
        def counted(ranks, *args, **how):
            made.append(tuple(ranks))
            return new_group(ranks, *args, **how)
        dist.new_group = counted
        sizes = {"a": 2, "b": 2}
        both = [ff.make_mesh(sizes, k) for k in ("processes", "simulated")]
        assert len(made) == len(set(made)) == 5, made  # 2 of a, 2 of b, (b, a)
        def main():
            x = torch.arange(8.0) + 10 * both[0].rank
            found = []
            for axis in ("a", "b", ("a", "b"), ("b", "a")):
                found += [ff.all_gather(x, axis), ff.psum_scatter(x, axis)]
                found += [ff.all_to_all(x, axis, split_dim=0, concat_dim=0)]
            return found
        real, simulated = (ff.spmd(main, mesh)() for mesh in both)
        mine = simulated[both[0].rank]
        assert len(made) == 5, made
        assert all(torch.equal(x, y) for x, y in zip(real[0], mine, strict=True))
        other = ff.make_mesh({"c": 4})  # two meshes, each with groups of its own
        with_other = ff.spmd(lambda: ff.psum(torch.ones(1), "c").item(), other)
        assert with_other() == [4.0]
        whole = ff.local_batch(torch.arange(4), both[0], ("b", "a")).tolist()
        print(f"{both[0].rank} {whole}\\n", end="", flush=True)
        """,
        4,
    )
    assert sorted(out.splitlines()) == ["0 [0]", "1 [2]", "2 [1]", "3 [3]"]


FORKS = """
    import os, sys, time, torch, fsfunc as ff
    from torch.utils.data import DataLoader

    class Reduces(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return ff.psum(torch.ones(3), "data")

    mesh = ff.make_mesh({"data": 2}, timeout=30)

    def main():
        ff.psum(torch.ones(3), "data")
        if not (pid := os.fork()):
            sys.exit(3)
        for _ in range(200):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                break
            time.sleep(0.1)
        assert found and os.waitstatus_to_exitcode(status) == 3, "it never ends"
        try:
            list(DataLoader(Reduces(), num_workers=1))
        except RuntimeError as error:
            text = str(error)
            assert f"is a fork of process {os.getpid()}, which is rank" in text, text
            print(ff.psum(torch.ones(3), "data").tolist(), flush=True)

    ff.spmd(main, mesh)()
"""


def test_a_fork_ends_and_has_no_collectives(processes):
    """As Python ends it, and as a worker of a data loader."""
    assert processes(FORKS, 2, timeout=90) == "[2.0, 2.0, 2.0]\n" * 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks /proc")
@pytest.mark.parametrize("whose", ["own", "ours"])
def test_a_mesh_keeps_no_group_alive(processes, whose):
    """A thread of gloo's that is there when Python ends may abort the process."""
    out = processes(
        """
        import os, sys, torch, torch.distributed as dist, fsfunc as ff

        own = sys.argv[1] == "own"

        def threads():
            at = "/proc/self/task"
            names = [open(f"{at}/{t}/comm").read() for t in os.listdir(at)]
            return sum("gloo" in name for name in names)

        if own:
            dist.init_process_group("gloo")
        mesh = ff.make_mesh({"node": 1, "data": 2})
        total = ff.spmd(lambda: ff.psum(torch.ones(3), "data"), mesh)
        total()
        dist.all_gather_object([None, None], "queued")
        import torch.distributed.checkpoint  # and what has groups as defaults
        before = threads()
        dist.destroy_process_group()
        print(before > 0, threads())
        try:
            total()
        except RuntimeError as error:
            print("make the mesh anew" in str(error), flush=True)
        """,
        2,
        whose,
    )
    assert out.split() == ["True", "0", "True"] * 2


def test_meshes_that_are_dropped_let_go(processes):
    """Of their connections, their memory and its descriptors; also after an error."""
    out = processes(
        """
        import gc, os, torch, fsfunc as ff

        def left():
            gc.collect()
            with open("/proc/self/maps") as file:
                maps = sum("memfd:fsfunc" in line for line in file)
            return maps, len(os.listdir("/proc/self/fd"))

        def use():
            mesh = ff.make_mesh({"data": 2})
            ff.start(ff.psum, torch.ones(3), "data")  # never waited for
            total = lambda: ff.psum(torch.ones(5000), "data").sum().item()
            return ff.spmd(total, mesh)()

        assert use() == [10000.0]
        before = left()
        for _ in range(20):
            use()
        assert left() == before, (before, left())
        print("let go")
        """,
        2,
    )
    assert out.split("\n") == ["let go"] * 2 + [""]
