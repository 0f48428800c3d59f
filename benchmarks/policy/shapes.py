"""Models of many shapes, each profiled once at a depth of three blocks and stretched to any other.

Profiling takes its time on fake tensors, most of it in blocks that are all alike. So models are built with three: the
middle one stands for all that are left out (as in `_profile/shallow.py`), and parameters and the optimizer's state grow
with their number. Nothing is downloaded; the numbers below are drawn, not those of real models.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale import Config, zoo
from memscale._hardware import Hardware
from memscale._hardware.cards import KNOWN_CARDS
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile import OptimizerCost, Profile, Segment, StepTrace
from memscale._profile.inputs import Inputs, derive_inputs

NUM_BLOCKS = 3
DEPTHS = (3, 6, 12)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One model and its batch; a pure function of these numbers."""

    family: str
    device_type: str
    width: int
    heads: int
    inner: int
    vocabulary: int
    batch: int
    length: int
    num_blocks: int = NUM_BLOCKS


Numbers = dict[str, Any]


def _gpt2(s: Shape) -> Numbers:
    return {"vocab_size": s.vocabulary, "n_positions": s.length, "n_layer": s.num_blocks, "n_embd": s.width,
            "n_head": s.heads, "n_inner": s.inner}  # fmt: skip


def _usual(s: Shape) -> Numbers:
    return {"vocab_size": s.vocabulary, "max_position_embeddings": s.length, "num_hidden_layers": s.num_blocks,
            "hidden_size": s.width, "num_attention_heads": s.heads, "intermediate_size": s.inner}  # fmt: skip


def _grouped(s: Shape) -> Numbers:
    return {**_usual(s), "num_key_value_heads": max(1, s.heads // 4), "tie_word_embeddings": False}


def _tied(s: Shape) -> Numbers:
    return {**_usual(s), "num_key_value_heads": max(1, s.heads // 2), "tie_word_embeddings": True}


def _bloom(s: Shape) -> Numbers:
    return {"vocab_size": s.vocabulary, "n_layer": s.num_blocks, "hidden_size": s.width, "n_head": s.heads}


def _t5(s: Shape) -> Numbers:
    return {"vocab_size": s.vocabulary, "num_layers": s.num_blocks, "num_decoder_layers": s.num_blocks,
            "d_model": s.width, "num_heads": s.heads, "d_kv": s.width // s.heads, "d_ff": s.inner,
            "decoder_start_token_id": 0}  # fmt: skip


def _distilbert(s: Shape) -> Numbers:
    return {"vocab_size": s.vocabulary, "max_position_embeddings": s.length, "n_layers": s.num_blocks,
            "dim": s.width, "n_heads": s.heads, "hidden_dim": s.inner}  # fmt: skip


def _vit(s: Shape) -> Numbers:
    return {"image_size": 16 * max(4, int(s.length**0.5)), "patch_size": 16, "num_hidden_layers": s.num_blocks,
            "hidden_size": s.width, "num_attention_heads": s.heads, "intermediate_size": s.inner,
            "num_labels": 1000}  # fmt: skip


FAMILIES: dict[str, tuple[str, str, Callable[[Shape], Numbers]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _gpt2),
    "bert": ("BertConfig", "BertForMaskedLM", _usual),
    "bert-classifier": ("BertConfig", "BertForSequenceClassification", _usual),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _grouped),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _tied),
    "phi": ("PhiConfig", "PhiForCausalLM", _usual),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _usual),
    "bloom": ("BloomConfig", "BloomForCausalLM", _bloom),
    "t5": ("T5Config", "T5ForConditionalGeneration", _t5),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _tied),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", _distilbert),
    "vit": ("ViTConfig", "ViTForImageClassification", _vit),
}
"""By family: its config, its model, and the numbers of a shape as its config calls them."""


ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "encoder": ("bert", "bert-classifier", "distilbert"),
    "decoder": ("gpt2", "phi", "gpt-neox", "bloom"),
    "decoder with gates": ("llama", "qwen2", "gemma"),
    "encoder and decoder": ("t5",),
    "vision": ("vit",),
}
"""Families that are built alike: a policy is judged on one of these after it was trained on the others."""


