"""What ranks tell each other, and what they may not do."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memscale import Config, DoesNotFitError, Hardware, MemScaleError
from memscale._decide.eligible import resolve
from memscale._planning import rank_meetings
from memscale._planning.rank_meetings import (
    Meeting,
    Need,
    NobodyCameError,
    enlarged,
    largest_of,
    plan_in,
    withheld_from,
)
from memscale._profile import TensorSpec
from memscale._profile.inputs import Inputs
from memscale._profile.ranks import ALONE, Group, Ranks
from memscale.techniques.offload.optimizer import OPTIMIZER
from memscale.techniques.offload.parameters import PARAMETERS
from tests.parity import plan_of

pytestmark = pytest.mark.unit


def need(*shape: int, name: str = "x", budget_bytes: int = 10) -> Need:
    return Need((TensorSpec(name, shape, "float32"),), budget_bytes)


def test_every_dimension_is_the_largest_of_all_ranks() -> None:
    assert largest_of([each.specs for each in (need(4, 16), need(2, 24), need(3, 8))]) == need(4, 24).specs


def test_batches_of_different_kinds_have_no_largest() -> None:
    assert largest_of([need(4, 16).specs, need(4).specs]) is None
    assert largest_of([need(4, 16).specs, need(4, 16, name="y").specs]) is None


def test_what_is_as_large_already_keeps_its_values() -> None:
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 4)
    largest = (TensorSpec("ids", (2, 8), "int64"), TensorSpec("mask", (2, 6), "float32"))
    found = enlarged(Inputs(kwargs={"ids": ids, "mask": mask}), largest)
    assert found.kwargs["ids"] is ids
    assert found.kwargs["mask"].shape == (2, 6)
    assert found.kwargs["mask"].device.type == "meta"


def test_ranks_may_not_move_parameters_that_others_write_gradients_of() -> None:
    config, card = Config(mode="aggressive"), Hardware.from_name("RTX 3090")

    def may(ranks: Ranks, technique: Any) -> bool:
        return resolve(withheld_from(config, ranks).replace(memory_budget_gb=4), card).has(technique)

    replicated, sharded = Ranks(2), Ranks(2, shards=True)
    assert [may(ranks, PARAMETERS) for ranks in (ALONE, replicated, sharded)] == [True, False, False]
    assert [may(ranks, OPTIMIZER) for ranks in (ALONE, replicated, sharded)] == [True, True, False]


class TwoRanks:
    """Two ranks in two threads, which share a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
        self.store, self.here = dist.HashStore(), threading.local()
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
        monkeypatch.setattr(dist, "get_rank", lambda: self.here.rank)
        monkeypatch.setattr(rank_meetings.private, "meeting_store", lambda: self.store)
        monkeypatch.setattr(rank_meetings.private, "timeout_of", lambda group: datetime.timedelta(seconds=timeout_s))
        monkeypatch.setattr(rank_meetings, "_num_meetings", _Once())

    def meet(self, rank: int) -> Meeting:
        self.here.rank = rank
        return Meeting(Group(Ranks(2), None), "Model")


class _Once(dict[str, int]):
    """Counts for two ranks in one process."""

    def __missing__(self, key: str) -> int:
        return 0

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, 1)


def test_the_rank_with_the_largest_batch_leads_and_the_other_hears_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, heard = TwoRanks(monkeypatch, timeout_s=600), list[Any]()

    def other() -> None:
        meeting = ranks.meet(1)
        needs = meeting.gather(need(4, 24, budget_bytes=5))
        assert meeting.leads(needs, need(4, 24).specs)
        meeting.answer({"plan": "the plan"})

    thread = threading.Thread(target=other)
    thread.start()
    meeting = ranks.meet(0)
    needs = meeting.gather(need(4, 16, budget_bytes=7))
    assert [each.budget_bytes for each in needs] == [7, 5]
    assert not meeting.leads(needs, need(4, 24).specs)
    heard.append(meeting.read_answer())
    thread.join()
    assert heard == [{"plan": "the plan"}]


def test_what_the_leader_met_is_raised_by_those_who_follow() -> None:
    with pytest.raises(DoesNotFitError, match="another rank, which is the largest, does not fit: too large"):
        plan_in({"misfit": "too large"})
    with pytest.raises(MemScaleError, match="could not plan: broken"):
        plan_in({"error": "broken"})
    assert plan_in({}) is None
    plan = plan_of(())
    assert plan_in({"plan": plan.to_json()}) == plan


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TwoRanks(monkeypatch, timeout_s=0.0)
    with pytest.raises(NobodyCameError, match="rank 1"):
        ranks.meet(0).gather(need(4, 16))
