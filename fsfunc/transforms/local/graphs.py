"""Communication graphs of ``gossip``, as data, made by plain functions.

A graph is a list over time, gone round and round. Each entry has the moves of one
meeting, each a list of (source, target) indices along the axis, in which no rank is
named twice as a source, nor as a target: as ``ppermute`` takes them. A rank is sent to
by as many moves as name it; one that sends in k of them keeps 1 / (k + 1) of what it
has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Pairs = list[tuple[int, int]]
Graph = list[list[Pairs]]


def ring(n: int, peers: int = 1) -> Graph:
    """Sends from each rank to the next one; with two peers, to the one before too.

    The same at all times. FairScale's ``RingGraph``.

    Args:
        n: how many ranks there are, at least 2.
        peers: to how many a rank sends at once, 1 or 2.

    >>> ring(3)
    [[[(0, 1), (1, 2), (2, 0)]]]
    """
    return _rotations(n, [1, -1], peers, "ring")[:1]


def directed_exponential(n: int, peers: int = 1) -> Graph:
    """Sends to the ranks 1, -1, 2, -2, 4, -4, ... ahead, in turn.

    FairScale's ``DynamicDirectedExponentialGraph``; Assran et al., Stochastic gradient
    push, 2019.

    >>> [moves[0][0] for moves in directed_exponential(8)]
    [(0, 1), (0, 7), (0, 2), (0, 6), (0, 4), (0, 4)]
    """
    _check(n, "directed_exponential")
    powers = [2**i for i in range((n - 1).bit_length())]
    return _rotations(n, _both_ways(powers), peers, "directed_exponential")


def n_peer_exponential(n: int, peers: int = 1) -> Graph:
    """Sends to ``peers`` ranks at once: j (peers + 1)^i ahead for j = 1, ..., peers.

    FairScale's ``NPeerDynamicDirectedExponentialGraph``, its default.

    >>> [[move[0] for move in moves] for moves in n_peer_exponential(9, 2)]
    [[(0, 1), (0, 2)], [(0, 3), (0, 6)]]
    """
    _check(n, "n_peer_exponential")
    base, ahead = peers + 1, list[int]()
    # Below 1 peer there is no power to grow: `_rotations` refuses that.
    while base > 1 and base ** (len(ahead) // peers) < n:
        power = base ** (len(ahead) // peers)
        ahead += [j * power for j in range(1, peers + 1)]
    return _rotations(n, ahead, peers, "n_peer_exponential")


def directed_linear(n: int, peers: int = 1) -> Graph:
    """Sends to the ranks 1, -1, 3, -3, 5, ... ahead, in turn: the odd ones below ``n``.

    FairScale's ``DynamicDirectedLinearGraph``.

    >>> [moves[0][0] for moves in directed_linear(4)]
    [(0, 1), (0, 3), (0, 3), (0, 1)]
    """
    return _rotations(n, _both_ways(range(1, n, 2)), peers, "directed_linear")


def bipartite_exponential(n: int, peers: int = 1) -> Graph:
    """Sends between even and odd ranks: to 1, -1, 3, -3, 5, -5, 9, -9, ... ahead.

    FairScale's ``DynamicBipartiteExponentialGraph``.

    Args:
        n: even.

    >>> [moves[0][0] for moves in bipartite_exponential(4)]
    [(0, 1), (0, 3), (0, 3), (0, 1)]
    """
    _check(n, "bipartite_exponential", even=True)
    ahead = [1] + [1 + 2**i for i in range(1, (n - 1).bit_length())]
    return _rotations(n, _both_ways(ahead), peers, "bipartite_exponential")


def bipartite_linear(n: int, peers: int = 1) -> Graph:
    """Sends between even and odd ranks: to 1, -1, 3, -3, 5, ... ahead, in turn.

    FairScale's ``DynamicBipartiteLinearGraph``.

    Args:
        n: even.

    >>> len(bipartite_linear(6))
    6
    """
    _check(n, "bipartite_linear", even=True)
    return _rotations(n, _both_ways(range(1, n, 2)), peers, "bipartite_linear")


def _both_ways(ahead: Sequence[int]) -> list[int]:
    return [way for d in ahead for way in (d, -d)]


def _rotations(n: int, ahead: Sequence[int], peers: int, name: str) -> Graph:
    """Returns ``peers`` of the rotations by ``ahead`` at a time, until they repeat.

    Args:
        name: of the graph's function, for messages.
    """
    _check(n, name)
    most = len(ahead)
    if not isinstance(peers, int) or not 1 <= peers <= most:
        raise ValueError(f"{name}({n}, peers={peers!r}): peers, from 1 to {most}")
    moves = [[(r, (r + d) % n) for r in range(n)] for d in ahead]
    times = most // math.gcd(most, peers)
    return [[moves[(t * peers + j) % most] for j in range(peers)] for t in range(times)]


def _check(n: int, name: str, even: bool = False) -> None:
    if not isinstance(n, int) or n < 2 or even and n % 2:
        raise ValueError(
            f"{name}({n!r}): the number of ranks, {'even, ' if even else ''}at least 2"
        )
