"""Another optimizer in the place of the user's: bitsandbytes' own 8-bit class, with the same groups and state.

    conversion = convert(optimizer, model)      # or NoCounterpart, which says why
    conversion.optimizer                        # a bitsandbytes optimizer to train with
    conversion.undo()                           # the user's optimizer has its state back, in 32 bits

NOTE [shared groups]: both optimizers have the same `param_groups`, the very same dicts. So a scheduler that is bound to
the user's optimizer sets the learning rate of the one that steps. Loading a state makes new groups; they are poured
back into the shared ones before the next step.

The user's optimizer gives its state up while it is replaced, and refuses to step and to load: nobody trains with a half
of it by accident. Its `state_dict()` is what it would be if it were given the state back now.

Embeddings have their state in 32 bits, as bitsandbytes advises; they are given it before their first step, so that no
global settings of bitsandbytes are needed. A plain optimizer's checkpoint may be loaded; what it holds is converted at
the next step.

What a bitsandbytes class computes otherwise than torch's (weight decay of Adam, Nesterov momentum, ...) is no
counterpart; a group that asks for it later is refused at the next step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._errors import MemScaleError
from memscale._torch import private
from memscale._torch.optimizer_steps import parameters_of
from memscale.techniques.optimizer8bit.blocks import dequantize, quantize
from memscale.techniques.optimizer8bit.eight_bit import embeddings_of, load_bitsandbytes

BLOCK_SIZE = 256
"""bitsandbytes' own, which cannot be chosen."""
MIN_ELEMENTS = 4096
"""bitsandbytes' own default: smaller parameters keep 32 bits."""
_KERNEL = "bitsandbytes::optimizer_update_8bit_blockwise"

Group = Mapping[str, Any]


_STANDING_IN: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
"""What steps now in the place of each replaced optimizer."""


class NoCounterpart(Exception):
    """bitsandbytes has no class that does what this optimizer does; says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Counterpart:
    """A class of bitsandbytes', and how torch's state and options are called there."""

    name: str
    moments: tuple[str, ...]
    """torch's names of what bitsandbytes calls state1 and state2."""
    options: Callable[[Group], dict[str, Any]]
    """The options of a group that bitsandbytes knows under other names."""
    refuse: Callable[[Group], str | None]
    """Why a group has no counterpart."""


def _refuse_adam(group: Group) -> str | None:
    if group.get("weight_decay") and not group.get("decoupled_weight_decay"):
        return "weight_decay of torch's Adam is part of the gradient, that of bitsandbytes' is not; use AdamW"
    return _first(group, amsgrad=False, maximize=False)


def _refuse_adamw(group: Group) -> str | None:
    return _first(group, amsgrad=False, maximize=False)


def _refuse_sgd(group: Group) -> str | None:
    if not group["momentum"]:
        return "without momentum it has no state"
    return _first(group, dampening=0, nesterov=False, maximize=False)


def _refuse_rmsprop(group: Group) -> str | None:
    return _first(group, momentum=0, centered=False, maximize=False)


def _refuse_adagrad(group: Group) -> str | None:
    return _first(group, lr_decay=0, initial_accumulator_value=0, maximize=False)


def _first(group: Group, **only: Any) -> str | None:
    """The first option that is not as bitsandbytes has it."""
    for name, value in only.items():
        if group.get(name, value) != value:
            return f"bitsandbytes has no {name}={group[name]!r}"
    return None


def _no_options(group: Group) -> dict[str, Any]:
    return {}


_COUNTERPARTS: dict[str, Counterpart] = {
    "AdamW": Counterpart("AdamW8bit", ("exp_avg", "exp_avg_sq"), _no_options, _refuse_adamw),
    "Adam": Counterpart("Adam8bit", ("exp_avg", "exp_avg_sq"), _no_options, _refuse_adam),
    "SGD": Counterpart(
        "SGD8bit", ("momentum_buffer",), lambda group: {"betas": (group["momentum"], 0.0), "eps": 0.0}, _refuse_sgd
    ),
    "RMSprop": Counterpart(
        "RMSprop8bit", ("square_avg",), lambda group: {"betas": (group["alpha"], 0.0)}, _refuse_rmsprop
    ),
    "Adagrad": Counterpart("Adagrad8bit", ("sum",), lambda group: {"betas": (0.0, 0.0)}, _refuse_adagrad),
    "Lion": Counterpart("Lion8bit", ("exp_avg",), lambda group: {"eps": 0.0}, lambda group: None),
}


