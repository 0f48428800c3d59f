"""Optimizer state that waits elsewhere: the same training, in every loop and with every optimizer that can be split."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import pytest
import torch

from memscale.techniques.offload.optimizer.adoption import adopt_optimizer
from memscale.techniques.offload.transfer.transfers import Transfers
from tests.techniques.offload.tiers import WAYS, device_of, on_host, opened, same
from tests.techniques.offload.training import (
    BUCKET_BYTES,
    MAIN_WAYS,
    Lion,
    Make,
    O,
    Training,
    adopted,
    check_parity,
    check_races,
    check_waiting,
    grouped,
    muon,
    plain,
)


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


# ---------------------------------------------------------------------------------------------------------- parity

TORCH_OPTIMIZERS: dict[str, Make] = {
    "AdamW loop": plain(O.AdamW, foreach=False),
    "AdamW foreach": plain(O.AdamW, foreach=True),
    "AdamW fused": plain(O.AdamW, fused=True),
    "AdamW capturable": plain(O.AdamW, capturable=True, foreach=True),
    "Adam amsgrad": plain(O.Adam, amsgrad=True),
    "Adam amsgrad fused": plain(O.Adam, amsgrad=True, fused=True),
    "Adam maximize": plain(O.Adam, maximize=True),
    "SGD": plain(O.SGD, lr=0.1),
    "SGD momentum loop": plain(O.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "SGD momentum foreach": plain(O.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD momentum fused": plain(O.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": plain(O.Adagrad),
    "Adagrad foreach": plain(O.Adagrad, foreach=True),
    "Adadelta": plain(O.Adadelta, foreach=True),
    "Adafactor": plain(O.Adafactor),
    "Adamax": plain(O.Adamax, foreach=True),
    "ASGD": plain(O.ASGD, foreach=True),
    "Muon": muon,
    "NAdam": plain(O.NAdam, foreach=True),
    "RAdam": plain(O.RAdam, foreach=True),
    "RMSprop": plain(O.RMSprop),
    "RMSprop centered": plain(O.RMSprop, centered=True, momentum=0.9, foreach=True),
    "Rprop": plain(O.Rprop, foreach=True),
}


def supports(device: str, name: str) -> bool:
    return device == "simgpu" or "capturable" not in name  # torch allows capturable on accelerators only


@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way in MAIN_WAYS for name in TORCH_OPTIMIZERS if supports(device_of(way), name)]
)
def test_every_separable_torch_optimizer_trains_the_same(way, name, tmp_path):
    check_parity(way, tmp_path, TORCH_OPTIMIZERS[name])


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_the_same(way, tmp_path):
    check_parity(way, tmp_path, grouped(O.AdamW, amsgrad=True), "schedule clip accumulate")


LOOPS: dict[str, tuple[Make, str]] = {
    "groups, schedule": (grouped(O.AdamW, lr=1e-3), "schedule"),
    "closure": (plain(O.AdamW), "closure"),
    "clip, accumulate": (plain(O.AdamW), "clip accumulate"),
    "zero_grad without None": (plain(O.AdamW), "keep"),
    "scaler": (plain(O.AdamW), "scaler overflow"),
    "scaler fused": (plain(O.AdamW, fused=True), "scaler overflow"),
    "scaler fused, unscale, clip": (plain(O.AdamW, fused=True), "scaler unscale clip overflow"),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("way", MAIN_WAYS)
def test_every_loop_trains_the_same(way, loop, tmp_path):
    make, mode = LOOPS[loop]
    check_parity(way, tmp_path, make, mode)


class Decaying(O.SGD):
    """Decays also what got no gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
        return super().step(closure)


