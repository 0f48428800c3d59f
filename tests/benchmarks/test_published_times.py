"""Predicted against published step times: the tables of figures, the page, and what a time is made of."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics

import pytest

from benchmarks import published_times
from benchmarks.published_times import torchao, vision
from benchmarks.published_times.page import Entry, to_markdown
from memscale import Hardware
from memscale._profile import OptimizerCost, Segment, StepTrace

pytestmark = pytest.mark.unit
RESULTS = published_times.DOCS / "published_times.json"


def kept() -> dict[str, list[Entry]]:
    sections = json.loads(RESULTS.read_text())["sections"]
    return {name: [Entry(**entry) for entry in entries] for name, entries in sections.items()}


def test_the_tables_have_figures_and_a_source() -> None:
    rows = vision.read_table(published_times.DATA / "timm_times.json")
    assert len({row.name for row in rows}) == len(rows) > 200
    assert all(row.step_ms > 0 for row in rows)
    peers = torchao.read_table(published_times.DATA / "torchao.json")
    assert {row.gb: row.step_s for row in peers} == {9.82: 1.27, 5.24: 1.52, 4.01: 1.53, 6.85: 3.13}
    for name in ("timm_times", "torchao"):
        assert json.loads((published_times.DATA / f"{name}.json").read_text())["source"]


def test_the_page_is_that_of_the_results() -> None:
    assert (published_times.DOCS / "published_times.md").read_text() == to_markdown(kept())


def test_one_set_of_constants_is_right_in_the_middle() -> None:
    """As it is checked in: no constant is for a model, and the median of all models is met."""
    ratios = [entry.ratio for entry in kept()["timm"] if entry.ratio is not None]
    assert len(ratios) >= 50
    assert 0.95 <= statistics.median(ratios) <= 1.05
    assert statistics.mean(abs(ratio - 1) for ratio in ratios) < 0.12


def test_what_is_checked_in_was_predicted_from_published_figures() -> None:
    published = {row.name: row.step_ms for row in vision.read_table(published_times.DATA / "timm_times.json")}
    assert all(published[entry.name] == entry.published_ms for entry in kept()["timm"])


def test_a_step_is_products_everything_else_and_the_optimizer() -> None:
    card = dataclasses.replace(
        Hardware.from_name("RTX 3090"),
        half_flops=1e12,
        half_matmul_efficiency=0.5,
        memory_bytes_per_s=1e9,
        launch_s=0.0,
    )
    card = dataclasses.replace(card, memory_efficiency=0.25)
    work = Segment("forward", "", 0, 0, flops=10**9, half_flops=10**9, matmul_bytes=0, other_bytes=10**6)
    optimizer = OptimizerCost("sgd", 0, 0, 0, launched_bytes=10**6)
    assert vision.step_ms(StepTrace((work,)), optimizer, card) == pytest.approx(2 + 4 + 4)


def test_a_csv_of_the_publisher_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sweep.csv"
    path.write_text(
        "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size\n"
        "vit_base_patch16_224,390.86,490.391,192,224\nresnet50,500.0,100.0,64,224\n"
    )
    assert vision.read_csv(path) == [vision.Row("vit_base_patch16_224", 224, 192, 490.391)]


def test_the_page_can_be_written_without_running_anything(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert published_times.main(["--page-only", "--results", str(RESULTS), "--page", str(page)]) == 0
    assert page.read_text() == to_markdown(kept())
    assert "median ratio" in capsys.readouterr().out
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    assert published_times.main(["--page-only", "--results", str(broken), "--page", str(page)]) == 2
