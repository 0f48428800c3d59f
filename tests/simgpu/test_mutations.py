"""An async activation offloader with one synchronisation dropped at a time: every fault must be caught.

Wrong values and race reports each catch only some of the faults; together they must catch all, under every schedule,
and must say nothing about the correct code.
"""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import simgpu

A = torch.accelerator

FAULTS = (
    "D2H does not wait for compute",
    "no record_stream after D2H",
    "H2D does not wait for D2H",
    "H2D into memory of compute does not wait for compute",
    "compute does not wait for H2D",
    "no record_stream after H2D",
    "pinned buffer reused before D2H ended",
    "pinned buffer scrubbed before H2D ended",
    "host reads D2H result without waiting",
)
SEEDS = (0, 1, 2, 3, 4)


@pytest.fixture(autouse=True)
def _device(simgpu_device):
    pass


@dataclass
class Offloader:
    """Saved tensors go to pinned memory on one stream and come back on another."""

    fault: str | None
    keep: set[int]
    out: torch.Stream = field(default_factory=lambda: torch.Stream(device="simgpu"))
    back: torch.Stream = field(default_factory=lambda: torch.Stream(device="simgpu"))
    pool: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    host_sum: float | None = None
    """The first offloaded tensor, summed by the host: what a user's logging might do."""

    def is_right(self, point: str) -> bool:
        return self.fault != point

    def take_buffer(self, like: torch.Tensor) -> torch.Tensor:
        buffers = self.pool.setdefault(like.numel(), [])
        return buffers.pop() if buffers else torch.empty(like.numel(), pin_memory=True)

    def pack(self, t: torch.Tensor) -> object:
        if t.device.type != "simgpu" or t.untyped_storage().data_ptr() in self.keep:
            return t
        if self.is_right("D2H does not wait for compute"):
            self.out.wait_stream(A.current_stream())
        buffer = self.take_buffer(t)
        with self.out:
            buffer.view(t.shape).copy_(t, non_blocking=True)
            event = self.out.record_event()
        if self.is_right("no record_stream after D2H"):
            t.record_stream(self.out)
        if not self.is_right("pinned buffer reused before D2H ended"):
            self.pool[t.numel()].append(buffer)
        if self.host_sum is None:
            if self.is_right("host reads D2H result without waiting"):
                event.synchronize()
            self.host_sum = buffer.sum().item()
        return buffer, event, t.shape

    def unpack(self, packed: object) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        buffer, event, shape = packed  # type: ignore[misc]
        if self.is_right("H2D does not wait for D2H"):
            self.back.wait_event(event)
        t = self.allocate(shape)
        with self.back:
            t.copy_(buffer.view(shape), non_blocking=True)
            arrived = self.back.record_event()
        if self.is_right("compute does not wait for H2D"):
            A.current_stream().wait_event(arrived)
        if self.is_right("no record_stream after H2D"):
            t.record_stream(A.current_stream())
        self.give_back(buffer, arrived)
        return t

    def give_back(self, buffer: torch.Tensor, arrived: torch.Event) -> None:
        """Back to the pool; the host scrubs small ones, which must not happen before the copy out of it has ended."""
        if buffer.numel() <= 4096:
            if self.is_right("pinned buffer scrubbed before H2D ended"):
                arrived.synchronize()
            buffer.zero_()
        if self.is_right("pinned buffer reused before D2H ended"):
            self.pool[buffer.numel()].append(buffer)

    def allocate(self, shape: torch.Size) -> torch.Tensor:
        """Large tensors from compute's memory, small ones from the copy stream's: both ways are in use."""
        if shape.numel() > 4096:
            t = torch.empty(shape, device="simgpu")
            if self.is_right("H2D into memory of compute does not wait for compute"):
                self.back.wait_stream(A.current_stream())
            return t
        with self.back:
            return torch.empty(shape, device="simgpu")


def train(fault: str | None, seed: int, offload: bool = True) -> tuple[list[torch.Tensor], float | None, list[str]]:
    """Two steps of a small network; gradients, what the host saw, and the reports."""
    A.synchronize()
    simgpu.take_reports()
    simgpu.set_schedule_seed(seed)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 16), nn.GELU()).to("simgpu")
    x = torch.randn(96, 64, device="simgpu")
    offloader = Offloader(fault, {p.untyped_storage().data_ptr() for p in model.parameters()})
    A.synchronize()
    for _ in range(2):
        if offload:
            with torch.autograd.graph.saved_tensors_hooks(offloader.pack, offloader.unpack):
                loss = model(x).square().sum()
        else:
            loss = model(x).square().sum()
        loss.backward()
    A.synchronize()
    gradients = [p.grad.cpu() for p in model.parameters()]
    simgpu.set_schedule_seed(0)
    return gradients, offloader.host_sum, simgpu.take_reports()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_correct_offloader_gives_the_right_gradients_and_no_report(seed):
    expected, _, _ = train(None, 0, offload=False)
    gradients, host_sum, reports = train(None, seed)
    assert reports == []
    assert same(gradients, expected)
    assert host_sum == host_sum  # not NaN
    assert host_sum == train(None, 0)[1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_dropped_synchronisation_is_caught(fault, seed):
    expected, host_expected, _ = train(None, 0)
    gradients, host_sum, reports = train(fault, seed)
    wrong_value = not same(gradients, expected) or host_sum != host_expected
    assert wrong_value or reports, f"{fault!r} was not caught under schedule {seed}"


def test_neither_values_nor_reports_alone_would_do():
    expected, host_expected, _ = train(None, 0)
    by_value, by_report = set(), set()
    for fault in FAULTS:
        gradients, host_sum, reports = train(fault, 0)
        if not same(gradients, expected) or host_sum != host_expected:
            by_value.add(fault)
        if reports:
            by_report.add(fault)
    assert by_value | by_report == set(FAULTS)
    assert by_value != set(FAULTS)
    assert by_report != set(FAULTS)
