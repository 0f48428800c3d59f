"""Blocks between streamed ones send activations away, and optimizer state comes back under backward and leaves under
the next forward: on the card."""

import pytest
import torch

import emucuda
from memscale._execute.executor import execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Checkpoint, OffloadActivations, OffloadOptimizer, StreamParameters
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.late_state import SendStateLate
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.optimizer.waiting_gradients import OffloadGradients
from tests.parity import plan_of
from tests.techniques.offload.transfer.wait_scenarios import left_out

NUM_BLOCKS, WIDTH = 8, 256
BUCKET_BYTES = WIDTH * WIDTH * 4
WAITS = (
    "out after compute",
    "in after compute",
    "compute after arrival",
    "reuse after sent",
    "reuse after unread arrival",
)


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def mixed(pattern: str):
    """A letter for each block: o(ffloaded), s(treamed), c(heckpointed), or kept."""
    ways = {"o": (OffloadActivations,), "s": (Checkpoint, StreamParameters), "c": (Checkpoint,), "-": ()}
    actions = [way(f"blocks.{place}") for place, letter in enumerate(pattern) for way in ways[letter]]
    early = [FetchStateEarly(f"blocks.{place}", 4 * BUCKET_BYTES) for place in (4, 2)]
    late = [SendStateLate(f"blocks.{place}", 2 * BUCKET_BYTES) for place in (1, 3)]
    buckets = (StepOnDevice(BUCKET_BYTES), OffloadOptimizer(BUCKET_BYTES))
    return plan_of([*actions, *buckets, *early, *late], device_type="cuda")


def train(pattern: str):
    """Two batches a step: what came early for the first is given up. Returns what came early and left late."""
    torch.manual_seed(0)
    model = Blocks()
    executor = execute(model, mixed(pattern), ExecutionSettings(asynchronous=True, device=torch.device("cuda")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(64, WIDTH, device="cuda")
    with emucuda.watch_races():
        for _ in range(3):
            for _ in range(2):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    stats = executor.stats().transfers["optimizer"]
    executor.detach()
    return stats.num_early, stats.num_late


@pytest.mark.parametrize("pattern", ["osssosss", "s-o-s-o-", "ossossos", "cosscoss", "--c---c-"])
def test_a_mixed_plan_has_no_race(pattern):
    num_early, num_late = train(pattern)
    assert num_early > 0
    assert num_late == 2 * 2, "of two steps, as the first one makes the state"
    assert emucuda.take_reports() == []


@pytest.mark.parametrize("why", WAITS)
def test_each_of_its_waits_is_needed(why, monkeypatch):
    with left_out(why, monkeypatch):
        train("osssosss")
    assert emucuda.take_reports() != []


def test_what_comes_early_is_on_the_card_before_the_step():
    model = Blocks()
    executor = execute(model, mixed("ssssssss"), ExecutionSettings(asynchronous=True, device=torch.device("cuda")))
    optimizer = torch.optim.AdamW(model.parameters())
    x, held = torch.randn(64, WIDTH, device="cuda"), []
    for _ in range(3):
        model(x).sum().backward()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        optimizer.step()
        optimizer.zero_grad()
    assert held[1] == held[2] == held[0] + 8 * BUCKET_BYTES
    executor.detach()


def waiting_plan(pattern: str):
    """A letter for each block: g(radients wait), s(treamed), or kept."""
    ways = {"g": (OffloadGradients,), "s": (Checkpoint, StreamParameters), "-": ()}
    actions = [way(f"blocks.{place}") for place, letter in enumerate(pattern) for way in ways[letter]]
    guests = [StepOnDevice(BUCKET_BYTES)] if "s" in pattern else []
    return plan_of([*actions, *guests, OffloadOptimizer(BUCKET_BYTES)], device_type="cuda")


def train_waiting(pattern: str):
    """Two batches a step: gradients come, are added to and leave again. Returns what is live before each step."""
    torch.manual_seed(0)
    model, held = Blocks(), []
    settings = ExecutionSettings(asynchronous=True, device=torch.device("cuda"))
    executor = execute(model.to("cuda"), waiting_plan(pattern), settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(64, WIDTH, device="cuda")
    with emucuda.watch_races():
        for _ in range(3):
            for _ in range(2):
                model(x).sum().backward()
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    executor.detach()
    return held


@pytest.mark.parametrize("pattern", ["gggggggg", "gsgsgsgs", "ssggg--g"])
def test_gradients_that_wait_have_no_race(pattern):
    train_waiting(pattern)
    assert emucuda.take_reports() == []


@pytest.mark.parametrize("why", ["out after compute", "in after compute", "compute after arrival", "reuse after sent"])
def test_each_wait_of_gradients_is_needed(why, monkeypatch):
    with left_out(why, monkeypatch):
        train_waiting("gggggggg")
    assert emucuda.take_reports() != []


def test_gradients_that_wait_take_nothing_between_backward_and_the_step():
    here, away = train_waiting("--------"), train_waiting("gggggg--")
    emucuda.take_reports()
    assert [a - b for a, b in zip(here, away, strict=True)] == [6 * BUCKET_BYTES] * 3


def test_what_leaves_late_is_on_the_card_until_the_forward_lets_go():
    model = Blocks()
    executor = execute(model, mixed("--------"), ExecutionSettings(asynchronous=True, device=torch.device("cuda")))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, held = torch.randn(64, WIDTH, device="cuda"), []
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2] == held[0] + 4 * BUCKET_BYTES
    with torch.no_grad():
        model(x)
    assert torch.cuda.memory_allocated() == held[0]
    executor.detach()
