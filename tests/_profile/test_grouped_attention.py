"""What a card that is not in this machine would save for backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal

BATCH, HEADS, GROUPS, LENGTH, WIDTH = 2, 4, 2, 64, 8


class Grouped(nn.Module):
    """Attention in which groups of queries share keys and values; its inputs are computed, so that all is saved."""

    def __init__(self, is_grouped: bool = True) -> None:
        super().__init__()
        self.groups = GROUPS if is_grouped else HEADS
        self.query = nn.Linear(WIDTH, HEADS * WIDTH, bias=False)
        self.rest = nn.Linear(WIDTH, 2 * self.groups * WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query = self.query(x).view(BATCH, LENGTH, HEADS, WIDTH).transpose(1, 2)
        key, value = self.rest(x).view(BATCH, LENGTH, 2 * self.groups, WIDTH).transpose(1, 2).chunk(2, 1)
        is_grouped = self.groups != HEADS
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
        )


def saved_bytes(model: nn.Module, *inputs: torch.Tensor) -> int:
    """What lives at the end of forward on a CUDA card."""
    trace = FakeRehearsal(model, Inputs(inputs), "cuda").run()
    return sum(segment.net_bytes for segment in trace.segments if segment.phase == "forward")


SCORES_BYTES = BATCH * HEADS * LENGTH * LENGTH * 4


def test_grouped_queries_in_32_bits_keep_their_scores() -> None:
    # The memory-efficient kernel of a card takes no groups and its flash kernel no fp32, so the scores are a matrix.
    x = torch.randn(BATCH, LENGTH, WIDTH)
    assert saved_bytes(Grouped(), x) >= SCORES_BYTES
    assert saved_bytes(Grouped(is_grouped=False), x) < SCORES_BYTES


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_queries_in_16_bits_keep_their_scores_only_under_a_mask(masked: bool) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    found = saved_bytes(Grouped().to(torch.bfloat16), x, *([mask] if masked else []))
    assert (found >= SCORES_BYTES // 2) == masked
