"""Every named wait of MemScale's, left out once, is seen by the race detector: over the events that PyTorch records."""

import contextlib
import pathlib
import re

import pytest
import torch

import emucuda
from emucuda._control import native
from memscale import techniques
from memscale._execute.executor import execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import StreamParameters
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.offload.store.disk import DiskStore
from tests.parity import plan_of
from tests.techniques.offload.transfer.wait_scenarios import SCENARIOS, left_out, run_scenario

STREAMING = ("host after weights", "host after gradient")
STEPPED = ("host after stepped weights",)


@pytest.fixture(autouse=True)
def files_are_seen(monkeypatch):
    """Files are written from pinned memory and read into it by no operator: the card is told of it here."""
    for name, writes in (("write", False), ("read", True)):
        monkeypatch.setattr(DiskStore, name, _seen(getattr(DiskStore, name), writes))


def _seen(method, writes):
    def call(store, ticket, tensors, *args, **kwargs):
        for tensor in tensors:
            native().emucuda_host_access(tensor.data_ptr(), tensor.nbytes, writes, method.__name__.encode())
        return method(store, ticket, tensors, *args, **kwargs)

    return call


@pytest.mark.parametrize("why", SCENARIOS)
def test_a_wait_of_transfers(why, tmp_path, monkeypatch):
    with emucuda.watch_races():
        run_scenario(why, "cuda", tmp_path)
    assert emucuda.take_reports() == []
    with left_out(why, monkeypatch), emucuda.watch_races():
        run_scenario(why, "cuda", tmp_path)
    assert emucuda.take_reports() != []


class EarlyExit(torch.nn.Module):
    """In evaluation it stops after its first layer: the second is fetched for nothing, and nobody waits for it."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if self.training else self.blocks[:1]:
            x = torch.relu(block(x))
        return x


def train_streamed() -> None:
    """Every wait matters: memory is reused at once, and weights are written to at once."""
    model = EarlyExit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    actions = [StreamParameters(f"blocks.{index}") for index in range(4)]
    with contextlib.ExitStack() as undo:
        device = torch.device("cuda")
        how = streaming.Streaming(asynchronous=True, gradient_window_bytes=1 << 12)
        streaming.attach(actions, model, device, undo, how)
        x = torch.randn(64, 256, device=device)
        with emucuda.watch_races():
            for _ in range(2):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            with torch.no_grad():
                model.eval()(x)
                for parameter in model.parameters():
                    parameter.data.mul_(1.5)
    torch.cuda.synchronize()


@pytest.mark.parametrize("why", STREAMING)
def test_a_wait_of_streamed_parameters(why, monkeypatch):
    train_streamed()
    assert emucuda.take_reports() == []
    with left_out(why, monkeypatch):
        train_streamed()
    assert emucuda.take_reports() != []


def step_on_the_card() -> None:
    """Weights that were stepped on the card are written to as soon as the step is over."""
    model = EarlyExit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    actions = [StreamParameters(f"blocks.{index}") for index in range(4)]
    plan = plan_of([*actions, StepOnDevice(1 << 19)], device_type="cuda")
    executor = execute(model, plan, ExecutionSettings(asynchronous=True, device=torch.device("cuda")))
    x = torch.randn(64, 256, device="cuda")
    with emucuda.watch_races():
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.data.mul_(1.5)
            optimizer.zero_grad()
    torch.cuda.synchronize()
    executor.detach()


@pytest.mark.parametrize("why", STEPPED)
def test_a_wait_of_a_step_on_the_card(why, monkeypatch):
    step_on_the_card()
    assert emucuda.take_reports() == []
    with left_out(why, monkeypatch):
        step_on_the_card()
    assert emucuda.take_reports() != []


def test_no_wait_is_forgotten_here():
    """But that after a failed copy, which the injected faults of the other stand-in cover."""
    source = pathlib.Path(techniques.__file__).parent
    found = (re.findall(r'order\([^"]*"([a-z ]+)"\)', path.read_text()) for path in source.rglob("*.py"))
    assert {name for names in found for name in names} - {"reuse after failed copy"} == {
        *SCENARIOS,
        *STREAMING,
        *STEPPED,
    }
