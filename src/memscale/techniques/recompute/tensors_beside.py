"""Tensors that a module's code can reach and that are not registered: a recompute finds them as its forward did.

    beside = TensorsBeside()
    kept = beside.before(module, attributes)      # then the forward
    beside.after(kept)
    ...
    hidden = show(kept)                           # what they held then; then the recompute
    hide(hidden)                                  # and what they hold now

They are plain attributes, tensors in lists and objects that attributes hold, what parameters carry, buffers of modules
that are hidden there, globals, closures and class attributes; registered buffers, too, if they are known by such a name
as well. Statistics are kept in such places, and `F.batch_norm` writes to them without telling autograd, so neither
versions nor a first run say whether they change.

NOTE [contents, not stand-ins]: nobody knows all the names under which such a tensor is reached, so the recompute gets
the very tensor, with its earlier contents. They are written through `.data`, unseen by autograd. What the recompute's
graph saves of it holds the present contents in backward, as in plain training, where a silent write is not noticed
either.

NOTE [large ones]: tensors of over 64 KiB are not copied before every forward. Whether a forward writes to them without
telling autograd (`.data`) is learned at the first one in each state of the training flags, by their values, and those
are copied from then on. So are parameters, which some quantizers write to; of these, and of the largest, only a sum of
their bits is kept during that first forward, so it is refused if it wrote to one, and the next one has a copy.

Known limits: a large tensor that a later forward is the first to write to is refused if autograd is told of it, and
not seen otherwise. Tensors that come into a container after the first forward, and what `state_beside.py` does not
find, are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.bit_sums import has_plain_memory, sums_of_bits
from memscale._torch.carried_attributes import attributes_of
from memscale._torch.snapshots import version_of
from memscale._torch.state_beside import Beside, tensors_in

LARGEST_COPY_BYTES = 1 << 16
"""The largest tensor that is copied before every forward."""
LARGEST_FIRST_COPY_BYTES = 1 << 24
"""The largest that is copied before the first one."""
Flags: TypeAlias = tuple[bool, ...]
Contents: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and what they hold at one moment."""


class KeptTensors:
    """What one forward found."""

    __slots__ = ("contents", "first", "flags", "large", "sums")

    def __init__(self, contents: Contents, large: list[tuple[torch.Tensor, int]], flags: Flags) -> None:
        self.contents = contents
        self.large = large
        """Those that were not copied, with their versions."""
        self.flags = flags
        self.first: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        """At the first forward: large ones, with their versions and contents. See NOTE [large ones]."""
        self.sums: list[tuple[torch.Tensor, int, int]] = []
        """At the first forward: those that are too large for a copy, with their versions and sums of their bits."""


