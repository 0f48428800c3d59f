"""The page: a summary with the bars, then every row with its source, its error and what is uncertain."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A row of the page."""

    name: str
    card: str
    published: str
    predicted: str
    difference: str
    verdict: str
    """"exact", "holds", "explained: by what", "within ..." or "missed"."""
    note: str
    figures: list[float] = dataclasses.field(default_factory=list)
    """What the section's own figures are made of."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def is_missed(self) -> bool:
        return self.verdict.startswith("missed")


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    title: str
    source: str
    bar: str
    uncertain: str
    columns: tuple[str, str, str] = ("published", "predicted", "difference")
    """What is above an entry's three figures."""


VERDICTS = (
    ("exact", "The prediction is the published figure, to its last digit; a difference beside it is rounding."),
    ("within 3%, holds", "It is as near as the bar asks, or says the same about what fits."),
    (
        "explained: held before",
        "The process that was measured held memory from before: the same number of bytes is missing in all rows of a "
        "sweep. The number is inferred from these very rows; nothing else is known of it.",
    ),
    (
        "explained: blocks",
        "The caching allocator leaves up to 1 MiB of a large block unused. How much depends on what ran before in that "
        "process. The figure lies between no waste and 1 MiB for each large block.",
    ),
    ("explained: held before and blocks", "Both. The number is inferred here, too."),
    ("explained: router and blocks", "The same, and which expert gets how many rows is random: up to 0.1 %."),
    ("explained: workspace", "A library's kernel takes memory whose size is not published."),
    ("missed", "None of these: the prediction is wrong, or there is none."),
)
"""What the words in the last column mean."""

SECTIONS = {
    "liger": Section(
        "Plain operators (Liger's benchmarks), `max_memory_allocated` in MiB",
        "linkedin/Liger-Kernel, `benchmark/data/all_benchmark_data.csv` of 2026-08-21",
        "all rows exact to the byte or explained",
        "Nobody recorded which version of a script made a row. What a script keeps alive was read from the public"
        " versions; where the figures show something else, the note on the operator says so. Published figures are"
        " 32-bit floats. A script compares several implementations; rows are of the plain one.",
    ),
    "table": Section(
        "The published table, allocated at the peak",
        "the table of plain and optimised peaks on an RTX 3090 that this project is measured by",
        "the four baselines to the second decimal in GiB, the fifth out of memory",
        "We inferred that the figures are GiB of allocated bytes. The versions that were measured are not known; ours"
        " is torch 2.13. Batches are predicted without an attention mask, because `transformers` drops a mask that"
        " hides nothing. With the mask, BERT-Base would be 3.1497 and BERT-Large 7.6237 GiB.",
    ),
    "images": Section(
        "FLUX.2 with PEFT's methods, reserved at the peak",
        "huggingface/peft, `method_comparison/image-gen/results` of June to August 2026",
        "within 3 % of what was reserved",
        "What FFTs allocate inside themselves (C3A, FourierFT) is an estimate: NVIDIA does not publish it, and one"
        " complex number is counted for each element. The versions of PEFT differ from ours."
        " Evaluations between the training steps are left out: their memory is free again when training goes on."
        " Methods that are not predicted count as missed.",
    ),
    "texts": Section(
        "Llama-3.2-3B with PEFT's methods, reserved, over LoRA of rank 32",
        "huggingface/peft, `method_comparison/MetaMathQA/results` of July 2026, 99th percentile",
        "within 3 % of the ratio",
        "The lengths of the texts are not known here. One length for all rows was chosen so that LoRA of rank 32 comes"
        " out as published: that one constant is fitted.",
    ),
    "models": Section(
        "LitGPT's LoRA runs (allocated) and Hugging Face's BERT-Large (nvidia-smi)",
        "Lightning-AI/litgpt, its resource tables of 2023-10-20; huggingface/transformers,"
        " `perf_train_gpu_one.mdx` at 0016acf7",
        "none was set for these rows; they are held against the 3 % of the others",
        "LitGPT's models are those of version 0.4.1, which is a year younger than the figures; BERT's are those of"
        " today. nvidia-smi also counts what other programs hold on the card. Rows with quantised weights, adapters or"
        " mixed precision were not predicted.",
    ),
    "timm": Section(
        "Vision models (timm's sweep), the batch that fits and the next one, which runs out of memory",
        "huggingface/pytorch-image-models, `results/benchmark-train-amp-*-pt112-cu113-rtx3090.csv` and `benchmark.py`",
        "at least 95 % of the transformers' inequalities and 90 % of all. Each row is two: one batch fits, the next"
        " does not. A row that misses one still counts for the other",
        "The room for PyTorch is an estimate, the same for all rows: the driver offers 25.45 GB (23.70 GiB) of the"
        " card, and 1.3 GB of it are taken for the CUDA context. Out-of-memory messages of that time leave 1.2 to"
        " 1.6 GiB for the context. The first table says how many inequalities would hold with another room."
        " Workspaces of convolutions are estimated from the tensors whose layout must be changed; cuDNN's benchmark"
        " mode may choose others. Models are those of timm 0.6.7, the version of that time. The rows are a random"
        " sample: what is not listed was not run.",
        columns=("published: batch", "predicted: needed by the two batches", "room for PyTorch"),
    ),
}


