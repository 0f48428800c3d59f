"""Block-wise 8-bit numbers: bitsandbytes' bits, its bounds, and packing twice."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

import simgpu  # noqa: F401  # registers the device
from memscale.techniques.optimizer8bit.blocks import BlockPacking, code_book, dequantize, forget_tables, quantize

SIZES = [1, 5, 255, 256, 257, 4096, 70_000]


def sample(size: int, signed: bool) -> torch.Tensor:
    """Numbers of very different size, as moments are."""
    values = torch.randn(size) * 10.0 ** torch.randint(-9, 3, (size,))
    return values if signed else values.square()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_device_without_kernels_gives_the_bits_of_bitsandbytes(size: int, signed: bool) -> None:
    values = sample(size, signed)
    expected, state = bnb.quantize_blockwise(values, code=bnb.create_dynamic_map(signed=signed), blocksize=256)
    codes, scales = quantize(values.to("simgpu"), signed, 256)
    assert codes.device.type == "simgpu"
    assert torch.equal(codes.cpu(), expected)
    assert torch.equal(scales.cpu(), state.absmax)
    back = dequantize(codes, scales, signed, 256)
    assert torch.equal(back.cpu(), bnb.dequantize_blockwise(expected, state))
    forget_tables()


def test_zeros_stay_zeros() -> None:
    for device in ("cpu", "simgpu"):
        back = dequantize(*quantize(torch.zeros(1000, device=device), True, 256), True, 256)
        assert torch.equal(back.cpu(), torch.zeros(1000))
    forget_tables()


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_too_small_to_invert(signed: bool) -> None:
    """Second moments of tiny gradients are denormal: one over them is infinite."""
    values = torch.zeros(512)
    values[1::3] = 1e-41
    values[300] = 3e-41
    results = [dequantize(*quantize(values.to(device), signed, 256), signed, 256).cpu() for device in ("cpu", "simgpu")]
    assert torch.equal(*results)
    assert float((results[0] - values).abs().max()) < 6e-41
    forget_tables()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_spoils_its_block_only(bad: float) -> None:
    values = torch.linspace(-1, 1, 512)
    values[3] = bad
    back = dequantize(*quantize(values.to("simgpu"), True, 256), True, 256).cpu()
    assert not back[:256].isfinite().any()
    assert back[256:].isfinite().all()
    forget_tables()


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("signed", [True, False])
def test_the_bound_holds(signed: bool, device: str) -> None:
    values = torch.rand(256 * 64) * torch.rand(256 * 64).pow(6)
    values = values * torch.randint(0, 2, values.shape).mul(2).sub(1) if signed else values
    back = dequantize(*quantize(values.to(device), signed, 256), signed, 256).cpu()
    largest = values.view(-1, 256).abs().amax(1).repeat_interleave(256)
    error, share = (back - values).abs() / largest, values.abs() / largest
    for above, below, bound in ((0.1, 1.1, 0.0071), (0.01, 0.1, 0.00145), (0.001, 0.01, 0.00031), (0.0, 0.001, 8e-5)):
        inside = (share >= above) & (share < below)
        assert bool(inside.any())
        assert float(error[inside].max()) <= (bound if signed else bound / 2 + 2e-5)
    forget_tables()


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_packing_what_was_unpacked_changes_nothing(size: int, signed: bool, device: str) -> None:
    packing = BlockPacking(signed, 256)
    memory = torch.empty(packing.waiting_bytes(size), dtype=torch.uint8, device=device)
    once, twice = torch.empty(size, device=device), torch.empty(size, device=device)
    packing.pack(sample(size, signed), memory)
    packing.unpack(memory, once)
    packing.pack(once, memory, exactly=True)
    packing.unpack(memory, twice)
    assert torch.equal(once.cpu(), twice.cpu())
    forget_tables()


def test_packing_twice_without_care_does_change_values() -> None:
    values = sample(70_000, True)
    once = dequantize(*quantize(values, True, 256), True, 256)
    assert not torch.equal(dequantize(*quantize(once, True, 256), True, 256), once)


def test_packing_exactly_never_packs_worse() -> None:
    """What never was in 8 bits is packed as it would be otherwise."""
    values = sample(70_000, True)
    packing = BlockPacking(True, 256)
    memories = [torch.empty(packing.waiting_bytes(values.numel()), dtype=torch.uint8) for _ in range(2)]
    packing.pack(values, memories[0])
    packing.pack(values, memories[1], exactly=True)
    results = [torch.empty_like(values), torch.empty_like(values)]
    for memory, result in zip(memories, results, strict=True):
        packing.unpack(memory, result)
    assert torch.equal(*results)


@pytest.mark.parametrize("size", [1, 1000, 3 * (1 << 20) + 777])
def test_chunks_give_what_one_piece_gives(size: int) -> None:
    values = torch.randn(size)
    packing = BlockPacking(True, 256)
    memory, back = torch.empty(packing.waiting_bytes(size), dtype=torch.uint8), torch.empty(size)
    packing.pack(values, memory)
    packing.unpack(memory, back)
    assert torch.equal(back, dequantize(*quantize(values, True, 256), True, 256))


def test_waiting_bytes() -> None:
    assert BlockPacking(True, 256).waiting_bytes(256 * 100) == 256 * 100 + 4 * 100
    assert BlockPacking(True, 256).waiting_bytes(257) == 260 + 8
    ratio = 4 * 10**6 / BlockPacking(True, 256).waiting_bytes(10**6)
    assert 3.93 < ratio < 3.94


def test_the_code_book_is_bitsandbytes_own() -> None:
    for signed in (True, False):
        assert torch.equal(code_book(signed, torch.device("cpu")), bnb.create_dynamic_map(signed=signed))
    forget_tables()
