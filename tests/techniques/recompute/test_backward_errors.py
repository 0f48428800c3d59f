"""An error leaves `backward()` only when no layer is being computed again."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import simgpu  # noqa: F401  (registers the device)
from memscale._plan import Checkpoint, StreamParameters
from memscale._torch.overrides import find_module
from memscale.techniques.checkpointing import checkpointed_forward as checkpointing
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.recompute import backward_errors
from tests.parity import seed

DEVICE = torch.device("simgpu", 0)
PATIENCE_S = 30.0
"""Against a hang, when something is wrong; nothing waits so long otherwise."""
HEAD_START_S = 0.2
"""How long a recompute gives the caller to leave before it ends. Nobody leaves, so this is always spent."""


class Meeting:
    """The hook raises while the recompute is under way, and the recompute ends after that."""

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self.error = error
        self.recomputing, self.raised, self.caller_has_left = (threading.Event() for _ in range(3))
        self.left_early: bool | None = None
        self.num_calls_before = 0
        """Of the layer in the device's thread, before the one that meets the hook."""

    def hook(self, gradient: torch.Tensor) -> None:
        assert self.recomputing.wait(PATIENCE_S)
        self.raised.set()
        raise self.error("a user's hook")

    def call_on_device(self) -> None:
        self.num_calls_before -= 1
        if self.num_calls_before != -1:
            return
        self.recomputing.set()
        assert self.raised.wait(PATIENCE_S)
        self.left_early = self.caller_has_left.wait(HEAD_START_S)


class Slow(nn.Module):
    """A layer that draws from every generator; its recompute meets the hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
        self.meet: list[Callable[[], None]] = []
        """Functions, which are not looked into: what an object counts would be as before in the recompute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = random.random() + numpy.random.rand() + torch.rand(1, device="cpu").item()
        if self.meet and threading.current_thread() is not threading.main_thread():
            self.meet[0]()
        return x + self.dropout(self.linear(x)) * factor


class Net(nn.Module):
    """A slow layer and a quick one on the device, and a parameter on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Slow(), Slow()])
        self.host = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        on_host = self.host.sum()  # first, so that its backward comes last
        for block in self.blocks:
            x = block(x)
        return on_host + x.square().mean().cpu()


@contextlib.contextmanager
def attached(model: Net, kind: str) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        if kind == "checkpoint":
            for name in ("blocks.0", "blocks.1"):
                checkpointing.attach(Checkpoint(name), find_module(model, name), undo)
        else:
            actions = [StreamParameters("blocks.0"), StreamParameters("blocks.1")]
            streaming.attach(actions, model, DEVICE, undo, streaming.Streaming(kind == "stream async"))
        yield


def net() -> Net:
    seed(1)
    model = Net()
    model.blocks.to(DEVICE)
    return model


def random_state() -> list[object]:
    return [
        torch.get_rng_state().tolist(),
        torch.get_device_module(DEVICE).get_rng_state().tolist(),
        random.getstate(),
        str(numpy.random.get_state()),
    ]


def fail(model: Net, meeting: Meeting, hooked: torch.Tensor, slow: Slow) -> None:
    handle = hooked.register_hook(meeting.hook)
    slow.meet.append(lambda: meeting.call_on_device())
    loss = model(torch.ones(4, 8, device=DEVICE))
    with pytest.raises(meeting.error, match="a user's hook"):
        loss.backward()
    meeting.caller_has_left.set()
    handle.remove()
    model.zero_grad()


def good_step(model: Net) -> list[torch.Tensor]:
    seed(7)
    loss = model(torch.ones(4, 8, device=DEVICE))
    loss.backward()
    return [loss.detach(), *(parameter.grad.cpu() for parameter in model.parameters())]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["checkpoint", "stream", "stream async"])
def test_nothing_is_in_flight_when_the_caller_has_the_error(kind: str, error: type[BaseException]):
    expected = good_step(net())
    model, meeting = net(), Meeting(error)
    with attached(model, kind):
        # A gradient of a streamed layer, like one of the host, is the calling thread's.
        hooked = model.host if kind == "checkpoint" else model.blocks[1].linear.weight
        fail(model, meeting, hooked, model.blocks[0] if kind != "checkpoint" else model.blocks[1])
        assert meeting.left_early is False
        assert all(parameter.is_leaf for parameter in model.parameters())
        seed(5)
        state = random_state()
        again = good_step(model)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
        seed(5)
        assert random_state() == state
    assert all(parameter.grad is not None for parameter in model.parameters())


class Around(nn.Module):
    """A reentrant checkpoint of the user's around a layer: a backward pass within a backward pass."""

    def __init__(self, inner: Net) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        on_host = self.inner.host.sum()
        x = checkpoint(self.inner.blocks[0], x, use_reentrant=True)
        return on_host + x.square().mean().cpu()


def test_waits_for_a_pass_within_the_pass():
    model, meeting = net(), Meeting()
    slow = model.blocks[0]
    with attached(model, "checkpoint"):
        handle = model.host.register_hook(meeting.hook)
        loss = Around(model)(torch.ones(4, 8, device=DEVICE, requires_grad=True))
        slow.meet.append(lambda: meeting.call_on_device())
        meeting.num_calls_before = 1  # the reentrant checkpoint's own; then ours, in the pass that it starts
        with pytest.raises(ValueError, match="a user's hook"):
            loss.backward()
        meeting.caller_has_left.set()
        handle.remove()
    assert meeting.left_early is False


def test_the_engine_is_autograds_own_again():
    engine = torch.autograd.Variable._execution_engine
    one, two = net(), net()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(attached(one, "checkpoint"))
        second.enter_context(attached(two, "stream"))
        assert torch.autograd.Variable._execution_engine is not engine
        first.close()
        assert torch.autograd.Variable._execution_engine is not engine
        assert isinstance(torch.autograd.Variable._execution_engine, type(engine))
    assert torch.autograd.Variable._execution_engine is engine


class Broken:
    """Somebody whose device cannot be asked."""

    def devices(self) -> list[torch.device]:
        raise RuntimeError("the device is lost")


def test_the_users_error_comes_through_when_nobody_can_wait(caplog: pytest.LogCaptureFixture):
    module, owner = nn.Linear(2, 2), Broken()
    with contextlib.ExitStack() as undo:
        backward_errors.wait_on_errors(owner, module, undo)
        module.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            module(torch.ones(1, 2)).sum().backward()
    assert "could not wait for autograd's threads (RuntimeError: the device is lost)" in caplog.text


class Interrupted:
    """A second Ctrl-C, in the middle of the wait."""

    def __init__(self) -> None:
        self.num_asked = 0

    def devices(self) -> list[torch.device]:
        self.num_asked += 1
        if self.num_asked == 1:
            raise KeyboardInterrupt
        return [DEVICE]


def test_an_interrupt_does_not_cut_the_wait_short():
    module, owner = nn.Linear(2, 2), Interrupted()
    with contextlib.ExitStack() as undo:
        backward_errors.wait_on_errors(owner, module, undo)
        module.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(KeyboardInterrupt):
            module(torch.ones(1, 2)).sum().backward()
    assert owner.num_asked == 2
