"""Predicted against published: a sample of others' figures, to the byte, and the page that shows them."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import published
from benchmarks.published import adapters, liger, models, old_timm, operators, vision
from benchmarks.published.card import Card
from benchmarks.published.operators import Step, empty
from benchmarks.published.page import VERDICTS, Entry, readable, to_markdown
from memscale import Hardware
from memscale._planning.reserved.allocations import Reserved, reserved_of
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
    ("fused_neighborhood_attention", "full", 64, H100),
    ("fused_neighborhood_attention", "full", 4096, H100),
    ("megatron_rms_norm", "full", 1024, H100),
    ("jsd", "full", 1024, B200),
    ("geglu", "forward", 1024, A100),
    ("rope", "full", 2048, A100),
    ("fused_add_rms_norm", "full", 1024, H100),
]


@pytest.mark.parametrize("key", SAMPLE, ids=lambda key: key[0])
def test_published_peaks_of_plain_operators_are_predicted_to_the_byte(key: tuple[str, str, int, str]) -> None:
    outcome = liger.predict(ROWS[key])
    assert outcome.verdict == "exact", f"{outcome.predicted_mib} MiB, published {outcome.row.mib}"


def test_what_a_process_held_before_is_the_same_in_every_row_of_a_sweep() -> None:
    verdicts = {liger.predict(ROWS["embedding", "full", x, A100]).verdict for x in (1024, 16384)}
    assert verdicts == {"explained: held before"}


def test_the_distilled_divergence_grows_as_published() -> None:
    verdicts = {liger.predict(ROWS["distill_jsd_loss", "full", x, H100]).verdict for x in (1024, 8192)}
    assert verdicts == {"explained: held before and blocks"}


def test_a_workspace_explains_only_what_is_missing() -> None:
    row = ROWS["sparse_multi_token_attention", "full", 32, "NVIDIA GeForce RTX 3090"]
    outcome = liger.predict(row)
    assert outcome.verdict == "explained: workspace"
    lower = dataclasses.replace(outcome, row=dataclasses.replace(row, mib=outcome.predicted_mib - 0.01))
    assert lower.verdict == "missed"


def test_the_table_has_every_published_row() -> None:
    rows = liger.read_table(published.DATA / "liger.json")
    assert len(rows) == 341
    assert {row.kernel for row in rows} == set(liger.KERNELS)
    assert {row.card for row in rows} <= set(liger.CARDS)


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
    card = Card(Hardware.from_name("A100"), **options)
    with card.stage():
        return card.peak_of(program())


def test_products_take_a_workspace_in_each_thread() -> None:
    def program() -> Step:
        x = empty(64, 64, grad=True)
        return lambda: (x @ x).sum().backward()

    on_ampere, after_others = peak(program), peak(program, has_multiplied=True)
    assert on_ampere == after_others > 2 * 8_519_680
    on_hopper = Card(Hardware.from_name("H100"), has_multiplied=True)
    assert on_hopper.memory.allocated_bytes == 2 * 32 * MIB


def test_gradients_that_meet_are_added_in_place_where_that_is_said() -> None:
    def program() -> Step:
        return operators.jsd({"BT": 1024, "vocab_size": 1024})

    a_number_a_row = 1024 * 4  # it is there while the gradients are added, which need room for a third one or do not
    assert peak(program) - peak(program, adds_in_place=True) == a_number_a_row


# ---- vision models


@pytest.mark.parametrize(
    ("fits_gb", "fails_gb", "verdict"),
    [(20, 25, "holds"), (25, 30, "missed: said not to fit"), (20, 22, "missed: said to fit")],
)
def test_a_batch_that_fits_and_one_that_fails_are_two_inequalities(fits_gb: int, fails_gb: int, verdict: str) -> None:
    row = vision.Row("vit_base_patch16_224", 224, "nchw", 192, 256)
    found = vision.entry(vision.Outcome(row, fits_gb * 1e9, fails_gb * 1e9))
    assert found.verdict == verdict
    assert vision.num_held(found.figures, vision.ROOM_BYTES / 1e9) == (2 if verdict == "holds" else 1)
    unknown = vision.entry(vision.Outcome(row, float("nan"), float("nan"), "it goes by values"))
    assert (unknown.verdict, unknown.predicted) == ("missed: not predicted", "it goes by values")
    assert vision.num_held(unknown.figures, 24.0) == 0


def test_what_a_step_needs_lies_between_what_it_allocates_and_what_would_be_reserved() -> None:
    with torch.device("meta"):
        model = vision.Training(nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(57600, 10)))
        images = torch.empty(256, 3, 32, 32)
    log = vision.record_training(model, images)
    free = reserved_of(log, num_steps=vision.NUM_STEPS)
    assert free.allocated_peak_bytes <= vision.needed_bytes(log) <= free.reserved_peak_bytes
    weights_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    output_bytes = 2 * 256 * 64 * 30 * 30  # the convolution's, in 16 bits, which ReLU's result joins
    assert free.allocated_peak_bytes > 3 * weights_bytes + 2 * output_bytes


def test_models_of_one_structure_are_rehearsed_once() -> None:
    first, same, other = (nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)) for rate in (0.1, 0.1, 0.2))
    assert vision.structure_of(first) == vision.structure_of(same) != vision.structure_of(other)


def test_transformers_come_first_and_every_so_manieth_of_the_others() -> None:
    rows = vision.read_table(published.DATA / "timm.json")
    only, more = vision.chosen(rows, 0), vision.chosen(rows, 50)
    assert len(only) == 391
    assert more[:391] == only
    assert len({row.model for row in more[391:]}) == 9
    assert len(vision.chosen(rows, 1)) == len(rows)


def test_the_page_says_how_many_inequalities_hold_in_other_rooms() -> None:
    row = vision.Row("vit_base_patch16_224", 224, "nchw", 192, 256)
    found = vision.entry(vision.Outcome(row, 23.5e9, 24.2e9))
    lines = {line.split("|")[1].strip(): line for line in vision.inequality_lines([found])}
    assert "2 of 2 (100.0%)" in lines["24.15 GB"]
    assert "1 of 2 (50.0%)" in lines["23.00 GB"]
    assert "1 of 2 (50.0%)" in lines["24.50 GB"]


def test_rates_of_stochastic_depth_have_values_where_nothing_else_has() -> None:
    with old_timm.on_meta():
        assert torch.linspace(0, 1, 3).tolist() == [0, 0.5, 1]
        assert torch.empty(3).is_meta


def test_another_timm_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "timm.py").write_text("from torchvision.ops.misc import FrozenBatchNorm2d\n__version__ = '1.0.31'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert published.main(["--only", "timm", "--results", str(tmp_path / "none.json")]) == 2
    assert "timm 1.0.31" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "timm")
    assert "torchvision" not in sys.modules


def test_norms_and_softmax_are_wide_under_a_cards_autocast() -> None:
    x = torch.ones(4, 8)
    with torch.autocast("cpu", torch.float16), vision.CardAutocast():
        product = x @ x.t()
        assert product.dtype == torch.float16
        assert F.layer_norm(product, (4,)).dtype == torch.float32
        assert product.softmax(-1).dtype == torch.float32
        assert F.normalize(product).dtype == torch.float32


def test_all_two_sided_rows_are_in_the_table() -> None:
    rows = vision.read_table(published.DATA / "timm.json")
    assert len(rows) == 1281
    assert all(row.fits < row.fails for row in rows)
    assert len({vision.name_of(row) for row in rows}) == len(rows)


def test_a_missing_timm_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert published.main(["--only", "timm", "--results", "nowhere.json"]) == 2
    assert "pip install --no-deps timm" in capsys.readouterr().err


# ---- adapters, and models of others


def test_a_run_is_within_its_share_or_missed() -> None:
    row = adapters.Row("lora/flux2", "LORA", {"r": 32}, 100, 10_000_000_000)
    assert adapters.image_entry(adapters.Outcome(row, 10_290_000_000)).verdict == "within 3%"
    assert adapters.image_entry(adapters.Outcome(row, 9_690_000_000)).verdict == "missed"
    unknown = adapters.image_entry(adapters.Outcome(row, 0, "it needs values"))
    assert (unknown.verdict, unknown.predicted) == ("missed: not predicted", "it needs values")


def test_texts_are_compared_by_their_ratio() -> None:
    rows = (adapters.Row(name, "LORA", {}, 100, reserved) for name, reserved in (("one", 20_000), ("two", 22_000)))
    one, two = (adapters.Outcome(row, predicted) for row, predicted in zip(rows, (10_000, 11_000), strict=True))
    found = adapters.text_entry(two, one)
    assert (found.published, found.predicted, found.difference, found.verdict) == (
        "1.100",
        "1.100",
        "+0.00%",
        "within 3%",
    )


def test_an_adapter_of_another_size_is_another_method() -> None:
    row = adapters.Row("lora/small", "", {}, 17, 1)
    inputs = adapters.Inputs((torch.empty(2, 4, device="meta"),))
    assert adapters._predicted(row, lambda: nn.Linear(4, 4), inputs).trouble == (
        "20 parameters are trained here, 17 there"
    )
    same = adapters._predicted(dataclasses.replace(row, trainable=20), lambda: nn.Linear(4, 4), inputs)
    assert same.trouble == ""
    assert same.reserved_bytes > 0


def test_what_was_published_of_other_models_is_held_against_its_kind() -> None:
    reserved = Reserved(9_000_000_000, 10_000_000_000, 50_000_000_000)
    allocated = models.entry(models.Row("litgpt", "phi-1_5", 1, 1044, 10.2), reserved)
    assert (allocated.difference, allocated.verdict) == ("-2.0%", "within 3%")
    assert models.entry(models.Row("litgpt", "phi-1_5", 64, 1044, None), reserved).verdict == "holds"
    on_card = models.entry(models.Row("bert", "4 x 512", 4, 512, 15.675), reserved)
    assert on_card.predicted == "51.41 GB"
    assert on_card.verdict == "missed"


@pytest.mark.parametrize(
    ("name", "num_rows"), [("peft_images", 31), ("peft_llama", 9), ("models", 12), ("timm", 1281), ("table", 5)]
)
def test_tables_of_figures_have_their_source(name: str, num_rows: int) -> None:
    table = json.loads((published.DATA / f"{name}.json").read_text())
    assert table["source"]
    assert len(table["rows"]) == num_rows


# ---- the page


def entry(verdict: str) -> Entry:
    return Entry("softmax, full", "A100", "1.5", "1.5", "+0.0 KiB", verdict, "A note.")


def test_the_page_counts_what_is_missed() -> None:
    page = to_markdown({"liger": [entry("exact"), entry("explained: blocks"), entry("missed")]})
    assert "| Plain operators (Liger's benchmarks) | 3 | 1 | 1 | 1 |" in page
    assert "1 exact, 1 explained: blocks, 1 missed" in page
    assert "- softmax: A note." in page


@pytest.mark.parametrize(
    ("difference", "shown"),
    [
        ("+1.0 KiB", "+1.0 KiB"),
        ("-12533760.0 KiB", "-12,240.0 MiB"),
        ("+58572.0 KiB", "+57.2 MiB"),
        ("-5.83%", "-5.83%"),
    ],
)
def test_a_large_difference_is_shown_in_a_larger_unit(difference: str, shown: str) -> None:
    assert readable(difference) == shown


def test_every_verdict_of_the_page_is_explained_on_it() -> None:
    explained = ", ".join(verdict for verdict, _ in VERDICTS).split(", ")
    found = {
        entry.verdict.partition(":")[0] if entry.is_missed else entry.verdict
        for all_of in kept().values()
        for entry in all_of
    }
    assert found <= set(explained)


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


def kept() -> dict[str, list[Entry]]:
    sections = json.loads((published.DOCS / "published.json").read_text())["sections"]
    return {name: [Entry(**found) for found in entries] for name, entries in sections.items()}


def test_the_page_is_that_of_the_results() -> None:
    page = to_markdown(kept(), {"timm": vision.inequality_lines})
    assert (published.DOCS / "published.md").read_text() == page


def test_the_results_keep_the_bars_that_are_kept() -> None:
    """As they are checked in. What is missed beyond these is on the page, with its reason."""
    sections = kept()
    room_gb = vision.ROOM_BYTES / vision.GB
    rows = [found for found in sections["timm"] if vision.is_transformer(found.name)]
    held = sum(vision.num_held(found.figures, room_gb) for found in rows)
    assert held >= 0.95 * 2 * len(rows)
    assert sum(found.is_missed for found in sections["liger"]) <= 14
    plain = ("full-finetuning", "lora/", "dora/", "ia3/", "ln_tuning/")
    verdicts = [found.verdict for found in sections["images"] if found.name.startswith(plain)]
    assert verdicts == ["within 3%"] * 6
    assert [found.name for found in sections["texts"] if found.verdict == "missed"] == []
