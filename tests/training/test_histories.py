"""Random histories of a wrapped model and its plain twin: the same at every point, and nothing left in the end.

    make fuzz EXAMPLES=2000        # new ones, for as long as it takes

`make test` tries the same few in every run. What is found becomes a test of its own below.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import memscale
from memscale._execute.executor import executor_of
from tests.lanes import full
from tests.training.histories import (
    NUM_BLOCKS,
    ON_CPU,
    OPTIMIZERS,
    PLANNED,
    STEPS_IN_BACKWARD,
    STREAMS,
    TECHNIQUES,
    Batch,
    History,
    interrupted_in,
    signalled,
)

EXAMPLES = int(os.environ.get("MEMSCALE_FUZZ_EXAMPLES", "14"))
EVENTS = 14
MOST_LINES = 12_000
"""About as many lines of MemScale's as a step goes through under the plan that does most."""
BATCHES = st.sampled_from([Batch(2, 8), Batch(1, 4), Batch(3, 12)])
BLOCKS = st.integers(0, NUM_BLOCKS - 1)
DEVICE_FAULTS = st.sampled_from(["allocation", "pinned_allocation", "copy"])
FILE_FAULTS = st.sampled_from(["reserve", "write full", "write", "read", "short read"])


class Histories(RuleBasedStateMachine):
    """What may happen, and when."""

    planned: tuple[str, ...] = ()
    """Ways that are planned, which takes a second each."""

    @initialize(
        device=st.sampled_from(["simgpu", "cpu"]), optimizer=st.sampled_from(sorted(OPTIMIZERS)), data=st.data()
    )
    def begin(self, device: str, optimizer: str, data: Any) -> None:
        self._undo = contextlib.ExitStack()
        directory = self._undo.enter_context(tempfile.TemporaryDirectory())
        self.history = History(device, pathlib.Path(directory), optimizer)
        self._wrap(data)

    def teardown(self) -> None:
        if hasattr(self, "history"):
            with self._undo:
                self.history.close()
            del self.history

    def _wrap(self, data: Any) -> None:
        ways = (*(TECHNIQUES if self.history.device == "simgpu" else ON_CPU), *self.planned)
        way = data.draw(st.sampled_from(ways), label="way")
        asynchronous = data.draw(st.booleans(), label="asynchronous")
        keeps_to_host = way in (*STREAMS, *PLANNED)
        self.history.wrap(way, asynchronous, disk=not keeps_to_host and data.draw(st.booleans(), label="disk"))

    def _here(self) -> bool:
        return hasattr(self, "history") and not self.history.is_parked

    def _with_gradients(self) -> bool:
        return self._here() and self.history.way not in STEPS_IN_BACKWARD

    # ---- wrapping

    @precondition(_here)
    @rule(data=st.data())
    def wrap_again(self, data: Any) -> None:
        self._wrap(data)

    @precondition(_here)
    @rule()
    def detach(self) -> None:
        self.history.detach()

    @precondition(_here)
    @rule()
    def park(self) -> None:
        self.history.park()

    @precondition(lambda self: hasattr(self, "history") and self.history.is_parked)
    @rule()
    def resume(self) -> None:
        if self.history.device != "cpu":
            self.history.use_while_parked()
        self.history.resume()

    # ---- training

    @precondition(_here)
    @rule(batch=BATCHES, to_none=st.booleans())
    def train(self, batch: Batch, to_none: bool) -> None:
        self.history.train(batch, to_none=to_none)

    @precondition(_with_gradients)
    @rule(batch=BATCHES, parts=st.integers(1, 3), clipped=st.booleans())
    def train_on_parts(self, batch: Batch, parts: int, clipped: bool) -> None:
        self.history.train(batch, parts, clipped)

    @precondition(_with_gradients)
    @rule(batch=BATCHES)
    def accumulate(self, batch: Batch) -> None:
        self.history.accumulate(batch)

    @precondition(_with_gradients)
    @rule()
    def step_alone(self) -> None:
        self.history.step_alone()

    @precondition(_with_gradients)
    @rule(batch=BATCHES, summed=st.booleans())
    def two_forwards(self, batch: Batch, summed: bool) -> None:
        self.history.two_forwards(batch, summed)

    @precondition(_with_gradients)
    @rule(batch=BATCHES)
    def retained(self, batch: Batch) -> None:
        self.history.retained(batch)

    @precondition(_here)
    @rule(batch=BATCHES)
    def forward_only(self, batch: Batch) -> None:
        self.history.forward_only(batch)

    @precondition(_here)
    @rule(batch=BATCHES, inference=st.booleans())
    def evaluate(self, batch: Batch, inference: bool) -> None:
        self.history.evaluate(batch, inference)

    @precondition(_with_gradients)
    @rule(batch=BATCHES)
    def evaluate_with_gradients(self, batch: Batch) -> None:
        self.history.evaluate_with_gradients(batch)

    @precondition(_here)
    @rule(batch=BATCHES)
    def train_without_gradients(self, batch: Batch) -> None:
        self.history.train_without_gradients(batch)

    # ---- what changes between steps

    @precondition(_here)
    @rule(block=BLOCKS, trained=st.booleans())
    def freeze(self, block: int, trained: bool) -> None:
        self.history.freeze(block, trained)

    @precondition(_here)
    @rule(rate=st.sampled_from([1e-2, 1e-3]))
    def change_rate(self, rate: float) -> None:
        self.history.change_rate(rate)

    @precondition(_here)
    @rule(name=st.sampled_from(sorted(OPTIMIZERS)))
    def new_optimizer(self, name: str) -> None:
        self.history.new_optimizer(name)

    @precondition(lambda self: hasattr(self, "history"))
    @rule()
    def save(self) -> None:
        self.history.save()

    @precondition(lambda self: hasattr(self, "history") and self.history.saved is not None)
    @rule()
    def load(self) -> None:
        self.history.load()

    @precondition(_here)
    @rule()
    def copy(self) -> None:
        self.history.copy_is_plain()

    # ---- failures

    @precondition(_here)
    @rule(block=BLOCKS, batch=BATCHES)
    def fail_in_forward(self, block: int, batch: Batch) -> None:
        self.history.fail_in_forward(block, batch)

    @precondition(_with_gradients)
    @rule(block=BLOCKS, batch=BATCHES)
    def fail_in_backward(self, block: int, batch: Batch) -> None:
        self.history.fail_in_backward(block, batch)

    @precondition(_here)
    @rule(batch=BATCHES)
    def fail_between(self, batch: Batch) -> None:
        self.history.fail_between(batch)

    @precondition(_here)
    @rule(nth=st.integers(1, MOST_LINES), batch=BATCHES)
    def interrupt(self, nth: int, batch: Batch) -> None:
        self.history.interrupt(nth, batch)

    @precondition(lambda self: self._here() and self.history.device == "simgpu")
    @rule(fault=DEVICE_FAULTS, nth=st.integers(1, 200), batch=BATCHES)
    def run_out_of_memory(self, fault: str, nth: int, batch: Batch) -> None:
        self.history.run_out_of(fault, nth, batch)

    @precondition(_here)
    @rule(fault=FILE_FAULTS, nth=st.integers(1, 20), batch=BATCHES)
    def fail_on_disk(self, fault: str, nth: int, batch: Batch) -> None:
        self.history.run_out_of(fault, nth, batch)