def architecture_of(family: str) -> str:
    return next((name for name, families in ARCHITECTURES.items() if family in families), family)


def draw_shape(family: str, rng: random.Random) -> Shape:
    head_width = rng.choice((64, 64, 128))
    width = head_width * rng.choice((4, 6, 8, 12, 16, 20, 24, 32))
    return Shape(
        family=family,
        device_type="cpu" if rng.random() < 0.2 else "cuda",
        width=width,
        heads=width // head_width,
        inner=round(width * rng.choice((2.75, 4.0, 4.0))),
        vocabulary=rng.choice((8000, 32000, 32000, 50304, 128256)),
        batch=2 ** rng.randrange(0, 6),
        length=rng.choice((128, 256, 512, 512, 1024, 2048)),
    )


def build(shape: Shape) -> tuple[nn.Module, Inputs]:
    config_name, model_name, numbers_of = FAMILIES[shape.family]
    transformers = zoo.load_transformers()
    with zoo.quiet(), torch.device("meta"):
        config = getattr(transformers, config_name)(**numbers_of(shape))
        model = getattr(transformers, model_name)(config).train()
    inputs = derive_inputs(model, shape.batch, shape.length)
    assert inputs is not None
    return model, inputs


def profile_shape(shape: Shape) -> Profile:
    """With every technique tried that is exact and soon found out."""
    model, inputs = build(shape)
    config = Config(offload_dir=".", enable_logging=False, enable_tiling=True)
    with zoo.quiet():
        planner = Planner(Job(model, config, hardware_for(shape.device_type)), inputs)
        planner.levels(planner.job.eligible)[0](planner.job.eligible)
    return planner.profile


def hardware_for(device_type: str) -> Hardware:
    """Any card will do: a profile depends on its kind alone."""
    card = Hardware.from_name("RTX 3090")
    if device_type != "cpu":
        return card
    return dataclasses.replace(
        card, device_type="cpu", device_name="CPU", architecture="any", disk_free_bytes=10**12,
        fp32_flops=3.2e11, half_flops=8e10, memory_bytes_per_s=2e10, link_bytes_per_s=1e9, has_fast_16bit=False,
    )  # fmt: skip


def draw_hardware(device_type: str, rng: random.Random) -> Hardware:
    """A card with some host beside it, or a CPU with some disk below it."""
    host_bytes = rng.choice((64, 128, 256, 512)) * 10**9
    if device_type == "cpu":
        cores = rng.choice((2, 4, 8, 16, 32))
        has_fast_16bit = rng.random() < 0.3
        fp32_flops = 3e10 * cores
        return dataclasses.replace(
            hardware_for("cpu"),
            disk_free_bytes=rng.choice((None, 10**11, 10**12)),
            fp32_flops=fp32_flops,
            has_fast_16bit=has_fast_16bit,
            half_flops=fp32_flops * (4.0 if has_fast_16bit else 0.25),
            memory_bytes_per_s=rng.choice((1.2e10, 2.5e10, 1e11)),
            link_bytes_per_s=rng.choice((5e8, 2e9)),
        )
    card = Hardware.from_name(rng.choice(KNOWN_CARDS).name)
    return dataclasses.replace(card, host_total_bytes=host_bytes, host_available_bytes=host_bytes)


# ---- depth


