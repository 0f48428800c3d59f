"""Random models under random plans train bit for bit as their plain copies do, or are refused with a sentence.

    make fuzz EXAMPLES=2000        # new ones, for as long as it takes

`make test` tries the same few in every run. What is found becomes an `@example`.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.zoo.twins import Subject, Training, differences
from memscale._config import AsyncOffloadConfig
from memscale._errors import MemScaleError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, OffloadActivations, OffloadOptimizer, StepInBuckets, StreamParameters
from memscale._profile.layers import find_blocks
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.parameters.streaming import rest_of
from tests.training.random_models import DESCRIPTIONS, Description, Layer, build

EXAMPLES = int(os.environ.get("MEMSCALE_FUZZ_EXAMPLES", "30"))
STEPS = 3
SELECTIVE = ("matmul", "attention")
BUCKET_BYTES = 600
TREATMENTS: dict[str, Any] = {
    "keep": lambda fqn: [],
    "checkpoint": lambda fqn: [Checkpoint(fqn)],
    "selective": lambda fqn: [Checkpoint(fqn, keep=SELECTIVE)],
    "offload": lambda fqn: [OffloadActivations(fqn)],
    "checkpoint and offload": lambda fqn: [Checkpoint(fqn), OffloadActivations(fqn)],
    "stream": lambda fqn: [StreamParameters(fqn)],
    "stream and offload": lambda fqn: [StreamParameters(fqn), OffloadActivations(fqn)],
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}
DROPPED_AND_SHARED = Description(
    (Layer("twice", (Layer("drops layers"),)), Layer("custom")), form="tensor", link="shared block"
)
STREAMED_AND_EVALUATED = {
    "treatments": ["stream"] * 3,
    "streams the rest": False,
    "state": "none",
    "asynchronous": False,
    "device": "simgpu",
    "optimizer": "SGD",
    "evaluates": True,
}


@st.composite
def plans(draw: Any) -> dict[str, Any]:
    """What is done to which block, beside the blocks, and how it travels."""
    on_device = draw(st.booleans())
    known = [name for name in TREATMENTS if on_device or "stream" not in name]
    return {
        "treatments": draw(st.lists(st.sampled_from(known), min_size=3, max_size=3)),
        "streams the rest": on_device and draw(st.booleans()),
        "state": draw(st.sampled_from(["none", "buckets", "offload"])),
        "asynchronous": draw(st.booleans()),
        "device": "simgpu" if on_device else "cpu",
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "evaluates": draw(st.booleans()),
    }


def actions_of(model: nn.Module, plan: dict[str, Any]) -> list[Action]:
    blocks = list(find_blocks(model))
    treatments = plan["treatments"]
    found: list[Action] = [a for n, fqn in enumerate(blocks) for a in TREATMENTS[treatments[n % 3]](fqn)]
    if plan["streams the rest"]:
        found += [StreamParameters(fqn) for fqn in rest_of(model, blocks)]
    if plan["state"] == "buckets":
        found.append(StepInBuckets(BUCKET_BYTES))
    elif plan["state"] == "offload":
        found.append(OffloadOptimizer(BUCKET_BYTES))
    if any(isinstance(action, StreamParameters) for action in found):
        found.append(StepOnDevice(BUCKET_BYTES))
    return sorted(found, key=lambda action: type(action).__name__)


def trained(subject: Subject) -> dict[str, Any]:
    training = Training(subject)
    for _ in range(STEPS):
        training.step()
    return training.result()


def subject_of(description: Description, plan: dict[str, Any]) -> Subject:
    ids = torch.arange(8).reshape(2, 4) * 3 % 16
    make = OPTIMIZERS[plan["optimizer"]]
    return Subject(
        build(description),
        {"ids": ids},
        evaluated_and_trained if plan["evaluates"] else lambda model, inputs: model(**inputs),
        lambda model: make([p for p in model.parameters() if p.requires_grad]),
    )


def evaluated_and_trained(model: nn.Module, inputs: dict[str, Any]) -> list[Any]:
    """Two forwards before one backward; what the second writes past autograd, the first has saved."""
    model.eval()
    first = model(**inputs)
    model.train()
    return [first, model(**inputs)]


def check(description: Description, plan: dict[str, Any]) -> str:
    """Whether it was trained the same or refused; raises where it was trained differently."""
    subject = subject_of(description, plan)
    try:
        expected = trained(subject.on(plan["device"]))
    except (RuntimeError, NotImplementedError):
        return "not usable plain"
    ours = subject.on(plan["device"])
    with tempfile.TemporaryDirectory() as directory:
        transfers = AsyncOffloadConfig(min_tensor_bytes=0, window_bytes=2048, prefetch_bytes=2048)
        executor = Executor(
            ours.model,
            ExecutionSettings(
                torch.device(plan["device"]),
                asynchronous=plan["asynchronous"],
                async_config=transfers,
                offload_dir=directory,
            ),
        )
        try:
            executor.attach(actions_of(ours.model, plan))
            found = trained(ours)
        except MemScaleError as refusal:
            return f"refused: {str(refusal)[:60]}"
        finally:
            executor.detach()
        assert not list(pathlib.Path(directory).iterdir())
    wrong = differences(found, expected)
    assert not wrong, f"{len(wrong)} of {len(expected)} differ: {wrong[:4]}"
    return "the same"


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(DESCRIPTIONS, plans())
@example(DROPPED_AND_SHARED, STREAMED_AND_EVALUATED)
def test_it_trains_the_same_or_is_refused(description: Description, plan: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = check(description, plan)
    event(outcome)
    assume(outcome != "not usable plain")
