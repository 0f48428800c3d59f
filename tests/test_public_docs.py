"""Public names teach: every name in `memscale.__all__` says what it is, and the verbs show an example, their arguments,
what they return and what they raise."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import memscale

pytestmark = pytest.mark.unit
NAMES = [name for name in memscale.__all__ if not name.startswith("__")]
VERBS = [name for name in NAMES if inspect.isfunction(getattr(memscale, name))]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(memscale, name))]
ERRORS = [name for name in CLASSES if issubclass(getattr(memscale, name), Exception)]
EXAMPLE = re.compile(r"^    .*(memscale|executor|measured|plan)", re.MULTILINE)
"""Code is set off by four blanks; descriptions of arguments are, too, but name none of these."""


def said(value: Any) -> str:
    return inspect.getdoc(value) or ""


def section(text: str, title: str) -> str:
    """What stands below `title:`, up to the next line that is not set off."""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    return found.group(1) if found else ""


def test_every_public_name_is_a_verb_or_a_class() -> None:
    assert sorted({*VERBS, *CLASSES}) == sorted(NAMES)
    assert {"wrap", "estimate", "measure"} <= set(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_verbs_show_an_example_arguments_returns_and_errors(name: str) -> None:
    verb = getattr(memscale, name)
    text, signature = said(verb), inspect.signature(verb)
    assert EXAMPLE.search(text.partition("Args:")[0]), "an example comes before the arguments"
    described = re.findall(r"^    (\w+):", section(text, "Args"), re.MULTILINE)
    assert described == list(signature.parameters)
    assert section(text, "Returns") or signature.return_annotation == "None"
    raised = re.findall(r"^    (\w+):", section(text, "Raises"), re.MULTILINE)
    builtins = {"TypeError", "ValueError", "RuntimeError", "OSError"}
    assert raised, "what is raised"
    assert {*raised} <= {*ERRORS, *builtins}


@pytest.mark.parametrize("name", sorted({*CLASSES} - {*ERRORS}))
def test_classes_show_an_example(name: str) -> None:
    assert EXAMPLE.search(said(getattr(memscale, name)))


@pytest.mark.parametrize("name", CLASSES)
def test_classes_and_what_they_offer_say_what_they_are(name: str) -> None:
    kind = getattr(memscale, name)
    offered = [value for key, value in vars(kind).items() if not key.startswith("_")]
    methods = [value for value in offered if inspect.isfunction(value) or isinstance(value, property | classmethod)]
    for each in (kind, *methods):
        first = said(each).split("\n\n")[0]
        assert first[:1].isupper() or first.startswith("`"), f"{name}: {each}"
        assert first.rstrip().endswith((".", ":")), f"{name}: {first!r} is no sentence"
