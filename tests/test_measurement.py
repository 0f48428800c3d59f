"""measure(): bytes by unique storage and kind, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch

import memscale
from memscale._torch.live_bytes import KINDS, LiveBytes
from tests.conftest import freeze_what_is_left

F32 = 4


@pytest.fixture(autouse=True)
def _no_old_models() -> None:
    """What earlier tests left would be counted here."""
    freeze_what_is_left()


# ---- the books


def test_a_storage_counts_once_however_many_tensors_show_it() -> None:
    with LiveBytes("cpu") as books:
        tensor = torch.ones(100)
        views = [tensor[10:], tensor.view(10, 10).t(), tensor.detach(), tensor.expand(5, 100)]
        assert books.total_bytes == 100 * F32
        del tensor
        assert books.total_bytes == 100 * F32, "a view keeps the whole storage alive"
        del views
        assert books.total_bytes == 0
    assert books.peak_bytes == 100 * F32


def test_freed_and_reused_memory_is_not_confused() -> None:
    with LiveBytes("cpu") as books:
        for _ in range(50):
            tensor = torch.empty(1000)
            tensor = torch.empty(1000)
        assert books.total_bytes == 1000 * F32
        assert books.peak_bytes == 2 * 1000 * F32
        del tensor


def test_resized_storages_are_counted_anew() -> None:
    with LiveBytes("cpu") as books:
        tensor = torch.ones(10)
        tensor.resize_(1000)
        assert books.total_bytes == 1000 * F32


def test_lists_of_results() -> None:
    with LiveBytes("cpu") as books:
        parts = torch.ones(10).split(5)
        assert books.total_bytes == 10 * F32
        pairs = torch._foreach_add([torch.ones(3), torch.ones(5)], 1)
        assert books.total_bytes == (10 + 3 + 5) * F32
        del parts, pairs


def test_other_devices_and_fakes_do_not_count() -> None:
    with LiveBytes("cpu") as books:
        torch.ones(10, device="meta")
        assert books.total_bytes == 0


def test_rounding() -> None:
    with LiveBytes("cpu", 512) as books:
        tensors = [torch.ones(1), torch.ones(128), torch.ones(129), torch.ones(0)]
        assert books.total_bytes == 512 + 512 + 1024
        del tensors


def test_sparse_tensors_are_their_parts() -> None:
    with LiveBytes("cpu") as books:
        indices, values = torch.tensor([[0, 3, 5]]), torch.ones(3, 4)
        sparse = torch.sparse_coo_tensor(indices, values, (8, 4), check_invariants=False)
        assert books.total_bytes == 3 * 8 + 12 * F32
        del indices, values
        assert books.total_bytes == 3 * 8 + 12 * F32
        del sparse
        assert books.total_bytes == 0


class Doubled(torch.Tensor):
    """A wrapper subclass: no storage of its own, two tensors inside."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_wrapper_subclasses_are_what_they_hold() -> None:
    with LiveBytes("cpu") as books:
        first, second = torch.ones(10), torch.ones(10)
    tensor = Doubled(first, second)
    empty = LiveBytes("cpu")
    empty.see(tensor)
    assert empty.total_bytes == books.total_bytes == 20 * F32


def test_plain_subclasses_count_by_their_storage() -> None:
    class Named(torch.Tensor):
        pass

    with LiveBytes("cpu") as books:
        tensor = torch.ones(10).as_subclass(Named)
        result = tensor + 1
        assert books.total_bytes == 20 * F32
        del tensor, result


# ---- measure()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))


PARAMETERS = (10 * 20 + 20 + 20 * 5 + 5) * F32
TENSORS = 4


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_kinds_of_a_small_mlp_by_hand() -> None:
    """A batch of 8 through linear, relu, linear."""
    model, x = mlp(), torch.randn(8, 10)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(model, optimizer, x)
    with memscale.measure("cpu") as measured:
        output = model(x)
    assert measured.breakdown["parameters"] == PARAMETERS
    assert measured.breakdown["optimizer state"] == 2 * PARAMETERS + TENSORS * F32
    assert measured.breakdown["gradients"] == 0
    assert measured.breakdown["activations"] == 2 * 8 * 20 * F32, "while relu runs, its input is there, too"
    assert output.shape == (8, 5)
    with memscale.measure("cpu") as measured:
        output.sum().backward()
    assert measured.timeline[-1].by_kind["gradients"] == PARAMETERS
    assert measured.breakdown["gradients"] <= PARAMETERS


