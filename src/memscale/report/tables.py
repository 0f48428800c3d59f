"""Cells in columns, as plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(
    rows: Sequence[tuple[str, ...]], left: Collection[int] | None = None, *, underlined: bool = False
) -> list[str]:
    """Lines of aligned cells. Columns in `left` are aligned to the left (None: all), the others to the right.

    `underlined` puts a rule below the first row.
    """
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if left is None or column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in rows
    ]
    rule = ["-" * sum(widths, 2 * len(widths) - 2)] if underlined else []
    return [lines[0], *rule, *lines[1:]]
