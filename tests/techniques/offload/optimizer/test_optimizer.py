"""Which optimizers are adopted, when, and how they are given back; and which are left as they are."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch

from memscale.techniques.offload.optimizer.adoption import adopt, adopt_optimizer
from memscale.techniques.offload.transfer.transfers import Transfers
from tests.techniques.offload.tiers import device_of, opened, same
from tests.techniques.offload.training import (
    BUCKET_BYTES,
    MAIN_WAYS,
    Lion,
    O,
    Training,
    adopted,
    check_races,
    check_waiting,
    grouped,
    no_hooks_left,
    plain,
)

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


# ----------------------------------------------------------------------------------------------- coming and going


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_adopted_late_given_back_and_adopted_again(way, tmp_path):
    reference = Training(device_of(way), grouped(O.AdamW, amsgrad=True)).run(9)
    with opened(way, tmp_path) as transfers:
        training = Training(device_of(way), grouped(O.AdamW, amsgrad=True)).run(2)
        with adopted(training, transfers):
            training.run(3)
            check_waiting(training)
        training.run(1)
        with adopted(training, transfers):
            training.run(3)
        assert same(training.result(), reference.result())
    check_races(device_of(way))


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_an_optimizer_is_adopted_at_once_with_the_state_it_has(way, tmp_path):
    reference = Training(device_of(way), plain(O.AdamW)).run(5)
    with opened(way, tmp_path) as transfers:
        training = Training(device_of(way), plain(O.AdamW)).run(2)
        with contextlib.ExitStack() as undo:
            adoption = adopt_optimizer(training.optimizer, transfers.store, transfers, BUCKET_BYTES, undo)
            assert adoption.adopted(training.optimizer)
            check_waiting(training)
            assert sum(leaf.counters.held_bytes for leaf in transfers.store.leaves()) > 100_000
            assert same(training.run(3).result(), reference.result())
        no_hooks_left(training.optimizer)


def test_only_the_optimizers_of_this_model_are_adopted(tmp_path):
    with opened("simgpu host async", tmp_path) as transfers:
        training, foreign = Training("simgpu", plain(O.AdamW)), Training("simgpu", plain(O.AdamW))
        second = O.SGD(training.net.head.parameters(), lr=0.1, momentum=0.9)
        with adopted(training, transfers) as adoption:
            training.step()
            second.step()
            foreign.step()
            assert adoption.adopted(training.optimizer)
            assert adoption.adopted(second)
            assert not adoption.adopted(foreign.optimizer)
            assert foreign.optimizer.state[foreign.net.head.weight]["exp_avg"].device.type == "simgpu"


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_parameters_added_later(way, tmp_path):
    def run(transfers: Transfers | None) -> Any:
        training = Training(device_of(way), lambda net: O.AdamW(net.body.parameters()))
        with adopted(training, transfers) if transfers else contextlib.nullcontext():
            training.run(2)
            training.optimizer.add_param_group({"params": list(training.net.head.parameters()), "lr": 1e-2})
            return training.run(3).result()

    with opened(way, tmp_path) as transfers:
        assert same(run(transfers), run(None))


def test_parameters_that_get_gradients_only_sometimes(tmp_path):
    def run(transfers: Transfers | None) -> Any:
        training = Training("simgpu", plain(O.AdamW))
        with adopted(training, transfers, 1 << 20) if transfers else contextlib.nullcontext():
            for number in range(6):
                training.net.head.requires_grad_(number % 3 != 1)
                training.net.body[0].requires_grad_(number > 1)
                training.step()
            return training.result()

    with opened("simgpu host async", tmp_path) as transfers:
        assert same(run(transfers), run(None))


def test_the_optimizer_dies_with_its_last_reference(tmp_path):
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW))
        with adopted(training, transfers):
            training.step()
            reference = weakref.ref(training.optimizer)
            training.optimizer = plain(O.AdamW)(training.net)
            gc.collect()
            assert reference() is None
            transfers.store.sweep()
            assert transfers.store.counters.held_bytes == 0
            training.step()


def test_a_model_trained_by_nobody_we_saw_gives_a_warning(tmp_path):
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW))
        with adopted(training, transfers):
            pass  # never trained: nothing to say
        undo = contextlib.ExitStack()
        adopt(training.net, transfers.store, transfers, BUCKET_BYTES, undo)
        training.backward(torch.ones(2, 64, device="simgpu"))
        with torch.no_grad():
            for p in training.net.parameters():
                p.sub_(0.1 * (p.grad if p.grad is not None else 0))
                p.grad = None
        with pytest.warns(UserWarning, match="no optimizer of this Net was ever seen"):
            undo.close()


# --------------------------------------------------------------------------------------------- left as they are


class GlobalNorm(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm() if gradients else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad / norm)
                    p.add_(self.state[p]["m"], alpha=-group["lr"])


class Wrapper(O.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.inner = O.Adam(self.param_groups)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize(
    ("make", "mode", "reason"),
    [
        (plain(O.LBFGS, max_iter=3), "closure", "several times"),
        (plain(GlobalNorm), "", "depends on the others"),
        (plain(Wrapper), "", "wraps another optimizer"),
    ],
)
def test_what_cannot_be_split_is_left_alone_with_one_warning(make, mode, reason, tmp_path):
    reference = Training("simgpu", make, mode).run()
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", make, mode)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with adopted(training, transfers):
                training.run()
        left = [w for w in caught if type(training.optimizer).__name__ in str(w.message) and "left as it is" in str(w)]
        assert len(left) == 1
        assert reason in str(left[0].message)
        assert same(training.result(), reference.result())
