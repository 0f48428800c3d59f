"""Plans by shape: a short batch is not slowed by the plan for a long one, and nothing else changes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memscale
import simgpu  # noqa: F401  (registers the device)
from memscale._hardware import Hardware
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.loop import known_plans
from memscale._planning.loop.demand import read_demand
from memscale._planning.loop.replanning import Replanner
from memscale._planning.loop.shapes import (
    bucket_below,
    bucket_top,
    largest_that_fits,
    loosened,
    placement_of,
    samples_of,
)
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale.techniques.offload.parameters import state_following

VOCABULARY, WIDTH, LONG, MIDDLE, SHORT = 32, 16, 96, 40, 12


class Words(nn.Module):
    """Four blocks with dropout over token ids; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(8 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.square().mean()


def ids(length: int) -> torch.Tensor:
    return torch.arange(4 * length).reshape(4, length) % VOCABULARY


def config(share: float, length: int = LONG) -> memscale.Config:
    """A budget of this share of the plain step's peak, with overlapping or offloading nothing."""
    plain_bytes = memscale.estimate(Words(), ids(length)).baseline_peak_bytes
    return memscale.Config(
        mode=memscale.OptimizationMode.CONSERVATIVE, memory_budget_gb=share * plain_bytes / 1e9, enable_logging=False
    )


@pytest.fixture(scope="module")
def tight() -> memscale.Config:
    return config(0.6)


def train(model: nn.Module, lengths: list[int]) -> list[tuple[float, int, int]]:
    """Loss, peak and the number of the plan's actions, of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(3)
    seen = []
    for length in lengths:
        batch = ids(length)
        with memscale.measure() as measured:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        executor: Any = getattr(model, "_memscale_executor", None)
        seen.append((loss.item(), measured.peak_bytes, 0 if executor is None else len(executor.plan.actions)))
    return seen


def replanner_of(model: nn.Module) -> Replanner:
    return next(hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Replanner))


def pair() -> tuple[Words, Words]:
    torch.manual_seed(0)
    plain, wrapped = Words(), Words()
    wrapped.load_state_dict(plain.state_dict())
    return plain, wrapped


def test_what_is_to_go_as_low_as_it_can_does_so_with_short_batches_too(tight: memscale.Config) -> None:
    model = Words()
    memscale.wrap(model, tight.replace(force_optimize=True, memory_budget_gb=None), sample_input=ids(LONG))
    seen = train(model, [LONG, SHORT, SHORT, SHORT])
    assert len({number for _, _, number in seen}) == 1
    assert seen[0][2] > 0
    memscale.detach(model)


def test_a_short_batch_is_fast_again_after_a_long_one(tight: memscale.Config) -> None:
    """The run is the plain one to the bit, no step is above the budget, and plans place everything alike."""
    lengths = [LONG, SHORT, SHORT, LONG, MIDDLE, SHORT, MIDDLE, LONG, SHORT]
    plain, wrapped = pair()
    memscale.wrap(wrapped, tight, sample_input=ids(LONG))
    losses = train(plain, lengths)
    seen = train(wrapped, lengths)
    assert [loss for loss, _, _ in seen] == [loss for loss, _, _ in losses]
    assert all(torch.equal(*both) for both in zip(plain.parameters(), wrapped.parameters(), strict=True))
    known = list(replanner_of(wrapped).plans.known)
    assert max(peak for _, peak, _ in seen) <= known[0].plan.budget_bytes
    assert len({placement_of(one.plan.actions) for one in known}) == 1
    num_actions = [number for _, _, number in seen]
    assert num_actions[0] == num_actions[3] == num_actions[7] > 0  # the long ones
    assert num_actions[1] == num_actions[0]  # a shape that came once may not come again
    assert num_actions[2] == num_actions[5] == num_actions[8] == 0
    memscale.detach(wrapped)


@pytest.mark.parametrize(("length", "is_tried"), [(SHORT, False), (LONG - 8, True)])
def test_what_a_short_batch_needs_nothing_of_is_not_tried_for_it(
    length: int, is_tried: bool, tight: memscale.Config
) -> None:
    job = Job(Words(), tight, Hardware.detect("cpu"))
    plan = make_plan(job, Inputs.from_sample(ids(LONG)))
    planner = Planner(job, Inputs.from_sample(ids(length)))
    looser = loosened(planner, plan, job.eligible)
    assert bool(planner.stage.tried) is is_tried
    if not is_tried:
        assert looser is not None
        assert looser.fits
        assert placement_of(looser.actions) == placement_of(plan.actions)
        assert len(looser.actions) < len(plan.actions)


def test_shapes_that_are_announced_are_planned_for_before_the_first_step(
    tight: memscale.Config, caplog: pytest.LogCaptureFixture
) -> None:
    _, wrapped = pair()
    memscale.wrap(wrapped, tight, sample_input=ids(LONG), lengths={SHORT: 70, 11: 3, LONG: 1})
    assert wrapped._memscale_executor.plan.actions  # type: ignore[union-attr]
    with caplog.at_level(logging.INFO, "memscale"):
        seen = train(wrapped, [SHORT, LONG, SHORT])
    assert [number > 0 for _, _, number in seen] == [False, True, False]
    assert not [record for record in caplog.records if "plan" in record.message]
    memscale.detach(wrapped)


def test_what_does_not_fit_is_an_error_that_names_the_largest_batch_that_does(tight: memscale.Config) -> None:
    _, wrapped = pair()
    batches = [ids(SHORT), ids(MIDDLE), ids(8 * LONG)]
    with pytest.raises(memscale.DoesNotFitError, match=r"Of the batches given, the largest that fits is .*4x40"):
        memscale.wrap(wrapped, tight, sample_input=batches)
    assert not hasattr(wrapped, "_memscale_executor")


def test_other_inputs_have_no_bucket_below() -> None:
    """Batches of which one has more tensors cannot be compared."""
    long, short = Inputs((ids(LONG),)), Inputs((ids(SHORT), ids(SHORT)))
    assert bucket_below(short, read_demand(Words(), long, torch.device("cpu"))) is None


@pytest.mark.parametrize(
    ("size", "top"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 12), (13, 16), (100, 128)]
)
def test_buckets_are_half_octaves(size: int, top: int) -> None:
    assert bucket_top(size) == top


def test_a_bucket_varies_in_what_differs_and_is_below_the_demand() -> None:
    demand = read_demand(Words(), Inputs((ids(LONG),)), torch.device("cpu"))
    below = bucket_below(Inputs((ids(MIDDLE),)), demand)
    assert below is not None
    assert below.specs()[0].shape == (4, 48)
    assert bucket_below(Inputs((ids(LONG),)), demand) is None
    assert bucket_below(Inputs((ids(LONG - 1),)), demand) is None


def test_samples_come_with_the_largest_first() -> None:
    given = samples_of([ids(SHORT), ids(LONG), ids(MIDDLE)], None, Words())
    assert [one.size(1) for one in given] == [LONG, MIDDLE, SHORT]
    given = samples_of(ids(8), [100, 5, 6, 33, 100], Words())
    assert [one.size(1) for one in given] == [100, 48, 6]
    assert samples_of(None, None, Words()) == []


@pytest.mark.parametrize(
    "lengths",
    [
        np.array([12, 4, 12]),
        torch.tensor([4, 12]),
        {np.int64(4): np.int64(3), 12: 1},
        (length for length in (4, 12)),
        {4: 2, 12: 1, 7: 0},
    ],
    ids=["array", "tensor", "histogram", "generator", "zero"],
)
def test_lengths_of_a_dataset_are_whole_numbers_of_any_kind(lengths: Any) -> None:
    assert [one.size(1) for one in samples_of(ids(LONG), lengths, Words())] == [12, 4]


@pytest.mark.parametrize(
    ("sample", "lengths", "error", "words"),
    [
        ([], None, ValueError, "empty list"),
        ([ids(4)], [4], TypeError, "one batch"),
        (torch.zeros(4, 4), [4], memscale.MemScaleError, "second dimension"),
        (ids(4), [], ValueError, "nothing"),
        (ids(4), [4, 0], ValueError, "has 0"),
        (ids(4), [2.5], ValueError, "2.5"),
        (ids(4), 64, TypeError, "not 64"),
        (ids(4), "64", TypeError, "not '64'"),
        (ids(4), {4: -1}, ValueError, "cannot be -1"),
        (ids(4), {4: 1.5}, ValueError, "cannot be 1.5"),
        (ids(4), [True], ValueError, "has True"),
        (ids(4), np.array([4.0]), ValueError, "4.0"),
    ],
)
def test_samples_that_say_nothing_are_refused(sample: Any, lengths: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        samples_of(sample, lengths, Words())


@pytest.mark.parametrize("longest", range(1, 9))
def test_the_largest_that_fits_is_found_by_halving(longest: int) -> None:
    samples = [Inputs((ids(length),)) for length in range(8, 0, -1)]
    tried: list[int] = []

    def fits(sample: Inputs) -> bool:
        tried.append(sample.size(1) or 0)
        return tried[-1] < longest

    found = largest_that_fits(samples, fits)
    assert (found.size(1) if found else 0) == longest - 1
    assert len(tried) <= 3


def test_a_change_of_plans_moves_nothing_and_looks_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that stream the same parameters: who steps them is known, and gets its state back in the end."""
    monkeypatch.setattr(known_plans, "_WORTH_LOOSENING", 0.0)  # also what costs a small model next to nothing
    torch.manual_seed(0)
    model = Words().to("simgpu")
    twin = copy.deepcopy(model)
    plain_bytes = memscale.estimate(model, ids(LONG).to("simgpu")).baseline_peak_bytes
    streaming = memscale.Config(memory_budget_gb=0.5 * plain_bytes / 1e9, enable_logging=False, async_offload=False)
    memscale.wrap(model, streaming, sample_input=ids(LONG).to("simgpu"), lengths=[LONG, SHORT])
    executor: Any = model._memscale_executor
    assert executor.streams
    pairs = [(each, torch.optim.AdamW(each.parameters(), lr=1e-3)) for each in (model, twin)]

    def step(length: int) -> None:
        for each, optimizer in pairs:
            torch.manual_seed(length)
            each(ids(length).to("simgpu")).backward()
            optimizer.step()
            optimizer.zero_grad()

    step(LONG)
    homes = [parameter.data_ptr() for parameter in model.parameters()]
    plans = {len(executor.plan.actions)}
    monkeypatch.setattr(state_following, "living_optimizers", _nobody_asks)
    for length in (SHORT, LONG, SHORT):
        step(length)
        plans.add(len(executor.plan.actions))
    assert len(plans) == 2
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes
    model(ids(LONG).to("simgpu"))  # changes once more, and nobody steps
    memscale.detach(model)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.device.type == "simgpu"
        assert torch.equal(ours.cpu(), theirs.cpu())
        assert all(value.device.type == "simgpu" for name, value in pairs[0][1].state[ours].items() if name != "step")


def _nobody_asks() -> Any:
    raise AssertionError("a change of plans went through all objects of the process")
