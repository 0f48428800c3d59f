"""The walk of data counts modules, calls between them, and pairs that call both ways."""

from __future__ import annotations

from typing import Any

import pytest

from tools.walk import Walk

pytestmark = pytest.mark.unit


def module_of(name: str, source: str, **names: Any) -> dict[str, Any]:
    module = {"__name__": name, **names}
    exec(source, module)
    return module


def test_calls_both_ways_are_told_from_those_that_come_through_torch() -> None:
    first = module_of("memscale.first", "def begin(): go_on()\ndef end(): pass\ndef __torch_function__(): pass")
    second = module_of("memscale.second", "def go_on(): end()", end=first["end"])
    third = module_of("memscale.third", "def go_on(): end()", end=first["__torch_function__"])
    first["go_on"] = lambda: (second["go_on"](), third["go_on"]())
    walk = Walk()
    walk.record(first["begin"])
    assert walk.modules == {"memscale.first", "memscale.second", "memscale.third"}
    assert walk.both_ways == [("memscale.first", "memscale.second"), ("memscale.first", "memscale.third")]
    assert walk.both_ways_directly == [("memscale.first", "memscale.second")]


def test_a_frame_of_torch_in_between_makes_a_call_indirect() -> None:
    first = module_of("memscale.first", "def begin(): go_on()\ndef end(): pass")
    second = module_of("memscale.second", "def go_on(): between()")
    second["between"] = module_of("torch.hooks", "def between(): end()", end=first["end"])["between"]
    first["go_on"] = second["go_on"]
    walk = Walk()
    walk.record(first["begin"])
    assert walk.both_ways == [("memscale.first", "memscale.second")]
    assert walk.both_ways_directly == []
