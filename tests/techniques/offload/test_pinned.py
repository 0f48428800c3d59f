"""What pinned memory takes: by the formula, in a plan, and by a store."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
import simgpu
from memscale import Config, StoreFullError
from memscale._decide import decide
from memscale._decide.eligible import resolve
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.offload.pinned import LANDING_BYTES, SEGMENT_BYTES, arriving_bytes, segments_bytes
from memscale.techniques.offload.store.host import HostStore
from tests.profiles import full_profile, hardware_of

pytestmark = pytest.mark.unit
MIB = 1 << 20


@pytest.mark.parametrize(
    ("held", "taken"),
    [(0, 0), (1, 1), (3 * MIB, 4 * MIB), (64 * MIB, 64 * MIB), (65 * MIB, 96 * MIB), (191 * MIB, 192 * MIB)],
)
def test_full_segments_but_for_the_last(held: int, taken: int) -> None:
    assert segments_bytes(held) == taken


def test_a_store_takes_what_the_formula_says() -> None:
    store = HostStore(pinned=True)
    size, number = 5 * MIB, 29
    tickets = [store.put(torch.zeros(size, dtype=torch.uint8)) for _ in range(number)]
    assert simgpu.pinned_stats().rounded_bytes == store.counters.allocated_bytes
    assert number * size <= store.counters.allocated_bytes <= segments_bytes(number * size)
    for ticket in tickets:
        store.free(ticket)
    store.close()


def test_gradients_take_memory_to_arrive_in() -> None:
    assert arriving_bytes(3 * MIB, 0, stays=False) == 3 * MIB
    assert arriving_bytes(10 * LANDING_BYTES, 0, stays=False) == LANDING_BYTES
    assert arriving_bytes(10 * LANDING_BYTES, 0, stays=True) == 0
    assert arriving_bytes(10 * LANDING_BYTES, MIB, stays=True) == 2 * MIB


def test_tied_weights_are_shared() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert [id(p) for p in streaming.shared(nn.Sequential(first, second))] == [id(first.weight)]


def test_a_plan_counts_it_where_transfers_overlap_and_within_the_budget() -> None:
    profile, hardware = full_profile(6), hardware_of(link_bytes_per_s=1e9)

    def waiting(host_gb: float | None = None, *, overlaps: bool) -> int:
        config = Config(force_optimize=True, max_cpu_offload_gb=host_gb, async_offload=overlaps)
        plan = decide(profile, resolve(config, hardware), raise_if_unfit=False)
        return plan.host_bytes + plan.movable_bytes

    blocking, overlapping = waiting(overlaps=False), waiting(overlaps=True)
    assert blocking < overlapping <= blocking + LANDING_BYTES + SEGMENT_BYTES
    assert waiting((blocking + MIB) / 1e9, overlaps=True) <= blocking + MIB


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_a_plan_that_rounding_takes_beyond_a_tiny_budget_is_refused_and_leaves_nothing(no_leaks: None) -> None:
    """A store gives each tensor at least a page, which plans do not count."""
    model = Residuals().to("simgpu")
    config = Config(force_optimize=True, max_cpu_offload_gb=8e-6, async_offload=True, enable_logging=False)
    with pytest.raises(StoreFullError, match=r"budget of 8\.0 kB is spent .* raise max_cpu_offload_gb"):
        memscale.wrap(model, config, torch.ones(64, 16))
    assert all("forward" not in vars(module) for module in model.modules())
    assert {parameter.device.type for parameter in model.parameters()} == {"simgpu"}
    model(torch.ones(64, 16, device="simgpu")).square().mean().backward()
