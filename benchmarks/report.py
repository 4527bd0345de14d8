"""The tables that the benchmarks print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rows import floor_seconds


def render(
    rows: list[dict[str, Any]],
    measured: dict[str, dict[str, Any]],
    settings: dict[str, Any],
) -> str:
    """The settings, the table of ratios, and the figures of every competitor."""
    size = settings["size"]
    given = " ".join(f"{k}={v}" for k, v in settings["environment"].items())
    parts = [
        f"GPT of {settings['parameters'] / 1e6:.2f}M parameters: {size}",
        f"{settings['ranks']} processes on {settings['backend']}, one thread each, "
        f"{settings['rounds']} rounds, torch {settings['torch']}, {given}",
        "ratio: ours / theirs, medians of alternating steps, the slowest rank's time.\n"
        "floor: the same step on one device without communication, in the same run;\n"
        "for pipelines and split layers, one device's step on the batch of all ranks,\n"
        "over the ranks.\n"
        "memory: peak RSS of steady steps over the RSS after the imports.",
        "",
        ratios(rows),
        "",
        competitors(measured),
        f"sent a step and rank: the peers' by {settings['peers_sent']}.",
    ]
    return "\n".join(parts)


def ratios(rows: list[dict[str, Any]]) -> str:
    """One line a row: ours, theirs, ratios, bar and aim."""
    head = [
        "what",
        "against",
        "ours",
        "theirs",
        "ratio",
        "pure",
        "bar",
        "aim",
        "within",
        "ours/floor",
        "theirs/floor",
    ]
    body = [
        [
            row["what"],
            row["against"],
            quantity(row["ours"], row["unit"]),
            quantity(row["theirs"], row["unit"]),
            number(row["ratio"]),
            number(row["pure_ratio"]),
            wanted(row, "bar"),
            wanted(row, "aim"),
            row["verdict"],
            number(row["ours_to_floor"]),
            number(row["theirs_to_floor"]),
        ]
        for row in rows
    ]
    return table(head, body)


def competitors(measured: dict[str, dict[str, Any]]) -> str:
    """Every competitor's own figures, group by group."""
    head = ["group", "competitor", "median", "to floor", "sent MB", "peak MiB"]
    body = []
    for group, names in measured.items():
        floor = floor_seconds(group, names)
        for name, found in names.items():
            seconds = found.get("seconds")
            sent, peak = found.get("sent_bytes"), found.get("bytes")
            body.append(
                [
                    group,
                    name,
                    duration(seconds),
                    number(seconds / floor if seconds and floor else None),
                    f"{sent / 1e6:.2f}" if sent is not None else "",
                    f"{peak / 2**20:.0f}" if peak is not None else "",
                ]
            )
    return table(head, body)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry; the first two to the left."""
    lines = [list(head), *map(list, body)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def text(line: list[str]) -> str:
        cells = [
            entry.ljust(width) if i < 2 else entry.rjust(width)
            for i, (entry, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([text(lines[0]), rule, *map(text, lines[1:])])


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def quantity(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g} {unit}"


def wanted(row: dict[str, Any], which: str) -> str:
    value = row[which]
    if value is None:
        return ""
    return f"{value:.2f}" if row["against"] else quantity(value, row["unit"])


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3f} {unit}"
    return f"{seconds / 1e-6:.1f} us"
