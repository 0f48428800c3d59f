"""What the loop holds beside its model is seen in its first step, and in the plan from the second on."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
import simgpu  # noqa: F401  (registers the device)
from memscale import Config
from memscale._planning.loop.loop_watch import LoopWatch, tolerated
from memscale._planning.other_peaks import warn_of_other_peaks
from memscale._profile import Segment, StepTrace
from tests.parity import attached_plan, seed

VOCABULARY, WIDTH, LENGTH = 512, 32, 64
QUIET = Config(enable_logging=False, mode="conservative")

Step = Callable[[nn.Module, torch.Tensor, Any], torch.Tensor]


class Words(nn.Module):
    """Gives its loss and its logits, which are larger than all that a block keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


class Loop:
    """A training loop that is told what it keeps."""

    def __init__(self, model: nn.Module, device: str, *, keeps: str = "") -> None:
        self.model, self.device, self.keeps = model, device, keeps
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.held: list[Any] = []
        self.losses: list[float] = []
        self.peaks: list[int] = []

    def run(self, num_steps: int, length: int = LENGTH) -> None:
        ids = torch.arange(8 * length).reshape(8, length).to(self.device) % VOCABULARY
        for _ in range(num_steps):
            with memscale.measure(self.device) as measured:
                self.step(ids)
            self.peaks.append(measured.peak_bytes)

    def step(self, ids: torch.Tensor) -> None:
        outputs = self.model(ids)
        loss = outputs["loss"]
        if self.keeps == "outputs":
            self.held = [outputs]
        del outputs
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if self.keeps == "an average":
            self.held = self.held or [copy.deepcopy(parameter.detach()) for parameter in self.model.parameters()]
            with torch.no_grad():
                for mean, parameter in zip(self.held, self.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)


def plain_run(model: nn.Module, device: str, keeps: str) -> tuple[list[float], list[Any]]:
    """The losses and weights of a plain twin, in arrays: tensors would be counted on a CPU."""
    loop = Loop(copy.deepcopy(model), device, keeps=keeps)
    seed(1)
    loop.run(4)
    return loop.losses, [parameter.detach().cpu().numpy().copy() for parameter in loop.model.parameters()]


def trained_alike(device: str, keeps: str, share: float) -> Loop:
    """Four steps of a wrapped model, which are those of a plain twin."""
    seed(0)
    model = Words().to(device)
    ids = torch.zeros(8, LENGTH, dtype=torch.long, device=device)
    plain_bytes = memscale.estimate(model, ids).baseline_peak_bytes
    losses, weights = plain_run(model, device, keeps)
    gc.collect()
    memscale.wrap(model, QUIET.replace(memory_budget_gb=share * plain_bytes / 1e9), sample_input=ids)
    del ids
    loop = Loop(model, device, keeps=keeps)
    seed(1)
    loop.run(4)
    assert loop.losses == losses
    assert all(torch.equal(p.cpu(), torch.from_numpy(w)) for p, w in zip(model.parameters(), weights, strict=True))
    return loop


