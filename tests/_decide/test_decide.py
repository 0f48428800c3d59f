"""Deciding is a pure function: tables, laws, and the same bytes everywhere."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale import Config, DoesNotFitError
from memscale._decide import confirmed, decide, decide_on, has_faster, kind_of, needs_optimizing, suspects_of
from memscale._decide.budget import budget_bytes
from memscale._decide.choice import Choice, RunOptions, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._plan import Checkpoint, Plan, TileHead
from memscale._profile import CHECKPOINT, OFFLOAD, SELECTIVE
from tests.lanes import some
from tests.profiles import MB, Block, hardware_of, profile_of, with_tiled_head

pytestmark = pytest.mark.unit
HARDWARE = hardware_of()
PROFILE = profile_of(8)
BASELINE = CostModel(PROFILE, HARDWARE).evaluate(Choice()).peak_bytes
LOWEST = decide(PROFILE, resolve(Config(force_optimize=True), HARDWARE)).predicted_peak_bytes


def with_budget(num_bytes: float, **fields: Any) -> Config:
    return Config(memory_budget_gb=num_bytes / 1e9, enable_offloading=False, **fields)


# ---- the budget


def test_the_budget_is_the_utilisation_or_the_hard_limit() -> None:
    assert budget_bytes(HARDWARE, Config()) == int(0.85 * 10_000 * MB)
    assert budget_bytes(HARDWARE, Config(target_gpu_utilization=0.5)) == 5_000 * MB
    assert budget_bytes(HARDWARE, Config(memory_budget_gb=2)) == 2_000 * MB
    assert budget_bytes(HARDWARE, Config(memory_budget_gb=1.027)) == 1_027 * MB  # 1.027 * 1e9 is a little less
    assert budget_bytes(HARDWARE, Config(memory_budget_gb=2, target_gpu_utilization=0.1)) == 2_000 * MB


def test_what_others_hold_is_not_ours_to_use() -> None:
    busy = hardware_of(free_bytes=3_000 * MB)
    assert budget_bytes(busy, Config()) == 2_550 * MB, "a margin stays"
    assert budget_bytes(dataclasses.replace(busy, device_type="cpu"), Config()) == 3_000 * MB


# ---- 16 bits


@pytest.mark.parametrize(
    ("fields", "slow", "fast"),
    [
        ({"mode": "aggressive"}, None, "bfloat16"),
        ({"mode": "aggressive", "use_mixed_precision": False}, None, None),
        ({"use_mixed_precision": True}, "bfloat16", "bfloat16"),
        ({}, None, None),
    ],
)
def test_16_bits_that_are_left_to_the_mode_depend_on_the_hardware(
    fields: dict[str, Any], slow: str | None, fast: str | None
) -> None:
    config = Config(**fields).replace(warmup_steps=0)
    assert resolve(config, hardware_of(has_fast_16bit=False)).half_type == slow
    assert resolve(config, hardware_of(has_fast_16bit=True)).half_type == fast


# ---- smart skip and force


def test_what_fits_is_left_alone() -> None:
    plan = decide(PROFILE, resolve(Config(), HARDWARE))
    assert plan.actions == ()
    assert plan.fits
    assert plan.predicted_peak_bytes == plan.baseline_peak_bytes == BASELINE
    assert plan.predicted_slowdown == 1.0
    assert "skip" in plan.summary.rule
    assert plan.summary.numbers["baseline_bytes"] == BASELINE
    assert not needs_optimizing(CostModel(PROFILE, HARDWARE), resolve(Config(), HARDWARE))


def test_exactly_the_budget_fits_and_one_byte_less_does_not() -> None:
    assert decide(PROFILE, resolve(with_budget(BASELINE), HARDWARE)).actions == ()
    assert decide(PROFILE, resolve(with_budget(BASELINE - 1), HARDWARE)).actions != ()


def test_force_goes_as_low_as_it_can() -> None:
    plan = decide(PROFILE, resolve(Config(force_optimize=True), HARDWARE))
    assert plan.predicted_peak_bytes < BASELINE
    assert plan.predicted_slowdown > 1.0
    for num_bytes in range(LOWEST, BASELINE, 20 * MB):
        assert (
            decide(PROFILE, resolve(with_budget(num_bytes), HARDWARE)).predicted_peak_bytes >= plan.predicted_peak_bytes
        )


def test_force_without_techniques_does_nothing() -> None:
    config = Config(force_optimize=True, enable_checkpointing=False, enable_offloading=False)
    assert decide(PROFILE, resolve(config, HARDWARE)).actions == ()


def test_nothing_to_gain_by_force() -> None:
    dear = profile_of({"b": Block(keeps=10, keeps_selective=10, keeps_checkpointed=10)})
    assert decide(dear, resolve(Config(force_optimize=True, enable_offloading=False), HARDWARE)).actions == ()


# ---- no more than the budget needs


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 8])
def test_removing_any_action_breaks_the_budget(num_blocks: int) -> None:
    profile = profile_of(num_blocks, variants=(CHECKPOINT,))
    model = CostModel(profile, HARDWARE)
    baseline = model.evaluate(Choice()).peak_bytes
    lowest = decide(profile, resolve(with_budget(1e9, force_optimize=True), HARDWARE)).predicted_peak_bytes
    for budget in range(lowest, baseline, max(MB, (baseline - lowest) // 10)):
        plan = decide(profile, resolve(with_budget(budget), HARDWARE))
        assert plan.predicted_peak_bytes <= budget
        for index in range(len(plan.actions)):
            rest = choice_of(plan.actions[:index] + plan.actions[index + 1 :], profile)
            assert model.evaluate(rest).peak_bytes > budget


def test_more_pressure_treats_more_blocks() -> None:
    profile = profile_of(8, variants=(CHECKPOINT,))
    counts = [
        len(decide(profile, resolve(with_budget(BASELINE - saved * MB), HARDWARE)).actions)
        for saved in (0, 1, 91, 181, 271)
    ]
    assert counts == [0, 1, 2, 3, 4]


def test_the_best_bargain_comes_first() -> None:
    blocks = {"poor": Block(keeps=20), "rich": Block(keeps=300), "middling": Block(keeps=100)}
    profile = profile_of(blocks, variants=(CHECKPOINT,))
    baseline = CostModel(profile, HARDWARE).evaluate(Choice()).peak_bytes
    plan = decide(profile, resolve(with_budget(baseline - 1), HARDWARE))
    assert [action.module_fqn for action in plan.actions] == ["rich"]


def test_selective_is_preferred_where_it_suffices() -> None:
    plan = decide(PROFILE, resolve(with_budget(BASELINE - 60 * MB), HARDWARE))
    assert plan.actions
    assert all(isinstance(action, Checkpoint) and action.keep == ("matmul", "attention") for action in plan.actions)


def test_actions_come_in_the_models_order_with_rule_and_numbers() -> None:
    plan = decide(PROFILE, resolve(Config(force_optimize=True, enable_offloading=False), HARDWARE))
    names = [action.module_fqn for action in plan.actions]
    assert names == sorted(names)
    for action in plan.actions:
        assert action.reason.numbers["frees_bytes"] in (60 * MB, 90 * MB)
    treated = {row.module_fqn: row for row in plan.rows}
    assert set(treated) == {layer.module_fqn for layer in PROFILE.layers}
    assert treated["stem"].techniques == ()
    assert all(treated[name].techniques for name in names)


# ---- laws


blocks = st.builds(
    Block,
    keeps=st.integers(0, 400),
    keeps_selective=st.integers(0, 400),
    keeps_checkpointed=st.integers(0, 400),
    temporaries=st.integers(0, 100),
    gradients=st.integers(0, 50),
    time=st.integers(1, 500),
)
models = st.lists(blocks, min_size=1, max_size=6).map(lambda found: {f"b.{i}": b for i, b in enumerate(found)})


@settings(derandomize=True, max_examples=60, deadline=None)
@given(models, st.lists(st.integers(1, 3000), min_size=2, max_size=6))
def test_a_larger_budget_never_gives_a_slower_plan(found: dict[str, Block], budgets: list[int]) -> None:
    profile = profile_of(found)
    plans = [
        decide(profile, resolve(with_budget(budget * MB), HARDWARE), raise_if_unfit=False) for budget in sorted(budgets)
    ]
    for tighter, looser in itertools.pairwise(plans):
        assert looser.fits >= tighter.fits
        if tighter.fits:
            assert looser.predicted_slowdown <= tighter.predicted_slowdown


@settings(derandomize=True, max_examples=60, deadline=None)
@given(models, st.integers(1, 3000))
def test_a_plan_that_says_it_fits_fits(found: dict[str, Block], budget: int) -> None:
    profile = profile_of(found)
    plan = decide(profile, resolve(with_budget(budget * MB), HARDWARE), raise_if_unfit=False)
    again = CostModel(profile, HARDWARE).evaluate(choice_of(plan.actions, profile))
    assert again.peak_bytes == plan.predicted_peak_bytes
    assert plan.fits == (plan.predicted_peak_bytes <= plan.budget_bytes)
    assert plan.predicted_peak_bytes <= max(plan.baseline_peak_bytes, plan.budget_bytes)
    assert Plan.from_json(plan.to_json()) == plan


# ---- what does not fit


def test_misfits_say_the_numbers_and_the_remedy() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        decide(PROFILE, resolve(with_budget(LOWEST - 20 * MB), HARDWARE))
    text = str(caught.value)
    assert "budget" in text
    assert "lower the batch size from 16 to" in text
    smaller = int(text.split("lower the batch size from 16 to ")[1].split()[0])
    assert 1 <= smaller < 16


def test_a_technique_that_is_off_is_named_but_not_promised() -> None:
    with pytest.raises(DoesNotFitError, match="switched off: enable_checkpointing"):
        decide(PROFILE, resolve(with_budget(BASELINE / 2, enable_checkpointing=False), HARDWARE))


def test_what_is_exact_up_to_the_order_of_summation_is_named_so() -> None:
    config = with_budget(BASELINE / 2, enable_checkpointing=False, enable_tiling=False)
    with pytest.raises(
        DoesNotFitError, match=r"enable_checkpointing and .*enable_tiling \(up to the order of summation\)"
    ):
        decide(PROFILE, resolve(config, HARDWARE))


def test_no_batch_is_small_enough_for_the_parameters() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        decide(PROFILE, resolve(with_budget(10 * MB), HARDWARE))
    assert "batch" not in str(caught.value)


# ---- one plan says one thing


def says_one_thing(plan: Plan) -> bool:
    text = plan.explain()
    return ("nothing fits" not in text or not plan.fits) and ("that fit" not in plan.summary.rule or plan.fits)


@pytest.mark.parametrize("margin_mb", [0, 10, 100, 1000, 100_000])
def test_a_plan_that_fits_does_not_say_that_nothing_does(margin_mb: int) -> None:
    """A margin keeps every mixture out of this budget. Then the lowest is taken, which may fit all the same."""
    for budget in (LOWEST - MB, LOWEST, LOWEST + 50 * MB, BASELINE - MB):
        plan = decide(
            PROFILE, resolve(with_budget(budget), HARDWARE), margin_bytes=margin_mb * MB, raise_if_unfit=False
        )
        assert says_one_thing(plan)
        for peak in (budget - MB, budget + MB):
            assert says_one_thing(confirmed(plan, peak, fits=peak <= budget))


def test_what_was_rehearsed_counts_with_what_that_showed() -> None:
    budget = with_budget(LOWEST + 50 * MB)
    first = decide(PROFILE, resolve(budget, HARDWARE))
    shown = {choice_of(first.actions, PROFILE): first.budget_bytes + MB}
    second = decide(PROFILE, resolve(budget, HARDWARE), rehearsed=shown)
    assert second.actions != first.actions
    assert second.fits


def test_a_step_that_was_traced_as_a_whole_needs_no_margin() -> None:
    """What fits is not refused because mixtures were found to be above the peak model."""
    whole = Choice(tuple((layer.module_fqn, CHECKPOINT) for layer in PROFILE.layers if layer.is_block))
    peak = CostModel(PROFILE, HARDWARE).evaluate(whole).peak_bytes
    plan = decide(PROFILE, resolve(with_budget(peak), HARDWARE), margin_bytes=100 * MB, raise_if_unfit=False)
    assert plan.fits
    assert {type(action) for action in plan.actions} == {Checkpoint}
    assert len(plan.actions) == 8


def test_a_margin_is_kept() -> None:
    budget = BASELINE - 1 * MB
    close = decide(PROFILE, resolve(with_budget(budget), HARDWARE))
    safer = decide(PROFILE, resolve(with_budget(budget), HARDWARE), margin_bytes=100 * MB)
    assert safer.predicted_peak_bytes <= budget - 100 * MB < close.predicted_peak_bytes <= budget


def test_a_margin_of_what_travels_is_not_that_of_other_plans() -> None:
    """Blocks whose activations wait elsewhere were seen above the peak model: plans without them lose nothing by it."""
    model, config = CostModel(PROFILE, HARDWARE), with_budget(BASELINE - 1 * MB)
    close = decide_on(model, resolve(config, model.hardware))
    offloaded = Choice((("blocks.0", OFFLOAD), ("blocks.1", CHECKPOINT)))
    assert suspects_of(offloaded) == {OFFLOAD}
    assert (
        decide_on(model, resolve(config, model.hardware), margins={suspects_of(offloaded): 100 * MB}).actions
        == close.actions
    )
    checkpointed = suspects_of(choice_of(close.actions, PROFILE))
    assert CHECKPOINT in checkpointed or SELECTIVE in checkpointed
    safer = decide_on(model, resolve(config, model.hardware), margins={checkpointed: 100 * MB})
    assert safer.predicted_peak_bytes <= BASELINE - 101 * MB < close.predicted_peak_bytes


def test_a_faster_plan_must_fit_by_what_rehearsals_have_taught() -> None:
    """Or what it needs would be rehearsed, and then it would not be taken."""
    model, eligible = CostModel(PROFILE, HARDWARE), resolve(with_budget(BASELINE - 1 * MB), HARDWARE)
    limit = decide_on(model, eligible).predicted_slowdown + 1e-3

    def is_found(margin_bytes: int) -> bool:
        taught = {
            "margin_bytes": margin_bytes,
            "margins": {},
            "reserve_bytes": 0,
            "reserves": {},
            "rehearsed": {},
        }
        return has_faster(model, eligible, limit, is_exact=True, taught=taught)

    assert has_faster(model, eligible, limit, is_exact=True)
    assert is_found(0)
    assert not is_found(BASELINE)


# ---- the same everywhere


PROGRAM = """
import sys
sys.modules["torch"] = None
from memscale import Config
from memscale._decide import decide
from memscale._decide.eligible import resolve
from tests.profiles import hardware_of, profile_of
for budget in (0.5, 0.7, 0.9, 50.0):
    config = Config(memory_budget_gb=budget, force_optimize=budget == 50.0)
    sys.stdout.write(decide(profile_of(6), resolve(config, hardware_of()), raise_if_unfit=False).to_json())
