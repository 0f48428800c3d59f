"""What does tiling save, and what does it cost? The head at 4 x 512 x 50,257, and peaks over the sequence length.

    python -m benchmarks.tiling [--repeats N] [--measured-up-to LENGTH] [--svg FILE] [--simgpu] [--json FILE]

Bytes are counted at operator boundaries (`memscale.measure`'s way), on the CPU; with `--simgpu` also by the allocator
of the simulated device, which must be installed. The head's share is what head, loss and their backward need above the
gradients that they leave behind. Times are processor time on one thread, the least of `--repeats` alternating runs, so
that what else the machine does counts little; the bars are a share tenfold smaller and 1.05 times the time, and missing
one exits with 1.

The sweep is of a small GPT-2, rehearsed on fake tensors at every length, and measured by a real step up to a length;
a measured peak above the rehearsed one, or more than 0.01 % below it, exits with 1, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.pictures import layout, write_svg
from benchmarks.real_step import RealRehearsal
from memscale._plan import Checkpoint, TileHead, TileMlp
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.rehearsal import FakeRehearsal
from memscale._torch.live_bytes import LiveBytes
from memscale.techniques.checkpointing import checkpointed_forward
from memscale.techniques.tiling.head import attach_head
from memscale.techniques.tiling.mlp import attach_mlp

MIN_REDUCTION, MAX_TIME_RATIO, MAX_DISTANCE = 10.0, 1.05, 1e-4
BATCH, LENGTH, VOCABULARY, HIDDEN = 4, 512, 50_257, 768
ROWS = (512, 256, 128)
LENGTHS = (256, 512, 1024, 2048, 4096)
TREATMENTS = ("plain", "checkpointed", "tiled", "tiled + checkpointed")
COLORS = {"plain": "#4c566a", "checkpointed": "#d08770", "tiled": "#5e9fd4", "tiled + checkpointed": "#a3be8c"}


# ---- the head


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRun:
    """Head, loss and backward, once."""

    rows: int | None
    peak_bytes: int
    left_bytes: int
    """Gradients that are there afterwards."""
    cpu_seconds: float
    loss: float

    @property
    def share_bytes(self) -> int:
        return self.peak_bytes - self.left_bytes


class Head:
    """The head of GPT-2 and a batch for it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.box = nn.ModuleDict({"head": nn.Linear(HIDDEN, VOCABULARY, bias=False)})
        self.hidden = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)
        self.target = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def step(self) -> float:
        """As transformers computes it: logits in fp32, flat, cross-entropy."""
        logits = self.box["head"](self.hidden)
        loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), self.target.view(-1))
        del logits
        loss.backward()
        return loss.item()

    def clear(self) -> None:
        self.hidden.grad = self.box["head"].weight.grad = None

    def move_to(self, device: torch.device) -> None:
        self.box.to(device)
        self.hidden = self.hidden.detach().to(device).requires_grad_()
        self.target = self.target.to(device)

    def seconds(self, rows: int | None) -> float:
        self.clear()
        with self.tiled(rows):
            start = time.process_time()
            self.step()
            return time.process_time() - start

    def bytes(self, rows: int | None) -> tuple[int, int, float]:
        self.clear()
        books = LiveBytes("cpu")
        books.see_all([self.hidden, self.target, *self.box.parameters()])
        before = books.total_bytes
        with self.tiled(rows), books:
            loss = self.step()
        return books.peak_bytes - before, books.total_bytes - before, loss

    def tiled(self, rows: int | None) -> contextlib.ExitStack:
        undo = contextlib.ExitStack()
        if rows is not None:
            attach_head(TileHead("head", rows), self.box, undo)
        return undo


def measure_head(repeats: int) -> list[HeadRun]:
    torch.set_num_threads(1)
    head, choices = Head(), (None, *ROWS)
    seconds: dict[int | None, list[float]] = {rows: [] for rows in choices}
    head.seconds(None)  # the first of all pays for starting up
    for _ in range(repeats):
        for rows in choices:
            seconds[rows].append(head.seconds(rows))
    runs = []
    for rows in choices:
        peak, left, loss = head.bytes(rows)
        runs.append(HeadRun(rows, peak, left, min(seconds[rows]), loss))
    return runs


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRun:
    """The same on the simulated device, by its allocator."""

    rows: int | None
    peak_bytes: int
    left_bytes: int

    @property
    def share_bytes(self) -> int:
        return self.peak_bytes - self.left_bytes


