"""`torch.load(..., map_location=device)` puts a whole checkpoint on the device, counters and all: training goes on."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from memscale._plan import Action, OffloadOptimizer, StepInBuckets, StreamParameters
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from tests._execute.test_parking import under
from tests.techniques.offload.runs import DEVICE, Gpt, backward, pair, same, weights

BUCKET_BYTES = 8192
STREAMED = tuple(StreamParameters(f"blocks.{number}") for number in range(2))
PLANS: dict[str, Sequence[Action] | None] = {
    "streamed": STREAMED,
    "streamed, state away": (*STREAMED, OffloadOptimizer(BUCKET_BYTES)),
    "streamed, stepped on the device": (*STREAMED, StepOnDevice(BUCKET_BYTES), OffloadOptimizer(BUCKET_BYTES)),
    "state away": (OffloadOptimizer(BUCKET_BYTES),),
    "buckets": (StepInBuckets(BUCKET_BYTES),),
}
pytestmark = pytest.mark.usefixtures("no_races", "no_leaks")


def trained(actions: Sequence[Action] | None, where: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Two steps, a checkpoint that is read again to `where`, and two more."""
    model = pair(Gpt)[1]
    with under(actions, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        for step in range(4):
            if step == 2:
                file = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.seek(0)
                kept = torch.load(file, map_location=where)
                model.load_state_dict(kept["model"])
                optimizer.load_state_dict(kept["optimizer"])
                del kept
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found = weights(model)
    del optimizer
    return found


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=["as it chooses", "one by one"])
@pytest.mark.parametrize("name", PLANS)
def test_training_goes_on_bit_for_bit(name: str, options: dict[str, Any], simgpu_device: Any) -> None:
    assert same(trained(PLANS[name], DEVICE, **options), trained(None, "cpu", **options))
