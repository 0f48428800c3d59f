"""What is taken down of a training: every number against another way of finding it out."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale._execute.executor import Executor, execute
from memscale._execute.settings import ExecutionSettings
from memscale._execute.telemetry import StepRecorder
from memscale._plan import Checkpoint, MixedPrecision, OffloadActivations, OffloadOptimizer, StreamParameters
from tests.models import WIDTH, Chain, TwoLinears, features, small, square_loss
from tests.parity import adam, plan_of, seed

DEVICE = torch.device("simgpu", 0)
BLOCKS = [f"blocks.{i}" for i in range(4)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0, rows: int = 8) -> torch.Tensor:
    device = next((p.device for p in model.parameters() if p.device.type != "cpu"), torch.device("cpu"))
    loss = square_loss(model(features(number, rows, WIDTH).to(device)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def recorded(model: nn.Module, actions: Any, **settings: Any) -> tuple[Executor, StepRecorder]:
    executor = execute(
        model, plan_of(actions, device_type=settings.pop("device_type", "cpu")), ExecutionSettings(**settings)
    )
    return executor, StepRecorder(executor)


def test_steps_samples_and_recomputes() -> None:
    model = small()
    executor, recorder = recorded(model, [Checkpoint(fqn) for fqn in BLOCKS])
    optimizer = adam(model)
    assert recorder.read().num_steps == 0
    for number in range(3):
        step(model, optimizer, number, rows=8 if number < 2 else 5)
    with torch.no_grad():
        model(features(9))  # no training
    seen = recorder.read()
    assert (seen.num_steps, seen.num_samples, seen.num_recomputes) == (3, 8 + 8 + 5, 12)
    assert seen.recompute_s > 0
    assert seen.samples_per_second is not None
    assert seen.step_s > 0
    assert seen.plan is executor.plan
    executor.detach()


def test_accumulated_batches_are_one_step() -> None:
    model = small()
    executor, recorder = recorded(model, [])
    optimizer = adam(model)
    for number in range(2):
        square_loss(model(features(number))).backward()
    optimizer.step()
    assert (recorder.read().num_steps, recorder.read().num_samples) == (1, 16)
    executor.detach()


def test_the_peak_of_a_cpu_is_that_of_its_second_step() -> None:
    config = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False)
    model = memscale.wrap(Chain(*(TwoLinears() for _ in range(8))), config, sample_input=features(0, 512, WIDTH))
    executor: Any = model._memscale_executor
    recorder = StepRecorder(executor)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, rows=512)
    assert recorder.read().peak_bytes == {}
    step(model, optimizer, rows=512)
    assert recorder.read().peak_bytes["live"] == pytest.approx(executor.plan.predicted_peak_bytes, rel=0.01)
    memscale.detach(model)


def test_held_bytes_of_a_cpu() -> None:
    model = small()
    executor, recorder = recorded(model, [])
    optimizer = adam(model)
    loss = square_loss(model(features(0)))
    loss.backward()
    optimizer.step()
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    state_bytes = sum(t.nbytes for entry in optimizer.state.values() for t in entry.values())
    held = recorder.read().held_bytes
    assert held["device", "parameters"] == held["device", "gradients"] == parameter_bytes
    assert held["device", "optimizer state"] == state_bytes
    executor.detach()


def test_bytes_are_counted_again_only_when_somebody_has_read() -> None:
    model = small()
    executor, recorder = recorded(model, [])
    optimizer = adam(model)
    step(model, optimizer)
    first = recorder.latest.held_bytes["device", "parameters"]
    model.extra = nn.Linear(WIDTH, WIDTH)
    step(model, optimizer)
    assert recorder.latest.held_bytes["device", "parameters"] == first, "nobody had read"
    recorder.read()
    step(model, optimizer)
    assert recorder.latest.held_bytes["device", "parameters"] > first
    executor.detach()


def test_tiers_of_an_accelerator() -> None:
    seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))
    actions = [StreamParameters("0"), OffloadOptimizer(1 << 20), OffloadActivations("2")]
    at_once = memscale.AsyncOffloadConfig(window_bytes=0, prefetch_bytes=0)
    executor, recorder = recorded(
        model, actions, device=DEVICE, device_type="simgpu", asynchronous=True, async_config=at_once
    )
    optimizer = adam(model)
    for number in range(2):
        square_loss(model(features(number, 2048, 256).to(DEVICE))).backward()
        optimizer.step()
    seen, block_bytes = recorder.read(), sum(p.nbytes for p in model[0].parameters())
    held, moved = seen.held_bytes, seen.moved_bytes
    assert held["host", "parameters"] == held["host", "gradients"] == block_bytes
    assert held["device", "parameters"] == held["device", "gradients"] == 3 * block_bytes
    biases_bytes = 3 * 2 * model[0][0].bias.nbytes  # too small to travel
    assert held["device", "optimizer state"] == biases_bytes
    assert 0 <= held["host", "optimizer state"] + biases_bytes - 2 * 4 * block_bytes < 1024, "and the counts of steps"
    assert held["host", "activations"] > 0
    assert held["device", "activations"] > 0
    assert set(seen.peak_bytes) == {"allocated", "reserved"}
    assert moved["parameters", "in"] == 2 * block_bytes, "backward does not need them"
    assert moved["parameters", "out"] == 2 * block_bytes, "its gradients"
    assert 0 < moved["activations", "in"] <= moved["activations", "out"], "some are still there when they are needed"
    assert moved["optimizer state", "in"] > 0
    assert moved["optimizer state", "out"] > 0
    executor.detach()


def test_the_disk_is_a_tier(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(256, 256)
    executor, recorder = recorded(model, [OffloadOptimizer(1 << 20)], offload_dir=str(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(2):
        square_loss(model(features(number, 8, 256))).backward()
        optimizer.step()
    seen = recorder.read()
    waiting = executor.stats().transfers["optimizer"].waiting_bytes
    assert waiting > 0
    assert seen.held_bytes["disk", "optimizer state"] >= waiting
    assert seen.moved_bytes["optimizer state", "in"] > 0
    assert seen.waited_s > 0
    executor.detach()


def test_counts_go_on_when_the_plan_changes() -> None:
    model = small()
    executor, recorder = recorded(model, [Checkpoint("blocks.0"), Checkpoint("blocks.1")])
    optimizer = adam(model)
    step(model, optimizer)
    executor.apply(plan_of([Checkpoint("blocks.2")]))
    step(model, optimizer)
    step(model, optimizer)
    seen = recorder.read()
    assert (seen.num_recomputes, seen.num_plans) == (2 + 1 + 1, 2)
    executor.detach()


def test_skipped_steps_of_fp16() -> None:
    model = small()
    executor, recorder = recorded(model, [MixedPrecision("float16")])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step(model, optimizer)
    (square_loss(model(features(0))) * 1e30).backward()
    optimizer.step()
    seen = recorder.read()
    assert seen.num_skipped_steps == executor.stats().num_skipped_steps == 1
    assert seen.loss_scale == executor.stats().loss_scale
    executor.detach()


def test_a_forward_that_fails_leaves_no_measurement_open() -> None:
    model = small()
    executor, recorder = recorded(model, [])
    optimizer = adam(model)
    step(model, optimizer)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.zeros(2, WIDTH + 1))  # the step that would be measured
    step(model, optimizer)
    assert recorder.read().num_steps == 2
    executor.detach()


def test_an_optimizer_that_steps_in_backward() -> None:
    model = small()
    executor, recorder = recorded(model, [])
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in model.parameters()]
    for number in range(3):
        square_loss(model(features(number))).backward()
    assert recorder.read().num_steps == 2, "the third is not over until another forward begins"
    for handle in handles:
        handle.remove()
    executor.detach()


def test_training_is_the_same() -> None:
    seed(1)
    plain, ours = small(), small()
    ours.load_state_dict(plain.state_dict())
    executor, _ = recorded(ours, [Checkpoint(fqn) for fqn in BLOCKS])
    optimizers = adam(plain), adam(ours)
    for number in range(4):
        assert torch.equal(step(plain, optimizers[0], number), step(ours, optimizers[1], number))
    executor.detach()
    for theirs, mine in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(theirs, mine)
    assert not ours._forward_hooks
    assert not ours._forward_pre_hooks
