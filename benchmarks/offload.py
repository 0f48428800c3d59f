"""Does a model train that is larger than its device, and are transfers hidden? On the simulated device, or the CPU.

    python -m benchmarks.offload train [--model gpt2-xl] [--device-gb 2] [--offload-dir DIR] [--device cpu]
    python -m benchmarks.offload overlap [--layers N] [--card "RTX 3090"]

`train`: training steps of a GPT-2 with everything streamed, embedding and head included: parameters and gradients on
the host, boundaries of the recomputed layers and optimizer state on disk. On `simgpu` the device has a hard capacity,
and device bytes are the allocator's, exact; host bytes are the process's resident memory less the simulated device's,
which also lies there. On `cpu` the device is RAM: layers are recomputed, and boundaries and optimizer state wait on
disk; tracked bytes (live tensors) are shown beside resident ones. Exits with 1 if a bar is missed.

`overlap`: how much of the transfer time of activation offload is hidden behind compute, on the virtual clock of a card:
a model of time, never a measurement. The bound is what the link allows: bytes over its speed against compute. The
blocking way is shown beside it. simgpu must be installed for this, and for `train` on simgpu.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memscale
from memscale._config import AsyncOffloadConfig
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, OffloadActivations, OffloadOptimizer, StreamParameters, TileHead
from memscale._profile.layers import find_blocks
from memscale.techniques.offload.parameters.streaming import rest_of

SIZES = {
    "gpt2-tiny": (4, 256, 4),
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
GB = 1_000_000_000
MIN_HIDDEN = 0.9
_LOG_EVERY_S = 15.0
_SETTLING_SAMPLES = 15


def build(name: str, num_layers: int | None = None) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = SIZES[name]
    config = GPT2Config(n_layer=num_layers or layers, n_embd=width, n_head=heads, use_cache=False)
    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


# ---- a model larger than its device


class ResidentPeak:
    """The highest resident memory of this process, sampled; on simgpu without what plays the device."""

    def __init__(self, *, on_simgpu: bool) -> None:
        self.peak_bytes = 0
        self._on_simgpu = on_simgpu
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resident-peak", daemon=True)

    def _watch(self) -> None:
        process = psutil.Process()
        recent: collections.deque[int] = collections.deque([0], maxlen=_SETTLING_SAMPLES)
        while not self._stop.wait(0.02):
            recent.append(torch.accelerator.memory_allocated() if self._on_simgpu else 0)
            if max(recent) == recent[-1]:  # what plays the device was not freed just now: unmapping it takes a moment
                self.peak_bytes = max(self.peak_bytes, process.memory_info().rss - recent[-1])

    def __enter__(self) -> ResidentPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Progress:
    """One line that says where the step is."""

    def __init__(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        self._blocks = find_blocks(model)
        self._done = self._num_buckets = 0
        self._start = time.perf_counter()
        self._said = -_LOG_EVERY_S
        for block in self._blocks.values():
            undo.callback(block.register_forward_hook(self._tick).remove)
            undo.callback(block.register_full_backward_hook(self._tick).remove)
        undo.callback(register_optimizer_step_pre_hook(self._tick_bucket).remove)

    def _tick(self, *_: Any) -> None:
        self._done = self._done % (2 * len(self._blocks)) + 1
        phase = "forward" if self._done <= len(self._blocks) else "backward"
        self.say(f"{phase}, layer {self._done} of {2 * len(self._blocks)}")

    def _tick_bucket(self, *_: Any) -> None:
        self._num_buckets += 1
        self.say(f"optimizer, bucket {self._num_buckets} of all steps")

    def say(self, text: str) -> None:
        """On a terminal at once, in one line; into a log now and then."""
        now = time.perf_counter() - self._start
        if sys.stderr.isatty():
            print(f"\r{now:8.1f} s  {text:60}", end="", file=sys.stderr, flush=True)
        elif now - self._said > _LOG_EVERY_S:
            self._said = now
            print(f"{now:8.1f} s  {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainResult:
    losses: tuple[float, ...]
    device_peak_bytes: int | None
    """Of the allocator."""
    tracked_peak_bytes: int | None
    """Of live tensors in RAM."""
    host_peak_bytes: int
    """Resident."""
    seconds: float


def actions_for(model: nn.Module, device_type: str, tile_rows: int | None = None) -> tuple[Action, ...]:
    """Everything that leaves the device: on a CPU, where parameters have nowhere to go, all but those."""
    blocks = tuple(find_blocks(model))
    on_cpu = device_type == "cpu"
    recomputed = [Checkpoint(fqn) if on_cpu else StreamParameters(fqn) for fqn in blocks]
    rest = [] if on_cpu else [StreamParameters(fqn) for fqn in rest_of(model, blocks)]
    head = [] if tile_rows is None else [TileHead("lm_head", rows=tile_rows)]
    away = [OffloadActivations(fqn) for fqn in blocks]
    return (*head, *rest, *recomputed, *away, OffloadOptimizer(bucket_bytes=64 * 1024 * 1024))


def train(arguments: argparse.Namespace, offload_dir: str) -> TrainResult:
    on_simgpu = arguments.device == "simgpu"
    device = _open_device(arguments)
    with contextlib.ExitStack() as undo, ResidentPeak(on_simgpu=on_simgpu) as resident:
        model = build(arguments.model, arguments.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not on_simgpu)
        settings = ExecutionSettings(
            device=device,
            asynchronous=arguments.asynchronous,
            async_config=AsyncOffloadConfig(min_tensor_bytes=64 * 1024),
            host_budget_bytes=int(arguments.state_host_gb * GB),
            offload_dir=offload_dir,
        )
        executor = Executor(model, settings, optimizer)
        undo.callback(executor.detach)
        executor.attach(actions_for(model, device.type, arguments.tile_rows))
        progress = Progress(model, undo)
        if on_simgpu:
            torch.accelerator.reset_peak_memory_stats()
        start = time.perf_counter()
        with memscale.measure("cpu") if not on_simgpu else contextlib.nullcontext() as tracked:
            losses = [_step(model, optimizer, arguments, device, progress, step) for step in range(arguments.steps)]
        seconds = time.perf_counter() - start
        peak_bytes = torch.accelerator.max_memory_allocated() if on_simgpu else None
    tracked_bytes = tracked.peak_bytes if tracked is not None else None
    return TrainResult(tuple(losses), peak_bytes, tracked_bytes, resident.peak_bytes, seconds)


def _open_device(arguments: argparse.Namespace) -> torch.device:
    if arguments.device == "cpu":
        return torch.device("cpu")
    import simgpu

    simgpu.set_cap(int(arguments.device_gb * GB))
    return torch.device("simgpu", 0)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    arguments: argparse.Namespace,
    device: torch.device,
    progress: Progress,
    number: int,
) -> float:
    ids = torch.randint(50_257, (arguments.batch, arguments.length), generator=torch.Generator().manual_seed(number))
    ids = ids.to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def report_training(arguments: argparse.Namespace, result: TrainResult) -> int:
    layers, width, _ = SIZES[arguments.model]
    layers = arguments.layers or layers
    print(f"{arguments.model} ({layers} layers of {width}), batch {arguments.batch} x {arguments.length}, fp32, AdamW")
    print(f"  losses {', '.join(f'{loss:.4f}' for loss in result.losses)}; {result.seconds:.0f} s")
    if result.device_peak_bytes is not None:
        print(f"  device peak {result.device_peak_bytes / GB:.3f} GB of {arguments.device_gb} GB")
    if result.tracked_peak_bytes is not None:
        print(f"  tracked peak {result.tracked_peak_bytes / GB:.3f} GB")
    print(f"  host peak {result.host_peak_bytes / GB:.3f} GB resident; bar {arguments.host_gb} GB")
    return int(result.host_peak_bytes > arguments.host_gb * GB)


# ---- are transfers hidden


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    way: str
    asynchronous: bool
    num_layers: int
    """Layers whose tensors are offloaded."""
    moved_bytes: int
    """Out and in."""
    elapsed_ms: float
    copy_ms: float
    copy_out_ms: float
    hidden_ms: float

    @property
    def hidden(self) -> float:
        return self.hidden_ms / self.copy_ms if self.copy_ms else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """The time behind which copies can hide."""

    forward_ms: float
    backward_ms: float

    def bound(self, row: Overlap) -> float:
        """The most that could be hidden if copies ran all the time: out beside forward, in beside backward."""
        hideable = min(row.copy_out_ms, self.forward_ms) + min(row.copy_ms - row.copy_out_ms, self.backward_ms)
        return hideable / row.copy_ms if row.copy_ms else 1.0


PLAIN, RECOMPUTED, BOUNDARIES, EVERY = "nothing", "nothing, recomputed", "boundaries, recomputed", "every layer"
HIDEABLE = "as many layers as hide"


def overlap(arguments: argparse.Namespace) -> Iterator[tuple[Overlap, Compute]]:
    """A training step's forward and backward for each way of offloading."""
    plain, compute = _overlap_of(PLAIN, False, 0, arguments)
    yield plain, compute
    count = arguments.layers - 1  # the last layer's tensors are needed at once
    layer = _one_layer(arguments)
    link_ms = count * layer.copy_out_ms
    hideable = max(1, int(count * min(1.0, compute.forward_ms / link_ms))) if link_ms else count
    # A layer is computed faster than it travels: it must be allowed to travel beside the layers after it.
    window = AsyncOffloadConfig(window_bytes=layer.moved_bytes, prefetch_bytes=layer.moved_bytes)
    for asynchronous in (True, False):
        yield _overlap_of(HIDEABLE, asynchronous, hideable, arguments, window)[0], compute
    recomputed, recompute = _overlap_of(RECOMPUTED, False, 0, arguments)
    yield recomputed, recompute
    for asynchronous in (True, False):
        yield _overlap_of(BOUNDARIES, asynchronous, count, arguments)[0], recompute
    for asynchronous in (True, False):
        yield _overlap_of(EVERY, asynchronous, count, arguments)[0], compute


