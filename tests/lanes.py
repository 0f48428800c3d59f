"""Lanes of tests: of a large product of cases, what `make test` runs, and what only `make test-all` does."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest

full = pytest.mark.full
STEPS_OF_A_LEAK = pytest.mark.parametrize("num_steps", [60, pytest.param(500, marks=full)])
"""What grows at all grows within sixty steps: tests that measure the same level again and again ask for no slope."""


def some(cases: Sequence[Any], *names: str) -> list[Any]:
    """The cases as parameters of a test: `make test` runs those that are named, `make test-all` runs every one."""
    assert set(names) <= set(map(name_of, cases)), "a named case is not in the list"
    return [_parameter((case,), in_sample=name_of(case) in names) for case in cases]


def in_turns(first: Sequence[Any], second: Sequence[Any], *, whole: Collection[str] = ()) -> list[Any]:
    """All pairs of two lists of cases as parameters of a test, of which `make test` runs few.

    It meets every case of either list: those of the first take turns with those of the second. A case of the first
    that `whole` names meets all of the second.

    Example:
        `@pytest.mark.parametrize(("case", "way"), in_turns(SUITE, WAYS, whole=["gpt2"]))`
    """
    assert set(whole) <= set(map(name_of, first)), "a case that is to meet all others is not in the list"
    turns = {(n % len(first), n % len(second)) for n in range(max(len(first), len(second)))}
    pairs = itertools.product(enumerate(first), enumerate(second))
    return [
        _parameter((one, other), in_sample=(i, j) in turns or name_of(one) in whole) for (i, one), (j, other) in pairs
    ]


def pairwise(*lists: Sequence[Any]) -> list[Any]:
    """The product of three lists or more as parameters of a test; every two cases meet in what `make test` runs."""
    product = list(itertools.product(*(range(len(cases)) for cases in lists)))
    missing = {pair for combination in product for pair in _pairs_in(combination)}
    sample = set()
    while missing:
        best = max(product, key=lambda combination: len(missing & _pairs_in(combination)))
        sample.add(best)
        missing -= _pairs_in(best)
    chosen = [tuple(cases[i] for cases, i in zip(lists, combination, strict=True)) for combination in product]
    return [_parameter(values, in_sample=key in sample) for values, key in zip(chosen, product, strict=True)]


def _pairs_in(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(combination), 2))


def _parameter(values: tuple[Any, ...], *, in_sample: bool) -> Any:
    return pytest.param(*values, id="-".join(map(name_of, values)), marks=() if in_sample else full)


def name_of(case: Any) -> str:
    return str(getattr(case, "name", None) or getattr(case, "__name__", None) or case)
