"""Tensors that a module's code can reach and that are not registered: a recompute finds them as its forward did.

    beside = TensorsBeside()
    kept = beside.before(module, attributes)      # then the forward
    beside.after(kept)
    ...
    hidden = show(kept)                           # what they held then; then the recompute
    hide(hidden)                                  # and what they hold now

They are plain attributes, tensors in lists and objects that attributes hold, buffers of modules that are hidden there,
globals, closures and class attributes; registered buffers, too, if they are known by such a name as well. Statistics
are kept in such places, and `F.batch_norm` writes to them without telling autograd, so neither versions nor a first run
say whether they change.

NOTE [contents, not stand-ins]: nobody knows all the names under which such a tensor is reached, so the recompute gets
the very tensor, with its earlier contents. They are written through `.data`, unseen by autograd. What the recompute's
graph saves of it holds the present contents in backward, as in plain training, where a silent write is not noticed
either.

Known limits: tensors of over 64 KiB are not copied: where autograd is told of the write, they are refused. Tensors that
come into a container after the first forward, and what `state_beside.py` does not find, are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.snapshots import version_of
from memscale._torch.state_beside import Beside, tensors_in

LARGEST_COPY_BYTES = 1 << 16
"""The largest tensor that is copied before every forward."""
Contents: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and what they hold at one moment."""


class KeptTensors:
    """What one forward found."""

    __slots__ = ("contents", "large")

    def __init__(self, contents: Contents, large: list[tuple[torch.Tensor, int]]) -> None:
        self.contents = contents
        self.large = large
        """Those that were not copied, with their versions."""


class TensorsBeside:
    """Knows what a module's code can reach. See the module's docstring."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.Tensor]] | None = None

    def before(self, module: nn.Module, attributes: Iterable[Any]) -> KeptTensors | None:
        """Remember what they hold; `attributes` are the tensors that attributes of the module hold now."""
        if private.active_fake_mode() is not None:  # small, and a rehearsal trains nothing
            return None
        if self._found is None:
            self._found = [weakref.ref(tensor) for tensor in _find(module)]
        found = [tensor for ref in self._found if (tensor := ref()) is not None]
        small = [tensor for tensor in (*found, *attributes) if _may_be_written(tensor) and is_small(tensor)]
        large = [(tensor, version_of(tensor)) for tensor in found if not is_small(tensor)]
        if not small and not large:
            return None
        return KeptTensors(_contents_of(small), large)

    def after(self, kept: KeptTensors) -> None:
        """Refuse what was changed and of which there is no copy."""
        for tensor, version in kept.large:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that is no buffer, but is reached through a global, a "
                    "closure or an object, was changed in place by this forward, so computing it again in backward "
                    "would change it twice. Register it as a buffer, or leave the layer out of checkpointing."
                )


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


def _find(module: nn.Module) -> list[torch.Tensor]:
    """What is reached without being asked for as a buffer. Takes some milliseconds, so it is done once."""
    parts = list(module.modules())
    held = Beside.inside([value for part in parts for name, value in vars(part).items() if name not in _COMMON])
    reached = Beside.of_model(module)
    known = {id(part) for part in parts}
    hidden = {id(each): each for each in _modules_in(held, reached) if id(each) not in known}
    # Large ones that attributes hold are looked after where those are: see held_state.py.
    candidates = [*filter(is_small, _tensors_of(held)), *_tensors_of(reached)]
    for each in hidden.values():
        candidates += [*each.buffers(), *(value for value in vars(each).values() if isinstance(value, torch.Tensor))]
    return list({id(tensor): tensor for tensor in candidates if _may_be_written(tensor)}.values())


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
    return (
        type(tensor) is torch.Tensor
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_inference()
        and not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )
