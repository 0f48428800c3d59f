"""Models and comparisons that the tiling tests share."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memscale._plan import TileAttention, TileHead, TileMlp
from memscale.techniques.tiling.attention import attach_attention
from memscale.techniques.tiling.head import attach_head
from memscale.techniques.tiling.head.lazy import LazyLogits
from memscale.techniques.tiling.mlp import attach_mlp

VOCABULARY, WIDTH, BATCH, LENGTH = 211, 32, 3, 17
TILE_ROWS = 7

LOSS_BOUND, GRADIENT_BOUND = 1e-6, 1e-5
"""What the documentation promises in fp32, relative."""


class Attached:
    """Tiling on a model, as the executor would put it there; for rehearsals, and as a context."""

    def __init__(self, model: nn.Module, *actions: Any) -> None:
        with contextlib.ExitStack() as undo:
            for action in actions:
                match action:
                    case TileHead():
                        attach_head(action, model, undo)
                    case TileMlp():
                        attach_mlp(action, model, undo)
                    case TileAttention():
                        attach_attention(action, model, undo)
            self.undo = undo.pop_all()

    def detach(self) -> None:
        self.undo.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: Any) -> None:
        self.detach()


class HandWritten(nn.Module):
    """A language model as people write them, with the loss outside."""

    def __init__(self, *, tied: bool = True, bias: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + (checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden))
        return hidden


class OwnProduct(HandWritten):
    """Its forward multiplies with the embedding itself."""

    def __init__(self, writing: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        del self.head
        self.writing = writing

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.writing(self.hidden(ids), self.embedding.weight)


def hugging_face(kind: str, **settings: Any) -> nn.Module:
    import transformers

    names = {
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64}),
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "bert": ("BertConfig", "BertForMaskedLM", {}),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, "num_key_value_heads": 2}),
        "t5": (
            "T5Config",
            "T5ForConditionalGeneration",
            {"d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        ),
    }
    config, model, own = names[kind]
    usual = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = own if kind in ("gpt2", "t5") else usual | own
    settings = {"vocab_size": VOCABULARY, **tokens, **sizes, **settings}
    return getattr(transformers, model)(getattr(transformers, config)(**settings))


HEADS = {
    "gpt2": "lm_head",
    "llama": "lm_head",
    "bert": "cls.predictions.decoder",
    "t5": "lm_head",
    "gemma2": "lm_head",
}


def tokens(seed: int = 1, batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def labels(batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    """About half of the positions ignored."""
    ignored = torch.rand(batch, length, generator=torch.Generator().manual_seed(2)) < 0.5
    return tokens(3, batch, length).masked_fill(ignored, -100)


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = build()
    return model, copy.deepcopy(model)


def flat_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def shifted_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    shifted = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
    return F.cross_entropy(shifted, target[..., 1:].contiguous().view(-1), ignore_index=-100)


@contextlib.contextmanager
def builds() -> Iterator[list[LazyLogits]]:
    """The lazy logits that were built meanwhile."""
    seen: list[LazyLogits] = []
    LazyLogits.on_build.append(seen.append)
    try:
        yield seen
    finally:
        LazyLogits.on_build.remove(seen.append)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    difference = (ours.detach().double() - theirs.detach().double()).norm()
    return float(difference / (theirs.detach().double().norm() + 1e-300))


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert relative(ours, theirs) <= bound, f"{relative(ours, theirs):.2e} over {bound:.0e}"


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, bound: float = GRADIENT_BOUND) -> None:
    """Relative to each parameter's own norm; gradients that are zero but for rounding (a key's bias) to all's."""
    mine, plain = gradients(ours), gradients(theirs)
    assert mine.keys() == plain.keys()
    size = sum(float(g.double().norm()) ** 2 for g in plain.values()) ** 0.5
    for name, expected in plain.items():
        floor = 1e-3 * size + 1e-300
        error = float((mine[name].double() - expected.double()).norm() / (expected.double().norm() + floor))
        assert error <= bound, f"gradient of {name} is off by {error:.2e}"
