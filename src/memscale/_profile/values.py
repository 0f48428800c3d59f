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
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from memscale._profile.device_kernels import FAKE_KERNELS
from memscale._profile.operator_costs import tensors_of
from memscale._torch import private
from memscale._torch.interception import replaced_in_this_thread

logger = logging.getLogger("memscale")

MAX_INTEGERS = 2**20
"""Integer and boolean tensors of at most so many elements carry values."""
MAX_FLOATS = 2**12
"""Floats too, if they are constants or buffers; what is computed from known numbers may be as large as integers."""
HIGHEST_DRAW, MIDDLE_DRAW, LOWEST_DRAW = 1.0 - 2.0**-10, 0.5, 2.0**-10
"""A number inside of the interval in every dtype: a probability of 0 or 1 stays certain."""
SEED = 0
"""Draws that decide nothing are the same in every rehearsal."""

_aten = torch.ops.aten


@dataclasses.dataclass(slots=True, eq=False)
class Cell:
    """What all values in one piece of memory have in common. See NOTE [values alias as tensors do]."""

    is_known: bool = True
    is_drawn: bool = False
    """Uniform random numbers are in them, of which the rehearsal tries several."""
    is_lucky: bool = False
    """Other random numbers are in them: they could as well be others."""
    origins: frozenset[str] = frozenset()
    """The inputs from whose values they were computed."""

    def take_from(self, others: Iterable[Cell]) -> None:
        """What was computed from others, or written with them, is as they are."""
        for other in others:
            self.is_drawn |= other.is_drawn
            self.is_lucky |= other.is_lucky
            self.origins |= other.origins


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """The contents of a fake tensor."""

    real: torch.Tensor
    cell: Cell


def keep_value(fake: torch.Tensor, real: torch.Tensor, origin: str | None = None) -> None:
    """Let a fake tensor carry the contents of the tensor that it was made from, if they are small.

    `origin`: the name of the input that it is.
    """
    if _is_small(real) and real.device.type != "meta" and real.layout is torch.strided:
        _set_value(fake, real.detach().to("cpu", copy=True), _cell_from(origin))


def assume_value(fake: torch.Tensor, number: int, origin: str | None = None) -> None:
    """Let a fake tensor of which nothing is known be this number everywhere, if it is small."""
    if _is_small(fake):
        with private.real_tensors():
            _set_value(fake, torch.full(tuple(fake.shape), number, dtype=fake.dtype), _cell_from(origin))


def _cell_from(origin: str | None) -> Cell:
    return Cell(origins=frozenset(() if origin is None else (origin,)))


def value_of(tensor: torch.Tensor) -> Value | None:
    """What a tensor carries; a real CPU tensor that meets fake ones (a table of the module) is its own value."""
    if private.is_fake(tensor):
        value: Value | None = tensor.__dict__.get("_memscale_value")
        if value is None or not value.cell.is_known or value.real.shape != tensor.shape:
            return None  # of a placeholder whose data was replaced (`parametrizations`): kernels trust shapes
        return value
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and _is_small(tensor):
        return _private_value(tensor)
    return None


_PRIVATE: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
"""Copies of the storages of real tensors, beside the storages themselves, so that none is taken for another."""
MAX_PRIVATE_BYTES = 1 << 24


def _private_value(tensor: torch.Tensor) -> Value | None:
    """NOTE [private values]: a rehearsal may write to what a model keeps beside its modules. It writes to a copy, one
    for all views of a storage; the user's memory is never written to."""
    storage = tensor.untyped_storage()
    if storage.nbytes() > MAX_PRIVATE_BYTES:
        return None
    key = private.storage_key(storage)
    with private.real_tensors():
        if key not in _PRIVATE:
            _PRIVATE[key] = (storage, storage.clone())
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(_PRIVATE[key][1], tensor.storage_offset(), tensor.size(), tensor.stride())
    return Value(copied, Cell())


@contextlib.contextmanager
def private_values() -> Iterator[None]:
    """Copies of real tensors live as long as one rehearsal. See NOTE [private values]."""
    _PRIVATE.clear()
    try:
        yield
    finally:
        _PRIVATE.clear()


def _set_value(fake: torch.Tensor, real: torch.Tensor, cell: Cell) -> None:
    fake.__dict__["_memscale_value"] = Value(real, cell)
    fake.untyped_storage().__dict__["_memscale_cell"] = cell


def _is_uniform(real: torch.Tensor) -> bool:
    return real.numel() > 1 and not any(real.stride())


