"""Which leaves of a tree are copies, in shape, of parameters: moments, averages.

Told by whoever places them, or by structure. A subtree mirrors another where each of
its leaves has a leaf of its own path and shape there; the largest such subtree counts,
and of several that it could mirror the nearest one, by the names on the way to it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fsfunc.tree.structure import matches

__all__ = ["mirrors", "told"]

Path = tuple[str, ...]
_Found = tuple[Path, Path, Path]


def mirrors(
    shapes: Mapping[Path, Any],
    taken: Collection[Path],
    fixed: Collection[Path] = (),
    trained: Collection[Path] = (),
) -> dict[Path, tuple[Path, Path, Path]]:
    """For each leaf that mirrors a taken one: that one, and the roots of both subtrees.

    Args:
        shapes: of all leaves that could be copied or copies, by path.
        taken: the parameters.
        fixed: leaves that are no copies, whatever they look like.
        trained: the parameters that are differentiated: of two subtrees as near, one
            that holds some is meant.

    A leaf that could mirror several as well mirrors none.

    >>> two = {("g", "w"): (4, 3), ("d", "w"): (3, 4), ("ema", "w"): (3, 4)}
    >>> mirrors(two, {("g", "w"), ("d", "w")})
    {('ema', 'w'): (('d', 'w'), ('ema',), ('d',))}
    """
    search = _Search(shapes, frozenset(taken), frozenset(fixed), frozenset(trained))
    return dict(search.below((), [p for p in shapes if p not in search.fixed]))


def told(
    like: Mapping[str, str], shapes: Mapping[Path, Any], taken: Collection[Path]
) -> dict[Path, _Found]:
    """The same for leaves of which somebody says what they lie like.

    Args:
        like: by pattern of the path of a subtree, the path of the one it lies like.

    Raises:
        ValueError: a pattern that matches no path; a leaf without one of its shape.

    >>> both = {("w", "a"): 3, ("w0", "a"): 3}
    >>> told({"w0": "w"}, both, {("w", "a")})
    {('w0', 'a'): (('w', 'a'), ('w0',), ('w',))}
    """
    found: dict[Path, _Found] = {}
    for pattern, named in like.items():
        to = tuple(named.split("/")) if named else ()
        below = [
            (path[:k], path[k:])
            for path in shapes
            for k in range(len(path) + 1)
            if matches(pattern, "/".join(path[:k]))
        ]
        if not below:
            raise ValueError(f"like: no floating leaf lies at, or below, {pattern!r}")
        for root, tail in below:
            path, source = root + tail, to + tail
            if shapes.get(source) != shapes[path]:
                other = f"has {shapes[source]}" if source in shapes else "is not there"
                raise ValueError(
                    f"like: {'/'.join(path)!r} of shape {shapes[path]} would lie like "
                    f"{'/'.join(source)!r}, which {other}"
                )
            if source in taken:
                found[path] = source, root, to
    return found


class _Search:
    def __init__(
        self,
        shapes: Mapping[Path, Any],
        taken: frozenset[Path],
        fixed: frozenset[Path],
        trained: frozenset[Path],
    ):
        self.shapes, self.taken = shapes, taken
        self.fixed, self.trained = taken | fixed, trained
        #: Where the taken leaves of a shape lie that end with some path.
        self.roots: dict[Any, list[Path]] = {}
        #: How many leaves there are below each path, and which of them are taken.
        self.counts: Counter[Path] = Counter()
        self.models: dict[Path, list[Path]] = {}
        for path, shape in shapes.items():
            for k in range(len(path)):
                self.counts[path[:k]] += 1
                if path in taken:
                    self.roots.setdefault((path[k:], shape), []).append(path[:k])
                    self.models.setdefault(path[:k], []).append(path)

    def below(self, root: Path, leaves: list[Path]) -> Iterator[tuple[Path, _Found]]:
        """The copies among ``leaves``, all of which lie below ``root``."""
        n = len(root)
        if root not in self.models:
            tails = [p[n:] for p in leaves]
            sources = self._complete(root, tails)
            source = self._nearest(root, tails, sources)
            if source is not None:
                for p, tail in zip(leaves, tails, strict=True):
                    if source + tail in self.taken:
                        yield p, (source + tail, root, source)
            if sources:
                return
        children: dict[str, list[Path]] = {}
        for p in leaves:
            children.setdefault(p[n], []).append(p)
        for name, inner in children.items():
            if inner != [(*root, name)]:
                yield from self.below((*root, name), inner)
            elif (found := self._one(root, name)) is not None:
                yield inner[0], found

    def _complete(self, root: Path, tails: Sequence[Path]) -> list[Path]:
        """The subtrees in which every leaf below ``root`` has its own."""
        tried: dict[Path, bool] = {}
        for tail in tails:
            for source in self.roots.get((tail, self.shapes[root + tail]), ()):
                if source not in tried:
                    tried[source] = all(
                        self.shapes.get(source + t) == self.shapes[root + t]
                        and (source + t)[: len(root)] != root
                        for t in tails
                    )
        return [source for source, complete in tried.items() if complete]

    def _nearest(
        self, root: Path, tails: Sequence[Path], sources: Sequence[Path]
    ) -> Path | None:
        """The one of ``sources`` that is meant, if that can be told."""
        if len(sources) < 2:
            return sources[0] if sources else None

        def how(source: Path) -> tuple[int, bool, bool]:
            around = source == root[: len(source)]
            count = self.counts[source] - (self.counts[root] if around else 0)
            trained = any(source + t in self.trained for t in tails)
            return _shared(_words(root), _words(source)), count == len(tails), trained

        *_, second, first = sorted((how(source), source) for source in sources)
        return None if first[0] == second[0] else first[1]

    def _one(self, root: Path, name: str) -> _Found | None:
        """What a leaf by itself mirrors: its namesake, or a model's only leaf."""
        path = (*root, name)
        if root not in self.models:
            sources = self.roots.get(((name,), self.shapes[path]), ())
            source = self._nearest(root, [(name,)], sources)
            if sources:
                return source if source is None else ((*source, name), root, source)
        while root not in self.models:
            root = root[:-1]
        near = self.models[root]
        alone = len(near) == 1 and self.shapes[near[0]] == self.shapes[path]
        return (near[0], path, near[0]) if alone else None


@functools.lru_cache(4096)
def _words(path: Path) -> list[str]:
    return re.findall(r"[^\W_]+", " ".join(path))


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest sequence of words that both have, in order."""
    best = [0] * (len(other) + 1)
    for a in one:
        left = 0
        for j, b in enumerate(other):
            above = best[j + 1]
            best[j + 1] = left + 1 if a == b else max(above, best[j])
            left = above
    return best[-1]
