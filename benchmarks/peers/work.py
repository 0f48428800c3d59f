"""The work that every peer does: one small GPT-2, one batch, AdamW, a few steps; and how each device is read.

cpu: live bytes of the last step (`memscale.measure`) and processor time. simgpu: bytes of its allocator, exact, and the
virtual clock of an RTX 3090, a model. emucuda: the emulated RTX 3090, whose caching allocator is PyTorch's own; kernels
do nothing there, so it has no time and no losses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memscale

CARD = "RTX 3090"
DEVICES = ("cpu", "simgpu", "emucuda")
NUM_STEPS = 3
"""The first makes the optimizer's state, the last is read."""
NUM_ROUNDS = 8
"""Steps of each that are timed side by side."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Of the model and its batch."""

    layers: int = 3
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192
    batch: int = 4
    length: int = 256

    def __str__(self) -> str:
        model = f"GPT-2 of {self.layers} layers, width {self.width}, {self.vocabulary} tokens"
        return f"{model}, batch {self.batch} x {self.length}, fp32, AdamW"


SHAPE = Shape()


@dataclasses.dataclass(slots=True)
class Training:
    """A model in training. A peer changes what it needs to, before the first step."""

    model: Any
    optimizer: Any
    batch: dict[str, Any]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What forward runs in."""
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    """DeepSpeed has its own."""

    def step(self) -> float:
        self.optimizer.zero_grad()
        with self.around():
            loss = self.model(**self.batch).loss
        self.backward(loss)
        self.optimizer.step()
        return float(loss.detach())


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What a training came to on a device."""

    peak_bytes: int
    """Live on a CPU, allocated elsewhere."""
    reserved_bytes: int | None
    step_ms: float | None
    """Processor time, or the virtual clock's; None: kernels do nothing."""
    losses: tuple[float, ...]
    weights: str
    """A hash of them after the last step."""


def torch_device(device: str) -> str:
    return "cuda" if device == "emucuda" else device


def build_model(shape: Shape = SHAPE) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.heads,
        vocab_size=shape.vocabulary,
        n_positions=shape.length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config).train()


def build_batch(shape: Shape = SHAPE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def open_training(device: str, shape: Shape = SHAPE) -> Training:
    """Plain PyTorch."""
    place = torch_device(device)
    model = build_model(shape).to(place)
    batch = {name: tensor.to(place) for name, tensor in build_batch(shape).items()}
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch)


def run(training: Training, device: str, num_steps: int = NUM_STEPS) -> Figures:
    torch.manual_seed(2)
    return _run_on_cpu(training, num_steps) if device == "cpu" else _run_on_card(training, device, num_steps)


def _run_on_cpu(training: Training, num_steps: int) -> Figures:
    losses, seconds = [], []
    for _ in range(num_steps):
        with memscale.measure("cpu") as measured:
            losses.append(training.step())
        start = time.process_time()
        losses.append(training.step())
        seconds.append(time.process_time() - start)
    fastest_ms = min(seconds) * 1e3  # other processes only ever make a step slower
    return Figures(measured.peak_bytes, None, fastest_ms, tuple(losses), _hash_of(training.model))


def side_by_side_ms(*trainings: Training, num_rounds: int = NUM_ROUNDS) -> list[float]:
    """Processor time of a step of each, the fastest of some rounds. In each round one follows the other, so that a
    machine that is busy is so for all."""
    fastest = [float("inf")] * len(trainings)
    for number in range(num_rounds):
        turns = list(enumerate(trainings))
        for place, training in turns if number % 2 == 0 else reversed(turns):
            start = time.process_time()
            training.step()
            fastest[place] = min(fastest[place], (time.process_time() - start) * 1e3)
    return fastest


def _run_on_card(training: Training, device: str, num_steps: int) -> Figures:
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    losses, step_ms = [], None
    for _ in range(num_steps):
        torch.accelerator.synchronize()
        start = _virtual_ms(device)
        losses.append(training.step())
        torch.accelerator.synchronize()
        step_ms = None if start is None else _virtual_ms(device) - start  # type: ignore[operator]
    return Figures(
        torch.accelerator.max_memory_allocated(),
        torch.accelerator.max_memory_reserved() if device == "emucuda" else None,
        step_ms,
        tuple(losses) if device != "emucuda" else (),
        _hash_of(training.model) if device != "emucuda" else "",
    )


def _virtual_ms(device: str) -> float | None:
    if device == "emucuda":
        return None
    import simgpu

    return float(simgpu.virtual_ms())


def _hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(model.named_parameters(), key=lambda entry: entry[0]):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
