"""Several forwards before a backward: which are open, and the plan stays until none is."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memscale
import simgpu
from memscale import AsyncOffloadConfig, Config
from memscale._plan import TileHead
from memscale._planning.loop.open_passes import OpenPasses
from memscale.techniques.tiling.head import attach_head
from memscale.techniques.tiling.head.lazy import LazyLogits
from tests.parity import attached_plan
from tests.techniques.offload.runs import DEVICE, Gpt, gradients, same, tokens, weights
from tests.techniques.tiling.models import builds

SHORT, LONG, WIDE = (2, 8), (2, 24), (4, 8)


class Watched:
    """A model whose forwards are followed."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        self.passes = OpenPasses(self.model)
        self.passes.follow()

    def forward(self) -> torch.Tensor:
        return self.model(torch.ones(1, 3))


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    watched = Watched()
    try:
        yield watched
    finally:
        watched.passes.stop()
        assert not watched.model._forward_hooks


def test_a_forward_is_open_until_its_backward() -> None:
    with watching() as watched:
        assert not watched.passes.are_open
        first, second = watched.forward(), watched.forward()
        first.sum().backward()
        assert watched.passes.are_open
        second.sum().backward()
        assert not watched.passes.are_open  # though both are held


def test_a_forward_whose_graph_is_gone_is_not_open() -> None:
    with watching() as watched:
        output = watched.forward()
        number = output.detach()
        assert watched.passes.are_open
        del output
        gc.collect()
        assert not watched.passes.are_open
        assert number.shape == (1, 2)


def test_a_loss_that_goes_round_the_logits_closes_their_forward() -> None:
    with watching() as watched, builds() as built:
        undo = contextlib.ExitStack()
        attach_head(TileHead("", 2), watched.model, undo)
        logits = watched.model(torch.ones(5, 3))
        assert isinstance(logits, LazyLogits)
        assert watched.passes.are_open
        nn.functional.cross_entropy(logits, torch.zeros(5, dtype=torch.long)).backward()
        assert not watched.passes.are_open
        assert not built
        undo.close()


def test_a_step_closes_what_was_open_and_others_do_not() -> None:
    with watching() as watched:
        output = watched.forward()
        other = nn.Parameter(torch.ones(2))
        other.grad = torch.ones(2)
        torch.optim.SGD([other], lr=0.1).step()
        assert watched.passes.are_open
        torch.optim.SGD(watched.model.parameters(), lr=0.1).step()
        assert not watched.passes.are_open
        assert output.grad_fn is not None


def test_evaluation_is_not_open() -> None:
    with watching() as watched:
        with torch.no_grad():
            without = watched.forward()
        watched.model.eval()
        assert watched.forward().grad_fn is not None
        assert without.grad_fn is None
        assert not watched.passes.are_open


def test_a_graph_that_is_kept_stays_open() -> None:
    with watching() as watched:
        output = watched.forward()
        output.sum().backward(retain_graph=True)
        assert watched.passes.are_open
        output.sum().backward()
        assert not watched.passes.are_open


# ---- plans


def pairs(
    model: nn.Module, shapes: list[tuple[int, int]], num_steps: int = 3, call: Callable[..., Any] | None = None
) -> list[Any]:
    """One backward for all of these batches."""
    optimizer, noted = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(num_steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        outputs = [(call or model)(tokens(step + 10 * turn, shape)) for turn, shape in enumerate(shapes)]
        loss = torch.stack([output.float().square().mean() for output in outputs]).prod()
        loss.backward()
        noted.append((loss.detach().cpu(), gradients(model)))
        optimizer.step()
    return noted


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("shapes", [[SHORT, LONG], [SHORT, LONG, WIDE]])
def test_batches_of_other_shapes_before_backward_train_the_same(
    asynchronous: bool, shapes: list[tuple[int, int]], simgpu_device: Any, no_leaks: None
) -> None:
    torch.manual_seed(1)
    theirs = Gpt(2).to(DEVICE)
    ours = copy.deepcopy(theirs)
    transfers = AsyncOffloadConfig(min_tensor_bytes=0, window_bytes=4096, prefetch_bytes=4096)
    config = Config(force_optimize=True, async_offload=asynchronous, async_config=transfers, enable_logging=False)
    memscale.wrap(ours, config)
    found, expected = pairs(ours, shapes), pairs(theirs, shapes)
    assert attached_plan(ours).actions
    for (loss, of_ours), (expected_loss, of_theirs) in zip(found, expected, strict=True):
        assert torch.equal(loss, expected_loss)
        assert same(of_ours, of_theirs)
    memscale.detach(ours)
    assert same(weights(ours), weights(theirs))
    assert simgpu.take_reports() == []


def test_one_plan_holds_for_all_batches_of_such_a_step(simgpu_device: Any, no_leaks: None) -> None:
    torch.manual_seed(1)
    model = Gpt(2).to(DEVICE)
    memscale.wrap(model, Config(force_optimize=True, enable_logging=False))
    pairs(model, [SHORT, LONG, WIDE], num_steps=1)
    assert attached_plan(model).inputs == ("0: 2x8 int64",)
    pairs(model, [SHORT, LONG, WIDE], num_steps=1)
    assert attached_plan(model).inputs == ("0: 4x24 int64",)
    pairs(model, [LONG, SHORT], num_steps=2)
    assert attached_plan(model).inputs == ("0: 4x24 int64",)
    memscale.detach(model)


@pytest.mark.parametrize("sizes", [[SHORT], [SHORT, LONG]])
def test_a_checkpoint_around_the_whole_model_is_planned_and_computed_again_alike(
    sizes: list[tuple[int, int]], simgpu_device: Any, no_leaks: None
) -> None:
    torch.manual_seed(1)
    theirs = Gpt(2).to(DEVICE)
    ours = copy.deepcopy(theirs)
    memscale.wrap(ours, Config(force_optimize=True, enable_logging=False))
    found, expected = (
        pairs(model, sizes, call=lambda ids, model=model: checkpoint(model, ids, use_reentrant=False))
        for model in (ours, theirs)
    )
    plan = attached_plan(ours)
    assert plan.rehearsed
    assert plan.actions
    assert all(torch.equal(a[0], b[0]) and same(a[1], b[1]) for a, b in zip(found, expected, strict=True))
    memscale.detach(ours)
    assert same(weights(ours), weights(theirs))


def _twice_through_the_first(model: nn.Module) -> list[Any]:
    optimizer, noted = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(2):
        optimizer.zero_grad()
        first = model(tokens(step, (4, 8))).float().square().mean()
        first.backward(retain_graph=True)
        (first * model(tokens(step + 9, (4, 64))).float().square().mean()).backward()
        noted.append(gradients(model))
        optimizer.step()
    return noted


def test_a_larger_batch_does_not_take_the_plan_of_a_graph_that_is_kept(simgpu_device: Any, no_leaks: None) -> None:
    torch.manual_seed(1)
    theirs = Gpt(3, 64, dropout=0.0).to(DEVICE)
    ours = copy.deepcopy(theirs)
    memscale.wrap(ours, Config(memory_budget_gb=0.0035, enable_logging=False))
    found, expected = _twice_through_the_first(ours), _twice_through_the_first(theirs)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    memscale.detach(ours)
    assert same(weights(ours), weights(theirs))
