"""Which architectures are profiled without being run: tiny models of transformers, timm and diffusers on fake tensors.

    python -m benchmarks.static_coverage [--library NAME] [--only NAME ...] [--seconds N] [--out FILE]

Every architecture that builds from the installed libraries with random weights, in a tiny configuration, is trained for
one real step; those that train are rehearsed on fake tensors. The table names those that are not profiled statically,
and what stopped them. What does not build or train here (an architecture that needs files, or other inputs than this
command can make up) is counted apart: nothing is said about it. No network is used.

Models are tried in a process of their own, which is ended and started again when one takes more than `--seconds`.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib.metadata
import importlib.util
import pathlib
import platform
import sys
import traceback
from typing import Any

import torch
from torch import nn

from benchmarks import architectures, trials
from benchmarks.architectures import LIBRARIES, called
from benchmarks.trials import said
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal, loss_of

SECONDS = 60


def try_architecture(library: str, name: str) -> dict[str, str]:
    """Its status (static, stopped, not built) and what stopped it."""
    reason = "no model class"
    for build in architectures.build(library, name):
        torch.manual_seed(0)
        try:
            model, inputs = build()
            model.train()
            _train_one_step(copy.deepcopy(model), inputs)
        except Exception as error:  # whatever a library raises on a configuration or inputs that it does not take
            reason = said(error)
            continue
        return _rehearse(model, inputs)
    return {"status": "not built", "why": reason}


def _train_one_step(model: nn.Module, inputs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    loss_of(called(model, inputs)).backward()


def _rehearse(model: nn.Module, inputs: dict[str, Any]) -> dict[str, str]:
    sample = Inputs(args=tuple(inputs.values())) if list(inputs) == ["x"] else Inputs(kwargs=inputs)
    try:
        FakeRehearsal(model, sample, "cpu").run()
    except Exception as error:  # this is what the table is about
        frames = traceback.extract_tb(error.__traceback__)
        places = [frame for frame in frames if any(f"/{library}/" in frame.filename for library in LIBRARIES)]
        where = f"{pathlib.Path(places[-1].filename).name}: {places[-1].line}" if places else ""
        return {"status": "stopped", "class": type(model).__name__, "why": said(error), "where": where}
    return {"status": "static", "class": type(model).__name__}


def measure(libraries: list[str], only: list[str], seconds: float, log: pathlib.Path | None) -> list[dict[str, str]]:
    cases = [(each, name) for each in libraries for name in architectures.names(each) if not only or name in only]
    found = trials.run("benchmarks.static_coverage", cases, seconds, log)
    return [{"library": library, "name": name, **found[library, name]} for library, name in cases]


def describe(results: list[dict[str, str]], missing: list[str]) -> str:
    lines = [
        "$ python -m benchmarks.static_coverage",
        f"Measured with torch {importlib.metadata.version('torch')}, Python {platform.python_version()}, "
        f"on {platform.machine()}.",
        "",
    ]
    lines += [f"{library} is not installed, so nothing of it was measured." for library in missing]
    for library in LIBRARIES:
        found = collections.Counter(r["status"] for r in results if r["library"] == library)
        trained, slow = found["static"] + found["stopped"], found["too slow"] + found["ended"]
        if trained:
            share = f"{100 * found['static'] / trained:.1f} %"
            lines.append(
                f"{library}: {found['static']} of {trained} architectures that train in a tiny configuration are "
                f"profiled statically ({share}). {found['not built']} more do not build or train with made-up inputs, "
                f"and {slow} took too long or ended the process, in building, training or rehearsal."
            )
    stopped = [result for result in results if result["status"] == "stopped"]
    lines += ["", "Not profiled statically:" if stopped else "All of them are profiled statically."]
    for result in stopped:
        lines.append(f"  {result['library']} {result['name']} ({result['class']}): {result['why']}")
        if result.get("where"):
            lines.append(f"      at {result['where']}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="only this one; default: all")
    parser.add_argument("--only", nargs="*", default=[], help="only these architectures")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at most so long for one of them")
    parser.add_argument("--out", type=pathlib.Path, help="write the table here, too")
    parser.add_argument("--log", type=pathlib.Path, help="one line a result; what is in it is not tried again")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return trials.serve(try_architecture)
    wanted = options.library or list(LIBRARIES)
    missing = [library for library in wanted if importlib.util.find_spec(library) is None]
    results = measure([name for name in wanted if name not in missing], options.only, options.seconds, options.log)
    text = describe(results, missing)
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
