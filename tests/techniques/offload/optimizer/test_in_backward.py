"""Parameters that are stepped in backward: the same bits, no gradients at the peak, and never silently wrong."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import memscale
from memscale import Config, Plan
from memscale._decide import decide
from memscale._decide.choice import RunOptions
from memscale._decide.eligible import resolve
from memscale._errors import ConfigError, PartialStepError, StepInBackwardError
from memscale._execute.executor import Executor, execute
from memscale._plan import Checkpoint, OffloadOptimizer, StepInBuckets, StreamParameters
from memscale._profile import BackwardStep, Profile
from memscale._torch.live_bytes import rounding_of
from memscale._torch.released_gradients import ReleasedGradient
from memscale._units import round_up
from memscale.techniques.offload.optimizer.in_backward import StepInBackward, bucket_bytes_of
from tests.lanes import in_turns
from tests.parity import plan_of
from tests.profiles import full_profile, hardware_of
from tests.techniques.offload.optimizer.test_in_parts import OPTIMIZERS
from tests.techniques.offload.tiers import same
from tests.techniques.offload.training import (
    BUCKET_BYTES,
    Lion,
    O,
    Training,
    check_races,
    no_hooks_left,
    plain,
    wide_net,
)

LAYER_BYTES = 128 * 128 * 4


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


@contextlib.contextmanager
def in_backward(
    net: nn.Module, *actions: Any, bucket_bytes: int = BUCKET_BYTES, optimizer: O.Optimizer | None = None
) -> Iterator[Executor]:
    executor = execute(net, plan_of([*actions, StepInBackward(bucket_bytes)]), optimizer=optimizer)
    try:
        yield executor
    finally:
        executor.detach()


def weights_of(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


# --------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(("name", "dtype"), in_turns(list(OPTIMIZERS), [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("device", ["simgpu", "cpu"])
def test_the_bits_are_those_of_the_step_after_backward(name: str, dtype: torch.dtype, device: str) -> None:
    def make(net: nn.Module) -> O.Optimizer:
        return OPTIMIZERS[name](net.parameters())

    reference = Training(device, make, dtype=dtype).run()
    training = Training(device, make, dtype=dtype)
    with in_backward(training.net):
        training.run()
        assert isinstance(training.net.head.weight.grad, ReleasedGradient)
        assert same(training.result(), reference.result())
    assert training.net.head.weight.grad is None
    assert same(training.run().result(), reference.run().result())
    no_hooks_left(training.optimizer)
    check_races(device)


@pytest.mark.parametrize("mode", ["schedule", "schedule keep"])
@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
def test_schedulers_and_zeroed_gradients(mode: str, bucket_bytes: int) -> None:
    """One parameter at a time, and all at the end of backward."""
    reference = Training("simgpu", plain(O.AdamW), mode).run()
    training = Training("simgpu", plain(O.AdamW), mode)
    with in_backward(training.net, bucket_bytes=bucket_bytes):
        assert same(training.run().result(), reference.result())


def test_an_optimizer_that_is_not_pytorchs() -> None:
    reference = Training("cpu", plain(Lion)).run()
    training = Training("cpu", plain(Lion))
    with in_backward(training.net):
        assert same(training.run().result(), reference.result())


class Decays(O.SGD):
    """Shrinks also what has no gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


def test_parameters_without_gradients_are_stepped_as_the_optimizer_does() -> None:
    reference = Training("cpu", plain(Decays, lr=0.1)).run(2)
    training = Training("cpu", plain(Decays, lr=0.1))
    before = training.net.unused.weight.detach().clone()
    with in_backward(training.net):
        assert same(training.run(2).result(), reference.result())
    assert not torch.equal(before, training.net.unused.weight)


