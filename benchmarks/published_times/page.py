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
        "both constants of the card, to 55 of these rows: one number for all products, one for everything else; the"
        " others were predicted afterwards",
        "torch 1.12: attention as products, fp16 autocast of the forward, SGD parameter by parameter; definitions of"
        " models are those of today. Kernels of convolutions and of eager attention reach other shares than the"
        " constants say, by model: that is the spread. Models that timm has no more, or that do not run on fake"
        " tensors, and those that were not run are not listed.",
    ),
    "torchao": Section(
        "A ViT of 1.1 billion parameters with its optimizer on the host (torchao)",
        "pytorch/ao, README of `torchao/optim`: timm's `vit_giant_patch14_dinov2`, full bf16, activation checkpointing,"
        " batch 32, RTX 4070 Ti SUPER, Ryzen 5600, DDR4",
        "nothing",
        "Images of 224 pixels, 45 classes and fused AdamW are those of their benchmark script,"
        " which prints allocated bytes: our plans are bounded by live ones. The card's speeds are its vendor's; the"
        " host's step is taken at 12 GB/s of memory traffic, a nominal figure, and its memory at 32 GB. How others"
        " overlap is modelled in one line each (benchmarks/published_times/torchao.py). Our rows are predictions by"
        " the same model: nobody has measured them. The cache of this card (48 MB, that of an RTX 3090 6 MB) holds what"
        " many of its element-wise kernels hand to one another (25 MB); the time model knows no caches.",
    ),
}


def to_markdown(sections: dict[str, list[Entry]]) -> str:
    lines = [
        "# Predicted against published step times",
        "",
        "Written by `python -m benchmarks.published_times`. Published times were measured by others on real cards;",
        "predicted ones are ours, by the model that plans are made by, on fake tensors on a machine without a card.",
        "",
        "One set of constants holds for all rows, and none is for a model: products in 16 bits reach",
        f"{HALF_MATMUL_EFFICIENCY:.0%} of a card's nominal throughput, everything else {MEMORY_EFFICIENCY:.0%} of its"
        f" nominal bandwidth, and a launch takes the host {LAUNCH_S * 1e6:.0f} µs (nominal; it hardly matters here).",
        "Products in 32 bits are in none of these rows: their 60 % is nominal.",
        "",
        "| figures | rows | median ratio | from | to | mean error | fitted |",
        "|---|---|---|---|---|---|---|",
    ]
    shown = [(SECTIONS[name], sections[name]) for name in SECTIONS if name in sections]
    lines += [_summary_line(section, entries) for section, entries in shown]
    lines += ["", "The ratio is predicted over published.", "", "## Rows", ""]
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
        "| row | card | published | predicted | ratio | |",
        "|---|---|---|---|---|---|",
    ]
    for entry in entries:
        published = f"{entry.published_ms:.1f} ms" if entry.published_ms else "-"
        ratio = "-" if entry.ratio is None else f"{entry.ratio:.2f}"
        cells = (entry.name, entry.card, published, f"{entry.predicted_ms:.1f} ms", ratio, entry.note)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]
