"""Who is there: processes that come, and die, agree on it by a store.

    python examples/meeting.py 127.0.0.1:29500     holds the store, until it is stopped

A *generation* is a set of processes that train together. A process that comes ends the
one that there is, as does one that finds another dead; and all meet in the next one,
where each writes which states it has. The first that has any waits until nobody new
came for some seconds, then writes the list, in which those that stay have their old
ranks. Who is not on it ends that generation, too. In the first generation nobody has a
state, and the first that came writes it; later that is done after a longer wait.

The store (torch.distributed.TCPStore) is in a process of its own, so that no death of
those that train takes it along. It holds ``generation``, the number of the newest one;
and of generation g: ``g/came``, how many came, ``g/i``, what the i-th of them has, and
``g/list``, who is part of it.
"""

import json
import signal
import sys
import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

QUIET = 2.0  # seconds: more than from the first survivor's error to the last one's


def open_store(address, timeout=300.0, holds=False):
    """The store at HOST:PORT; of the process that holds it, it ends with the object."""
    host, port = address.split(":")
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(host, int(port), None, holds, limit, wait_for_workers=False)


def forget_failed_group():
    """Lets torch begin anew, as in a process that never made a group.

    It names a group by how many this process has tried to make, and finds others by
    that name. A group that failed counts until one is destroyed: here, one of its own.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


class Meeting:
    """The place where processes meet, one generation after the other.

    Args:
        address: of the store, HOST:PORT.
        least: how many processes must be there.
        timeout: seconds after which one that waits takes those that it waits for to be
            dead: more than a step takes.

    ``kept``: by generation and step, a state and the mesh that it lies on. Ranks that
    lose another one are at most one step apart, so of two states all have one.
    """

    def __init__(self, address, least=1, timeout=30.0):
        self.store = open_store(address, timeout)
        self.least, self.timeout = least, timeout
        self.generation, self.kept = -1, {}

    def keep(self, state, mesh):
        """Keeps a state to go on from, and the one before it."""
        self.kept[self.generation, state.step] = state, mesh
        for key in list(self.kept)[:-2]:
            del self.kept[key]

    def is_over(self):
        """Whether somebody has ended this generation."""
        return self.store.add("generation", 0) != self.generation

    def leave(self):
        """Ends this generation, unless another process has done so."""
        if dist.is_initialized():
            dist.destroy_process_group()
        now, following = str(self.generation), str(self.generation + 1)
        self.store.compare_set("generation", now, following)

    def join(self):
        """Makes the process group of a new generation.

        Returns:
            its size; whether any process has a state; and this one's of the newest step
            that those have in common, and its mesh: None and None of a process that has
            it not, and is as new.
        """
        states = [(key, mesh.rank) for key, (_, mesh) in self.kept.items()]
        while True:
            self.generation = self.store.add("generation", 0)
            number = self.store.add(f"{self.generation}/came", 1) - 1
            self.store.set(f"{self.generation}/{number}", json.dumps(states))
            order, key = self._list(number)
            if number in order:
                break
            self.leave()
        store = dist.PrefixStore(f"generation {self.generation}", self.store)
        how = {"rank": order.index(number), "world_size": len(order)}
        limit = timedelta(seconds=self.timeout)
        try:
            dist.init_process_group("gloo", store=store, timeout=limit, **how)
        except RuntimeError:  # one of them has died since
            forget_failed_group()
            raise
        state, mesh = self.kept.get(key and tuple(key), (None, None))
        return len(order), key is not None, state, mesh

    def _list(self, number):
        """Returns the order of those that are part of this generation, and the key."""
        path, count = f"{self.generation}/list", 0
        began = last_came = time.monotonic()
        while not self.store.check([path]):
            if self.is_over() or time.monotonic() - began > 2 * self.timeout:
                return [], None
            before, count = count, self.store.add(f"{self.generation}/came", 0)
            if count > before:
                last_came = time.monotonic()
            states = self._states(count)
            waited = time.monotonic() - last_came
            has_state = [i for i, keys in states.items() if keys]
            leads = number == min(has_state or states)
            soon = has_state or self.generation == 0
            if leads and count >= self.least:
                if waited > (QUIET if soon else self.timeout):
                    # Only where none is there yet: this process may have been slow.
                    self.store.compare_set(path, "", json.dumps(agree(states)))
            time.sleep(0.02)
        return json.loads(self.store.get(path))

    def _states(self, count):
        """By number, the states of those that came; one may have died before."""
        paths = {i: f"{self.generation}/{i}" for i in range(count)}
        there = [i for i, path in paths.items() if self.store.check([path])]
        return {i: json.loads(self.store.get(paths[i])) for i in there}


def agree(states):
    """Returns the processes by their new ranks, and the key of the state to go on from.

    It is the newest of those that most processes have. Who has it keeps its rank, if
    there is one of that number: so what it has stays where it is.

    >>> agree({0: [[[0, 7], 2]], 1: [], 2: [[[0, 6], 0], [[0, 7], 0]]})
    ([2, 1, 0], (0, 7))
    """
    held = [(i, tuple(key), rank) for i, keys in states.items() for key, rank in keys]
    counts = Counter(key for _, key, _ in held)
    newest = max(counts, key=lambda key: (counts[key], key), default=None)
    stay = {rank: i for i, key, rank in held if key == newest}
    moved = [i for rank, i in sorted(stay.items()) if rank >= len(states)]
    free = [*moved, *(i for i in sorted(states) if i not in stay.values())]
    ranks = range(len(states))
    return [stay[r] if r in stay else free.pop(0) for r in ranks], newest


if __name__ == "__main__":
    store = open_store(sys.argv[1], holds=True)
    signal.pause()
