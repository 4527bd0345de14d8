"""What hypothesis draws for schedules: edges between their stages."""

from hypothesis import strategies as st

from fsfunc.pipelining.actions import owners


@st.composite
def any_edges(draw, schedule):
    """Draw edges from stages to later ones, over any distance."""
    stages = range(len(owners(schedule)))
    every = [(p, c) for p in stages for c in stages if p < c]
    return draw(st.sets(st.sampled_from(every))) if every else set()
