"""Values that memscale itself reads back from the card, and that nothing has computed there."""

import torch

from memscale._torch import bit_sums
from memscale.techniques.recompute import tensors_beside
from memscale.techniques.tiling.head import sweep


def _leave_behind(value: int) -> None:
    """Memory that the next small tensors are given holds this."""
    numbers = torch.full((64,), value)
    left = [numbers.cuda() for _ in range(16)]
    del left


def test_what_is_read_back_is_what_the_memory_held():
    """Else the next test shows nothing."""
    is_ignored = torch.zeros(128, dtype=torch.bool).cuda()
    _leave_behind(-10_000_000)
    assert sweep.num_ignored.__wrapped__(is_ignored) == -10_000_000


def test_all_rows_of_a_tiled_loss_count():
    """Without the pin there were a hundred thousand tiles: the host ran out of memory, or the card."""
    is_ignored = torch.zeros(128, dtype=torch.bool).cuda()
    _leave_behind(-10_000_000)
    assert sweep.num_ignored(is_ignored) == 0


def test_what_the_host_has_is_counted():
    assert sweep.num_ignored(torch.tensor([True, False, True])) == 2


def test_no_forward_writes_to_what_lies_beside_it():
    """Without the pins a first forward was refused, or every later one copied a tensor, by what the memory held."""
    weight = torch.zeros(128).cuda()
    _leave_behind(1)
    then = bit_sums.sums_of_bits([weight])
    _leave_behind(2)
    assert bit_sums.sums_of_bits([weight]) == then
    _leave_behind(0)
    assert not tensors_beside._differ(weight, torch.ones(128).cuda())


def test_what_the_host_has_is_compared():
    weight = torch.zeros(128)
    assert bit_sums.sums_of_bits([weight]) != bit_sums.sums_of_bits([weight + 1])
    assert tensors_beside._differ(weight, weight + 1)