Details = Callable[[Sequence[Entry]], list[str]]
"""Lines that a section has before its rows."""


def to_markdown(sections: dict[str, list[Entry]], details: Mapping[str, Details] | None = None) -> str:
    lines = [
        "# Predicted against published",
        "",
        "Written by `python -m benchmarks.published`. Published figures were measured by others on real cards;",
        "predicted ones are ours, made on fake tensors on a machine without a card.",
        "",
        "| verdict | what it means |",
        "|---|---|",
        *(f"| {verdict} | {meaning} |" for verdict, meaning in VERDICTS),
        "",
        "| figures | rows | exact or held | explained | missed | bar |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_summary_line(SECTIONS[name], entries) for name, entries in sections.items()]
    lines += ["", "## Rows", ""]
    for name, entries in sections.items():
        detail = (details or {}).get(name)
        lines += _section_lines(SECTIONS[name], entries, detail(entries) if detail else [])
    return "\n".join(lines).rstrip() + "\n"


def _summary_line(section: Section, entries: Sequence[Entry]) -> str:
    missed = sum(entry.is_missed for entry in entries)
    explained = sum(entry.verdict.startswith("explained") for entry in entries)
    title = section.title.partition(",")[0]
    return (
        f"| {title} | {len(entries)} | {len(entries) - explained - missed} | {explained} | {missed} | {section.bar} |"
    )


def _section_lines(section: Section, entries: Sequence[Entry], details: Sequence[str]) -> list[str]:
    verdicts = collections.Counter(entry.verdict for entry in entries)
    counted = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))
    lines = [f"### {section.title}", "", f"Source: {section.source}.", f"Bar: {section.bar}. Found: {counted}.", ""]
    lines += [f"Uncertain: {section.uncertain}", ""]
    lines += [*details, ""] if details else []
    notes = {entry.name.partition(",")[0]: entry.note for entry in entries if entry.note}
    lines += [f"- {name}: {note}" for name, note in notes.items()]
    lines += ["", f"| row | card | {' | '.join(section.columns)} | verdict |", "|---|---|---|---|---|---|"]
    for entry in entries:
        difference = readable(entry.difference)
        cells = (entry.name, entry.card, entry.published, entry.predicted, difference, entry.verdict)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def readable(difference: str) -> str:
    """The same, in MiB where it is many KiB."""
    number, _, unit = difference.partition(" ")
    if unit != "KiB" or abs(float(number)) < 10 * 1024:
        return difference
    return f"{float(number) / 1024:+,.1f} MiB"
