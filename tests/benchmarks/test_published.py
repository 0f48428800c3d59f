"""Predicted against published: a sample of others' figures, to the byte, and the page that shows them."""

from __future__ import annotations

import csv
import json
import pathlib
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from benchmarks import published
from benchmarks.published import liger, operators, vision
from benchmarks.published.card import Card, workspace_bytes_of
from benchmarks.published.operators import Step, empty
from benchmarks.published.page import Entry, to_markdown
from memscale._units import MIB

pytestmark = pytest.mark.unit

ROWS = {(row.kernel, row.mode, row.x, row.card): row for row in liger.read_table(published.DATA / "liger.json")}
A100, H100, B200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200"
SAMPLE = [
    ("cross_entropy", "full", 4096, A100),
    ("layer_norm", "full", 1024, H100),
    ("group_norm", "full", 32, B200),
    ("softmax", "full", 4096, "NVIDIA GeForce RTX 3090"),
    ("sparsemax", "full", 8192, "NVIDIA GeForce RTX 3090"),
    ("fused_neighborhood_attention", "full", 4096, H100),
    ("megatron_rms_norm", "full", 1024, H100),
    ("jsd", "full", 1024, B200),
    ("geglu", "forward", 1024, A100),
    ("rope", "full", 2048, A100),
]


@pytest.mark.parametrize("key", SAMPLE, ids=lambda key: key[0])
def test_published_peaks_of_plain_operators_are_predicted_to_the_byte(key: tuple[str, str, int, str]) -> None:
    outcome = liger.predict(ROWS[key])
    assert outcome.verdict == "exact", f"{outcome.predicted_mib} MiB, published {outcome.row.mib}"


def test_what_a_process_held_before_is_the_same_in_every_row_of_a_sweep() -> None:
    verdicts = {liger.predict(ROWS["embedding", "full", x, A100]).verdict for x in (1024, 16384)}
    assert verdicts == {"explained: held before"}


def test_the_table_has_every_published_row() -> None:
    rows = liger.read_table(published.DATA / "liger.json")
    assert len(rows) == 341
    assert {row.kernel for row in rows} == set(liger.KERNELS)
    assert {row.card for row in rows} <= set(liger.ARCHITECTURES)


def test_a_row_that_nothing_explains_is_missed() -> None:
    row = ROWS["cross_entropy", "full", 4096, A100]
    assert liger.Outcome(row, row.mib - 1, row.mib - 1, row.mib - 1).verdict == "missed"
    assert liger.Outcome(row, row.mib - 1, row.mib - 1, row.mib).verdict == "explained: blocks"


def test_publishers_own_files_are_read(tmp_path: pathlib.Path) -> None:
    figures = {
        "kernel_name": "softmax",
        "kernel_operation_mode": "full",
        "metric_name": "memory",
        "x_name": "N",
        "x_value": "128",
        "y_value_50": "0.0029296875",
        "extra_benchmark_config_str": '{"M": 2048, "dtype": "torch.float32"}',
        "gpu_name": A100,
        "timestamp": "2025-04-30 16:11:25",
    }
    with (tmp_path / "liger.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(figures))
        writer.writeheader()
        writer.writerows([figures, {**figures, "metric_name": "speed"}])
    (row,) = liger.read_csv(tmp_path / "liger.csv")
    assert (row.x, row.mib, row.date) == (128, 0.0029296875, "2025-04-30")
    assert liger.predict(row).is_exact


# ---- the card


def peak(program: Callable[[], Step], **options: bool) -> int:
    card = Card(80, **options)
    with card.stage():
        return card.peak_of(program())


def test_products_take_a_workspace_in_each_thread() -> None:
    def program() -> Step:
        x = empty(64, 64, grad=True)
        return lambda: (x @ x).sum().backward()

    on_ampere, after_others = peak(program), peak(program, has_multiplied=True)
    assert on_ampere == after_others > 2 * workspace_bytes_of(80) == 2 * 8_519_680
    assert workspace_bytes_of(90) == 32 * MIB


def test_gradients_that_meet_are_added_in_place_where_that_is_said() -> None:
    def program() -> Step:
        return operators.jsd({"BT": 1024, "vocab_size": 1024})

    a_number_a_row = 1024 * 4  # it is there while the gradients are added, which need room for a third one or do not
    assert peak(program) - peak(program, adds_in_place=True) == a_number_a_row


# ---- vision models


@pytest.mark.parametrize(
    ("fits_gb", "fails_gb", "verdict"),
    [(20, 25, "holds"), (23, 25, "missed: said not to fit"), (20, 22, "missed: said to fit")],
)
def test_a_batch_that_fits_and_one_that_fails_are_two_inequalities(fits_gb: int, fails_gb: int, verdict: str) -> None:
    row = vision.Row("vit_base_patch16_224", 224, "nchw", 192, 256)
    assert vision.Outcome(row, fits_gb * 1e9, fails_gb * 1e9).verdict == verdict
    assert vision.Outcome(row, float("nan"), float("nan")).verdict == "missed: not predicted"


def test_norms_and_softmax_are_wide_under_a_cards_autocast() -> None:
    x = torch.ones(4, 8)
    with torch.autocast("cpu", torch.float16), vision.CardAutocast():
        product = x @ x.t()
        assert product.dtype == torch.float16
        assert F.layer_norm(product, (4,)).dtype == torch.float32
        assert product.softmax(-1).dtype == torch.float32


def test_all_two_sided_rows_are_in_the_table() -> None:
    rows = vision.read_table(published.DATA / "timm.json")
    assert len(rows) == 1281
    assert all(row.fits < row.fails for row in rows)
    assert len({vision.name_of(row) for row in rows}) == len(rows)


def test_a_missing_timm_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert published.main(["--only", "timm", "--results", "nowhere.json"]) == 2
    assert "pip install timm" in capsys.readouterr().err


# ---- the page


def entry(verdict: str) -> Entry:
    return Entry("softmax, full", "A100", "1.5", "1.5", "+0.0 KiB", verdict, "A note.")


def test_the_page_counts_what_is_missed() -> None:
    page = to_markdown({"liger": [entry("exact"), entry("explained: blocks"), entry("missed")]})
    assert "| Plain operators (Liger's benchmarks) | 3 | 1 | 1 | 1 |" in page
    assert "1 exact, 1 explained: blocks, 1 missed" in page
    assert "- softmax: A note." in page


def test_the_page_is_written_from_what_is_kept(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {"sections": {"liger": [entry("exact").to_dict()]}}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    arguments = ["--page-only", "--results", str(tmp_path / "kept.json"), "--page", str(tmp_path / "page.md")]
    assert published.main(arguments) == 0
    assert "| softmax, full | A100 |" in (tmp_path / "page.md").read_text()
    assert "rows" in capsys.readouterr().out


def test_results_that_are_none_are_told(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept.json").write_text("{}")
    assert published.main(["--page-only", "--results", str(tmp_path / "kept.json")]) == 2
    assert "does not hold results" in capsys.readouterr().err
