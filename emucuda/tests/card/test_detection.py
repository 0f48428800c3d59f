"""What `memscale.Hardware.detect` takes of a card, and leaves there."""

import pytest
import torch

import emucuda

memscale = pytest.importorskip("memscale")
WORKSPACE_BYTES = 8_519_680
"""Of matrix products: the first forward would take it as well."""


@pytest.fixture(autouse=True)
def measuring(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMSCALE_MEASURE", "1")
    monkeypatch.setenv("MEMSCALE_CACHE_DIR", str(tmp_path))
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # the workspace of this thread
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def statistics():
    return (
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    )


def test_detection_leaves_nothing_and_takes_little():
    before, free = statistics(), torch.cuda.mem_get_info()[0]
    emucuda.reset_peaks()
    hardware = memscale.Hardware.detect("cuda")
    assert hardware.matmul_efficiency == 1.0  # it was measured
    assert statistics() == before
    assert torch.cuda.mem_get_info()[0] == free
    assert emucuda.counters().peak_bytes < 0.4e9


def test_an_earlier_peak_is_as_it_was():
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    before = statistics()
    hardware = memscale.Hardware.detect("cuda")
    assert hardware.matmul_efficiency == 1.0  # it was measured
    assert statistics()[2:] == before[2:]


def test_the_workspace_that_stays_keeps_no_large_segment():
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    hardware = memscale.Hardware.detect("cuda")
    assert hardware.matmul_efficiency == 1.0  # it was measured
    assert torch.cuda.memory_reserved() - before <= 20 << 20


def test_a_full_card_is_no_error():
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
    before = statistics()
    hardware = memscale.Hardware.detect("cuda")
    assert hardware.matmul_efficiency < 1.0  # published figures
    assert statistics() == before
    assert held.numel()


def test_what_the_card_is():
    hardware = memscale.Hardware.detect("cuda")
    assert hardware.architecture == "sm_86"
    assert hardware.has_caching_allocator
    assert hardware.workspace_bytes == WORKSPACE_BYTES
    assert hardware.held_bytes == 256 << 20  # what the emulated context was set to
