"""Predicted times of plans that move tensors of some blocks only, against the virtual clock of a simulated card."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import simgpu
from memscale import AsyncOffloadConfig, Config, Hardware
from memscale._decide.choice import Choice, RunOptions, actions_of
from memscale._decide.cost_model import CostModel
from memscale._execute.executor import execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import OPTIMIZER_BUCKET_BYTES
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile import CHECKPOINT, KEEP, OFFLOAD, STREAM, Treatment
from memscale._profile.inputs import Inputs
from memscale.techniques.offload.parameters.streamer import Flight, Landing
from tests.models import Chain, features
from tests.parity import plan_of

WIDTH, ROWS = 256, 256
CARD = simgpu.Card(
    name="a slow card",
    fp32_tflops=1.0,
    bf16_tflops=2.0,
    fp16_tflops=2.0,
    memory_gbps=300.0,
    link_gbps=8.0,
    pageable_link_gbps=3.0,
    copy_engines=2,
    launch_us=1.0,
)
"""So slow that small blocks compute about as long as their weights travel, and launches hardly count."""
CONFIG = Config(
    device="simgpu",
    async_offload=True,
    async_config=AsyncOffloadConfig(min_tensor_bytes=4096),
    enable_logging=False,
)
NUM_WARM_STEPS = 2
"""The first makes the optimizer's state and learns the order of visits."""


class Residual(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@dataclasses.dataclass(frozen=True)
class SetUp:
    """A model of equal blocks, a card and a config."""

    num_blocks: int
    width: int
    rows: int
    card: simgpu.Card
    config: Config
    bucket_bytes: int = OPTIMIZER_BUCKET_BYTES
    num_steps: int = 1
    """How many are timed together: more where the next forward takes part in a step."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Chain(*(Residual(self.width) for _ in range(self.num_blocks)), width=self.width)

    def batch(self) -> torch.Tensor:
        return features(0, self.rows, self.width)


FOUR = SetUp(4, WIDTH, ROWS, CARD, CONFIG)
SENT_BYTES = 3 * 1024 * 128 * 4
"""What a block of the other set-up saves: its input, and what its tanh gives, which is twice as wide."""
APART = SetUp(
    7,
    128,
    1024,
    dataclasses.replace(CARD, link_gbps=4.0),
    CONFIG.replace(
        async_config=AsyncOffloadConfig(min_tensor_bytes=4096, window_bytes=SENT_BYTES, prefetch_bytes=SENT_BYTES)
    ),
)
"""What a block saves takes 2.7 times as long to travel as its forward computes, and windows hold that of one block."""
LINEAR_BYTES = 2 * WIDTH * WIDTH * 4
IN_BUCKETS = SetUp(8, WIDTH, 2 * ROWS, dataclasses.replace(CARD, link_gbps=8.0), CONFIG, LINEAR_BYTES, num_steps=6)
"""The matrices of a block are a bucket each, and passes take about as long as the state travels."""


@dataclasses.dataclass(frozen=True)
class Clocked:
    """The time model of some blocks, and the clock's time of their plain step."""

    of: SetUp
    predicted: CostModel
    plain_ms: float

    def ratios(self, choice: Choice) -> tuple[float, float]:
        """Over the plain step's time: predicted, and by the clock."""
        predicted = self.predicted.evaluate(choice).step_ms / self.predicted.evaluate(Choice()).step_ms
        simgpu.set_card(self.of.card)
        plan = plan_of(tuple(actions_of(choice, self.predicted.profile)))
        settings = ExecutionSettings.from_config(self.of.config, torch.device("simgpu"))
        model = self.of.build()
        executor = execute(model, plan, settings)
        try:
            return predicted, step_ms(model, self.of) / self.plain_ms
        finally:
            executor.detach()


def step_ms(model: nn.Module, of: SetUp) -> float:
    """The time of a step of the steady state. See NOTE [one thread of the host]."""
    optimizer = torch.optim.AdamW(model.parameters())
    x = of.batch().to("simgpu")
    for step in range(NUM_WARM_STEPS + of.num_steps):
        if step == NUM_WARM_STEPS:
            torch.accelerator.synchronize()
            start = simgpu.virtual_ms()
        optimizer.zero_grad()
        with torch.autograd.set_multithreading_enabled(False):
            model(x).square().mean().backward()
        optimizer.step()
    torch.accelerator.synchronize()
    return float(simgpu.virtual_ms() - start) / of.num_steps


@pytest.fixture(autouse=True)
def _one_thread_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """NOTE [one thread of the host]: the clock has one instant for the host. While one thread waits for a gradient to
    land, another launches kernels, and what it launches next comes before that instant or after it: as the two happen
    to run. So backward runs in one thread here, and each gradient is waited for when it is sent, as by a thread that
    keeps up. This is what the time model counts (`Hardware.has_one_host_thread`)."""
    expect = Flight.expect

    def expect_and_wait(flight: Flight, ticket: Any, landing: Landing) -> None:
        expect(flight, ticket, landing)
        landing.wait()

    monkeypatch.setattr(Flight, "expect", expect_and_wait)


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any, no_leaks: Any) -> None:
    """Registers the device; every test must give its device and pinned bytes back."""


