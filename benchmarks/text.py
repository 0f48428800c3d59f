"""A small real text, character by character, and a small GPT-2 to learn it.

About 1 MB of the King James Bible (1611, public domain).

Its source: the Debian package `bible-kjv-text` 4.38, whose copyright file says that the text's copyright is expired.
Genesis 1:1 to Judges 19:17, a verse a line, references left out.
"""

from __future__ import annotations

import importlib.resources
import lzma
import statistics
import time

import torch
from torch import nn
from torch.optim import Optimizer

ROWS, LENGTH = 8, 64
"""A batch."""
TAIL = 20
"""The final loss is the mean over so many last steps."""
_FILE = "king_james_bible.txt.xz"


def read_text() -> str:
    data = importlib.resources.files("benchmarks").joinpath("data", _FILE).read_bytes()
    return lzma.decompress(data).decode("ascii")


class Characters:
    """The text as numbers, and batches drawn from it."""

    def __init__(self, text: str | None = None) -> None:
        text = read_text() if text is None else text
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self.tokens = torch.tensor([index[character] for character in text], dtype=torch.long)

    def batch(self, step: int, rows: int = ROWS, length: int = LENGTH) -> dict[str, torch.Tensor]:
        """The batch of this step: the same on every machine and in every run."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.tokens) - length, (rows,), generator=generator)
        ids = torch.stack([self.tokens[start : start + length] for start in starts.tolist()])
        return {"input_ids": ids, "labels": ids.clone()}


def build(vocabulary: int, width: int) -> nn.Module:
    """A GPT-2 of three layers, with the same weights every time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def learn(model: nn.Module, optimizer: Optimizer, text: Characters, steps: int) -> tuple[tuple[float, ...], float]:
    """Train for so many steps; the loss of each, and the seconds that all took."""
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(steps):
        loss = model(**text.batch(step)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses), time.perf_counter() - start


class Learned:
    """What two trainings are compared by; a dataclass that is one has `losses`."""

    __slots__ = ()
    losses: tuple[float, ...]

    @property
    def final_loss(self) -> float:
        return statistics.fmean(self.losses[-TAIL:])

    def distance(self, other: Learned) -> float:
        """Of the final losses, as a share of the other's."""
        return abs(self.final_loss - other.final_loss) / other.final_loss
