"""What one operator costs a device: arithmetic, and bytes read and written. A roofline needs no more.

What is changed in place is read and written; `out=`, and what is only overwritten, is written; a lookup reads the rows
that it gives. Causal attention is half the arithmetic. Views are free.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch

from memscale._torch import fake_repeats, private

_FREE = frozenset(
    f"aten::{name}"
    for name in (
        "_has_compatible_shallow_copy_type",
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_strided",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
    )
)
"""Operators other than views that read and write nothing."""
_LOOKUPS = frozenset(("aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::_unsafe_index"))
_OVERWRITING = frozenset(("aten::zero_", "aten::fill_", "aten::copy_", "aten::_foreach_zero_"))
_COPIES = frozenset(("aten::_to_copy", "aten::copy_"))


@dataclasses.dataclass(slots=True)
class Work:
    """What was computed since this was made."""

    num_launches: int = 0
    flops: int = 0
    half_flops: int = 0
    """The part of `flops` whose operands are in 16 bits."""
    matmul_bytes: int = 0
    other_bytes: int = 0
    num_random: int = 0
    num_sends: int = 0
    """Copies to the host, or to another device."""
    sent_bytes: int = 0
    num_fetches: int = 0
    """Copies from the host, or from another device."""
    fetched_bytes: int = 0

    def add(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        device_type: str,
        known: private.Remembered | None = None,
    ) -> None:
        """Count an operator, if it is the device's. `known`: what is remembered of it."""
        if _facts_of(func).is_free:
            return
        if known is None:
            self._count(func, args, kwargs, result, device_type, fake_repeats.count())
            return
        work: Work | None = known.notes.get(device_type)
        if work is None:
            work = known.notes[device_type] = Work()
            work._count(func, args, kwargs, result, device_type, 1)
        self._add_times(work, fake_repeats.count())

    def _add_times(self, work: Work, times: int) -> None:
        self.num_launches += times * work.num_launches
        self.flops += times * work.flops
        self.half_flops += times * work.half_flops
        self.matmul_bytes += times * work.matmul_bytes
        self.other_bytes += times * work.other_bytes
        self.num_random += times * work.num_random
        self.num_sends += times * work.num_sends
        self.sent_bytes += times * work.sent_bytes
        self.num_fetches += times * work.num_fetches
        self.fetched_bytes += times * work.fetched_bytes

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, device_type: str, times: int) -> None:
        facts = _facts_of(func)
        given = tensors_of((*args, *kwargs.values()))
        given_ids = {id(tensor) for tensor in given}
        made = [tensor for tensor in tensors_of((result,)) if id(tensor) not in given_ids]
        places = {private.device_type_of(tensor) for tensor in (*given, *made)}
        if device_type not in places:
            return
        if facts.is_copy and len(places) > 1:
            self._add_crossing(made[0] if made else args[0], device_type, times)
            return
        self.num_launches += times
        if facts.draws:
            self.num_random += times * max((tensor.numel() for tensor in (made or given)), default=0)
        num_bytes = sum(_num_bytes(tensor) for tensor in made)
        if facts.is_lookup:
            num_bytes *= 2
        else:
            twice = tensors_of([args[index] for index in facts.changed if index < len(args)])
            num_bytes += sum(_num_bytes(tensor) for tensor in (*given, *twice))
        formula = private.flop_formula(func)
        if formula is None:
            self.other_bytes += times * num_bytes
        else:
            flops = times * facts.arithmetic(int(formula(*args, **kwargs, out_val=result)), args, kwargs)
            self.flops += flops
            self.half_flops += flops if _is_in_16_bits(given) else 0
            self.matmul_bytes += times * num_bytes

    def _add_crossing(self, target: torch.Tensor, device_type: str, times: int) -> None:
        if private.device_type_of(target) == device_type:
            self.num_fetches += times
            self.fetched_bytes += times * _num_bytes(target)
        else:
            self.num_sends += times
            self.sent_bytes += times * _num_bytes(target)


@dataclasses.dataclass(frozen=True, slots=True)
class _Facts:
    """What an operator's schema tells."""

    is_free: bool
    is_lookup: bool
    is_copy: bool
    draws: bool
    changed: tuple[int, ...]
    """Arguments that are read and written."""
    causal: int | None
    """The argument that says whether attention is causal."""

    def arithmetic(self, flops: int, args: Any, kwargs: dict[str, Any]) -> int:
        given = args[self.causal] if self.causal is not None and self.causal < len(args) else kwargs.get("is_causal")
        return flops // 2 if given is True else flops


@functools.cache
def _facts_of(func: Any) -> _Facts:
    schema = func._schema
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    changed = [i for i in written if not schema.arguments[i].kwarg_only and schema.name not in _OVERWRITING]
    causal = [i for i, argument in enumerate(schema.arguments) if argument.name == "is_causal"]
    return _Facts(
        is_free=func.is_view or schema.name in _FREE or func.namespace in ("prim", "profiler"),
        is_lookup=schema.name in _LOOKUPS,
        is_copy=schema.name in _COPIES,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        changed=tuple(changed),
        causal=causal[0] if causal else None,
    )


def tensors_of(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, also in lists of them."""
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(each for each in argument if isinstance(each, torch.Tensor))
    return found


def _is_in_16_bits(tensors: list[torch.Tensor]) -> bool:
    """Whether the first operand is, which has the type that is multiplied in: the backward of attention is also given
    sums in 32 bits, a number a row."""
    return next((tensor.itemsize <= 2 for tensor in tensors if tensor.is_floating_point()), False)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0
