"""A small real text, character by character: about 1 MB of the King James Bible (1611, public domain).

Its source: the Debian package `bible-kjv-text` 4.38, whose copyright file says that the text's copyright is expired.
Genesis 1:1 to Judges 19:17, a verse a line, references left out.
"""

from __future__ import annotations

import importlib.resources
import lzma

import torch

_FILE = "king_james_bible.txt.xz"


def read_text() -> str:
    data = importlib.resources.files("memscale.benchmarks").joinpath("data", _FILE).read_bytes()
    return lzma.decompress(data).decode("ascii")


class Characters:
    """The text as numbers, and batches drawn from it."""

    def __init__(self, text: str | None = None) -> None:
        text = read_text() if text is None else text
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self.tokens = torch.tensor([index[character] for character in text], dtype=torch.long)

    def batch(self, step: int, rows: int, length: int) -> dict[str, torch.Tensor]:
        """The batch of this step: the same on every machine and in every run."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.tokens) - length, (rows,), generator=generator)
        ids = torch.stack([self.tokens[start : start + length] for start in starts.tolist()])
        return {"input_ids": ids, "labels": ids.clone()}
