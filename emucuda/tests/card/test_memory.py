"""Memory: counted as a card counts it, capped, and given back."""

import pytest
import torch

import emucuda

MIB = 1 << 20


def test_the_card_gives_pieces_of_two_mib():
    before = emucuda.counters().used_bytes
    x = torch.empty(33 * MIB + 1, dtype=torch.uint8, device="cuda")
    assert emucuda.counters().used_bytes - before == 34 * MIB
    del x
    torch.cuda.empty_cache()
    assert emucuda.counters().used_bytes == before


def test_free_memory_is_what_context_and_segments_leave():
    free, total = torch.cuda.mem_get_info()
    assert total == emucuda.find_card("RTX 3090").total_bytes
    assert free == total - 256 * MIB - emucuda.counters().used_bytes
    assert emucuda.counters().used_bytes == torch.cuda.memory_reserved()


def test_too_much_is_out_of_memory_and_the_process_goes_on():
    refusals = emucuda.counters().out_of_memory
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"total capacity of 23\.69 GiB"):
        torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
    assert emucuda.counters().out_of_memory == refusals + 2  # PyTorch frees its cache and asks once more
    assert torch.ones(3).cuda().cpu().tolist() == [1.0] * 3


def test_a_card_can_be_filled_to_the_last_piece():
    free, _ = torch.cuda.mem_get_info()
    x = torch.empty(free // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] < 2 * MIB
    # More than what an earlier test's workspace leaves of its segment of 20 MiB, which PyTorch would hand out.
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    assert x.numel() <= free


def test_pinned_memory_is_known_as_such():
    before = emucuda.counters().host_bytes
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    assert pinned.is_pinned()
    assert not torch.empty(3).is_pinned()
    assert emucuda.counters().host_bytes - before in (0, 4 * MIB)  # from the cache, or rounded to a power of two


def test_bytes_survive_the_way_there_and_back():
    x = torch.randn(1000)
    counted = emucuda.counters()
    back = x.cuda().cpu()
    assert torch.equal(back, x)
    now = emucuda.counters()
    assert now.host_to_device_bytes - counted.host_to_device_bytes == 4000
    assert now.device_to_host_bytes - counted.device_to_host_bytes == 4000


def test_the_two_cublas_workspaces_are_pytorchs_own():
    model = torch.nn.Linear(64, 64).cuda()
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    del model
    # One for the thread of the forward, one for that of the backward, 8.125 MiB each up to sm_89.
    assert torch.cuda.memory_allocated() == 2 * 8_519_680