def counterpart_of(optimizer: Optimizer, device: torch.device | None = None) -> Counterpart:
    """The class that does the same in 8 bits; `NoCounterpart` where there is none.

    `device` is where parameters are going to be, besides where they are.
    """
    kind = type(optimizer)
    origin = kind.__module__.split(".")[0]
    counterpart = _COUNTERPARTS.get(kind.__name__)
    if origin == "bitsandbytes":
        raise NoCounterpart("it is bitsandbytes' own")
    if counterpart is None or (kind.__name__ != "Lion" and origin != "torch"):
        raise NoCounterpart("bitsandbytes has no such class")
    for group in optimizer.param_groups:
        why = counterpart.refuse(group)
        if isinstance(group["lr"], torch.Tensor):
            why = "its learning rate is a tensor"
        if why is not None:
            raise NoCounterpart(why)
    device_types = {parameter.device.type for parameter in parameters_of(optimizer)}
    for device_type in sorted(device_types | ({device.type} if device is not None else set())):
        if not private.has_own_kernel(_KERNEL, device_type):
            raise NoCounterpart(f"bitsandbytes has no 8-bit step for {device_type}")
    return counterpart


def convert(optimizer: Optimizer, model: nn.Module, device: torch.device | None = None) -> Conversion:
    """Hand groups and state over to bitsandbytes' class. `NoCounterpart` leaves everything as it is, and so does
    `ImportError`, where there is no bitsandbytes that works."""
    bitsandbytes = load_bitsandbytes()
    counterpart = counterpart_of(optimizer, device)
    for parameter in parameters_of(optimizer):
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NoCounterpart(f"a parameter is {parameter.dtype}")
        if not parameter.is_contiguous():
            raise NoCounterpart(
                "bitsandbytes would lay out a parameter anew that is not contiguous (channels_last, say)"
            )
    kind = getattr(bitsandbytes.optim, counterpart.name)
    return Conversion(optimizer, kind, counterpart, embeddings_of(model))


