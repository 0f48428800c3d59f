"""The page: what was fitted and to what, a summary, then every row."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from memscale._hardware import HALF_MATMUL_EFFICIENCY, LAUNCH_S, MEMORY_EFFICIENCY


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A row of the page."""

    name: str
    card: str
    published_ms: float
    """0: nobody has published it."""
    predicted_ms: float
    note: str = ""

    def to_dict(self) -> dict[str, str | float]:
        return dataclasses.asdict(self)

    @property
    def ratio(self) -> float | None:
        return self.predicted_ms / self.published_ms if self.published_ms else None


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    title: str
    source: str
    fitted: str
    uncertain: str


SECTIONS = {
    "timm": Section(
        "Training steps of vision transformers (timm's sweep)",
        "huggingface/pytorch-image-models, `results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv`, column"
        " `train_step_time`",
        "two constants of the card, to 55 of these rows: one for all matrix products, one for everything else. The"
        " other rows were predicted afterwards",
        "The runs used torch 1.12: attention as matrix products, fp16 autocast of the forward, SGD one parameter at a"
        " time. The definitions of the models are those of today's timm. Convolutions and eager attention reach another"
        " share of the card's speed than the constants say, and the share differs from model to model: that is the"
        " spread. Not listed are models that timm no longer has, that do not run on fake tensors, or that were not"
        " run.",
    ),
    "torchao": Section(
        "A ViT of 1.1 billion parameters with its optimizer on the host (torchao)",
        "pytorch/ao, README of `torchao/optim`: timm's `vit_giant_patch14_dinov2`, full bf16, activation checkpointing,"
        " batch 32, RTX 4070 Ti SUPER, Ryzen 5600, DDR4",
        "nothing",
        "Images of 224 pixels, 45 classes and fused AdamW are those of their benchmark script. It prints allocated"
        " bytes, while our plans are bounded by live bytes. The card's speeds are its vendor's. The host is assumed to"
        " have 32 GB and to step the optimizer at 12 GB/s of memory traffic; both figures are nominal. How the others"
        " overlap transfers with compute is modelled in one line each (benchmarks/published_times/torchao.py). Rows"
        " of our plans are predictions by the same model: nobody has measured them. The cache of this card has 48 MB,"
        " that of an RTX 3090 6 MB; what many element-wise kernels hand to one another (25 MB) fits into the former"
        " alone, and the time model has no caches.",
    ),
}


def to_markdown(sections: dict[str, list[Entry]]) -> str:
    lines = [
        "# Predicted against published step times",
        "",
        "Written by `python -m benchmarks.published_times`. Published times were measured by others on real cards;",
        "predicted ones are ours, on fake tensors on a machine without a card, by the time model that plans use.",
        "",
        "All rows are predicted with the same constants; none is chosen for a model. Matrix products in 16 bits reach",
        f"{HALF_MATMUL_EFFICIENCY:.0%} of a card's nominal throughput, everything else {MEMORY_EFFICIENCY:.0%} of its"
        f" nominal memory bandwidth, and launching a kernel takes the host {LAUNCH_S * 1e6:.0f} µs (a nominal figure;"
        " it hardly matters here).",
        "No row has matrix products in 32 bits: the 60 % that is assumed for these is nominal.",
        "",
        "| figures | rows | median ratio | lowest | highest | mean absolute error | fitted |",
        "|---|---|---|---|---|---|---|",
    ]
    shown = [(SECTIONS[name], sections[name]) for name in SECTIONS if name in sections]
    lines += [_summary_line(section, entries) for section, entries in shown]
    lines += ["", "The ratio is the predicted time over the published one.", "", "## Rows", ""]
    for section, entries in shown:
        lines += _section_lines(section, entries)
    return "\n".join(lines).rstrip() + "\n"


def _summary_line(section: Section, entries: Sequence[Entry]) -> str:
    ratios = sorted(entry.ratio for entry in entries if entry.ratio is not None)
    median, error = statistics.median(ratios), statistics.mean(abs(ratio - 1) for ratio in ratios)
    numbers = f"{len(ratios)} | {median:.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} | {error:.1%}"
    return f"| {section.title} | {numbers} | {section.fitted} |"


def _section_lines(section: Section, entries: Sequence[Entry]) -> list[str]:
    lines = [f"### {section.title}", "", f"Source: {section.source}.", "", f"Fitted: {section.fitted}."]
    lines += [
        f"Uncertain: {section.uncertain}",
        "",
        "| row | card | published | predicted | ratio | note |",
        "|---|---|---|---|---|---|",
    ]
    for entry in entries:
        published = f"{entry.published_ms:.1f} ms" if entry.published_ms else "-"
        ratio = "-" if entry.ratio is None else f"{entry.ratio:.2f}"
        cells = (entry.name, entry.card, published, f"{entry.predicted_ms:.1f} ms", ratio, entry.note)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]
