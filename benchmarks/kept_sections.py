"""Results of a benchmark, kept by section as JSON with one entry a line, so that a later run may add to them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from memscale import MemScaleError


class Entry(Protocol):
    """One line of the results."""

    def to_dict(self) -> dict[str, Any]: ...


E = TypeVar("E", bound=Entry)


def read_sections(path: pathlib.Path, make: Callable[..., E]) -> dict[str, list[E]]:
    """What is kept there, each entry made from its fields; nothing where there is no file.

    Raises:
        MemScaleError: The file holds something else.
    """
    if not path.exists():
        return {}
    try:
        kept: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["sections"]
        return {name: [make(**entry) for entry in entries] for name, entries in kept.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MemScaleError(f"{path} does not hold results of this benchmark: {error}") from error


def write_sections(path: pathlib.Path, sections: Mapping[str, Sequence[Entry]], order: Iterable[str]) -> None:
    """Keep these sections there, in this order."""
    lines = []
    for name in order:
        if name in sections:
            entries = ",\n".join(json.dumps(entry.to_dict()) for entry in sections[name])
            lines.append(f'"{name}": [\n{entries}]')
    path.write_text('{"sections": {\n' + ",\n".join(lines) + "}}\n")