def measure_on_simgpu(rows_tried: Sequence[int | None] = (None, *ROWS)) -> list[DeviceRun]:
    head = Head()
    head.move_to(torch.device("simgpu", 0))
    runs = []
    for rows in rows_tried:
        head.clear()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        with head.tiled(rows):
            head.step()
        peak, left = torch.accelerator.max_memory_allocated(), torch.accelerator.memory_allocated()
        runs.append(DeviceRun(rows, peak - before, left - before))
    return runs


# ---- the sweep


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """The peak of one training step above parameters and inputs."""

    treatment: str
    length: int
    rehearsed_bytes: int
    measured_bytes: int | None

    @property
    def holds(self) -> bool:
        measured = self.rehearsed_bytes if self.measured_bytes is None else self.measured_bytes
        return 0 <= self.rehearsed_bytes - measured <= MAX_DISTANCE * self.rehearsed_bytes


class Treated:
    """What a treatment attaches to the model."""

    def __init__(self, model: nn.Module, treatment: str) -> None:
        self.undo = contextlib.ExitStack()
        if "tiled" in treatment:
            attach_head(TileHead("lm_head", 256), model, self.undo)
            for layer in range(len(find_blocks(model))):
                attach_mlp(TileMlp(f"transformer.h.{layer}.mlp", 8), model, self.undo)
        if "checkpointed" in treatment:
            for module_fqn, module in find_blocks(model).items():
                checkpointed_forward.attach(Checkpoint(module_fqn), module, self.undo)

    def detach(self) -> None:
        self.undo.close()


def small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=256, n_layer=6, n_head=4, n_positions=max(LENGTHS), use_cache=False, attn_pdrop=0.0)
    return GPT2LMHeadModel(config)


def sweep(measured_up_to: int) -> list[Peak]:
    model, peaks = small_gpt2(), []
    for length in LENGTHS:
        ids = torch.randint(0, VOCABULARY, (1, length))
        inputs = Inputs.from_sample({"input_ids": ids, "labels": ids})
        fake = FakeRehearsal(model, inputs, "cpu")
        for treatment in TREATMENTS:
            measured = None
            if length <= measured_up_to:
                real = RealRehearsal(model, inputs, torch.device("cpu"), 0)
                measured = real.run(lambda m, t=treatment: Treated(m, t)).peak_bytes  # type: ignore[misc]
            rehearsed = fake.run(lambda m, t=treatment: Treated(m, t)).peak_bytes  # type: ignore[misc]
            peaks.append(Peak(treatment, length, rehearsed, measured))
    return peaks


# ---- showing it


