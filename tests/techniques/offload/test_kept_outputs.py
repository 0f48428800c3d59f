"""Outputs that selective checkpoints keep wait elsewhere: the same training, fewer bytes than all activations."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import simgpu  # noqa: F401  (registers the device)
from memscale import Config, Plan
from memscale._config import AsyncOffloadConfig
from memscale._decide import decide
from memscale._decide.choice import Choice, Outcome, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.search import search
from memscale._errors import MemScaleError, PlanError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, OffloadActivations
from memscale._profile import CHECKPOINT, KEEP, OFFLOAD, SELECTIVE, STREAM, Profile, TraceKey
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.rehearsal import FakeRehearsal, loss_of
from memscale.report.explain import what_is_done
from memscale.techniques import TREATMENTS
from memscale.techniques.offload.kept_outputs import SELECTIVE_OFFLOAD, OffloadKept
from tests.models import SUITE, Case
from tests.profiles import Block, full_profile, hardware_of, trace_of
from tests.techniques.offload.runs import DEVICE, Gpt, let_autograd_finish, on, tokens, train, without_caches

CPU = torch.device("cpu")
ACCELERATOR = torch.accelerator
WAYS = ("simgpu sync", "simgpu async", "cpu sync", "cpu async")
INPUT_BYTES = 2 * 16 * 32 * 4
"""Of a block of `Gpt`; its three products give one, four and one times as much."""
KEPT_BYTES = 6 * INPUT_BYTES


@pytest.fixture(autouse=True)
def _clean(no_races, no_leaks) -> Iterator[None]:
    yield
    let_autograd_finish()


def actions_on(model: nn.Module) -> list[Action]:
    kinds = (lambda fqn: Checkpoint(fqn, keep=("matmul", "attention")), OffloadActivations, OffloadKept)
    return [kind(fqn) for fqn in find_blocks(model) for kind in kinds]


def attached(
    model: nn.Module, way: str, directory: pathlib.Path | None, actions: list[Action] | None = None
) -> Executor:
    transfers = AsyncOffloadConfig(min_tensor_bytes=256, window_bytes=1 << 12, prefetch_bytes=1 << 15)
    settings = ExecutionSettings(
        device=DEVICE if way.startswith("simgpu") else CPU,
        asynchronous="async" in way,
        async_config=transfers,
        offload_dir=None if directory is None or way.startswith("simgpu") else str(directory),
    )
    executor = Executor(model, settings)
    executor.attach(actions_on(model) if actions is None else actions)
    return executor


# ---- parity


@pytest.mark.parametrize(("name", "way"), [("gpt", way) for way in WAYS] + [("gpt2", WAYS[1]), ("bert", WAYS[2])])
def test_trains_the_same(name: str, way: str, tmp_path: pathlib.Path) -> None:
    """With dropout, whose random numbers the recompute draws again."""
    device = DEVICE if way.startswith("simgpu") else CPU
    gpt = Case("gpt", Gpt, lambda n: {"ids": tokens(n)}, lambda logits: logits.square().mean())
    case = next((one for one in SUITE if one.name == name), gpt)
    torch.manual_seed(1)
    model = without_caches(case.build()).to(device)
    theirs = train(copy.deepcopy(model), case, steps=2, device=device)
    executor = attached(model, way, tmp_path)
    try:
        train(model, case, steps=2, device=device).assert_same(theirs)
        stats = executor.stats().transfers["activations"]
        assert stats.num_in_place < stats.num_saved, "something came back"
    finally:
        executor.detach()


def test_a_second_backward_through_the_same_graph_computes_everything_again() -> None:
    torch.manual_seed(1)
    model = Gpt(2).to(DEVICE)
    plain = copy.deepcopy(model)
    executor = attached(model, "simgpu sync", None)
    for one in (plain, model):
        torch.manual_seed(2)
        loss = one(tokens()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours.grad.cpu(), theirs.grad.cpu()), name
    executor.detach()


def test_a_block_that_is_called_again_under_one_autocast() -> None:
    """The forward of the second call finds the casts of the weights made, and its recompute makes them."""
    torch.manual_seed(1)
    model = Gpt(2).to(DEVICE)
    model.blocks.append(model.blocks[0])
    plain = copy.deepcopy(model)
    executor = attached(model, "simgpu async", None)
    for one in (plain, model):
        torch.manual_seed(2)
        with torch.autocast("simgpu", torch.bfloat16):
            loss = one(tokens()).float().square().mean()
        loss.backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours.grad.cpu(), theirs.grad.cpu()), name
    executor.detach()


class Escapes(nn.Module):
    """Gives away the output of a matrix product that it has used."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, torch.tanh(y) * x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(16,), (4, 4)])
