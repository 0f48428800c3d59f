"""A small training run, plain or with its optimizer adopted."""

from __future__ import annotations

import contextlib
import copy
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_internals

import simgpu
from memscale.techniques.offload.optimizer.adopted_optimizer import BucketSizes
from memscale.techniques.offload.optimizer.adoption import Adoption, adopt
from memscale.techniques.offload.optimizer.buckets import Waiting
from memscale.techniques.offload.transfer import stream_order
from memscale.techniques.offload.transfer.transfers import Transfers
from tests.techniques.offload.tiers import device_of, on_host, opened, same

O = torch.optim  # noqa: E741
MAIN_WAYS = ("simgpu host async", "cpu disk async")
BUCKET_BYTES = 20_000
Make = Callable[[nn.Module], O.Optimizer]


class Net(nn.Module):
    """Parameters of many sizes, one layer that gets no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
        )
        self.head = nn.Linear(64, 40)
        self.unused = nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


def make_net(device: str, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(device, dtype)


def plain(kind: type[O.Optimizer], **options: Any) -> Make:
    return lambda net: kind(net.parameters(), **options)


def grouped(kind: type[O.Optimizer], **options: Any) -> Make:
    """Two groups: matrices with weight decay, the rest without."""

    def make(net: nn.Module) -> O.Optimizer:
        matrices = [p for p in net.parameters() if p.ndim == 2]
        rest = [p for p in net.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "lr": 3e-3, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return kind(groups, **options)

    return make


def muon(net: nn.Module) -> O.Optimizer:
    return O.Muon([p for p in net.parameters() if p.ndim == 2], lr=1e-2)


class Training:
    """A small training run; `mode` says what the loop does beside forward, backward and step."""

    def __init__(self, device: str, make: Make, mode: str = "", dtype: torch.dtype = torch.float32) -> None:
        self.net = make_net(device, dtype)
        self.device, self.mode, self.dtype = device, mode, dtype
        self.optimizer = make(self.net)
        self.losses: list[Any] = []
        self.num_steps = 0
        self.scheduler = (
            O.lr_scheduler.OneCycleLR(self.optimizer, 0.01, total_steps=40, cycle_momentum=False)
            if "schedule" in mode
            else None
        )
        self.scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2) if "scaler" in mode else None

    def run(self, num_steps: int = 5) -> Training:
        for _ in range(num_steps):
            self.step()
        return self

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.num_steps)
        count = 2 if "accumulate" in self.mode else 1
        drawn = [torch.randn(16, 64, generator=generator, device="cpu") for _ in range(count)]
        batches = [batch.to(self.device, self.dtype) for batch in drawn]

        def closure() -> float:
            self.optimizer.zero_grad(set_to_none="keep" not in self.mode)
            return sum(self.backward(batch) for batch in batches)

        if "closure" in self.mode:
            step = self.optimizer.step
            self.losses.append(step(closure) if self.num_steps % 2 else step(closure=closure))
        else:
            self.losses.append(closure())
            self.update()
        if self.scheduler:
            self.scheduler.step()
        self.num_steps += 1

    def backward(self, batch: torch.Tensor) -> float:
        loss = self.net(batch).float().square().mean()
        if "overflow" in self.mode and self.num_steps == 2:
            loss = loss * float("inf")
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss.item()

    def update(self) -> None:
        if self.scaler and "unscale" in self.mode:
            self.scaler.unscale_(self.optimizer)
        if "clip" in self.mode:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def result(self) -> Any:
        """Everything that the run decided."""
        return on_host([self.net.state_dict(), copy.deepcopy(self.optimizer.state_dict()), self.losses])


@contextlib.contextmanager
def adopted(
    training: Training, transfers: Transfers, bucket_bytes: int = BUCKET_BYTES, resident_share: float = 0.0
) -> Iterator[Adoption]:
    with contextlib.ExitStack() as undo:
        adoption = adopt(training.net, transfers.store, transfers, BucketSizes(bucket_bytes, resident_share), undo)
        yield adoption


def check_parity(
    way: str, directory: pathlib.Path, make: Make, mode: str = "", dtype: torch.dtype = torch.float32, steps: int = 5
) -> None:
    """Plain and adopted agree bit for bit, while adopted and after; state really waits; it is back afterwards."""
    device = device_of(way)
    reference = Training(device, make, mode, dtype).run(steps)
    with opened(way, directory) as transfers:
        training = Training(device, make, mode, dtype)
        with adopted(training, transfers) as adoption:
            training.run(steps)
            assert adoption.adopted(training.optimizer)
            assert same(training.result(), reference.result())
            check_waiting(training)
        assert same(training.result(), reference.result())
        check_given_back(training, reference)
        training.step()
        reference.step()
        assert same(training.result(), reference.result())
        no_hooks_left(training.optimizer)
    check_races(device)


def check_waiting(training: Training) -> None:
    """No large state tensor is on the device."""
    for entry in training.optimizer.state.values():
        if isinstance(entry, Waiting):
            assert entry.bucket is not None, "somebody looked"
            assert all(not isinstance(v, torch.Tensor) or v.nbytes <= 4096 for v in entry.kept.values())
        elif isinstance(entry, dict):
            assert all(not isinstance(v, torch.Tensor) or v.nbytes <= 4096 for v in entry.values())


def check_given_back(training: Training, reference: Training) -> None:
    assert type(training.optimizer.state) is type(reference.optimizer.state)
    pairs = zip(training.net.parameters(), reference.net.parameters(), strict=True)
    for mine, theirs in pairs:
        if theirs not in reference.optimizer.state:
            assert mine not in training.optimizer.state
            continue
        entry, expected = training.optimizer.state[mine], reference.optimizer.state[theirs]
        assert type(entry) is dict
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert (entry[name].device, entry[name].stride()) == (value.device, value.stride())


def no_hooks_left(optimizer: O.Optimizer) -> None:
    assert not optimizer_internals._global_optimizer_pre_hooks
    for name in ("step_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        assert not getattr(optimizer, f"_optimizer_{name}_hooks")


def check_races(device: str) -> None:
    if device == "simgpu":
        import simgpu

        torch.accelerator.synchronize()
        assert simgpu.take_reports() == []


def wide_net(num_layers: int = 8, width: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers))).to("simgpu")


def give_gradients(net: nn.Module) -> None:
    for index, p in enumerate(net.parameters()):
        p.grad = torch.full_like(p, 0.01 * (index + 1))


def step_peak_bytes(net: nn.Module, optimizer: O.Optimizer) -> int:
    """How far device memory rises above its start while gradients that are given now are stepped."""
    give_gradients(net)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    optimizer.step()
    return torch.accelerator.max_memory_allocated() - before


def is_caught(
    monkeypatch: pytest.MonkeyPatch, why: str, directory: pathlib.Path, run: Callable[[Transfers], Any]
) -> bool:
    """Whether simgpu reports a race, or the result differs, when a run leaves the wait of this name out."""
    with opened("simgpu host async", directory) as transfers:
        expected = run(transfers)
    torch.accelerator.synchronize()
    assert simgpu.take_reports() == []
    original = stream_order.order
    with monkeypatch.context() as patch, opened("simgpu host async", directory) as transfers:
        patch.setattr(
            stream_order, "order", lambda who, event, name: None if name == why else original(who, event, name)
        )
        result = run(transfers)
    torch.accelerator.synchronize()
    return bool(simgpu.take_reports()) or not same(result, expected)


class Lion(O.Optimizer):
    """Makes its state anew in every step instead of changing it in place."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    p.add_((state["m"] * 0.9 + p.grad * 0.1).sign_(), alpha=-group["lr"])
                    state["m"] = state["m"] * 0.99 + p.grad * 0.01
        return loss
