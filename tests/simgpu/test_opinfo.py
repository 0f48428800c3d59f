"""The OpInfo sweep, bounded for CI: a seeded subset always, the whole of it in `make test-all`."""

import random

import pytest
import torch

from simgpu.benchmarks import opinfo


@pytest.fixture(autouse=True)
def _device(simgpu_device):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_equal_but_for_the_listed(outcomes):
    tried, equal, different = opinfo.summary(outcomes)
    unlisted = [outcome for outcome in different if opinfo.known_difference(outcome.name) is None]
    assert not unlisted, unlisted
    assert equal >= opinfo.BAR * tried
    return tried


def test_a_seeded_subset_equals_the_cpu():
    ops = [op for op in opinfo.operators() if not opinfo.known_difference(opinfo.full_name(op))]
    tried = assert_equal_but_for_the_listed(opinfo.sweep(random.Random(0).sample(ops, 60)))
    assert tried > 50


@pytest.mark.full
def test_every_operator_equals_the_cpu():
    tried = assert_equal_but_for_the_listed(opinfo.sweep(opinfo.operators()))
    assert tried > 600


def test_the_sweep_notices_a_difference(monkeypatch):
    (add,) = [op for op in opinfo.operators() if opinfo.full_name(op) == "exp"]
    assert opinfo.check(add).status == "equal"
    monkeypatch.setattr(opinfo, "_to_device", lambda value: value + 1 if isinstance(value, torch.Tensor) else value)
    assert opinfo.check(add).status != "equal"


def test_every_listed_exception_names_an_operator_and_a_reason():
    names = {opinfo.full_name(op) for op in opinfo.operators()} | {op.name for op in opinfo.operators()}
    for kind in ("not tried", "known to differ"):
        for name, reason in opinfo._EXCEPTIONS[kind].items():
            assert name in names
            assert len(reason) > 10
