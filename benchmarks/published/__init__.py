"""Predicted against published: figures that others measured on real cards, and what we predict for them.

    python -m benchmarks.published [--only SECTION ...] [--results FILE] [--page FILE] [--liger FILE] [--timm FILE]

Sections: `liger` (341 rows of plain operators on five cards, to the byte; about five minutes), `table` (the published
table of five models; a minute), and on request those that need packages which are no dependencies of ours:

    images   FLUX.2 with PEFT's methods on an L40S, reserved; needs diffusers
    texts    Llama-3.2-3B with PEFT's methods on an L40S, by ratio
    models   LitGPT's LoRA runs on an A100, and BERT-Large on a V100; needs litgpt
    timm     which batches of vision models fit an RTX 3090; needs timm 0.6, takes seconds a model

Each section's figures are in benchmarks/data/published, with their sources; `--liger` and `--timm` read the publishers'
own CSV files instead. What is found is kept in `--results`, section by section, so that the page can be written without
running anything (`--page-only`); `images` and `timm` go on from what is kept.

Nothing is trained: programs and models run on fake tensors, and PyTorch's allocator is a model.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence

from benchmarks.kept_sections import read_sections, write_sections
from benchmarks.published import adapters, liger, models, old_timm, table, vision
from benchmarks.published.page import SECTIONS, Entry, to_markdown
from memscale import MemScaleError

DATA = pathlib.Path(__file__).parent.parent / "data" / "published"
DOCS = pathlib.Path(__file__).parent.parent.parent / "docs" / "results"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run_liger(options: argparse.Namespace, kept: Collection[str]) -> Iterator[Entry]:
    rows = liger.read_csv(options.liger) if options.liger else liger.read_table(DATA / "liger.json")
    return map(_liger_entry, liger.predict_all(rows, _say))


def _liger_entry(outcome: liger.Outcome) -> Entry:
    row = outcome.row
    return Entry(
        name=f"{row.kernel}, {row.mode}, {row.x_name} = {row.x}",
        card=row.card.removeprefix("NVIDIA "),
        published=f"{row.mib:.7g}",
        predicted=f"{outcome.predicted_mib:.7g}",
        difference=f"{(outcome.predicted_mib - row.mib) * 1024:+.1f} KiB",
        verdict=outcome.verdict,
        note=liger.KERNELS[row.kernel].note,
    )


def _run_table(options: argparse.Namespace, kept: Collection[str]) -> Iterator[Entry]:
    return map(_table_entry, table.predict_all(table.read_table(DATA / "table.json"), _say))


def _table_entry(outcome: table.Outcome) -> Entry:
    row, predicted = outcome.row, outcome.predicted
    allocated_gib = predicted.allocated_peak_bytes / table.GIB
    return Entry(
        name=f"{row.title}, {row.batch} x {row.length}",
        card="GeForce RTX 3090",
        published="out of memory" if row.gib is None else f"{row.gib:.2f} GiB",
        predicted=f"{allocated_gib:.4f} GiB, reserves {predicted.reserved_peak_bytes / table.GIB:.2f}",
        difference="-" if row.gib is None else f"{allocated_gib / row.gib - 1:+.2%}",
        verdict=outcome.verdict,
        note="",
    )


def _run_timm(options: argparse.Namespace, kept: Collection[str]) -> Iterator[Entry]:
    old_timm.load()
    rows = vision.read_csv(options.timm) if options.timm else vision.read_table(DATA / "timm.json")
    left = [row for row in vision.chosen(rows, options.others) if vision.name_of(row) not in kept]
    return map(vision.entry, vision.predict_all(left, _say))


def _run_images(options: argparse.Namespace, kept: Collection[str]) -> Iterator[Entry]:
    _need("diffusers", adapters.INSTALL)
    rows = [row for row in adapters.read_table(DATA / "peft_images.json") if row.name not in kept]
    return map(adapters.image_entry, adapters.predict_all(rows, adapters.predict_images, _say))


def _run_texts(options: argparse.Namespace, kept: Collection[str]) -> Iterator[Entry]:
    rows = adapters.read_table(DATA / "peft_llama.json")
    reference = adapters.predict_texts(next(row for row in rows if row.name == adapters.REFERENCE))
    for outcome in adapters.predict_all(rows, adapters.predict_texts, _say):
        yield adapters.text_entry(outcome, reference)


def _run_models(options: argparse.Namespace, kept: Collection[str]) -> Iterator[Entry]:
    _need("litgpt", models.INSTALL)
    return models.predict_all(models.read_table(DATA / "models.json"), _say)


def _need(package: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MemScaleError(f"this section needs {package}, which is no dependency of ours: {install}")


RUNS: dict[str, Callable[[argparse.Namespace, Collection[str]], Iterator[Entry]]] = {
    "liger": _run_liger,
    "table": _run_table,
    "images": _run_images,
    "texts": _run_texts,
    "models": _run_models,
    "timm": _run_timm,
}
LONG = ("images", "timm")
"""Sections that go on from what is kept."""


# ---- the command


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--only", nargs="+", choices=list(RUNS), help="these sections; the others keep their results")
    found.add_argument("--page-only", action="store_true", help="run nothing: write the page from what is kept")
    found.add_argument(
        "--results", type=pathlib.Path, default=DOCS / "published.json", help="what is found is kept here"
    )
    found.add_argument("--page", type=pathlib.Path, default=DOCS / "published.md", help="the page")
    found.add_argument("--liger", type=pathlib.Path, metavar="FILE", help="Liger's all_benchmark_data.csv")
    found.add_argument("--timm", type=pathlib.Path, metavar="FILE", help="a CSV of timm's sweep, with fits and fails")
    found.add_argument("--others", type=int, default=0, metavar="N", help="every Nth of timm's other models as well")
    found.add_argument("--anew", action="store_true", help="begin long sections anew, whatever is kept of them")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        sections = read_sections(options.results, Entry)
        for name in () if options.page_only else options.only or ("liger", "table"):
            _say(f"{name} ...")
            sections[name] = sections.get(name, []) if name in LONG and not options.anew else []
            for entry in RUNS[name](options, {entry.name for entry in sections[name]}):
                sections[name].append(entry)
                if name in LONG:
                    write_sections(options.results, sections, SECTIONS)
            write_sections(options.results, sections, SECTIONS)
        page = to_markdown(sections, {"timm": vision.inequality_lines})
        options.page.write_text(page)
    except (MemScaleError, OSError) as error:
        print(f"memscale: {error}", file=sys.stderr)
        return 2
    print(page.partition("\n## Rows")[0])
    return 0
