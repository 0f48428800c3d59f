"""How many layers ahead are streamed weights worth fetching? On the virtual clock of simulated cards.

    python -m benchmarks.ahead

Twelve equal blocks train with some of them streamed, their weights fetched one, two or four layers ahead
(`AsyncOffloadConfig(prefetch_depth=...)`). Cards differ in their link: a block's weights travel for so many times as
long as its forward computes ("link over forward"; 3.4 for GPT-2 XL 1 x 512 on an RTX 3090, 1.7 for GPT-2 Large 2 x 512,
0.9 for GPT-2 Medium 4 x 512). Shown are forward and backward on the modelled clock, as a multiple of the same with one
layer ahead, and the device's peak beside it. Nothing is measured that a real card would show. Takes about a minute of
processor time; simgpu must be installed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import torch
from torch import nn

import simgpu
from memscale import AsyncOffloadConfig
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import StreamParameters
from memscale.report.tables import table
from memscale.techniques.offload.optimizer.on_device import StepOnDevice

NUM_BLOCKS, WIDTH, ROWS = 12, 128, 512
DEPTHS = (1, 2, 4)
RATIOS = (0.9, 1.7, 3.4)
PATTERNS = {
    "all": "ssssssssssss",
    "every second": ".s.s.s.s.s.s",
    "every third": "..s..s..s..s",
    "the first six": "ssssss......",
    "the last six": "......ssssss",
    "three, three times": ".sss.sss.sss",
}
TFLOPS, LAUNCH_US = 0.2, 0.1
"""So slow that launches hardly count beside such small blocks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A step in the steady state."""

    step_ms: float
    peak_bytes: int


def card_of(ratio: float) -> simgpu.Card:
    """A card on which a block's weights travel for `ratio` times as long as its forward computes."""
    weights_bytes = sum(parameter.nbytes for parameter in Block().parameters())
    forward_s = 2 * ROWS * 8 * WIDTH * WIDTH / (TFLOPS * 1e12)
    link_gbps = weights_bytes / (ratio * forward_s) / 1e9
    return simgpu.Card(
        name="a slow card",
        fp32_tflops=TFLOPS,
        bf16_tflops=TFLOPS,
        fp16_tflops=TFLOPS,
        memory_gbps=1e5,  # so that the products alone take time
        link_gbps=link_gbps,
        pageable_link_gbps=link_gbps / 3,
        copy_engines=2,
        launch_us=LAUNCH_US,
    )


def run(pattern: str, depth: int, ratio: float) -> Run:
    simgpu.set_card(card_of(ratio))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    streamed = [StreamParameters(str(index)) for index, way in enumerate(pattern) if way == "s"]
    ahead = AsyncOffloadConfig(prefetch_depth=depth)
    executor = Executor(model, ExecutionSettings(torch.device("simgpu"), asynchronous=True, async_config=ahead))
    executor.attach([*streamed, StepOnDevice(1 << 20)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS, WIDTH).to("simgpu")
    for _ in range(3):  # the first learns the order of layers
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        start_ms = simgpu.virtual_ms()
        with torch.autograd.set_multithreading_enabled(False):  # the clock has one instant for the host
            model(x).square().mean().backward()
        torch.accelerator.synchronize()
        found = Run(simgpu.virtual_ms() - start_ms, torch.accelerator.max_memory_allocated())
        optimizer.step()
        optimizer.zero_grad()
    executor.detach()
    return found


def rows() -> list[tuple[str, ...]]:
    found = []
    for name, pattern in PATTERNS.items():
        for ratio in RATIOS:
            runs = [run(pattern, depth, ratio) for depth in DEPTHS]
            first = runs[0]
            times = (f"{one.step_ms / first.step_ms:.3f}x" for one in runs)
            peaks = (f"{one.peak_bytes / first.peak_bytes:.3f}x" for one in runs)
            found.append((name, f"{ratio}", f"{first.step_ms:.2f} ms", *times, *peaks))
            print(" ".join(found[-1]), file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    assert not argv, "it takes no arguments"
    torch.set_num_threads(1)  # blocks are small
    simgpu.set_race_mode("off")  # it takes time and changes none
    times, peaks = ([f"{what}, {depth} ahead" for depth in DEPTHS] for what in ("passes", "peak"))
    header = ("streamed", "link over forward", "passes", *times, *peaks)
    print("\n".join(table([header, *rows()], left=(0,))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
