"""Models that fake tensors cannot follow: nothing runs but what the user runs, and the plan comes from those steps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import logging
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import memscale
import simgpu  # noqa: F401  (registers the device)
from memscale import Config
from memscale._execute.executor import executor_of
from memscale._plan import OffloadOptimizer, StreamParameters
from memscale._planning.loop.observed_steps import MAX_FAILED_TRIES
from memscale._planning.loop.plan_maker import PlanMaker
from memscale._profile.inputs import Inputs
from tests.models import Mlp, case, square_loss
from tests.modes import Counting
from tests.parity import assert_same, assert_same_training, attached_plan, seed, train

CAREFUL = Config(force_optimize=True, enable_logging=False, mode="conservative", warmup_steps=1)
SAMPLE = torch.ones(64, 32)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.state = {"calls": 0}

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.state["calls"] += 1
        return x + scale * self.down(torch.relu(self.up(x))) * min(1.0, self.state["calls"] / 10)


class ByValue(nn.Module):
    """Its way depends on a number that only real data have; a block takes a parameter and changes a dict."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        if x.detach().sum().item() > 1e9:
            return x
        for block in self.blocks:
            x = block(x, self.scale)
        return x


BY_VALUE = dataclasses.replace(
    case("mlp"), name="by value", build=ByValue, batch=lambda n: {"x": torch.full((64, 32), 0.1 * (n + 1))}
)