def test_gradients_and_state_of_a_whole_step() -> None:
    model, x = mlp(), torch.randn(8, 10)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with memscale.measure("cpu") as measured:
        model(x).sum().backward()
        after_backward = dict(measured.timeline[-1].by_kind)
        optimizer.step()
        torch.ones(1)
        after_step = dict(measured.timeline[-1].by_kind)
        optimizer.zero_grad()
        torch.ones(1)
        at_the_end = dict(measured.timeline[-1].by_kind)
    assert after_backward["parameters"] == PARAMETERS
    assert after_backward["gradients"] == PARAMETERS
    assert after_step["optimizer state"] == 2 * PARAMETERS + TENSORS * F32
    assert at_the_end["gradients"] == 0


def test_the_timeline_and_the_peak_agree() -> None:
    model, x = mlp(), torch.randn(8, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    with memscale.measure("cpu") as measured:
        for _ in range(2):
            step(model, optimizer, x)
    seconds = [sample.seconds for sample in measured.timeline]
    assert seconds == sorted(seconds)
    assert measured.peak_bytes == max(sample.total_bytes for sample in measured.timeline)
    assert sum(measured.breakdown.values()) == measured.peak_bytes
    assert all(sum(sample.by_kind.values()) == sample.total_bytes for sample in measured.timeline)
    assert set(measured.breakdown) == set(KINDS)
    assert all(value >= 0 for sample in measured.timeline for value in sample.by_kind.values())
    assert "GB" in repr(measured)


def test_what_lived_before_is_seen_and_named() -> None:
    model, other = mlp(), torch.randn(1000)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(model, optimizer, torch.randn(8, 10))
    model(torch.randn(8, 10)).sum().backward()
    with memscale.measure("cpu") as measured:
        pass
    assert measured.breakdown["parameters"] == PARAMETERS
    assert measured.breakdown["gradients"] == PARAMETERS
    assert measured.breakdown["optimizer state"] == 2 * PARAMETERS + TENSORS * F32
    assert measured.breakdown["other"] >= other.nbytes


def test_parameters_born_inside_are_known_at_their_optimizers_step() -> None:
    with memscale.measure("cpu") as measured:
        for _ in range(3):  # ids of dead parameters come back
            model = mlp()
            step(model, torch.optim.SGD(model.parameters()), torch.randn(8, 10))
            model(torch.randn(8, 10)).sum().backward()
            assert measured.timeline[-1].by_kind["parameters"] == PARAMETERS
            assert measured.timeline[-1].by_kind["gradients"] == PARAMETERS
            del model


def test_nested() -> None:
    with memscale.measure("cpu") as outer:
        big = torch.ones(1000)
        with memscale.measure("cpu") as inner:
            small = torch.ones(10)
        del big
        bigger = torch.ones(5000)
    assert inner.peak_bytes < outer.peak_bytes
    assert outer.peak_bytes - inner.peak_bytes == (5000 - 1000) * F32
    del small, bigger


def test_an_exception_inside_still_measures_and_leaves_nothing() -> None:
    model = mlp()
    with pytest.raises(ZeroDivisionError), memscale.measure("cpu") as measured:
        _ = [torch.ones(1000), 1 / 0]
    assert measured.peak_bytes >= 1000 * F32
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert _python_dispatch._get_current_dispatch_mode_stack() == []


def test_nothing_is_left_on_parameters() -> None:
    model = mlp()
    with memscale.measure("cpu"):
        step(model, torch.optim.SGD(model.parameters()), torch.randn(8, 10))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_training_is_the_same_under_measurement() -> None:
    results = []
    for measured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 20), nn.Dropout(0.5), nn.Linear(20, 5))
        optimizer = torch.optim.AdamW(model.parameters())
        if measured:
            with memscale.measure("cpu"):
                step(model, optimizer, torch.ones(8, 10))
        else:
            step(model, optimizer, torch.ones(8, 10))
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inference_mode() -> None:
    model = mlp()
    with torch.inference_mode(), memscale.measure("cpu") as measured:
        model(torch.ones(8, 10))
    assert measured.breakdown["activations"] == 0
    assert measured.peak_bytes > PARAMETERS


@pytest.mark.parametrize("device", ["xpu", "xpu:3", "meta", "nonsense"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(memscale.ConfigError, match=f"device='{device}'"), memscale.measure(device):
        pass