class Conversion:
    """One optimizer in the place of another. See NOTE [shared groups]."""

    def __init__(
        self, replaced: Optimizer, kind: type[Optimizer], counterpart: Counterpart, embeddings: frozenset[int]
    ) -> None:
        self.counterpart = counterpart
        self.num_embeddings = sum(id(p) in embeddings for p in parameters_of(replaced))
        self._replaced = weakref.ref(replaced)
        self._embeddings = embeddings
        self._had_state: set[int] = set()
        self._defaults = dict(replaced.defaults)
        with contextlib.ExitStack() as undo:
            self.optimizer = self._create(replaced, kind)
            self._take_state(replaced)
            refusal = replaced.register_step_pre_hook(_refuse_step)
            undo.callback(refusal.remove)
            no_load = replaced.register_load_state_dict_pre_hook(_refuse_load)
            undo.callback(no_load.remove)
            saving = replaced.register_state_dict_post_hook(self._save_replaced)
            undo.callback(saving.remove)
            before = self.optimizer.register_step_pre_hook(self._before_step)
            undo.callback(before.remove)
            after = self.optimizer.register_step_post_hook(self._after_step)
            undo.callback(after.remove)
            _STANDING_IN[replaced] = weakref.ref(self.optimizer)
            self._hooks = undo.pop_all()

    def _create(self, replaced: Optimizer, kind: type[Optimizer]) -> Optimizer:
        names = ("lr", "betas", "eps", "weight_decay", "momentum", "alpha")
        options = {name: replaced.defaults[name] for name in names if name in replaced.defaults}
        if self.counterpart.name == "RMSprop8bit":
            options.pop("momentum")
        self._complete_groups(replaced)
        optimizer = kind(list(replaced.param_groups), **options)
        optimizer.param_groups = replaced.param_groups
        return optimizer

    # ---- state

    def _take_state(self, replaced: Optimizer) -> None:
        for parameter in parameters_of(replaced):
            if parameter.requires_grad:
                self._take_entry(parameter, replaced.state.pop(parameter, {}))
        replaced.state.clear()

    def _take_entry(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
        is_embedding = id(parameter) in self._embeddings
        has_state = any(name in entry for name in self.counterpart.moments)
        if has_state:
            self._had_state.add(id(parameter))
        if has_state or is_embedding:
            is_wide = is_embedding or parameter.numel() < MIN_ELEMENTS
            self.optimizer.state[parameter] = self._narrowed(parameter, entry, is_wide)

    def _complete_state(self) -> None:
        """Parameters that came later, or are trained now, and what was loaded from a plain optimizer."""
        for parameter in parameters_of(self.optimizer):
            entry = self.optimizer.state.get(parameter, {})
            # State that waits elsewhere is no plain dict; looking into it would bring it all here.
            if parameter.grad is not None and type(entry) is dict and "state1" not in entry:
                self._take_entry(parameter, entry)

    def _narrowed(self, parameter: torch.Tensor, entry: Mapping[str, Any], is_wide: bool) -> dict[str, Any]:
        """torch's state of a parameter as bitsandbytes would have it."""
        state: dict[str, Any] = {"step": int(entry["step"]) if "step" in entry else int(bool(entry))}
        for number, name in enumerate(self.counterpart.moments, start=1):
            known: torch.Tensor | None = entry.get(name)
            value = torch.zeros_like(parameter, dtype=torch.float32) if known is None else known.float().contiguous()
            if is_wide:
                state[f"state{number}"] = value
                continue
            signed = number == 1  # bitsandbytes has a map without signs for second moments beside first ones only
            book = self._book(signed, parameter.device)
            codes, state[f"absmax{number}"] = quantize(value.view(-1), signed, BLOCK_SIZE)
            state[f"state{number}"], state[f"qmap{number}"] = codes.view(parameter.shape), book
        return state

    def _book(self, signed: bool, device: torch.device) -> torch.Tensor:
        """The optimizer's own table of what a byte stands for: all parameters share it."""
        books: dict[str, torch.Tensor] = vars(self.optimizer)["name2qmap"]
        name = "dynamic" if signed else "udynamic"
        books[name] = books[name].to(device)
        return books[name]

    def _widened(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """bitsandbytes' state of a parameter as torch would have it: of the parameter's type."""
        if "state1" not in entry:
            return dict(entry)  # loaded from a plain optimizer, and not stepped since
        state: dict[str, Any] = {"step": torch.tensor(float(entry["step"]))}
        for number, name in enumerate(self.counterpart.moments, start=1):
            value = entry[f"state{number}"]
            if value.dtype == torch.uint8:
                line = dequantize(value.reshape(-1), entry[f"absmax{number}"], number == 1, BLOCK_SIZE)
                value = line.view(value.shape)
            state[name] = value.to(parameter.dtype)
        if self.counterpart.name in ("SGD8bit", "Lion8bit"):
            del state["step"]
        return state

    def _widened_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The whole state, as torch would have it."""
        return {
            parameter: self._widened(parameter, entry)
            for parameter, entry in self.optimizer.state.items()
            if isinstance(parameter, torch.Tensor) and (entry.get("step") or id(parameter) in self._had_state)
        }

    def _save_replaced(self, replaced: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The replaced optimizer's checkpoint, in 32 bits."""
        index_of = {id(parameter): index for index, parameter in enumerate(parameters_of(replaced))}
        state = {index_of[id(p)]: entry for p, entry in self._widened_state().items() if id(p) in index_of}
        groups = [
            {name: group[name] for name in group.keys() - self._added(group)} for group in state_dict["param_groups"]
        ]
        return {**state_dict, "state": state, "param_groups": groups}

    # ---- groups

    def _complete_groups(self, optimizer: Optimizer) -> None:
        """Every group has both optimizers' options: groups are added, and schedulers change what torch calls it."""
        for group in optimizer.param_groups:
            for name, value in {**optimizer.defaults, **self._defaults}.items():
                group.setdefault(name, value)
            group.update(self.counterpart.options(group))

    def _added(self, group: Group) -> set[str]:
        """The options of a group that torch's optimizer does not have."""
        return (set(self.optimizer.defaults) | set(self.counterpart.options(group))) - set(self._defaults)

    # ---- steps

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        replaced = self._replaced()
        if replaced is not None and optimizer.param_groups is not replaced.param_groups:
            for shared, loaded in zip(replaced.param_groups, optimizer.param_groups, strict=True):
                shared.update(loaded)
            optimizer.param_groups = replaced.param_groups
        self._complete_groups(optimizer)
        for group in optimizer.param_groups:
            _refuse_change(group, self.counterpart)
        self._complete_state()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        replaced = self._replaced()
        if replaced is not None:
            replaced._opt_called = True  # type: ignore[attr-defined]  # its schedulers ask whether a step came before theirs

    # ---- the end

    def undo(self) -> None:
        """The replaced optimizer, if anybody still has it, steps again, with its state in 32 bits."""
        self._hooks.close()
        replaced = self._replaced()
        if replaced is None:
            return
        _STANDING_IN.pop(replaced, None)
        self.optimizer.register_step_pre_hook(_Retired(self._replaced))
        replaced.param_groups = self.optimizer.param_groups
        replaced.state.update(self._widened_state())
        self._complete_groups(replaced)
        for group in replaced.param_groups:
            for name in self._added(group):
                group.pop(name, None)


class _Retired:
    """A step pre-hook on an optimizer whose state was given back: it must not step beside its own successor."""

    def __init__(self, replaced: weakref.ref[Optimizer]) -> None:
        self.replaced = replaced

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        replaced = self.replaced()
        successor = _STANDING_IN.get(replaced) if replaced is not None else None
        if successor is not None and successor() is not None:
            raise MemScaleError(
                f"this {type(optimizer).__name__} is that of an earlier apply_all_optimizations; its state went to the "
                "optimizer that the latest call returned: step that one"
            )


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise MemScaleError(
        f"this {type(optimizer).__name__} was replaced: step the optimizer that apply_all_optimizations returned, or "
        "call memscale.detach(model) first"
    )


def _refuse_change(group: Group, counterpart: Counterpart) -> None:
    why = counterpart.refuse(group)
    if why is not None:
        raise MemScaleError(
            f"{counterpart.name} cannot go on: {why}. Call memscale.detach(model) and apply_all_optimizations again"
        )


def _refuse_load(optimizer: Optimizer, state_dict: Any) -> None:
    raise MemScaleError(
        f"this {type(optimizer).__name__} was replaced: load into the optimizer that apply_all_optimizations returned, "
        "or call memscale.detach(model) first"
    )
