"""A streamed model answers `model.device` with the device that it computes on."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, T5Config, T5ForConditionalGeneration

import memscale
from memscale._plan import StreamParameters
from memscale.techniques.offload.parameters import streaming
from tests.techniques.offload.runs import DEVICE

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


STREAMED = {gpt2: ("transformer.wte", "transformer.h.0"), t5: ("encoder.block.0", "decoder.block.0")}


def attach(model: PreTrainedModel, build: object) -> contextlib.ExitStack:
    undo = contextlib.ExitStack()
    streaming.attach([StreamParameters(fqn) for fqn in STREAMED[build]], model, DEVICE, undo)
    return undo


@pytest.mark.parametrize("build", STREAMED)
def test_a_streamed_model_and_its_parts_are_where_they_compute(build) -> None:
    model, other = build(), build()
    original = inspect.getattr_static(PreTrainedModel, "device")
    with attach(model, build):
        assert any(parameter.device.type == "cpu" for parameter in model.parameters())
        parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        assert {part.device for part in parts} == {DEVICE}
        assert other.device.type == "cpu"
        loss = model(IDS.to(model.device), labels=IDS.to(model.device), use_cache=False).loss
        loss.backward()
    assert inspect.getattr_static(PreTrainedModel, "device") is original
    assert model.device == next(model.parameters()).device


def test_it_generates_what_the_plain_model_generates() -> None:
    model = gpt2().eval()
    plain = copy.deepcopy(model).to(DEVICE)
    asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(IDS.to(plain.device), **asked)
    with attach(model, gpt2):
        found = model.generate(IDS.to(model.device), **asked)
    assert torch.equal(found.cpu(), expected.cpu())


def test_nothing_is_left_when_a_wrapped_model_goes_without_being_detached() -> None:
    original = inspect.getattr_static(PreTrainedModel, "device")
    model = gpt2().to(DEVICE)
    sample = {"input_ids": IDS.to(DEVICE), "labels": IDS.to(DEVICE)}
    memscale.wrap(model, memscale.Config(force_optimize=True, enable_logging=False), sample)
    assert inspect.getattr_static(PreTrainedModel, "device") is not original
    assert model.device == DEVICE
    del model, sample
    gc.collect()
    assert inspect.getattr_static(PreTrainedModel, "device") is original
