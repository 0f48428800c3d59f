"""What the full stack takes and what it costs: peaks on a simulated device, and the loss on a real text.

    python -m memscale.benchmarks.full_stack peaks [--model bert-base] [--json FILE]
    python -m memscale.benchmarks.full_stack loss [--steps N] [--svg FILE] [--json FILE]
    python -m memscale.benchmarks.full_stack state [--model bert-base] [--json FILE]

`peaks`: two training steps of BERT-Base (16 x 128) and GPT-2 Medium (4 x 512) after `apply_all_optimizations`, on
simgpu, whose memory is counted: bytes are exact. Beside them stand the peak of the unmodified model as predicted, what
was predicted for the full stack, and the published peaks, which are to be undercut. simgpu must be installed.

`loss`: a character-level GPT-2 on a real text, from the same weights and over the same batches: AdamW in 32 bits, the
same AdamW with its state in 8 bits, bitsandbytes' AdamW8bit, and the full stack (recompute, tiles, bf16, 8-bit state on
disk). The bars: the mean loss of the last 20 of 300 steps within 1 % of 32-bit AdamW's with an 8-bit optimizer, within
2 % with the full stack; optimizer state at least 3.5 times smaller. Exits with 1 when a bar is missed.

`state`: optimizer state of BERT-Base and GPT-2 Medium after a real step on the CPU, in 32 bits and in 8, counted by
tensor. Embeddings stay in 32 bits, as bitsandbytes advises, so beside the whole stands the part that is converted. The
bar of 3.5 is asked of the whole; exits with 1 when it is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import memscale
from memscale import Config
from memscale._execute import executor_of
from memscale.benchmarks.precision import draw_curves
from memscale.benchmarks.text import Characters, Learned, build, learn
from memscale.report.shell import table
from memscale.techniques.optimizer8bit import embeddings_of

PUBLISHED_GB = {"bert-base": 0.84, "gpt2-medium": 2.61}
BATCHES = {"bert-base": (16, 128), "gpt2-medium": (4, 512)}
MIN_STATE_REDUCTION = 3.5
WIDTH = 128


# ------------------------------------------------------------------------------------------------------------- peaks


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """One model with the full stack."""

    model: str
    batch: str
    baseline_bytes: int
    predicted_bytes: int
    measured_bytes: int
    state_bytes: int
    """What the optimizer's quantised state would take in 32 bits."""
    packed_bytes: int
    outcomes: tuple[str, ...]
    losses: tuple[float, ...]
    seconds: float

    @property
    def published_bytes(self) -> float:
        return PUBLISHED_GB[self.model] * 1e9


