"""A mode for fake tensors that remembers what operators make of shapes.

Relies on: `FakeTensorMode.dispatch`, the constructor of `FakeTensor` and what it puts into the tensor's `__dict__`,
`Tensor._make_subclass`, the tags and schemas of operators.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch._subclasses import fake_tensor

from memscale._torch.private.storages import storage_key


def fake_tensor_mode() -> Any:
    """Tensors without memory: shapes, dtypes, devices and strides propagate, values do not exist."""
    return _RememberingMode(allow_non_fake_inputs=True)


_MAX_MADE = 100_000
_META = torch.device("meta")
_LIFT = torch.ops.aten.lift_fresh.default


class CommunicatesError(Exception):
    """Something on fake tensors would have sent to other processes; says which operator."""


class _RememberingMode(fake_tensor.FakeTensorMode):
    """Remembers what operators make of shapes.

    PyTorch's mode does so, too, but looking up takes it longer than all else that a rehearsal does with an operator.
    """

    _made: ClassVar[dict[tuple[Any, ...], Remembered]] = {}
    """Results by operator and shapes of arguments; all modes share them, since nothing in them belongs to one mode."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # PyTorch's own memory makes two tensors of one that an operator gives twice, and takes long to ask.
        self.cache_enabled = False
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """What a new fake tensor has, by device. PyTorch sets it name by name, which takes longer than all else."""
        warns = self._allow_unsafe_data_ptr_access
        self._guard_data: Callable[[torch.Tensor], None] = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr if warns else torch._C._set_throw_on_mutable_data_ptr
        )

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # PyTorch's mode would let it out
            raise CommunicatesError(str(func))
        with torch._C.DisableTorchFunction():  # a question for a shape would go through everybody's modes
            key = _key_of(self, func, args, kwargs) if _depends_on_shapes(func) else None
            known = None if key is None else self._made.get(key)
            if known is not None:
                return known.again(self, args)
            if func is _LIFT and _is_number(args[0]):
                return self._lift(args[0])
            if key is not None and _writes_lists(func):
                self._made[key] = Remembered(None)
                return None
            if key is not None and _maps_lists(func):
                each = self._made_of_each(func, types, args, kwargs)
                if each is not None:
                    self._made[key] = known = Remembered(each)
                    return known.again(self, args)
            return self._run(key, func, types, args, kwargs)

    def _run(self, key: tuple[Any, ...] | None, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What PyTorch's mode gives, which is remembered under the key, if there is one."""
        result = super().dispatch(func, types, args, kwargs)
        made = NotImplemented if key is None else _describe(args, kwargs, result)
        if made is not NotImplemented and key is not None:
            if len(self._made) >= _MAX_MADE:
                self._made.clear()
            self._made[key] = Remembered(made)
        return result

    def _made_of_each(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> list[_Made | None] | None:
        """What an operator gives for each element of its lists, which are new in every bucket of an optimizer, while
        their elements are not; None where an element's is not remembered."""
        found: list[_Made | None] = []
        lengths = {len(arg) for arg in args if type(arg) in (list, tuple)}
        if len(lengths) != 1 or any(type(value) in (list, tuple) for value in kwargs.values()):
            return None
        for index in range(*lengths):
            one = tuple([arg[index]] if type(arg) in (list, tuple) else arg for arg in args)
            key = _key_of(self, func, one, kwargs)
            if key is None:
                return None
            if key not in self._made:
                self._run(key, func, types, one, kwargs)
            made = self._made[key].made if key in self._made else None
            if not isinstance(made, list) or len(made) != 1:
                return None
            found += made
        return found

    def recall(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Remembered | None:
        """What is remembered of an operator with such arguments; None: nothing is, or not all of it."""
        if not _depends_on_shapes(func):
            return None
        with torch._C.DisableTorchFunction():
            key = _key_of(self, func, args, kwargs)
        return None if key is None else self._made.get(key)

    def _lift(self, number: torch.Tensor) -> Any:
        """What `torch.tensor(0.0)` gives, the optimizer's counters, and `torch.tensor([])`, the beginning of a cache of
        keys and values. PyTorch's own way takes half a millisecond."""
        guard = torch._C._DisableTorchDispatch()
        try:
            hollow = torch.empty_strided(number.shape, number.stride(), dtype=number.dtype, device=_META)
            made = self.wrap(hollow, number.device)
            made.constant = number.clone()
        finally:
            del guard
        self.fake_tensor_converter.add_constant_storage_mapping(made)
        return made

    def over(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        device: torch.device,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> Any:
        """A tensor over the storage of another fake one, which is no view of it; modes above do not see it made."""
        guard = torch._C._DisableTorchDispatch()
        try:
            hollow = torch.empty(0, dtype=dtype, device=_META)
            return self.wrap(_placed(hollow, storage, offset, shape, stride), device)
        finally:
            del guard

    def wrap(self, hollow: torch.Tensor, device: torch.device) -> Any:
        """What `FakeTensor(self, hollow, device)` gives, for a tensor on the meta device that needs no gradient."""
        attributes = self._attributes.get(device)
        if attributes is None:
            made = fake_tensor.FakeTensor(self, hollow, device)
            self._attributes[device] = {name: value for name, value in vars(made).items() if name != "fake_mode"}
            return made
        fake = fake_tensor.FakeTensor
        made = torch.Tensor._make_subclass(fake, hollow, False, dispatch_device=True, device_for_backend_keys=device)
        self._guard_data(made)
        vars(made).update(attributes)
        made.fake_mode = self
        return made


@dataclasses.dataclass(slots=True)
class Remembered:
    """What an operator gives for arguments of some shapes."""

    made: _Made | tuple[_Made | None, ...] | list[_Made | None] | None
    notes: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    """What others have found out of the same operator with such arguments."""

    def again(self, mode: _RememberingMode, args: Any) -> Any:
        """The results for these arguments."""
        guard = torch._C._DisableTorchDispatch()
        try:
            made = self.made
            if made is None or isinstance(made, _Made):
                return None if made is None else made.again(mode, args)
            return type(made)([None if one is None else one.again(mode, args) for one in made])
        finally:
            del guard


_VALUES_DECIDE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


def _is_number(value: Any) -> bool:
    """Whether this is a real tensor on the host that holds one number or nothing at all, and has no graph."""
    is_plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
    if not is_plain or (value.dim() and (value.numel() or not value.is_contiguous())):
        return False
    return not (value.requires_grad or value.is_conj() or value.is_neg())


@functools.cache
def _writes_lists(func: Any) -> bool:
    """Whether an operator of many tensors writes to them and gives nothing: on fake ones it does nothing."""
    return func._schema.name.startswith("aten::_foreach_") and func._schema.is_mutable and not func._schema.returns


@functools.cache
def _maps_lists(func: Any) -> bool:
    """Whether an operator gives a list of new tensors, one for each element of its lists."""
    schema = func._schema
    if not schema.name.startswith("aten::_foreach_") or schema.is_mutable:
        return False
    return len(schema.returns) == 1 and str(schema.returns[0].type) == "List[Tensor]"


@functools.cache
def _depends_on_shapes(func: Any) -> bool:
    """Whether what an operator does on fake tensors is said by the shapes of its arguments."""
    if getattr(func, "namespace", "") != "aten" or not hasattr(func, "_schema"):
        return False
    name, arguments = func._schema.name, func._schema.arguments
    is_out = any(argument.is_out for argument in arguments)
    is_placing = any(word in name for word in ("resize", "set_", "lift", "_to_copy", "is_pinned", "pin_memory"))
    return not (is_out or is_placing or any(tag in func.tags for tag in _VALUES_DECIDE))


_PLAIN_TYPES = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def _key_of(mode: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What decides the result; None where that is more than shapes and plain values."""
    parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    constants: list[Any] = []
    if not _add_to_key(parts, mode, args, constants):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _add_to_key(parts, mode, (value,), constants):
            return None
    if constants and (func._schema.is_mutable or _are_all_constant((*args, *kwargs.values()))):
        return None
    return tuple(parts)


def _are_all_constant(values: Any) -> bool:
    """Whether an operator can be computed from the constants that its fake arguments carry. Where one carries none, the
    others are shapes like all else, unless they are written to."""
    for value in values:
        if type(value) in (list, tuple):
            if not _are_all_constant(value):
                return False
        elif type(value) is fake_tensor.FakeTensor and value.constant is None:
            return False
    return True


def _add_to_key(parts: list[Any], mode: Any, values: Any, constants: list[Any]) -> bool:
    """`constants` gets the tensors that carry one."""
    for value in values:
        kind = type(value)
        if kind is fake_tensor.FakeTensor:
            if value.fake_mode is not mode or value.layout is not torch.strided:
                return False
            if value.constant is not None:
                constants.append(value)
            parts.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device))
            parts.append((value.is_conj(), value.is_neg(), value.is_inference()))
        elif kind in _PLAIN_TYPES:
            parts.append(kind)
            parts.append(value)
        elif kind is list or kind is tuple:
            parts.append((kind, len(value)))
            if not _add_to_key(parts, mode, value, constants):
                return False
        else:
            return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """One tensor that an operator gives."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    same_as: int | None = None
    """The argument that it is."""
    view_of: int | None = None
    """The argument whose memory it shows."""

    def again(self, mode: _RememberingMode, args: Any) -> Any:
        if self.same_as is not None:
            return args[self.same_as]
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
        if self.view_of is not None:
            _placed(made, args[self.view_of].untyped_storage(), self.offset, self.shape, self.stride)
        return mode.wrap(made, self.device)


def _placed(
    hollow: torch.Tensor, storage: torch.UntypedStorage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """The tensor, which shows this storage from here on.

    `set_` makes a storage larger that does not hold what is shown. A view does not: of a storage that was freed by
    `resize_(0)` it shows nothing.
    """
    num_bytes = storage.nbytes()
    hollow.set_(storage, offset, shape, stride)
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)
    return hollow


def _share_memory(made: Sequence[_Made | None], results: Sequence[Any]) -> bool:
    """Whether two results lie in one memory that is new: an LSTM's backward gives one gradient for both biases."""
    pairs = zip(made, results, strict=True)
    fresh = [one for how, one in pairs if how is not None and how.same_as is None and how.view_of is None]
    return len({storage_key(one.untyped_storage()) for one in fresh}) < len(fresh)


def _keys_inside(args: Any, kwargs: dict[str, Any]) -> frozenset[int]:
    """The memory of arguments that are inside of lists, or are named."""
    inside = [one for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple) for one in arg]
    fakes = (one for one in (*inside, *kwargs.values()) if type(one) is fake_tensor.FakeTensor)
    return frozenset(storage_key(one.untyped_storage()) for one in fakes if one.layout is torch.strided)


def _describe(args: Any, kwargs: dict[str, Any], result: Any, inside: frozenset[int] | None = None) -> Any:
    """What is to be remembered of a result; NotImplemented where it cannot be made again from that.

    An operator of many tensors gives many, so what is `inside` of its arguments is looked for once.
    """
    if result is None:
        return None
    if isinstance(result, tuple | list):  # decompositions give tuples with names
        inside = _keys_inside(args, kwargs)
        made = [_describe(args, kwargs, one, inside) for one in result]
        if not all(one is None or isinstance(one, _Made) for one in made) or _share_memory(made, result):
            return NotImplemented
        return tuple(made) if isinstance(result, tuple) else made
    fake = fake_tensor.FakeTensor
    if type(result) is not fake or result.layout is not torch.strided:
        return NotImplemented  # what is sparse has no strides
    size, stride, offset = tuple(result.shape), result.stride(), result.storage_offset()
    facts = (size, stride, int(offset), result.dtype, result.fake_device)
    same = [index for index, arg in enumerate(args) if arg is result]
    if same:
        return _Made(*facts, same_as=same[0])
    is_plain = result.constant is None and not (result.requires_grad or result.is_conj() or result.is_neg())
    if not is_plain:
        return NotImplemented
    key = storage_key(result.untyped_storage())
    shown = [i for i, arg in enumerate(args) if type(arg) is fake and storage_key(arg.untyped_storage()) == key]
    if len(shown) == 1:
        return _Made(*facts, view_of=shown[0])
    if key in (_keys_inside(args, kwargs) if inside is None else inside):
        return NotImplemented
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else 0
    is_fresh = not shown and offset == 0 and result.untyped_storage().nbytes() == extent * result.itemsize
    return _Made(*facts) if is_fresh else NotImplemented
