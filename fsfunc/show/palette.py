"""What each kind of thing is called and how it is coloured, wherever it is shown."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BORDER",
    "COMPUTE",
    "GAPS",
    "Look",
    "MEMORY",
    "MOVES",
    "PHASE",
    "STALL",
    "TRANSFERS",
    "WAITS",
    "lighter",
    "look_of",
]


@dataclass(frozen=True)
class Look:
    """How one kind is shown: in words, in print, in a picture and in a trace."""

    title: str
    sign: str  # in text: what the action's name begins with, what a gap is filled with
    color: str  # "#rrggbb"
    reserved: str = ""  # the nearest of the names that trace viewers have colours for


COMPUTE = {
    "F": Look("forward", "F", "#4c7cb8", "rail_response"),
    "B": Look("backward", "B", "#e07b39", "thread_state_iowait"),
    "I": Look("input gradient", "I", "#edb83d", "yellow"),
    "W": Look("weight gradient", "W", "#4fa37b", "thread_state_running"),
    "U": Look("update", "U", "#8b5fa8", "black"),
}
TRANSFERS = {
    "SF": Look("send activations", "SF", "#8aa9d1", "rail_idle"),
    "RF": Look("receive activations", "RF", "#8aa9d1", "rail_idle"),
    "SB": Look("send gradients", "SB", "#ecae85", "rail_animation"),
    "RB": Look("receive gradients", "RB", "#ecae85", "rail_animation"),
}
# A rank that waits between two of its actions is not one that has not begun: zero
# bubble schedules end the first and keep the second.
WAITS, OUTSIDE, BORDER = "waits", "outside", "border"
GAPS = {
    WAITS: Look("waits for another rank", "░", "#c9cdd6"),
    OUTSIDE: Look("not begun, or done", "·", "#eff1f4"),
}


# Memory by kind, as it is stacked: what stays lies below what comes and goes.
MEMORY = {
    "parameters": Look("parameters", "p", "#4c7cb8"),
    "moments": Look("moments", "m", "#8b5fa8"),
    "buffers": Look("buffers", "b", "#edb83d"),
    "gradients": Look("gradients", "d", "#e07b39"),
    "gathered": Look("gathered", "g", "#8aa9d1"),
    "activations": Look("activations", "a", "#4fa37b"),
}
PHASE = {
    "forward": Look("forward", "F", "#4c7cb8", "rail_response"),
    "recompute": Look("recompute", "R", "#8aa9d1", "rail_idle"),
    "backward": Look("backward", "B", "#e07b39", "thread_state_iowait"),
    "update": Look("update", "U", "#8b5fa8", "black"),
}
MOVES = {
    "all_gather": Look("all_gather", "g", "#4fa37b", "thread_state_running"),
    "psum_scatter": Look("psum_scatter", "s", "#edb83d", "yellow"),
    "psum": Look("psum", "+", "#b8a13c", "olive"),
    "pmax": Look("pmax", "^", "#b8a13c", "olive"),
    "all_to_all": Look("all_to_all", "x", "#c26a9a", "terrible"),
    "pbroadcast": Look("pbroadcast", "b", "#6bb3b8", "good"),
    "ppermute": Look("ppermute", "p", "#ecae85", "rail_animation"),
    "message": Look("message", ">", "#ecae85", "rail_animation"),
}
STALL = Look("waits for a transfer", "░", "#c9cdd6")
_OTHER = Look("other", "?", "#a5abb7", "generic_work")


def look_of(looks: dict[str, Look], kind: str) -> Look:
    """The look of a kind; of one that has none, a grey one."""
    return looks.get(kind, _OTHER)


def lighter(color: str, chunk: int, chunks: int) -> str:
    """The colour of a rank's ``chunk``-th stage of ``chunks``: later is lighter.

    >>> lighter("#4c7cb8", 0, 2), lighter("#4c7cb8", 1, 2)
    ('#4c7cb8', '#a2bbda')
    """
    amount = 0.0 if chunks < 2 else min(0.7, 0.24 * chunks) * chunk / (chunks - 1)
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + amount * (255 - p)):02x}" for p in parts)