class PlannedHistories(Histories):
    planned = tuple(PLANNED)


HELD_TO = settings(
    max_examples=EXAMPLES, stateful_step_count=EVENTS, suppress_health_check=list(HealthCheck), deadline=None
)


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any) -> Iterator[None]:
    return


TestHistories = pytest.mark.filterwarnings("ignore")(Histories.TestCase)
TestHistories.settings = HELD_TO
TestPlannedHistories = pytest.mark.full(pytest.mark.filterwarnings("ignore")(PlannedHistories.TestCase))
TestPlannedHistories.settings = HELD_TO


# ---- what was found


@pytest.fixture
def history(tmp_path: pathlib.Path) -> Iterator[History]:
    with History("simgpu", tmp_path) as found:
        yield found


def test_a_model_that_was_stepped_in_backward_is_parked(history: History) -> None:
    """What stands in the place of its gradients has no values to move."""
    history.wrap("in backward", asynchronous=False)
    history.train(to_none=False)
    history.park()
    history.use_while_parked()
    history.resume()
    history.train()


def test_an_interrupt_while_parameters_are_put_back_leaves_none_of_their_copies(history: History) -> None:
    """A copy in the place of a parameter would be used, and not be trained."""
    history.wrap("stream", asynchronous=True)
    history.train()
    for occurrence in (2, 9, 30):
        with_it = interrupted_in("streaming.py", "_put_back", occurrence)
        assert history._broken(lambda: with_it, KeyboardInterrupt, Batch())  # noqa: B023
    history.train()


def test_an_interrupt_while_something_is_sent_away_is_no_error_in_a_destructor(tmp_path: pathlib.Path) -> None:
    with History("cpu", tmp_path) as history:
        history.wrap("activations", asynchronous=False)
        history.train()
        for occurrence in range(1, 14):
            with_it = interrupted_in("stores.py", "__init__", occurrence)
            assert history._broken(lambda: with_it, KeyboardInterrupt, Batch())  # noqa: B023
        history.train()


def _interrupted_detach(history: History, nth: int) -> bool:
    """Whether Ctrl-C came at the n-th line of `detach()`, which took everything off all the same."""
    was_signalled = False
    try:
        with signalled(nth):
            memscale.detach(history.ours.model)
    except KeyboardInterrupt:
        was_signalled = True
    history.way = None
    if executor_of(history.ours.model) is not None:  # it came before anything was taken off
        history.detach()
    history.check()
    history.check_nothing_is_left()
    return was_signalled


@pytest.mark.parametrize(
    ("device", "way", "nth"), [("cpu", "activations", 29), ("simgpu", "everything", 60), ("simgpu", "everything", 400)]
)
def test_ctrl_c_in_detach_leaves_nothing_on_the_model(device: str, way: str, nth: int, tmp_path: pathlib.Path) -> None:
    """What was interrupted while it was being undone stayed, and a second call did not take it off."""
    with History(device, tmp_path) as history:
        history.wrap(way, asynchronous=True)
        history.train()
        assert _interrupted_detach(history, nth)
        history.train()


@full
@pytest.mark.parametrize("way", ["everything", "guests and half of the optimizer", "in backward"])
def test_ctrl_c_all_over_detach(way: str, tmp_path: pathlib.Path) -> None:
    with History("simgpu", tmp_path) as history:
        nth = 1
        is_inside = True
        while is_inside:
            history.wrap(way, asynchronous=True)
            history.train()
            is_inside = _interrupted_detach(history, nth)
            nth += 31


@full
@pytest.mark.parametrize("device", ["simgpu", "cpu"])
@pytest.mark.parametrize("way", TECHNIQUES)
def test_interrupts_all_over_a_step(way: str, device: str, tmp_path: pathlib.Path) -> None:
    """Every 97th line, so that each run of them meets other lines of the same functions."""
    if device == "cpu" and way in STREAMS:
        way = "checkpoint"
    with History(device, tmp_path) as history:
        history.wrap(way, asynchronous=True)
        nth = 1
        while history.interrupt(nth):
            history.train()
            nth += 97
