"""The suite: small models of every kind that MemScale promises to train the same. Random weights, no downloads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, batches for it, and a loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    """Keyword inputs of training step number `n`."""
    loss: Callable[[Any], torch.Tensor]
    is_deep: bool = True
    """Checkpointing every block must lower the peak of such a model."""
    is_static: bool = True
    """Fake tensors suffice to profile it."""


# ---- hand-written models


class MlpBlock(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Mlp(nn.Module):
    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout2d(0.1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(self.dropout(out)))
        return self.relu(out + x)


class ResNet(nn.Module):
    def __init__(self, channels: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.stage1 = nn.Sequential(*(ResidualBlock(channels) for _ in range(depth)))
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.stage2 = nn.Sequential(*(ResidualBlock(2 * channels) for _ in range(depth)))
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.head(x.mean((2, 3)))


class DataDependent(Mlp):
    """Which way it goes depends on the values: fake tensors cannot tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if x.mean() < 10 else x * 0.5
        return self.head(x)


class NestedBlock(MlpBlock):
    def forward(self, state: dict[str, Any], *, scale: float, extras: tuple[Any, ...]) -> dict[str, Any]:  # type: ignore[override]
        mask, label = extras
        hidden = super().forward(state["hidden"]) * scale + mask
        return {"hidden": hidden, "trail": [*state["trail"], hidden.mean()], "label": label}


class Nested(nn.Module):
    """Dict inputs, keyword arguments, nested and non-tensor values through every layer."""

    def __init__(self, width: int = 64, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NestedBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, features: dict[str, torch.Tensor], label: str = "x") -> dict[str, Any]:
        state: dict[str, Any] = {"hidden": features["x"], "trail": [], "label": None}
        for layer in self.layers:
            state = layer(state, scale=0.9, extras=(features["mask"], label))
        return {"scores": (self.head(state["hidden"]), torch.stack(state["trail"])), "label": state["label"]}


# ---- cases


def _random(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def _tokens(step: int, vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(step))


def _square(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.square().mean()
    return loss


def _own_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def _text_batch(
    vocabulary: int, with_mask: bool = False, shape: tuple[int, int] = (4, 32)
) -> Callable[[int], dict[str, Any]]:
    def batch(step: int) -> dict[str, Any]:
        ids = _tokens(step, vocabulary, *shape)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if with_mask:
            batch["attention_mask"] = (torch.arange(shape[1]) < shape[1] - torch.arange(shape[0])[:, None]).long()
        return batch

    return batch


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256)
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0)
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=256,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.1,
            num_labels=10,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def _albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=256,
            embedding_size=32,
            hidden_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=256,
            hidden_dropout_prob=0.1,
        )
    )


def _frozen() -> nn.Module:
    model: Any = _gpt2()
    for parameter in [*model.transformer.wte.parameters(), *model.transformer.h[0].parameters()]:
        parameter.requires_grad_(False)
    return model


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def suite() -> tuple[Case, ...]:
    """Every model of the parity suite."""
    return (
        Case("mlp", Mlp, lambda n: {"x": _random(n, 64, 64)}, _square),
        Case("resnet", ResNet, lambda n: {"x": _random(n, 4, 3, 16, 16)}, _square),
        Case("transformer encoder", _encoder, lambda n: {"src": _random(n, 4, 32, 64)}, _square),
        Case("bert", _bert, _text_batch(256, with_mask=True), _own_loss),
        Case("gpt2", _gpt2, _text_batch(256), _own_loss),
        Case("t5", _t5, _text_batch(256), _own_loss),
        Case(
            "vit",
            _vit,
            lambda n: {"pixel_values": _random(n, 4, 3, 32, 32), "labels": _tokens(n, 10, 4)},
            _own_loss,
        ),
        Case("llama", _llama, _text_batch(256), _own_loss),
        Case("albert", _albert, _text_batch(256, with_mask=True), _own_loss),
        Case("frozen gpt2", _frozen, _text_batch(256), _own_loss),
        Case("lora llama", _lora, _text_batch(256), _own_loss),
        Case("data-dependent", DataDependent, lambda n: {"x": _random(n, 64, 64)}, _square, is_static=False),
        Case(
            "nested",
            Nested,
            lambda n: {"features": {"x": _random(n, 64, 64), "mask": _random(n + 1, 64, 64)}, "label": "x"},
            lambda output: output["scores"][0].square().mean() + output["scores"][1].square().mean(),
        ),
    )


def case(name: str) -> Case:
    return next(entry for entry in suite() if entry.name == name)
