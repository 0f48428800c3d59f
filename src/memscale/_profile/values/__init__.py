"""Values for integers, shapes for floats: what a fake step decides by indices, masks and lengths is followed.

A fake tensor has no values, so a model that looks at one (`.item()`, `nonzero`, a boolean mask as an index, a list of
lengths) stops there. Most such values are integers that come from the batch or from constants: they are small, and
computing them costs next to nothing. While `Values` is active, such tensors carry a real CPU tensor beside their shape,
operators on them run twice (for the shape, and for the values), and questions are answered from the real one. Bytes are
counted by the fake tensors alone. Floats carry values only where they are small and made of constants or integers.

What has no value, and what is done about it:

- **Random draws** (LayerDrop, stochastic depth) decide how deep a step is, and a plan must hold for the worst draw. A
  small uniform draw is therefore always the highest number, also one of Python's or NumPy's global generator; where the
  step asks for a draw, the rehearsal tries one in the middle and the lowest, too, and keeps what peaks highest.
  A draw of another distribution has no worst: as a mask it shows everything, any other question about it is refused.
- **Choices by score** (`topk`, `argmax`, `sort` of floats: the router of a mixture of experts) are assumed: every
  candidate is chosen at least once, so that every expert gets a gradient, and all other rows choose the first ones, so
  that one expert is as full as it can be.
- **Masks made of floats**, used as an index: every element is chosen, which is the most that can be.
- **`isnan` and `isinf`** are false.
- Any other float that is asked for its value: the question is refused, as fake tensors do.

Values of the batch that were asked for are remembered (`Values.asked`): another batch of the same shapes may be another
step.

NOTE [values alias as tensors do]: a view of a tensor with values carries the same view of its values, and an operator
in place runs in place on them. Where the new contents are not known, everything that shares the memory loses its
values, through the `Cell` that its storage holds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from memscale._profile.device_kernels import FAKE_KERNELS
from memscale._profile.operator_costs import tensors_of
from memscale._profile.values.assumed import ASSUMPTIONS, SHAPED_BY_VALUES
from memscale._profile.values.carried import (
    MAX_INTEGERS,
    Cell,
    Value,
    attach,
    forget_written,
    limit,
    set_value,
    spared,
    value_of,
)
from memscale._profile.values.draws import DRAWS, HIGHEST_DRAW, is_luck
from memscale._torch import private
from memscale._torch.interception import replaced_in_this_thread

logger = logging.getLogger("memscale")

SEED = 0
"""Draws that decide nothing are the same in every rehearsal."""

_aten = torch.ops.aten


@private.without_compiler
class Values(TorchDispatchMode):
    """Computes values beside shapes, and answers questions about them, above a mode of fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.share = HIGHEST_DRAW
        """The number that every uniform draw gives."""
        self.seed = SEED
        self.was_draw_asked = False
        """A decision of the step hung on a uniform random number."""
        self.was_host_asked = False
        """Numbers came from Python's or NumPy's generator in another way than those that are put in our hands."""
        self.asked: set[str] = set()
        """The inputs whose values decided something."""
        self._is_off = False

    @contextlib.contextmanager
    def unasked(self) -> Iterator[None]:
        """Inside, nobody asks for values, and none are computed."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator of PyTorch's own has given this; all tensors are fake, and no mode has seen it."""
        if self._is_off:
            return
        tensors = tensors_of((*args, *kwargs.values()))
        if _is_plain(func) and any("_memscale_value" not in vars(tensor) for tensor in tensors):
            if func._schema.is_mutable:
                forget_written(func, args, kwargs)
        else:
            with private.without_function_modes():
                self._note(func, args, kwargs, result, [value_of(tensor) for tensor in tensors])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_off or func.namespace != "aten":
            return func(*args, **kwargs)
        args, kwargs = spared(func, args, kwargs)
        values = [value_of(tensor) for tensor in tensors_of((*args, *kwargs.values()))]
        try:
            result = FAKE_KERNELS.get(func, func)(*args, **kwargs)
        except private.data_dependent_errors():
            answer = self._answer(func, args, kwargs, values)
            if answer is NotImplemented:
                raise
            return answer
        self._note(func, args, kwargs, result, values)
        return result

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, values: list[Value | None]
    ) -> None:
        """What the operator, which has given this, makes of values."""
        if (None not in values or func in FROM_SHAPES) and self._follow(func, args, kwargs, result, values):
            return
        if func._schema.is_mutable:
            forget_written(func, args, kwargs)
        elif func in ASSUMPTIONS:
            ASSUMPTIONS[func](result, *args, **kwargs)

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, values: list[Value | None]
    ) -> bool:
        """The operator once more, on values; whether its results carry them now."""
        results = tensors_of([result])
        if func in _LOGIC and values and all(value and _is_uniform(value.real) for value in values):
            return self._follow_uniform(func, args, results[0], values)
        # Floats made of known numbers are few (masks, rotary tables); zeros and the like are as many as gradients.
        is_derived = bool(values) and func not in FROM_SHAPES
        limits = [MAX_INTEGERS if is_derived else limit(tensor) for tensor in results]
        is_large = any(tensor.numel() > limit for tensor, limit in zip(results, limits, strict=True))
        if not results or func in _RESHAPING or is_large:
            return False
        try:
            real = self._compute(func, args, kwargs)
        except Exception as error:  # the CPU has no such kernel, or an assumed index is out of range
            logger.debug("no values for %s: %s", func, str(error))
            return False
        cell = Cell(is_drawn=func in DRAWS, is_lucky=is_luck(func))
        attach(results, tensors_of([real]), [value for value in values if value], cell)
        return True

    def _follow_uniform(
        self, func: Any, args: tuple[Any, ...], result: torch.Tensor, values: list[Value | None]
    ) -> bool:
        """Where every element is the same, one of them is enough."""
        with private.real_tensors():
            scalars = [value.real.as_strided((), ()) if value else None for value in values]
            cell = Cell()
            cell.take_from([value.cell for value in values if value])
            set_value(result, func(*scalars, *args[len(scalars) :]).expand(tuple(result.shape)), cell)
        return True

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Value | None]) -> Any:
        """An operator whose result, or its shape, depends on values."""
        known = [value for value in values if value]
        is_luck = any(value.cell.is_lucky for value in known)
        for value in known:
            self.ask(value)
        if None in values or is_luck:
            answer = SHAPED_BY_VALUES[func](func, *args, **kwargs) if func in SHAPED_BY_VALUES else NotImplemented
            if is_luck and answer is NotImplemented:
                raise NotImplementedError("the step is decided by a random number of which no worst case is known")
            return answer
        real = self._compute(func, args, kwargs)
        device = tensors_of((*args, *kwargs.values()))[0].device
        fakes = tree_map(lambda leaf: _empty_like(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, real)
        attach(tensors_of([fakes]), tensors_of([real]), known, Cell())
        return fakes

    def ask(self, value: Value) -> None:
        """These contents decide something. What is there by luck is not known from here on."""
        self.was_draw_asked |= value.cell.is_drawn
        self.asked |= value.cell.origins
        if value.cell.is_lucky:
            value.cell.is_known = False

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with private.real_tensors_only():
            real_args = tuple(map(_real, args))
            real_kwargs = {name: _real(value) for name, value in kwargs.items()}
            if func in DRAWS:
                return DRAWS[func](self.share, func, real_args, real_kwargs)
            result = func(*real_args, **real_kwargs)
            if func in _EMPTY:  # what lies in fresh memory must not decide anything
                result.zero_()
            return result


def _real(leaf: Any) -> Any:
    """An argument for the computation on values: on the CPU, without the caller's generator, which must not move."""
    if isinstance(leaf, list | tuple):
        return type(leaf)(map(_real, leaf))
    if isinstance(leaf, torch.Tensor):
        value = value_of(leaf)  # none: the operator reads the shape alone
        return torch.zeros((), dtype=leaf.dtype).expand(tuple(leaf.shape)) if value is None else value.real
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return None if isinstance(leaf, torch.Generator) else leaf


def _empty_like(real: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tuple(real.shape), real.stride(), dtype=real.dtype, device=device)


def _is_uniform(real: torch.Tensor) -> bool:
    return real.numel() > 1 and not any(real.stride())


@functools.cache
def _is_plain(func: Any) -> bool:
    """Whether an operator does nothing special here, as long as one of its arguments has no value."""
    return func.namespace == "aten" and not (func in FAKE_KERNELS or func in FROM_SHAPES or func in ASSUMPTIONS)


class Recollection:
    """Knows what operators give on a stage of fake tensors; `values` are computed beside them, if any are."""

    def __init__(self, mode: Any, values: Values | None = None) -> None:
        self._mode, self._values = mode, values

    def find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> private.Remembered | None:
        if self._values is not None and func in FAKE_KERNELS:
            return None
        known: private.Remembered | None = self._mode.recall(func, args, kwargs)
        return known

    def again(self, known: private.Remembered, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = known.again(self._mode, args)
        if self._values is not None:
            self._values.note(func, args, kwargs, result)
        return result


_EMPTY = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
FROM_SHAPES = frozenset(
    (
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.zeros_like.default,
        _aten.new_zeros.default,
        _aten.ones_like.default,
        _aten.new_ones.default,
        _aten.full_like.default,
        _aten.new_full.default,
        _aten.rand_like.default,
    )
)
"""Operators that read the shape of their argument, not its contents."""
_LOGIC = frozenset(
    (
        _aten.mul.Tensor,
        _aten.logical_not.default,
        _aten.logical_and.default,
        _aten.logical_or.default,
        _aten.bitwise_not.default,
        _aten.bitwise_and.Tensor,
        _aten.bitwise_or.Tensor,
        _aten.any.default,
        _aten.all.default,
    )
)
"""Operators that make equal elements of equal elements, or the element itself."""
_RESHAPING = frozenset((_aten.resize_.default, _aten.set_.source_Storage_storage_offset, _aten.set_.source_Tensor))
"""Operators that give a tensor other memory."""


@contextlib.contextmanager
def readable(values: Values) -> Iterator[None]:
    """`tensor.numpy()`, `numpy.asarray(tensor)` and `f"{tensor}"` give what a fake tensor carries."""
    fake_tensor = private.fake_tensor_class()
    unreadable = torch.Tensor.numpy

    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        value = value_of(tensor)
        if value is not None:
            values.ask(value)
        if value is not None and value.cell.is_lucky:
            raise NotImplementedError("the step is decided by a random number of which no worst case is known")
        if value is None:
            return unreadable(tensor, *args, **kwargs)
        with private.real_tensors():
            return value.real.numpy(*args, **kwargs).copy()

    def array(tensor: torch.Tensor, dtype: Any = None, **_: Any) -> Any:
        return numpy(tensor) if dtype is None else numpy(tensor).astype(dtype)

    def text(tensor: torch.Tensor, form: str) -> str:
        value = value_of(tensor)
        if value is None or tensor.dim():
            return object.__format__(tensor, form)
        return format(numpy(tensor).item(), form)

    with replaced_in_this_thread(fake_tensor, __format__=text, numpy=numpy, __array__=array):
        yield
