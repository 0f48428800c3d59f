"""Which tensors share memory, and in which order they are moved."""

from __future__ import annotations

import pytest
import torch

from memscale._torch import private
from memscale.techniques.offload.parameters.parameter_homes import overlapping

pytestmark = pytest.mark.unit


def test_groups_come_in_the_order_of_their_first_members() -> None:
    """By addresses each process would fill the device in another order, and hold other holes between weights."""
    tensors = [torch.empty(8) for _ in range(9)]
    whole = torch.empty(8)
    first, second = whole[:6], whole[4:]
    by_address = sorted(tensors, key=lambda tensor: private.storage_key(tensor.untyped_storage()))
    for order in (by_address, by_address[::-1]):
        groups = overlapping([second, *order, first])
        assert {id(tensor) for tensor in groups[0]} == {id(first), id(second)}
        assert [id(tensor) for (tensor,) in groups[1:]] == list(map(id, order))
