"""What single operators cost: arithmetic, bytes, launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memscale._profile.operator_costs import Work

pytestmark = pytest.mark.unit


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.work.add(func, args, kwargs or {}, result, "cpu")
        return result


def work_of(run: Callable[[], Any]) -> Work:
    with Counting() as counting:
        run()
    return counting.work


A, B = torch.zeros(20, 30), torch.zeros(30, 50)
X = torch.zeros(1000)


@pytest.mark.parametrize(
    ("run", "num_bytes"),
    [
        (lambda: X + X, 12_000),
        (lambda: X.add_(1), 8_000),
        (lambda: X.zero_(), 4_000),
        (lambda: X.copy_(X.clone()), 16_000),
        (lambda: torch.add(X, 1, out=X[:]), 8_000),
        (lambda: torch._foreach_add_([X, X], 1.0), 16_000),
        (lambda: X.sum(), 4_004),
        (lambda: X.view(10, 100).t()[2:], 0),
        (lambda: torch.empty_like(X), 0),
        (lambda: F.embedding(torch.zeros(3, dtype=torch.long), torch.zeros(100, 10)), 240 + 24 + 4_000),
    ],
)
def test_bytes_are_counted_as_they_are_read_and_written(run: Callable[[], Any], num_bytes: int) -> None:
    work = work_of(run)
    assert (work.other_bytes, work.flops, work.matmul_bytes) == (num_bytes, 0, 0)


def test_lists_are_one_launch_and_views_none() -> None:
    assert work_of(lambda: torch._foreach_add_([X, X, X], 1.0)).num_launches == 1
    assert work_of(lambda: X.view(10, 100).t().detach()).num_launches == 0
    assert work_of(lambda: torch.empty(0).set_(X.untyped_storage(), 0, (5,), (1,))).num_launches == 0


def test_products_have_arithmetic() -> None:
    work = work_of(lambda: A @ B)
    assert (work.num_launches, work.flops) == (1, 2 * 20 * 30 * 50)
    assert (work.matmul_bytes, work.other_bytes) == (4 * (20 * 30 + 30 * 50 + 20 * 50), 0)


def test_causal_attention_is_half_the_arithmetic() -> None:
    q = torch.zeros(1, 2, 16, 8, device="meta")
    attend = torch.ops.aten._scaled_dot_product_efficient_attention.default
    full, causal = Work(), Work()
    for work, is_causal in ((full, False), (causal, True)):
        args = (q, q, q, None, True, 0.0, is_causal)
        work.add(attend, args, {}, attend(*args), "meta")
    assert full.flops == 2 * causal.flops > 0


def test_what_crosses_to_another_device_is_a_transfer() -> None:
    work = Work()
    there = torch.zeros(10, device="meta")
    copy = torch.ops.aten.copy_.default
    work.add(copy, (there, X[:10]), {}, there, "meta")
    work.add(copy, (X[:10], there), {}, X[:10], "meta")
    work.add(torch.ops.aten.add_.Tensor, (X, 1), {}, X, "meta")  # the host's own
    assert (work.num_sends, work.sent_bytes, work.num_fetches, work.fetched_bytes) == (1, 40, 1, 40)
    assert work.num_launches == 0


def test_products_in_16_bits_are_counted_apart() -> None:
    assert work_of(lambda: A @ B).half_flops == 0
    work = work_of(lambda: A.bfloat16() @ B.bfloat16())
    assert work.half_flops == work.flops == 2 * 20 * 30 * 50


def test_backward_of_attention_in_16_bits_is_in_16_bits() -> None:
    """It is given the sums of exponentials, too, which are in 32 bits."""
    query = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    attend, back = (
        getattr(torch.ops.aten, f"_scaled_dot_product_efficient_attention{end}") for end in ("", "_backward")
    )
    out, sums, *seeds = attend.default(query, query, query, None, True)
    assert sums.dtype == torch.float32
    args = (query, query, query, query, None, out, sums, *seeds, 0.0, [True, True, True, False])
    work = Work()
    work.add(back.default, args, {}, back.default(*args), "meta")
    assert 0 < work.flops == work.half_flops
