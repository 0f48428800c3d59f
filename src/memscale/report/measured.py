"""A measurement as a piece of HTML: what a notebook shows of `memscale.measure()`."""

from __future__ import annotations

import html
from collections.abc import Mapping

from memscale._units import show_bytes


def measurement_html(device_type: str, peak_bytes: int, breakdown: Mapping[str, int], held: Mapping[str, int]) -> str:
    """The peak with a bar for each kind, and what the card held."""
    rows = [
        f"<tr><td>{html.escape(kind)}</td><td style='text-align:right'>{show_bytes(num_bytes)}</td>"
        f"<td><div style='background:#4c78a8;height:10px;width:{_width(num_bytes, peak_bytes)}px'></div></td></tr>"
        for kind, num_bytes in breakdown.items()
        if num_bytes
    ]
    card = "".join(f", {html.escape(name)} {show_bytes(num_bytes)}" for name, num_bytes in held.items())
    return (
        f"<h4>Live bytes on {html.escape(device_type)}: peak {show_bytes(peak_bytes)}{card}</h4>"
        "<table><thead><tr><th>at the peak</th><th>bytes</th><th></th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _width(num_bytes: int, peak_bytes: int) -> int:
    return round(300 * num_bytes / peak_bytes) if peak_bytes else 0
