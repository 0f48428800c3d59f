"""The learned policy of stage 1: train it, and compare it with the rules on architectures that it was not trained on.

    python -m benchmarks.policy [--num N] [--seed S] [--jobs J] [--cache DIR] [--artifact FILE] [--plans P]

`--num` shapes are drawn, in turns from every family of models; each is profiled on fake tensors and gives some dozens
of cases: depths, cards, what users rule out, budgets. `--cache` keeps profiles and cases, and a second call goes on
from there. Each architecture's cases are then judged by trees that have seen none of it; the artifact is trained on all
of them and written where `--artifact` says. The same seed gives the same artifact. `--plans` draws so many other models
of every architecture and plans each in earnest, with everything eligible and as a policy says that has seen nothing of
its architecture, and compares the processor's time and the plans.

Times and peaks are predictions of the models that plans are made with; nothing is run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import multiprocessing
import pathlib
import random
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from benchmarks.policy import cases as case_module
from benchmarks.policy import shapes
from benchmarks.policy.cases import Case, draw_cases, feature_names, profile_hash
from benchmarks.policy.planned import plan_both_ways, planned_table
from benchmarks.policy.scores import Trained, compare, fit_policy, held_out_policies, scores_table
from memscale import _json
from memscale._decide.policy import features, strategies
from memscale._decide.policy.learned import FORMAT, Artifact
from memscale._decide.policy.trees import UNIT
from memscale._hardware import Hardware
from memscale._profile import Profile

Task = tuple[int, str, int, str]
"""The number of a shape, its family, the seed, the cache."""


def tasks(num: int, seed: int, cache: str) -> list[Task]:
    families = list(shapes.FAMILIES)
    return [(number, families[number % len(families)], seed, cache) for number in range(num)]


def cases_of(task: Task) -> list[Case]:
    """A pure function of the number, the family and the seed; kept until the code that makes them is another."""
    number, family, seed, cache = task
    name = f"{seed}-{family}-{number}"
    kept = pathlib.Path(cache) / f"{name}-{_code_hash()}.cases.json" if cache else None
    if kept is not None and kept.is_file():
        return [_json.decode(Case, case) for case in json.loads(kept.read_text())]
    profile = _profile_of(name, family, cache)
    cases = draw_cases(family, profile, f"{name}/{profile_hash(profile)[:16]}")
    if kept is not None:
        kept.write_text(json.dumps(_json.encode(cases)))
    return cases


def _profile_of(name: str, family: str, cache: str) -> Profile:
    path = pathlib.Path(cache) / f"{name}.json" if cache else None
    if path is not None and path.is_file():
        return Profile.from_json(path.read_text())
    torch.set_num_threads(1)
    profile = shapes.profile_shape(shapes.draw_shape(family, random.Random(name)))
    if path is not None:
        path.write_text(profile.to_json())
    return profile


def _code_hash() -> str:
    files = [pathlib.Path(str(module.__file__)) for module in (case_module, shapes, features, strategies)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def all_cases(todo: Sequence[Task], jobs: int) -> Iterator[list[Case]]:
    if jobs <= 1:
        yield from map(cases_of, todo)
        return
    # Spawned: a fork would copy torch's thread pools in an unknown state.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(cases_of, todo)


def gather(todo: Sequence[Task], jobs: int) -> list[Case]:
    start, cases = time.perf_counter(), []
    for done, found in enumerate(all_cases(todo, jobs), start=1):
        cases += found
        print(f"\r{done} of {len(todo)} shapes, {len(cases)} cases, {time.perf_counter() - start:.0f} s",
              end="", file=sys.stderr, flush=True)  # fmt: skip
    print(file=sys.stderr)
    return distinct(cases)


def distinct(cases: Sequence[Case]) -> list[Case]:
    """Without the cases of shapes whose profile is that of an earlier one: `group` is "shape/profile/setting"."""
    first_of: dict[str, str] = {}
    kept = []
    for case in cases:
        shape, profile, _ = case.group.split("/")
        if first_of.setdefault(profile, shape) == shape:
            kept.append(case)
    return kept


def train(cases: Sequence[Case], seed: int) -> Artifact:
    families = sorted({case.family for case in cases})
    num_models = len({case.group for case in cases})
    return artifact_of(
        fit_policy(cases),
        cases,
        f"{len(cases)} cases of {num_models} models on cards, seed {seed}: {', '.join(families)}",
    )


def artifact_of(trained: Trained, cases: Sequence[Case], trained_on: str) -> Artifact:
    names = feature_names()
    text = json.dumps([_json.encode(list(cases)), names], sort_keys=True)
    return Artifact(
        format=FORMAT,
        features=names,
        forests=trained.forests,
        threshold=trained.threshold,
        training_hash=hashlib.sha256(text.encode()).hexdigest(),
        trained_on=trained_on,
    ).sealed()


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.cache:
        pathlib.Path(options.cache).mkdir(parents=True, exist_ok=True)
    cases = gather(tasks(options.num, options.seed, options.cache), options.jobs)
    held_out = held_out_policies(cases)
    print(f"{Hardware.detect('cpu').describe()}; torch {importlib.metadata.version('torch')}\n")
    print(f"{scores_table(compare(cases, held_out))}")
    artifact = train(cases, options.seed)
    sure = artifact.threshold / UNIT
    print(f"\n{artifact.trained_on}\nthreshold {sure}, training hash {artifact.training_hash}", flush=True)
    if options.artifact:
        pathlib.Path(options.artifact).write_text(artifact.to_json())
    if options.plans:
        artifacts = {name: artifact_of(trained, (), f"without {name}") for name, trained in held_out.items()}
        print(f"\n{planned_table(list(plan_both_ways(artifacts, options.plans)))}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policy", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num", type=int, default=24, help="shapes of models to profile")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cache", default="", help="a directory that keeps profiles and cases")
    parser.add_argument("--artifact", default="", help="where to write the trained policy")
    parser.add_argument("--plans", type=int, default=0, help="models of every architecture to plan both ways")
    return parser.parse_args(arguments)
