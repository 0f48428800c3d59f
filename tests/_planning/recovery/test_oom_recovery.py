"""A step that runs out of memory is run again under a tighter plan, exactly, or refused with the reason."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale
import simgpu
from memscale._execute.executor import executor_of
from tests.parity import seed
from tests.techniques.offload.runs import DEVICE, VOCABULARY, Gpt, same, tokens, weights

SHAPE = (4, 64)
CONFIG = memscale.Config(enable_logging=False, recover_from_oom=True)
pytestmark = pytest.mark.usefixtures("no_races", "no_leaks")


class WithLoss(Gpt):
    """Returns the loss and the logits; counts in a buffer, in an attribute, and by statistics."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.register_buffer("seen", torch.zeros(1))
        self.calls, self.trail = 0, [0]
        self.batch_norm = nn.BatchNorm1d(32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.calls += 1
        self.trail.append(self.calls)
        self.seen.add_(1)
        x = self.batch_norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.norm(self.run(x * self.seen.clamp(max=1))))
        if labels is None:
            return logits
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1)), logits


def build() -> WithLoss:
    seed(1)
    return WithLoss().to(DEVICE)


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, *, inside: bool) -> torch.Tensor:
    if inside:
        loss, _ = model(ids, labels)
        return loss
    return F.cross_entropy(model(ids).reshape(-1, VOCABULARY), labels.reshape(-1))


@contextlib.contextmanager
def failing(nth: int | None) -> Iterator[list[bool]]:
    fired: list[bool] = []
    if nth is None:
        yield fired
        return
    with simgpu.fail_allocation(nth) as fault:
        yield fired
    fired.append(fault.fired)


class Loop:
    """Steps of two batches each; with what the loop saw."""

    def __init__(self, model: nn.Module, *, inside: bool) -> None:
        self.model, self.inside = model, inside
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.losses: list[torch.Tensor] = []
        self.refusals: list[str] = []
        self.batch: Any = None
        self.num_recovered = 0
        self.num_clean = 0

    def step(self, step: int, nth: int | None = None) -> None:
        """A batch that is refused is run again by the loop itself, as loops do."""
        for part in (2 * step, 2 * step + 1):
            ids = tokens(part, SHAPE)
            self.batch = ids, ids.roll(1, 1)
            gradients = {p: None if p.grad is None else p.grad.cpu() for p in self.model.parameters()}
            buffers = {name: value.cpu() for name, value in self.model.named_buffers()}
            calls = self.model.calls
            torch.manual_seed(part)
            with failing(nth if part % 2 else None) as fired:
                try:
                    loss = loss_of(self.model, *self.batch, inside=self.inside)
                    loss.backward()
                except torch.OutOfMemoryError as error:
                    self.refusals.append(str(error))
                    for parameter, gradient in gradients.items():
                        parameter.grad = None if gradient is None else gradient.to(parameter.device)
                    for name, value in self.model.named_buffers():
                        value.copy_(buffers[name])
                    self.model.calls = calls
                    del self.model.trail[calls + 1 :], error
                    torch.manual_seed(part)
                    loss = loss_of(self.model, *self.batch, inside=self.inside)
                    loss.backward()
                if part % 2:
                    self.optimizer.step()
            self.num_recovered += sum(fired)
            self.num_clean += len(fired) - sum(fired)
            self.losses.append(loss.detach().cpu())
        self.optimizer.zero_grad()


def state(loop: Loop) -> dict[str, Any]:
    model = loop.model
    numbers = {"calls": torch.tensor(model.calls), "trail": torch.tensor(model.trail), "random": torch.get_rng_state()}
    device = {"device": torch.get_device_module(DEVICE).get_rng_state(DEVICE)}
    return {**weights(model), **numbers, **device, **{f"loss {k}": loss for k, loss in enumerate(loop.losses)}}


def plainly(num_steps: int, *, inside: bool) -> dict[str, Any]:
    loop = Loop(build(), inside=inside)
    for step in range(num_steps):
        loop.step(step)
    return state(loop)