class Tied(nn.Module):
    """A weight with two owners, and a block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return self.head(x)


def train_tied(net: nn.Module, device: str, num_steps: int = 4) -> O.Optimizer:
    optimizer = O.AdamW(net.parameters(), lr=1e-2)
    for number in range(num_steps):
        torch.manual_seed(number)
        ids = torch.randint(0, 50, (4, 8), device="cpu").to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_shared_weights_and_repeated_blocks_are_stepped_once(device: str, checkpoints: bool) -> None:
    torch.manual_seed(0)
    net = Tied().to(device)
    twin = copy.deepcopy(net)
    optimizer = train_tied(twin, device)
    actions = [Checkpoint(f"blocks.{index}") for index in range(3)] if checkpoints else []
    with in_backward(net, *actions, bucket_bytes=1):
        ours = train_tied(net, device)
        assert ours.state[net.table.weight]["step"] == optimizer.state[twin.table.weight]["step"] == 4
        assert same(ours.state_dict(), optimizer.state_dict())
        copied = copy.deepcopy(net)
    assert same(net.state_dict(), twin.state_dict())
    assert same(copied.state_dict(), twin.state_dict())
    train_tied(copied, device, 1)
    train_tied(twin, device, 1)
    assert same(copied.state_dict(), twin.state_dict()), "a copy is stepped by its own optimizer, after backward"


def test_state_is_saved_and_loaded_as_ever() -> None:
    reference = Training("simgpu", plain(O.AdamW)).run(2)
    saved = copy.deepcopy([reference.net.state_dict(), reference.optimizer.state_dict()])
    training = Training("simgpu", plain(O.AdamW))
    with in_backward(training.net):
        training.run(1)
        training.net.load_state_dict(saved[0])
        training.optimizer.load_state_dict(saved[1])
        training.num_steps, training.losses = 2, list(reference.losses)
        assert same(training.run(2).result(), reference.run(2).result())


def test_detached_between_backward_and_step_the_step_is_not_taken_twice() -> None:
    reference = Training("cpu", plain(O.AdamW)).run(2)
    training = Training("cpu", plain(O.AdamW))
    with in_backward(training.net):
        training.run(1)
        training.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1)
        training.losses.append(training.backward(torch.randn(16, 64, generator=generator)))
    training.optimizer.step()
    assert same(training.result(), reference.result())


def test_gradients_that_the_user_sets_are_stepped_by_the_step() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    twin = copy.deepcopy(net)
    ours, theirs = O.SGD(net.parameters(), 0.1), O.SGD(twin.parameters(), 0.1)
    with in_backward(net, optimizer=ours):
        for one, optimizer in ((net, ours), (twin, theirs)):
            for parameter in one.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert same(net.state_dict(), twin.state_dict())


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("mode", "match", "changes"),
    [
        ("closure", "was given a closure, .* Nothing was stepped", False),
        ("scaler", r"scaled by a torch\.amp\.GradScaler, .* Nothing was stepped", False),
        ("clip", r"shape \(96, 64\) is gone: .* cannot be read, clipped or changed", True),
        ("accumulate", "cannot be added to the one before", True),
    ],
)
def test_loops_that_need_gradients_after_backward_are_refused(mode: str, match: str, changes: bool) -> None:
    training = Training("cpu", plain(O.AdamW), mode)
    before = weights_of(training.net)
    with in_backward(training.net), pytest.raises(StepInBackwardError, match=match):
        training.step()
    assert same(weights_of(training.net), before) != changes


def backward(net: nn.Module) -> None:
    net(torch.ones(2, 64)).square().mean().backward()


@pytest.fixture
def stepped() -> Iterator[Training]:
    """A backward has come, and no step yet."""
    training = Training("cpu", plain(O.AdamW))
    with in_backward(training.net):
        training.run(1)
        training.optimizer.zero_grad()
        backward(training.net)
        yield training


def test_gradients_that_are_gone_are_not_read(stepped: Training) -> None:
    gradient = stepped.net.head.weight.grad
    assert gradient is not None
    assert (gradient.shape, gradient.dtype) == ((40, 64), torch.float32)
    assert repr(gradient) == "ReleasedGradient(shape=(40, 64))"
    for look in (torch.Tensor.norm, torch.Tensor.clone, torch.Tensor.detach, torch.isfinite, lambda g: g * 2):
        with pytest.raises(StepInBackwardError, match="is gone"):
            look(gradient)
    with pytest.raises(StepInBackwardError, match="is gone"):
        nn.utils.clip_grad_value_(stepped.net.parameters(), 1.0)


def test_a_backward_whose_step_never_came_is_noticed(stepped: Training) -> None:
    stepped.optimizer.zero_grad()
    before = weights_of(stepped.net)
    with pytest.raises(StepInBackwardError, match=r"a second time before optimizer\.step\(\): .* stepped 9 parameters"):
        backward(stepped.net)
    assert same(weights_of(stepped.net), before)


def test_gradients_that_were_never_zeroed_are_not_taken_for_new_ones(stepped: Training) -> None:
    stepped.optimizer.step()
    with pytest.raises(StepInBackwardError, match=r"Call optimizer\.zero_grad\(\) before every backward"):
        backward(stepped.net)


def test_a_second_step_for_one_backward_is_refused(stepped: Training) -> None:
    stepped.optimizer.step()
    with pytest.raises(StepInBackwardError, match="comes a second time for one backward"):
        stepped.optimizer.step()
    stepped.optimizer.zero_grad()
    stepped.optimizer.step()  # there is nothing to step: as ever, that does nothing


def test_a_learning_rate_that_comes_too_late_is_refused(stepped: Training) -> None:
    stepped.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StepInBackwardError, match="lr of AdamW changed between backward and step"):
        stepped.optimizer.step()


def test_an_optimizer_that_the_user_changes_gradients_in_is_refused(stepped: Training) -> None:
    stepped.optimizer.register_step_pre_hook(lambda *_: stepped.net.head.weight.grad.mul_(0.5))
    with pytest.raises(StepInBackwardError, match="is gone"):
        stepped.optimizer.step()


def test_a_second_optimizer_does_not_step_what_was_stepped(stepped: Training) -> None:
    other = O.SGD(stepped.net.parameters(), 0.1)
    with pytest.raises(StepInBackwardError, match="SGD is to step parameters that AdamW has stepped"):
        other.step()


def test_two_optimizers_or_none() -> None:
    net = nn.Linear(64, 64)
    with in_backward(net):
        with pytest.raises(StepInBackwardError, match="No optimizer owns parameters"):
            backward(net)
        net.zero_grad()
        first, second = O.SGD([net.weight], 0.1), O.SGD([net.bias], 0.1)
        with pytest.raises(StepInBackwardError, match=r"2 optimizers own .* \(SGD and SGD\)"):
            backward(net)
    del first, second


def test_a_graph_of_gradients_is_refused() -> None:
    net = nn.Linear(64, 64)
    optimizer = O.SGD(net.parameters(), 0.1)
    with in_backward(net, optimizer=optimizer), pytest.raises(StepInBackwardError, match="create_graph=True"):
        net(torch.ones(2, 64)).square().mean().backward(create_graph=True)
    net.zero_grad()


def test_an_optimizer_that_is_not_separable_is_refused_before_anything_is_stepped() -> None:
    class Normed(O.SGD):
        def step(self, closure: Any = None) -> None:
            norm = sum(p.grad.square().sum() for g in self.param_groups for p in g["params"] if p.grad is not None)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.sub_(parameter.grad / (1 + norm))

    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = weights_of(net)
    optimizer = Normed(net.parameters(), lr=0.1)
    with in_backward(net), pytest.raises(StepInBackwardError, match=r"Normed cannot step in backward, .* depends on"):
        backward(net)
    assert same(weights_of(net), before)
    config = Config(step_in_backward=True, enable_logging=False)
    with pytest.raises(StepInBackwardError, match="Normed cannot step in backward"):
        memscale.apply_all_optimizations(net, optimizer, config, torch.ones(2, 64))


def test_a_sparse_gradient_with_adagrad_is_refused() -> None:
    net = nn.Embedding(64, 64, sparse=True)
    optimizer = O.Adagrad(net.parameters(), 0.1)
    with in_backward(net, optimizer=optimizer), pytest.raises(StepInBackwardError, match="Adagrad steps all"):
        net(torch.arange(4)).sum().backward()


def test_8_bits_do_not_go_with_it() -> None:
    with pytest.raises(ConfigError, match="do not go together"):
        Config(step_in_backward=True, use_8bit_optimizer=True)


# ---------------------------------------------------------------------------------------- a backward that fails


class Fails(nn.Module):
    """Its backward raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.fails:
            x.register_hook(self.fail)
        return self.layers[2](self.layers[1](x))

    def fail(self, gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")


def test_a_backward_that_fails_half_way_is_not_taken_for_a_whole_one() -> None:
    torch.manual_seed(0)
    net = Fails()
    optimizer = O.AdamW(net.parameters())
    with in_backward(net, bucket_bytes=1):
        backward(net)
        optimizer.step()
        saved = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        net.fails = True
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="out of memory"):
            backward(net)
        assert torch.equal(net.layers[0].weight, saved[0]["layers.0.weight"])
        assert not torch.equal(net.layers[2].weight, saved[0]["layers.2.weight"])
        net.fails = False
        with pytest.raises(PartialStepError, match="4 of 6 parameters had been stepped"):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(PartialStepError, match="load a checkpoint of the model and of the optimizer"):
            backward(net)
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        optimizer.zero_grad()  # as ever, what a failed backward leaves is there until then
        backward(net)
        optimizer.step()
    twin = Fails()
    twin.load_state_dict(saved[0])
    theirs = O.AdamW(twin.parameters())
    theirs.load_state_dict(saved[1])
    backward(twin)
    theirs.step()
    assert same(net.state_dict(), twin.state_dict())