def _one_layer(arguments: argparse.Namespace) -> Overlap:
    """What one layer sends. Layers are alike."""
    few = argparse.Namespace(**{**vars(arguments), "layers": 2})
    return _overlap_of(EVERY, True, 1, few)[0]


def _overlap_of(
    way: str,
    asynchronous: bool,
    num_layers: int,
    arguments: argparse.Namespace,
    config: AsyncOffloadConfig | None = None,
) -> tuple[Overlap, Compute]:
    import simgpu

    simgpu.set_card(arguments.card)
    device = torch.device("simgpu", 0)
    model = build(arguments.model, arguments.layers).to(device)
    blocks = list(find_blocks(model))
    recomputed = [Checkpoint(fqn) for fqn in blocks if way in (RECOMPUTED, BOUNDARIES)]
    chosen = [blocks[number * (len(blocks) - 1) // num_layers] for number in range(num_layers)]
    settings = ExecutionSettings(device, asynchronous=asynchronous, async_config=config or AsyncOffloadConfig())
    executor = Executor(model, settings)
    executor.attach([*recomputed, *(OffloadActivations(fqn) for fqn in chosen)])
    ids = torch.randint(50_257, (arguments.batch, arguments.length)).to(device)
    # Differences of one running clock: events remember its time, so it is not set back.
    start = _clock()
    loss = model(input_ids=ids, labels=ids).loss
    forward = _clock() - start
    loss.backward()
    step = _clock() - start
    del loss
    statistics = executor.stats().transfers.get("activations")
    moved = statistics.transfers.bytes_sent + statistics.transfers.bytes_fetched if statistics is not None else 0
    executor.detach()
    copy_ms, sent_ms = step.hidden_ms + step.exposed_ms, forward.hidden_ms + forward.exposed_ms
    row = Overlap(way, asynchronous, num_layers, moved, step.elapsed_ms, copy_ms, sent_ms, step.hidden_ms)
    return row, Compute(forward.elapsed_ms, step.elapsed_ms - forward.elapsed_ms)


@dataclasses.dataclass(frozen=True, slots=True)
class _Clock:
    """What the virtual clock says when the device has nothing left to do."""

    elapsed_ms: float
    hidden_ms: float
    exposed_ms: float

    def __sub__(self, other: _Clock) -> _Clock:
        return _Clock(
            self.elapsed_ms - other.elapsed_ms,
            self.hidden_ms - other.hidden_ms,
            self.exposed_ms - other.exposed_ms,
        )


def _clock() -> _Clock:
    import simgpu

    torch.accelerator.synchronize()
    report = simgpu.overlap_report()
    return _Clock(report.elapsed_ms, report.hidden_copy_ms, report.exposed_copy_ms)


def report_overlap(arguments: argparse.Namespace) -> int:
    print(f"{arguments.model}, {arguments.layers} layers, batch {arguments.batch} x {arguments.length}, fp32")
    print(f"modelled time of forward and backward, on the virtual clock of an {arguments.card}")
    header = f"  {'offloaded':24} {'layers':>6} {'':6} {'moved':>11} {'step':>10} {'copies':>10}"
    print(f"{header} {'hidden':>8} {'bound':>7}")
    missed = False
    for row, compute in overlap(arguments):
        kind = "" if not row.moved_bytes else "async" if row.asynchronous else "sync"
        print(
            f"  {row.way:24} {row.num_layers:6} {kind:6} {row.moved_bytes / 1e6:8.1f} MB {row.elapsed_ms:7.1f} ms "
            f"{row.copy_ms:7.2f} ms {row.hidden:8.1%} {compute.bound(row):7.1%}",
            flush=True,
        )
        missed |= row.way in (BOUNDARIES, HIDEABLE) and row.asynchronous and row.hidden < MIN_HIDDEN
        gc.collect()
    return int(missed)


# ---- command line


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    torch.set_num_threads(os.cpu_count() or 1)
    if parsed.command == "overlap":
        return report_overlap(parsed)
    if parsed.offload_dir is not None:
        return report_training(parsed, train(parsed, parsed.offload_dir))
    with tempfile.TemporaryDirectory() as directory:
        return report_training(parsed, train(parsed, directory))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="a model larger than its device")
    training.add_argument("--device", choices=["simgpu", "cpu"], default="simgpu")
    training.add_argument("--device-gb", type=float, default=2.0, help="the simulated device's capacity")
    training.add_argument("--host-gb", type=float, default=16.0, help="more resident memory than this exits with 1")
    training.add_argument("--state-host-gb", type=float, default=0.001, help="host memory for what could go to disk")
    training.add_argument("--offload-dir", help="a directory on a disk; a temporary one if not given")
    training.add_argument("--steps", type=int, default=2, help="the first makes the state, the second fetches it")
    training.add_argument("--layers", type=int, help="fewer layers than the model has")
    training.add_argument("--tile-rows", type=int, help="tile the head: so many rows of logits at once")
    training.add_argument("--asynchronous", action="store_true")
    overlapping = commands.add_parser("overlap", help="is the transfer time hidden")
    overlapping.add_argument("--card", default="RTX 3090")
    overlapping.add_argument("--layers", type=int, default=24)
    for command, model, batch in ((training, "gpt2-xl", 1), (overlapping, "gpt2-medium", 4)):
        command.add_argument("--model", choices=SIZES, default=model)
        command.add_argument("--batch", type=int, default=batch)
        command.add_argument("--length", type=int, default=512)
    return parser


if __name__ == "__main__":
    sys.exit(main())
