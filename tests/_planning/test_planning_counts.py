"""What planning costs is counted, since seconds depend on the machine: rehearsals, recordings and forwards in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.planning import clocked
from memscale import Config, Hardware
from memscale._decide.choice import Choice
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.reserved import recording
from memscale._planning.reserved.allocations import reserved_of
from memscale._profile.inputs import Inputs
from tests._planning.test_once import calls_of

CARD = Hardware.from_name("RTX 3090")
BLOCKS, WIDTH = 8, 512


class Deep(nn.Module):
    """Equal blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, norm_first=True) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 4000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def deep() -> tuple[nn.Module, Inputs]:
    with torch.device("meta"):
        return Deep().train(), Inputs.from_sample(torch.zeros(8, 128, dtype=torch.long))


def plain_bytes() -> int:
    model, inputs = deep()
    planner = Planner(Job(model, Config(), CARD), inputs)
    return planner.cost_model().peak_of(planner.profile.plain, Choice())


MOST = {0.85: (0, 0, 0, 0), 0.6: (0, 0, 0, 0), 0.45: (0, 0, 0, 0), None: (0, 0, 0, 0)}
"""By the share of the plain peak that may be used: rehearsals, recordings, forwards in these, replays."""


@pytest.mark.parametrize("share", MOST)
def test_planning_takes_no_more_than_it_did(share: float | None) -> None:
    model, inputs = deep()
    config = Config(force_optimize=True) if share is None else Config(memory_budget_gb=share * plain_bytes() / 1e9)
    with clocked() as clock:
        passes, plays = calls_of(
            lambda: make_plan(Job(model, config, CARD), inputs), recording._pass_through, reserved_of
        )
    found = clock.counts["rehearsing"], clock.counts["recording"], len(passes), len(plays)
    assert all(number <= most for number, most in zip(found, MOST[share], strict=True)), found
