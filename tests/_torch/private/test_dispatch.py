"""Says when a PyTorch release changes what `_torch/private/dispatch.py` relies on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memscale._torch import private
from tests.modes import Counting


def test_flop_formulas() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 5)
    formula = private.flop_formula(torch.ops.aten.mm.default)
    assert formula is not None
    assert formula(a, b, out_val=a @ b) == 2 * 2 * 3 * 5
    assert private.flop_formula(torch.ops.aten.relu.default) is None


def test_an_outermost_mode_lets_others_come_and_go() -> None:
    ours, first, second = Counting(), Counting(), Counting()
    with first:
        assert private.can_take_outermost_mode()
        private.insert_outermost_mode(ours)
        torch.ones(1)
    assert (ours.count, first.count) == (1, 1)
    with second:
        torch.ones(1)
        assert private.remove_mode(ours)
        assert not private.remove_mode(ours)
        torch.ones(1)
    torch.ones(1)
    assert (ours.count, first.count, second.count) == (2, 1, 2)


def test_fake_tensor_modes_have_a_fixed_place() -> None:
    with private.fake_tensor_mode():
        assert not private.can_take_outermost_mode()


def test_operators_run_without_any_mode_inside() -> None:
    ours = Counting()
    with private.fake_tensor_mode(), ours:
        with private.real_tensors():
            assert not private.is_fake(torch.ones(1))
        assert ours.count == 0
        assert private.is_fake(torch.ones(1))


def test_operators_on_real_tensors_alone_ask_no_mode() -> None:
    ours = Counting()
    with private.fake_tensor_mode(), ours:
        with private.real_tensors_only():
            assert not private.is_fake(torch.ones(1).expand(3) + 1)
        assert ours.count == 0
        assert private.is_fake(torch.ones(1))


def test_composite_operators_are_told_from_those_with_kernels() -> None:
    assert private.is_composite(torch.ops.aten.linear.default)
    assert not private.is_composite(torch.ops.aten.mm.default)
    assert private.has_own_kernel("aten::mm", "cpu")
    assert not private.has_own_kernel("aten::linear", "cpu")


def test_an_opened_kernel_shows_the_operators_that_it_is_written_in() -> None:
    ours = Counting()
    matrix = torch.rand(3, 4)
    with ours:
        inside = private.run_opened(torch.ops.aten.addmm.default, "cpu", (torch.ones(2), matrix, matrix.t()[:, :2]), {})
    assert torch.equal(inside, torch.addmm(torch.ones(2), matrix, matrix.t()[:, :2]))


def test_subclasses_are_called_as_plain_tensors_are() -> None:
    seen: list[str] = []

    class Told(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    told = torch.ones(2).as_subclass(Told)
    seen.clear()
    with private.without_torch_function():
        torch.exp(told)
    assert not seen
    torch.exp(told)
    assert seen == ["exp"]


def test_function_modes_can_be_left_out() -> None:
    seen = []

    class Told(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Told():
        with private.without_function_modes():
            torch.exp(torch.zeros(2))
        assert not seen
        torch.exp(torch.zeros(2))
    assert "exp" in seen


def test_tracing_transforms_and_forward_mode_are_seen() -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((private.is_tracing(), private.inside_functional_transform(), private.in_forward_mode()))
        return (x * 2).sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(2))
    assert seen == [(False, False, False), (False, True, False), (False, False, True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer releases say that tracing is old
        torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert seen[3] == (True, False, False)


def test_gradients_that_stand_for_several_are_seen() -> None:
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(private.is_batched(gradient)))
    torch.autograd.grad(y, x, torch.ones(2, 3), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3))
    assert seen == [True, False]


def test_active_modes_are_in_the_order_in_which_they_were_entered() -> None:
    first, second = Counting(), Counting()
    with first, second:
        assert private.active_modes() == [first, second]
    assert private.active_modes() == []


def _casts_under_autocast(weight: torch.Tensor) -> int:
    with torch.autocast("cpu", torch.bfloat16), Counting() as seen:
        torch.ones(4, 4, dtype=torch.bfloat16) @ weight
    return seen.count


def test_a_probe_tells_lifetimes_of_the_cache_of_casts_apart() -> None:
    """It neither empties that cache nor saves anything, and modes do not see it."""
    probe, weight = private.CastProbe(), torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with_cast = _casts_under_autocast(weight)
        with torch.autograd.graph.disable_saved_tensors_hooks("nothing is saved"), Counting() as seen:
            first = probe.lifetime()
        assert seen.count == 0
        assert probe.lifetime() is first
        assert _casts_under_autocast(weight) == with_cast - 1
        torch.clear_autocast_cache()
        second = probe.lifetime()
        assert second is not first
    with torch.autocast("cpu", torch.bfloat16):
        assert probe.lifetime() not in (first, second)


def test_a_probe_leaves_casts_where_autocast_was_switched_on_without_a_block() -> None:
    probe, weight = private.CastProbe(), torch.randn(2, 2, requires_grad=True)
    torch.set_autocast_enabled("cpu", True)
    try:
        x = torch.randn(2, 2)
        node = (x @ weight).grad_fn.next_functions[1][0]
        probe.lifetime()
        assert (x @ weight).grad_fn.next_functions[1][0] is node
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


def test_casts_that_are_cached_go_when_blocks_of_autocast_have_been_left() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        first = _casts_under_autocast(weight)
        assert _casts_under_autocast(weight) < first
        with private.left_autocast_blocks():
            assert _casts_under_autocast(weight) == first
            assert _casts_under_autocast(weight) == first
        assert _casts_under_autocast(weight) == first
        assert _casts_under_autocast(weight) < first


class Asked(TorchFunctionMode):
    """Counts the functions of PyTorch that it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_function_modes_that_were_left_are_asked_again_afterwards_in_their_order() -> None:
    with Asked() as outer, Asked() as inner:
        with private.left_function_modes():
            torch.ones(2).sum()
        assert (outer.count, inner.count) == (0, 0)
        with pytest.raises(RuntimeError, match="in the middle"), private.left_function_modes():
            raise RuntimeError("in the middle")
        torch.relu(torch.ones(2))
        assert outer.count == inner.count > 0
    torch.relu(torch.ones(2))
    assert outer.count == inner.count


