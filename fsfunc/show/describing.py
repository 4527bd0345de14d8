"""``description``: a machine's description as a table."""

from __future__ import annotations

from fsfunc.machines import Hardware
from fsfunc.printing.amounts import of_bytes, of_flops, of_seconds, of_share
from fsfunc.printing.tables import Report, Table

__all__ = ["description"]


def description(hardware: Hardware) -> Report:
    """The table of all that a hardware says of itself.

    >>> from fsfunc.hardware import A100_80
    >>> print(description(A100_80).tables["A100-80"].rows[0])
    ('peak, bfloat16', '312 TFLOP/s')
    """
    rows = [(f"peak, {d}", f"{of_flops(rate)}/s") for d, rate in hardware.peak.items()]
    rows += [
        (f"of peak, products of size {size:g}", of_share(share, 1))
        for size, share in hardware.efficiency
    ]
    rows += [
        ("of peak, attention", of_share(hardware.attention, 1)),
        ("memory", of_bytes(hardware.memory)),
        ("memory's bandwidth", f"{of_bytes(hardware.bandwidth)}/s"),
        ("an operator beside its work", of_seconds(hardware.overhead)),
    ]
    if hardware.fresh is not None:
        rows.append(("first touch of memory", f"{of_bytes(hardware.fresh)}/s"))
    for level in hardware.levels:
        name = f"links of {level.ranks or 'all'} ranks"
        said = f"{of_bytes(level.bandwidth)}/s, {of_seconds(level.latency)} a message"
        rows.append((name, said))
    if hardware.levels:
        rows.append(("of a transfer beside computing", of_share(hardware.overlap, 1)))
    rows += [(name, f"{of_bytes(rate)}/s") for name, rate in hardware.rates.items()]
    return Report((Table(hardware.name, ("<field", ">value"), rows, most=len(rows)),))
