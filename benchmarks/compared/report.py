"""The tables that the benchmarks print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compared.rows import floor_seconds

QUIET = 0.05  # of the processors: more, and others move the figures


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
        "ratio: ours / theirs, the median of the rounds, of the slowest rank's times.\n"
        "floor: the same step on one device without communication, in the same run;\n"
        "for pipelines and split layers, one device's step on the batch of all ranks,\n"
        "over the ranks.\n"
        "memory: peak RSS of steady steps over the RSS after the imports.",
        busy(settings["others"]),
        "",
        ratios(rows),
        "",
        competitors(measured, settings["ranks"]),
        f"sent a step and rank: the peers' by {settings['peers_sent']}.",
    ]
    return "\n".join(parts)


def busy(others: float) -> str:
    """What to think of figures, by the share of processors that others used."""
    said = f"other programs used {others:.1%} of the processors meanwhile"
    return f"{said}: no figure here is good" if others > QUIET else said


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of README.md's table; a row's memory stands behind its time."""
    by_key, lines = {row["key"]: row for row in rows}, []
    for row in rows:
        if row["key"].endswith("_memory") and row["key"][:-7] in by_key:
            continue
        memory = by_key.get(f"{row['key']}_memory")
        floors = [row["ours_to_floor"], row["theirs_to_floor"]]
        cells = [row["what"], row["against"], short(row), between(row["spread"])]
        cells += ["" if x is None else f"{x:.2f}" for x in floors]
        cells.append(short(memory) if memory else "")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def short(row: dict[str, Any]) -> str:
    if row["ratio"] is not None:
        return f"{row['ratio']:.2f}"
    return quantity(row["ours"], row["unit"])


def ratios(rows: list[dict[str, Any]]) -> str:
    """One line a row: ours, theirs, their ratio and its bar."""
    head = [
        "what",
        "against",
        "ours",
        "theirs",
        "ratio",
        "quartiles",
        "pure",
        "bar",
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
            between(row["spread"]),
            number(row["pure_ratio"]),
            wanted(row),
            {True: "yes", False: "no", None: ""}[row["within"]],
            number(row["ours_to_floor"]),
            number(row["theirs_to_floor"]),
        ]
        for row in rows
    ]
    return table(head, body)


def competitors(measured: dict[str, dict[str, Any]], ranks: int) -> str:
    """Every competitor's own figures, group by group."""
    head = ["group", "competitor", "median", "to floor", "sent MB", "peak MiB"]
    body = []
    for group, names in measured.items():
        floor = floor_seconds(group, names, ranks)
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


def between(found: Sequence[float] | None) -> str:
    return "" if found is None else "{:.2f}-{:.2f}".format(*found)


def wanted(row: dict[str, Any]) -> str:
    value = row["bar"]
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
