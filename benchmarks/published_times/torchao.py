"""torchao's table: a ViT of 1.1 billion parameters whose optimizer steps on the host, and our plans at the same peaks.

How the others work, in the terms of the time model: the plain step checkpoints every block. torchao sends gradients to
the host while backward goes on, steps there beside it, and fetches the parameters; an untuned ZeRO-Offload does one
after the other. With gradients offloaded, they are freed as they leave, which takes no time of its own.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.published_times.page import Entry
from memscale import Config, Hardware
from memscale._decide.choice import Choice
from memscale._decide.policy import choose_strategy
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile import CHECKPOINT
from memscale._profile.inputs import Inputs
from memscale.report.explain import what_is_done

CARD = "RTX 4070 Ti SUPER"
MODEL, PIXELS, BATCH, NUM_CLASSES = "vit_giant_patch14_dinov2", 224, 32, 45
HOST_BYTES = 32 * 10**9
GB = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    title: str
    manner: str
    """"plain", "side by side" or "one after the other"."""
    step_s: float
    gb: float
    is_peer: bool
    """Whether our plan is compared at this peak."""


class Training(nn.Module):
    """A classifier with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(images), labels)


def read_table(path: pathlib.Path) -> list[Row]:
    return [Row(**entry) for entry in json.loads(path.read_text())["rows"]]


def predict_all(rows: Sequence[Row], say: Callable[[str], None]) -> Iterator[Entry]:
    planner, config = open_planner(), Config(async_offload=True, enable_logging=False)
    say("the plain step")
    planner.look_into_everything(planner.job.eligible.under(config.replace(mode="conservative")))
    model = planner.cost_model()
    checkpointed = model.evaluate(Choice(tuple((fqn, CHECKPOINT) for fqn in model.blocks)))
    for row in rows:
        predicted_ms = peer_ms(row.manner, checkpointed.step_ms, planner)
        yield Entry(row.title, CARD, row.step_s * 1e3, round(predicted_ms, 1), f"{row.gb} GB allocated")
        if row.is_peer:
            say(f"our plan at {row.gb} GB")
            yield our_entry(row, planner, config.replace(memory_budget_gb=row.gb))


def open_planner() -> Planner:
    import timm

    with torch.device("meta"):
        model = Training(timm.create_model(MODEL, img_size=PIXELS, num_classes=NUM_CLASSES)).bfloat16()
    images = torch.empty(BATCH, 3, PIXELS, PIXELS, dtype=torch.bfloat16, device="meta")
    labels = torch.empty(BATCH, dtype=torch.int64, device="meta")
    hardware = dataclasses.replace(
        Hardware.from_name(CARD),
        host_total_bytes=HOST_BYTES,
        host_available_bytes=HOST_BYTES,
        has_caching_allocator=False,  # the table has allocated bytes, so ours are bounded by them, too
    )
    config = Config(async_offload=True, enable_logging=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # as in their script, for all of their rows
    return Planner(Job(model, config, hardware, optimizer), Inputs((images, labels), {}))


def peer_ms(manner: str, checkpointed_ms: float, planner: Planner) -> float:
    """See above. The device's own step of the optimizer is in the plain time alone."""
    hardware, profile, model = planner.hardware, planner.profile, planner.cost_model()
    if manner == "plain":
        return checkpointed_ms
    on_device_ms = float(model.optimizer.step_ms(Choice().run, 0))
    passes_ms, link = checkpointed_ms - on_device_ms, hardware.link_bytes_per_s
    out_ms, in_ms = (size / link * 1e3 for size in (profile.trainable_bytes, profile.parameter_bytes))
    assert hardware.host_bytes_per_s is not None
    on_host_ms = profile.optimizer.moved_bytes / hardware.host_bytes_per_s * 1e3
    if manner == "side by side":
        return max(passes_ms, out_ms, on_host_ms) + in_ms
    return passes_ms + out_ms + on_host_ms + in_ms


def our_entry(row: Row, planner: Planner, config: Config) -> Entry:
    plan = planner.plan(choose_strategy(planner.job.eligible.under(config)))
    plain_ms = planner.cost_model().evaluate(Choice()).step_ms
    ours_ms = plain_ms * plan.predicted_slowdown
    verdict = "no slower than the peer measured" if ours_ms <= row.step_s * 1e3 else "slower than the peer measured"
    reserved = "" if plan.predicted_reserved_bytes is None else f", {plan.predicted_reserved_bytes / GB:.2f} reserved"
    note = f"{plan.predicted_peak_bytes / GB:.2f} GB live{reserved}; {verdict}; {what_is_done(plan)}"
    fits = "" if plan.fits else " (does not fit)"
    return Entry(f"our plan within {row.gb} GB{fits}", CARD, 0.0, round(ours_ms, 1), note)