class TensorsBeside:
    """Knows what a module's code can reach. See the module's docstring."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.Tensor]] | None = None
        self._held: list[weakref.ref[torch.Tensor]] = []
        """Large ones in what attributes hold; held_state.py looks after them where autograd is told of the write."""
        self._silent: dict[Flags, list[weakref.ref[torch.Tensor]]] = {}
        """Large ones that a forward writes to in silence, by its training flags."""

    def before(
        self, module: nn.Module, attributes: Iterable[Any], parameters: Iterable[Any], flags: Flags
    ) -> KeptTensors | None:
        """Remember what they hold; `attributes` are the tensors that attributes of the module hold now, `parameters`
        those that its forward computes with."""
        if private.active_fake_mode() is not None:  # small, and a rehearsal trains nothing
            return None
        if self._found is None:
            found, held = _find(module)
            self._found, self._held = [*map(weakref.ref, found)], [*map(weakref.ref, held)]
        found, attributes = _living(self._found), [each for each in attributes if _may_be_written(each)]
        small = [tensor for tensor in (*found, *attributes) if _may_be_written(tensor) and is_small(tensor)]
        large = [(tensor, version_of(tensor)) for tensor in found if not is_small(tensor)]
        known = self._silent.get(flags)
        kept = KeptTensors(_contents_of([*small, *_living(known or ())]), large, flags)
        if known is None:
            others = [*found, *_living(self._held), *attributes]
            _watch_closely(kept, [tensor for tensor in others if not is_small(tensor)], parameters)
        return kept if kept.contents or large or known is None else None

    def after(self, kept: KeptTensors) -> None:
        """Learn from the first forward, and refuse what was changed and of which there is no copy."""
        silent = self._silent.setdefault(kept.flags, [])
        if kept.first or kept.sums:
            self._learn(kept, silent)
        known = {id(tensor) for tensor in _living(silent)}
        for tensor, version in kept.large:
            if version_of(tensor) != version and id(tensor) not in known:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that is no buffer, but is reached through a global, a "
                    "closure or an object, was changed in place by this forward, so computing it again in backward "
                    "would change it twice. Register it as a buffer, or leave the layer out of checkpointing."
                )

    def _learn(self, kept: KeptTensors, silent: list[weakref.ref[torch.Tensor]]) -> None:
        (first, kept.first), (sums, kept.sums) = (kept.first, []), (kept.sums, [])
        with private.real_tensors():
            changed = [(t, held) for t, version, held in first if version_of(t) == version and _differ(t, held)]
        kept.contents += changed
        now = sums_of_bits([tensor for tensor, _, _ in sums])
        lost = [
            t for (t, version, then), bits in zip(sums, now, strict=True) if bits != then and version_of(t) == version
        ]
        silent += [weakref.ref(tensor) for tensor in (*(tensor for tensor, _ in changed), *lost)]
        if lost:
            raise RuntimeError(
                f"a tensor of shape {tuple(lost[0].shape)} was changed by this forward without autograd being told "
                "(through .data), so computing it again in backward would change it twice. Run the step again: it is "
                "remembered from now on. Or register the tensor as a buffer, or leave the layer out of checkpointing."
            )


def _watch_closely(kept: KeptTensors, large: list[torch.Tensor], parameters: Iterable[Any]) -> None:
    """Remember what large tensors hold before a first forward. See NOTE [large ones]."""
    large = list({id(tensor): tensor for tensor in large}.values())
    copied = [tensor for tensor in large if tensor.nbytes <= LARGEST_FIRST_COPY_BYTES]
    summed = [tensor for tensor in large if tensor.nbytes > LARGEST_FIRST_COPY_BYTES]
    summed += [each for each in parameters if type(each) is nn.Parameter and has_plain_memory(each)]
    kept.first = [(tensor, version_of(tensor), held) for tensor, held in _contents_of(copied)]
    kept.sums = [(t, version_of(t), bits) for t, bits in zip(summed, sums_of_bits(summed), strict=True)]


def _differ(tensor: torch.Tensor, held: torch.Tensor) -> bool:
    return not torch.equal(tensor, held)


def _living(references: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for reference in references if (tensor := reference()) is not None]


def show(kept: KeptTensors) -> Contents:
    """Let the tensors hold what they held. Returns what `hide` takes."""
    now = _contents_of([tensor for tensor, _ in kept.contents])
    hide(kept.contents)
    return now


def hide(contents: Contents) -> None:
    """Let the tensors hold this, without telling autograd: see NOTE [contents, not stand-ins]."""
    if contents:
        with private.real_tensors():
            for tensor, held in contents:
                tensor.data.copy_(held)


def _contents_of(tensors: list[torch.Tensor]) -> Contents:
    """What they hold. A selective checkpoint, which counts operators, must not see that it is copied."""
    if not tensors:
        return []
    with private.real_tensors():
        return [(tensor, tensor.detach().clone()) for tensor in tensors]


def _find(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What is reached without being asked for as a buffer, and the large ones of what attributes hold. Takes some
    milliseconds, so it is done once."""
    parts = list(module.modules())
    carried = [attributes_of(parameter) for parameter in module.parameters()]
    own = [value for part in parts for name, value in vars(part).items() if name not in _COMMON]
    held = Beside.inside([*own, *(attributes for attributes in carried if attributes)])
    reached = Beside.of_model(module)
    known = {id(part) for part in parts}
    hidden = {id(each): each for each in _modules_in(held, reached) if id(each) not in known}
    inside = list(_tensors_of(held))
    candidates = [*filter(is_small, inside), *_tensors_of(reached)]
    for each in hidden.values():
        candidates += [*each.buffers(), *(value for value in vars(each).values() if isinstance(value, torch.Tensor))]
    large = [tensor for tensor in inside if not is_small(tensor)]
    return _once(candidates), _once(large)


def _once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors if _may_be_written(tensor)}.values())


_COMMON = frozenset(vars(nn.Module()))


def _modules_in(*looks: Beside) -> Iterator[nn.Module]:
    for look in looks:
        others = [*look.others, *(entry.of for entry in look.entries)]
        yield from (each for each in others if issubclass(type(each), nn.Module))


def _tensors_of(look: Beside) -> Iterator[torch.Tensor]:
    yield from tensors_in(entry.take() for entry in look.entries)


def is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= LARGEST_COPY_BYTES


def _may_be_written(tensor: torch.Tensor) -> bool:
    """Statistics are plain tensors; what is trained, and what has no memory of its own, is not."""
    return type(tensor) is torch.Tensor and not tensor.requires_grad and has_plain_memory(tensor)
