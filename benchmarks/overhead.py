"""What does MemScale itself cost? Its hooks, a wrapped model that needs nothing, and the import.

    python -m benchmarks.overhead [--json] [--repetitions N]

- Hooks: a step through checkpointed blocks against the same blocks called with
  `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`, in microseconds a block and step. The blocks are
  so small that the arithmetic hardly counts. The bar is 100 µs.
- Skipped: the step time of a wrapped model whose plan is to do nothing, over that of the plain model.
- Recovery: a step with `recover_from_oom=True` over the same with `False`, on a simulated device: twelve narrow
  transformer blocks and AdamW with `foreach`, and the same for a model that keeps a list of a million numbers. Then
  the default over `False`, for the narrow blocks, for two layers of 16 neurons, and for a GPT-2 of 6 blocks, 384
  wide, with two sequences of 128. The bar is 1 % of that one.
- Import: `import memscale` after `import torch`. The bar is 0.3 s.

Steps of the two sides alternate, and their CPU time is compared: its fastest tenth, as other processes only ever make
a step slower (caches, shared cores). Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memscale
import simgpu  # noqa: F401  (registers the device, before autograd makes its threads)
from benchmarks.models import Mlp, MlpBlock, ResidualBlock
from memscale._execute.executor import Executor
from memscale._plan import Checkpoint
from memscale.report.tables import table

MAX_HOOK_US = 100.0
MAX_IMPORT_S = 0.3
MAX_RECOVERY_RATIO = 1.01
NUM_BLOCKS = 8
_IMPORT_SCRIPT = "import time, torch; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Everything that is measured here."""

    checkpoint_us: float
    """A block and step under PyTorch's own checkpoint, arithmetic included: how fast this machine is."""
    hook_us: float
    """What our hooks add to that."""
    hook_with_buffers_us: float
    """The same for blocks with BatchNorm, whose statistics are kept from being updated twice."""
    skipped_ratio: float
    recovery_ratio: float
    recovery_ratio_with_list: float
    """The same for a model that keeps a list of a million numbers."""
    default_recovery_ratio: float
    """With the default over without."""
    default_recovery_ratio_tiny: float
    """The same for the smallest of models, whose step has nearly nothing else to do."""
    default_recovery_ratio_gpt2: float
    import_s: float
    first_use_s: float
    """`memscale.wrap` looked up for the first time: this loads what `import memscale` leaves for later."""

    @property
    def within_bars(self) -> bool:
        are_hooks_cheap = max(self.hook_us, self.hook_with_buffers_us) < MAX_HOOK_US
        return (
            are_hooks_cheap and self.import_s < MAX_IMPORT_S and self.default_recovery_ratio_gpt2 < MAX_RECOVERY_RATIO
        )


class _Chain(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def hook_us(make_block: Callable[[], nn.Module], x: torch.Tensor, repetitions: int) -> tuple[float, float]:
    """PyTorch's own checkpoint, and what our checkpointed forward costs beyond it, for each block and step."""
    direct, hooked = (_Chain([make_block() for _ in range(NUM_BLOCKS)]) for _ in range(2))
    executor = Executor(hooked)
    executor.attach([Checkpoint(f"blocks.{index}") for index in range(NUM_BLOCKS)])

    def step_directly() -> None:
        hidden = x
        for block in direct.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        hidden.sum().backward()

    def step_hooked() -> None:
        hooked(x).sum().backward()

    direct_s, hooked_s = _interleaved(step_directly, step_hooked, repetitions)
    executor.detach()
    return direct_s / NUM_BLOCKS * 1e6, (hooked_s - direct_s) / NUM_BLOCKS * 1e6


def skipped_ratio(repetitions: int) -> float:
    """Step time of a wrapped model that needs nothing, over the plain model's."""
    x = torch.randn(64, 128)
    plain, wrapped = Mlp(width=128), Mlp(width=128)
    memscale.wrap(wrapped, memscale.Config(enable_logging=False), x)

    plain_s, wrapped_s = _interleaved(
        lambda: plain(x).square().mean().backward(), lambda: wrapped(x).square().mean().backward(), repetitions
    )
    return wrapped_s / plain_s


class _Narrow(nn.Module):
    """Twelve narrow transformer blocks, and what the user keeps."""

    def __init__(self, kept: list[int]) -> None:
        super().__init__()
        self.kept = kept
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _narrow(kept: Sequence[int] = ()) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return _Narrow(list(kept)), {"x": torch.randn(4, 32, 64)}


def _tiny() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), {"input": torch.randn(4, 16)}


def _gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=128, n_embd=384, n_layer=6, n_head=6))
    ids = torch.randint(1000, (2, 128))
    return model, {"input_ids": ids, "labels": ids}


