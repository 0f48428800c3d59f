"""What the command line says of memory: the three numbers, the host and the disk."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memscale import Hardware, OptimizationMode
from memscale._hardware.footprints import footprint_of
from memscale._plan import Checkpoint, OffloadOptimizer
from memscale._planning.questions.estimate import Estimate, ModeEstimate
from memscale.report import doctor, terminal
from memscale.techniques.loss_by_rows import LossByRows
from tests.parity import plan_of

pytestmark = pytest.mark.unit
CARD = Hardware.from_name("RTX 3090")
GB = 10**9


def estimate_of(*, host_bytes: int = 0, disk_bytes: int = 0, reserves: bool = True) -> Estimate:
    numbers: dict[str, Any] = {"baseline_peak_bytes": 6 * GB, "predicted_peak_bytes": 3 * GB}
    if reserves:
        held = ("predicted_allocated_bytes", "predicted_reserved_bytes", "predicted_total_bytes")
        numbers |= {name: (4 + index) * GB for index, name in enumerate(held)}
    entry = ModeEstimate(3 * GB, 1.5, True, None, host_bytes, disk_bytes, plan_of([], **numbers))
    held_bytes: dict[str, Any] = {}
    if reserves:
        held_bytes = {f"baseline_{kind}_bytes": n * GB for kind, n in (("allocated", 7), ("reserved", 8), ("total", 9))}
    return Estimate(
        baseline_peak_bytes=6 * GB,
        breakdown=dict.fromkeys(("params", "grads", "optimizer", "activations", "temporaries", "other"), GB),
        budget_bytes=5 * GB,
        baseline_fits=False,
        by_mode={OptimizationMode.BALANCED: entry},
        recommended_mode=OptimizationMode.BALANCED,
        device_name="a card",
        optimizer_name="adamw",
        inputs=(),
        **held_bytes,
    )


def columns(estimate: Estimate) -> dict[str, str]:
    """The table's one row, by its header."""
    lines = terminal.estimate_lines("model", 1, CARD, estimate)
    at = next(index for index, line in enumerate(lines) if line.startswith("mode "))
    names = [name for name in lines[at].split("  ") if name]
    return dict(zip(map(str.strip, names), lines[at + 1].split(), strict=False))


def test_all_three_numbers_and_what_waits_are_shown() -> None:
    row = columns(estimate_of(host_bytes=2 * GB, disk_bytes=GB))
    assert [row[name] for name in ("peak GB", "allocated GB", "reserved GB", "total GB")] == [
        "3.000",
        "4.000",
        "5.000",
        "6.000",
    ]
    assert (row["host GB"], row["disk GB"]) == ("2.000", "1.000")


def test_what_is_not_there_has_no_column() -> None:
    row = columns(estimate_of(reserves=False))
    assert not {"allocated GB", "reserved GB", "total GB", "host GB", "disk GB"} & {*row}
    assert "disk GB" not in columns(estimate_of(host_bytes=1))


def test_the_plain_step_has_them_too() -> None:
    text = "\n".join(terminal.estimate_lines("model", 1, CARD, estimate_of()))
    assert "allocates 7.000 and reserves 8.000 GB, 9.000 GB in all" in text


def test_a_plan_shows_what_is_done_to_the_whole_run_and_what_waits() -> None:
    numbers: dict[str, Any] = {"movable_bytes": 2 * GB, "device_type": "cpu"}
    lines = terminal.plan_lines(
        plan_of([LossByRows(1 << 20), Checkpoint("0"), OffloadOptimizer(1 << 20, 0.5)], **numbers)
    )
    assert [line.split("  ")[-1].strip() for line in lines if line.startswith("the whole run")] == [
        "loss by rows",
        "offload optimizer: 50.0% of its state",
    ]
    assert "  waiting:   2.000 GB on the disk" in lines


def doctor_says(hardware: Hardware) -> str:
    return "\n".join(doctor.lines(doctor.Findings(hardware, {}, ())))


@pytest.mark.parametrize(
    ("settings", "says"),
    [("", "plans that must be low ask for expandable_segments:True"), ("max_split_size_mb:64", "yours, and stay")],
)
def test_doctor_says_what_counts_beside_tensors(settings: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    text = doctor_says(CARD)
    assert "2 of 8.5 MB" in text
    assert footprint_of(CARD.architecture).context_source in text
    assert f"{CARD.held_bytes / 1e6:.1f} MB, measured here" in text
    assert says in text
    assert settings in text


def test_doctor_says_nothing_of_a_card_where_none_is() -> None:
    assert "beside tensors" not in doctor_says(dataclasses.replace(CARD, has_caching_allocator=False))
