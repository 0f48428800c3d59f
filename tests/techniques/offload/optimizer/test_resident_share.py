"""A share of the optimizer's state stays on the device, the rest travels: the same bits, and every wait is needed."""

from __future__ import annotations

import contextlib
import copy
import functools
import pathlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memscale.techniques.offload.optimizer.adopted_optimizer import BucketSizes
from memscale.techniques.offload.optimizer.adoption import adopt
from memscale.techniques.offload.optimizer.buckets import choose_resident, step_order
from tests.techniques.offload.optimizer.test_effect import WAITS
from tests.techniques.offload.tiers import device_of, on_host, opened, same
from tests.techniques.offload.training import O, Training, adopted, give_gradients, is_caught, plain, wide_net

LAYER_BYTES = 128 * 128 * 4
SHARES = (0.25, 0.5, 0.75)


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


# ---------------------------------------------------------------------------------------------------- who stays


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(0, 31))
def test_no_more_than_the_share_stays(sizes: list[int], number: int) -> None:
    share = number / 32
    stays = choose_resident(sizes, share, bucket_bytes=10)
    resident = sum(size for size, does_stay in zip(sizes, stays, strict=True) if does_stay)
    assert resident <= sum(sizes) * share
    if number == 0:
        assert resident == 0


def test_what_stays_is_spread_and_what_is_large_comes_first() -> None:
    assert choose_resident([4] * 8, 0.5, 4) == [False, True] * 4
    assert choose_resident([4] * 8, 0.75, 4) == [False, True, True, True] * 2
    assert choose_resident([4, 20, 4, 4], 0.75, 4) == [False, True, False, True]
    assert choose_resident([4, 20, 4, 4], 0.5, 4) == [True, False, True, True], "what fits of the others"
    assert choose_resident([], 0.5, 4) == []


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=30))
def test_what_stays_takes_turns_with_what_travels(turns: list[tuple[int, bool]]) -> None:
    sizes, travels = [size for size, _ in turns], [is_away for _, is_away in turns]
    order = step_order(sizes, travels)
    assert sorted(order) == list(range(len(turns)))
    for is_away in (False, True):
        assert [i for i in order if travels[i] == is_away] == [i for i, away in enumerate(travels) if away == is_away]
    if len(set(travels)) == 2 and sum(sizes):
        assert not travels[order[0]] or not sizes[order[0]], "one that stays is stepped while the first arrives"


def test_turns_are_spread_by_their_bytes() -> None:
    assert step_order([4] * 6, [False, False, False, False, True, True]) == [0, 1, 4, 2, 3, 5]
    assert step_order([4] * 4, [True, True, True, False]) == [3, 0, 1, 2]
    assert step_order([40, 4, 4], [False, True, True]) == [0, 1, 2], "a step at once comes first"


# ------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("way", ["simgpu host async", "simgpu host sync", "simgpu disk async", "cpu disk async"])
def test_the_bits_are_those_of_the_plain_optimizer(way: str, share: float, tmp_path: pathlib.Path):
    reference = Training(device_of(way), plain(O.AdamW)).run()
    with opened(way, tmp_path) as transfers:
        training = Training(device_of(way), plain(O.AdamW))
        with adopted(training, transfers, resident_share=share) as adoption:
            training.run()
            whole = Training(device_of(way), plain(O.AdamW))
            with adopted(whole, transfers) as all_away:
                whole.run()
                assert 0 < adoption.stats.bytes_to_store < all_away.stats.bytes_to_store
            assert same(training.result(), reference.result())
        assert same(training.run().result(), reference.run().result())


def test_saved_state_is_on_the_host_and_loads_into_a_plain_optimizer(tmp_path: pathlib.Path):
    reference = Training("simgpu", plain(O.AdamW)).run(4)
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW))
        with adopted(training, transfers, resident_share=0.5):
            training.run(2)
            before = torch.accelerator.memory_allocated()
            saved = training.optimizer.state_dict()
            assert torch.accelerator.memory_allocated() - before <= 32 * 512, "the device may have no room for a copy"
            resumed = Training("simgpu", plain(O.AdamW))
            resumed.net.load_state_dict(training.net.state_dict())
            resumed.optimizer.load_state_dict(copy.deepcopy(saved))  # PyTorch takes its counters over
            resumed.num_steps, resumed.losses = 2, list(training.losses)
            assert same(resumed.run(2).result(), reference.result())
            training.optimizer.load_state_dict(saved)
            assert same(training.run(2).result(), reference.result())


# ------------------------------------------------------------------------------------------------------ effect


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_share_is_on_the_device_between_steps(asynchronous: bool, tmp_path: pathlib.Path):
    """8 layers, one a bucket, of which two, four or six stay."""
    for number in (2, 4, 6):
        with opened("simgpu host async" if asynchronous else "simgpu host sync", tmp_path) as transfers:
            net = wide_net()
            optimizer = O.AdamW(net.parameters(), fused=True)
            with contextlib.ExitStack() as undo:
                adoption = adopt(net, transfers.store, transfers, BucketSizes(LAYER_BYTES, number / 8), undo)
                give_gradients(net)
                torch.accelerator.synchronize()
                before = torch.accelerator.memory_allocated()
                optimizer.step()
                optimizer.step()
                torch.accelerator.synchronize()
                assert torch.accelerator.memory_allocated() - before == number * 2 * LAYER_BYTES + 8 * 512
                assert adoption.stats.bytes_to_store == 2 * (8 - number) * 2 * LAYER_BYTES
                if asynchronous:
                    # All of them, in a step that fetches: one that stays is stepped first.
                    assert adoption.stats.num_prefetched == 8 - number


# --------------------------------------------------------------------------------------------------- mutations


def run_watched(transfers: Any, share: float) -> Any:
    net = wide_net()
    optimizer = O.AdamW(net.parameters())
    with contextlib.ExitStack() as undo:
        adopt(net, transfers.store, transfers, BucketSizes(LAYER_BYTES, share), undo)
        for _ in range(4):
            give_gradients(net)
            optimizer.step()
    return on_host([net.state_dict(), optimizer.state_dict()["state"]])


def is_caught_in(monkeypatch: pytest.MonkeyPatch, why: str, directory: pathlib.Path, share: float) -> bool:
    return is_caught(monkeypatch, why, directory, functools.partial(run_watched, share=share))


@pytest.mark.parametrize("why", WAITS)
def test_every_wait_is_needed(why: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Without any one of the waits, simgpu reports a race or the numbers are wrong."""
    assert any(is_caught_in(monkeypatch, why, tmp_path, share) for share in (0.5, 0.25))


def test_leaving_out_nothing_is_not_caught(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    assert not is_caught_in(monkeypatch, "no such wait", tmp_path, 0.5)
