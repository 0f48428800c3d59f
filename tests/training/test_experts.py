"""Mixtures of experts are planned on fake tensors, and train as they do alone, on the CPU and on an accelerator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import memscale
import simgpu  # noqa: F401  before the first backward: autograd counts the devices then
from memscale import Config
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal, Rehearsal
from tests.lanes import in_turns
from tests.parity import attached_plan

FORCED = Config(mode="conservative", force_optimize=True, enable_logging=False)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "use_cache": False,
}


def build(name: str, implementation: str = "grouped_mm") -> nn.Module:
    torch.manual_seed(0)
    if name == "mixtral":
        config: Any = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    else:
        config = transformers.Qwen2MoeConfig(
            **SIZES, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
        )
    config._experts_implementation = implementation
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batch(device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = (torch.arange(48).reshape(3, 16) * 7 % 92 + 5).to(device)
    return {"input_ids": ids, "labels": ids}


def gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model(**inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "device"), in_turns(["mixtral", "qwen2_moe"], ["cpu", "simgpu"]))
def test_the_same_gradients_with_router_logits(name: str, device: str, simgpu_device: None) -> None:
    model, inputs = build(name).to(device), batch(device)
    plain = gradients(copy.deepcopy(model), inputs)
    memscale.wrap(model, FORCED, inputs)
    plan = attached_plan(model)
    assert plan.profile_source == "static"
    assert plan.actions
    ours = gradients(model, inputs)
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[key], ours[key]) for key in plain)
    assert len(model(**inputs).router_logits) == SIZES["num_hidden_layers"]
    memscale.detach(model)


class RealStep(Rehearsal):
    source = "empirical"
    is_fake = False


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_the_predicted_peak_covers_every_routing(implementation: str) -> None:
    model, inputs = build("mixtral", implementation), Inputs(kwargs=batch())
    predicted = FakeRehearsal(model, inputs, "cpu").run().peak_bytes
    for seed in range(4):
        for parameter in model.parameters():
            if parameter.shape == (4, 32):  # routers
                torch.manual_seed(seed)
                nn.init.normal_(parameter)
        measured = RealStep(model, inputs, "cpu", 1).run().peak_bytes
        assert measured <= predicted <= 1.25 * measured
