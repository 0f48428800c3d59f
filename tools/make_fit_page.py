"""Write the data of the page "Will it fit?": what models need, plain and in each mode, for a reader to pick from.

    python -m tools.make_fit_page                          profile what is not there yet, and write the page's data
    python -m tools.make_fit_page --only bert-base         one model
    python -m tools.make_fit_page --again --only gpt2      profile it anew, in the place of what is there
    python -m tools.make_fit_page --write                  write the page's data from the figures that are there

For each model and shape the step is profiled on fake tensors for one card, and its front of peak against time is kept,
for each mode, in docs/results/fit.json. The page takes the fastest point that fits the chosen card. That is an
estimate, for two reasons that the page states: reserved bytes of a point are its live bytes times the ratio that was
predicted for the plain step, or the largest that was seen of a wrapped one; and times are those of one card. `memscale
estimate` computes both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import table
from memscale import Config, Hardware, OptimizationMode, zoo
from memscale._decide.choice import Choice
from memscale._decide.eligible import resolve
from memscale._decide.policy import choose_strategy
from memscale._hardware.cards import KNOWN_CARDS
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import derive_inputs

ROOT = pathlib.Path(__file__).parent.parent
DATA = ROOT / "docs" / "results" / "fit.json"
MEASURED = ROOT / "docs" / "results" / "cuda.json"
SCRIPT = ROOT / "docs" / "start" / "fit_data.js"
CARD = "RTX 3090"
SHAPES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "bert-base": ((8, 128), (16, 128), (32, 128), (8, 512), (16, 512)),
    "gpt2": ((1, 512), (4, 512), (8, 512), (4, 1024), (8, 1024)),
    "gpt2-medium": ((4, 512), (1, 512), (4, 1024)),
    "llama-3.2-1b": ((1, 1024), (4, 1024)),
    "qwen2.5-0.5b": ((1, 1024), (4, 1024)),
    "bert-large": ((16, 128), (8, 512)),
    "vit-base": ((32, None), (64, None)),
    "vit-large": ((16, None), (32, None)),
    "gpt2-large": ((2, 512), (1, 1024)),
    "gpt2-xl": ((1, 512),),
    "sd-1.5-unet": ((1, None), (4, None)),
}
"""Batch and length; None: images."""


def largest_ratio() -> float:
    """Reserved over live bytes: the largest of such models' wrapped rows in docs/results/cuda.json."""
    families = tuple(name.partition("-")[0] for name in SHAPES)
    rows = json.loads(MEASURED.read_text())["rows"]
    fitting = [row for row in rows if row["model"].startswith(families) and "does_not_fit" not in row]
    wrapped = [row for row in fitting if row["mode"] != "plain"]
    return max(row["reserved_bytes"] / row["live_bytes"] for row in wrapped)


def expected_ratio(entry: dict[str, Any]) -> float:
    """What the page multiplies live bytes of an entry with."""
    return round(max(largest_ratio(), entry["reserved_bytes"] / entry["live_bytes"]), 4)


def profile(name: str, batch: int, length: int | None) -> dict[str, Any]:
    """One entry: the plain step, and the front of each mode. On a card where everything fits, so that all is looked at
    and nothing has to be rehearsed as a plan."""
    config = Config(enable_logging=False)
    card = Hardware.from_name(CARD)
    roomy = dataclasses.replace(card, total_bytes=10**12, free_bytes=10**12, host_available_bytes=10**12)
    with zoo.quiet():
        model = zoo.build(name)
        inputs = derive_inputs(model, batch, length)
        assert inputs is not None
        planner = Planner(Job(model, config, roomy), inputs)
        plain = planner.held((), config)
        assert plain is not None
        live = planner.cost_model().peak_of(planner.profile.plain, Choice())
        modes = {}
        for mode in OptimizationMode:
            strategy = choose_strategy(planner.job.eligible.replace(mode=mode))
            front = planner.peak_against_time(strategy, planner.plan(strategy)).front
            modes[mode.value] = [[point.peak_bytes, point.slowdown, point.what, point.is_exact] for point in front]
    entry = {
        "model": name,
        "batch": batch,
        "length": length,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "live_bytes": live,
        "reserved_bytes": plain.reserved_bytes,
        "modes": modes,
        "commit": table.commit(),
    }
    return {**entry, "reserved_over_live": expected_ratio(entry)}


def cards() -> list[dict[str, Any]]:
    """What each known card offers by default, when nothing else uses it."""
    found = [Hardware.from_name(card.name) for card in KNOWN_CARDS]
    return [
        {
            "name": hardware.device_name,
            "total_bytes": hardware.total_bytes,
            "budget_bytes": resolve(Config(), hardware).budget.device_bytes,
        }
        for hardware in found
    ]


def script(data: dict[str, Any]) -> str:
    """The data as the page loads it: a page that is opened from a folder may not fetch a file."""
    return f"window.FIT = {json.dumps({**data, 'cards': cards()}, separators=(',', ':'))};\n"


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {"card": CARD, "entries": []}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.make_fit_page", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted(SHAPES), default=list(SHAPES), metavar="MODEL")
    parser.add_argument("--again", action="store_true", help="profile also what is there")
    parser.add_argument("--write", action="store_true", help="profile nothing")
    options = parser.parse_args(argv)
    data = read()
    entries = {(entry["model"], entry["batch"], entry["length"]): entry for entry in data["entries"]}
    for name in [] if options.write else options.only:
        for batch, length in SHAPES[name]:
            if options.again or (name, batch, length) not in entries:
                print(f"{name}, {batch} x {length or 'images'} ...", file=sys.stderr, flush=True)
                entries[name, batch, length] = profile(name, batch, length)
                data["entries"] = list(entries.values())
                DATA.write_text(json.dumps(data, indent=1) + "\n")
    for entry in data["entries"]:
        entry["reserved_over_live"] = expected_ratio(entry)
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    SCRIPT.write_text(script(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