def test_a_backward_whose_function_modes_were_left_computes_again_without_them_as_it_does_where_they_pass_it_on() -> (
    None
):
    """A mode that hands on `backward()` is not asked about what runs inside; leaving it beforehand is the same."""

    def asked_in_backward(*, is_left: bool) -> int:
        weight = torch.ones(3, requires_grad=True)
        with Asked() as mode:
            loss = checkpoint(lambda x: (x.sin() * x).sum(), weight, use_reentrant=False)
            before = mode.count
            with private.left_function_modes() if is_left else contextlib.nullcontext():
                loss.backward()
            return mode.count - before

    assert asked_in_backward(is_left=False) == 1
    assert asked_in_backward(is_left=True) == 0


@torch.library.custom_op("memscale_tests::written_in_others", mutates_args=())
def written_in_others(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).float().clone()


class _Below(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return private.run_below_mode(func, args, kwargs or {})


@pytest.mark.parametrize("enabled", [True, False])
def test_what_an_operator_is_written_in_is_cast_as_without_a_mode(enabled: bool) -> None:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        plain = written_in_others(x)
        with _Below():
            below = written_in_others(x)
            assert torch.is_autocast_enabled("cpu") is enabled
        with Counting():
            assert torch.equal(plain, written_in_others(x)) is not enabled, "or there is nothing to mend any more"
        with _Below(), _Below():
            twice = written_in_others(x)
    assert torch.equal(below, plain)
    assert torch.equal(twice, plain)


def _bilinear() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right, weight = (torch.randn(size, generator=generator) for size in ((8, 16), (8, 16), (4, 16, 16)))
    weight.requires_grad_()
    torch.nn.functional.bilinear(left, right, weight).square().sum().backward()
    assert weight.grad is not None
    return weight.grad


def _pinv() -> torch.Tensor:
    matrix = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.linalg.pinv(matrix).square().sum().backward()
    assert matrix.grad is not None
    return matrix.grad


@pytest.mark.parametrize("gradient_of", [_bilinear, _pinv])
def test_operators_of_pytorch_that_are_cast_inside_are_so_below_a_mode(gradient_of: Callable[[], torch.Tensor]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradient_of()
        with _Below():
            below = gradient_of()
        with Counting():
            assert not torch.equal(plain, gradient_of()), "or there is nothing to mend any more"
    assert torch.equal(below, plain)
    full = gradient_of()
    with _Below():
        assert torch.equal(gradient_of(), full)


@pytest.mark.parametrize("name", ["_RestorePythonTLSSnapshot", "_dispatch_tls_local_exclude_set"])
def test_pytorch_still_says_how_autocast_was_outside_of_a_mode(name: str) -> None:
    """Both are private, and were seen in torch 2.13 and 2.15."""
    assert hasattr(torch._C, name)


def test_autocast_may_be_on_for_another_device_alone() -> None:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    plain = written_in_others(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no such device here
        elsewhere = torch.autocast("cuda", torch.bfloat16)
    with elsewhere, _Below():
        assert torch.equal(written_in_others(x), plain)