def test_a_step_that_fails_at_what_backward_left_is_not_taken_for_a_whole_one() -> None:
    """A parameter beside the model is stepped after backward, and its gradient is one that AdamW refuses."""
    torch.manual_seed(0)
    net, beside = Fails(), nn.Parameter(torch.ones(4, 4))
    optimizer = O.AdamW([*net.parameters(), beside])
    with in_backward(net, bucket_bytes=1, optimizer=optimizer):
        saved = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        backward(net)
        beside.grad = torch.eye(4).to_sparse()
        with pytest.raises(PartialStepError, match="failed at 1 parameters when 6 others had been stepped") as raised:
            optimizer.step()
        assert isinstance(raised.value.__cause__, RuntimeError)
        del raised
        optimizer.zero_grad()
        with pytest.raises(PartialStepError, match="load a checkpoint"):
            backward(net)
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        backward(net)
        optimizer.step()


def test_a_backward_that_fails_before_anything_was_stepped_changed_nothing() -> None:
    torch.manual_seed(0)
    net = Fails()
    optimizer = O.AdamW(net.parameters())
    with in_backward(net, bucket_bytes=10**9):
        before, net.fails = weights_of(net), True
        with pytest.raises(RuntimeError, match="out of memory"):
            backward(net)
        assert same(weights_of(net), before)
        net.fails = False
        optimizer.zero_grad()
        backward(net)
        optimizer.step()
    assert not same(weights_of(net), before)


