"""What hypothesis draws for schedules: valid ones, and edges between their stages."""

from hypothesis import strategies as st

from fsfunc.pipelining.actions import Action, owners


@st.composite
def valid_schedules(draw, ranks=None, n_stages=None, count=None):
    """Draw a schedule by running stages in any order that a chain allows."""
    ranks = draw(st.integers(1, 4)) if ranks is None else ranks
    least, most = (0, 6 - ranks) if n_stages is None else (n_stages - ranks,) * 2
    extra = draw(st.lists(st.integers(0, ranks - 1), min_size=least, max_size=most))
    owner = draw(st.permutations([*range(ranks), *extra]))
    count = draw(st.integers(1, 4)) if count is None else count
    last = len(owner) - 1
    split = draw(
        st.lists(
            st.booleans(), min_size=len(owner) * count, max_size=len(owner) * count
        )
    )
    open_now = {("F", 0, m) for m in range(count)}
    done, rows = set(), [[] for _ in range(ranks)]
    while open_now:
        kind, stage, m = draw(st.sampled_from(sorted(open_now)))
        open_now.remove((kind, stage, m))
        done.add(("I" if kind == "B" else kind, stage, m))
        rows[owner[stage]].append(Action(kind, stage, m))
        if kind == "F" and stage < last:
            open_now.add(("F", stage + 1, m))
        if kind == "I":
            open_now.add(("W", stage, m))
        below = stage if kind == "F" and stage == last else stage - 1
        if below >= 0 and (kind in ("B", "I") or below == last):
            open_now.add(("I" if split[below * count + m] else "B", below, m))
    return tuple(tuple(row) for row in rows)


@st.composite
def any_edges(draw, schedule):
    """Draw edges from stages to later ones, over any distance."""
    stages = range(len(owners(schedule)))
    every = [(p, c) for p in stages for c in stages if p < c]
    return draw(st.sets(st.sampled_from(every))) if every else set()
