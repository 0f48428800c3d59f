"""Answers for host code that decides by values on the device.

Kernels compute nothing on the emulated card (NOTE [kernels do nothing] in csrc/card.h), so a value that is read back is
whatever the memory held. Mostly that is harmless: a loss is logged as some number. But some code goes one way or
another by such a value, and takes other memory. `PINS` lists every such place that is known, and how it is answered.
What the original function allocates on its way to the question, the pinned one allocates as well, but for `nonzero`.

Not pinned, and so decided by chance: `item()` and `tolist()` in general, sizes that operators take from values
(`unique`, `bincount`, `repeat_interleave` without an output size), the routing of mixtures of experts.
"""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """One place that is answered for."""

    module: str
    """Applied as soon as this module has been imported."""
    name: str
    """The attribute of the module, or "Class.method"."""
    answer: str
    """What is answered, in words."""
    replace: Callable[[Any], Any]
    """Makes the pinned function of the original one."""


def _on_the_card(value: Any) -> bool:
    """A tensor whose values a kernel would have computed. Fake tensors and the host's have values of their own."""
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_cuda


def _never_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def find_packed_sequence_indices(position_ids: Any) -> Any:
        found = original(position_ids)
        return None if _on_the_card(position_ids) else found

    return find_packed_sequence_indices


def _never_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ignore_mask(padding_mask: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(padding_mask, *args, **kwargs)
        return original(None, *args, **kwargs) if _on_the_card(padding_mask) else answer

    return ignore_mask


def _always_finite(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _maybe_opt_step(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        for found_inf in optimizer_state["found_inf_per_device"].values():
            found_inf.item()  # the wait for the device stays
        return optimizer.step(*args, **kwargs)

    return _maybe_opt_step


def _scale_as_begun(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_scale(self: Any) -> Any:
        original(self)
        return self._init_scale if self.is_enabled() else 1.0

    return get_scale


def _selects_nothing(original: Any) -> Any:
    """`torch.ops.aten.nonzero` itself stays; its kernel for CUDA is replaced, which boolean indices call as well."""
    import torch

    def nonzero(tensor: Any) -> Any:
        return torch.empty((0, tensor.dim()), dtype=torch.int64, device=tensor.device)

    global _kernels  # a library's kernels live as long as it does
    _kernels = torch.library.Library("aten", "IMPL")
    _kernels.impl("nonzero", nonzero, "CUDA", allow_override=True)
    return original


def _none_ignored(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def num_ignored(is_ignored: Any) -> int:
        found: int = original(is_ignored)  # the sum is allocated, and waited for
        return 0 if _on_the_card(is_ignored) else found

    return num_ignored


def _unchanged(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def differ(tensor: Any, held: Any) -> bool:
        found: bool = original(tensor, held)  # the comparison is allocated, and waited for
        return found and not _on_the_card(tensor)

    return differ


def _same_sums(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sums_of(tensors: Any) -> list[int]:
        found = original(tensors)
        return [0 if _on_the_card(tensor) else bits for tensor, bits in zip(tensors, found, strict=True)]

    return sums_of


def _no_bits(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bits_of(tensor: Any) -> Any:
        return original(tensor)[:0]  # the copy is made, and waited for

    return bits_of


_kernels: Any = None

PINS = (
    Pin("torch", "nonzero", "nothing is nonzero; an index by a mask selects no rows", _selects_nothing),
    Pin(
        "torch.amp.grad_scaler",
        "GradScaler._maybe_opt_step",
        "all gradients are finite: every step is made",
        _always_finite,
    ),
    Pin("torch.amp.grad_scaler", "GradScaler.get_scale", "the scale is what it was at first", _scale_as_begun),
    Pin("transformers.masking_utils", "find_packed_sequence_indices", "a batch is not packed", _never_packed),
    Pin("transformers.masking_utils", "_ignore_causal_mask_sdpa", "a given padding mask masks nothing", _never_padded),
    Pin(
        "transformers.masking_utils",
        "_ignore_bidirectional_mask_sdpa",
        "a given padding mask masks nothing",
        _never_padded,
    ),
    Pin("memscale.techniques.tiling.head.sweep", "num_ignored", "all rows of a tiled loss count", _none_ignored),
    Pin("memscale.techniques.recompute.tensors_beside", "_differ", "no forward writes to a tensor beside", _unchanged),
    Pin(
        "memscale.techniques.offload.parameters.streaming", "_bits", "no forward writes to a streamed weight", _no_bits
    ),
    Pin("memscale._torch.bit_sums", "sums_of_bits", "nothing is written past autograd", _same_sums),
)


def install() -> None:
    """Pin what is imported from now on. `_inside.py` calls this before the program runs."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find a module, and pins it when it has been executed."""

    def __init__(self) -> None:
        self._waiting = {pin.module for pin in PINS}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        self._waiting.discard(fullname)  # so that the search below comes past here without an answer
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, original: importlib.abc.Loader) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._original.exec_module(module)
        for pin in PINS:
            if pin.module == module.__name__:
                _apply(pin, module)


def _apply(pin: Pin, module: ModuleType) -> None:
    *outer, name = pin.name.split(".")
    holder: Any = functools.reduce(getattr, outer, module)
    setattr(holder, name, pin.replace(getattr(holder, name)))
