"""Operators whose results are remembered are not run: a step without them shows the same as one in which each ran."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._hardware import Hardware
from memscale._plan import Action, Checkpoint, OffloadActivations, StreamParameters
from memscale._planning.reserved.recording import record_steps
from memscale._profile import StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.optimizer_twin.books import Books
from memscale._profile.rehearsal import FakeRehearsal
from memscale._profile.values import Recollection
from memscale._torch import private
from memscale._torch.each_operator import EachOperator
from memscale._torch.live_bytes import Recall
from tests.models import ODD_CASES, SUITE, Case

CARD = Hardware.from_name("RTX 3090")
STATIC = [(case, "cuda") for case in SUITE if case.is_static] + [(case, "cpu") for case in ODD_CASES if case.is_static]


class Forgetful(FakeRehearsal):
    """Every operator goes through all modes."""

    def recall(self) -> Recall | None:
        return None


def _attach(actions: tuple[Action, ...], model: nn.Module) -> Executor:
    executor = Executor(model, ExecutionSettings())
    executor.attach(actions)
    return executor


def _traces(case: Case, device_type: str, kind: type[Action] | None) -> list[StepTrace]:
    torch.manual_seed(0)
    model, inputs = case.build(), Inputs((), case.batch(0))
    actions = tuple(kind(fqn) for fqn in find_blocks(model)) if kind is not None else ()
    attach = functools.partial(_attach, actions) if actions else None
    return [stage(model, inputs, device_type).run(attach) for stage in (Forgetful, FakeRehearsal)]


@pytest.mark.parametrize(("case", "device_type"), STATIC, ids=[case.name for case, _ in STATIC])
def test_a_plain_step_is_the_same(case: Case, device_type: str) -> None:
    forgetful, remembering = _traces(case, device_type, None)
    assert forgetful == remembering


@pytest.mark.parametrize("kind", [Checkpoint, OffloadActivations, StreamParameters])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_step_under_a_technique_is_the_same(name: str, kind: type[Action]) -> None:
    case = next(case for case in SUITE if case.name == name)
    forgetful, remembering = _traces(case, "cuda", kind)
    assert forgetful == remembering


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_recorded_steps_are_the_same(optimizer: str) -> None:
    case = next(case for case in SUITE if case.name == "bert")
    model, inputs = case.build(), Inputs((), case.batch(0))
    logs = [
        record_steps(stage(model, inputs, "cuda"), model, optimizer, hardware=CARD)
        for stage in (Forgetful, FakeRehearsal)
    ]
    assert logs[0].before == logs[1].before
    assert logs[0].steps == logs[1].steps
    assert logs[0].levels == logs[1].levels


def test_nothing_is_spared_while_others_see_operators() -> None:
    stage = FakeRehearsal(nn.Linear(4, 4), Inputs((torch.zeros(2, 4),)), "cpu")
    with stage.stage():
        assert isinstance(stage.recall(), Recollection)
        with EachOperator(lambda func, args, kwargs: func(*args, **kwargs)):
            assert stage.recall() is None


def test_values_that_are_written_over_are_not_taken_for_known() -> None:
    """An operator that is remembered writes into memory with values, which nobody knows afterwards."""

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                length = torch.zeros((), dtype=torch.float32)
                length.add_(x.detach().sum())
            return self.inner(x[: int(length)]).sum()

    model, inputs = Decides(), Inputs((torch.ones(2, 4),))
    for stage in (Forgetful, FakeRehearsal):
        with pytest.raises(private.data_dependent_errors()):
            stage(model, inputs, "cpu").run()


def test_work_that_is_remembered_is_counted_for_each_device() -> None:
    mode = private.fake_tensor_mode()
    for device_type in ("cpu", "cpu", "meta"):
        works = []
        for recall in (None, Recollection(mode)):
            books = Books(device_type, 1)
            with mode:
                left, right = torch.empty(4, 6, device=device_type), torch.empty(6, 8, device=device_type)
                books.recall = recall
                with books:
                    for _ in range(3):
                        torch.nn.functional.relu_(left @ right)
            works.append(books.work)
        assert works[0] == works[1]
        assert works[0].num_launches == 6


def test_memory_that_was_freed_is_not_counted_when_it_is_shown() -> None:
    """What is remembered of a view would make its storage as large as what it shows."""

    class Frees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for _ in range(3):
                scratch = torch.empty(64, 64)
                scratch.view(-1)
                scratch.untyped_storage().resize_(0)
                kept.append(scratch.view(-1))
            return self.inner(x).sum()

    model, inputs = Frees(), Inputs((torch.ones(2, 4),))
    forgetful, remembering = (stage(model, inputs, "cpu").run() for stage in (Forgetful, FakeRehearsal))
    assert forgetful == remembering
    assert max(segment.peak_bytes for segment in remembering.segments) < 2 * 64 * 64 * 4
