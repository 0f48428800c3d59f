"""Rows of the table of predicted and emulated peaks: one whose mode has no plan that fits says so in a sentence."""

from emucuda.peaks import _line

TRIES_A_SMALL_CARD = """
import json
from emucuda.peaks import _figures
print(json.dumps(_figures("gpt2-lora", "conservative-sync")))
"""


def test_what_does_not_fit_is_a_row(on_the_card):
    figures = on_the_card(TRIES_A_SMALL_CARD, total_bytes=900 << 20, env={"MEMSCALE_MEASURE": "0"})
    assert set(figures) == {"does_not_fit"}
    assert "budget" in figures["does_not_fit"]
    line = _line({"model": "gpt2-lora", "mode": "conservative-sync"} | figures)
    assert line.split() == ["gpt2-lora", "conservative-sync", "does", "not", "fit:", *figures["does_not_fit"].split()]
