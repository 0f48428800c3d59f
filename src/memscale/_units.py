"""Bytes and speeds for people, and bytes for allocators. GB = 1e9 bytes, everywhere."""

from __future__ import annotations

MIB = 1 << 20
"""What allocators count in; people read MB."""


def show_bytes(num_bytes: float) -> str:
    """ "9.123 GB", "12.3 MB", "4.1 kB": three digits that matter, and the unit that fits."""
    for unit, size, digits in (("GB", 1e9, 3), ("MB", 1e6, 1)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def show_speed(field_name: str, value: float) -> str:
    """A figure of `Hardware` in its unit: "link_bytes_per_s", 2.4e10 reads as "24 GB/s"."""
    if field_name.endswith("_per_s"):
        return f"{value / 1e9:.4g} GB/s"
    if field_name.endswith("_flops"):
        return f"{value / 1e12:.4g} TFLOP/s"
    if field_name.endswith("_s"):
        return f"{value * 1e6:.4g} us"
    return f"{value:.4g}"


def round_up(num_bytes: int, step: int) -> int:
    """The next multiple of the step."""
    return -(-num_bytes // step) * step
