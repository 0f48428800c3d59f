"""What a layer's forward writes past autograd (`.data`): to its inputs, or to what it has saved for backward.

PyTorch's own backward then uses what was written, without a word. A recompute would read inputs that are written to
already, and write to them once more; and neither a recompute nor an offload has what was written to a saved tensor. So
a layer whose code, or a function that it calls, names `.data` is watched in its first forward in each state of the
training flags, and refused where it does this. Buffers and tensors beside the model are not looked at here: they are
put back (module_state.py), as are parameters.

NOTE [what is held]: a layer may save more than its card has room for, and what is recomputed or offloaded is gone as
soon as its forward lets it go. To hold it until the forward is over would reserve memory that no plan has counted. So a
saved tensor is held only where the forward has asked for its `.data`, or gave it to another tensor that way; that is
seen, and others have no second name that autograd does not know of. What is still there when the forward is over is
compared in any case. Compiled code does not ask where it could be seen, so there all of it is held.

Known limits: a write from outside of the layer, or between forward and backward, leaves no trace that could be found
without reading all saved tensors again; nor is one seen that comes in a later forward for the first time, or from code
that does not name `.data`. docs/design/how_exact.md says so.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memscale._errors import MemScaleError
from memscale._torch import private
from memscale._torch.bit_sums import has_plain_memory, sums_of_bits
from memscale._torch.named_in_code import code_reaches_any


def may_write_silently(module: nn.Module) -> bool:
    """Whether the code of the module, of its parts, or a function that these call may write past autograd."""
    return code_reaches_any(module, ("data",))


def is_watched_here() -> bool:
    """Whether tensors have values that can be compared: in a rehearsal they have none."""
    return private.active_fake_mode() is None


class SilentWrites:
    """Watches one forward of a layer. See NOTE [what is held]."""

    def __init__(
        self, module: nn.Module, module_fqn: str, inputs: Iterable[Any] = (), apart: Collection[int] = ()
    ) -> None:
        """`inputs`: the tensors that a recompute reads; `apart`: the storages that are not looked at."""
        self._module_fqn = module_fqn
        self._apart = apart
        inputs = [each for each in inputs if _can_be_summed(each)]
        self._inputs = [_Input(each, bits) for each, bits in zip(inputs, sums_of_bits(inputs), strict=True)]
        self._saved: list[_Saved] = []
        self._named: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that have a second name by `.data`."""
        self._holds_all = any(map(private.is_compiled, module.modules()))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the module computes."""
        with contextlib.nullcontext() if self._holds_all else _SecondNames(self._note_second_name, self._note_moved):
            yield

    def saved(self, tensor: torch.Tensor, packed: Any = None) -> None:
        """Autograd saves this tensor, and keeps `packed` for it."""
        with private.without_function_modes():
            if not _can_be_summed(tensor) or private.storage_key(tensor.untyped_storage()) in self._apart:
                return
            saved = _Saved(tensor, packed)
            named = self._named.get(saved.key)
            if self._holds_all or (named is not None and named() is not None):
                saved.hold()
            self._saved.append(saved)

    def _note_second_name(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return
        if private.inside_functional_transform():  # its tensors show no memory, and autograd saves others
            return
        storage = tensor.untyped_storage()
        key = private.storage_key(storage)
        self._named[key] = weakref.ref(storage)
        for saved in self._saved:
            if saved.key == key:
                saved.hold()

    def _note_moved(self, tensor: Any) -> None:
        """This tensor is given other memory. Where an operator has saved the tensor itself, its backward uses that; one
        that has saved its own result keeps what it had."""
        for saved in self._saved:
            saved.is_moved = saved.is_moved or (saved.tensor() is tensor and not saved.is_result)

    def refuse(self) -> None:
        """Raise if the forward, which is over, has written past autograd to what its recompute needs."""
        inputs, self._inputs = self._inputs, []
        if any(each.is_elsewhere() for each in inputs) or _written(inputs):
            raise MemScaleError(self._refusal("to its input, so it cannot be computed again"))
        if self.overwritten():
            raise MemScaleError(self.refusal_of_saved())

    def overwritten(self) -> list[Any]:
        """What autograd keeps for the tensors that the forward, which is over, has saved and written to."""
        saved, self._saved, self._named = self._saved, [], {}
        written = {id(each) for each in _written(saved)}
        return [each.packed for each in saved if each.is_moved or id(each) in written]

    def refusal_of_saved(self) -> str:
        return self._refusal(
            "to a tensor that it has saved for backward, where plain PyTorch would use what was written"
        )

    def _refusal(self, where: str) -> str:
        return (
            f"{self._module_fqn} writes past autograd (.data) {where}: leave it out of checkpointing, offloading and "
            "streaming, or let it work on a copy"
        )


class _SecondNames(TorchFunctionMode):
    """Sees each `.data` that is read or set: two tensors then share memory and no version counter."""

    def __init__(self, note: Callable[[Any], None], note_moved: Callable[[Any], None]) -> None:
        super().__init__()
        self._note, self._note_moved = note, note_moved

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ_DATA:
            with private.without_function_modes():
                self._note(args[0])
        elif func == _SET_DATA:
            with private.without_function_modes():
                self._note(args[1])
                self._note_moved(args[0])
        return func(*args, **(kwargs or {}))


_DATA: Any = torch.Tensor.data
_READ_DATA, _SET_DATA = _DATA.__get__, _DATA.__set__


class _Input:
    """An input as it was when the forward began. The caller holds it anyway."""

    def __init__(self, tensor: torch.Tensor, bits: int) -> None:
        self._tensor, self.bits = tensor, bits
        self._version = tensor._version
        self._key = private.storage_key(tensor.untyped_storage())

    def is_elsewhere(self) -> bool:
        """Whether it was given other memory, and autograd was not told."""
        return self._is_as_told() and private.storage_key(self._tensor.untyped_storage()) != self._key

    def now(self) -> torch.Tensor | None:
        return self._tensor if self._is_as_told() else None

    def _is_as_told(self) -> bool:
        return self._tensor._version == self._version


class _Saved:
    """A saved tensor as it was then. Its memory goes when others let it go, unless `hold` was called before."""

    def __init__(self, tensor: torch.Tensor, packed: Any) -> None:
        self.packed = packed
        self.tensor = weakref.ref(tensor)
        node = private.node_of(tensor)
        self.is_result = node is not None and private.sequence_number(node) == private.next_sequence_number() - 1
        """Whether the operator that saves it has just made it."""
        self.is_moved = False
        self._witness = private.version_witness(tensor)
        self._version = tensor._version
        values = private.detach_with_version(tensor)
        values = values.conj() if values.is_conj() else values  # the bits that lie there
        self.bits = sums_of_bits([values])[0]
        storage = values.untyped_storage()
        self.key = private.storage_key(storage)
        self._storage, self._num_bytes = weakref.ref(storage), storage.nbytes()
        self._held: torch.UntypedStorage | None = None
        self._place = values.dtype, values.device, int(values.storage_offset()), tuple(values.shape), values.stride()

    def hold(self) -> None:
        self._held = self._storage()

    def now(self) -> torch.Tensor | None:
        """None: it is gone, or autograd was told of the write. Plain PyTorch raises then, and whoever keeps the tensor
        looks for that himself."""
        storage = self._storage()
        if storage is None or storage.nbytes() != self._num_bytes or self._witness._version != self._version:
            return None
        dtype, device, offset, shape, stride = self._place
        return private.tensor_over(storage, dtype, device, offset, shape, stride)


def _can_be_summed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and has_plain_memory(value) and value.numel() > 0 and not value.is_neg()


_Noted = TypeVar("_Noted", _Input, _Saved)


def _written(noted: list[_Noted]) -> list[_Noted]:
    """Those whose bits are others, while autograd was not told."""
    with private.real_tensors(), torch.no_grad():
        there = [(each, tensor) for each in noted if (tensor := each.now()) is not None]
    now = sums_of_bits([tensor for _, tensor in there])
    return [each for (each, _), bits in zip(there, now, strict=True) if bits != each.bits]