class Lagging(O.Optimizer):
    """Keeps the gradient itself: what `zero_grad` and backward do to it, they do to the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                parameter.sub_(parameter.grad + state.get("before", 0), alpha=group["lr"])
                state["before"], state["sum"] = parameter.grad, state.get("sum", 0) + parameter.grad


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_an_optimizer_that_changes_parameters_without_gradient(way, tmp_path):
    check_parity(way, tmp_path, plain(Decaying, lr=0.1, momentum=0.9), "keep")


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_state_that_is_the_gradient_itself_stays_the_gradient(way, tmp_path):
    theirs = Training(device_of(way), plain(Lagging), "keep").run()
    ours = Training(device_of(way), plain(Lagging), "keep")
    with opened(way, tmp_path) as transfers, adopted(ours, transfers):
        ours.run()
        waiting = ours.optimizer.state[ours.net.head.weight]
        assert waiting.kept["before"] is ours.net.head.weight.grad
        assert waiting.kept["sum"] is None, "it waits elsewhere"
    assert same(on_host(ours.net.state_dict()), on_host(theirs.net.state_dict()))


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_sixteen_bit_parameters(way, tmp_path):
    check_parity(way, tmp_path, plain(O.AdamW), dtype=torch.bfloat16)


@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 1 << 30])
def test_any_bucket_size_trains_the_same(bucket_bytes, tmp_path, no_races):
    reference = Training("simgpu", plain(O.AdamW)).run()
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW))
        with adopted(training, transfers, bucket_bytes):
            assert same(training.run().result(), reference.result())


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_of_copies_changes_a_bit(seed, tmp_path, no_races):
    """simgpu runs deferred copies at other moments for each seed; two buckets to one, so that memory is reused."""
    import simgpu

    reference = Training("simgpu", plain(O.AdamW, foreach=True), "clip").run()
    simgpu.set_schedule_seed(seed)
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW, foreach=True), "clip")
        with adopted(training, transfers):
            assert same(training.run().result(), reference.result())


class Counting(Lion):
    """Counts steps in a group, in an attribute and in the state under a string."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0.0])
        k = self.state["k"].item()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "m" not in state:
                        state["m"] = torch.zeros_like(p)
                    state["m"].lerp_(p.grad, 0.1)
                    p.add_(state["m"], alpha=-group["lr"] * (1 + k / 10) / self.count / group["step"])
        self.state["k"] += 1


