"""Whole models by others: LitGPT's LoRA runs on an A100 (allocated), and Hugging Face's BERT-Large on a V100.

LitGPT: bf16, LoRA of rank 8 on queries and values, AdamW, losses of 128 positions at a time. It is measured with the
longest of its texts; the figures are `max_memory_allocated`. Hugging Face: fp32, AdamW parameter by parameter,
attention as matrix products; the figures are nvidia-smi's: reserved memory and the context, whose size the page gives.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.published.page import Entry
from memscale import Hardware
from memscale._planning.reserved.allocations import Reserved, reserved_of
from memscale._planning.reserved.recording import record_steps
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal

GB = 1e9
INSTALL = "pip install --no-deps litgpt==0.4.1"
CHUNK = 128
A100_BYTES = 40 << 30
CONTEXT_BYTES = 1343 << 20
"""On the V100, as the page says it."""
SHARE = 0.03


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    family: str
    """"litgpt" or "bert"."""
    name: str
    batch: int
    length: int
    gb: float | None
    """None: out of memory."""


class ChunkedLoss(nn.Module):
    """LitGPT's model gives its logits in parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        from litgpt.utils import chunked_cross_entropy  # type: ignore[import-not-found, unused-ignore]

        parts = list(self.model(words, lm_head_chunk_size=CHUNK))
        parts[-1] = parts[-1][..., :-1, :]
        loss: torch.Tensor = chunked_cross_entropy(parts, words[..., 1:])
        return loss


def _litgpt(row: Row) -> tuple[nn.Module, Inputs, Any]:
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable  # type: ignore[import-not-found, unused-ignore]

    config = Config.from_name(row.name, lora_r=8, lora_alpha=16, lora_dropout=0.05, lora_query=True, lora_value=True)
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
    mark_only_lora_as_trainable(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    words = torch.empty(row.batch, row.length, dtype=torch.int64, device="meta")
    return ChunkedLoss(model), Inputs((words,)), torch.optim.AdamW(trained)


def _bert(row: Row) -> tuple[nn.Module, Inputs, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    numbers = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("meta"):
        config = BertConfig(vocab_size=28_996, attn_implementation="eager", **numbers)
        model: Any = BertForSequenceClassification(config)
    if "checkpointed" in row.name:
        model.gradient_checkpointing_enable()
    words = torch.empty(row.batch, row.length, dtype=torch.int64, device="meta")
    inputs = {"input_ids": words, "labels": torch.empty(row.batch, dtype=torch.int64, device="meta")}
    return model, Inputs(kwargs=inputs), torch.optim.AdamW(model.parameters(), foreach=False)


def predict(row: Row) -> Reserved:
    build, card = (_litgpt, "A100") if row.family == "litgpt" else (_bert, "V100")
    model, inputs, optimizer = build(row)
    rehearsal = FakeRehearsal(model, inputs, "cuda")
    rehearsal.holds_gradients = "accumulated" in row.name
    return reserved_of(record_steps(rehearsal, model, optimizer, hardware=Hardware.from_name(card)))


def predict_all(rows: Sequence[Row], say: Callable[[str], None]) -> Iterator[Entry]:
    for number, row in enumerate(rows, 1):
        say(f"[{number}/{len(rows)}] {row.name}, {row.batch} x {row.length}")
        yield entry(row, predict(row))


def entry(row: Row, predicted: Reserved) -> Entry:
    is_bert = row.family == "bert"
    found = predicted.reserved_peak_bytes + CONTEXT_BYTES if is_bert else predicted.allocated_peak_bytes
    return Entry(
        name=f"BERT-Large, {row.name}" if is_bert else f"{row.name}, LoRA, {row.batch} x {row.length}",
        card="V100" if is_bert else "A100 40GB",
        published="out of memory" if row.gb is None else f"{row.gb} GB",
        predicted=f"{found / GB:.2f} GB",
        difference="-" if row.gb is None else f"{found / GB / row.gb - 1:+.1%}",
        verdict=_verdict(row, found, predicted),
        note="",
    )


def _verdict(row: Row, found: int, predicted: Reserved) -> str:
    if row.gb is None:
        return "holds" if predicted.reserved_peak_bytes > A100_BYTES else "missed"
    return f"within {SHARE:.0%}" if abs(found / GB / row.gb - 1) <= SHARE else "missed"


def read_table(path: pathlib.Path) -> list[Row]:
    return [Row(**found) for found in json.loads(path.read_text())["rows"]]
