"""Stores give back what they took, keep exact books, and never exceed their budget."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale._errors import StoreFullError
from memscale._torch import private
from memscale._units import show_bytes
from memscale.techniques.offload.store.disk import DiskStore
from memscale.techniques.offload.store.extents import Extents
from memscale.techniques.offload.store.host import SMALLEST_PIECE_BYTES, SMALLEST_SEGMENT_BYTES, HostStore
from memscale.techniques.offload.store.stores import Layout, ShapeStore, TieredStore, can_store

pytestmark = pytest.mark.unit
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


def tensors(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    matrix = randn(64, 48)
    return {
        "dense": matrix,
        "transposed": matrix.t(),
        "permuted": randn(3, 5, 7).permute(2, 0, 1),
        "offset": matrix[3:9],
        "columns": matrix[:, ::2],
        "block": matrix[3:17, 5:9].t(),
        "expanded": randn(5, 1, 7).expand(5, 9, 7),
        "expanded with gaps": torch.arange(5, device=device).expand(3, 5)[:, ::2],
        "windows": randn(100).unfold(0, 10, 3),
        "scalar": torch.tensor(3.0, device=device),
        "empty": torch.empty(0, 3, device=device),
        "conjugate": torch.view_as_complex(randn(8, 8, 2)).conj(),
        "negative": torch.view_as_complex(randn(8, 8, 2)).conj().imag,
        "boolean": randn(13) > 0,
        "half": randn(33, 17).bfloat16(),
        "bytes": torch.arange(200, dtype=torch.uint8, device=device),
        "gradient": torch.nn.Parameter(randn(4, 4)),
        "large": randn(3, 400, 1001).transpose(1, 2),
    }


def make(kind: str, device: str, directory) -> HostStore | DiskStore | TieredStore:
    pinned = device == "simgpu"
    match kind:
        case "host":
            return HostStore(pinned=pinned, segment_bytes=MIB)  # the large tensor is split
        case "direct":
            return DiskStore(directory, verify=True)
        case "buffered":
            return DiskStore(directory, verify=True, direct=False)
        case _:
            return TieredStore(HostStore(2 * MIB, pinned=pinned), DiskStore(directory))


@pytest.mark.parametrize("kind", ["host", "direct", "buffered", "tiered"])
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
def test_what_goes_in_comes_out(kind, device, tmp_path):
    store = make(kind, device, tmp_path)
    originals = tensors(device)
    tickets = {name: store.put(tensor) for name, tensor in originals.items()}
    for _ in range(2):  # reading takes nothing away
        for name, tensor in originals.items():
            back = store.get(tickets[name])
            assert torch.equal(back.cpu(), tensor.detach().cpu()), name
            assert (back.dtype, back.device, back.shape) == (tensor.dtype, tensor.device, tensor.shape), name
            assert back.stride() == tensor.stride(), name
            assert not back.requires_grad
    held = sum(leaf.counters.held_bytes for leaf in store.leaves())
    assert held == sum(Layout.of(tensor).num_bytes for tensor in originals.values())
    for ticket in tickets.values():
        store.free(ticket)
        store.free(ticket)
    assert all(leaf.counters.held_bytes == 0 for leaf in store.leaves())
    store.close()
    store.close()
    assert all(leaf.counters.allocated_bytes == 0 for leaf in store.leaves())
    assert list(tmp_path.iterdir()) == []


def test_only_the_needed_bytes_travel():
    given = tensors("cpu")
    assert Layout.of(given["columns"]).num_bytes == 64 * 24 * 4
    assert Layout.of(given["expanded"]).num_bytes == 5 * 7 * 4
    assert Layout.of(given["expanded with gaps"]).num_bytes == 3 * 8
    assert Layout.of(given["windows"]).num_bytes == 100 * 4
    assert Layout.of(given["transposed"]).num_bytes == 64 * 48 * 4
    assert Layout.of(given["empty"]).num_bytes == 0


def test_dense_tensors_are_not_copied_on_their_way():
    matrix = torch.randn(8, 8)
    line = Layout.of(matrix.t()).flatten(matrix.t())
    assert line.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_view_comes_back(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    view = torch.randn(shape).permute(order)
    for dimension in range(view.ndim):
        start = data.draw(st.integers(0, view.shape[dimension] - 1))
        step = data.draw(st.integers(1, 3))
        view = view[(slice(None),) * dimension + (slice(start, None, step),)]
    if data.draw(st.booleans()):
        view = view.unsqueeze(1).expand(-1, 3, *view.shape[1:])
    store = HostStore()
    back = store.get(store.put(view))
    assert torch.equal(back, view)
    assert back.stride() == view.stride()
    store.close()


def test_what_a_store_cannot_take_is_said_beforehand():
    assert can_store(torch.ones(3))
    assert can_store(torch.nn.Parameter(torch.ones(3)))
    assert not can_store(torch.ones(3, device="meta"))
    assert not can_store(torch.eye(3).to_sparse())
    with private.fake_tensor_mode():
        assert not can_store(torch.ones(3))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_host_budget_is_filled_and_never_exceeded(pinned):
    import simgpu

    budget = 5 * MIB + 300_000
    store = HostStore(budget, pinned=pinned)
    tickets, refusal = [], ""
    while not refusal and len(tickets) < 200:
        try:
            tickets.append(store.put(torch.full((12 * 4096,), len(tickets) % 256, dtype=torch.uint8)))
        except StoreFullError as error:
            refusal = str(error)
    assert f"budget of {show_bytes(budget)} is spent" in refusal
    assert "max_cpu_offload_gb" in refusal
    assert store.counters.held_bytes > 0.98 * budget
    assert store.counters.allocated_bytes <= budget
    if pinned:
        pinned_now = simgpu.pinned_stats()
        assert pinned_now.rounded_bytes == pinned_now.requested_bytes == store.counters.allocated_bytes
    for number, ticket in enumerate(tickets):
        assert bool((store.get(ticket) == number % 256).all())
        store.free(ticket)
    assert store.counters.held_bytes == 0
    store.close()


def test_tensors_share_segments_and_rounding_costs_nothing():
    """Ten tensors of 1.1 MB: with a block each, pinned memory would round to 20 MiB; here it is 11 segments."""
    import simgpu

    store = HostStore(pinned=True, segment_bytes=MIB)
    tickets = [store.put(torch.ones(1_100_000, dtype=torch.uint8)) for _ in range(10)]
    stats = simgpu.pinned_stats()
    assert stats.rounded_bytes == store.counters.allocated_bytes <= 11 * MIB + SMALLEST_SEGMENT_BYTES
    for ticket in tickets:
        store.free(ticket)
    again = [store.put(torch.ones(1_100_000, dtype=torch.uint8)) for _ in range(10)]
    assert store.counters.allocated_bytes == stats.rounded_bytes, "freed memory is used again"
    for ticket in again:
        store.free(ticket)
    store.close()
    assert simgpu.pinned_stats().reserved_bytes == 0


def test_buckets_of_one_size_leave_little_of_their_segments():
    """Each would leave an eighth of the smallest segment that holds it."""
    import simgpu

    store = HostStore(pinned=True, segment_bytes=16 * MIB)
    size = 7 * MIB + 20_000
    tickets = [store.put(torch.full((size,), number, dtype=torch.uint8)) for number in range(31)]
    assert simgpu.pinned_stats().rounded_bytes == store.counters.allocated_bytes
    assert store.counters.allocated_bytes <= 31 * size + 16 * MIB
    assert all(len(ticket.spot) <= 4 for ticket in tickets)
    assert all(ticket.spot[0].num_bytes >= SMALLEST_PIECE_BYTES for ticket in tickets)
    assert all(bool((store.get(ticket) == number).all()) for number, ticket in enumerate(tickets))
    for ticket in tickets:
        store.free(ticket)
    store.close()


def test_memory_in_one_piece_where_that_is_asked_for():
    store = HostStore(segment_bytes=16 * MIB, splits=False)
    tickets = [store.put(torch.ones(7 * MIB + 20_000, dtype=torch.uint8)) for _ in range(5)]
    assert all(len(ticket.spot) == 1 for ticket in tickets)
    for ticket in tickets:
        store.free(ticket)
    store.close()


def test_a_failed_pinned_allocation_is_a_clear_error():
    import simgpu

    store = HostStore(pinned=True)
    with simgpu.fail_pinned_allocation(1), pytest.raises(StoreFullError, match="pinned memory"):
        store.put(torch.ones(1000))
    assert store.counters.held_bytes == store.counters.allocated_bytes == 0
    store.free(store.put(torch.ones(1000)))
    store.close()


def test_a_ticket_that_dies_is_freed():
    store = HostStore()
    ticket = store.put(torch.ones(1000))
    del ticket
    gc.collect()
    assert store.counters.held_bytes == 4000
    other = store.put(torch.ones(10))
    assert store.counters.held_bytes == 40
    store.free(other)
    store.close()


def test_tiers_fill_one_after_the_other(tmp_path):
    host, disk = HostStore(MIB), DiskStore(tmp_path, budget_bytes=2 * MIB)
    store = TieredStore(host, disk)
    assert (store.room_bytes(), TieredStore(HostStore(), disk).room_bytes()) == (3 * MIB, None)
    store.require_room(3 * MIB)
    with pytest.raises(StoreFullError, match=r"room for 3\.1 MB"):
        store.require_room(3 * MIB + 1)
    tickets = [store.put(torch.full((MIB // 2,), n, dtype=torch.uint8)) for n in range(6)]
    assert [ticket.store.name for ticket in tickets] == ["host"] * 2 + ["disk"] * 4
    with pytest.raises(StoreFullError, match=r"host store's budget.*disk store's budget"):
        store.put(torch.ones(10, dtype=torch.uint8))
    assert [int(store.get(ticket)[0]) for ticket in tickets] == list(range(6))
    store.free(tickets[0])
    assert store.put(torch.ones(10, dtype=torch.uint8)).store is host
    store.close()


def test_a_ticket_is_filled_anew():
    store = HostStore()
    ticket = store.put(torch.zeros(100))
    store.fill(ticket, torch.arange(100.0))
    out = torch.empty(100)
    assert store.get(ticket, out=out) is out
    assert torch.equal(out, torch.arange(100.0))
    assert store.counters.held_bytes == 400
    store.free(ticket)
    store.close()


def test_counters(tmp_path):
    store = DiskStore(tmp_path)
    ticket = store.put(torch.ones(1000))
    store.get(ticket)
    store.get(ticket)
    other = store.put(torch.ones(500))
    store.free(ticket)
    counters = store.counters
    assert (counters.bytes_in, counters.bytes_out) == (6000, 8000)
    assert (counters.held_bytes, counters.peak_held_bytes) == (2000, 6000)
    assert (counters.allocated_bytes, counters.requested_bytes) == (8192, 8192)
    store.free(other)
    store.close()


def test_a_shape_store_keeps_no_bytes():
    store = ShapeStore()
    ticket = store.reserve(Layout.of(torch.ones(3, 4)))
    assert (ticket.layout.shape, store.counters.held_bytes) == ((3, 4), 48)
    store.free(ticket)
    store.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_extents_never_overlap_and_always_join_again(requests):
    extents = Extents(64, 64 * 1024)
    taken: list[tuple[int, int]] = []
    for take, number in requests:
        if take:
            offset = extents.take(number)
            if offset is not None:
                size = extents.rounded(number)
                assert offset % 64 == 0
                assert offset + size <= extents.num_bytes
                assert all(offset + size <= low or high <= offset for low, high in taken)
                taken.append((offset, offset + size))
        elif taken:
            low, high = taken.pop(number % len(taken))
            extents.give(low, high - low)
        assert extents.free_bytes == extents.num_bytes - sum(high - low for low, high in taken)
    for low, high in taken:
        extents.give(low, high - low)
    assert extents.largest_gap == extents.tail_gap == extents.num_bytes