class Growing(Lion):
    """Adds a state tensor in its third step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["n"] = state.get("n", 0) + 1
                    state.setdefault("m", torch.zeros_like(p)).add_(p.grad)
                    if state["n"] > 2:
                        state.setdefault("v", torch.ones_like(p)).add_(p.grad.square())
                    p.addcdiv_(state["m"], state.get("v", torch.ones_like(p)), value=-1e-3)


class Nested(O.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [Lion, Counting, Growing, Nested])
@pytest.mark.parametrize("way", MAIN_WAYS)
def test_optimizers_of_others_train_the_same(way, kind, tmp_path):
    check_parity(way, tmp_path, plain(kind))
    if kind is Lion:
        check_parity(way, tmp_path, plain(kind), "closure")


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit", "Lion8bit", "AdamW"])
def test_bitsandbytes_on_the_cpu_trains_the_same(name, tmp_path):
    import bitsandbytes

    check_parity("cpu disk async", tmp_path, plain(getattr(bitsandbytes.optim, name), lr=1e-3))


def test_users_step_hooks_run_first_and_see_what_they_would(tmp_path):
    def run(way: str | None) -> tuple[Any, list[int]]:
        training = Training("simgpu", plain(O.AdamW))
        seen: list[int] = []

        def halve(optimizer: O.Optimizer, args: Any, kwargs: Any) -> None:
            for p in training.net.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)

        def count(optimizer: O.Optimizer, args: Any, kwargs: Any) -> None:
            assert optimizer is training.optimizer
            seen.append(sum(p.grad is not None for g in optimizer.param_groups for p in g["params"]))

        with contextlib.ExitStack() as stack:
            if way:
                transfers = stack.enter_context(opened(way, tmp_path))
                stack.enter_context(adopted(training, transfers))
            training.step()
            training.optimizer.register_step_pre_hook(halve)  # after ours
            training.optimizer.register_step_post_hook(count)
            training.run(4)
            return training.result(), seen

    assert same(run(None), run("simgpu host async"))


# ------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", ["AdamW loop", "AdamW fused", "SGD momentum foreach", "Adafactor", "Muon"])
@pytest.mark.parametrize("way", MAIN_WAYS)
def test_checkpoints_cross_between_plain_and_adopted(way, name, tmp_path):
    """Written plain or adopted, resumed plain or adopted: four times the same."""
    make, device = TORCH_OPTIMIZERS[name], device_of(way)
    reference = Training(device, make, "schedule").run(6).result()
    for writer in ("plain", "adopted"):
        with opened(way, tmp_path) as transfers:
            training = Training(device, make, "schedule")
            with adopted(training, transfers) if writer == "adopted" else contextlib.nullcontext():
                training.run(3)
                file = io.BytesIO()
                parts = (training.net, training.optimizer, training.scheduler)
                torch.save([part.state_dict() for part in parts], file)
        for reader in ("plain", "adopted"):
            with opened(way, tmp_path) as transfers:
                resumed = Training(device, make, "schedule")
                with adopted(resumed, transfers) if reader == "adopted" else contextlib.nullcontext():
                    if reader == "adopted":
                        resumed.step()  # adopted before it loads
                    file.seek(0)
                    loaded = torch.load(file, map_location="cpu", weights_only=True)
                    resumed.net.load_state_dict(loaded[0])
                    resumed.optimizer.load_state_dict(loaded[1])
                    resumed.scheduler.load_state_dict(loaded[2])
                    resumed.num_steps, resumed.losses = 3, training.losses[:3]
                    assert same(resumed.run(3).result(), reference), (writer, reader)
    check_races(device)


def test_loading_puts_no_more_than_a_bucket_on_the_device(tmp_path):
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW)).run(1)
        state_dict = on_host(training.optimizer.state_dict())
        training.optimizer = plain(O.AdamW)(training.net)
        with adopted(training, transfers) as adoption:
            training.step()
            torch.accelerator.synchronize()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            training.optimizer.load_state_dict(state_dict)
            peak = torch.accelerator.max_memory_allocated() - before
            assert 0 < peak <= adoption.stats.largest_bucket_bytes
            assert same(on_host(training.optimizer.state_dict())["state"], state_dict["state"])


def test_a_load_hook_of_the_users_sees_the_state(tmp_path):
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW)).run(2)
        saved = copy.deepcopy(on_host(training.optimizer.state_dict()))
        with adopted(training, transfers):
            training.step()
            seen: list[int] = []
            training.optimizer.register_load_state_dict_pre_hook(lambda o, sd: seen.append(len(sd["state"])))
            training.optimizer.load_state_dict(saved)
            assert seen == [len(saved["state"])]
            check_waiting(training)
            assert same(on_host(training.optimizer.state_dict()), saved)


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_looking_at_the_state_and_changing_it(way, tmp_path):
    """What a user changes in optimizer.state counts, as it does in a plain optimizer."""

    def run(transfers: Transfers | None) -> Any:
        training = Training(device_of(way), plain(O.AdamW))
        with adopted(training, transfers) if transfers else contextlib.nullcontext():
            training.run(2)
            weight, bias = training.net.head.weight, training.net.head.bias
            entry = training.optimizer.state[weight]
            assert sorted(entry) == ["exp_avg", "exp_avg_sq", "step"]
            entry["exp_avg"].mul_(0.5)
            entry["exp_avg_sq"] = entry["exp_avg_sq"] * 2
            training.optimizer.state[bias] = {}
            del training.optimizer.state[training.net.body[0].weight]
            training.run(2)
            if transfers:
                check_waiting(training)
                assert training.optimizer.state[weight] is entry
            entry["exp_avg"].zero_()
            training.run(1)
            return training.result()

    with opened(way, tmp_path) as transfers:
        assert same(run(transfers), run(None))


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_a_state_dict_is_of_one_moment(way, tmp_path):
    """Step counters stay where they are between steps, but not in what was saved."""
    with opened(way, tmp_path) as transfers:
        training = Training(device_of(way), plain(O.AdamW))
        with adopted(training, transfers):
            saved = training.run(2).optimizer.state_dict()
            then = on_host(saved)
            training.run(2)
            assert same(saved, then)
            assert saved["state"][0]["step"] == 2


def test_copies_and_pickles_are_plain(tmp_path):
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW)).run(1)
        expected = on_host(training.optimizer.state[training.net.head.weight])
        training.optimizer.zero_grad()
        with contextlib.ExitStack() as undo:
            adopt_optimizer(training.optimizer, transfers.store, transfers, BUCKET_BYTES, undo)
            entry = training.optimizer.state[training.net.head.weight]
            for copied in (copy.deepcopy(entry), pickle.loads(pickle.dumps(entry)), entry.copy(), copy.copy(entry)):
                assert type(copied) is dict
                assert same(on_host(copied), expected)
            check_waiting(training)


def test_a_copy_of_model_and_optimizer_trains_by_itself(tmp_path):
    reference = Training("simgpu", plain(O.AdamW)).run(3)
    with opened("simgpu host async", tmp_path) as transfers:
        training = Training("simgpu", plain(O.AdamW))
        with adopted(training, transfers):
            training.run(2)
            original = training.net, training.optimizer
            training.net, training.optimizer = copy.deepcopy(original)
            training.step()
    del original
    assert same(training.result(), reference.result())


@pytest.mark.parametrize("way", MAIN_WAYS)
def test_a_default_device_does_not_mislead_us(way, tmp_path):
    """`torch.set_default_device` is for the user's tensors; our host memory stays on the host."""
    device = device_of(way)
    with torch.device("simgpu"):
        reference = Training(device, plain(Lion)).run(3)
        with opened(way, tmp_path) as transfers:
            training = Training(device, plain(Lion))
            with adopted(training, transfers) as adoption:
                training.run(2)
                training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
                training.run(1)
                assert adoption.adopted(training.optimizer)
                assert same(training.result(), reference.result())