def stretch(profile: Profile, depth: int) -> Profile:
    """The profile of a model with so many blocks in each container."""
    if depth == NUM_BLOCKS:
        return profile
    added = [_Container(name, depth) for name in _containers(profile)]
    by_name = {layer.module_fqn: layer for layer in profile.layers}
    layers = [layer for layer in profile.layers if not any(c.owns(layer.module_fqn) for c in added)]
    for container in added:
        blocks = [by_name[container.name(old)] for old in container.old_positions]
        renamed = [dataclasses.replace(b, module_fqn=container.name(new)) for new, b in enumerate(blocks)]
        layers += renamed
    before = sum(layer.trainable_bytes for layer in profile.layers)
    growth = sum(layer.trainable_bytes for layer in layers) / before
    more_bytes = sum(layer.param_bytes for layer in layers) - sum(layer.param_bytes for layer in profile.layers)
    linear_step = profile.device_type != "cpu"  # a device steps all parameters at once, a CPU one by one
    inside = profile.inside
    for container in added:
        inside = tuple(copy for action in inside for copy in container.actions(action))
    return dataclasses.replace(
        profile,
        parameter_bytes=profile.parameter_bytes + more_bytes,
        layers=tuple(layers),
        optimizer=_grown(profile.optimizer, growth, linear_step),
        eight_bit_optimizer=profile.eight_bit_optimizer and _grown(profile.eight_bit_optimizer, growth, False),
        plain=_stretched(profile.plain, added),
        variants={name: _stretched(trace, added) for name, trace in profile.variants.items()},
        inside=inside,
    )


def _containers(profile: Profile) -> list[str]:
    names = [layer.module_fqn.rpartition(".")[0] for layer in profile.layers if layer.is_block]
    return [name for name in dict.fromkeys(names) if names.count(name) == NUM_BLOCKS]


@dataclasses.dataclass(frozen=True, slots=True)
class _Container:
    fqn: str
    depth: int

    def name(self, position: int) -> str:
        return f"{self.fqn}.{position}"

    def owns(self, module_fqn: str) -> bool:
        return f"{module_fqn}.".startswith(f"{self.fqn}.") and module_fqn != self.fqn

    @property
    def old_positions(self) -> list[int]:
        """Which of the traced blocks stands at each position."""
        return [0, *[1] * (self.depth - 2), 2]

    def new_positions(self, old: int) -> list[int]:
        return [new for new, stands_in in enumerate(self.old_positions) if stands_in == old]

    def actions(self, action: Any) -> list[Any]:
        for old in range(NUM_BLOCKS):
            prefix = f"{self.name(old)}."
            if action.module_fqn.startswith(prefix):
                rest = action.module_fqn[len(prefix) :]
                names = [f"{self.name(new)}.{rest}" for new in self.new_positions(old)]
                return [dataclasses.replace(action, module_fqn=name) for name in names]
        return [action]


def _stretched(trace: StepTrace, containers: list[_Container]) -> StepTrace:
    segments = trace.segments
    for container in containers:
        first, middle, last = (container.name(old) for old in range(NUM_BLOCKS))
        end = container.name(container.depth - 1)
        segments = _renamed(segments, last, end)
        extra = [container.name(position) for position in range(2, container.depth - 1)]
        start, stop = _first(segments, "forward", middle), _first(segments, "forward", end)
        copies = [s for name in extra for s in _renamed(segments[start:stop], middle, name)]
        segments = (*segments[:stop], *copies, *segments[stop:])
        start, stop = _first(segments, "backward", middle), _first(segments, "backward", first)
        copies = [s for name in reversed(extra) for s in _renamed(segments[start:stop], middle, name)]
        segments = (*segments[:start], *copies, *segments[start:])
    return StepTrace(segments)


def _renamed(segments: tuple[Segment, ...], old: str, new: str) -> tuple[Segment, ...]:
    return tuple(dataclasses.replace(s, module_fqn=new) if s.module_fqn == old else s for s in segments)


def _first(segments: tuple[Segment, ...], phase: str, module_fqn: str) -> int:
    return next(i for i, s in enumerate(segments) if (s.phase, s.module_fqn) == (phase, module_fqn))


def _grown(cost: OptimizerCost, growth: float, linear_step: bool) -> OptimizerCost:
    return dataclasses.replace(
        cost,
        state_bytes=round(cost.state_bytes * growth),
        step_bytes=round(cost.step_bytes * growth) if linear_step else cost.step_bytes,
        moved_bytes=round(cost.moved_bytes * growth),
        offloaded_state_bytes=round(cost.offloaded_state_bytes * growth),
        bucket_bytes=tuple(round(size * growth) for size in cost.bucket_bytes),
    )
