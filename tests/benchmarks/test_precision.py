"""The shipped text, and the benchmark on it."""

from __future__ import annotations

import functools
import hashlib
import json

import pytest
import torch

from benchmarks import precision
from benchmarks.text import Characters, read_text


def test_the_text_is_what_the_docs_say():
    text = read_text()
    assert text.startswith("In the beginning God created the heaven and the earth.\n")
    assert len(text) == 999_808
    digest = "d0bf588223b2b166458a7c5a549c40d13afbf584bfc8e0faae4b0a53a8eaaed6"
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_batches_are_the_same_in_every_run():
    text = Characters("abcabcabd")
    assert text.alphabet == ["a", "b", "c", "d"]
    first, again = text.batch(3, rows=2, length=4), text.batch(3, rows=2, length=4)
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert first["input_ids"].shape == (2, 4)
    assert not torch.equal(first["input_ids"], text.batch(4, rows=2, length=4)["input_ids"])


def test_a_short_run_prints_every_loss(capsys):
    assert precision.main(["--steps", "2", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["precision"] for run in runs] == ["float32", "bfloat16", "float16"]
    assert all(len(run["losses"]) == 2 for run in runs)
    fp32, bf16, fp16 = (run["held_bytes"] for run in runs)
    assert bf16 < fp32
    assert fp16 < fp32


def test_a_distance_above_the_bar_fails(monkeypatch, capsys):
    monkeypatch.setattr(precision, "MAX_DISTANCE", -1.0)
    assert precision.main(["--steps", "1"]) == 1
    assert "from fp32" in capsys.readouterr().out


def test_bounds_are_shown_beside_what_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(precision, "NUM_BOUNDED_STEPS", 4)
    seen: list[tuple[str, str, int]] = []
    curve = functools.cache(precision._curve)  # the second call sees the curves of the first
    monkeypatch.setattr(precision, "_curve", lambda *asked: seen.append(asked) or curve(*asked))
    assert precision.main(["--bounds"]) == 0
    assert sorted(seen) == sorted((name, kind, 4) for name in precision.BOUNDED for kind in precision.PRECISIONS)
    assert "0.20%" in capsys.readouterr().out
    monkeypatch.setitem(precision.MEAN_BOUND, "float16", 0.0)
    assert precision.main(["--bounds"]) == 1


def test_bad_input_is_a_sentence(capsys):
    with pytest.raises(SystemExit) as ending:
        precision.main(["--steps", "0"])
    assert ending.value.code == 2
    assert "--steps must be at least 1" in capsys.readouterr().err