@pytest.mark.parametrize(("device", "share"), [("cpu", 0.9), ("simgpu", 0.98)])
def test_outputs_that_stay_bound_are_planned_for_from_the_second_step_on(
    device: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memscale"):
        loop = trained_alike(device, "outputs", share)
    plan = attached_plan(loop.model)
    assert caplog.text.count("this loop keeps outputs of the model until the next outputs come (1.0 MB)") == 1
    assert loop.peaks[0] > plan.budget_bytes, "nobody knew"
    assert max(loop.peaks[1:]) == plan.predicted_peak_bytes <= plan.budget_bytes
    assert "peaked" not in caplog.text
    memscale.detach(loop.model)


def test_with_room_the_plan_stays_and_promises_more() -> None:
    loop = trained_alike("simgpu", "outputs", 3.0)
    plan = attached_plan(loop.model)
    assert plan.actions == ()
    assert 0 <= plan.predicted_peak_bytes - max(loop.peaks) <= 1024
    memscale.detach(loop.model)


def test_copies_of_the_weights_are_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memscale"):
        loop = trained_alike("simgpu", "an average", 0.98)
    plan = attached_plan(loop.model)
    weights = sum(-(-p.nbytes // 512) * 512 for p in loop.model.parameters())
    assert plan.loop_bytes == weights
    assert caplog.text.count("this loop holds more on the device than") == 1
    assert max(loop.peaks[1:]) <= plan.predicted_peak_bytes <= plan.budget_bytes
    memscale.detach(loop.model)


def test_a_loop_that_keeps_nothing_is_planned_for_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memscale"):
        loop = trained_alike("simgpu", "", 0.98)
    assert "this loop" not in caplog.text
    assert attached_plan(loop.model).loop_bytes == 0
    memscale.detach(loop.model)


def test_what_cannot_be_fitted_is_said_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A budget that the lowest plan just keeps, and a loop that holds a megabyte more."""
    seed(0)
    model = Words().to("simgpu")
    ids = torch.zeros(8, LENGTH, dtype=torch.long, device="simgpu")
    lowest = memscale.estimate(model, ids, config=QUIET.replace(force_optimize=True)).by_mode["conservative"]
    config = QUIET.replace(memory_budget_gb=(lowest.predicted_peak_bytes + 4096) / 1e9)
    memscale.wrap(model, config, sample_input=ids)
    loop = Loop(model, "simgpu", keeps="outputs")
    loop.run(3)
    assert caplog.text.count("no plan that counts it fits the budget") == 1
    memscale.detach(model)


def test_longer_batches_are_planned_for_with_their_own_outputs() -> None:
    """What was seen with short batches holds for a long one: its first step keeps to the budget."""
    seed(0)
    model = Words()
    ids = torch.zeros(8, LENGTH, dtype=torch.long)
    config = QUIET.replace(memory_budget_gb=0.9 * memscale.estimate(model, ids).baseline_peak_bytes / 1e9)
    memscale.wrap(model, config)
    del ids
    loop = Loop(model, "cpu", keeps="outputs")
    loop.run(3, LENGTH // 2)
    loop.run(2)
    plan = attached_plan(model)
    assert max(loop.peaks) <= plan.budget_bytes
    assert max(loop.peaks) <= plan.predicted_peak_bytes
    memscale.detach(model)


def test_earlier_outputs_are_there_until_the_forward_has_returned() -> None:
    def segment(phase: Any, peak: int, net: int) -> Segment:
        return Segment(phase, "", peak, net, 0, 0, 0)

    trace = StepTrace((segment("forward", 5, 3), segment("forward", 4, 2), segment("backward", 6, -4)))
    with_earlier = trace.with_earlier_outputs(10)
    assert [(s.peak_bytes, s.net_bytes) for s in with_earlier.segments] == [(15, 13), (4, -8), (6, -4)]
    assert with_earlier.peak_bytes == 17
    assert with_earlier.end_bytes == trace.end_bytes
    assert trace.with_earlier_outputs(0) is trace


def test_what_is_done_between_steps_has_peaks_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Measured: evaluation to the byte; saving takes nothing; a checkpoint lies beside the model while it is loaded."""
    seed(0)
    model = Words().to("simgpu")
    ids = torch.zeros(8, LENGTH, dtype=torch.long, device="simgpu")
    memscale.wrap(model, QUIET, sample_input=ids)
    loop = Loop(model, "simgpu")
    loop.run(2)
    peaks = attached_plan(model).other_peaks
    gc.collect()
    model.eval()
    with memscale.measure("simgpu") as evaluated, torch.no_grad():
        model(ids)
    model.train()
    others = torch.accelerator.memory_allocated() - peaks["saving"] - ids.numel() * ids.element_size()
    assert evaluated.peak_bytes - others == peaks["evaluation"]
    with memscale.measure("simgpu") as resumed:
        read = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(read)
    assert resumed.peak_bytes - others == pytest.approx(peaks["resuming"] + ids.numel() * ids.element_size(), abs=1024)
    assert "other things come above it" not in caplog.text
    memscale.detach(model)


def test_what_comes_above_the_budget_between_steps_is_said_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    model = memscale.wrap(Words(), QUIET, sample_input=torch.zeros(8, LENGTH, dtype=torch.long))
    plan = attached_plan(model)
    memscale.detach(model)
    assert list(plan.other_peaks) == ["evaluation", "saving", "resuming"]
    warn_of_other_peaks(plan)
    assert not caplog.text
    warn_of_other_peaks(dataclasses.replace(plan, budget_bytes=plan.other_peaks["saving"]))
    assert "evaluation to 3.0 MB (evaluate with smaller batches than those of training)" in caplog.text
    assert "resuming to 1.1 MB (load checkpoints with torch.load(..., map_location='cpu'))" in caplog.text
    assert "saving" not in caplog.text


def test_a_decoder_that_generates_has_a_peak_for_that() -> None:
    """Measured, up to what `generate` keeps for itself: its own ids and masks."""
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=128, n_positions=64)
    model = GPT2LMHeadModel(config)
    ids = torch.zeros(2, 64, dtype=torch.long)
    memscale.wrap(model, QUIET, sample_input={"input_ids": ids, "labels": ids})
    peaks = attached_plan(model).other_peaks
    memscale.detach(model)
    assert set(peaks) == {"evaluation", "generate", "saving", "resuming"}
    state_bytes = peaks["saving"] - sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    model.eval()
    with memscale.measure("cpu") as measured, torch.no_grad():
        model.generate(ids[:, :-1], max_new_tokens=1, pad_token_id=0, attention_mask=torch.ones(2, 63))
    assert measured.peak_bytes == pytest.approx(peaks["generate"] - state_bytes, rel=0.02)


@pytest.mark.unit
def test_workspaces_of_matrix_products_are_not_the_loops() -> None:
    """Of an H100 there are two of 32 MiB, and a little more where blocks are not split."""
    model = nn.Sequential(nn.Linear(4, 4))
    plan = memscale.wrap(model, QUIET, sample_input=torch.zeros(2, 4))._memscale_executor.plan
    memscale.detach(model)
    on_card, workspace_bytes = dataclasses.replace(plan, device_type="cuda"), 32 * 1024 * 1024
    assert tolerated(on_card, workspace_bytes) > 2 * workspace_bytes + 1024 * 1024
    assert tolerated(on_card, workspace_bytes) - tolerated(on_card, 0) == 2 * workspace_bytes


@pytest.mark.parametrize("device", ["cpu", "simgpu:0"])
def test_state_of_layers_that_are_frozen_later_is_planned_for(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """It stays with the optimizer, which steps it no more."""
    seed(0)
    loop = Loop(memscale.wrap(Words().to(device), QUIET.replace(memory_budget_gb=1)), device)
    loop.run(2)
    for parameter in loop.model.blocks.parameters():
        parameter.requires_grad_(False)
    state = [loop.optimizer.state[parameter] for parameter in loop.model.blocks.parameters()]
    idle_bytes = sum(value.nbytes for each in state for value in each.values() if value.device.type in device)
    with caplog.at_level(logging.INFO, "memscale"):
        loop.run(2)
    assert "peaked" not in caplog.text, "the first such step has a plan that counts it"
    plan = attached_plan(loop.model)
    assert plan.predicted_peak_bytes == pytest.approx(loop.peaks[2], rel=0.01)
    assert idle_bytes > 0.03 * plan.predicted_peak_bytes, "more than what may be missed"
    memscale.detach(loop.model)


def test_layers_that_are_frozen_later_keep_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    """A budget that a step leaves room for, but not with the state of what is not trained any more."""

    def run(model: nn.Module) -> tuple[list[float], int]:
        loop = Loop(model, "simgpu")
        seed(1)
        loop.run(10)
        for parameter in model.blocks.parameters():
            parameter.requires_grad_(False)
        loop.run(3)
        return loop.losses, max(loop.peaks[10:])

    seed(0)
    model = Words().to("simgpu")
    losses, peak_bytes = run(copy.deepcopy(model))
    gc.collect()
    budget_bytes = int(0.98 * peak_bytes)
    memscale.wrap(model, QUIET.replace(memory_budget_gb=budget_bytes / 1e9))
    with caplog.at_level(logging.INFO, "memscale"):
        wrapped_losses, wrapped_bytes = run(model)
    assert "peaked" not in caplog.text
    assert wrapped_losses == losses
    assert wrapped_bytes <= budget_bytes
    assert attached_plan(model).predicted_peak_bytes == pytest.approx(wrapped_bytes, rel=0.01)
    memscale.detach(model)


class Counted(Words):
    """Counts how often its parameters are walked through."""

    num_walks = 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        self.num_walks += 1
        return super().parameters(recurse)


def test_what_is_looked_at_in_each_step_walks_through_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them are trained is read once for all that follows it: a walk takes a hundredth of a short forward."""
    loop = Loop(memscale.wrap(Counted(), QUIET.replace(memory_budget_gb=1)), "cpu")
    loop.run(2)
    look, walks = LoopWatch.look, []

    def counted(watch: LoopWatch, *args: Any, **kwargs: Any) -> Any:
        before = loop.model.num_walks
        found = look(watch, *args, **kwargs)
        walks.append(loop.model.num_walks - before)
        return found

    monkeypatch.setattr(LoopWatch, "look", counted)
    loop.run(3)
    memscale.detach(loop.model)
    assert walks[1:] == [0, 0]
