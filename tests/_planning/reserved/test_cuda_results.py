"""Predictions held against what PyTorch's CUDA build took on the emulated card: `docs/results/cuda.json`.

The file is written by `make cuda` (`python -m emucuda.peaks --json docs/results/cuda.json`); these tests need neither
that build nor a card.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from memscale import AsyncOffloadConfig, Config, Hardware, zoo
from memscale._decide.policy import choose_strategy
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale.report.explain import what_is_done

RECORDED: list[dict[str, Any]] = json.loads(
    (pathlib.Path(__file__).parents[3] / "docs" / "results" / "cuda.json").read_text()
)["rows"]
ROWS = [row for row in RECORDED if "does_not_fit" not in row]
UNFIT = [row for row in RECORDED if "does_not_fit" in row]
"""Rows in which nothing that the mode allows fits the card."""
BATCHES = {
    "bert-base": (16, 128),
    "bert-large": (16, 128),
    "gpt2": (4, 256),
    "gpt2-lora": (4, 256),
    "gpt2-medium": (4, 512),
    "gpt2-large": (2, 512),
    "gpt2-xl": (1, 512),
}
IMAGES = {"vit-base": (16, 3, 224, 224), "resnet-50": (16, 3, 224, 224)}
NEEDS_A_CARD = {"gpt2-fused", "gpt2-autocast", "gpt2-trainer"}
"""Fused steps, and autocast of a card, are refused on a machine that has none: what was predicted there is all."""
IN_EVERY_RUN = {("gpt2", "plain"), ("gpt2", "conservative-sync")}


def cases() -> list[Any]:
    def lanes(row: dict[str, Any]) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] if (row["model"], row["mode"]) in IN_EVERY_RUN else [pytest.mark.full]

    rows = [row for row in ROWS if row["model"] not in NEEDS_A_CARD]
    return [pytest.param(row, id=f"{row['model']} {row['mode']}", marks=lanes(row)) for row in rows]


def built(name: str) -> nn.Module:
    if name == "resnet-50":
        return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    if name != "gpt2-lora":
        return zoo.build(name)
    config = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return peft.get_peft_model(zoo.build("gpt2"), config)  # type: ignore[arg-type]


def batch(name: str) -> dict[str, torch.Tensor]:
    if name in IMAGES:
        return {"pixel_values": torch.zeros(IMAGES[name]), "labels": torch.zeros(IMAGES[name][0], dtype=torch.long)}
    return {key: torch.zeros(BATCHES[name], dtype=torch.long) for key in ("input_ids", "labels")}


def check(row: dict[str, Any], kind: str, predicted_bytes: int, within: float) -> None:
    """Within a share of what was measured, and hardly below it."""
    assert -0.005 <= predicted_bytes / row[f"{kind}_bytes"] - 1 <= within


@pytest.mark.unit
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} {row['mode']}")
def test_what_was_predicted_there(row: dict[str, Any]) -> None:
    assert not row["out_of_memory"]
    check(row, "allocated", row["predicted_allocated_bytes"], 0.005)
    check(row, "reserved", row["predicted_reserved_bytes"], 0.03)
    assert row["versions"]["torch"].startswith("2.13.0")
    assert row["versions"]["commit"]
    assert not row["versions"]["commit"].endswith("-dirty"), "measured on changes that nobody has"


@pytest.mark.unit
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row["mode"] != "plain" and row["allocated_bytes"] > 1e9],
    ids=lambda row: f"{row['model']} {row['mode']}",
)
def test_little_is_reserved_above_what_is_allocated(row: dict[str, Any]) -> None:
    assert row["reserved_bytes"] <= 1.05 * row["allocated_bytes"]


@pytest.mark.unit
def test_a_mode_without_a_plan_that_fits_says_so() -> None:
    assert [(row["model"], row["mode"]) for row in UNFIT] == [("gpt2-xl", "conservative-sync")]
    assert "To fit, raise the budget to at least" in UNFIT[0]["does_not_fit"]
    assert UNFIT[0]["versions"]["commit"]


@pytest.mark.parametrize("row", cases())
def test_what_is_predicted_now(row: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = built(row["model"]).train()
    mode, _, travels = row["mode"].partition("-")
    config = Config(
        mode="balanced" if mode == "plain" else mode,
        async_offload=travels == "async",
        async_config=AsyncOffloadConfig(),  # the windows that were measured, not the smallest
        max_cpu_offload_gb=row.get("host_gb"),
        force_optimize=True,
        enable_logging=False,
    )
    job = Job(model, config, Hardware.from_name("RTX 3090"), "adamw")
    planner = Planner(job, Inputs((), batch(row["model"])))
    if mode == "plain":
        held = planner.held((), config)
        assert held is not None
        allocated_bytes, reserved_bytes = held.allocated_bytes, held.reserved_bytes
    else:
        plan = planner.plan(choose_strategy(planner.job.eligible.under(config)))
        assert what_is_done(plan) == row["what"], "another plan than the one that was measured: run `make cuda` again"
        assert plan.predicted_allocated_bytes is not None
        assert plan.predicted_reserved_bytes is not None
        allocated_bytes, reserved_bytes = plan.predicted_allocated_bytes, plan.predicted_reserved_bytes
    check(row, "allocated", allocated_bytes, 0.005)
    check(row, "reserved", reserved_bytes, 0.03)
