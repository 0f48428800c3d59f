"""Optimizer state of whole models after a real step, in 32 bits and in 8, counted by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.full_stack.setups import MIN_STATE_REDUCTION, fresh_model, prepared, state_bytes
from memscale._execute.executor import executor_of
from memscale.report.tables import table
from memscale.techniques.optimizer8bit.eight_bit import embeddings_of

WAYS = ("AdamW8bit", "AdamW, 8-bit state")
"""bitsandbytes' own class, and the user's optimizer with its state packed in place."""


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The optimizer state of one model, in 8 bits by one way."""

    model: str
    way: str
    embedding_share: float
    """Of the parameters' elements."""
    wide_bytes: int
    """In 32 bits."""
    whole_bytes: int
    """What is kept with `way`: what stays in 32 bits included."""
    converted_wide_bytes: int
    """In 32 bits, of the part that is converted."""
    converted_bytes: int

    @property
    def meets_bar(self) -> bool:
        return self.wide_bytes >= MIN_STATE_REDUCTION * self.whole_bytes


def measure_states(name: str) -> list[State]:
    model, batch = _small_batch(name)
    embeddings = embeddings_of(model)
    num_elements = sum(p.numel() for p in model.parameters())
    share = sum(p.numel() for p in model.parameters() if id(p) in embeddings) / num_elements
    wide = _wide_bytes(model, batch)
    states = []
    for way in WAYS:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        with prepared(way, model, optimizer, batch) as used:
            _step_in_backward(model, batch, used)
            converted_wide, converted = _converted_bytes(model, used)
            whole = state_bytes(model, used)
        states.append(State(name, way, share, wide, whole, converted_wide, converted))
    return states


def _small_batch(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, vocabulary = fresh_model(name)
    ids = torch.randint(0, vocabulary, (1, 16), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids, "labels": ids}


def _step_in_backward(model: nn.Module, batch: dict[str, torch.Tensor], optimizer: Optimizer) -> None:
    """A step whose gradients are there one at a time: a large model then needs little beside its state."""

    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters() if p.requires_grad]
    model(**batch).loss.backward()
    for handle in handles:
        handle.remove()


def _wide_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """The state of plain AdamW; each parameter's is counted when it is made, and let go."""
    optimizer, counted = torch.optim.AdamW(model.parameters(), lr=1e-5), 0

    def count(*_: Any) -> None:
        nonlocal counted
        counted += sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
        optimizer.state.clear()

    optimizer.register_step_post_hook(count)
    _step_in_backward(model, batch, optimizer)
    return counted


def _converted_bytes(model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
    """(in 32 bits, in 8) of what is in 8 bits."""
    executor = executor_of(model)
    assert executor is not None
    adopted = executor.stats().transfers.get("optimizer")
    if adopted is not None and adopted.packed_bytes:
        return adopted.unpacked_bytes, adopted.packed_bytes
    wide = narrow = 0
    for entry in optimizer.state.values():
        for name in ("state1", "state2"):
            if entry[name].dtype == torch.uint8:
                wide += 4 * entry[name].numel()
                narrow += entry[name].nbytes + entry[name.replace("state", "absmax")].nbytes
    return wide, narrow


def show_states(states: Sequence[State]) -> str:
    rows = [
        (
            state.model,
            state.way,
            f"{state.embedding_share:.1%}",
            f"{state.wide_bytes / 1e9:.3f}",
            f"{state.whole_bytes / 1e9:.3f}",
            f"{state.wide_bytes / state.whole_bytes:.2f}x",
            f"{state.converted_wide_bytes / state.converted_bytes:.2f}x",
            f"{MIN_STATE_REDUCTION}x, {'met' if state.meets_bar else 'missed'}",
        )
        for state in states
    ]
    header = ("model", "optimizer", "embeddings", "32 bits GB", "8 bits GB", "smaller", "converted part", "bar")
    return "\n".join(table([header, *rows], left=(0, 1)))
