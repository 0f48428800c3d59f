"""A docstring begins with its subject: "The bytes of its parameters", and not "Of its parameters", which says nothing
to a reader who has not just read the name that it stands below."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

pytestmark = pytest.mark.unit
PACKAGE = pathlib.Path(__file__).parent.parent / "src" / "memscale"
FRAGMENT = re.compile(r"(Of|With|Without|That|In which|By|Above|As|Also|Beside|Until|But|Or|Not|Only|Into|Than)[ ,]")


def fragments(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value.strip()
            if FRAGMENT.match(text):
                found.append(f"{node.lineno}: {text.splitlines()[0]}")
    return found


def test_docstrings_begin_with_their_subject() -> None:
    wrong = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if found := fragments(path.read_text()):
            wrong[name] = found
    assert not wrong


@pytest.mark.parametrize("text", ["Of its batch.", "With this trial.", "That come at once.", "By serial."])
def test_fragments_are_found(text: str) -> None:
    assert fragments(f'num_bytes: int\n"""{text}"""\n')


@pytest.mark.parametrize("text", ["The tensors of its batch.", "Offers nothing.", "Thatched roofs.", "Whether it is."])
def test_sentences_are_let_by(text: str) -> None:
    assert not fragments(f'num_bytes: int\n"""{text}"""\n')
