"""The comparison with peers: they do the same work, ours is held to their figures, and the page is what was found."""

from __future__ import annotations

import os
from typing import Any

import pytest
import transformers  # noqa: F401  its own set-up is not a trace that a test leaves

import memscale
from benchmarks import peers
from benchmarks.peers import page, trial
from benchmarks.peers.ours import least_budget, open_wrapped
from benchmarks.peers.planners import PLANNERS
from benchmarks.peers.ways import EXACT, PEERS, CannotRunError, peer_called
from benchmarks.peers.work import Figures, Shape, Training, open_training, run, side_by_side_ms

TINY = Shape(layers=3, width=64, heads=2, vocabulary=256, batch=4, length=64)


def _figures(name: str) -> Figures:
    training = open_training("cpu", TINY)
    peer_called(name).setup(training, "cpu")
    return run(training, "cpu", num_steps=2)


@pytest.fixture(scope="module")
def plain() -> Figures:
    return _figures("plain")


@pytest.mark.parametrize("name", ["checkpointing", "selective", "selective_exact"])
def test_a_peer_trains_as_plain_pytorch_in_less(name: str, plain: Figures) -> None:
    found = _figures(name)
    assert found.losses == plain.losses
    assert found.weights == plain.weights
    assert found.peak_bytes < plain.peak_bytes


def test_ours_stays_within_the_peak_of_a_peer(plain: Figures) -> None:
    budget = _figures("checkpointing").peak_bytes
    training, said = open_wrapped("cpu", EXACT, budget, TINY)
    found = run(training, "cpu", num_steps=2)
    memscale.detach(training.model)
    assert found.peak_bytes <= budget
    assert said["predicted_bytes"] <= budget
    assert found.losses == plain.losses
    assert found.weights == plain.weights


def test_the_lowest_plan_that_is_fast_enough_is_found(plain: Figures) -> None:
    assert least_budget("cpu", EXACT, plain.peak_bytes, 0.5, TINY) == plain.peak_bytes  # nothing is that fast
    assert least_budget("cpu", EXACT, plain.peak_bytes, 2.0, TINY) < plain.peak_bytes


def test_what_cannot_run_says_why() -> None:
    training = open_training("cpu", TINY)
    with pytest.raises(CannotRunError, match="on the CPU"):
        peer_called("save_on_cpu").setup(training, "cpu")


@pytest.mark.slow
def test_a_trial_that_fails_is_a_sentence() -> None:
    answer = trial.ask({"kind": "peer", "device": "cpu", "peer": "save_on_cpu"})
    assert answer == {"failure": "CannotRunError: tensors of a CPU are on the CPU"}


def _row(**changes: Any) -> dict[str, Any]:
    return {"peak_bytes": 100, "reserved_bytes": None, "step_ms": 10.0, **changes}


@pytest.mark.parametrize(
    ("ours", "at_peak", "at_time"),
    [
        (_row(), "no slower", "no larger"),
        (_row(step_ms=11.0), "**slower**", "**slower**"),
        (_row(peak_bytes=101), "**larger**", "**larger**"),
        (None, "not run", "not run"),
        ({"failure": "DoesNotFitError: no"}, "no plan", "no plan"),
    ],
)
def test_verdicts(ours: Any, at_peak: str, at_time: str) -> None:
    assert page.verdict_of_peak(_row(), ours) == at_peak
    assert page.verdict_of_time(_row(), ours) == at_time


def test_on_a_cpu_what_was_timed_beside_ours_counts() -> None:
    assert page.verdict_of_peak(_row(step_ms=10.0), _row(step_ms=11.0, peer_step_ms=11.0)) == "no slower"
    assert page.verdict_of_peak(_row(step_ms=10.0), _row(step_ms=10.0, peer_step_ms=9.0)) == "**slower**"


def test_what_two_copies_of_a_peer_differ_by_is_no_verdict() -> None:
    beside = {"peer_step_ms": 10.0, "peer_again_ms": 11.0}
    assert page.verdict_of_peak(_row(step_ms=10.0), _row(step_ms=11.0, **beside)) == "no slower"
    assert page.verdict_of_peak(_row(step_ms=10.0), _row(step_ms=11.1, **beside)) == "**slower**"


def test_trainings_take_turns() -> None:
    turns: list[str] = []

    class Noted(Training):
        def step(self) -> float:
            turns.append(self.model)
            return 0.0

    side_by_side_ms(*(Noted(name, None, {}) for name in ("ours", "theirs", "again")), num_rounds=2)
    assert turns == ["ours", "theirs", "again", "again", "theirs", "ours"]


def test_bytes_that_are_reserved_count_where_there_are_any() -> None:
    peer = _row(reserved_bytes=120, step_ms=None)
    assert page.verdict_of_peak(peer, _row(reserved_bytes=120, peak_bytes=110, step_ms=None)) == "holds"
    assert page.verdict_of_peak(peer, _row(reserved_bytes=121, step_ms=None)) == "**larger**"


def test_the_page_is_what_was_found() -> None:
    store = peers.Store(peers.DATA)
    assert page.write(store.data) == peers.PAGE.read_text(), "run `python -m benchmarks.peers --page`"
    assert {row["peer"] for row in store.data["rows"]} <= {*(peer.name for peer in PEERS), *PLANNERS}
    assert {row["device"] for row in store.data["rows"] if row["kind"] == "peer"} >= {"simgpu", "emucuda"}


def test_triton_is_shown_the_driver_that_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "")
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    monkeypatch.setenv("LD_PRELOAD", "/libs/libcublas.so.13:/libs/libcuda.so.1")
    trial._show_triton_the_driver()
    assert os.environ["TRITON_LIBCUDA_PATH"] == "/libs"
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/mine")
    trial._show_triton_the_driver()
    assert os.environ["TRITON_LIBCUDA_PATH"] == "/mine", "what a user has set stays"
