"""Every option of every command, with values that cannot be: a sentence, exit code 2, and nothing is changed.

The options are those of the program itself, so a new one is tried without being named here.
"""

from __future__ import annotations

import pathlib
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from memscale.cli import app, main

pytestmark = pytest.mark.unit

MODEL_FILE = """
    import torch
    from torch import nn

    def tiny():
        raise AssertionError("a bad option is said before the model is built")
"""
SUBJECTS = {
    "estimate": ("model.py:tiny",),
    "plan": ("model.py:tiny",),
    "report": ("model.py:tiny",),
    "fit": ("model.py:tiny",),
    "watch": ("127.0.0.1:1",),
}
"""What a command cannot do without."""
LONG, UNDECODABLE = "x" * 5000, "\udc80"
WRONG: dict[type, tuple[str, ...]] = {
    int: ("", " ", "x", "nan", "1.5", "-1", "0", "9" * 30, LONG),
    float: ("", " ", "x", "nan", "inf", "-inf", "-1", "1e400", LONG),
    str: ("", " ", "no such thing", LONG, UNDECODABLE),
    pathlib.Path: ("", "missing/folder/file", "folder", "model.py/file", "/dev/full/file", LONG),
    bool: ("x",),
}
"""By the type of an option. A switch takes no value at all."""


class Option(typing.NamedTuple):
    command: str
    name: str
    kind: type


def options() -> Iterator[Option]:
    """Those of every command, with their types by what its function says."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    functions = {
        each.name or each.callback.__name__: each.callback for each in app.registered_commands if each.callback
    }
    for name, command in commands.items():
        hints = typing.get_type_hints(functions[name])
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name in hints:
                yield Option(name, parameter.opts[0], _plain_type(hints[parameter.name]))


def _plain_type(kind: Any) -> type:
    """`int` of `int | None` and of `list[int] | None`."""
    while typing.get_args(kind):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    assert kind in WRONG, f"say which values of {kind} cannot be"
    return kind


OPTIONS = list(options())


def test_all_commands_and_kinds_are_there() -> None:
    assert {option.command for option in OPTIONS} >= {*SUBJECTS, "table", "verify", "bench", "doctor", "cache"}
    assert {option.kind for option in OPTIONS} == set(WRONG)


@pytest.fixture
def _folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL_FILE))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)


def _contents(folder: pathlib.Path) -> dict[str, Any]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(folder: pathlib.Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
    """A command line ends with one sentence of ours and code 2, and the folder is as it was."""
    before = _contents(folder)
    code = main(arguments)
    out, err = capsys.readouterr()
    shown = [argument[:40] for argument in arguments]
    assert code == 2, f"{shown}: {code}, {out}{err}"
    assert out == "", shown
    *progress, sentence = err.splitlines()
    assert all(line.endswith(" ...") for line in progress), f"{shown}: {err}"
    assert sentence.startswith("memscale: "), f"{shown}: {err}"
    assert len(err) < 1000, shown
    assert _contents(folder) == before, shown


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: f"{option.command} {option.name}")
def test_values_that_cannot_be(option: Option, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in WRONG[option.kind]:
        refused(tmp_path, capsys, option.command, *SUBJECTS.get(option.command, ()), f"{option.name}={value}")


NO_MODELS = (
    *("", " ", "no such thing", LONG, UNDECODABLE, "model.py", "model.py:", "model.py:other", "folder"),
    *("missing.py:tiny", "folder/:tiny", "/dev/null:tiny", "hostile.json"),
)
ARGUMENTS = {
    **dict.fromkeys(("estimate", "plan", "fit"), NO_MODELS),
    "report": (*NO_MODELS, "empty.json", "binary.json", "deep.json"),
    "verify": ("", "no such thing", LONG, UNDECODABLE, "model.py:tiny"),
    "watch": (*NO_MODELS, "127.0.0.1:1", "127.0.0.1:99999", "http://[", "file:///etc/hosts", "0", "9" * 5000, "\u00b2"),
    "bench": ("", "no such thing", LONG, "model.py", "model.py:", "missing.py:tiny"),
}
"""What a command is to work on, and cannot."""
FILES = {
    "hostile.json": b'{"actions": [{"type": "__import__(\\"os\\")", "module_fqn": 1e999}], "fits": NaN}',
    "empty.json": b"",
    "binary.json": bytes(range(256)),
    "deep.json": b"[" * 100_000,
}


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("command", ARGUMENTS)
def test_subjects_that_cannot_be(command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    options = ("--once",) if command == "watch" else ()
    for value in ARGUMENTS[command]:
        refused(tmp_path, capsys, command, *options, "--", value)


@pytest.mark.parametrize(
    "arguments", [("nothing",), ("estimate",), ("estimate", "gpt2", "gpt2"), ("plan", "--nothing")]
)
def test_command_lines_that_cannot_be(
    arguments: tuple[str, ...], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(tmp_path, capsys, *arguments)
