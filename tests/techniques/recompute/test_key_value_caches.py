"""Key-value caches in training: the bits of the plain model as it comes, and no memory for what nobody reads."""

from __future__ import annotations

import copy
import json
import pathlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import DynamicCache

import memscale
import simgpu  # noqa: F401  # the device
from memscale._execute.executor import execute, executor_of
from memscale._execute.settings import ExecutionSettings
from memscale._measurement import measure
from memscale._plan import StreamParameters
from memscale._profile.layers import find_blocks
from memscale.techniques.recompute import key_value_caches
from tests.parity import SELECTIVE, checkpoint_all, plan_of

TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4, "attn_implementation": "eager"},
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64}),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
}


def build(family: str, **settings: Any) -> Any:
    config, model, sizes = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**TOKENS, **sizes, **settings)).train()


def batch(rows: int = 13, length: int = 7) -> dict[str, torch.Tensor]:
    """Shapes for which the kernels of keys with and without a cache differ in the last bits."""
    ids = torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> list[torch.Tensor]:
    """The loss and all gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**inputs, **kwargs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("keep", [(), SELECTIVE])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_bits_of_the_model_as_it_comes(family: str, keep: Any) -> None:
    model = build(family)
    plain = copy.deepcopy(model)
    executor = checkpoint_all(model, keep)
    for length in (7, 5):
        assert same(step(model, batch(length=length)), step(plain, batch(length=length)))
    assert executor.stats().num_recomputes > 0
    executor.detach()
    assert same(step(model, batch()), step(plain, batch()))


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_bits_of_a_streamed_model(family: str) -> None:
    device = torch.device("simgpu")
    model = build(family)
    plain = copy.deepcopy(model).to(device)
    plan = plan_of(StreamParameters(module_fqn) for module_fqn in find_blocks(model))
    executor = execute(model, plan, ExecutionSettings(device=device))
    for length in (7, 5):
        inputs = {name: tensor.to(device) for name, tensor in batch(length=length).items()}
        ours, theirs = ([t.cpu() for t in step(each, inputs)] for each in (model, plain))
        assert same(ours, theirs)
    executor.detach()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "t5"])
def test_the_cases_tell_the_two_ways_apart(family: str) -> None:
    """Without this the test above would say nothing."""
    model = build(family)
    assert not same(step(model, batch()), step(model, batch(), use_cache=False))


@pytest.mark.parametrize("part", ["whole", "inner"])
def test_a_plan_made_in_the_first_forward(part: str) -> None:
    """The forward that is planned in follows already, also where the model itself makes the cache."""
    model = build("gpt2") if part == "whole" else build("gpt2").transformer
    inputs = batch() if part == "whole" else {"input_ids": batch()["input_ids"]}
    plain = copy.deepcopy(model)
    memscale.wrap(model, memscale.Config(mode="conservative", force_optimize=True, enable_logging=False))
    for _ in range(2):
        outputs = [each(**inputs)[0] for each in (model.eval(), plain.eval())]
        for output in outputs:
            output.sum().backward()
        assert torch.equal(*outputs)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is theirs.grad is None or torch.equal(ours.grad, theirs.grad)


def test_packed_sequences_are_masked_as_in_the_plain_model() -> None:
    """With a cache, position ids that start anew make no mask: without one they would, and it is another loss."""
    model = build("gpt2")
    plain = copy.deepcopy(model)
    packed = {**batch(), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(13, -1)}
    checkpoint_all(model)
    assert same(step(model, packed), step(plain, packed))
    assert not torch.allclose(step(plain, packed)[0], step(plain, packed, use_cache=False)[0], rtol=1e-5)


def test_a_part_of_the_model_called_by_itself() -> None:
    model = build("gpt2")
    plain = copy.deepcopy(model)
    executor = checkpoint_all(model)

    def run(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        hidden = model.transformer(batch()["input_ids"]).last_hidden_state
        model.lm_head(hidden).square().mean().backward()
        return [hidden.detach(), *(p.grad.clone() for p in model.parameters())]

    assert same(run(model), run(plain))
    assert executor.stats().num_recomputes == 2


def test_what_is_forgotten_has_its_length_and_no_memory() -> None:
    model = build("gpt2")
    checkpoint_all(model)
    cache = model(**batch()).past_key_values
    assert cache.get_seq_length() == 7
    for layer in cache.layers:
        assert layer.keys.device.type == layer.values.device.type == "meta"
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            layer.keys + torch.zeros(1)


def test_the_peak_is_that_of_a_run_without_caches() -> None:
    """Apart from one block's keys and values, laid out anew."""
    peaks = {}
    for use_cache in (True, False):
        model = build("gpt2", use_cache=use_cache)
        checkpoint_all(model)
        inputs = batch(16, 64)
        with measure("cpu") as measured:
            outputs = model(**inputs)
            outputs.loss.backward()
            del outputs
        peaks[use_cache] = measured.peak_bytes
    one_block = 2 * 16 * 64 * 32 * 4
    assert peaks[True] - peaks[False] <= 2 * one_block


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_predicted_peak_is_the_measured_one(family: str) -> None:
    model = build(family)
    inputs = batch(16, 64)
    config = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False)
    memscale.wrap(model, config, sample_input=inputs)
    executor = executor_of(model)
    assert executor is not None
    assert executor.plan is not None
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with measure("cpu") as measured:
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert measured.peak_bytes == pytest.approx(executor.plan.predicted_peak_bytes, rel=0.02)


