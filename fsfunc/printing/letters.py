"""Letters that a terminal or a page would obey in place of showing them."""

from __future__ import annotations


def visible(text: str) -> str:
    """Returns text with escapes for what a terminal would obey instead of showing.

    Names in a file may hold such letters: colours, moves of the cursor, other
    directions of writing, ends of lines.

    >>> print(visible("a\\x1b[2Jb\\nc"))
    a\\x1b[2Jb\\nc
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def visible_lines(text: str) -> str:
    """Returns text with such escapes in each line; lines stay lines."""
    return "\n".join(map(visible, text.split("\n")))
