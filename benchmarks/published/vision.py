"""timm's sweep of training on an RTX 3090: a model fits with one batch and runs out of memory with the next.

Each row is two inequalities: the peak at the batch that fits is at most what the card had for PyTorch, and that at the
next is more. Models run as they did under torch 1.12: attention as matrix products, fp16 autocast of the forward with
the rules of a card, SGD with momentum, parameter by parameter. Peaks are nearly linear in the batch: the model is
rehearsed with two small batches, and others are extrapolated.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.published.page import Entry
from memscale._planning.allocations import record_steps, reserved_of
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal

GB = 1e9
ROOM_BYTES = 22.6e9
"""Of 25.4 GB, what context (about 1.3 GB, all kernels loaded) and what the card keeps for itself leave: an estimate."""
BATCHES = (4, 8)
TRANSFORMERS = ("vit_", "deit", "beit", "swin", "mixer", "xcit", "cait", "crossvit", "convit", "pit_", "twins", "volo")
NUM_CLASSES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    model: str
    pixels: int
    layout: str
    """"nchw" or "nhwc": channels first or last."""
    fits: int
    fails: int

    @property
    def is_transformer(self) -> bool:
        return any(name in self.model for name in TRANSFORMERS)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    row: Row
    fits_bytes: float
    fails_bytes: float
    """The predicted peaks at both batches."""

    @property
    def num_held(self) -> int:
        return (self.fits_bytes <= ROOM_BYTES) + (self.fails_bytes > ROOM_BYTES)

    @property
    def verdict(self) -> str:
        if math.isnan(self.fits_bytes):
            return "missed: not predicted"
        if self.num_held == 2:
            return "holds"
        return "missed: said not to fit" if self.fits_bytes > ROOM_BYTES else "missed: said to fit"


class CardAutocast(TorchFunctionMode):
    """What a card's autocast computes in fp32, and a CPU's does not."""

    WIDE = frozenset((F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.WIDE and args[0].dtype == torch.float16:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


class Training(nn.Module):
    """A classifier with its loss, as the sweep trains it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16), CardAutocast():
            scores = self.model(images)
            return F.cross_entropy(scores.float(), labels)


def predict_all(rows: Sequence[Row], say: Callable[[str], None]) -> Iterator[Outcome]:
    """Rows of one model and size come together: it is rehearsed once."""
    for number, row in enumerate(rows, 1):
        if number % 10 == 1:
            say(f"[{number}/{len(rows)}] {row.model}")
        yield predict(row)


def predict(row: Row) -> Outcome:
    fixed_bytes, sample_bytes = _line_of(row.model, row.pixels)
    return Outcome(row, fixed_bytes + sample_bytes * row.fits, fixed_bytes + sample_bytes * row.fails)


@functools.cache
def _line_of(model: str, pixels: int) -> tuple[float, float]:
    """What a model needs at its peak whatever the batch, and for each sample; not a number where it does not run."""
    try:
        first, second = (_peak_bytes(model, pixels, batch) for batch in BATCHES)
    except Exception as error:  # a model that timm has no more, or whose step goes by values
        warnings.warn(f"{model} is not predicted: {error}", stacklevel=2)
        return math.nan, math.nan
    sample_bytes = (second - first) / (BATCHES[1] - BATCHES[0])
    return first - sample_bytes * BATCHES[0], sample_bytes


def _peak_bytes(name: str, pixels: int, batch: int) -> int:
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(False)
    with torch.device("meta"):
        model = Training(timm.create_model(name, num_classes=NUM_CLASSES))
    images = torch.empty(batch, 3, pixels, pixels, device="meta")
    labels = torch.empty(batch, dtype=torch.int64, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    rehearsal = FakeRehearsal(model, Inputs((images, labels), {}), "cuda")
    return reserved_of(record_steps(rehearsal, model, optimizer, num_steps=1), num_steps=2).allocated_peak_bytes


def entry(outcome: Outcome) -> Entry:
    row = outcome.row
    predicted = f"{outcome.fits_bytes / GB:.1f} and {outcome.fails_bytes / GB:.1f} GB"
    return Entry(
        name=name_of(row),
        card="GeForce RTX 3090",
        published=f"{row.fits} fits, {row.fails} fails",
        predicted=predicted,
        difference=f"{ROOM_BYTES / GB:.1f} GB",
        verdict=outcome.verdict,
        note="",
    )


def name_of(row: Row) -> str:
    return f"{row.model}, {row.pixels} px, {row.layout}"


# ---- the table of figures


def read_table(path: pathlib.Path) -> list[Row]:
    return [Row(*columns) for columns in json.loads(path.read_text())["rows"]]


def read_csv(path: pathlib.Path) -> list[Row]:
    """timm's columns, with `fits_batch` and `fails_batch`; rows that never failed say nothing."""
    layout = "nhwc" if "nhwc" in path.name else "nchw"
    with path.open(newline="") as file:
        return [
            Row(
                found["model"],
                int(found["train_img_size"]),
                layout,
                int(found["fits_batch"]),
                int(found["fails_batch"]),
            )
            for found in csv.DictReader(file)
            if found["fails_batch"]
        ]
