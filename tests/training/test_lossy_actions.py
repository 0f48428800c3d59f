"""Mixed precision and the 8-bit optimizer as parts of plans: asked for, decided, saved, attached, resumed."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan
from memscale._decide import decide
from memscale._decide.eligible import resolve
from memscale._execute.executor import execute, executor_of
from memscale._plan import Checkpoint, MixedPrecision, QuantizeOptimizer
from memscale._planning import attaching
from tests.models import Mlp, square_loss
from tests.parity import plan_of
from tests.profiles import hardware_of, profile_of

HARDWARE, PROFILE = hardware_of(), profile_of(4)


def names(plan: Plan) -> list[str]:
    return [type(action).__name__ for action in plan.actions]


# ---- decided


def test_what_is_asked_for_by_name_is_done_even_if_the_model_fits() -> None:
    plan = decide(PROFILE, resolve(Config(use_mixed_precision=True, use_8bit_optimizer=True), HARDWARE))
    assert "skip" in plan.summary.rule
    assert names(plan) == ["MixedPrecision", "QuantizeOptimizer"]
    assert plan.actions[0] == MixedPrecision("bfloat16", plan.actions[0].reason)
    assert "use_mixed_precision=True" in plan.actions[0].reason.rule
    assert "use_8bit_optimizer=True" in plan.actions[1].reason.rule


def test_a_mode_gives_lossy_techniques_only_under_pressure() -> None:
    mode = Config(mode="aggressive", device="cpu")
    assert decide(PROFILE, resolve(mode, HARDWARE)).actions == ()
    smaller = dataclasses.replace(PROFILE.optimizer, state_bytes=PROFILE.optimizer.state_bytes // 4)
    profile = dataclasses.replace(PROFILE, eight_bit_optimizer=smaller)
    assert "QuantizeOptimizer" in names(decide(profile, resolve(mode.replace(force_optimize=True), HARDWARE)))


@pytest.mark.parametrize("name", ["use_mixed_precision", "use_8bit_optimizer"])
def test_an_explicit_no_wins_over_the_mode(name: str) -> None:
    plan = decide(PROFILE, resolve(Config(mode="aggressive", force_optimize=True, **{name: False}), HARDWARE))
    assert {"use_mixed_precision": "MixedPrecision", "use_8bit_optimizer": "QuantizeOptimizer"}[name] not in names(plan)


@pytest.mark.parametrize(
    ("bf16", "fp16", "fast", "dtype"),
    [(True, True, True, "bfloat16"), (False, True, True, "float16"), (False, True, False, None)],
)
def test_the_dtype_is_the_best_that_the_hardware_has(bf16: bool, fp16: bool, fast: bool, dtype: str | None) -> None:
    hardware = hardware_of(supports_bf16=bf16, supports_fp16=fp16, has_fast_16bit=fast)
    plan = decide(PROFILE, resolve(Config(use_mixed_precision=True), hardware))
    assert [action.dtype for action in plan.actions if isinstance(action, MixedPrecision)] == ([dtype] if dtype else [])


def test_lossy_actions_survive_json() -> None:
    plan = plan_of([Checkpoint("blocks.0"), MixedPrecision("float16"), QuantizeOptimizer(1 << 20, 128, 512)])
    assert Plan.from_json(plan.to_json()) == plan


# ---- attached


def test_the_forward_in_which_the_plan_is_made_is_in_16_bits_already() -> None:
    model, seen = Mlp(), []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    memscale.wrap(model, Config(use_mixed_precision=True, enable_logging=False))
    for _ in range(2):
        output = model(torch.randn(4, 64))
        assert output.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        assert seen[-1]  # the calls before it were rehearsals
    memscale.detach(model)
    model(torch.randn(4, 64))
    assert not seen[-1]


def test_a_larger_batch_is_planned_again_in_the_middle_of_training() -> None:
    model = memscale.wrap(Mlp(), Config(use_mixed_precision=True, enable_logging=False))
    for rows in (2, 8, 4, 16):
        square_loss(model(torch.randn(rows, 64))).backward()
        assert not torch.is_autocast_enabled("cpu")
    memscale.detach(model)


def test_an_error_in_the_first_forward_leaves_no_autocast_behind() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("as told")
            return self.line(x)

    model = memscale.wrap(Fails(), Config(use_mixed_precision=True, enable_logging=False))
    model(torch.randn(2, 4))
    model.fails = True
    with pytest.raises(ValueError, match="as told"):
        model(torch.randn(1, 4))
    assert not torch.is_autocast_enabled("cpu")
    memscale.detach(model)


def test_the_trace_of_a_rehearsal_is_in_16_bits() -> None:
    sample = torch.randn(512, 64)
    plain = memscale.wrap(Mlp(), Config(enable_logging=False), sample)
    half = memscale.wrap(Mlp(), Config(use_mixed_precision=True, enable_logging=False), sample)
    assert executor_of(half).plan.rehearsed
    assert executor_of(half).plan.predicted_peak_bytes < executor_of(plain).plan.predicted_peak_bytes
    memscale.detach(plain)
    memscale.detach(half)


# ---- the loss scale goes on


def test_the_loss_scale_outlives_its_plan_and_its_process() -> None:
    model = Mlp()
    executor = execute(model, plan_of([MixedPrecision("float16")]))
    assert executor.stats().loss_scale == 2.0**16
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    (model(torch.randn(4, 64)).sum() * float("inf")).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert (executor.stats().loss_scale, executor.stats().num_skipped_steps) == (2.0**15, 1)
    executor.apply(plan_of([MixedPrecision("float16"), Checkpoint("blocks.0")]))
    assert executor.stats().loss_scale == 2.0**15
    saved = json.loads(json.dumps(executor.state_dict()))
    executor.detach()

    again = Mlp()
    resumed = execute(again, plan_of([]))
    resumed.load_state_dict(copy.deepcopy(saved))
    resumed.apply(plan_of([MixedPrecision("float16")]))
    assert (resumed.stats().loss_scale, resumed.stats().num_skipped_steps) == (2.0**15, 1)
    assert resumed.state_dict() == saved
    resumed.detach()


def test_without_fp16_there_is_no_loss_scale_to_save() -> None:
    model = Mlp()
    executor = execute(model, plan_of([MixedPrecision("bfloat16")]))
    assert executor.state_dict() == {"loss_scale": None}
    executor.load_state_dict({"loss_scale": None})
    executor.detach()


# ---- wishes that are not followed


def test_hardware_without_fast_16_bit_math_is_named_once() -> None:
    slow = hardware_of(supports_bf16=False, supports_fp16=True, has_fast_16bit=False)
    with pytest.warns(UserWarning, match="test card has no fast 16-bit math, so the model stays in full precision"):
        attaching._warn_of_slow_math(resolve(Config(use_mixed_precision=True), slow))
    attaching._warn_of_slow_math(resolve(Config(), slow))
    attaching._warn_of_slow_math(resolve(Config(use_mixed_precision=True), hardware_of()))
