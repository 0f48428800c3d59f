"""Says when a PyTorch release changes what `_torch/private/remembering.py` relies on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memscale._torch import private


def _shown(result: Any, given: tuple[torch.Tensor, ...]) -> Any:
    """What a rehearsal sees of a result: shapes, and whose memory it lies in."""
    if isinstance(result, tuple | list):
        return [_shown(one, given) for one in result]
    keys = [private.storage_key(tensor.untyped_storage()) for tensor in given]
    key, storage = private.storage_key(result.untyped_storage()), result.untyped_storage()
    place = keys.index(key) if key in keys else storage.nbytes()
    same = [index for index, tensor in enumerate(given) if tensor is result]
    return tuple(result.shape), result.stride(), result.storage_offset(), result.dtype, str(result.device), place, same


@pytest.mark.parametrize(
    "operator",
    [
        lambda x, y: x + y,
        lambda x, y: x.t() @ y,
        lambda x, y: x.add_(y),
        lambda x, y: x[1:, ::2],
        lambda x, y: x.expand(3, *x.shape),
        lambda x, y: x.split(2),
        lambda x, y: x.contiguous(),
        lambda x, y: x.t().contiguous(),
        lambda x, y: torch.native_layer_norm(x, [6], None, None, 1e-5),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.to(torch.float16),
        lambda x, y: x.max(dim=0),
        lambda x, y: torch.zeros_like(x.t()),
        lambda x, y: x.new_empty(0),
        lambda x, y: torch.conj(x.to(torch.complex64)),
        lambda x, y: torch._foreach_sqrt([x, y.t()]),
        lambda x, y: torch._foreach_add([x, y], 1.0),
        lambda x, y: torch._foreach_add([x, y.t(), x], [y, x.t(), y]),
        lambda x, y: torch._foreach_pow(2.0, [x, y.t()]),
        lambda x, y: torch._foreach_div([x, y], [2.0, 3]),
        lambda x, y: torch._foreach_norm([x, y.t()]),
        lambda x, y: torch._foreach_clone([x, y.t()]),
        lambda x, y: (torch._foreach_add_([x, y], 1.0), x)[1],
        lambda x, y: torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *[x.expand(1, 2, 4, 6)] * 4,
            None,
            x.expand(1, 2, 4, 6),
            x.new_empty(1, 2, 4),
            x.new_empty(()).long(),
            x.new_empty(()).long(),
            0.0,
            [True, True, True, False],
        )[:3],
        lambda x, y: torch.tensor(2.5),
        lambda x, y: torch.tensor([]),
        lambda x, y: torch.cat([torch.tensor([]), x]),
        lambda x, y: x.clamp(torch.tensor(0.5)),
        lambda x, y: torch.native_dropout(x, 0.5, True),
        lambda x, y: torch.native_layer_norm(x, [6], y[0], y[1], 1e-5),
    ],
)
def test_what_is_remembered_of_operators_is_what_pytorch_says(operator: Callable[..., Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    shown = []
    for mode, device in ((FakeTensorMode(), "cpu"), *[(private.fake_tensor_mode(), "cpu")] * 2):
        with mode:
            given = (torch.empty(4, 6, device=device), torch.empty(4, 6, device=device))
            shown += [_shown(operator(*given), given) for _ in range(2)]
    assert all(one == shown[0] for one in shown)


def test_another_dtype_device_or_layout_is_not_taken_for_what_is_remembered() -> None:
    with private.fake_tensor_mode():
        for dtype in (torch.float32, torch.float64):
            for device in ("cpu", "meta"):
                for tensor in (torch.empty(4, 6), torch.empty(6, 4).t()):
                    result = tensor.to(device, dtype) * 2
                    assert (result.dtype, result.device.type) == (dtype, device)
                    assert result.stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse])
def test_sparse_results_are_not_remembered(make: Callable[..., Any]) -> None:
    with private.fake_tensor_mode():
        for _ in range(2):
            assert make(torch.empty(4, 6)).layout is not torch.strided


def test_a_default_dtype_counts_for_what_is_remembered() -> None:
    with private.fake_tensor_mode():
        numbers = torch.ones(3, dtype=torch.long)
        assert (numbers / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (numbers / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_tensor_that_is_made_again_is_as_pytorch_makes_it() -> None:
    with private.fake_tensor_mode():
        x = torch.empty(3, 5)
        made = [x * 2 for _ in range(3)]
    first, *again = made
    for second in again:
        assert type(first) is type(second) is private.fake_tensor_class()
        assert vars(first) == vars(second)
        assert (first.requires_grad, first.is_leaf, first._version) == (second.requires_grad, second.is_leaf, 0)


def test_a_number_can_be_asked_for_until_it_is_written_to() -> None:
    with private.fake_tensor_mode():
        number = torch.tensor(2.5)
        assert number.item() == 2.5
        assert (number + 1).item() == 3.5
        number.add_(torch.empty(()))
        with pytest.raises(private.data_dependent_errors()):
            number.item()


def test_an_operator_that_would_send_to_other_processes_is_an_error_before_it_sends() -> None:
    """PyTorch's own mode for fake tensors hands it to the process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with private.fake_tensor_mode(), pytest.raises(private.CommunicatesError, match=r"c10d\.allreduce_"):
            dist.all_reduce(torch.empty(4))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "arguments",
    [
        lambda x: (torch.ops.aten.native_dropout.default, (x, 0.5, True)),
        lambda x: (torch.ops.aten.native_layer_norm.default, (x, [6], None, None, 1e-5)),
        lambda x: (torch.ops.aten.cat.default, ([torch.tensor([]), x],)),
    ],
)
def test_operators_of_every_block_are_remembered(arguments: Callable[..., Any]) -> None:
    mode = private.fake_tensor_mode()
    with mode:
        operator, given = arguments(torch.empty(4, 6))
        operator(*given)
        assert mode.recall(operator, given, {}) is not None


