"""Says when a PyTorch release changes what `_torch/private/storages.py` relies on."""

from __future__ import annotations

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
