"""What planning costs is counted, since seconds depend on the machine: rehearsals, recordings, forwards and replays."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.planning import clocked
from memscale import Config, DoesNotFitError, Hardware
from memscale._planning import make_plan, one_way
from memscale._planning.job import Job
from memscale._planning.reserved import least_reserved, recording
from memscale._profile.inputs import Inputs

CARD = Hardware.from_name("RTX 3090")
BLOCKS, WIDTH, WORDS = 6, 512, 4000


class Deep(nn.Module):
    """Equal blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, norm_first=True) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def counted(monkeypatch: pytest.MonkeyPatch, name: str, *modules: ModuleType) -> list[None]:
    """One entry for each call of this function from these modules that comes."""
    calls = list[None]()

    def watching(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return function(*args, **kwargs)

        return call

    for module in modules:
        monkeypatch.setattr(module, name, watching(getattr(module, name)))
    return calls


MOST = {0.3: (15, 6, 6, 59), 0.15: (36, 9, 9, 70)}
"""By the budget in GB: rehearsals, recordings, forwards in recordings, and replays of the allocator."""


@pytest.mark.slow
@pytest.mark.parametrize("budget_gb", MOST)
def test_planning_takes_no_more_than_it_did(budget_gb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = counted(monkeypatch, "_pass_through", recording)
    plays = counted(monkeypatch, "reserved_of", one_way, least_reserved)
    with torch.device("meta"):
        model, inputs = Deep().train(), Inputs.from_sample(torch.zeros(8, 128, dtype=torch.long))
    with clocked() as clock, contextlib.suppress(DoesNotFitError):
        make_plan(Job(model, Config(memory_budget_gb=budget_gb), CARD), inputs)
    found = clock.counts["rehearsing"], clock.counts["recording"], len(passes), len(plays)
    assert all(number <= most for number, most in zip(found, MOST[budget_gb], strict=True)), found