def test_lists_of_known_elements_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket of an optimizer is another list, of the same few kinds of parameters."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sqrt = torch.ops.aten._foreach_sqrt.default
    with private.fake_tensor_mode() as mode:
        one, other = torch.empty(5, 7), torch.empty(7)
        sqrt([one, other])
        with monkeypatch.context() as patched:
            patched.delattr(FakeTensorMode, "dispatch")
            given = [other, one, one, other, one]
            shown = [_shown(result, (one, other)) for result in sqrt(given)]
        assert mode.recall(sqrt, (given,), {}) is not None
    with FakeTensorMode():
        elements = [torch.empty(tensor.shape) for tensor in given]
        assert shown == [_shown(result, ()) for result in sqrt(elements)]


def test_what_is_computed_from_numbers_alone_or_written_to_is_not_remembered() -> None:
    mode = private.fake_tensor_mode()
    add, add_in_place = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    with mode:
        for operator, given in ((add, (torch.tensor(1.5), torch.tensor(2.0))), (add_in_place, (torch.tensor(1.5), 1))):
            assert operator(*given).item() >= 2.5
            assert mode.recall(operator, given, {}) is None


def test_a_tensor_over_a_storage_shares_it() -> None:
    with private.fake_tensor_mode():
        whole = torch.empty(12)
        part = private.tensor_over(whole.untyped_storage(), torch.float32, whole.device, 4, (2, 3), (3, 1))
        assert private.storage_key(part.untyped_storage()) == private.storage_key(whole.untyped_storage())
        assert (tuple(part.shape), part.stride(), part.storage_offset()) == ((2, 3), (3, 1), 4)
        assert part.device == whole.device
        assert not part._is_view()


@pytest.mark.parametrize("view", [lambda x: x.view(-1), lambda x: x[2:], torch.Tensor.detach, torch.Tensor.t])
def test_a_view_of_freed_memory_does_not_bring_it_back(view: Callable[..., Any]) -> None:
    """`resize_(0)` of a storage frees what a model will fill again later; who shows it meanwhile allocates nothing."""
    with private.fake_tensor_mode():
        whole = torch.empty(4, 6)
        view(whole)
        whole.untyped_storage().resize_(0)
        shown = view(whole)
        again = private.tensor_over(whole.untyped_storage(), torch.float32, whole.device, 0, (4, 6), (6, 1))
        assert whole.untyped_storage().nbytes() == again.untyped_storage().nbytes() == 0
        whole.untyped_storage().resize_(96)
        assert shown.untyped_storage().nbytes() == 96


def test_what_is_remembered_gives_the_results_again() -> None:
    add = torch.ops.aten.add.Tensor
    with private.fake_tensor_mode() as mode:
        given = torch.empty(4, 6), torch.empty(4, 6)
        result = add(*given)
        known = mode.recall(add, given, {})
        assert isinstance(known, private.Remembered)
        assert _shown(known.again(mode, given), given) == _shown(result, given)