# ----------------------------------------------------------------------------------------------------------- bytes


def peak_of_step(*, steps_in_backward: bool) -> int:
    """Of a whole step of 8 layers of 65,536 bytes, above their parameters and state."""
    net = wide_net()
    optimizer = O.AdamW(net.parameters(), fused=True)
    batch = torch.randn(1, 128, device="cpu").to("simgpu")
    with in_backward(net, bucket_bytes=1) if steps_in_backward else contextlib.nullcontext():
        for _ in range(2):
            optimizer.zero_grad()
            torch.accelerator.synchronize()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            net(batch).square().mean().backward()
            optimizer.step()
        return torch.accelerator.max_memory_allocated() - before


def test_the_gradients_leave_the_peak() -> None:
    plain_bytes, bytes_in_backward = peak_of_step(steps_in_backward=False), peak_of_step(steps_in_backward=True)
    activations = 32 * 512
    assert 8 * LAYER_BYTES < plain_bytes < 8 * LAYER_BYTES + activations
    assert LAYER_BYTES < bytes_in_backward < LAYER_BYTES + activations, "one gradient at a time"


class Blocks(nn.Module):
    def __init__(self, num_blocks: int = 4, width: int = 96) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


ASKED = Config(step_in_backward=True, enable_logging=False)


def measured_peak(net: nn.Module, optimizer: O.Optimizer, batch: torch.Tensor) -> int:
    """Of the third step: what the model, its optimizer and the batch take, and what the step takes above that."""
    for _ in range(2):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    gc.collect()  # what earlier tests left in circles would go at some moment in between
    with memscale.measure(batch.device) as before:  # tensors of others are there, too
        pass
    with memscale.measure(batch.device) as measured:
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
    del loss
    state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
    held = [tensor for tensor in (*net.parameters(), *state, batch) if tensor.device == batch.device]
    rounding = rounding_of(batch.device.type)
    return measured.peak_bytes - before.peak_bytes + sum(round_up(tensor.nbytes, rounding) for tensor in held)


@pytest.mark.parametrize("make", [plain(O.AdamW), plain(O.SGD, lr=0.1, momentum=0.9), plain(O.Adafactor)])
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("forced", [False, True])
def test_the_plan_promises_the_peak_to_the_byte(device: str, make: Any, forced: bool) -> None:
    torch.manual_seed(0)
    net = Blocks().to(device)
    batch = torch.randn(32, 96, device="cpu").to(device)
    optimizer = make(net)
    config = ASKED.replace(force_optimize=forced, enable_offloading=False)
    with memscale.optimize(net, optimizer, config, batch) as executor:
        plan = executor.plan
        assert plan is not None
        assert any(isinstance(action, StepInBackward) for action in plan.actions)
        assert forced == any(isinstance(action, Checkpoint) for action in plan.actions)
        assert measured_peak(net, optimizer, batch) == plan.predicted_peak_bytes
        assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    no_hooks_left(optimizer)


# -------------------------------------------------------------------------------------------------------- planning


