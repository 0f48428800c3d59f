"""Says when a PyTorch release changes what `_torch/private/versions.py` relies on."""

from __future__ import annotations

import torch

from memscale._torch import private


def test_version_counters_are_shared_by_views_and_not_by_unsafe_chunks_or_data() -> None:
    tensor = torch.zeros(4, 4)
    first, second = tensor.unsafe_chunk(2)
    for one, other, is_shared in (
        (tensor, tensor[1:], True),
        (tensor, tensor.detach(), True),
        (first, second, False),
        (tensor, tensor.data, False),
    ):
        assert private.share_version_counter(one, other) is is_shared
        assert one._version == other._version == 0
