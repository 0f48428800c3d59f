"""Predicted against published step times: figures that others measured on real cards, and what our time model says.

    python -m benchmarks.published_times [--only SECTION ...] [--results FILE] [--page FILE] [--timm FILE] [--most N]

Sections: `timm` (training steps of vision transformers on an RTX 3090; half a minute a model, and it goes on from what
is kept) and `torchao` (a ViT of 1.1 billion parameters on an RTX 4070 Ti SUPER with its optimizer offloaded, and our
plans at the same peaks). Figures are in benchmarks/data/published, with their sources; `--timm` reads the publisher's
own CSV file instead. Both sections need timm, which is no dependency of ours. What is found is kept in `--results`,
so that the page can be written without running anything (`--page-only`).

Nothing is trained: models run on fake tensors, and times are those of the model that plans are made by.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Collection, Iterator, Sequence

from benchmarks.kept_sections import read_sections, write_sections
from benchmarks.published_times import torchao, vision
from benchmarks.published_times.page import SECTIONS, Entry, to_markdown
from memscale import MemScaleError

DATA = pathlib.Path(__file__).parent.parent / "data" / "published"
DOCS = pathlib.Path(__file__).parent.parent.parent / "docs" / "results"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run_timm(options: argparse.Namespace, kept: Collection[str]) -> Iterator[Entry]:
    rows = vision.read_csv(options.timm) if options.timm else vision.read_table(DATA / "timm_times.json")
    left = [row for row in rows if row.name not in kept]
    return vision.predict_all(left[: options.most], _say)


def _run_torchao(options: argparse.Namespace, kept: Collection[str]) -> Iterator[Entry]:
    return torchao.predict_all(torchao.read_table(DATA / "torchao.json"), _say)


RUNS = {"timm": _run_timm, "torchao": _run_torchao}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.published_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--only", nargs="+", choices=list(RUNS), help="these sections; the others keep their results")
    found.add_argument("--page-only", action="store_true", help="run nothing: write the page from what is kept")
    found.add_argument(
        "--results", type=pathlib.Path, default=DOCS / "published_times.json", help="what is found is kept here"
    )
    found.add_argument("--page", type=pathlib.Path, default=DOCS / "published_times.md", help="the page")
    found.add_argument("--timm", type=pathlib.Path, metavar="FILE", help="a CSV of timm's sweep, with step times")
    found.add_argument("--most", type=int, metavar="N", help="no more than so many of timm's models in this run")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        sections = read_sections(options.results, Entry)
        chosen = () if options.page_only else options.only or tuple(RUNS)
        if chosen and importlib.util.find_spec("timm") is None:
            raise MemScaleError("these figures are of timm's models, which is no dependency of ours: pip install timm")
        for name in chosen:
            _say(f"{name} ...")
            found = sections[name] = sections.get(name, []) if name == "timm" else []
            for entry in RUNS[name](options, {entry.name for entry in found}):
                found.append(entry)
                write_sections(options.results, sections, SECTIONS)
        page = to_markdown(sections)
        options.page.write_text(page)
    except (MemScaleError, OSError) as error:
        print(f"memscale: {error}", file=sys.stderr)
        return 2
    print(page.partition("\n## Rows")[0])
    return 0