class Stops(nn.Module):
    """The last block's weight is used in the first one as well, where it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x) @ self.blocks[2].weight.detach().relu()
        return self.blocks[2](self.blocks[1](x))


class StopsInside(nn.Module):
    """Inside of a block, which is recomputed."""

    class First(nn.Module):
        def __init__(self, last: nn.Linear) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.last = [last]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x) @ self.last[0].weight.detach().exp())

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([self.First(last), self.First(last)])
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_a_weight_that_is_recomputed_with_after_its_step_is_refused() -> None:
    """Autograd does not see it: the recompute would read the new value."""
    config = ASKED.replace(force_optimize=True, enable_offloading=False)
    with pytest.raises(StepInBackwardError, match=r"last\.weight is read in backward after its gradient is final"):
        memscale.wrap(StopsInside(), config, torch.ones(512, 64))
    net = memscale.wrap(Stops(), ASKED, torch.ones(2, 64))  # what is kept for backward was computed before
    memscale.detach(net)


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
def test_wrapped_training_is_the_same_and_is_planned_again_for_larger_batches(device: str) -> None:
    torch.manual_seed(0)
    net = Blocks().to(device)
    twin = copy.deepcopy(net)
    memscale.wrap(net, ASKED.replace(force_optimize=True))
    losses: list[list[float]] = []
    for one in (net, twin):
        optimizer = O.AdamW(one.parameters(), lr=1e-2)
        losses.append([])
        for rows in (4, 4, 16, 16, 8):
            batch = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).to(device)
            loss = one(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert same(net.state_dict(), twin.state_dict())
    memscale.detach(net)


def test_the_plan_says_what_it_does_and_comes_back_from_json() -> None:
    net = memscale.wrap(Blocks(), ASKED, torch.ones(4, 96))
    plan = net._memscale_executor.plan
    memscale.detach(net)
    assert Plan.from_json(plan.to_json()) == plan
    words = plan.explain()
    assert "step in backward" in words
    assert "step_in_backward=True: no gradient outlives the step of its parameter" in words
    action = plan.actions[0]
    assert isinstance(action, StepInBackward)
    gradient_bytes = sum(parameter.nbytes for parameter in net.parameters())
    assert action.reason.numbers["gradient_bytes"] == gradient_bytes
    assert action.bucket_bytes == bucket_bytes_of(gradient_bytes) == 9396
    assert 0 < action.reason.numbers["frees_bytes"] <= gradient_bytes


def test_it_is_planned_where_the_user_asks_for_it_and_nowhere_else() -> None:
    for mode in memscale.OptimizationMode:
        assert not Config(mode=mode).step_in_backward
    net = Blocks()
    estimate = memscale.estimate(net, torch.ones(4, 96), config=ASKED.replace(force_optimize=True))
    plain_estimate = memscale.estimate(net, torch.ones(4, 96), config=Config(enable_logging=False, force_optimize=True))
    conservative = memscale.OptimizationMode.CONSERVATIVE
    ours, theirs = (one.by_mode[conservative].predicted_peak_bytes for one in (estimate, plain_estimate))
    assert ours < theirs


def test_what_steps_after_backward_is_not_planned_beside_it() -> None:
    profile = full_profile(6)
    for budget_gb in (0.9, 0.5, 0.2, 0.1):
        config = ASKED.replace(memory_budget_gb=budget_gb)
        plan = decide(_steppable(profile), resolve(config, hardware_of()), raise_if_unfit=False)
        kinds = {type(action) for action in plan.actions}
        assert StepInBackward in kinds
        assert not kinds & {StreamParameters, OffloadOptimizer, StepInBuckets}


def _steppable(profile: Profile) -> Profile:
    cost = dataclasses.replace(profile.optimizer, in_backward=BackwardStep(0, 100, 10))
    return dataclasses.replace(profile, optimizer=cost)


def test_a_larger_budget_is_never_slower() -> None:
    profile, slowdowns = _steppable(full_profile(6)), []
    for budget_gb in (0.1, 0.2, 0.3, 0.5, 0.9, 2.0):
        plan = decide(profile, resolve(ASKED.replace(memory_budget_gb=budget_gb), hardware_of()), raise_if_unfit=False)
        slowdowns.append(plan.predicted_slowdown)
    assert slowdowns == sorted(slowdowns, reverse=True)


def test_run_options_default_to_not_doing_it() -> None:
    assert RunOptions().steps_in_backward is False


@pytest.mark.parametrize("num_steps", [0, 2])
def test_parameters_that_share_memory_are_refused(num_steps: int) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = O.SGD(net.parameters(), lr=0.1)
    with in_backward(net, optimizer=optimizer):
        for _ in range(num_steps):
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        net[1].weight.data = net[0].weight.data
        before = weights_of(net)
        with pytest.raises(StepInBackwardError, match=r"2 parameters of shape \(4, 4\) share their memory"):
            net(torch.ones(1, 4)).sum().backward()
    assert same(weights_of(net), before)
