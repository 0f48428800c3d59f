"""Files that a command is told to write or read: what is wrong with one is said before anything that takes long."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from memscale import _json
from memscale._errors import PlanError, quoted, shown

if TYPE_CHECKING:
    from memscale._plan import Plan


def check_writable(option: str, path: pathlib.Path | None) -> None:
    """Refuse a path that cannot be written, before anything that takes long."""
    if path is None:
        return
    try:
        is_directory, has_parent = path.is_dir(), path.absolute().parent.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, or that no file can have
        raise PlanError(f"{option} {shown(str(path))} cannot be written: {quoted(error)}") from error
    if is_directory:
        raise PlanError(f"{option} {path}: that is a directory")
    if not has_parent:
        raise PlanError(f"{option} {path}: there is no directory {path.parent}")


def write(option: str, path: pathlib.Path, content: str | bytes) -> None:
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    except OSError as error:
        raise cannot_write(option, path, error) from error


def cannot_write(option: str, path: pathlib.Path, error: OSError) -> PlanError:
    return PlanError(f"{option} {shown(str(path))} cannot be written: {error.strerror or error}")


def refuse_own_source(model: str, option: str, path: pathlib.Path | None) -> None:
    """What a factory is read from is the user's own code, and is not written to."""
    source = model.rpartition(":")[0] or model
    if _is_same_file(pathlib.Path(source), path):
        raise PlanError(f"{option} {path} is the file that the model comes from, which would be overwritten")


def refuse_same_file(option: str, path: pathlib.Path | None, other: str, other_path: pathlib.Path | None) -> None:
    if _is_same_file(path, other_path):
        raise PlanError(f"{option} and {other} are both {path}: one would overwrite the other")


def _is_same_file(one: pathlib.Path | None, other: pathlib.Path | None) -> bool:
    return one is not None and other is not None and one.resolve() == other.resolve()


def is_of_a_run(path: pathlib.Path) -> bool:
    """Whether `executor.report("run.json")` or a Trainer's `memscale_report` wrote it; else it should be a plan."""
    try:
        found = _json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # which is said when it is read as a plan
    return isinstance(found, dict) and found.get("type") == "Report"


def read_plan(path: pathlib.Path) -> Plan:
    from memscale._plan import Plan

    try:
        return Plan.load(path)
    except OSError as error:
        raise PlanError(f"{shown(str(path))} cannot be read: {error.strerror or error}") from error
