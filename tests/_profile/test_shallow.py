"""A model at a fraction of its depth shows what the whole one would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memscale import Config, Hardware
from memscale._decide.policy import choose_strategy
from memscale._execute.executor import Executor
from memscale._plan import Action, Checkpoint, OffloadActivations, Plan, TileMlp
from memscale._planning import make_plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile import Profile
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.rehearsal import Attach, FakeRehearsal
from memscale._profile.shallow import KEPT, ShallowRehearsal, find_cuts, find_runs_under, open_shallow, rehearse_short


class Block(nn.Module):
    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=bias), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(self.norm(hidden))


class Deep(nn.Module):
    """A first block of its own, then many that are equal."""

    def __init__(self, depth: int = 14, counts: int | None = None, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.layers = nn.ModuleList([Block(width, bias=False), *(Block(width) for _ in range(depth - 1))])
        self.head = nn.Linear(width, 1000)
        self.counts = counts

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for position in range(self.counts or len(self.layers)):
            hidden = self.layers[position](hidden)
        return self.head(hidden)


IDS = torch.randint(0, 1000, (2, 32))
INPUTS = Inputs.from_sample(IDS)


def opened(model: nn.Module) -> ShallowRehearsal | None:
    whole = FakeRehearsal(model, INPUTS, "cuda")
    return open_shallow(model, INPUTS, "cuda", whole.blocks, whole.run())


def stretched(model: nn.Module, kind: type) -> tuple[object, object]:
    """The step with every block treated so: on the whole model, and stretched from the shorter one."""

    def attach(target: nn.Module) -> Executor:
        executor = Executor(target)
        executor.attach([kind(fqn) for fqn in find_blocks(target)])
        return executor

    whole = FakeRehearsal(model, INPUTS, "cuda")
    shallow = open_shallow(model, INPUTS, "cuda", whole.blocks, whole.run())
    assert shallow is not None
    return whole.run(attach).segments, shallow.stretch(shallow.stage.run(attach)).segments


def test_the_cut_is_the_run_of_equal_blocks() -> None:
    (cut,) = find_cuts(Deep(14), find_blocks(Deep(14)))
    assert (cut.container_fqn, cut.start, cut.end) == ("layers", 1, 14)
    assert cut.kept == [0, 1, 2, 3, 11, 12, 13]
    assert list(cut.left_out) == list(range(1 + KEPT, 14 - KEPT))
    assert find_cuts(Deep(6), find_blocks(Deep(6))) == []


@pytest.mark.parametrize("kind", [Checkpoint, OffloadActivations])
def test_what_is_tried_on_it_is_what_the_whole_model_shows(kind: type) -> None:
    ours, whole = stretched(Deep(), kind)
    assert ours == whole


def test_names_of_the_whole_model() -> None:
    model = Deep(12)
    shallow = opened(model)
    assert shallow is not None
    found = [f"layers.{position}.mlp" for position in range(len(shallow.stage.model.layers))]
    assert sorted(shallow.whole_names([*found, "head"])) == sorted([*(f"layers.{i}.mlp" for i in range(12)), "head"])


def test_a_model_that_counts_its_blocks_is_tried_whole() -> None:
    model = Deep(12, counts=12)
    assert opened(model) is None
    plan = make_plan(Job(model, Config(force_optimize=True, enable_logging=False), Hardware.from_name("T4")), INPUTS)
    assert len(plan.actions) >= 12


def test_a_model_that_treats_its_blocks_differently_is_tried_whole() -> None:
    class Odd(Deep):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(ids)
            for position, layer in enumerate(self.layers):
                hidden = layer(hidden) if position != 6 else layer(torch.cat([hidden, hidden]))[: len(hidden)]
            return self.head(hidden)

    model = Odd(14)
    assert opened(model) is None


def with_and_without(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, Profile]]:
    """The plan and the profile of a deep model, tried at a fraction of its depth and as a whole."""
    found = []
    for is_on in (True, False):
        if not is_on:
            monkeypatch.setattr("memscale._planning.stage.open_shallow", lambda *_: None)
        planner = Planner(Job(Deep(10), config, Hardware.from_name("T4")), INPUTS)
        found.append((planner.plan(choose_strategy(planner.job.eligible.under(config))), planner.profile))
    return found


EXACT = Config(mode="aggressive", force_optimize=True, use_mixed_precision=False, use_8bit_optimizer=False)


def test_plans_are_the_same_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (shallow, _), (whole, _) = with_and_without(EXACT.replace(async_offload=False), monkeypatch)
    assert shallow == whole
    assert len(whole.actions) >= 10


def test_with_overlap_it_shows_no_less_and_what_is_promised_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """See NOTE [ends of steps that overlap]."""
    (shallow, shown), (whole, seen) = with_and_without(EXACT.replace(async_offload=True), monkeypatch)
    assert shallow.predicted_peak_bytes == whole.predicted_peak_bytes
    for key, trace in seen.variants.items():
        *rest, last = shown.variants[key].segments
        assert (*rest,) == trace.segments[:-1]
        assert last.net_bytes >= trace.segments[-1].net_bytes
        assert last.peak_bytes == trace.segments[-1].peak_bytes


def test_a_plan_shows_the_same_without_most_of_its_equal_blocks() -> None:
    """Blocks are left out among those that are treated alike, also inside; their names stay theirs."""
    model = Deep(30)
    rehearsal = FakeRehearsal(model, INPUTS, "cuda")
    blocks = list(find_blocks(rehearsal.model))
    actions = (
        *(Checkpoint(fqn) for fqn in blocks[:12]),
        *(OffloadActivations(fqn) for fqn in blocks[3:12]),
        *(TileMlp(f"{fqn}.mlp", num_tiles=2) for fqn in blocks[15:28]),
        *(Checkpoint(fqn) for fqn in blocks[15:28]),
    )
    attached: list[tuple[Action, ...]] = []

    def attach(here: tuple[Action, ...]) -> Attach:
        attached.append(here)
        return lambda model: _attached(model, here)

    short = rehearse_short(rehearsal, actions, find_runs_under(rehearsal, actions), attach)
    assert short is not None
    assert len(attached[0]) < len(actions) - 10
    assert short.segments == rehearsal.run(attach(actions)).segments
    assert list(find_blocks(rehearsal.model)) == blocks


def test_what_is_treated_differently_is_rehearsed_whole() -> None:
    rehearsal = FakeRehearsal(Deep(14), INPUTS, "cuda")
    blocks = list(find_blocks(rehearsal.model))
    actions = tuple(Checkpoint(fqn) for fqn in blocks[::2])
    assert (
        rehearse_short(
            rehearsal, actions, find_runs_under(rehearsal, actions), lambda here: lambda model: _attached(model, here)
        )
        is None
    )


class Pair(nn.Module):
    """An encoder and a decoder, whose blocks all look at what the encoder gives."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(16) for _ in range(depth))
        self.decoder = nn.ModuleList(Block(16) for _ in range(depth))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            hidden = layer(hidden)
        decoded = hidden
        for layer in self.decoder:
            decoded = layer(decoded + hidden)
        return decoded


def test_blocks_of_a_container_without_a_cut_are_treated_too() -> None:
    """The decoder's are all treated alike, and most are left out; the encoder's are not, and none is."""
    rehearsal = FakeRehearsal(Pair(12), Inputs.from_sample(torch.randn(2, 32, 16)), "cuda")
    actions = tuple(Checkpoint(fqn) for i, fqn in enumerate(find_blocks(rehearsal.model)) if i % 2 or i >= 12)
    short = rehearse_short(
        rehearsal, actions, find_runs_under(rehearsal, actions), lambda here: lambda model: _attached(model, here)
    )
    assert short is not None
    assert short.segments == rehearsal.run(lambda model: _attached(model, actions)).segments


def _attached(model: nn.Module, actions: tuple[Action, ...]) -> Executor:
    executor = Executor(model)
    executor.attach(actions)
    return executor
