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


SECTIONS = {
    "liger": Section(
        "Plain operators (Liger's benchmarks), `max_memory_allocated` in MiB",
        "linkedin/Liger-Kernel, `benchmark/data/all_benchmark_data.csv` of 2026-08-21",
        "all rows exact to the byte or explained",
        "Which version of a script made a row is not recorded; what it keeps alive was read from the versions that are"
        " public; where the figures show something else the row's note says so. Published figures are 32-bit floats.",
    ),
    "table": Section(
        "The published table, allocated at the peak",
        "the table of plain and optimised peaks on an RTX 3090 that this project is measured by",
        "the four baselines to the second decimal in GiB, the fifth out of memory",
        "That the figures are GiB and of allocated bytes is inferred. Versions are not known; ours are "
        "torch 2.13. Batches are predicted without an attention mask, which `transformers` skips on real "
        "tensors where it hides nothing: with it BERT-Base is 3.1497 and BERT-Large 7.6237 GiB.",
    ),
    "images": Section(
        "FLUX.2 with PEFT's methods, reserved at the peak",
        "huggingface/peft, `method_comparison/image-gen/results` of June to August 2026",
        "within 3 % of what was reserved",
        "What FFTs allocate inside themselves (C3A, FourierFT) is not predicted. Versions of PEFT differ from ours."
        " Evaluations between the steps are left out; the card's memory is empty of them by then. Methods that are not"
        " predicted count as missed.",
    ),
    "texts": Section(
        "Llama-3.2-3B with PEFT's methods, reserved, over LoRA of rank 32",
        "huggingface/peft, `method_comparison/MetaMathQA/results` of July 2026, 99th percentile",
        "within 3 % of the ratio",
        "Lengths of the texts are not known here: one length for all was chosen so that LoRA of rank 32 comes out as"
        " published. That one constant is fitted.",
    ),
    "models": Section(
        "LitGPT's LoRA runs (allocated) and Hugging Face's BERT-Large (nvidia-smi)",
        "Lightning-AI/litgpt, its resource tables of 2023-10-20; huggingface/transformers,"
        " `perf_train_gpu_one.mdx` at 0016acf7",
        "none of its own; within 3 % is what the others must keep",
        "LitGPT's models are those of 0.4.1, a year younger than the figures, BERT's those of today. nvidia-smi counts"
        " whatever else is on the card. Quantised runs, adapters and mixed precision are not tried.",
    ),
    "timm": Section(
        "Vision models (timm's sweep), fits at one batch and fails at the next; what a step needs, and the room for it",
        "huggingface/pytorch-image-models, `results/benchmark-train-amp-*-pt112-cu113-rtx3090.csv` and `benchmark.py`",
        "at least 95 % of the transformers' inequalities and 90 % of all (two a row; a row that misses one holds the"
        " other)",
        "The room is 23.70 GiB, as the driver offers them, without 1.3 GB of context: an estimate from out-of-memory"
        " messages of that time, which leave 1.2 to 1.6 GiB; it is the same for all rows. Workspaces of convolutions"
        " are estimated by the tensors that must be turned; cuDNN's benchmark mode may choose others. Models are those"
        " of timm 0.6.7, the version of that time. Rows that are not listed were not run: their order is by chance.",
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
    lines += ["", "| row | card | published | predicted | difference | verdict |", "|---|---|---|---|---|---|"]
    for entry in entries:
        cells = (entry.name, entry.card, entry.published, entry.predicted, entry.difference, entry.verdict)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]