def measure_peak(name: str, steps: int = 2) -> Peak:
    import simgpu

    model, batch = _on_simgpu(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wish = Config(mode=memscale.OptimizationMode.AGGRESSIVE, force_optimize=True, device="simgpu", enable_logging=False)
    _, used = memscale.apply_all_optimizations(model, optimizer, wish, sample_input=batch)
    torch.accelerator.reset_peak_memory_stats()
    start, losses = time.perf_counter(), []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        used.step()
        used.zero_grad()
        losses.append(loss.item())
        del loss
    peak = _write_down(name, model, losses, time.perf_counter() - start)
    memscale.detach(model)
    assert not simgpu.take_reports(), "the device saw races"
    return peak


def _on_simgpu(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, still on the host, and a batch on the device."""
    model, vocabulary = _fresh_model(name)
    ids = torch.randint(0, vocabulary, BATCHES[name], generator=torch.Generator().manual_seed(0)).to("simgpu")
    return model, {"input_ids": ids, "labels": ids}


def _fresh_model(name: str) -> tuple[nn.Module, int]:
    """On the host; and the size of its vocabulary."""
    from memscale import zoo

    torch.manual_seed(0)
    entry, transformers = zoo.find_entry(name), zoo.load_transformers()
    with zoo.quiet():
        config = getattr(transformers, entry.config_class)(**entry.numbers)
        model: nn.Module = getattr(transformers, entry.model_class)(config).train()
    return model, config.vocab_size


def _write_down(name: str, model: nn.Module, losses: Sequence[float], seconds: float) -> Peak:
    executor = executor_of(model)
    assert executor is not None
    assert executor.plan is not None
    adopted = executor.stats().transfers["optimizer"]
    return Peak(
        model=name,
        batch=" x ".join(map(str, BATCHES[name])),
        baseline_bytes=executor.plan.baseline_peak_bytes,
        predicted_bytes=executor.plan.predicted_peak_bytes,
        measured_bytes=torch.accelerator.max_memory_allocated(),
        state_bytes=adopted.unpacked_bytes,
        packed_bytes=adopted.packed_bytes,
        outcomes=tuple(map(str, executor.outcomes)),
        losses=tuple(losses),
        seconds=seconds,
    )


def show_peaks(peaks: Sequence[Peak]) -> str:
    rows = [
        (
            peak.model,
            peak.batch,
            f"{peak.baseline_bytes / 1e9:.3f}",
            f"{peak.predicted_bytes / 1e9:.3f}",
            f"{peak.measured_bytes / 1e9:.3f}",
            f"{peak.published_bytes / 1e9:.2f}",
            f"{1 - peak.measured_bytes / peak.baseline_bytes:.1%}",
            f"{peak.state_bytes / max(1, peak.packed_bytes):.2f}x",
        )
        for peak in peaks
    ]
    header = ("model", "batch", "unmodified GB", "predicted", "measured", "published", "less", "8-bit state")
    lines = table([header, *rows], left=(0, 1))
    for peak in peaks:
        lines += [f"{peak.model}:", *(f"  {outcome}" for outcome in peak.outcomes)]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- loss


@dataclasses.dataclass(frozen=True, slots=True)
class Run(Learned):
    """One training."""

    name: str
    bar: float
    """How far the final loss may be from that of the first run, as a share."""
    losses: tuple[float, ...]
    state_bytes: int
    """Optimizer state between steps, embeddings and other 32-bit state included."""
    seconds: float


RUNS = {"AdamW": 0.0, "AdamW, 8-bit state": 0.01, "AdamW8bit": 0.01, "full stack": 0.02}
COLORS = dict(zip(RUNS, ("#4c566a", "#5e9fd4", "#a3be8c", "#d08770"), strict=True))


@contextlib.contextmanager
def prepared(name: str, model: nn.Module, optimizer: Optimizer, sample: Any) -> Iterator[Optimizer]:
    """The optimizer to train with, and MemScale as this run wants it."""
    with tempfile.TemporaryDirectory() as directory:
        if name == "AdamW":
            yield optimizer
            return
        if name == "AdamW, 8-bit state":
            config = Config(use_8bit_optimizer=True, enable_logging=False)
            with memscale.optimize(model, optimizer, config, sample):
                yield optimizer
            return
        config = Config(mode=memscale.OptimizationMode.AGGRESSIVE, force_optimize=True, enable_logging=False)
        changes: dict[str, Any] = {"use_mixed_precision": True, "offload_dir": directory}
        if name == "AdamW8bit":
            changes = dict.fromkeys(("enable_checkpointing", "enable_tiling", "enable_offloading"), False)
        _, used = memscale.apply_all_optimizations(model, optimizer, config.replace(**changes), sample)
        try:
            yield used
        finally:
            memscale.detach(model)


def train(name: str, text: Characters, steps: int) -> Run:
    model = build(len(text.alphabet), WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with prepared(name, model, optimizer, text.batch(0)) as used:
        torch.manual_seed(1)
        losses, seconds = learn(model, used, text, steps)
        state_bytes = _state_bytes(model, used)
    return Run(name, RUNS[name], losses, state_bytes, seconds)


def _state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """What the state takes between steps, wherever it waits; tables that all parameters share count once."""
    executor = executor_of(model)
    adoption = executor.stats().transfers.get("optimizer") if executor is not None else None
    storages = {
        value.untyped_storage().data_ptr(): value.nbytes
        for entry in optimizer.state.values()
        for value in dict.values(entry)  # without looking: what waits is not brought back
        if isinstance(value, torch.Tensor)
    }
    kept = [
        value
        for entry in optimizer.state.values()
        for value in getattr(entry, "kept", {}).values()
        if isinstance(value, torch.Tensor)
    ]
    waiting = adoption.waiting_bytes if adoption is not None else 0
    return sum(storages.values()) + sum(value.nbytes for value in kept) + waiting


def show_runs(runs: Sequence[Run]) -> str:
    first = runs[0]
    rows = [
        (
            run.name,
            f"{run.final_loss:.4f}",
            f"{run.distance(first):.2%}",
            f"{run.bar:.0%}" if run.bar else "",
            f"{run.state_bytes / 1e6:.3f} MB",
            f"{first.state_bytes / run.state_bytes:.2f}x",
            f"{run.seconds:.0f} s",
        )
        for run in runs
    ]
    header = ("run", "final loss", "from 32 bits", "bar", "optimizer state", "smaller", "time")
    return "\n".join(table([header, *rows], left=(0,)))


def meets_bars(runs: Sequence[Run]) -> bool:
    first = runs[0]
    return all(
        run.distance(first) <= run.bar and first.state_bytes >= MIN_STATE_REDUCTION * run.state_bytes
        for run in runs[1:]
    )


# ------------------------------------------------------------------------------------------------------------- state


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
            whole = _state_bytes(model, used)
        states.append(State(name, way, share, wide, whole, converted_wide, converted))
    return states


def _small_batch(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, vocabulary = _fresh_model(name)
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


# -------------------------------------------------------------------------------------------------------------- main


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m memscale.benchmarks.full_stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    peaks = commands.add_parser("peaks", help="device bytes on simgpu")
    state = commands.add_parser("state", help="optimizer state in 32 and in 8 bits")
    for command in (peaks, state):
        command.add_argument("--model", choices=list(BATCHES), action="append", help="only this one; may be repeated")
    loss = commands.add_parser("loss", help="curves on a real text")
    loss.add_argument("--steps", type=int, default=300)
    loss.add_argument("--svg", type=pathlib.Path, help="draw the curves into this file")
    for command in (peaks, loss, state):
        command.add_argument("--json", type=pathlib.Path, help="write every figure into this file")
    options = parser.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if options.command == "loss":
        return _loss(options, parser)
    return _peaks(options) if options.command == "peaks" else _states(options)


def _states(options: argparse.Namespace) -> int:
    found = [state for name in options.model or BATCHES for state in measure_states(name)]
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(state) for state in found], indent=1) + "\n")
    print(show_states(found))
    return 0 if all(state.meets_bar for state in found) else 1


def _peaks(options: argparse.Namespace) -> int:
    found = [measure_peak(name) for name in options.model or BATCHES]
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(peak) for peak in found], indent=1) + "\n")
    print(show_peaks(found))
    return 0 if all(peak.measured_bytes < peak.published_bytes for peak in found) else 1


def _loss(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    text, runs = Characters(), []
    for name in RUNS:
        runs.append(train(name, text, options.steps))
        print(f"{name}: {runs[-1].final_loss:.4f} after {runs[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    if options.svg is not None:
        options.svg.write_text(draw_curves({run.name: run.losses for run in runs}, COLORS))
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=1) + "\n")
    print(show_runs(runs))
    return 0 if meets_bars(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
