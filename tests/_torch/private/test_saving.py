"""Says when a PyTorch release changes what `_torch/private/saving.py` relies on."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from memscale._torch import private

pytestmark = pytest.mark.unit


class SaidToBeMeta(nn.Module):
    """Its tensors say that they lay on the device "meta", where what is read has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0).view(2, 2))

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = torch.nn.Parameter.__reduce_ex__(self.weight, protocol)
        return private.pickled_as_on(torch.device("meta"), reduced)


def test_a_file_names_the_device_that_was_asked_for() -> None:
    model, file = SaidToBeMeta(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).device.type == "meta"
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False, map_location="cpu"), model.weight)
    assert pickle.loads(pickle.dumps(model)).device.type == "meta"


def test_what_shares_memory_shares_it_in_the_file_and_in_shallow_copies() -> None:
    base = torch.arange(6.0)
    parts = [private.pickled_as_on(torch.device("cpu"), part.__reduce_ex__(4)) for part in (base[:4], base[2:])]
    first, second = (build(*arguments) for build, arguments in parts)
    first[2] = -1.0
    assert second[0] == -1.0
    assert base[2] == -1.0
    assert copy.copy(base).data_ptr() == base.data_ptr()
