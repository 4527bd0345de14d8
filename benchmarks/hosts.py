"""Slow links: two hosts of two ranks each, and the bytes that the kernel counted.

    python benchmarks/hosts.py [--quick | --bytes] [--only KEYS] [--mbit RATES]
                               [--seconds N] [--json PATH]

Two network namespaces of this machine are the hosts, a shaped veth pair their link (as
root; elsewhere it says why not). A small GPT learns text by each step for as many
seconds, from the same parameters and batches; the first losses must agree. Then some
steps run alone, and the interface's own counters are read before and after.

MB are of a step, both ways and of all ranks: what the kernel counted, frames and all,
and what must cross by the ledger (`rank.crossing`; a peer's by its closed form on
gloo's rings). The rest is explained to the byte: 66 of headers a frame, of 1514 or an
acknowledgement; gloo's 48 before a message, and 48 for each of the one or two notices
of it; 1448 or less for what TCP sent twice. Calls 1, 2, 4, 8 and so on, in which ranks
compare what they have by a few messages more, and the next ones are left out. A row of
ours of which nothing explains some bytes is marked, and the run fails.

`link`: the seconds that those bytes take at the link's rate, under which no step comes.
`estimate`: `ff.estimate` of the step's plan, on this machine as measured, with two
levels. It counts on rings; fsfunc on gloo sends pair by pair, of which over all ranks
without levels a third more crosses. Steps run one after another, not in turn: see the
load beside.
`--quick` is a rehearsal: a tiny model, one link, a second a step, no meaning in the
times. `--bytes` counts bytes alone, of the one model or the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from compare import check_losses
from compared.measuring import ENVIRONMENT, run_workers, slowest
from compared.models import Size
from compared.report import duration, number, table
from compared.rows import named_rows, over
from slow_link.links import NotAllowed, shape, two_hosts

RANKS = 4
SIZE = Size(256, 128, layers=4, heads=4, length=64, sequences=4)
TINY = Size(256, 32, layers=4, heads=2, length=16, sequences=2)  # a layer each stage
NOTICE = 48  # bytes of gloo's: before a message, and to say that it is asked for
SEGMENT = 1448  # bytes at most that TCP sends at once


class Row(NamedTuple):
    """A step; `against`: the peer's; `exact`: it computes what one device does."""

    key: str
    what: str
    against: str = ""
    exact: bool = True


ROWS = (
    Row("ddp", "DDP"),
    Row("zero0", "zero=0", "ddp"),
    Row("zero0_levels", "zero=0 in two levels", "ddp"),
    Row("ddp_powersgd", "DDP, PowerSGD's hook"),
    Row("powersgd", "zero=0, powersgd", "ddp_powersgd", exact=False),
    Row("fsdp2", "FSDP2"),
    Row("zero3", "zero=3", "fsdp2"),
    Row("coded", "zero=3 in 8 bits, owing", "fsdp2", exact=False),
    Row("hsdp", "HSDP"),
    Row("hybrid", "zero=3, replicate=", "hsdp"),
    Row("levels", "zero=3 in two levels", "hsdp"),
    Row("coded_levels", "two levels in 8 bits, owing", "hsdp", exact=False),
    Row("local_sgd", "local_sgd of 8, zero=3", "hsdp", exact=False),
    Row("slowmo", "slowmo of 8, zero=3", "hsdp", exact=False),
    Row("torch_1f1b", "torch's 1F1B, four stages"),
    Row("four_stages", "1F1B, four stages", "torch_1f1b"),
    Row("pipeline", "1F1B over hosts, zero=2", "torch_1f1b"),
    # Two pipelines of two ranks: what crosses is named.
    Row("torch_f1b_data", "torch's 1F1B, DDP over hosts"),
    Row("f1b_data", "1F1B, zero=0 over hosts", "torch_f1b_data"),
    Row("torch_zbv_data", "torch's ZB-V, FSDP2 over hosts"),
    Row("zbv_data", "ZB-V, zero=2 over hosts", "torch_zbv_data"),
    Row("torch_f1b_pipe", "torch's 1F1B over hosts, DDP"),
    Row("f1b_pipe", "1F1B over hosts, zero=0", "torch_f1b_pipe"),
    Row("torch_zbv_pipe", "torch's ZB-V over hosts, FSDP2"),
    Row("zbv_pipe", "ZB-V over hosts, zero=2", "torch_zbv_pipe"),
)


