"""Says when a PyTorch release changes what `_torch/private/versions.py` relies on."""

from __future__ import annotations

import contextlib

import pytest
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


@pytest.mark.parametrize("is_faked", [False, True])
def test_a_witness_shares_the_counter_and_no_memory(is_faked: bool) -> None:
    with private.fake_tensor_mode() if is_faked else contextlib.nullcontext():
        tensor = torch.zeros(4, requires_grad=True) * 1
        detached, witness = private.detach_with_version(tensor), private.version_witness(tensor)
        assert not detached.requires_grad
        assert witness.numel() == 0
        tensor.add_(1)
        assert tensor._version == detached._version == witness._version == 1


def test_what_stands_in_for_a_tensor_shows_its_version_and_keeps_a_counter_of_its_own() -> None:
    tensor, stand_in = torch.zeros(3), torch.ones(3)
    tensor.add_(1).add_(1)
    private.show_version(stand_in, tensor)
    assert stand_in._version == 2
    stand_in.add_(1)
    assert (stand_in._version, tensor._version) == (3, 2)
    private.set_version(tensor, 1)
    assert (stand_in._version, tensor._version) == (3, 1)
    with torch.inference_mode():
        private.show_version(torch.ones(3), tensor)


def test_a_silent_write_changes_values_and_no_version() -> None:
    targets, sources = [torch.zeros(3), torch.zeros((), dtype=torch.long)], [torch.ones(3), torch.tensor(2)]
    versions = [target._version for target in targets]
    private.write_silently(targets, sources)
    assert all(map(torch.equal, targets, sources))
    assert [target._version for target in targets] == versions
