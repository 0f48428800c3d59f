"""The page: a summary with the bars, then every row with its source, its error and what is uncertain."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


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

    def to_dict(self) -> dict[str, str]:
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
    "timm": Section(
        "Vision models (timm's sweep), fits at one batch and fails at the next; predicted peaks, and the room for them",
        "huggingface/pytorch-image-models, `results/benchmark-train-amp-*-pt112-cu113-rtx3090.csv` and `benchmark.py`",
        "at least 95 % of the transformers' inequalities (two a row; a row that misses one holds the other)",
        "torch 1.12 had no SDPA, and loaded all kernels at once: about 1.3 GB of context, an estimate. Workspaces of"
        " convolutions are not predicted. Peaks are extrapolated from two small batches. Definitions of models are"
        " those of today. Rows that are not listed were not run.",
    ),
}


def to_markdown(sections: dict[str, list[Entry]]) -> str:
    lines = [
        "# Predicted against published",
        "",
        "Written by `python -m benchmarks.published`. Published figures were measured by others on real cards;",
        "predicted ones are ours, made on fake tensors on a machine without a card.",
        "",
        "| figures | rows | exact or held | explained | missed | bar |",
        "|---|---|---|---|---|---|",
    ]
    shown = [(SECTIONS[name], entries) for name, entries in sections.items()]
    lines += [_summary_line(section, entries) for section, entries in shown]
    lines += ["", "## Rows", ""]
    for section, entries in shown:
        lines += _section_lines(section, entries)
    return "\n".join(lines).rstrip() + "\n"


def _summary_line(section: Section, entries: Sequence[Entry]) -> str:
    missed = sum(entry.is_missed for entry in entries)
    explained = sum(entry.verdict.startswith("explained") for entry in entries)
    title = section.title.partition(",")[0]
    return (
        f"| {title} | {len(entries)} | {len(entries) - explained - missed} | {explained} | {missed} | {section.bar} |"
    )


def _section_lines(section: Section, entries: Sequence[Entry]) -> list[str]:
    verdicts = collections.Counter(entry.verdict for entry in entries)
    counted = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))
    lines = [f"### {section.title}", "", f"Source: {section.source}.", f"Bar: {section.bar}. Found: {counted}.", ""]
    lines += [f"Uncertain: {section.uncertain}", ""]
    notes = {entry.name.partition(",")[0]: entry.note for entry in entries if entry.note}
    lines += [f"- {name}: {note}" for name, note in notes.items()]
    lines += ["", "| row | card | published | predicted | difference | verdict |", "|---|---|---|---|---|---|"]
    for entry in entries:
        cells = (entry.name, entry.card, entry.published, entry.predicted, entry.difference, entry.verdict)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]
