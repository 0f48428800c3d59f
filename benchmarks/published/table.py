"""The published table: plain training of five models on an RTX 3090, AdamW, fp32; allocated at the peak, in GiB.

That its figures are GiB is an inference: as GB none of them can be had.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator

from memscale import Hardware, zoo
from memscale._planning.reserved.allocations import Reserved, reserved_of
from memscale._planning.reserved.recording import record_steps
from memscale._profile.inputs import Inputs, derive_inputs
from memscale._profile.rehearsal import FakeRehearsal

GIB = 1 << 30
CARD_BYTES = 24 * GIB


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    title: str
    name: str
    batch: int
    length: int
    gib: float | None
    """None: out of memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    row: Row
    predicted: Reserved

    @property
    def verdict(self) -> str:
        """Second decimals are what was published."""
        gib = self.predicted.allocated_peak_bytes / GIB
        if self.row.gib is None:
            return "exact" if self.predicted.reserved_peak_bytes > CARD_BYTES else "missed"
        if f"{gib:.2f}" == f"{self.row.gib:.2f}":
            return "exact"
        return "missed"


def read_table(path: pathlib.Path) -> list[Row]:
    return [Row(**entry) for entry in json.loads(path.read_text())["rows"]]


def predict_all(rows: list[Row], say: Callable[[str], None]) -> Iterator[Outcome]:
    for number, row in enumerate(rows, 1):
        say(f"[{number}/{len(rows)}] {row.title}")
        yield predict(row)


def predict(row: Row) -> Outcome:
    with zoo.quiet():
        model = zoo.build(row.name)
        inputs = derive_inputs(model, row.batch, row.length)
        assert inputs is not None
        # Batches of full length: on real tensors `transformers` skips a mask that hides nothing.
        unmasked = Inputs(
            inputs.args, {name: value for name, value in inputs.kwargs.items() if name != "attention_mask"}
        )
        rehearsal = FakeRehearsal(model, unmasked, "cuda")
        log = record_steps(rehearsal, model, "adamw", hardware=Hardware.from_name("RTX 3090"))
        return Outcome(row, reserved_of(log))