def _cell_of(fake: torch.Tensor) -> Cell | None:
    """The cell of what lies in the same memory and has values; None where nothing does."""
    cell: Cell | None = fake.untyped_storage().__dict__.get("_memscale_cell")
    return cell


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _limit(tensor)


def _limit(tensor: torch.Tensor) -> int:
    return MAX_FLOATS if tensor.dtype.is_floating_point or tensor.dtype.is_complex else MAX_INTEGERS


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

    def leaves_alone(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether nothing is to be done here beside forgetting what is written to; all tensors are fake."""
        if self._is_off:
            return True
        if not _is_plain(func):
            return False
        tensors = tensors_of((*args, *kwargs.values()))
        return any("_memscale_value" not in vars(tensor) for tensor in tensors)

    def note_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The operator ran, and nothing is known of what it has written."""
        if not self._is_off and func._schema.is_mutable:
            _forget_written(func, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_off or func.namespace != "aten":
            return func(*args, **kwargs)
        args, kwargs = _spared(func, args, kwargs)
        values = [value_of(tensor) for tensor in tensors_of((*args, *kwargs.values()))]
        try:
            result = FAKE_KERNELS.get(func, func)(*args, **kwargs)
        except private.data_dependent_errors():
            answer = self._answer(func, args, kwargs, values)
            if answer is NotImplemented:
                raise
            return answer
        if (None not in values or func in FROM_SHAPES) and self._follow(func, args, kwargs, result, values):
            return result
        if func._schema.is_mutable:
            _forget_written(func, args, kwargs)
        elif func in ASSUMPTIONS:
            ASSUMPTIONS[func](result, *args, **kwargs)
        return result

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, values: list[Value | None]
    ) -> bool:
        """The operator once more, on values; whether its results carry them now."""
        results = tensors_of([result])
        if func in _LOGIC and values and all(value and _is_uniform(value.real) for value in values):
            return self._follow_uniform(func, args, results[0], values)
        # Floats made of known numbers are few (masks, rotary tables); zeros and the like are as many as gradients.
        is_derived = bool(values) and func not in FROM_SHAPES
        limits = [MAX_INTEGERS if is_derived else _limit(tensor) for tensor in results]
        is_large = any(tensor.numel() > limit for tensor, limit in zip(results, limits, strict=True))
        if not results or func in _RESHAPING or is_large:
            return False
        try:
            real = self._compute(func, args, kwargs)
        except Exception as error:  # the CPU has no such kernel, or an assumed index is out of range
            logger.debug("no values for %s: %s", func, str(error))
            return False
        cell = Cell(is_drawn=func in _DRAWS, is_lucky=_is_luck(func))
        _attach(results, tensors_of([real]), [value for value in values if value], cell)
        return True

    def _follow_uniform(
        self, func: Any, args: tuple[Any, ...], result: torch.Tensor, values: list[Value | None]
    ) -> bool:
        """Where every element is the same, one of them is enough."""
        with private.real_tensors():
            scalars = [value.real.as_strided((), ()) if value else None for value in values]
            cell = Cell()
            cell.take_from(value.cell for value in values if value)
            _set_value(result, func(*scalars, *args[len(scalars) :]).expand(tuple(result.shape)), cell)
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
        _attach(tensors_of([fakes]), tensors_of([real]), known, Cell())
        return fakes

    def ask(self, value: Value) -> None:
        """These contents decide something. What is there by luck is not known from here on."""
        self.was_draw_asked |= value.cell.is_drawn
        self.asked |= value.cell.origins
        if value.cell.is_lucky:
            value.cell.is_known = False

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with private.real_tensors():
            real_args, real_kwargs = tree_map(_real, (args, kwargs))
            if func in _DRAWS:
                return _DRAWS[func](self.share, func, real_args, real_kwargs)
            result = func(*real_args, **real_kwargs)
            if func in _EMPTY:  # what lies in fresh memory must not decide anything
                result.zero_()
            return result


@functools.cache
def _is_plain(func: Any) -> bool:
    """Whether an operator does nothing special here, as long as one of its arguments has no value."""
    return func.namespace == "aten" and not (func in FAKE_KERNELS or func in FROM_SHAPES or func in ASSUMPTIONS)


class Recollection:
    """Knows what operators give on a stage of fake tensors; `values` are computed beside them, if any are."""

    def __init__(self, mode: Any, values: Values | None = None) -> None:
        self._mode, self._values = mode, values

    def find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> private.Remembered | None:
        known: private.Remembered | None = self._mode.recall(func, args, kwargs)
        if known is None or self._values is None or self._values.leaves_alone(func, args, kwargs):
            return known
        return None

    def again(self, known: private.Remembered, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._values is not None:
            self._values.note_written(func, args, kwargs)
        return known.again(self._mode, args)


def _real(leaf: Any) -> Any:
    """An argument for the computation on values: on the CPU, without the caller's generator, which must not move."""
    if isinstance(leaf, torch.Tensor):
        value = value_of(leaf)  # none: the operator reads the shape alone
        return torch.zeros((), dtype=leaf.dtype).expand(tuple(leaf.shape)) if value is None else value.real
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return None if isinstance(leaf, torch.Generator) else leaf


def _empty_like(real: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tuple(real.shape), real.stride(), dtype=real.dtype, device=device)


def _attach(fakes: list[torch.Tensor], reals: list[torch.Tensor], inputs: list[Value], new: Cell) -> None:
    """Results carry their values. Views share the cell of what they are views of; others have one like `new`."""
    new.take_from(value.cell for value in inputs)
    given = {private.storage_key(value.real.untyped_storage()) for value in inputs}
    for fake, real in zip(fakes, reals, strict=True):
        if not private.is_fake(fake):
            continue
        cell = _cell_of(fake)
        is_view = private.storage_key(real.untyped_storage()) in given
        if cell is None:
            with private.real_tensors():
                own = real.clone() if is_view else real
            _set_value(fake, own, dataclasses.replace(new))
        elif is_view:
            cell.take_from([new])
            _set_value(fake, real, cell)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What an operator writes to."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    is_write = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    return tensors_of(named.get(argument.name) for argument, write in zip(arguments, is_write, strict=True) if write)


def _spared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with copies in the place of real tensors that would be written to: a counter of a Python module,
    for one."""
    real = {id(each) for each in _written(func, args, kwargs) if not private.is_fake(each)}
    if not real:
        return args, kwargs
    with private.real_tensors():
        spared: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
            lambda leaf: leaf.clone() if id(leaf) in real else leaf, (args, kwargs)
        )
    return spared


def _forget_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What an operator has written to holds something unknown now."""
    for tensor in _written(func, args, kwargs):
        cell = _cell_of(tensor) if private.is_fake(tensor) else None
        if cell is not None:
            cell.is_known = False


# ---- what nothing is known of


def _assume_highest(result: Any, scores: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> None:
    _choose(result[1], scores.shape[dim] if scores.dim() else 1, dim, k)


def _assume_sorted(result: Any, scores: torch.Tensor, dim: int = -1, *_: Any, **kwargs: Any) -> None:
    dim = kwargs.get("dim", dim)
    num_candidates = scores.shape[dim] if scores.dim() else 1
    _choose(result[1], num_candidates, dim, num_candidates)


def _assume_best(result: Any, scores: torch.Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
    """The index of a maximum or minimum, with its value or alone."""
    indices = result if isinstance(result, torch.Tensor) else result[1]
    _choose(indices, scores.numel() if dim is None or not scores.dim() else scores.shape[dim], None, 1)


def _assume_drawn(result: torch.Tensor, chances: torch.Tensor, num_samples: int, *_: Any, **__: Any) -> None:
    if num_samples <= chances.shape[-1]:
        _choose(result, chances.shape[-1], -1, num_samples)


def _choose(indices: torch.Tensor, num_candidates: int, dim: int | None, num_chosen: int) -> None:
    """Every candidate is chosen by some row, as long as there are rows; all other rows choose the first ones."""
    if not _is_small(indices) or not indices.numel():
        return
    shape = list(indices.shape)
    with private.real_tensors():
        starts = torch.arange(indices.numel() // num_chosen) * num_chosen
        starts = torch.where(starts < num_candidates, starts.clamp(max=num_candidates - num_chosen), 0)
        chosen = starts.unsqueeze(1) + torch.arange(num_chosen)
        if dim is not None and shape:
            last = [*shape[: dim % len(shape)], *shape[dim % len(shape) + 1 :], num_chosen]
            chosen = chosen.reshape(last).movedim(-1, dim)
        _set_value(indices, chosen.reshape(shape).contiguous(), Cell())


def _assume_false(result: torch.Tensor, *_: Any, **__: Any) -> None:
    with private.real_tensors():
        _set_value(result, torch.zeros((), dtype=result.dtype).expand(tuple(result.shape)), Cell())


def _assume_finite(result: torch.Tensor, number: torch.Tensor, other: Any, *_: Any, **__: Any) -> None:
    """`x == x` and `x != inf`: this is how it is asked whether a number is finite."""
    if number is other or (isinstance(other, float) and other == math.inf):
        with private.real_tensors():
            _set_value(result, torch.ones((), dtype=result.dtype).expand(tuple(result.shape)), Cell())


ASSUMPTIONS: dict[Any, Callable[..., None]] = {
    _aten.topk.default: _assume_highest,
    _aten.sort.default: _assume_sorted,
    _aten.sort.stable: _assume_sorted,
    _aten.max.dim: _assume_best,
    _aten.min.dim: _assume_best,
    _aten.argmax.default: _assume_best,
    _aten.argmin.default: _assume_best,
    _aten.multinomial.default: _assume_drawn,
    _aten.isnan.default: _assume_false,
    _aten.isinf.default: _assume_false,
    _aten.eq.Tensor: _assume_finite,
    _aten.ne.Scalar: _assume_finite,
}
"""Operators whose integer results say which float is the highest, or whether one is broken."""


def _found(func: Any, mask: torch.Tensor) -> torch.Tensor:
    """`nonzero` of an unknown mask: everything is found, and the mask is true from here on."""
    assume_value(mask, 1)
    found = torch.empty((mask.numel(), mask.dim()), dtype=torch.long, device=mask.device)
    if _is_small(found):
        with private.real_tensors():
            _set_value(found, torch.ones(tuple(mask.shape), dtype=torch.bool).nonzero(), Cell())
    return found


def _indexed(func: Any, source: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """An index with masks: as many rows as they show, or may show at most."""
    numbers: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            numbers.append(index)
        else:
            shape = (_num_chosen(index),)
            numbers += [torch.empty(shape, dtype=torch.long, device=source.device) for _ in range(index.dim())]
    result: torch.Tensor = func(source, numbers)
    return result


def _selected(func: Any, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    num_repeats = torch.broadcast_shapes(source.shape, mask.shape).numel() // max(1, mask.numel())
    return torch.empty((_num_chosen(mask) * num_repeats,), dtype=source.dtype, device=source.device)


def _num_chosen(mask: torch.Tensor) -> int:
    value = value_of(mask)
    if value is None:
        assume_value(mask, 1)
        return mask.numel()
    with private.real_tensors():
        return int(value.real.count_nonzero())


def _ctc_loss(func: Any, scores: torch.Tensor, targets: torch.Tensor, *lengths: Any, **_: Any) -> Any:
    """The loss of each sequence, and a table over time and the longest target with a blank around every token."""
    value = value_of(lengths[1])
    if value is None:
        return NotImplemented
    with private.real_tensors():
        longest = max(value.real.tolist(), default=0)
    num_steps, num_sequences = scores.shape[:2]
    return scores.new_empty((num_sequences,)), scores.new_empty((num_sequences, num_steps, 2 * longest + 1))


SHAPED_BY_VALUES: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _found,
    _aten.index.Tensor: _indexed,
    _aten.masked_select.default: _selected,
    _aten._ctc_loss.Tensor: _ctc_loss,
}
"""What is answered where not all arguments are known; of a mask of which nothing is known, the most there can be."""

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


# ---- random draws


def _is_luck(func: Any) -> bool:
    """Whether the operator draws random numbers that a rehearsal cannot choose."""
    return func not in _DRAWS and torch.Tag.nondeterministic_seeded in func.tags


def _uniform(share: float, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`rand` and `rand_like`."""
    is_like = isinstance(args[0], torch.Tensor)
    dtype = kwargs.get("dtype") or (args[0].dtype if is_like else torch.get_default_dtype())
    return torch.full(args[0].shape if is_like else args[0], share, dtype=dtype)


def _uniform_in_place(share: float, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    start, end = args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0
    drawn: torch.Tensor = args[0].fill_(start + (end - start) * share)
    return drawn


def _coin(share: float, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`bernoulli` in its forms: what may fall either way falls on 1, or on 0."""
    chances = args[0] if func is _aten.bernoulli.default else torch.as_tensor(args[1] if len(args) > 1 else 0.5)
    fallen = (chances > 0) if share >= MIDDLE_DRAW else (chances >= 1)
    target: torch.Tensor = args[0] if func._schema.is_mutable else torch.empty_like(args[0])
    return target.copy_(fallen.expand(target.shape))


_DRAWS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.rand.default: _uniform,
    _aten.rand.generator: _uniform,
    _aten.rand_like.default: _uniform,
    _aten.uniform_.default: _uniform_in_place,
    _aten.bernoulli.default: _coin,
    _aten.bernoulli.p: _coin,
    _aten.bernoulli_.float: _coin,
    _aten.bernoulli_.Tensor: _coin,
}


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