def test_a_kept_output_that_is_written_to_after_its_block_is_refused(bias: bool, rows: tuple[int, ...]) -> None:
    """By its version, or by that of the view that a layer without bias gives: never a wrong gradient."""
    torch.manual_seed(1)
    model = nn.Sequential(Escapes(bias=bias)).to(DEVICE)
    x = torch.randn(*rows, 64, device=DEVICE)
    actions: list[Action] = [Checkpoint("0", keep=("matmul",)), OffloadKept("0")]
    executor = attached(model, "simgpu sync", None, actions)
    y, z = model(x)
    (y * z).sum().backward()
    y, z = model(x)
    with torch.no_grad():
        y += x
    with pytest.raises((RuntimeError, MemScaleError), match=r"modified by an inplace operation|^what comes after 0"):
        z.sum().backward()
    executor.detach()


def test_a_block_that_is_not_checkpointed_keeps_nothing() -> None:
    model = Gpt(1).to(DEVICE)
    with pytest.raises(PlanError, match=r"blocks\.0 is not checkpointed"):
        attached(model, "simgpu sync", None, [OffloadKept("blocks.0")])
    assert not vars(model.blocks[0]).get("forward")


# ---- bytes


def held_after_forward(model: nn.Module) -> int:
    loss = model(tokens()).square().mean()
    ACCELERATOR.synchronize()
    held = ACCELERATOR.memory_allocated()
    loss.backward()
    model.zero_grad()
    return held


def test_inputs_and_kept_outputs_leave_the_device_and_nothing_else() -> None:
    model = Gpt(4).to(DEVICE)
    selective = attached(model, "simgpu sync", None, [a for a in actions_on(model) if isinstance(a, Checkpoint)])
    held_after_forward(model)  # what changes is learned at the first forward
    kept = held_after_forward(model)
    selective.detach()
    executor = attached(model, "simgpu sync", None)
    held_after_forward(model)
    stats = executor.stats().transfers["activations"]
    sent, fetched = stats.sent_bytes, stats.transfers.bytes_fetched
    waiting = held_after_forward(model)
    assert stats.sent_bytes - sent == 4 * (INPUT_BYTES + KEPT_BYTES) == 114_688
    assert stats.transfers.bytes_fetched - fetched == 114_688
    # The last block's own output is still held by what comes after it; the first input is nobody else's either way.
    assert kept - waiting == 4 * (INPUT_BYTES + KEPT_BYTES)
    executor.detach()


@pytest.mark.parametrize(("name", "asynchronous"), [("gpt2", False), ("gpt2", True), ("mlp", True)])
def test_a_rehearsal_on_fake_tensors_predicts_the_peak_to_the_byte(name: str, asynchronous: bool) -> None:
    entry = next(one for one in SUITE if one.name == name)
    torch.manual_seed(1)
    model = without_caches(entry.build()).to(DEVICE).train()
    batch, way = on(DEVICE, entry.batch(0)), "simgpu async" if asynchronous else "simgpu sync"
    actions = actions_on(model)
    trace = FakeRehearsal(model, Inputs((), batch), "simgpu").run(lambda target: attached(target, way, None, actions))
    executor = attached(model, way, None, actions)
    ACCELERATOR.synchronize()
    before = ACCELERATOR.memory_allocated()
    ACCELERATOR.reset_peak_memory_stats()
    loss_of(model(**batch)).backward()
    assert ACCELERATOR.max_memory_allocated() - before == trace.peak_bytes
    executor.detach()


# ---- deciding


def profile_with(blocks: dict[str, Block] | int) -> Profile:
    """Kept outputs that wait elsewhere: what is left is as small as of offloaded activations, and less was moved."""
    if isinstance(blocks, int):
        blocks = {f"blocks.{index}": Block() for index in range(blocks)}
    profile = full_profile(blocks)
    sent = {fqn: dataclasses.replace(b, keeps=b.keeps_selective + b.keeps_offloaded) for fqn, b in blocks.items()}
    selective, moved = trace_of(blocks, SELECTIVE), trace_of(sent, OFFLOAD)
    # A tenth of the step's bytes more: what is computed again is cheap, the products are kept.
    segments = [
        dataclasses.replace(
            ours, peak_bytes=max(ours.peak_bytes, there.peak_bytes), other_bytes=ours.other_bytes * 11 // 10
        )
        for ours, there in zip(moved.segments, selective.segments, strict=True)
    ]
    trace = dataclasses.replace(moved, segments=tuple(segments))
    return dataclasses.replace(profile, variants={**profile.variants, TraceKey(SELECTIVE_OFFLOAD): trace})