def wrapped(model: nn.Module, *, inside: bool = True, **wishes: Any) -> Any:
    """Its executor."""
    sample = (tokens(0, SHAPE), tokens(0, SHAPE)) if inside else tokens(0, SHAPE)
    memscale.wrap(model, CONFIG.replace(**wishes), sample)
    return executor_of(model)


def check(every: int, *, inside: bool, mode: str) -> Loop:
    """Let one allocation after another fail, until a step is over before."""
    model = build()
    executor = wrapped(model, inside=inside, mode=mode)
    first, loop, num_steps = executor.plan, Loop(model, inside=inside), 0
    while loop.num_clean < 2:
        loop.step(num_steps, 1 + every * num_steps)
        num_steps += 1
    assert same(state(loop), plainly(num_steps, inside=inside))
    assert executor.plan.predicted_peak_bytes < first.predicted_peak_bytes
    in_model = [text for text in loop.refusals if "is not run again" in text]
    assert len(loop.refusals) - len(in_model) <= 2, "the loop's own operators are not the model's"
    # Which reason a refusal has may depend on what else lives in the process; that weights are right does not.
    assert all(text.partition("is not run again")[2].strip(" .") for text in in_model), "each says why"
    executor.detach()
    return loop


def test_where_allocations_fail_a_step_is_repeated_and_training_is_the_same(simgpu_device: Any) -> None:
    loop = check(23, inside=True, mode="conservative")
    assert loop.num_recovered >= 4


@pytest.mark.full
@pytest.mark.parametrize("mode", ["conservative", "balanced"])
@pytest.mark.parametrize("inside", [True, False], ids=["the model's own loss", "a loss outside"])
def test_at_every_tenth_allocation_a_step_is_repeated_or_refused_and_training_is_the_same(
    inside: bool, mode: str, simgpu_device: Any
) -> None:
    loop = check(10, inside=inside, mode=mode)
    assert loop.num_recovered > (3 if inside else 2) * len(loop.refusals)


