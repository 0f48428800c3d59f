"""The coverage of static profiling: one architecture of each outcome, and the words of the table."""

from __future__ import annotations

from benchmarks import static_coverage


def test_architectures_are_tried() -> None:
    assert static_coverage.try_architecture("transformers", "gpt2")["status"] == "static"
    stopped = static_coverage.try_architecture("transformers", "ibert")
    assert stopped["status"] == "stopped"
    assert "_local_scalar_dense" in stopped["why"]


def test_the_table_counts_and_names() -> None:
    results = [
        {"library": "transformers", "name": "a", "class": "A", "status": "static"},
        {"library": "transformers", "name": "b", "class": "B", "status": "stopped", "why": "nonzero", "where": "b.py"},
        {"library": "transformers", "name": "c", "status": "not built", "why": ""},
        {"library": "transformers", "name": "d", "status": "too slow", "why": ""},
    ]
    text = static_coverage.describe(results, ["timm"])
    assert "1 of 2 architectures" in text
    assert "timm is not installed" in text
    assert "transformers b (B): nonzero" in text
