"""Copies of a streamed model lie on one device, and a streamed model that is moved computes where it was moved to."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale._plan import StreamParameters
from memscale.techniques.offload.parameters import streaming
from tests.parity import attached_plan
from tests.techniques.offload.runs import DEVICE

ACCELERATOR = torch.accelerator
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any, no_leaks: Any) -> None:
    """Registers the device; every test must give its device and pinned bytes back."""


class Net(nn.Module):
    """Two layers that share a weight, a frozen parameter and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.blocks[2][0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


class Forwarder(nn.Module):
    """Hands what it does not know to the module that it holds, as PEFT's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@contextlib.contextmanager
def streamed(model: nn.Module, asynchronous: bool = True) -> Any:
    with contextlib.ExitStack() as undo:
        actions = [StreamParameters(f"blocks.{index}") for index in range(3)]
        yield streaming.attach(actions, model, DEVICE, undo, streaming.Streaming(asynchronous))


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def devices(model: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in tensors(model)}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("came_from", [CPU, DEVICE], ids=["host", "device"])
def test_a_copy_lies_where_the_model_came_from(came_from: torch.device, asynchronous: bool) -> None:
    model = Net().to(came_from)
    expected = copy.deepcopy(model)
    tables = [(part._parameters, part._buffers) for part in model.modules()]
    with streamed(model, asynchronous):
        assert devices(model) == {"cpu", DEVICE.type}
        twin = copy.deepcopy(model)
        forwarded = copy.deepcopy(Forwarder(model))
    for copied in (twin, forwarded.inner):
        assert isinstance(copied, Net)
        assert devices(copied) == {came_from.type}
        assert all(torch.equal(a, b) for a, b in zip(tensors(copied), tensors(expected), strict=True))
        assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in expected.parameters()]
        assert copied.blocks[1][0].weight is copied.blocks[0][0].weight
        assert {type(table) for part in copied.modules() for table in (part._parameters, part._buffers)} == {dict}
    after = [(part._parameters, part._buffers) for part in model.modules()]
    assert all(a is b and c is d for (a, c), (b, d) in zip(after, tables, strict=True))
    assert devices(model) == {came_from.type}


def test_a_copy_trains_as_the_model_does_and_shares_nothing_with_it() -> None:
    model = Net().to(DEVICE)
    x = torch.randn(4, 8, device="cpu").to(DEVICE)
    with streamed(model):
        twin = copy.deepcopy(model)
        outputs = [each(x) for each in (model, twin)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is None or torch.equal(ours.grad.cpu(), theirs.grad.cpu())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert any(parameter.any() for parameter in twin.parameters())


def test_a_layer_is_copied_to_one_device_too_and_files_hold_plain_tables() -> None:
    model = Net().to(DEVICE)
    with streamed(model):
        assert devices(copy.deepcopy(model.blocks[2])) == {DEVICE.type}
        file = io.BytesIO()
        torch.save(model, file)
        shallow = copy.copy(model.blocks[0][0])
        assert shallow._parameters is model.blocks[0][0]._parameters
        kept = pickle.dumps(model)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=False), pickle.loads(kept)):
        assert {type(part._parameters) for part in loaded.modules()} == {dict}
        assert loaded.blocks[1][0].weight is loaded.blocks[0][0].weight


def _from_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _from_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _from_python_pickle(value: Any) -> Any:
    file = io.BytesIO()
    pickle._Pickler(file).dump(value)
    return pickle.loads(file.getvalue())


@pytest.mark.parametrize("came_from", [CPU, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("reread", [_from_file, _from_pickle, _from_python_pickle])
def test_what_is_read_from_a_file_lies_where_the_model_came_from(reread: Any, came_from: torch.device) -> None:
    model = Net().to(came_from)
    model.head.bias.note = "mine"
    if reread is _from_file:  # PyTorch pickles no such integers outside of its own files
        model.register_buffer("codes", torch.ones(3, dtype=torch.uint16, device=came_from))
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with streamed(model):
        optimizer_first, loaded = reread((optimizer, model))
        moved_by_user = copy.copy(model.blocks[0][0].bias)
        assert moved_by_user.data_ptr() == model.blocks[0][0].bias.data_ptr()
        stranger = reread(torch.ones(2, device=DEVICE))
    assert stranger.device.type == DEVICE.type
    assert devices(loaded) == {came_from.type}
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(tensors(loaded), tensors(expected), strict=True))
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in expected.parameters()]
    assert loaded.blocks[1][0].weight is loaded.blocks[0][0].weight
    assert loaded.head.bias.note == "mine"
    ours = optimizer_first.param_groups[0]["params"]
    assert all(a is b for a, b in zip(ours, loaded.parameters(), strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in loaded.parameters())
    assert devices(reread(model)) == {came_from.type}  # taken off: as ever


def test_a_file_takes_no_memory_of_the_device_and_is_read_where_one_asks_for() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(256, 256) for _ in range(3))}).to(DEVICE)
    file = io.BytesIO()
    with streamed(model):
        before = ACCELERATOR.memory_allocated()
        ACCELERATOR.reset_peak_memory_stats()
        torch.save(model, file)
        pickle.dumps(model)
        assert ACCELERATOR.max_memory_allocated() == before
    file.seek(0)
    assert devices(torch.load(file, weights_only=False, map_location="cpu")) == {"cpu"}


def test_a_streamed_model_that_is_moved_to_the_host_computes_there() -> None:
    """Also where nobody trains: evaluation and generation follow as well; and it comes back as it went."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0) for _ in range(3)))
    model = memscale.wrap(copy.deepcopy(plain).to(DEVICE), memscale.Config(force_optimize=True, enable_logging=False))
    x = torch.randn(2, 6, 32, device="cpu")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for place in (DEVICE, CPU, DEVICE):
        model.to(place)
        plain.to(place)
        if place == CPU:
            assert any(isinstance(action, StreamParameters) for action in attached_plan(model).actions)
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
            assert attached_plan(model) is None
            assert {p.device.type for p in model.parameters()} == {"cpu"}
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(x.to(place)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert attached_plan(model).device_type == place.type
    memscale.detach(model)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert {p.device.type for p in model.parameters()} == {DEVICE.type}


def test_a_streamed_model_that_was_moved_says_where_it_is() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)).to(DEVICE)
    with contextlib.ExitStack() as undo:
        streaming.attach([StreamParameters("transformer.h.0")], model, DEVICE, undo)
        assert model.device == DEVICE
        model.cpu()
        assert model.device == CPU
        model.to(DEVICE)
        assert model.device == DEVICE