def test_memory_that_others_take_is_done_without(cap: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    loop = Loop(model, inside=True)
    loop.step(0)
    executor = wrapped(model, mode="conservative")
    first = executor.plan
    assert not first.actions
    others = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    cap(others.nbytes + int(0.88 * first.predicted_peak_bytes))
    loop.step(1)
    assert "the plan was tightened from" in caplog.text
    assert "the batch runs again from the same weights and random state" in caplog.text
    assert executor.plan.actions
    cap(others.nbytes + int(0.5 * first.predicted_peak_bytes))
    with pytest.raises(torch.OutOfMemoryError, match=r"no tighter plan fits.*raise the budget to"):
        loss_of(model, *loop.batch, inside=True).backward()
    cap(1 << 30)
    assert same(weights(model), {k: v for k, v in plainly(2, inside=True).items() if k in weights(model)})
    executor.detach()


class Scaled(WithLoss):
    """Has a parameter that the loss outside needs, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_what_might_not_be_exact_is_refused_with_the_reason(simgpu_device: Any) -> None:
    seed(1)
    model = Scaled().to(DEVICE)
    executor = wrapped(model, mode="conservative")
    plan, ids = executor.plan, tokens(0, SHAPE)

    def refused(reason: str, root: torch.Tensor, **options: Any) -> None:
        words = f"is not run again after this failure in backward: .*({reason})"
        with pytest.raises(torch.OutOfMemoryError, match=words), simgpu.fail_allocation(20):
            root.backward(**options)
        model.zero_grad()

    refused("its graph is kept", loss_of(model, ids, ids, inside=True), retain_graph=True)
    refused("beside what the model returns", loss_of(model, ids, ids, inside=True) + model.scale.sum())
    loss, logits = model(ids, ids)
    refused("one of which depends on another", loss + logits.sum())
    del loss, logits
    assert executor.plan.predicted_peak_bytes < plan.predicted_peak_bytes, "steps after refusals are planned for less"
    loss = loss_of(model, ids, ids.clone(), inside=False)
    ids.add_(0)
    refused("was written to after its forward", loss)  # before backward comes to the embedding and sees it
    del loss
    executor.detach()


COUNTED: dict[str, Any] = {"calls": 0, "sums": []}
SWITCH = [True]
DRAWS: Iterator[int] = iter(range(1_000_000))


class Worldly(WithLoss):
    """Reads and writes what lies beside it, as `habit` says."""

    def __init__(self) -> None:
        super().__init__()
        self.habit = ""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.habit == "counts":
            COUNTED["calls"] += 1
            COUNTED["sums"].append(COUNTED["calls"])
        if self.habit == "draws":
            draw()
        loss, logits = super().forward(ids, labels)
        if self.habit == "switches" and not SWITCH[0]:
            loss = loss.detach() + 0 * logits.sum()
        if self.habit == "counts":
            loss = loss * COUNTED["calls"]
        if self.habit == "looks at a clock":
            loss = loss + clock()
        return loss, logits


def draw() -> int:
    return next(DRAWS)


def clock() -> float:
    """Another number whenever it is asked, from where nobody sees it."""
    return float(torch.get_num_threads() + _TICKS.ticks())


class _Ticks:
    """Its state is not among its attributes."""

    def ticks(self) -> int:
        value = int(os.environ.get("MEMSCALE_TEST_TICKS", "0"))
        os.environ["MEMSCALE_TEST_TICKS"] = str(value + 1)
        return value


_TICKS = _Ticks()


def worldly_model() -> Worldly:
    seed(1)
    model = Worldly().to(DEVICE)
    wrapped(model, mode="conservative")
    return model


def worldly_step(model: nn.Module, habit: str, fails_in: str | None, between: Any = lambda: None) -> list[Any]:
    """The loss and a gradient of one step, and what was counted."""
    model.habit, ids = habit, tokens(0, SHAPE)
    torch.manual_seed(7)
    with failing(12 if fails_in == "forward" else None):
        loss, _ = model(ids, ids.clone())
    between()
    with failing(20 if fails_in == "backward" else None):
        loss.backward()
    gradient = model.head.weight.grad.cpu()
    model.zero_grad()
    return [loss.detach().cpu(), gradient, COUNTED["calls"], tuple(COUNTED["sums"])]


def count_anew() -> None:
    COUNTED["calls"], COUNTED["sums"][:] = 0, []
    SWITCH[0] = True


def test_what_the_forward_changes_beside_the_model_is_put_back(simgpu_device: Any) -> None:
    worldly = worldly_model()
    runs, sums = [], COUNTED["sums"]
    for fails_in in ((None, None, None, None), (None, None, "forward", "backward")):
        count_anew()
        runs.append([worldly_step(worldly, "counts", each) for each in fails_in])
    plain, again = runs
    assert again[-1][2:] == [4, (1, 2, 3, 4)]
    assert COUNTED["sums"] is sums
    assert all(torch.equal(a[k], b[k]) for a, b in zip(plain, again, strict=True) for k in range(2))
    memscale.detach(worldly)


def turn() -> None:
    SWITCH[0] = False


REFUSED = {
    "draws": "uses what cannot be compared: an object of type range_iterator",
    "switches": "state beside the model changed",
    "looks at a clock": "calls os.__getitem__|calls os.__setitem__|calls os.get",
}


def test_what_cannot_be_the_same_beside_the_model_is_refused(simgpu_device: Any) -> None:
    worldly = worldly_model()
    before = weights(worldly)
    for habit, reason in REFUSED.items():
        count_anew()
        worldly_step(worldly, habit, None)
        words = f"is not run again after this failure in backward: .*({reason})"
        with pytest.raises(torch.OutOfMemoryError, match=words):
            worldly_step(worldly, habit, "backward", turn if habit == "switches" else lambda: None)
        worldly.zero_grad()
    trained = {name for name, _ in worldly.named_parameters()}
    assert all(torch.equal(value, before[name]) for name, value in weights(worldly).items() if name in trained)
    memscale.detach(worldly)


def test_hooks_that_remember_keep_nothing_alive_and_are_refused(simgpu_device: Any) -> None:
    worldly = worldly_model()
    seen: list[torch.Tensor] = []
    handle = worldly.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        worldly_step(worldly, "", None)
        assert seen
        with pytest.raises(torch.OutOfMemoryError, match="state beside the model"):
            worldly_step(worldly, "", "backward")
    finally:
        handle.remove()
        worldly.zero_grad()
    gone = weakref.ref(seen[0])
    seen.clear()
    worldly_step(worldly, "", None)
    assert gone() is None
    memscale.detach(worldly)


def test_nothing_is_done_where_it_is_not_wished(simgpu_device: Any) -> None:
    model = build()
    executor = wrapped(model, mode="conservative", recover_from_oom=False)
    loss = loss_of(model, *[tokens(0, SHAPE)] * 2, inside=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"\(injected fault\)$"), simgpu.fail_allocation(20):
        loss.backward()
    assert "forward" not in vars(model)
    del loss
    executor.detach()


def test_a_step_that_succeeds_takes_no_byte_more_on_the_device(simgpu_device: Any) -> None:
    peaks = []
    for recovers in (False, True):
        model = build()
        executor = wrapped(model, mode="conservative", recover_from_oom=recovers)
        loop = Loop(model, inside=True)
        loop.step(0)
        torch.accelerator.reset_peak_memory_stats()
        loop.step(1)
        peaks.append(torch.accelerator.max_memory_allocated())
        executor.detach()
        del model, executor, loop
    assert peaks[0] == peaks[1]


class Careless(WithLoss):
    """Changes what it is given, or returns what cannot be told apart, as `habit` says."""

    def __init__(self) -> None:
        super().__init__()
        self.habit, self.options, self.rate = "", {"rate": 1.0}, 0.5

    def forward(self, batch: dict[str, Any]) -> Any:
        if self.habit == "writes to its input":
            batch["ids"].add_(0)
        loss, logits = super().forward(batch["ids"], batch["labels"])
        if self.habit == "takes from its batch":
            batch.pop("labels")
        return (loss, loss.view_as(loss) if self.habit != "returns twice" else loss, logits)


def careless(habit: str) -> tuple[Careless, Any, Any]:
    seed(1)
    model = Careless().to(DEVICE)
    ids = tokens(0, SHAPE)
    memscale.wrap(model, CONFIG.replace(mode="conservative"), ({"ids": ids, "labels": ids.clone()},))
    model.habit = habit
    return model, executor_of(model), {"ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(
    ("habit", "reason"),
    [("writes to its input", "the forward wrote to its input"), ("returns twice", "returns one tensor twice")],
)
def test_a_forward_that_cannot_be_told_apart_from_its_repetition_is_refused(
    habit: str, reason: str, simgpu_device: Any
) -> None:
    model, executor, batch = careless(habit)
    loss = model(batch)[0]
    with pytest.raises(torch.OutOfMemoryError, match=reason), simgpu.fail_allocation(20):
        loss.backward()
    del loss
    executor.detach()


def test_a_forward_that_takes_from_its_batch_is_repeated_with_all_of_it(simgpu_device: Any) -> None:
    model, executor, batch = careless("takes from its batch")
    model(dict(batch))[0].backward()  # what it changes of itself is learned
    plain = build_twin(model)
    with simgpu.fail_allocation(20) as fault:
        loss = model(batch)[0]
    assert fault.fired
    loss.backward()
    assert torch.equal(loss.detach().cpu(), plain)
    del loss
    executor.detach()


def build_twin(model: nn.Module) -> torch.Tensor:
    """The loss of a plain copy with the same batch, and the random state as it was."""
    state_before = torch.get_rng_state(), torch.get_device_module(DEVICE).get_rng_state(DEVICE)
    twin = copy.deepcopy(model)
    ids = tokens(0, SHAPE)
    loss = twin({"ids": ids, "labels": ids.clone()})[0].detach().cpu()
    torch.set_rng_state(state_before[0])
    torch.get_device_module(DEVICE).set_rng_state(state_before[1], DEVICE)
    return loss


def _replace(model: Careless) -> None:
    model.rate = 0.25


def _fill(model: Careless) -> None:
    model.options["rate"] = 2.0


def _switch(model: Careless) -> None:
    model.blocks[0].eval()


@pytest.mark.parametrize("change", [_replace, _fill, _switch])
def test_attributes_that_change_between_forward_and_backward_are_seen(change: Any, simgpu_device: Any) -> None:
    model, executor, batch = careless("")
    loss = model(batch)[0]
    change(model)
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"an attribute of the model|state beside the model"),
        simgpu.fail_allocation(20),
    ):
        loss.backward()
    del loss
    executor.detach()


def test_hooks_that_a_repetition_would_pass_by_are_refused(simgpu_device: Any) -> None:
    model, executor, batch = careless("")
    loss, _, logits = model(batch)
    logits.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(torch.OutOfMemoryError, match="has hooks of the loop's own"), simgpu.fail_allocation(20):
        loss.backward()
    del loss, logits
    model.zero_grad()
    handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    loss = model({"ids": batch["ids"], "labels": batch["ids"].clone()})[0]
    with pytest.raises(torch.OutOfMemoryError, match="use their gradients during backward"), simgpu.fail_allocation(20):
        loss.backward()
    del loss
    handle.remove()
    executor.detach()


def test_an_output_that_nobody_uses_ends_no_backward(simgpu_device: Any) -> None:
    model, executor, batch = careless("")
    loss, _, unused = model(batch)
    loss.backward()
    assert unused.grad_fn is not None
    assert all(parameter.grad is not None for parameter in model.parameters())
    del loss, unused
    executor.detach()


class _InnerPass(torch.autograd.Function):
    """Computes again in backward, by a pass within the pass, as reentrant checkpointing does."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.part(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class InnerPasses(nn.Module):
    """One layer, used three times: each use adds to its gradient by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = _InnerPass.apply(self.shared, x)
        return x.square().mean()


def test_a_gradient_that_has_come_in_part_is_not_taken_for_whole(simgpu_device: Any) -> None:
    seed(1)
    model = InnerPasses().to(DEVICE)
    plain = copy.deepcopy(model)
    x = torch.ones(8, 32, device=DEVICE)
    memscale.wrap(model, CONFIG.replace(mode="conservative"), x)
    plain(x).backward()
    refusals = []
    for nth in range(2, 20, 3):
        model.zero_grad()
        loss = model(x)
        try:
            with simgpu.fail_allocation(nth) as fault:
                loss.backward()
            assert fault.fired
        except torch.OutOfMemoryError as error:
            refusals.append(str(error))
        else:
            assert all(
                torch.equal(p.grad.cpu(), q.grad.cpu())
                for p, q in zip(model.parameters(), plain.parameters(), strict=True)
            )
    assert any("ran a backward pass of its own" in text for text in refusals)
    memscale.detach(model)


class Unregistered(nn.Module):
    """Hides a layer from `parameters()` in a list, as models do that tie weights."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(32, 32).to(DEVICE)]
        self.between = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](self.between(self.hidden[0](x))).square().mean()


def test_parameters_that_are_not_registered_get_no_gradient_twice(simgpu_device: Any) -> None:
    seed(1)
    model = Unregistered().to(DEVICE)
    x = torch.ones(8, 32, device=DEVICE)
    memscale.wrap(model, CONFIG.replace(mode="conservative"), x)
    loss = model(x)
    with (
        simgpu.fail_allocation(4) as fault,
        pytest.raises(torch.OutOfMemoryError, match="not registered with the model"),
    ):
        loss.backward()
    assert fault.fired
    memscale.detach(model)
