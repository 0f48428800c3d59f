"""Has a change of the planner changed plans? Plans of fourteen pairs of model and budget, compared to the byte.

    python -m benchmarks.same_plans FOLDER                      # before the change
    python -m benchmarks.same_plans OTHER --against FOLDER      # after it

A plan is written as JSON: its actions with their reasons, peaks, reserved bytes, slowdown and front; what fits no plan
is written as what the error says. Models have shapes and no weights. Cards are taken by their names, so that the same
plans come out on every machine; those for the processor go by what this one has. Exits with 1 where plans differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.planning import CASES, Case
from memscale import zoo
from memscale._config import Config
from memscale._errors import DoesNotFitError
from memscale._hardware import Hardware
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._profile.inputs import Inputs


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A model with its batch, and what its plan is to keep to."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    device: str
    config: Config


def _gpt2(num_blocks: int, width: int) -> nn.Module:
    shape = GPT2Config(n_layer=num_blocks, n_embd=width, n_head=8, vocab_size=8000, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        return GPT2LMHeadModel(shape).train()


def _llama(num_blocks: int, width: int) -> nn.Module:
    shape = LlamaConfig(
        num_hidden_layers=num_blocks,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8000,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(shape).train()


def _tokens(batch: int, length: int) -> Inputs:
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return Inputs((), {"input_ids": ids, "labels": ids})


def _of(case: Case, device: str, config: Config) -> Pair:
    return Pair(case.build, case.inputs, device, config)


def _within(gigabytes: float, **wishes: str) -> Config:
    return Config(memory_budget_gb=gigabytes, **wishes)  # type: ignore[arg-type]


LOWEST = Config(force_optimize=True)
BERT, DEEP = CASES["bert-base"], CASES["100 layers"]
PAIRS = {
    "bert-1.5": _of(BERT, "RTX 3090", _within(1.5)),
    "bert-2.2-conservative": _of(BERT, "RTX 3090", _within(2.2, mode="conservative")),
    "bert-lowest": _of(BERT, "RTX 3090", LOWEST),
    "bert-cpu": _of(BERT, "cpu", _within(2.0)),
    "bert-cpu-misfit": _of(BERT, "cpu", _within(1.2)),
    "gpt2-14-0.5": Pair(lambda: _gpt2(14, 512), lambda: _tokens(2, 256), "RTX 3090", _within(0.5)),
    "gpt2-14-lowest": Pair(lambda: _gpt2(14, 512), lambda: _tokens(2, 256), "RTX 3090", LOWEST),
    "gpt2-13-1.4": Pair(lambda: _gpt2(13, 1024), lambda: _tokens(4, 256), "RTX 3090", _within(1.4)),
    "gpt2-6-cpu": Pair(lambda: _gpt2(6, 256), lambda: _tokens(2, 256), "cpu", _within(0.2)),
    "llama-12-0.45": Pair(lambda: _llama(12, 512), lambda: _tokens(2, 256), "RTX 3070", _within(0.45)),
    "llama-12-0.35-aggressive": Pair(
        lambda: _llama(12, 512), lambda: _tokens(2, 256), "RTX 3070", _within(0.35, mode="aggressive")
    ),
    "gpt2-medium-2.61": Pair(lambda: zoo.build("gpt2-medium"), lambda: _tokens(4, 512), "RTX 3090", _within(2.61)),
    "gpt2-xl-9.25": Pair(lambda: zoo.build("gpt2-xl"), lambda: _tokens(1, 512), "RTX 3090", _within(9.25)),
    "100-layers-4": _of(DEEP, "RTX 3090", _within(4.0)),
}


def outcome_of(pair: Pair) -> str:
    hardware = Hardware.detect("cpu") if pair.device == "cpu" else Hardware.from_name(pair.device)
    try:
        return make_plan(Job(pair.build(), pair.config, hardware), pair.inputs()).to_json()
    except DoesNotFitError as error:
        return str(error)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_plans")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("--only", action="append", choices=list(PAIRS))
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    differ = []
    for name in asked.only or PAIRS:
        start = time.process_time()
        outcome = outcome_of(PAIRS[name])
        seconds = time.process_time() - start
        (asked.folder / f"{name}.json").write_text(outcome)
        verdict = ""
        if asked.against is not None:
            is_same = outcome == (asked.against / f"{name}.json").read_text()
            verdict = ", the same" if is_same else ", ANOTHER"
            differ += [] if is_same else [name]
        print(f"{name}: {seconds:.2f} s{verdict}", flush=True)
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
