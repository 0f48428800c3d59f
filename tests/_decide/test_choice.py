"""A choice and the actions of its plan are two spellings of one thing: each can be read back from the other."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale import Config
from memscale._decide import decide, peak_against_time
from memscale._decide.choice import Choice, RunOptions, actions_of, block_actions, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._plan import Checkpoint, OffloadActivations, StreamParameters, TileAttention, TileHead, TileMlp
from memscale._profile import CHECKPOINT, KEEP, SELECTIVE, STREAM, STREAM_OFFLOAD, Profile, TraceKey
from memscale.techniques import TREATMENTS
from tests.profiles import MB, Block, full_profile, hardware_of, trace_of

BLOCKS = tuple(f"blocks.{index}" for index in range(4))
ATTENTIONS = tuple(
    TileAttention(f"{fqn}.attention", rows=rows) for fqn, rows in zip(BLOCKS, (512, 512, 300, 17), strict=True)
)
MLPS = tuple(TileMlp(f"{fqn}.mlp", 2) for fqn in BLOCKS)


def profile_with(inside: tuple[TileAttention | TileMlp, ...]) -> Profile:
    blocks = {fqn: Block(temporaries=200) for fqn in BLOCKS}
    profile = full_profile(blocks, inside=inside, head=TileHead("head", rows=64), rest=("stem", "head"))
    # Half of the temporaries in two tiles, an eighth in sixteen.
    tiled = {
        TraceKey(CHECKPOINT, num_tiles=number): trace_of(dict.fromkeys(BLOCKS, Block(temporaries=size)), CHECKPOINT)
        for number, size in ((2, 100), (16, 25))
    }
    return dataclasses.replace(profile, variants={**profile.variants, **tiled})


PROFILES = {
    "attention": profile_with(ATTENTIONS),
    "MLPs": profile_with(MLPS),
    "both": profile_with((*ATTENTIONS, *MLPS)),
}

OPTIONS: dict[str, st.SearchStrategy] = {
    "head_rows": st.sampled_from((0, 1, 64, 128, 4096)),
    "num_tiles": st.sampled_from((0, 2, 4, 8, 16)),
    "offloads_optimizer": st.sampled_from((0.0, 1.0, 0.25, 0.03125)),
    "streams_rest": st.booleans(),
    "precision": st.sampled_from(("", "bfloat16", "float16")),
    "quantizes_optimizer": st.booleans(),
    "steps_in_buckets": st.booleans(),
    "steps_in_backward": st.booleans(),
    "steps_on_device": st.booleans(),
    "loss_by_rows": st.booleans(),
    "late_state": st.lists(st.tuples(st.sampled_from(sorted(BLOCKS)), st.integers(1, 1 << 30)), max_size=2).map(tuple),
    "early_state": st.lists(st.tuples(st.sampled_from(sorted(BLOCKS)), st.integers(1, 1 << 30)), max_size=2).map(tuple),
    "waiting_gradients": st.sampled_from((0.0, 0.5, 1.0)),
}


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    """Any treatment of any block, in the model's order."""
    treatments = draw(st.tuples(*(st.sampled_from(TREATMENTS) for _ in BLOCKS)))
    treated = zip(BLOCKS, treatments, strict=True)
    run = draw(st.builds(RunOptions, **OPTIONS))
    return Choice(tuple((fqn, treatment) for fqn, treatment in treated if treatment != KEEP), run)


def test_every_option_of_a_run_is_drawn() -> None:
    """One that is not could get lost on the way to its actions and back."""
    assert set(OPTIONS) == {field.name for field in dataclasses.fields(RunOptions)}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
@given(choice=choices())
def test_a_choice_comes_back_from_its_actions(profile: Profile, choice: Choice) -> None:
    actions = tuple(actions_of(choice, profile))
    assert choice_of(actions, profile) == choice
    assert tuple(actions_of(choice_of(actions, profile), profile)) == actions


@pytest.mark.parametrize("treatment", TREATMENTS, ids=str)
def test_a_block_is_treated_by_few_actions(treatment) -> None:
    actions = tuple(block_actions("blocks.0", treatment))
    assert len(actions) <= 3
    assert (treatment == KEEP) == (not actions)
    assert any(isinstance(action, OffloadActivations) for action in actions) == treatment.offloads
    assert any(isinstance(action, StreamParameters) for action in actions) == treatment.streams


def test_what_is_streamed_and_no_block_is_the_rest() -> None:
    profile = PROFILES["both"]
    assert choice_of([StreamParameters("stem")], profile) == Choice((), RunOptions(streams_rest=True))
    assert choice_of([StreamParameters(BLOCKS[0])], profile) == Choice(((BLOCKS[0], STREAM),))
    actions = (StreamParameters(BLOCKS[0]), OffloadActivations(BLOCKS[0]), Checkpoint(BLOCKS[1], keep=("matmul",)))
    assert choice_of(actions, profile) == Choice(((BLOCKS[0], STREAM_OFFLOAD), (BLOCKS[1], SELECTIVE)))


def test_attention_that_was_edited_is_taken_for_the_coarsest() -> None:
    assert choice_of([TileAttention(ATTENTIONS[0].module_fqn, rows=3)], PROFILES["attention"]).run.num_tiles == 2
    assert choice_of([TileAttention("elsewhere", rows=512)], PROFILES["attention"]).run.num_tiles == 2


def test_a_plan_of_finely_tiled_attention_is_the_point_that_is_marked() -> None:
    """The number of tiles is not among the actions: it was taken for two, which is another point of the front."""
    profile, hardware = PROFILES["attention"], hardware_of()
    config = Config(mode="aggressive", force_optimize=True, use_mixed_precision=False, use_8bit_optimizer=False)
    plan = decide(profile, resolve(config, hardware))
    assert any(isinstance(action, TileAttention) and action.rows == 64 for action in plan.actions)  # sixteen tiles
    weighed = peak_against_time(CostModel(profile, hardware), resolve(config, hardware), plan)
    [chosen] = [point for point in weighed.front if point.is_chosen]
    assert chosen.peak_bytes == plan.predicted_peak_bytes
    assert "tile attention: 64 queries" in chosen.what
    assert chosen.peak_bytes < plan.baseline_peak_bytes - 100 * MB
