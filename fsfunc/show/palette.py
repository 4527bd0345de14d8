"""Names, signs and colours of what charts show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsfunc.planning.simulation import Span

__all__ = [
    "COMPUTE",
    "COMPUTING",
    "GAPS",
    "LOOKS",
    "Look",
    "MEMORY",
    "OTHER",
    "OUTSIDE",
    "SENDING",
    "STALL",
    "TRANSFERS",
    "WAITS",
    "by_sign",
    "legend",
    "lighter",
    "look_of",
]

COMPUTE = "compute"  # the stream on which a rank computes


@dataclass(frozen=True, eq=False)
class Look:
    """The look of one kind: in words, in print, in a picture and in a trace.

    There is one of each: they are compared, and found in dicts, as objects.
    """

    title: str
    sign: str  # in text: what the action's name begins with, what a gap is filled with
    color: str  # "#rrggbb"
    reserved: str = ""  # the nearest of the names that trace viewers have colours for

    @property
    def style(self) -> str:
        """As rich writes its sign."""
        return "bright_black" if self.sign in "░·" else f"#000000 on {self.color}"


def _by_title(*looks: Look) -> dict[str, Look]:
    return {look.title: look for look in looks}


COMPUTING = _by_title(
    Look("forward", "F", "#4c7cb8", "rail_response"),
    Look("recompute", "R", "#8aa9d1", "rail_idle"),
    Look("backward", "B", "#e07b39", "thread_state_iowait"),
    Look("input gradient", "I", "#edb83d", "yellow"),
    Look("weight gradient", "W", "#4fa37b", "thread_state_running"),
    Look("update", "U", "#8b5fa8", "black"),
)
# A rank that waits between two of its actions is not one that has not begun: zero
# bubble schedules end the first and keep the second.
WAITS = Look("waits for another rank", "░", "#c9cdd6")
STALL = Look("waits for a transfer", "░", "#c9cdd6")
OUTSIDE = Look("not begun, or done", "·", "#eff1f4")
GAPS = _by_title(WAITS, STALL, OUTSIDE)
_ON_COMPUTE = COMPUTING | GAPS

SENDING = _by_title(
    Look("all_gather", "g", "#4fa37b", "thread_state_running"),
    Look("psum_scatter", "s", "#edb83d", "yellow"),
    Look("psum", "+", "#b8a13c", "olive"),
    Look("pmax", "^", "#b8a13c", "olive"),
    Look("all_to_all", "x", "#c26a9a", "terrible"),
    Look("pbroadcast", "b", "#6bb3b8", "good"),
    Look("ppermute", "p", "#ecae85", "rail_animation"),
    Look("message", ">", "#ecae85", "rail_animation"),
)
# Of a pipeline's schedule, by the action's kind.
TRANSFERS = {
    "SF": Look("send activations", "SF", "#8aa9d1", "rail_idle"),
    "RF": Look("receive activations", "RF", "#8aa9d1", "rail_idle"),
    "SB": Look("send gradients", "SB", "#ecae85", "rail_animation"),
    "RB": Look("receive gradients", "RB", "#ecae85", "rail_animation"),
}
# Memory by kind, as it is stacked: what stays lies below what comes and goes.
MEMORY = _by_title(
    Look("parameters", "p", "#4c7cb8"),
    Look("moments", "m", "#8b5fa8"),
    Look("buffers", "b", "#edb83d"),
    Look("gradients", "d", "#e07b39"),
    Look("gathered", "g", "#8aa9d1"),
    Look("activations", "a", "#4fa37b"),
)
OTHER = Look("other", "?", "#a5abb7", "generic_work")
LOOKS = (*COMPUTING.values(), *GAPS.values(), *SENDING.values(), OTHER)
_MESSAGES = {"send", "receive"}


def look_of(span: Span) -> Look:
    """The look of a span: by its phase where it computes, else by what is sent."""
    if span.stream == COMPUTE:
        return _ON_COMPUTE.get(span.phase, OTHER)
    return SENDING.get("message" if span.name in _MESSAGES else span.name, OTHER)


def by_sign(kind: str) -> Look:
    """The look of an action that computes, by its kind: "F"."""
    return next(look for look in COMPUTING.values() if look.sign == kind)


def legend(looks: Sequence[Look], width: int | None) -> Iterator[list[tuple[str, str]]]:
    """Yield what signs mean, line by line: letters, and rich's style for them."""
    line: list[tuple[str, str]] = []
    for look in looks:
        entry = [(f" {look.sign} ", look.style), (f" {look.title}  ", "")]
        long = sum(len(letters) for letters, _ in [*line, *entry]) - 2
        if line and width is not None and long > width:
            yield line
            line = []
        line += entry
    if line:
        yield line


def lighter(color: str, chunk: int, chunks: int) -> str:
    """The colour of a rank's ``chunk``-th stage of ``chunks``: later is lighter.

    >>> lighter("#4c7cb8", 0, 2), lighter("#4c7cb8", 1, 2)
    ('#4c7cb8', '#a2bbda')
    """
    amount = 0.0 if chunks < 2 else min(0.7, 0.24 * chunks) * chunk / (chunks - 1)
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + amount * (255 - p)):02x}" for p in parts)