def hooks_on(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    parameters = sum(
        len(p._backward_hooks or {}) + len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()
    )
    return modules + parameters


@pytest.mark.parametrize("sampled", [True, False], ids=["with a sample", "without"])
@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_training_is_the_plain_one(sampled: bool, warmup_steps: int) -> None:
    config = CAREFUL.replace(warmup_steps=warmup_steps)
    sample = SAMPLE if sampled else None
    _, model = assert_same_training(BY_VALUE, lambda model: memscale.wrap(model, config, sample))
    plan = attached_plan(model)
    assert plan.profile_source == "empirical"
    assert not plan.provisional
    assert plan.actions


class _Output:
    """What a forward has when its hooks plan."""


def test_a_refused_rehearsal_keeps_nothing_of_the_forward_around_it() -> None:
    """Without Python's search for garbage, which may be many steps away: an output may be logits."""
    maker: Any = types.SimpleNamespace(_observing=types.SimpleNamespace(is_needed=True))

    def forward() -> weakref.ref[_Output]:
        output = _Output()
        with contextlib.suppress(memscale.ProfileError):
            PlanMaker._rehearsed(maker, ByValue(), Inputs.from_sample(SAMPLE), lambda profile: None)
        return weakref.ref(output)

    gc.disable()
    try:
        assert forward()() is None
    finally:
        gc.enable()


def test_wrapping_runs_nothing_and_changes_nothing() -> None:
    model = ByValue()
    memscale.wrap(model, CAREFUL, SAMPLE)
    assert model.num_forwards == 0
    assert [block.state for block in model.blocks] == [{"calls": 0}] * 4  # type: ignore[comparison-overlap]
    assert hooks_on(model) == 1, "the planner's own"
    assert attached_plan(model).provisional
    assert "not known until a training step has been seen" in attached_plan(model).explain()
    memscale.detach(model)
    assert hooks_on(model) == 0


def test_estimating_never_touches_the_model() -> None:
    model = ByValue()
    with pytest.raises(memscale.ProfileError, match="from its first training steps"):
        memscale.estimate(model, SAMPLE)
    assert model.num_forwards == 0
    assert hooks_on(model) == 0


def test_the_log_says_why_steps_are_observed_and_not_what_to_do_about_a_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody gave one, or it was taken."""
    with caplog.at_level(logging.INFO, "memscale"):
        model = memscale.wrap(ByValue(), CAREFUL.replace(enable_logging=True))
        square_loss(model(SAMPLE)).backward()
    (said,) = [record.getMessage() for record in caplog.records if "steps are observed" in record.getMessage()]
    assert said.startswith("ByValue could not be profiled before it is trained: ")
    assert "sample_input" not in said
    memscale.detach(model)


def test_the_users_steps_are_the_only_ones() -> None:
    model = memscale.wrap(ByValue(), CAREFUL)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 5):
        square_loss(model(SAMPLE)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model.num_forwards == step
    assert hooks_on(model) == 2, "the planner's own; nothing of the observation is left, on modules or on parameters"
    memscale.detach(model)
    assert hooks_on(model) == 0


def test_a_model_that_installs_hooks_by_itself_keeps_them_once() -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=37, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=8
    )
    text = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    seed(0)
    plain = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=98)
    ).train()
    model = copy.deepcopy(plain)
    ids = torch.randint(0, 98, (2, 10))
    ids[:, :4] = 98
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16), "labels": ids, "use_cache": False}
    config = CAREFUL.replace(use_static_profiling=False)
    memscale.wrap(model, config, sample_input=batch)
    for _ in range(3):
        losses = []
        for each in (plain, model):
            torch.manual_seed(1)
            losses.append(each(**batch).loss)
            losses[-1].backward()
        assert torch.equal(*losses)
    assert not attached_plan(model).provisional
    memscale.detach(model)
    for (name, ours), theirs in zip(model.named_modules(), plain.modules(), strict=True):
        assert len(ours._forward_hooks) == len(theirs._forward_hooks), name
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


# ---- the number holds


@pytest.fixture(params=["cpu", "simgpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def peaks(model: nn.Module, device: str, num_steps: int, batch: int = 256) -> list[int]:
    """Of whole steps, less what others hold on the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(num_steps):
        x = torch.full((batch, 32), 0.01 * (step + 1), device=device)
        gc.collect()
        with memscale.measure(device) as measured:
            loss = square_loss(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        found.append(measured.peak_bytes)
    return found


def others(device: str) -> int:
    gc.collect()
    with memscale.measure(device) as measured:
        pass
    return measured.peak_bytes


def test_the_observed_plan_keeps_its_word(device: str) -> None:
    strangers = others(device)
    baseline = max(peaks(ByValue(8).to(device), device, 3)) - strangers
    budget = 0.75 * baseline
    model = ByValue(8).to(device)
    memscale.wrap(model, CAREFUL.replace(force_optimize=False, memory_budget_gb=budget / 1e9))
    measured = [peak - strangers for peak in peaks(model, device, 5)]
    plan = attached_plan(model)
    assert plan.profile_source == "empirical"
    assert 0 < len(plan.actions) < 8, "no more blocks than the budget needs"
    assert max(measured) <= budget
    assert max(measured[1:]) <= plan.predicted_peak_bytes <= 1.05 * max(measured[1:])
    assert baseline <= plan.baseline_peak_bytes <= 1.05 * baseline


def test_what_one_careful_step_shows_is_the_plain_step() -> None:
    """The plain step is worked out from recomputes; fake tensors show it directly."""
    model = Mlp(depth=4)
    config = Config(force_optimize=True, enable_logging=False, mode="conservative", warmup_steps=1)
    expected = memscale.estimate(model, torch.ones(64, 64), config=config).baseline_peak_bytes
    memscale.wrap(model, config.replace(use_static_profiling=False))
    for _ in range(2):
        square_loss(model(torch.ones(64, 64))).backward()
    assert attached_plan(model).baseline_peak_bytes == pytest.approx(expected, rel=0.01)


def test_a_model_that_fits_is_left_alone_after_its_careful_steps() -> None:
    model = memscale.wrap(ByValue(), CAREFUL.replace(force_optimize=False), SAMPLE)
    assert attached_plan(model).actions, "careful until something is known"
    for _ in range(3):
        square_loss(model(SAMPLE)).backward()
    assert attached_plan(model).actions == ()


def test_large_weights_are_streamed_until_something_is_known() -> None:
    """Parameters and gradients would take more than half of the budget."""
    strangers = others("simgpu")
    weights = sum(p.nbytes for p in ByValue(8).parameters())
    seed(1)
    model = ByValue(8)
    twin = copy.deepcopy(model)
    model.to("simgpu")
    memscale.wrap(model, Config(memory_budget_gb=3 * weights / 1e9, enable_logging=False, warmup_steps=1))
    found = [peak - strangers for peak in peaks(model, "simgpu", 4, batch=64)]
    assert all(isinstance(action, StreamParameters | OffloadOptimizer) for action in attached_plan(model).actions)
    assert max(found) <= 3 * weights
    assert max(found[1:]) <= 1.1 * attached_plan(model).predicted_peak_bytes
    peaks(twin.to("simgpu"), "simgpu", 4, batch=64)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu()), name


def test_the_step_in_which_a_plan_streams_fewer_blocks_is_no_higher_than_later_ones() -> None:
    """What stays streamed does not come to the device in between, nor does its state."""
    strangers = others("simgpu")
    weights = sum(p.nbytes for p in ByValue(8).parameters())
    model = ByValue(8).to("simgpu")
    memscale.wrap(model, Config(memory_budget_gb=3.5 * weights / 1e9, enable_logging=False, warmup_steps=1))
    found = [peak - strangers for peak in peaks(model, "simgpu", 3, batch=64)]
    plan = attached_plan(model)
    assert 0 < sum(isinstance(action, StreamParameters) for action in plan.actions) < 8
    assert found[1] <= found[2] <= plan.predicted_peak_bytes
    memscale.detach(model)


def test_what_does_not_fit_says_so_when_it_is_known() -> None:
    model = memscale.wrap(ByValue(), CAREFUL.replace(force_optimize=False, memory_budget_gb=4e-4))
    square_loss(model(SAMPLE)).backward()
    with pytest.raises(memscale.DoesNotFitError):
        model(SAMPLE)


class Skipping(ByValue):
    """Skips a block by what the data say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = 1 if x.detach().mean().item() < 1 else -1
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x, self.scale)
        return x


def test_a_block_that_was_skipped_counts_as_present() -> None:
    model = memscale.wrap(Skipping(), CAREFUL.replace(force_optimize=False))
    for _ in range(2):
        square_loss(model(SAMPLE * 0.1)).backward()
    skipped = attached_plan(model)
    other = memscale.wrap(Skipping(), CAREFUL.replace(force_optimize=False))
    for _ in range(2):
        square_loss(other(SAMPLE * 2)).backward()
    whole = attached_plan(other)
    assert skipped.baseline_peak_bytes >= 0.99 * whole.baseline_peak_bytes


# ---- odd loops


def test_modes_of_the_user_come_and_go_around_an_observed_step() -> None:
    model = memscale.wrap(ByValue(), CAREFUL)
    forward, backward = Counting(), Counting()
    with forward:
        loss = square_loss(model(SAMPLE))
    assert forward.count
    stack = _get_current_dispatch_mode_stack()
    assert forward not in stack
    with backward:
        loss.backward()
    assert backward.count
    assert len(_get_current_dispatch_mode_stack()) == 1, "the observation goes on until the step is over"
    square_loss(model(SAMPLE)).backward()
    assert not attached_plan(model).provisional
    memscale.detach(model)
    assert _get_current_dispatch_mode_stack() == []


def test_two_forwards_before_one_backward_are_one_step() -> None:
    seed(1)
    model = ByValue()
    twin = copy.deepcopy(model)
    memscale.wrap(model, CAREFUL)
    for _ in range(3):
        for each in (model, twin):
            (square_loss(each(SAMPLE)) + square_loss(each(2 * SAMPLE))).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert not attached_plan(model).provisional


class Boom(Exception):
    pass


def test_an_error_in_an_observed_step_leaves_the_next_one_right() -> None:
    seed(1)
    model = ByValue()
    twin = copy.deepcopy(model)
    memscale.wrap(model, CAREFUL)
    handle = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(Boom):
        model(SAMPLE)
    handle.remove()
    loss = square_loss(model(SAMPLE))
    handle = model.blocks[0].up.weight.register_hook(fail)
    with pytest.raises(Boom):
        loss.backward()
    handle.remove()
    del loss
    model.zero_grad()
    for block, plain in zip(model.blocks, twin.blocks, strict=True):
        plain.state["calls"] = block.state["calls"]  # the failed forwards counted
    assert_same(train(model, BY_VALUE), train(twin, BY_VALUE))
    assert not attached_plan(model).provisional


def fail(*_: Any) -> None:
    raise Boom


def test_a_backward_that_broke_off_does_not_tell_what_a_step_takes() -> None:
    model = memscale.wrap(ByValue(), CAREFUL)
    handle = model.blocks[2].up.weight.register_hook(fail)
    with pytest.raises(Boom):
        square_loss(model(SAMPLE)).backward()
    handle.remove()
    model.zero_grad()
    loss = square_loss(model(SAMPLE))
    assert attached_plan(model).provisional, "half a step was seen"
    loss.backward()
    model(SAMPLE)
    assert not attached_plan(model).provisional


def test_a_forward_that_raises_leaves_no_mode() -> None:
    model = memscale.wrap(ByValue(), CAREFUL)
    handle = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(Boom):
        model(SAMPLE)
    assert _get_current_dispatch_mode_stack() == []
    try:
        raise KeyError
    except KeyError:  # an exception that is being handled is none of the forward's
        with pytest.raises(Boom):
            model(SAMPLE)
        assert _get_current_dispatch_mode_stack() == []
        handle.remove()
        loss = square_loss(model(SAMPLE))
        assert len(_get_current_dispatch_mode_stack()) == 1
    loss.backward()
    square_loss(model(SAMPLE)).backward()
    assert not attached_plan(model).provisional
    memscale.detach(model)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = ByValue(2), ByValue(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


def test_a_wrapped_model_inside_another_leaves_no_mode() -> None:
    seed(1)
    model = Nested()
    twin = copy.deepcopy(model)
    memscale.wrap(model.inner, CAREFUL)
    memscale.wrap(model, CAREFUL)
    handle = model.outer.blocks[0].register_forward_hook(fail)
    with pytest.raises(Boom):
        model(SAMPLE)
    assert _get_current_dispatch_mode_stack() == [], "neither the outer's nor that of the inner, which was through"
    handle.remove()
    for block, plain in zip(model.inner.blocks, twin.inner.blocks, strict=True):
        plain.state["calls"] = block.state["calls"]
    twin.outer.blocks[0].state["calls"] = model.outer.blocks[0].state["calls"]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for _ in range(4):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            square_loss(each(SAMPLE)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert _get_current_dispatch_mode_stack() == []
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    memscale.detach(model)
    memscale.detach(model.inner)
    assert _get_current_dispatch_mode_stack() == []


def test_observing_is_given_up_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    model = memscale.wrap(ByValue(), CAREFUL)
    handle = model.blocks[1].register_forward_hook(fail)
    for _ in range(MAX_FAILED_TRIES + 3):
        with pytest.raises(Boom):
            model(SAMPLE)
    handle.remove()
    assert caplog.text.count("not observed any more") == 1
    for _ in range(2):
        square_loss(model(SAMPLE)).backward()
        assert _get_current_dispatch_mode_stack() == []
    assert attached_plan(model).provisional, "the careful plan, which is exact, stays"
    assert attached_plan(model).actions
    assert hooks_on(model) == 2
    memscale.detach(model)


def test_a_model_dropped_in_the_middle_of_an_observed_step_is_gone() -> None:
    """The fixture of every test sees to it that nothing of ours is left behind."""
    model = memscale.wrap(ByValue(), CAREFUL)
    loss = square_loss(model(SAMPLE))
    del model, loss
    gc.collect()
    assert _get_current_dispatch_mode_stack() == []


def test_a_copy_made_in_the_middle_of_an_observed_step_is_plain() -> None:
    model = memscale.wrap(ByValue(), CAREFUL)
    loss = square_loss(model(SAMPLE))
    twin = copy.deepcopy(model)
    loss.backward()
    assert executor_of(twin) is None
    assert hooks_on(twin) == 0
    memscale.detach(model)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def test_evaluation_inside_an_observed_step() -> None:
    model = memscale.wrap(ByValue(), CAREFUL)
    for _ in range(3):
        loss = square_loss(model(SAMPLE))
        with evaluating(model):
            model(SAMPLE)
        loss.backward()
    assert not attached_plan(model).provisional


def test_without_the_fallback_a_sample_that_cannot_be_rehearsed_is_an_error() -> None:
    model = ByValue()
    with pytest.raises(memscale.ProfileError, match="on fake tensors"):
        memscale.wrap(model, CAREFUL.replace(use_empirical_fallback=False), SAMPLE)
    assert executor_of(model) is None


def test_two_models_and_a_hook_of_the_users_share_an_optimizer() -> None:
    """Nobody takes a hook off the table that PyTorch is going through, and no step but the user's shows in it."""
    models = [memscale.wrap(ByValue(2), CAREFUL) for _ in range(2)]
    calls: list[int] = []
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for step in range(4):
        loss = sum(square_loss(model(SAMPLE)) for model in models)
        if step == 0:
            handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    assert len(calls) == 4
    assert not any(attached_plan(model).provisional for model in models)


def test_a_plan_holds_for_what_was_seen_and_for_nothing_larger() -> None:
    model = memscale.wrap(ByValue(), CAREFUL.replace(force_optimize=False, warmup_steps=2))
    for rows in (16, 16, 256, 256):
        square_loss(model(torch.ones(rows, 32))).backward()
    plan = attached_plan(model)
    assert plan.inputs == ("0: 256x32 float32",), "the larger batch was observed before the plan was made"


def test_shapes_that_take_turns_are_planned_for_together(caplog: pytest.LogCaptureFixture) -> None:
    model = memscale.wrap(case("gpt2").build(), CAREFUL.replace(use_static_profiling=False, warmup_steps=2))
    shapes = [(1, 24), (2, 16), (4, 8)]
    for step in range(12):
        ids = torch.ones(shapes[step % 3], dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        if step > 6:
            assert not attached_plan(model).provisional


def test_parameters_put_in_later_are_planned_for() -> None:
    model = memscale.wrap(Mlp(depth=2), CAREFUL, torch.ones(8, 64))
    before = attached_plan(model)
    model.blocks.append(nn.Linear(64, 64))
    model(torch.ones(8, 64))
    assert attached_plan(model) is not before


def test_a_backward_that_was_not_seen_is_not_counted() -> None:
    """In another thread than the forward: the plan stays careful."""
    model = memscale.wrap(ByValue(), CAREFUL)
    for _ in range(3):
        loss = square_loss(model(SAMPLE))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert attached_plan(model).provisional
    memscale.detach(model)
    assert _get_current_dispatch_mode_stack() == []


def test_an_optimizer_that_steps_in_backward_leaves_no_mode_behind() -> None:
    model = memscale.wrap(ByValue(), CAREFUL)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    for _ in range(4):
        square_loss(model(SAMPLE)).backward()
    assert not attached_plan(model).provisional
    memscale.detach(model)
    assert _get_current_dispatch_mode_stack() == []
    for handle in handles:
        handle.remove()


def test_gradients_that_are_asked_for_directly_are_a_backward() -> None:
    model = memscale.wrap(ByValue(), CAREFUL)
    for _ in range(4):
        torch.autograd.grad(square_loss(model(SAMPLE)), list(model.parameters()))
    assert not attached_plan(model).provisional
    assert _get_current_dispatch_mode_stack() == []


def test_other_parameters_may_stand_in_for_an_observed_models() -> None:
    seed(1)
    model = ByValue()
    twin = copy.deepcopy(model)
    memscale.wrap(model, CAREFUL)
    for _ in range(3):
        found = []
        for each in (model, twin):
            leaves = {name: p.detach().clone().requires_grad_() for name, p in each.named_parameters()}
            others = {name: leaf * 1 for name, leaf in leaves.items()}
            square_loss(torch.func.functional_call(each, others, (SAMPLE,))).backward()
            found.append([leaf.grad for leaf in leaves.values()])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    memscale.detach(model)
