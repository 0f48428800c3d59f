"""The lanes: what `make test` leaves out is still a case, and what it keeps meets everything once."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from tests.lanes import in_turns, pairwise, some

pytestmark = pytest.mark.unit
MODELS, WAYS, KINDS = ("a", "b", "c", "d", "e", "f", "g"), ("host", "disk", "both"), (True, False)


def sampled(parameters: list[Any]) -> list[tuple[Any, ...]]:
    return [parameter.values for parameter in parameters if not parameter.marks]


def test_some_cases_are_named_and_the_others_are_full() -> None:
    found = some(MODELS, "b", "g")
    assert [parameter.values for parameter in found] == [(model,) for model in MODELS]
    assert sampled(found) == [("b",), ("g",)]
    assert {mark.name for parameter in found for mark in parameter.marks} == {"full"}
    with pytest.raises(AssertionError, match="not in the list"):
        some(MODELS, "z")


@pytest.mark.parametrize("lists", [(MODELS, WAYS), (WAYS, MODELS)], ids=["many first", "few first"])
def test_every_case_gets_its_turn(lists: Any) -> None:
    found = in_turns(*lists)
    assert [parameter.values for parameter in found] == list(itertools.product(*lists))
    assert len(sampled(found)) == len(MODELS)
    for place, cases in enumerate(lists):
        turns = Counter(values[place] for values in sampled(found))
        assert turns.keys() == set(cases)
        assert max(turns.values()) - min(turns.values()) <= 1


def test_a_case_can_meet_all_others() -> None:
    found = sampled(in_turns(MODELS, WAYS, whole=["b"]))
    assert {way for model, way in found if model == "b"} == set(WAYS)
    assert len(found) == len(MODELS) + len(WAYS) - 1
    with pytest.raises(AssertionError, match="not in the list"):
        in_turns(MODELS, WAYS, whole=["z"])


def test_every_two_cases_meet() -> None:
    found = pairwise(MODELS, WAYS, KINDS)
    assert [parameter.values for parameter in found] == list(itertools.product(MODELS, WAYS, KINDS))
    kept = sampled(found)
    assert len(kept) < 0.6 * len(found)
    for places in itertools.combinations(range(3), 2):
        pairs = {tuple(values[place] for place in places) for values in kept}
        assert pairs == set(itertools.product(*((MODELS, WAYS, KINDS)[place] for place in places)))


def test_names_are_those_of_the_cases() -> None:
    assert in_turns([len], ["disk"])[0].id == "len-disk"