@contextlib.contextmanager
def clock_of(set_up: SetUp) -> Iterator[Clocked]:
    with simgpu.race_mode("off"):  # it takes time and changes none
        simgpu.set_card(set_up.card)
        inputs = Inputs((set_up.batch(),), {})
        planner = Planner(Job(set_up.build(), set_up.config, Hardware.detect("simgpu")), inputs)
        way = planner.by(planner.travel.in_buckets_of(set_up.bucket_bytes))
        way.look_into_everything(planner.job.eligible.under(set_up.config))
        found = Clocked(set_up, way.cost_model(), step_ms(set_up.build().to("simgpu"), set_up))
        del planner, way
        yield found
    simgpu.reset()


@pytest.fixture(scope="module")
def clocked() -> Iterator[Clocked]:
    with clock_of(FOUR) as found:
        yield found


@pytest.fixture(scope="module")
def in_buckets() -> Iterator[Clocked]:
    with clock_of(IN_BUCKETS) as found:
        yield found


@pytest.fixture(scope="module")
def far_apart() -> Iterator[Clocked]:
    with clock_of(APART) as found:
        yield found


def test_the_clock_shows_the_same_time_each_time(clocked: Clocked) -> None:
    """To the last bit but for the sums before it: nothing that the host happens to do is in it."""
    choice = Choice(tuple((f"blocks.{index}", STREAM) for index in range(4)))
    (_, first), (_, second) = clocked.ratios(choice), clocked.ratios(choice)
    assert first == pytest.approx(second, rel=1e-9)


@pytest.mark.parametrize("where", ["0", "3", "12", "0123"])
@pytest.mark.parametrize("steps_on_device", [False, True])
def test_weights_that_only_some_blocks_wait_for(clocked: Clocked, where: str, steps_on_device: bool) -> None:
    """Wherever the first streamed block stands, its weights are waited for.

    What is not streamed is stepped at once, partly while the first guest arrives; that is not counted.
    """
    blocks = tuple((f"blocks.{index}", STREAM) for index in map(int, where))
    predicted, shown = clocked.ratios(Choice(blocks, RunOptions(steps_on_device=steps_on_device)))
    assert predicted == pytest.approx(shown, rel=0.08 if steps_on_device else 0.04)


def test_streaming_one_block_of_recomputed_ones(clocked: Clocked) -> None:
    """The step over what stays is not counted beside the first guest's arrival, as above."""
    blocks = tuple((f"blocks.{index}", STREAM if index == 2 else CHECKPOINT) for index in range(4))
    predicted, shown = clocked.ratios(Choice(blocks, RunOptions(steps_on_device=True, steps_in_buckets=True)))
    assert predicted == pytest.approx(shown, rel=0.08)


@pytest.mark.parametrize("where", ["02", "13", "01"])
@pytest.mark.parametrize("others", [KEEP, CHECKPOINT])
def test_activations_that_leave_beside_other_blocks(clocked: Clocked, where: str, others: Treatment) -> None:
    """See NOTE [far apart]; side by side they wait for each other."""
    ways = {f"blocks.{index}": OFFLOAD if str(index) in where else others for index in range(4)}
    blocks = tuple((fqn, treatment) for fqn, treatment in ways.items() if treatment != KEEP)
    predicted, shown = clocked.ratios(Choice(blocks))
    assert predicted == pytest.approx(shown, rel=0.04)


@pytest.mark.parametrize("pattern", ["ossosso", "sososos", "osocsso"])
def test_activations_and_weights_that_share_the_link(far_apart: Clocked, pattern: str) -> None:
    """What offloaded blocks between streamed ones need is asked for long before; weights come behind it."""
    ways = {"o": OFFLOAD, "s": STREAM, "c": CHECKPOINT}
    blocks = tuple((f"blocks.{index}", ways[way]) for index, way in enumerate(pattern))
    sent = far_apart.predicted.sent_by_blocks(RunOptions())
    assert {one.num_bytes for one in sent.values()} == {SENT_BYTES}
    predicted, shown = far_apart.ratios(Choice(blocks, RunOptions(steps_on_device=True)))
    assert predicted == pytest.approx(shown, rel=0.05)


EARLY, LATE = ((("blocks.5", 12 * LINEAR_BYTES),), (("blocks.5", 12 * LINEAR_BYTES),))


@pytest.mark.parametrize(("early", "late"), [((), ()), (EARLY, ()), ((), LATE), (EARLY, LATE)])
@pytest.mark.parametrize("streams", ["", "2345"])
def test_state_that_comes_early_and_leaves_late(in_buckets: Clocked, early: Any, late: Any, streams: str) -> None:
    """Beside passes whose link is idle, and beside those of streamed blocks. The last step waits for what is late."""
    blocks = tuple((f"blocks.{index}", STREAM) for index in map(int, streams))
    run = RunOptions(offloads_optimizer=1.0, steps_on_device=bool(streams), early_state=early, late_state=late)
    predicted, shown = in_buckets.ratios(Choice(blocks, run))
    assert predicted == pytest.approx(shown, rel=0.05)
