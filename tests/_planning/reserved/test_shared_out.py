"""What FSDP2 allocates in a step, on which stream, and that it is what the live bytes of a rank are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memscale._hardware import Hardware
from memscale._planning.reserved.allocation_log import Allocated, Event, Freed
from memscale._planning.reserved.allocations import reserved_of
from memscale._planning.reserved.recording import record_steps
from memscale._planning.reserved.shared_out import GATHERING, REDUCING, knows_shares
from memscale._profile import StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.profiler import open_rehearsal
from memscale._profile.rehearsal import FakeRehearsal

pytestmark = pytest.mark.unit
WIDTH, ROWS, NUM_SHARDS = 512, 64, 4
UNIT_BYTES = WIDTH * WIDTH * 4
CARD = Hardware.from_name("RTX 3090")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def opened(model: nn.Module, *, holds_gradients: bool = False) -> tuple[FakeRehearsal, StepTrace]:
    inputs = Inputs.from_sample(torch.ones(ROWS, WIDTH))
    return open_rehearsal(model, inputs, torch.device("cuda"), num_shards=NUM_SHARDS, holds_gradients=holds_gradients)


def story(events: list[Event], sizes: dict[int, tuple[int, int]]) -> list[str]:
    """What comes and goes of the size of a unit or of its share, in words."""
    told = []
    for event in events:
        if isinstance(event, Allocated):
            sizes[event.serial] = event.num_bytes, event.stream
        elif not isinstance(event, Freed):
            continue
        num_bytes, stream = sizes[event.serial]
        kind = {UNIT_BYTES: "whole", UNIT_BYTES // NUM_SHARDS: "share"}.get(num_bytes)
        if kind is not None:
            told.append(f"{'+' if isinstance(event, Allocated) else '-'}{kind}{stream or ''}")
    return told


def test_a_step_is_gathered_and_reduced_on_streams_of_their_own() -> None:
    """By hand, from what PyTorch's `FSDPParamGroup` does: `+whole1` is a buffer that is gathered, `+whole` the copy of
    its parameter, a gradient, or the buffer that is reduced."""
    assert (GATHERING, REDUCING) == (1, 2)
    model = Net()
    log = record_steps(opened(model)[0], model, "sgd", hardware=CARD)
    sizes: dict[int, tuple[int, int]] = {}
    assert story(log.before, sizes) == ["+share"] * 4
    rest, block = ["+whole1", "+whole"], ["+whole1", "-whole1", "+whole", "-whole"]
    last = ["-whole1", "+whole1"]  # the last buffer goes, and the last block's is gathered for backward
    enter = ["+whole", "-whole1", "+whole1", "+whole"]  # copied out; the next is gathered; the gradient
    reduce = ["-whole", "+whole", "-whole", "+share2"]  # the parameter goes; the buffer comes, the gradient goes
    again = ["-whole", "-whole", "+whole", "-whole", "+share2"]  # the buffer of the unit before goes first
    first = ["+whole", "-whole1", "+whole"]  # nothing is left to gather
    assert story(log.steps[1], sizes) == [
        *rest, *block, *block, *block, *last,
        *enter, *reduce, *enter, *again, *first, *again,
        "+whole", *again, "-whole",
        *["-share2"] * 4,
    ]  # fmt: skip


def test_what_is_allocated_is_what_a_rank_holds() -> None:
    """Two ways to the same number: segments of the whole model with buffers added to their live bytes, and the log."""
    model = Net()
    rehearsal, plain = opened(model)
    assert rehearsal.sharding is not None
    found = reserved_of(record_steps(rehearsal, model, "sgd", hardware=CARD), workspace_bytes=0)
    held_bytes = rehearsal.sharding.parameter_bytes + ROWS * WIDTH * 4
    assert found.allocated_peak_bytes == pytest.approx(held_bytes + plain.peak_bytes, abs=16 * 512)
    assert found.reserved_peak_bytes >= found.allocated_peak_bytes


def test_gradients_are_shares_that_the_optimizer_steps() -> None:
    model = Net()
    log = record_steps(opened(model)[0], model, "adamw", hardware=CARD)
    stepped = [e for e in log.steps[0] if isinstance(e, Allocated) and e.place and e.place.phase == "optimizer"]
    state = [event for event in stepped if event.place is not None and "zeros_like" in event.place.operator]
    assert [event.num_bytes for event in state] == [UNIT_BYTES // NUM_SHARDS] * 8
    assert not any("_foreach" in event.place.operator for event in stepped if event.place is not None)


class Twice(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.blocks[0](x))


def test_what_other_steps_allocate_is_not_known() -> None:
    assert knows_shares(opened(Net())[0])
    assert not knows_shares(opened(Twice())[0])
    assert not knows_shares(opened(Net(), holds_gradients=True)[0])
