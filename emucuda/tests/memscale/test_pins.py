"""Values that memscale itself reads back from the card, and that nothing has computed there."""

import torch

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
