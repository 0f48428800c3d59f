"""Names of ours that the emulated card replaces: it is not started here, where its PyTorch is not installed."""

from __future__ import annotations

import ast
import importlib
import pathlib

import pytest

pytestmark = pytest.mark.unit
PINS = pathlib.Path(__file__).parent.parent / "emucuda" / "src" / "emucuda" / "_pins.py"


def pinned_names() -> list[tuple[str, str]]:
    """Module and attribute of each pin on this package."""
    calls = [node for node in ast.walk(ast.parse(PINS.read_text())) if isinstance(node, ast.Call)]
    pins = [call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Pin"]
    names = [(ast.literal_eval(module), ast.literal_eval(name)) for module, name, *_ in pins]
    return [(module, name) for module, name in names if module.startswith("memscale.")]


def test_there_are_pins() -> None:
    assert len(pinned_names()) >= 3


@pytest.mark.parametrize(("module", "name"), pinned_names())
def test_what_is_pinned_is_there(module: str, name: str) -> None:
    """One was moved, and every program on the emulated card ended when it was imported."""
    assert callable(getattr(importlib.import_module(module), name))
