"""Frozen dataclasses to JSON and back."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale import _json

pytestmark = pytest.mark.unit


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    name: str
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Other:
    word: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    leaves: tuple[Leaf | Other, ...]
    pair: tuple[int, float]
    kind: Literal["a", "b"]
    colour: Colour
    weight: float
    notes: dict[str, int | float | str] = dataclasses.field(default_factory=dict)
    by_colour: dict[Colour, int] = dataclasses.field(default_factory=dict)
    maybe: Leaf | None = None
    flag: bool = False


integers = st.integers(-(2**63), 2**63)
leaves = st.one_of(st.builds(Leaf, st.text(), integers), st.builds(Other, st.text()))
numbers = st.floats(allow_nan=False, allow_infinity=False)
trees = st.builds(
    Tree,
    leaves=st.lists(leaves).map(tuple),
    pair=st.tuples(integers, numbers),
    kind=st.sampled_from(["a", "b"]),
    colour=st.sampled_from(Colour),
    weight=numbers,
    notes=st.dictionaries(st.text(), st.one_of(integers, numbers, st.text())),
    by_colour=st.dictionaries(st.sampled_from(Colour), integers),
    maybe=st.none() | st.builds(Leaf, st.text(), integers),
    flag=st.booleans(),
)


@given(trees)
def test_round_trip(tree: Tree) -> None:
    text = _json.dumps(tree)
    again = _json.decode(Tree, json.loads(text))
    assert again == tree
    assert _json.dumps(again) == text


def plain() -> dict[str, Any]:
    tree = Tree((Leaf("x", 1),), (1, 2.0), "a", Colour.RED, 0.5)
    data: dict[str, Any] = _json.encode(tree)
    return data


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("leaves", 3),
        ("leaves", [3]),
        ("leaves", [{"type": "Tree"}]),
        ("leaves", [{"type": "Leaf", "name": "x"}]),
        ("leaves", [{"type": "Leaf", "name": "x", "size": "1"}]),
        ("leaves", [{"type": "Leaf", "name": "x", "size": True}]),
        ("leaves", [{"type": "Leaf", "name": "x", "size": 1, "colour": 3}]),
        ("pair", [1]),
        ("pair", "xy"),
        ("kind", "c"),
        ("kind", ["a"]),
        ("colour", "green"),
        ("colour", []),
        ("weight", "heavy"),
        ("weight", None),
        ("notes", [1]),
        ("notes", {"x": [1]}),
        ("notes", 5),
        ("by_colour", {"green": 1}),
        ("maybe", 4),
        ("flag", 1),
        ("flag", "true"),
        ("unknown", 1),
    ],
)
def test_what_is_wrong_is_a_value_error(field: str, value: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the wording is the caller's matter
        _json.decode(Tree, plain() | {field: value})


@pytest.mark.parametrize("field", ["leaves", "pair", "kind", "colour", "weight"])
def test_missing_fields_are_named(field: str) -> None:
    data = plain()
    del data[field]
    with pytest.raises(ValueError, match=field):
        _json.decode(Tree, data)


def test_fields_with_defaults_may_be_missing() -> None:
    data = plain()
    for field in ("notes", "by_colour", "maybe", "flag"):
        del data[field]
    assert _json.decode(Tree, data) == Tree((Leaf("x", 1),), (1, 2.0), "a", Colour.RED, 0.5)


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        _json.dumps(Tree((), (1, 2.0), "a", Colour.RED, float("nan")))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "NaN", "[Infinity]", "{", ""])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested|number|Expecting"):
        _json.loads(text)


@pytest.mark.parametrize("kind", [int, float, int | float | str, dict[str, int], tuple[float, ...]])
@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e999"])
def test_numbers_beyond_all_bounds(kind: Any, number: str) -> None:
    data = {"dict": f'{{"a": {number}}}', "tuple": f"[{number}]"}.get(getattr(kind, "__name__", ""), number)
    with pytest.raises(ValueError, match=r"larger than|expected") as caught:
        _json.decode(kind, _json.loads(data))
    assert len(str(caught.value)) < 400


def test_what_cannot_be_written_names_the_file_that_was_asked_for(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OSError, match=r"nowhere.leaf\.json'$"):
        _json.save(Leaf("a", 1), tmp_path / "nowhere" / "leaf.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OSError, match=r"folder\.json'$"):
        _json.save(Leaf("a", 1), tmp_path / "folder.json")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]