def test_the_callers_own_cache_is_filled_as_ever() -> None:
    model = build("gpt2")
    plain = copy.deepcopy(model)
    checkpoint_all(model)
    found = []
    for each in (model, plain):
        cache = DynamicCache(config=each.config)
        ids = batch()["input_ids"]
        expected = pytest.warns(UserWarning, match="key-value cache") if each is model else warnings.catch_warnings()
        with expected:
            torch.manual_seed(1)
            first = each(input_ids=ids[:, :4], past_key_values=cache)
            second = each(input_ids=ids[:, 4:], past_key_values=cache)
        (first.logits.sum() + second.logits.square().sum()).backward()
        gradients = [p.grad for p in each.parameters()]
        found.append([cache.layers[1].keys.detach(), second.logits.detach(), *gradients])
    assert same(*found)


def test_generation_has_its_cache_while_wrapped() -> None:
    model = build("gpt2")
    plain = copy.deepcopy(model)
    checkpoint_all(model)
    ids = batch()["input_ids"][:2]
    with torch.no_grad():
        cache = model.eval()(ids).past_key_values
    assert cache.layers[0].keys.device.type == "cpu"
    ours, theirs = (each.eval().generate(ids, max_new_tokens=4, do_sample=False) for each in (model, plain))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_config_is_the_users_while_wrapped(family: str, tmp_path: pathlib.Path) -> None:
    model = build(family)
    before = model.config.to_json_string()
    executor = checkpoint_all(model)
    assert model.config.to_json_string() == before
    model.config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("use_cache", True) is True
    executor.detach()
    assert model.config.to_json_string() == before


def test_an_error_in_a_forward_leaves_no_frame() -> None:
    model = build("gpt2")
    plain = copy.deepcopy(model)
    checkpoint_all(model)
    handle = model.transformer.h[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch())
    handle.remove()
    assert key_value_caches._forwards.frame is None
    assert same(step(model, batch()), step(plain, batch()))


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# ---- caches of other kinds


class OwnCache:
    """A cache that nobody knows."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.keys)


class OwnBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: OwnCache | None = None) -> torch.Tensor:
        x = self.linear(x)
        if cache is not None:
            cache.keys.append(x)
            x = x * len(cache.keys)
        return F.gelu(x) if self.config.use_cache else x.tanh()


class OwnConfig:
    use_cache = True


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = OwnConfig()
        self.blocks = nn.ModuleList(OwnBlock(self.config) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = OwnCache() if self.config.use_cache else None
        for block in self.blocks:
            x = block(x, cache)
        return x


def test_an_unknown_cache_is_switched_off_in_training_and_that_is_said_once() -> None:
    """Blocks that ask the config see the same in the recompute, and the user never sees it changed."""
    model = OwnModel()
    plain = copy.deepcopy(model)
    plain.config.use_cache = False
    with pytest.warns(UserWarning, match="exact against the plain model with `use_cache=False`") as said:
        executor = checkpoint_all(model)
    assert len(said) == 1
    x = torch.randn(4, 8)
    for each in (model, plain):
        each(x).square().sum().backward()
        assert each.config.use_cache is (each is model)
    assert executor.stats().num_recomputes == 3
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        assert not torch.equal(model(x), plain(x)), "evaluation is the user's"
    model.config.use_cache = False  # by the user
    executor.detach()
    assert model.config.use_cache is False


def test_a_cache_that_is_off_is_not_spoken_of() -> None:
    model = OwnModel()
    model.config.use_cache = False
    checkpoint_all(model)
    checkpoint_all(build("gpt2", use_cache=False))
