"""`torch.compile` around blocks keeps both promises, compiled graphs and planned bytes; around it all it is refused."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

import memscale
from memscale import MemScaleError, PlanError
from memscale._execute.executor import execute, executor_of
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Checkpoint, OffloadActivations, OffloadOptimizer, StreamParameters, TileMlp
from memscale._profile.layers import find_blocks
from memscale._torch import private
from tests.models import WIDTH, features, small, square_loss
from tests.parity import adam, checkpoint_all, plan_of, seed
from tests.techniques.recompute import test_key_value_caches as caches

# PyTorch's compiler looks at `.grad` of what a block is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
DEVICE = torch.device("simgpu", 0)
FORCED = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False)
ROWS = 256


@pytest.fixture(autouse=True)
def _compiler_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # the compiler's progress bar would start a thread that stays
    yield
    torch.compiler.reset()  # what was compiled holds the models of a test


class Counting:
    """A backend that runs graphs as they were traced, and counts them and their runs."""

    def __init__(self) -> None:
        self.num_graphs = self.num_runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return graph.forward(*args)

        return run


def model_of(seed_number: int = 1) -> Any:
    seed(seed_number)
    return small()


def in_place(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def by_wrappers(model: Any, backend: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return model


def by_forwards(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    return model


WAYS = [in_place, by_wrappers, by_forwards]


def train(model: Any, steps: int = 3, rows: int = ROWS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    optimizer, losses = adam(model), []
    for number in range(steps):
        device = model.head.weight.device
        loss = square_loss(model(features(number, rows, WIDTH).to(device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses, [parameter.detach().cpu().clone() for parameter in model.parameters()]


def assert_same(ours: Any, theirs: Any) -> None:
    for mine, other in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert torch.equal(mine, other)


# ---- compiled blocks


@pytest.mark.parametrize("way", WAYS)
def test_compiled_blocks_keep_both_promises(way: Any) -> None:
    plain, backend = train(way(model_of(), "eager")), Counting()
    model = memscale.wrap(way(model_of(), backend), FORCED, sample_input=features(0, ROWS, WIDTH))
    plan = model._memscale_executor.plan
    checkpointed = [action for action in plan.actions if isinstance(action, Checkpoint)]
    assert checkpointed
    assert not any(action.keep for action in checkpointed), "kept outputs would have to be seen"
    assert backend.num_graphs == 0, "planning is never traced"
    assert_same(train(model), plain)
    num_recomputes = model._memscale_executor.stats().num_recomputes
    assert num_recomputes == 3 * len(checkpointed)
    assert backend.num_runs == 3 * len(model.blocks) + num_recomputes, "forwards and recomputes run compiled graphs"
    memscale.detach(model)


@pytest.mark.parametrize("way", WAYS)
def test_planned_at_the_first_forward(way: Any) -> None:
    plain, backend = train(way(model_of(), "eager")), Counting()
    model = memscale.wrap(way(model_of(), backend), FORCED)
    assert_same(train(model), plain)
    assert model._memscale_executor.stats().num_recomputes > 0
    assert backend.num_runs > 3 * len(model.blocks)
    memscale.detach(model)


def test_ahead_of_time() -> None:
    train_the_same_with("aot_eager")


@pytest.mark.slow
def test_inductor() -> None:
    """In a process of its own: it starts threads that stay."""
    program = "import simgpu; from tests.integrations.test_compile import *; train_the_same_with('inductor')"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path])},
    )
    assert answer.returncode == 0, answer.stderr[-3000:]


def train_the_same_with(backend: str) -> None:
    plain = train(in_place(model_of(), backend))
    model = memscale.wrap(in_place(model_of(), backend), FORCED, sample_input=features(0, ROWS, WIDTH))
    assert_same(train(model), plain)
    assert model._memscale_executor.stats().num_recomputes > 0
    memscale.detach(model)


def test_dropout_in_a_compiled_block() -> None:
    def build() -> Any:
        model = model_of()
        for block in model.blocks:
            block.up = nn.Sequential(block.up, nn.Dropout(0.3))
        return in_place(model, "aot_eager")

    twin = build()
    torch.manual_seed(5)
    plain = train(twin)
    model = memscale.wrap(build(), FORCED, sample_input=features(0, ROWS, WIDTH))
    torch.manual_seed(5)
    assert_same(train(model), plain)
    assert model._memscale_executor.stats().num_recomputes > 0
    memscale.detach(model)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_compiled_blocks_of_transformers_as_they_come(family: str) -> None:
    """Their configs ask for caches, and the attention inside a block that is not computed again has the config, too."""

    def run(model: Any) -> list[torch.Tensor]:
        return [value for _ in range(2) for value in caches.step(model, caches.batch())]

    def compiled(backend: Any) -> Any:
        model = caches.build(family)
        for block in find_blocks(model).values():
            block.compile(backend=backend)
        return model

    plain, backend = run(compiled("eager")), Counting()
    model = compiled(backend)
    executor = checkpoint_all(model, every=2)
    assert all(map(torch.equal, run(model), plain))
    num_blocks = len(find_blocks(model))
    assert executor.stats().num_recomputes == num_blocks, "half of the blocks, in two steps"
    executor.detach()
    assert backend.num_runs >= 3 * num_blocks, "forwards and recomputes run compiled graphs"


@pytest.mark.parametrize("way", WAYS)
def test_blocks_stay_compiled_when_it_is_detached(way: Any) -> None:
    backend = Counting()
    model = way(model_of(), backend)
    before = [dict(vars(block)) for block in model.blocks]
    memscale.wrap(model, FORCED, sample_input=features(0, ROWS, WIDTH))
    memscale.detach(model)
    for block, attributes in zip(model.blocks, before, strict=True):
        assert vars(block).keys() == attributes.keys()
        assert all(vars(block)[name] is attributes[name] for name in attributes)
    model(features(0))
    assert backend.num_runs == len(model.blocks)


def test_copies_are_plain() -> None:
    model = memscale.wrap(in_place(model_of(), "eager"), FORCED, sample_input=features(0, ROWS, WIDTH))
    twin = copy.deepcopy(model)
    assert executor_of(twin) is None
    assert not any(private.is_compiled(module) for module in twin.modules()), "as PyTorch copies compiled modules"
    buffer = io.BytesIO()
    torch.save(model, buffer)
    memscale.detach(model)


def test_every_technique_stands_around_compiled_code() -> None:
    """On the simulated device, whose allocator shows what was really held."""
    seed(1)

    def build(backend: str) -> Any:
        model = Wide()
        return in_place(model, backend)

    plain = build("aot_eager").to(DEVICE)
    reference = run_wide(plain)
    peaks = {}
    for name, actions in (
        ("plain", []),
        ("checkpointed", [Checkpoint(f"blocks.{i}") for i in range(4)]),
        ("streamed", [StreamParameters(f"blocks.{i}") for i in range(4)]),
        ("offloaded", [OffloadActivations(f"blocks.{i}") for i in range(4)] + [OffloadOptimizer(1 << 20)]),
    ):
        torch.compiler.reset()
        model = build("aot_eager")
        executor = execute(model, plan_of(actions, device_type="simgpu"), ExecutionSettings(device=DEVICE))
        torch.accelerator.reset_peak_memory_stats()
        assert_same(run_wide(model), reference)
        peaks[name] = torch.accelerator.max_memory_allocated()
        executor.detach()
        del model, executor
    assert peaks["checkpointed"] < peaks["plain"]
    assert peaks["streamed"] < peaks["checkpointed"]
    assert peaks["offloaded"] < peaks["plain"]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(4))
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def run_wide(model: Wide) -> Any:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(2):
        loss = square_loss(model(features(number, 1024, 256).to(DEVICE)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses, [parameter.detach().cpu().clone() for parameter in model.parameters()]


# ---- what is refused


def test_a_compiled_model_is_refused_at_once() -> None:
    for model in (torch.compile(model_of(), backend="eager"), model_of()):
        if not private.is_compiled(model):
            model.compile(backend="eager")
        with pytest.raises(MemScaleError, match=r"compiled as a whole.*for block in model\.blocks: block\.compile\(\)"):
            memscale.wrap(model, FORCED)
        assert executor_of(model) is None
    holder = Wide()
    holder.blocks = torch.compile(model_of(), backend="eager")
    with pytest.raises(MemScaleError, match=r"Wide\.blocks is compiled as a whole.*its 4 blocks"):
        memscale.wrap(holder, FORCED)


def test_a_compiled_model_without_blocks_is_wrapped() -> None:
    """Nothing is done inside it."""
    model = torch.compile(nn.Linear(WIDTH, 4), backend="eager")
    memscale.wrap(model, FORCED, sample_input=features(0))
    square_loss(model(features(0))).backward()
    memscale.detach(model)


@pytest.mark.parametrize("planned", [True, False])
def test_compiling_a_wrapped_model_is_refused_in_training(planned: bool) -> None:
    model = memscale.wrap(model_of(), FORCED, sample_input=features(0) if planned else None)
    for compiled in (torch.compile(model, backend="eager"), torch.compile(lambda x: model(x) + 1, backend="eager")):
        with pytest.raises(MemScaleError, match=r"Chain runs inside.*torch\.compile.*block\.compile\(\)"):
            compiled(features(0))
        with torch.no_grad():
            assert compiled(features(0)).shape == (8, 4), "what does not train is nobody's business"
    model.compile(backend="eager")
    with pytest.raises(MemScaleError, match="Chain runs inside"):
        model(features(0))
    memscale.detach(model)


def test_compiling_a_block_after_wrapping_is_refused() -> None:
    model = model_of()
    executor = execute(model, plan_of([Checkpoint("blocks.1")]))
    model.blocks[1].compile(backend="eager")
    with pytest.raises(MemScaleError, match=r"TwoLinears runs inside.*before the model is wrapped"):
        model(features(0))
    executor.detach()


def test_a_saved_plan_that_looks_into_a_compiled_block_is_refused() -> None:
    model = in_place(model_of(), "eager")
    with pytest.raises(PlanError, match=r"blocks\.1 is compiled.*checkpoint it whole"):
        execute(model, plan_of([Checkpoint("blocks.1", keep=("matmul",))]))
    assert executor_of(model) is None


def test_nothing_is_tiled_inside_compiled_blocks() -> None:
    config = FORCED.replace(mode="aggressive", use_mixed_precision=False, use_8bit_optimizer=False)
    model = memscale.wrap(in_place(model_of(), "eager"), config, sample_input=features(0, ROWS, WIDTH))
    assert not any(isinstance(action, TileMlp) for action in model._memscale_executor.plan.actions)
    train(model, steps=1)
    memscale.detach(model)