def recovery_ratio(
    build: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]], repetitions: int, *, setting: bool | str = True
) -> float:
    """A whole training step with this `recover_from_oom` over the same without."""
    device = torch.device("simgpu", 0)

    def trained(recovers: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        model, batch = build()
        batch = {name: value.to(device) for name, value in batch.items()}
        optimizer = torch.optim.AdamW(model.to(device).parameters(), foreach=True)
        memscale.wrap(model, memscale.Config(enable_logging=False, recover_from_oom=recovers), batch)

        def step() -> None:
            output = model(**batch)
            loss = getattr(output, "loss", output)
            (loss if loss.ndim == 0 else loss.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    without_s, with_s = _interleaved(trained(False), trained(setting), repetitions)
    return with_s / without_s


def _interleaved(
    first: Callable[[], None], second: Callable[[], None], repetitions: int, warmup: int = 20
) -> tuple[float, float]:
    """CPU seconds of each, in one thread: the first decile. They take turns, so that drift of the machine hits both.

    CPU time, not the wall clock's: all that is compared here is work of the CPU, and other processes do not count.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(warmup + repetitions):
        for step, record in zip((first, second), times, strict=True):
            start = time.process_time()
            step()
            if repetition >= warmup:
                record.append(time.process_time() - start)
    return _first_decile(times[0]), _first_decile(times[1])


def _first_decile(values: list[float]) -> float:
    return sorted(values)[len(values) // 10]


def import_s(statement: str, runs: int = 3) -> float:
    """Seconds that a statement takes in a fresh interpreter after `import torch`; the median of a few."""
    command = [sys.executable, "-c", _IMPORT_SCRIPT.format(statement)]
    return statistics.median(float(subprocess.check_output(command, text=True)) for _ in range(runs))


def run(repetitions: int) -> Result:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(repetitions)
    finally:
        torch.set_num_threads(threads)


def _run(repetitions: int) -> Result:
    torch.manual_seed(0)
    _say("hooks")
    small, image = torch.randn(4, 16, requires_grad=True), torch.randn(2, 4, 4, 4, requires_grad=True)
    checkpoint_us, plain_us = hook_us(lambda: MlpBlock(16), small, repetitions)
    _, buffers_us = hook_us(lambda: ResidualBlock(4), image, repetitions)
    _say("skipped model")
    ratio = skipped_ratio(repetitions)
    _say("recovery")
    fewer = max(1, repetitions // 3)
    recovery = (
        recovery_ratio(_narrow, fewer),
        recovery_ratio(lambda: _narrow(range(1_000_000)), fewer),
        recovery_ratio(_narrow, fewer, setting="forward"),
        recovery_ratio(_tiny, repetitions, setting="forward"),
        recovery_ratio(_gpt2, max(1, fewer // 2), setting="forward"),
    )
    _say("imports")
    import_alone_s, first_use_s = import_s("import memscale"), import_s("import memscale; memscale.wrap")
    return Result(checkpoint_us, plain_us, buffers_us, ratio, *recovery, import_alone_s, first_use_s)


def _say(what: str) -> None:
    print(f"measuring {what} ...", file=sys.stderr, flush=True)


def to_text(result: Result) -> str:
    rows = (
        ("torch's own checkpoint, a block and step", f"{result.checkpoint_us:.1f} µs", ""),
        ("hook overhead on top of that", f"{result.hook_us:.1f} µs", f"bar {MAX_HOOK_US:.0f} µs"),
        ("the same with BatchNorm in the block", f"{result.hook_with_buffers_us:.1f} µs", f"bar {MAX_HOOK_US:.0f} µs"),
        ("wrapped but skipped, over plain", f"{result.skipped_ratio:.3f} x", ""),
        ("a step with recover_from_oom=True, over False", f"{result.recovery_ratio:.3f} x", ""),
        ("the same with a list of a million numbers", f"{result.recovery_ratio_with_list:.3f} x", ""),
        ("with the default, over False", f"{result.default_recovery_ratio:.3f} x", ""),
        ("the same of a tiny model", f"{result.default_recovery_ratio_tiny:.3f} x", ""),
        (
            "the same of a GPT-2 of 6 blocks",
            f"{result.default_recovery_ratio_gpt2:.3f} x",
            f"bar {MAX_RECOVERY_RATIO} x",
        ),
        ("import memscale after import torch", f"{result.import_s:.3f} s", f"bar {MAX_IMPORT_S} s"),
        ("the same and the first use of wrap", f"{result.first_use_s:.3f} s", ""),
    )
    return "\n".join(table(rows, left=(0, 2)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repetitions", type=int, default=300, metavar="N", help="steps of each side (default 300)")
    options = parser.parse_args(argv)
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    result = run(options.repetitions)
    print(json.dumps(dataclasses.asdict(result), indent=1) if options.json else to_text(result))
    return int(not result.within_bars)


if __name__ == "__main__":
    sys.exit(main())