"""


def test_the_same_bytes_in_every_process_and_without_torch() -> None:
    outputs = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], check=True, capture_output=True, env=environment, cwd=_root()
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert outputs.pop().count(b'"actions"') == 4


WHOLE_PROGRAM = """
import sys
import torch
from torch import nn
from memscale import Config, Hardware
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._profile.inputs import Inputs
from tests.profiles import hardware_of
torch.set_num_threads(1)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
    inputs = Inputs((torch.zeros(8, 32, 64),))
config = Config(mode=sys.argv[1], force_optimize=True)
sys.stdout.write(make_plan(Job(model, config, hardware_of()), inputs).to_json())
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", some(["conservative", "balanced", "aggressive"], "balanced"))
def test_the_whole_pipeline_gives_the_same_bytes_in_every_process(mode: str) -> None:
    outputs = set()
    for hash_seed in ("0", "7"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", WHOLE_PROGRAM, mode]
        outputs.add(subprocess.run(command, check=True, capture_output=True, env=environment, cwd=_root()).stdout)
    assert len(outputs) == 1
    assert outputs.pop().count(b'"actions"') == 1


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_inputs_are_not_changed() -> None:
    profile, config = profile_of(4), Config(force_optimize=True)
    before = (profile.to_json(), copy.copy(config))
    decide(profile, resolve(config, HARDWARE))
    assert (profile.to_json(), config) == before


# ---- rows


@pytest.mark.parametrize("head_fqn", ["head", "head.predictions.decoder"])
def test_the_row_that_holds_a_tiled_head_says_so(head_fqn: str) -> None:
    """A head may be deep inside the layer that a row stands for, as BERT's is."""
    blocks = {f"blocks.{index}": Block() for index in range(2)}
    profile = with_tiled_head(profile_of(2), blocks, {128: 5, 512: 20})
    assert profile.head is not None
    profile = dataclasses.replace(profile, head=dataclasses.replace(profile.head, module_fqn=head_fqn))
    plan = decide(profile, resolve(Config(mode="aggressive", force_optimize=True, enable_offloading=False), HARDWARE))
    assert [action.module_fqn for action in plan.actions if isinstance(action, TileHead)] == [head_fqn]
    assert [row.module_fqn for row in plan.rows if "tile the head" in row.techniques] == ["head"]


def test_what_a_plan_holds_above_live_bytes_binds_plans_of_its_kind_alone() -> None:
    model, held = CostModel(PROFILE, HARDWARE), (BASELINE - LOWEST) // 4
    eligible = resolve(with_budget((BASELINE + LOWEST) / 2), HARDWARE)
    bound, free = decide_on(model, eligible, reserve_bytes=held), decide_on(model, eligible)
    assert bound.predicted_slowdown > free.predicted_slowdown
    kind, other = kind_of(Choice()), kind_of(Choice(run=RunOptions(loss_by_rows=True)))
    assert decide_on(model, eligible, reserve_bytes=held, reserves={kind: -held}).actions == free.actions
    assert decide_on(model, eligible, reserve_bytes=held, reserves={other: -held}).actions == bound.actions
    in_the_step = Choice(run=RunOptions(steps_in_buckets=True, offloads_optimizer=0.5))
    assert kind_of(in_the_step) == kind
