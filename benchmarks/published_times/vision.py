"""timm's sweep of training on an RTX 3090: how long a step takes, transformers first.

Models run as they did under torch 1.12: attention as matrix products, fp16 autocast of the forward with the rules of a
card, SGD with momentum, parameter by parameter. A step is rehearsed with the batch that was measured.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.published.vision import NUM_CLASSES, TRANSFORMERS, Training
from benchmarks.published_times.page import Entry
from memscale import Hardware
from memscale._decide.step_time import Moved, Pace
from memscale._profile import OptimizerCost, StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.optimizer_twin import SteppedModel, optimizer_cost
from memscale._profile.rehearsal import FakeRehearsal

CARD = "RTX 3090"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    model: str
    pixels: int
    batch: int
    step_ms: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.pixels} px, batch {self.batch}"


def predict_all(rows: Sequence[Row], say: Callable[[str], None]) -> Iterator[Entry]:
    """Models that timm has no more, or whose step goes by values, are left out with a word."""
    hardware = Hardware.from_name(CARD)
    for number, row in enumerate(rows, 1):
        say(f"[{number}/{len(rows)}] {row.model}")
        try:
            trace, optimizer = rehearse(row)
        except Exception as error:
            warnings.warn(f"{row.model} is not predicted: {error}", stacklevel=2)
            continue
        yield entry_of(row, trace, optimizer, hardware)


def entry_of(row: Row, trace: StepTrace, optimizer: OptimizerCost, hardware: Hardware) -> Entry:
    return Entry(row.name, CARD, row.step_ms, round(step_ms(trace, optimizer, hardware), 1))


def step_ms(trace: StepTrace, optimizer: OptimizerCost, hardware: Hardware) -> float:
    """Forward, backward and the optimizer's step of a plain model."""
    pace = Pace(hardware)
    passes_ms = sum(pace.busy_ms([segment]) for segment in trace.segments)
    stepped_ms = pace.slowest_ms(pace.memory_ms(optimizer.launched_bytes), optimizer.num_launches, Moved())
    return passes_ms + float(stepped_ms)


def rehearse(row: Row) -> tuple[StepTrace, OptimizerCost]:
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(False)
    with torch.device("meta"):
        model = Training(timm.create_model(row.model, num_classes=NUM_CLASSES))
    images = torch.empty(row.batch, 3, row.pixels, row.pixels, device="meta")
    labels = torch.empty(row.batch, dtype=torch.int64, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    trace = FakeRehearsal(model, Inputs((images, labels), {}), "cuda").run()
    return trace, optimizer_cost(SteppedModel(model, optimizer, "cuda"))


# ---- the table of figures


def read_table(path: pathlib.Path) -> list[Row]:
    return [Row(*columns) for columns in json.loads(path.read_text())["rows"]]


def read_csv(path: pathlib.Path) -> list[Row]:
    """timm's columns; transformers only."""
    with path.open(newline="") as file:
        return [
            Row(
                found["model"],
                int(found["train_img_size"]),
                int(found["train_batch_size"]),
                float(found["train_step_time"]),
            )
            for found in csv.DictReader(file)
            if any(name in found["model"] for name in TRANSFORMERS)
        ]
