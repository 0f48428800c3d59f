"""Tells the card which bytes every operator reads and writes, on which stream.

The card sees copies by itself, and who has waited for whom from the events that torch records. A kernel's memory it
cannot see: here every operator of torch reports its tensors after it was launched.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from emucuda._control import native


@contextlib.contextmanager
def watch_races() -> Iterator[None]:
    """Report what operators touch for the rest of the block, backward included.

        with emucuda.watch_races():
            model(x).sum().backward()
        assert not emucuda.take_reports()

    The process must have been started with the setting `races`.
    """
    with _Accesses():
        yield


class _Accesses(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        card = native()
        work = _work(card)
        results = func(*args, **(kwargs or {}))
        taken, given = _tensors((args, kwargs)), _tensors(results)
        on_device = any(tensor.is_cuda for tensor in (*taken, *given))
        touches = _work(card) != work if on_device else _touches(func)
        if not touches:
            return results  # a view, or an allocation
        written = _written(func, args, kwargs or {}) | {id(tensor) for tensor in given}
        name = func.name().encode()
        for tensor in {id(tensor): tensor for tensor in (*taken, *given)}.values():
            _tell(card, tensor, id(tensor) in written, name, on_device)
        return results


def _touches(func: Any) -> bool:
    """Whether an operator of the host reads or writes elements: no view, allocation or change of storage does."""
    is_view = any(given.alias_info is not None and not given.alias_info.is_write for given in func._schema.returns)
    return not is_view and not func.name().startswith(("aten::empty", "aten::new_empty", "aten::set_"))


def _work(card: Any) -> int:
    return card.emucuda_counter(b"launches") + card.emucuda_counter(b"copies")  # type: ignore[no-any-return]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and _is_plain(leaf)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """With an address of its own: neither fake nor a wrapper."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The identities of the tensors that the operator's schema says it writes to."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    changed = [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
    ]
    return {id(tensor) for tensor in _tensors(changed)}


def _tell(card: Any, tensor: torch.Tensor, writes: bool, name: bytes, on_device: bool) -> None:
    if not tensor.numel():
        return
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    bytes_spanned = span * tensor.itemsize
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
        card.emucuda_device_access(tensor.data_ptr(), bytes_spanned, writes, stream, name)
    elif not on_device and tensor.device.type == "cpu":
        # Pinned memory that an operator of the host touches. What a copy between host and device touches, the card
        # has seen itself, and it happens when the stream comes to it, not now.
        card.emucuda_host_access(tensor.data_ptr(), bytes_spanned, writes, name)
