"""What backward of attention allocates inside itself on the card, and what memscale says that it does."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memscale._planning.reserved.attention_temporaries import EFFICIENT, FLASH, groups

OPERATORS = {SDPBackend.EFFICIENT_ATTENTION: EFFICIENT, SDPBackend.FLASH_ATTENTION: FLASH}


@pytest.fixture(autouse=True)
def autograd_is_done():
    """The card's autograd thread drops a backward a moment after that has returned, and with it what an earlier test
    had saved; before it begins another. Nothing of this one is freed late: its tensors are there until it ends."""
    weight, gradient = torch.ones(1, device="cuda", requires_grad=True), torch.ones(1, device="cuda")
    output = weight + 0
    kept = output, torch.autograd.grad(output, weight, gradient)
    yield
    del kept


def _highest_bytes(action):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what an earlier test has freed counts until its events are found done
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    kept = action()
    highest = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return highest - before - sum(each.nbytes for each in kept)


@pytest.mark.parametrize("width", [64, 80, 128, 160])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
        (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    ],
)
def test_backward_takes_what_is_said(backend, dtype, width):
    query, key, value = (
        torch.empty(2, 256, 3, width, dtype=dtype, device="cuda").transpose(1, 2).requires_grad_() for _ in range(3)
    )
    with sdpa_kernel(backend):
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    gradient = torch.empty_like(output)
    taken = _highest_bytes(lambda: torch.autograd.grad(output, (query, key, value), gradient))
    said = groups(OPERATORS[backend], (gradient, query, key, value, output), "sm_86")
    assert taken == max(map(sum, said))