def measure(
    rows: list[Row], mbit: float, hosts: list[str], size: Size, **task: Any
) -> list[dict]:
    """A record of each row, at one rate of the link."""
    shape(hosts, mbit)
    names = [row.key for row in rows]
    patience = 120 + len(names) * (2 * task["seconds"] + 30)
    answers = run_workers(
        {
            "kind": "train",
            "hosts": [hosts[rank // 2] for rank in range(RANKS)],
            "mbit": mbit,
            "size": dataclasses.asdict(size),
            "competitors": names,
            "patience": patience,
            **task,
        },
        ranks=RANKS,
        timeout=patience,
    )
    losses = {name: answers[0][name]["losses"] for name in names}
    check_losses(losses, alike=[row.key for row in rows if row.exact])
    times = slowest([{n: a[n]["times"] for n in names} for a in answers])
    found = [
        _record(row, mbit, times[row.key], [answer[row.key] for answer in answers])
        for row in rows
    ]
    by_key = {record["key"]: record["seconds"] for record in found}
    for row, record in zip(rows, found, strict=True):
        theirs = by_key.get(row.against)
        record["ratio"] = over(record["seconds"], theirs)
    return found


def _record(row: Row, mbit: float, times: list[float], ranks: list[dict]) -> dict:
    """What one step took and sent; `unexplained`: bytes that nothing accounts for."""
    first = ranks[0]
    ours = first["closed"] is None
    total = lambda name: sum(rank[name] for rank in ranks)  # noqa: E731
    crossed = total("crossed") if ours else first["closed"]
    repeated = first["repeated"] + ranks[-1]["repeated"]
    least = 2 * NOTICE * total("messages")
    most = 1.5 * least + SEGMENT * repeated
    rest = first["stream"] - crossed
    levels = first["ledger"]
    ledger = {level: sum(r["ledger"].get(level, 0) for r in ranks) for level in levels}
    unexplained = min(rest - least, 0.0) + max(rest - most, 0.0)
    return {
        "key": row.key,
        "mbit": mbit,
        "seconds": statistics.median(times) if times else None,
        "link_seconds": max(first["sent"], first["received"]) * 8 / (mbit * 1e6),
        "estimate": first.get("estimate"),
        "frames": first["sent"] + first["received"],
        "stream": first["stream"],
        "crossed": crossed,
        "messages": total("messages"),
        "repeated": repeated,
        "unexplained": round(unexplained) if ours else None,
        "ledger": ledger,
        "loss": first["loss"],
        "steps": first["steps"],
        "load": first["load"],
    }


def render(rows: list[Row], found: list[dict]) -> str:
    """The table of one link."""
    head = ["what", "against", "a step", "ratio", "link", "estimate", "MB counted",
            "MB ledger", "headers", "loss", "steps", "load"]  # fmt: skip
    said = {row.key: row.what for row in ROWS}
    body = [
        [
            row.what + " (?)" * bool(record["unexplained"]),
            said.get(row.against, ""),
            duration(record["seconds"]),
            number(record["ratio"]),
            duration(record["link_seconds"]),
            duration(record["estimate"]),
            f"{record['frames'] / 1e6:.3f}",
            f"{record['crossed'] / 1e6:.3f}",
            f"{record['frames'] / record['crossed'] - 1:.1%}",
            f"{record['loss']:.3f}",
            str(record["steps"]),
            f"{record['load']:.1f}",
        ]
        for row, record in zip(rows, found, strict=True)
    ]
    return table(head, body)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a rehearsal")
    parser.add_argument("--bytes", action="store_true", help="no times, no losses")
    parser.add_argument("--only", metavar="KEYS", help="keys of rows, with commas")
    parser.add_argument("--mbit", default="", help="rates, with commas: 50,200,1000")
    parser.add_argument("--seconds", type=float, help="of training by each step")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write results here")
    chosen = parser.parse_args(argv)
    chosen.rows = named_rows(parser, chosen.only, ROWS)
    brief = chosen.quick or chosen.bytes
    rates = chosen.mbit or ("1000" if brief else "50,200,1000")
    chosen.rates = [float(rate) for rate in rates.split(",")]
    if chosen.seconds is None:
        chosen.seconds = 1.0 if chosen.quick else 15.0
    return chosen


def main(argv: list[str] | None = None) -> None:
    chosen = arguments(argv)
    everything: list[dict] = []
    how = {"seconds": chosen.seconds, "window": 3, "measuring": 6.0}
    if chosen.quick:
        how |= {"window": 1, "measuring": 1.0}
    if chosen.bytes:
        how |= {"seconds": 0.0, "window": 1, "measuring": 0.0}
    given = " ".join(f"{k}={v}" for k, v in ENVIRONMENT.items())
    size = TINY if chosen.quick else SIZE
    print(f"GPT of {size.parameters / 1e6:.2f}M parameters, {RANKS} processes, {given}")
    try:
        with two_hosts() as hosts:
            for mbit in chosen.rates:
                found = measure(chosen.rows, mbit, hosts, size, **how)
                everything += found
                print(f"\n{mbit:g} Mbit/s; loss after {how['seconds']:g} s")
                print(render(chosen.rows, found), flush=True)
                if chosen.json:
                    chosen.json.write_text(json.dumps(everything, indent=1))
    except NotAllowed as why:
        print(f"no hosts can be made here: {why}", file=sys.stderr)
        sys.exit(1)
    if wrong := [r["key"] for r in everything if r["unexplained"]]:
        sys.exit(f"bytes that nothing explains: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