def head_table(runs: Sequence[HeadRun]) -> str:
    plain = runs[0]
    lines = [
        "| head | peak | of it gradients left | share | reduction | CPU time | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        name = "plain" if run.rows is None else f"tiled, {run.rows} rows"
        ratio = run.cpu_seconds / plain.cpu_seconds
        lines.append(
            f"| {name} | {_mb(run.peak_bytes)} | {_mb(run.left_bytes)} | {_mb(run.share_bytes)} | "
            f"{plain.share_bytes / run.share_bytes:.1f}x | {run.cpu_seconds:.2f} s | {ratio:.3f} |"
        )
    return "\n".join(lines)


def device_table(runs: Sequence[DeviceRun]) -> str:
    lines = ["| head on simgpu | peak | of it gradients left | share | reduction |", "|---|---:|---:|---:|---:|"]
    for run in runs:
        name = "plain" if run.rows is None else f"tiled, {run.rows} rows"
        lines.append(
            f"| {name} | {_mb(run.peak_bytes)} | {_mb(run.left_bytes)} | {_mb(run.share_bytes)} | "
            f"{runs[0].share_bytes / run.share_bytes:.1f}x |"
        )
    return "\n".join(lines)


def sweep_table(peaks: Sequence[Peak]) -> str:
    lines = ["| length | " + " | ".join(TREATMENTS) + " | measured |", "|---:|" + "---:|" * len(TREATMENTS) + "---|"]
    for length in LENGTHS:
        row = [peak for peak in peaks if peak.length == length]
        differences = [p.rehearsed_bytes - p.measured_bytes for p in row if p.measured_bytes is not None]
        measured = f"within {max(map(abs, differences)):,} bytes" if differences else "rehearsed only"
        lines.append(f"| {length} | " + " | ".join(_mb(p.rehearsed_bytes) for p in row) + f" | {measured} |")
    return "\n".join(lines)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def figure_of(peaks: Sequence[Peak]) -> Any:
    """The sweep, as a figure of Plotly."""
    from plotly.graph_objects import Figure

    title = "Peak of a training step of a small GPT-2 against the sequence length"
    tokens = {"title": {"text": "tokens in the sequence"}, "tickvals": list(LENGTHS), "gridcolor": "#e5e9f0"}
    bytes_axis = {
        "title": {"text": "peak"},
        "ticksuffix": "B",
        "exponentformat": "SI",
        "rangemode": "tozero",
        "gridcolor": "#e5e9f0",
    }
    figure = Figure(layout=layout(title, xaxis=tokens, yaxis=bytes_axis))
    for treatment in TREATMENTS:
        mine = [peak for peak in peaks if peak.treatment == treatment]
        figure.add_scatter(
            x=[peak.length for peak in mine],
            y=[peak.rehearsed_bytes for peak in mine],
            name=treatment,
            mode="lines+markers",
            line={"color": COLORS[treatment], "width": 2.5},
        )
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiling", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each head")
    parser.add_argument("--measured-up-to", type=int, default=512, help="longest sequence that is also run for real")
    parser.add_argument("--svg", type=pathlib.Path, help="draw the sweep into this file (needs Chromium)")
    parser.add_argument("--skip-head", action="store_true", help="the sweep only")
    parser.add_argument("--simgpu", action="store_true", help="the head's bytes on the simulated device, too")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file, too")
    options = parser.parse_args(arguments)
    if options.simgpu:
        import simgpu  # noqa: F401  a device must be there before the first backward of a process
    runs = [] if options.skip_head else measure_head(options.repeats)
    on_device = measure_on_simgpu() if options.simgpu else []
    peaks = sweep(options.measured_up_to)
    if options.svg is not None:
        write_svg(figure_of(peaks), options.svg, width=720, height=380)
    if options.json is not None:
        parts: dict[str, Sequence[Any]] = {"head": runs, "head_on_simgpu": on_device, "sweep": peaks}
        rows = {name: [_plain(row) for row in rows] for name, rows in parts.items()}
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if runs:
        print(f"head at {BATCH} x {LENGTH} x {VOCABULARY}, {HIDDEN} wide, fp32, one thread\n")
        print(head_table(runs), "", sep="\n")
    if on_device:
        print(device_table(on_device), "", sep="\n")
    print("small GPT-2, batch 1: peak above parameters and inputs", "", sweep_table(peaks), sep="\n")
    return 0 if _passes(runs, peaks) and _passes_on_device(on_device) else 1


def _plain(record: Any) -> dict[str, Any]:
    return dataclasses.asdict(record)


def _passes_on_device(runs: Sequence[DeviceRun]) -> bool:
    return all(runs[0].share_bytes / run.share_bytes >= MIN_REDUCTION for run in runs[1:])


def _passes(runs: Sequence[HeadRun], peaks: Sequence[Peak]) -> bool:
    if not all(peak.holds for peak in peaks):
        return False
    if not runs:
        return True
    plain, best = runs[0], min(runs[1:], key=lambda run: run.cpu_seconds)
    return (
        plain.share_bytes / best.share_bytes >= MIN_REDUCTION and best.cpu_seconds / plain.cpu_seconds <= MAX_TIME_RATIO
    )


if __name__ == "__main__":
    sys.exit(main())