ASKED = Config(enable_kept_offload=True, force_optimize=False)


def test_it_is_planned_only_where_the_user_asks_for_it() -> None:
    profile, hardware = profile_with(6), hardware_of(link_bytes_per_s=2e8)
    for config in (Config(), Config(mode="aggressive", use_8bit_optimizer=False)):
        plan = decide(profile, resolve(config.replace(memory_budget_gb=0.5), hardware), raise_if_unfit=False)
        assert not any(isinstance(action, OffloadKept) for action in plan.actions)
    without = full_profile(6)
    budget = config.replace(memory_budget_gb=0.5)
    assert decide(profile, resolve(budget, hardware)).to_json() == decide(without, resolve(budget, hardware)).to_json()


def test_it_is_chosen_where_it_helps_and_its_plan_can_be_saved() -> None:
    """On a link that is too slow for all activations, with a recompute that is dear, and transfers that block."""
    config = ASKED.replace(memory_budget_gb=0.45, async_offload=False)
    profile = profile_with({f"blocks.{i}": Block(time=1000) for i in range(6)})
    chosen = {}
    for link in (2e8, 1e11):
        plan = decide(profile, resolve(config, hardware_of(link_bytes_per_s=link)))
        chosen[link] = sum(isinstance(action, OffloadKept) for action in plan.actions)
        assert Plan.from_json(plan.to_json()) == plan
        if chosen[link]:
            assert "checkpoint (selective), input offloaded, kept outputs offloaded" in what_is_done(plan)
    assert chosen[2e8] > 0
    assert chosen[1e11] == 0, "where the link is fast, activations travel whole and nothing is computed again"


def everything(model: CostModel) -> list[Outcome]:
    names = tuple(model.blocks)
    rows = itertools.product((KEEP, *model.treatments), repeat=len(names))
    choices = (tuple((n, t) for n, t in zip(names, row, strict=True) if t != KEEP) for row in rows)
    return [model.evaluate(Choice(blocks, RunOptions())) for blocks in choices]


@pytest.mark.parametrize("link", [2e8, 1e9])
def test_the_search_is_exact_on_short_models_and_monotone(link: float) -> None:
    model = CostModel(profile_with(4), hardware_of(link_bytes_per_s=link))
    assert set(model.treatments) == {SELECTIVE, OFFLOAD, SELECTIVE_OFFLOAD, CHECKPOINT, STREAM}
    assert SELECTIVE_OFFLOAD in TREATMENTS
    ours = [c.outcome for c in search(model, [RunOptions()], model.treatments, counts_waiting=False)]
    all_of_them = everything(model)
    last = float("inf")
    for budget in sorted({outcome.peak_bytes for outcome in all_of_them}):
        best = min(o.step_ms for o in all_of_them if o.peak_bytes <= budget)
        found = min(o.step_ms for o in ours if o.peak_bytes <= budget)
        assert found == pytest.approx(best, rel=1e-9)
        assert found <= last, "a larger budget is never slower"
        last = found


def test_one_more_treatment_never_makes_a_long_model_worse() -> None:
    """A hundred layers. The lowest peak is no higher, and every plan is at most a little slower for the thinning."""
    hardware = hardware_of(link_bytes_per_s=2e8)
    found = {}
    for name, profile in (("with", profile_with(100)), ("without", full_profile(100))):
        model = CostModel(profile, hardware)
        found[name] = [c.outcome for c in search(model, [RunOptions()], model.treatments, counts_waiting=False)]
    lowest = {name: min(outcome.peak_bytes for outcome in outcomes) for name, outcomes in found.items()}
    assert lowest["with"] <= lowest["without"]
    for budget in range(lowest["without"], max(o.peak_bytes for o in found["without"]), 500_000_000):
        fastest = {n: min(o.step_ms for o in outcomes if o.peak_bytes <= budget) for n, outcomes in found.items()}
        assert fastest["with"] <= fastest["without"] * 1.01
