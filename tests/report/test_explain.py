"""Actions, reasons and plans in words."""

from __future__ import annotations

import dataclasses

import pytest

from memscale._plan import (
    Action,
    Checkpoint,
    MixedPrecision,
    OffloadActivations,
    OffloadOptimizer,
    QuantizeOptimizer,
    Reason,
    StepInBuckets,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale.report.explain import reason_text, what_is_done, words_of_block, words_of_run
from memscale.techniques.loss_by_rows import LossByRows
from memscale.techniques.offload.kept_outputs import OffloadKept
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.in_backward import StepInBackward
from memscale.techniques.offload.optimizer.late_state import SendStateLate
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.optimizer.waiting_gradients import OffloadGradients
from tests.parity import plan_of


def test_reasons_read_well() -> None:
    assert reason_text(Reason("rule")) == "rule"
    text = reason_text(Reason("rule", {"frees_bytes": 2_610_000_000, "costs_ms": 1.5, "n": 3}))
    assert text == "rule (costs 1.5 ms, frees 2.610 GB, n 3)"


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ([], "keep"),
        ([Checkpoint("a")], "checkpoint"),
        ([Checkpoint("a", keep=("matmul",))], "checkpoint (selective)"),
        ([Checkpoint("a"), OffloadActivations("a")], "checkpoint, input offloaded"),
        ([OffloadActivations("a")], "offload activations"),
        ([StreamParameters("a")], "stream parameters"),
        ([StreamParameters("a"), OffloadActivations("a")], "stream parameters, input offloaded"),
    ],
)
def test_blocks_in_words(actions: list[Action], words: str) -> None:
    assert words_of_block(actions) == words


EXAMPLES: dict[type, Action] = {
    Checkpoint: Checkpoint("a"),
    TileHead: TileHead("head", 256),
    TileAttention: TileAttention("a.attention", 128),
    TileMlp: TileMlp("a.mlp", 4),
    OffloadActivations: OffloadActivations("a"),
    OffloadKept: OffloadKept("a"),
    LossByRows: LossByRows(1024),
    StepInBuckets: StepInBuckets(1024),
    StepInBackward: StepInBackward(1024),
    StepOnDevice: StepOnDevice(1024),
    FetchStateEarly: FetchStateEarly("a", 1024),
    SendStateLate: SendStateLate("a", 1024),
    OffloadGradients: OffloadGradients("a"),
    OffloadOptimizer: OffloadOptimizer(1024),
    StreamParameters: StreamParameters("a"),
    MixedPrecision: MixedPrecision("bfloat16"),
    QuantizeOptimizer: QuantizeOptimizer(1024),
}


def test_every_action_has_words() -> None:
    assert set(EXAMPLES) == set(Action.kinds())
    for action in EXAMPLES.values():
        assert words_of_run(action) or words_of_block([action]) != "keep"
        assert what_is_done(plan_of([action])) != "nothing"


def test_a_tiled_head_is_named_beside_what_is_done_to_layers() -> None:
    """It is the larger part of many plans, and its module may lie deep inside of a row."""
    plan = plan_of([Checkpoint("layers.0"), Checkpoint("layers.1"), TileHead("cls.predictions.decoder", 256)])
    assert what_is_done(plan) == "checkpoint: 2 layers, tile the head: 256 rows"
    assert "tile the head: 256 rows" in plan.explain()


def test_equal_parts_of_many_layers_are_said_once() -> None:
    actions = [Checkpoint("a"), *(TileMlp(f"{name}.mlp", 4) for name in "ab"), TileAttention("a.attention", 64)]
    assert what_is_done(plan_of(actions)) == "checkpoint: 1 layer, tile inside layers: 4 tiles"
    assert what_is_done(plan_of([TileAttention("a.attention", 64)])) == "tile attention: 64 queries"
    assert what_is_done(plan_of([])) == "nothing"


def test_a_saved_plan_explains_itself_in_the_same_words() -> None:
    plan = plan_of(list(EXAMPLES.values()))
    assert type(plan).from_json(plan.to_json()).explain() == plan.explain()
    assert dataclasses.replace(plan, provisional=True).explain() != plan.explain()
