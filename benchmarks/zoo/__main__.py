"""Every architecture at hand, trained under MemScale and plain; the table says where the two are the same.

    python -m benchmarks.zoo [--library NAME] [--way NAME] [--only NAME ...] [--shuffle SEED] [--turns N]
                             [--seconds N] [--log FILE] [--out FILE] [--report]

Architectures are those of `benchmarks.architectures` (tiny models of transformers, timm and diffusers, where they are
installed) and of PyTorch's own tests of its modules and optimizers. Each is trained for three steps of AdamW (of its
own optimizer in the last suite), detached, and trained for one more, beside a plain copy. Losses, gradients, weights,
buffers, optimizer state and random states are compared bit for bit, in every way of `benchmarks.zoo.ways` but tiling,
whose sums are in another order and are held to a bound; what misses it is trained again in double precision, where the
bound holds for sums whose terms cancel, too.

`exact` is the same training; `refused` is an error of MemScale's own; `plain` means that the plain model cannot be
used: it does not build or train here, or its second run differs from its first. `WRONG` is a difference, `crashed`
another error or the end of the process. Results go to `--log`, one line a trial, and what is there is not tried again.
One architecture is tried in all ways before the next, so that its plain training is shared; with `--shuffle` what was
tried when the run is stopped is a fair sample. With `--turns N` an architecture is tried in N of the ways, and the next
in the N that follow. `--report` tries nothing and prints the table of a log, also of a run that was stopped.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import gc
import importlib.metadata
import importlib.util
import pathlib
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator

import torch

import memscale
from benchmarks import architectures, trials
from benchmarks.architectures import called
from benchmarks.trials import Result, said
from benchmarks.zoo import torch_suites
from benchmarks.zoo.twins import STEPS, Subject, Training, differences, largest_error, seed
from benchmarks.zoo.ways import ROUNDING, ROUNDING_IN_DOUBLE, WAYS, Way, plan_of, treat
from memscale._execute.executor import executor_of

SUITES = (*architectures.LIBRARIES, torch_suites.MODULES, torch_suites.OPTIMIZERS)
DEVICES = {way.device for way in WAYS.values()}
SECONDS = 120
STATUSES = ("exact", "refused", "plain", "WRONG", "crashed", "too slow")


# ---- one of them


def attempt(suite: str, name: str, way: str) -> Result:
    """Its status, what the plan did, and what was wrong."""
    import simgpu  # noqa: F401  (before the first backward: autograd makes its threads then)

    where = WAYS[way]
    try:
        subject, expected = plain_twin(suite, name, where.device)
    except Exception as error:  # whatever a library raises on a configuration or inputs that it does not take
        return {"status": "plain", "why": said(error)}
    result = compare(subject, expected, where)
    if result["status"] == "refused" and where.otherwise is not None:
        result = compare(subject, expected, dataclasses.replace(where, actions=where.otherwise))
    if result["status"] == "WRONG" and not where.exact:
        in_double = subject.in_double()
        result = compare(in_double, _trained(in_double.on(where.device)), where, ROUNDING_IN_DOUBLE)
    if result["status"] == "WRONG":
        again = differences(_trained(subject.on(where.device)), expected)
        if again:
            return {"status": "plain", "why": f"its second run differs from its first: {again[0]}"}
    return {"class": type(subject.model).__name__, **result}


@functools.lru_cache(maxsize=2)  # one for each device
def plain_twin(suite: str, name: str, device: str) -> tuple[Subject, dict[str, object]]:
    reasons: list[Exception] = []
    if _may_freeze():
        gc.unfreeze()
    for build in _builders(suite, name):
        seed(0)
        try:
            subject = build()
            subject.model.train()
            _set_aside()
            expected = _trained(subject.on(device))
        except Exception as error:
            reasons.append(error)
            continue
        if not all(bool(torch.isfinite(torch.as_tensor(expected[f"loss of step {n}"])).all()) for n in range(STEPS)):
            reasons.append(ValueError("its loss is not finite"))
            continue
        return subject, expected
    raise ValueError(" / ".join(dict.fromkeys(said(reason)[:75] for reason in reasons)) or "no model class")


def _set_aside() -> None:
    """What libraries have made, and this model, which is only copied, are nothing that a search through all objects for
    an optimizer has to come by: with transformers imported, such searches took most of a planned trial."""
    if _may_freeze():
        gc.collect()
        gc.freeze()


@functools.cache
def _may_freeze() -> bool:
    """Not where somebody else has frozen objects, as the tests do: to take back ours would take back theirs."""
    return gc.get_freeze_count() == 0


def _builders(suite: str, name: str) -> Iterator[Callable[[], Subject]]:
    if suite in architectures.LIBRARIES:
        for build in architectures.build(suite, name):
            yield functools.partial(_subject, build, suite == "transformers")
    else:
        yield functools.partial(torch_suites.build, suite, name)


def _subject(build: Callable[[], architectures.Built], takes_keywords: bool) -> Subject:
    return Subject(*build(), called, takes_keywords=takes_keywords)


def _trained(subject: Subject) -> dict[str, object]:
    training = Training(subject)
    for _ in range(STEPS + 1):
        training.step()
    return training.result()


def compare(subject: Subject, expected: dict[str, object], way: Way, rounding: float = ROUNDING) -> Result:
    """Train a copy of the subject under MemScale, detach it, and go on for a step."""
    ours = subject.on(way.device)
    done: Result = {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            seed(0)
            treat(way, ours, directory)
            training = Training(ours)
            for _ in range(STEPS):
                training.step()
            done["actions"] = _actions(ours)
            memscale.detach(ours.model)
            training.step()
            result = training.result()
        except memscale.MemScaleError as error:
            return {"status": "refused", "why": said(error), **done}
        except Exception as error:
            return {"status": "crashed", "why": said(error), **done}
        finally:
            if executor_of(ours.model) is not None:
                memscale.detach(ours.model)
    if way.exact:
        wrong = differences(result, expected)
        why = f"{len(wrong)} of {len(expected)}: {wrong[0]}" if wrong else ""
    else:
        off = largest_error(result, expected)
        why = f"off by {off:.1e}" if off > rounding else ""
    return {"status": "WRONG" if why else "exact", "why": why, **done}


def _actions(subject: Subject) -> str:
    counts = collections.Counter(type(action).__name__ for action in plan_of(subject.model).actions)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


# ---- all of them


def measure(
    cases: Iterable[tuple[str, str]],
    ways: list[str],
    seconds: float,
    log: pathlib.Path | None,
    turns: int | None = None,
) -> dict[tuple[str, ...], Result]:
    """Results by suite, name and way. What cannot be trained plain on a device is not tried there in other ways, and
    what takes too long is not tried further."""
    results: dict[tuple[str, ...], Result] = {}
    with trials.Trials("benchmarks.zoo", seconds, log) as each:
        for number, case in enumerate(cases):
            unusable = set()
            for way in ways_of(number, ways, turns):
                if WAYS[way].device not in unusable:
                    result = results[(*case, way)] = each.run((*case, way))
                    if result["status"] == "plain":  # what the host cannot train no device can
                        unusable |= {WAYS[way].device} if WAYS[way].device != "cpu" else DEVICES
                    elif result["status"] == "too slow":
                        break
    return results


def ways_of(number: int, ways: list[str], turns: int | None) -> list[str]:
    """The ways in which the architecture of this number is tried: `turns` of them, which go on where the last ended."""
    if turns is None:
        return ways
    return [ways[(number * turns + place) % len(ways)] for place in range(min(turns, len(ways)))]


def _chosen(suites: Iterable[str], options: argparse.Namespace) -> list[tuple[str, str]]:
    found = []
    for suite in suites:
        names = architectures.names(suite) if suite in architectures.LIBRARIES else torch_suites.names(suite)
        found += [(suite, name) for name in names[:: options.every] if not options.only or name in options.only]
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(found)
    return found


def describe(results: dict[tuple[str, ...], Result], missing: list[str]) -> str:
    """The table, what the plans did, and each trial that was not exact."""
    lines = [
        "$ python -m benchmarks.zoo",
        f"torch {importlib.metadata.version('torch')}, transformers {importlib.metadata.version('transformers')}, "
        f"Python {platform.python_version()}, on {platform.machine()}.",
        *(f"{library} is not installed, so nothing of it was tried." for library in missing),
        "",
        f"{'suite':13} {'way':13} {'tried':>6} "
        + " ".join(f"{status:>8}" for status in STATUSES)
        + "  exact of usable",
    ]
    groups = dict.fromkeys((suite, way) for suite, _, way in results)
    for suite, way in groups:
        found = collections.Counter(
            "crashed" if r["status"] == "ended" else r["status"]
            for (s, _, w), r in results.items()
            if (s, w) == (suite, way)
        )
        usable = sum(found.values()) - found["plain"] - found["too slow"]
        share = f"{100 * found['exact'] / usable:.1f} %" if usable else ""
        counts = " ".join(f"{found[status]:8}" for status in STATUSES)
        lines.append(f"{suite:13} {way:13} {sum(found.values()):6} {counts}  {share:>15}")
    lines += ["", "What the plans did, in exact trials:"]
    lines += [f"  {way}: {_techniques(results, way)}" for way in dict.fromkeys(way for _, way in groups)]
    for status in ("WRONG", "crashed", "refused", "too slow", "ended"):
        there = [(case, result) for case, result in results.items() if result["status"] == status]
        lines += ["", f"{status}:"] if there else []
        lines += [f"  {' '.join(case)} ({result.get('class', '')}): {result['why']}" for case, result in there]
    return "\n".join(lines) + "\n"


def _techniques(results: dict[tuple[str, ...], Result], way: str) -> str:
    found: collections.Counter[str] = collections.Counter()
    for (_, _, each), result in results.items():
        if each == way and result["status"] == "exact":
            found.update(action.split()[1] for action in result.get("actions", "").split(", ") if action)
    return ", ".join(f"{kind} in {count}" for kind, count in found.most_common())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=SUITES, action="append", help="only this suite; default: all")
    parser.add_argument("--way", choices=list(WAYS), action="append", help="only this way; default: all")
    parser.add_argument("--only", nargs="*", default=[], help="only these architectures")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th of each suite")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="in a random order")
    parser.add_argument("--turns", type=int, metavar="N", help="each architecture in N of the ways, in turns")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at most so much of the processor for one trial")
    parser.add_argument("--out", type=pathlib.Path, help="write the table here, too")
    parser.add_argument("--log", type=pathlib.Path, help="one line a trial; what is in it is not tried again")
    parser.add_argument("--report", action="store_true", help="try nothing: the table of what is in the log")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return trials.serve(attempt)
    wanted = options.library or list(SUITES)
    missing = [suite for suite in wanted if suite in architectures.LIBRARIES and not importlib.util.find_spec(suite)]
    there = [suite for suite in wanted if suite not in missing]
    ways = options.way or list(WAYS)
    if options.report:
        known = trials.known(options.log)
        results = {case: known[case] for case in sorted(known) if case[0] in there and case[2] in ways}
    else:
        results = measure(_chosen(there, options), ways, options.seconds, options.log, options.turns)
    text = describe(results, missing)
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)
    return 1 if any(result["status"] in ("WRONG", "crashed", "ended") for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
