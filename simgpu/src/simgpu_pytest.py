"""pytest fixtures for code that is tested on simgpu.

NOTE [plugin imports]: pytest loads this module in every run, also in those that never touch the device, so it imports
neither torch nor simgpu. That is why it stands outside the package.
"""

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

LETS_GO_S = 60.0


@pytest.fixture
def simgpu_device() -> Iterator[Any]:
    """The device `simgpu:0`, with capacity, schedule, faults, clock and reports at their defaults."""
    import torch

    import simgpu

    gc.collect()  # what an earlier test left in cycles must not be charged to this one
    simgpu.reset()
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.reset_peak_memory_stats(index)
    previous = torch.accelerator.current_device_index()
    yield torch.device("simgpu", 0)
    torch.accelerator.set_device_index(previous)
    simgpu.reset()


@pytest.fixture
def cap(simgpu_device: Any) -> Callable[..., None]:
    """`cap(num_bytes, device=0)`: the device's capacity for the rest of the test."""
    import simgpu

    return simgpu.set_cap


class NoRaces:
    """`no_races()` fails the test if there was a race since the last look; `with no_races():` looks at the end."""

    def __call__(self) -> "NoRaces":
        self.check()
        return self

    def __enter__(self) -> "NoRaces":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.check()

    def check(self) -> None:
        import torch

        import simgpu

        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
        reports = simgpu.take_reports()
        if reports:
            pytest.fail(f"simgpu found {len(reports)} races:\n" + "\n".join(reports[:10]))


@pytest.fixture
def no_races(simgpu_device: Any) -> Iterator[NoRaces]:
    """Fails the test if simgpu reports a race, at the end or whenever `no_races()` is called."""
    checker = NoRaces()
    yield checker
    checker.check()


@pytest.fixture
def no_leaks(simgpu_device: Any) -> Iterator[None]:
    """Opt-in: fails the test if it leaves device or pinned bytes behind."""
    import torch

    import simgpu

    def in_use() -> tuple[int, ...]:
        gc.collect()
        devices = range(torch.accelerator.device_count())
        device_bytes = (torch.accelerator.memory_allocated(index) for index in devices)
        return (*device_bytes, simgpu.pinned_stats().requested_bytes)

    before = in_use()
    yield
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
    # Autograd's thread for a device lets go of a pass that failed a moment after the error has reached the caller,
    # which is a long one on a busy machine. Only a test that leaks waits to the end.
    deadline_s = time.monotonic() + LETS_GO_S
    while (after := in_use()) != before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert after == before, f"bytes in use on (simgpu:0, simgpu:1, pinned host) went from {before} to {after}"
