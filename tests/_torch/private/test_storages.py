"""Says when a PyTorch release changes what `_torch/private/storages.py` relies on."""

from __future__ import annotations

from typing import Any

import torch

from memscale._torch import private


def test_storage_key_is_one_for_all_views() -> None:
    tensor, other = torch.randn(4, 4), torch.randn(4)
    views = (tensor, tensor[1:], tensor.t(), tensor.detach())
    assert len({private.storage_key(view.untyped_storage()) for view in views}) == 1
    assert private.storage_key(other.untyped_storage()) != private.storage_key(tensor.untyped_storage())


def test_storages_keep_their_python_object_alive_while_they_live() -> None:
    """`LiveBytes` hangs a weak reference on the storage's Python object; it must die with the storage, not before."""
    import weakref

    tensor = torch.ones(3)
    reference = weakref.ref(tensor.untyped_storage())
    view = tensor[1:]
    del tensor
    assert reference() is not None
    del view
    assert reference() is None


def test_a_storage_says_how_many_hold_it() -> None:
    tensor = torch.ones(4)
    alone = private.num_holders(tensor.untyped_storage())
    view = tensor[:2]
    assert private.num_holders(tensor.untyped_storage()) == alone + 1
    del view
    assert private.num_holders(tensor.untyped_storage()) == alone == private.NUM_HOLDERS_IN_DISPATCH


def test_a_tensor_over_a_storage_is_no_view() -> None:
    base = torch.arange(6.0)
    over = private.tensor_over(base.untyped_storage(), base.dtype, base.device, 2, (2, 2), (2, 1))
    assert torch.equal(over, base[2:].view(2, 2))
    assert over._base is None
    with private.fake_tensor_mode():
        fake = torch.empty(6)
        shown = private.tensor_over(fake.untyped_storage(), fake.dtype, fake.device, 2, (2, 2), (2, 1))
        assert private.storage_key(shown.untyped_storage()) == private.storage_key(fake.untyped_storage())


def test_a_wrapper_has_the_shape_of_another_tensor_and_no_memory() -> None:
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    geometry = torch.empty(4, 6, dtype=torch.float16)[1:, ::2]
    empty = private.wrapper_tensor(Empty, geometry, geometry.device)
    assert (empty.shape, empty.stride(), empty.dtype) == (geometry.shape, geometry.stride(), geometry.dtype)
    assert empty.untyped_storage().nbytes() == 0
