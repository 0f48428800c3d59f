"""A model under MemScale against an untouched copy of itself: the same steps, and everything that they decide."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

from memscale._profile.rehearsal import loss_of

STEPS = 3
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclasses.dataclass
class Subject:
    """A model with inputs, the call, and the optimizer that trains it."""

    model: nn.Module
    inputs: dict[str, Any]
    call: Callable[[nn.Module, dict[str, Any]], Any]
    make_optimizer: Optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)
    closure: bool = False
    """The optimizer calls for loss and gradients itself, as LBFGS does."""
    takes_keywords: bool = False
    """The inputs are the keywords of the model's forward."""
    tight_budgets: dict[str, float] = dataclasses.field(default_factory=dict)
    """Bytes by device, as far as they are known: asked once for all copies of this."""

    @property
    def sample(self) -> dict[str, Any] | None:
        """The batch, for `wrap`: what it plans for once, where it would plan for a derived one and then for this."""
        return self.inputs if self.takes_keywords else None

    def on(self, device: str) -> Subject:
        """The same on another device; this one is left as it was."""
        return dataclasses.replace(self, model=copy.deepcopy(self.model).to(device), inputs=_moved(self.inputs, device))

    def in_double(self) -> Subject:
        """The same in double precision; this one is left as it was."""
        return dataclasses.replace(
            self, model=copy.deepcopy(self.model).double(), inputs=_moved(self.inputs, "cpu", torch.float64)
        )


def _moved(tree: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """Copies on this device; of those with fractions, in this type."""
    if isinstance(tree, torch.Tensor):
        moved = tree.detach().clone().to(device, dtype if tree.is_floating_point() else None)
        return moved.requires_grad_(tree.requires_grad)
    if isinstance(tree, dict):
        return {key: _moved(value, device, dtype) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_moved(value, device, dtype) for value in tree)
    return tree


class Training:
    """Steps of one subject, from a seed, with what each of them decided. `gradients` are those before each step."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.optimizer = subject.make_optimizer(subject.model)
        self.record: dict[str, Any] = {}
        self.number = 0

    def step(self) -> None:
        model = self.subject.model
        seed(self.number)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.subject.call(model, self.subject.inputs))
            loss.backward()
            return loss.detach()

        loss: Any = self.optimizer.step(closure) if self.subject.closure else closure()  # type: ignore[arg-type]
        self.record[f"loss of step {self.number}"] = _kept(torch.as_tensor(loss))
        for name, parameter in model.named_parameters():
            self.record[f"gradient of {name} in step {self.number}"] = _kept(parameter.grad)
        if not self.subject.closure:
            self.optimizer.step()
        self.number += 1

    def result(self) -> dict[str, Any]:
        """Everything that was decided so far, on the host."""
        model, found = self.subject.model, dict(self.record)
        found |= {f"weight {name}": _kept(value) for name, value in model.named_parameters()}
        found |= {f"buffer {name}": _kept(value) for name, value in model.named_buffers()}
        for index, parameter in enumerate(model.parameters()):
            state = self.optimizer.state.get(parameter, {})
            found |= {f"state {key} of parameter {index}": _kept(value) for key, value in state.items()}
        return found | random_states()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def random_states() -> dict[str, Any]:
    found: dict[str, Any] = {"torch's random state": torch.get_rng_state(), "Python's random state": random.getstate()}
    found["NumPy's random state"] = [str(part) for part in numpy.random.get_state()]
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        found["the device's random state"] = torch.get_device_module(device).get_rng_state()
    return found


def _kept(value: Any) -> Any:
    """A copy on the host, taken as it is: of a wrapped model's gradient, this reads it."""
    if isinstance(value, list):
        return [_kept(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.to_dense() if value.layout is not torch.strided else value).cpu().clone()


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What differs in at least a bit, in the order in which it was decided."""
    return [name for name in {**theirs, **ours} if not _same(ours.get(name), theirs.get(name))]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return not isinstance(ours, torch.Tensor) and not isinstance(theirs, torch.Tensor) and bool(ours == theirs)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if torch.equal(ours, theirs):
        return True
    both = ours.isnan() & theirs.isnan()
    return bool(both.any()) and torch.equal(ours.masked_fill(both, 0), theirs.masked_fill(both, 0))


def largest_error(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Of losses and gradients, by the largest entry of each: for what is exact only up to the order of sums."""
    worst = 0.0
    for name, expected in theirs.items():
        if isinstance(expected, torch.Tensor) and name.startswith(("loss", "gradient")) and expected.numel():
            got = ours.get(name)
            if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
                return float("inf")
            scale = max(float(expected.abs().max()), 1e-3)
            worst = max(worst, float((got.double() - expected.double()).abs().max()) / scale)
    return worst
