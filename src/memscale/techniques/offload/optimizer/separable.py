"""Runs an optimizer's step on some of its parameters at a time, and finds out whether that gives the same result.

A part of the parameters is stepped on a *shadow*: an object of the optimizer's class that shares its attributes, whose
`param_groups` name only the chosen parameters (an empty placeholder stands for every other one, so that indices hold)
and whose `state` holds only theirs. Gradients are never hidden or moved. Values that all parameters share (counters of
a group, attributes, entries of `state` under a string) advance once: every part starts from the same values, all parts
must arrive at the same values, and `SplitStep.merge` writes them back. Every part is stepped with the implementation
that the whole would have had: see NOTE [the implementation of the whole] in implementations.py.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import random
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from memscale._errors import quoted
from memscale._torch.host_rng import Fingerprint, HostRng
from memscale._torch.optimizer_steps import living_optimizers, owns_any, parameters_of
from memscale._torch.quiet_steps import quiet_steps
from memscale._torch.snapshots import is_generator, state_of
from memscale.techniques.offload.optimizer.implementations import Stepped, foreach_of_whole, has_gradient

State = dict[torch.Tensor, dict[Any, Any]]

_SHADOW_MARK = "_memscale_shadow"
_TAKEN_OVER: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_OWN_ATTRIBUTES = {
    "params",
    "state",
    "param_groups",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    _SHADOW_MARK,
}
_KNOWN_SEPARABLE = {
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
    )
    if hasattr(torch.optim, name)
}
"""Each of these updates a parameter from that parameter, its gradient and its state alone. Subclasses are tried."""


_ELEMENT_BY_ELEMENT = _KNOWN_SEPARABLE - {
    getattr(torch.optim, name) for name in ("Adafactor", "Muon", "SparseAdam") if hasattr(torch.optim, name)
}


def is_known_separable(optimizer: Optimizer) -> bool:
    """Whether it is one of PyTorch's own that update a parameter from its own values."""
    return type(optimizer) in _KNOWN_SEPARABLE


def steps_each_element(optimizer: Optimizer) -> bool:
    """Whether the optimizer updates each element from that element, its gradient and its state alone."""
    return type(optimizer) in _ELEMENT_BY_ELEMENT


class NotSeparable(Exception):
    """The optimizer's step cannot be run on some parameters at a time."""


def shadow(optimizer: Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> Optimizer:
    """Return a stand-in with these groups and this state. It fires no hooks, even in a nested `super().step()`."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    vars(stand_in).update(
        param_groups=groups,
        state=defaultdict(dict, state),
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    setattr(stand_in, _SHADOW_MARK, True)
    return stand_in


def is_shadow(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, _SHADOW_MARK)


def owners_of(parameters: Sequence[torch.Tensor]) -> list[Optimizer]:
    """The optimizers of this process that step one of these parameters."""
    # What has no groups of its own steps through others, which have them.
    found = [o for o in living_optimizers() if "param_groups" in vars(o) and not is_shadow(o)]
    found = [optimizer for optimizer in found if owns_any(optimizer, parameters)]
    # Libraries wrap the user's optimizer in one of their own, which owns the same parameters.
    wrapping = {id(o) for o in found if any(value is other for value in vars(o).values() for other in found)}
    return [optimizer for optimizer in found if id(optimizer) not in wrapping]


def step_without_hooks(optimizer: Optimizer) -> Callable[..., Any]:
    """The step of its class without PyTorch's wrapper, which runs the hooks, and what others have put around that."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):  # `functools.wraps` copies the mark, too
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def idle_shadow(optimizer: Optimizer) -> Optimizer:
    """Return a stand-in without parameters, whose step does nothing."""
    groups = [{**_copied_options(group), "params": []} for group in optimizer.param_groups]
    return shadow(optimizer, groups, _shared_state(optimizer))


def _copied_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the entries of `state` that belong to no parameter in particular."""
    return {key: copy.deepcopy(optimizer.state[key]) for key in optimizer.state if not isinstance(key, torch.Tensor)}


def take_over(optimizer: Optimizer, undo: contextlib.ExitStack) -> None:
    """Mark an optimizer as taken over: until undone, only the caller runs its steps."""
    _TAKEN_OVER.add(optimizer)
    undo.callback(_hand_back, weakref.ref(optimizer))


def _hand_back(reference: weakref.ref[Optimizer]) -> None:
    optimizer = reference()
    if optimizer is not None:
        _TAKEN_OVER.discard(optimizer)


def is_taken_over(optimizer: Optimizer) -> bool:
    return optimizer in _TAKEN_OVER


def put_in_order(optimizer: Optimizer, before: set[Any]) -> None:
    """Let what a step has added to the state stand where a plain step adds it: in the order of the parameters."""
    state = optimizer.state
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in [p for p in parameters if p in state and p not in before]:
        state[parameter] = state.pop(parameter)


def _with_counter_beside(parameter: torch.Tensor, values: dict[Any, Any]) -> dict[Any, Any]:
    """A checkpoint that was read with `map_location=` the device has its counters there, and `load_state_dict` leaves
    them: beside a parameter that is stepped on the host PyTorch's kernels refuse them."""
    counter = values.get("step") if parameter.device.type == "cpu" else None
    if not isinstance(counter, torch.Tensor) or counter.device.type == "cpu":
        return values
    return {**values, "step": counter.to("cpu")}


class SplitStep:
    """One step in parts, of the parameters that have a gradient now, or of those that `is_stepped` names."""

    def __init__(self, optimizer: Optimizer, is_stepped: Stepped = has_gradient) -> None:
        self._optimizer = optimizer
        self._foreach = foreach_of_whole(optimizer, is_stepped)
        self._step = step_without_hooks(optimizer)
        self._changes: list[dict[tuple[str, int, Any], Any]] = []
        self._placeholder = torch.nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
        self.returned: Any = None
        """What the step of the last part returned."""

    def run(
        self,
        parameters: Iterable[torch.Tensor],
        state: State,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] = {},
        stand_ins: Mapping[int, torch.Tensor] = {},
    ) -> State:
        """Step these parameters with this state. A stand-in, by the id of its parameter, is stepped in its place.

        Returns the state of the parameters after the step.
        """
        owners = {stand_ins.get(id(parameter), parameter): parameter for parameter in parameters}
        chosen = {id(parameter): stepped for stepped, parameter in owners.items()}
        groups = [self._reduced(index, chosen) for index in range(len(self._optimizer.param_groups))]
        known = {
            (stepped := chosen[id(parameter)]): _with_counter_beside(stepped, values)
            for parameter, values in state.items()
        }
        stand_in = shadow(self._optimizer, groups, {**known, **_shared_state(self._optimizer)})
        before = _shared_values(stand_in)
        self.returned = self._step(stand_in, *args, **kwargs)
        after = _shared_values(stand_in)
        self._changes.append(
            {place: value for place, (value, mark) in after.items() if before.get(place, (None, None))[1] != mark}
        )
        return {
            owners.get(key, key): dict(values)
            for key, values in stand_in.state.items()
            if isinstance(key, torch.Tensor)
        }

    def run_in_place(
        self, parameters: Iterable[torch.Tensor], args: Iterable[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> None:
        """Step these parameters with the state that the optimizer has of them, which stays where it is."""
        parameters, state = list(parameters), self._optimizer.state
        known = {parameter: state[parameter] for parameter in parameters if parameter in state}
        for parameter, values in self.run(parameters, known, args, kwargs).items():
            entry = state[parameter]  # the dict stays the same, because others may hold on to it
            entry.clear()
            entry.update(values)

    def _reduced(self, index: int, chosen: Mapping[int, torch.Tensor]) -> dict[str, Any]:
        group, foreach = self._optimizer.param_groups[index], self._foreach[index]
        parameters = [chosen.get(id(p), self._placeholder) for p in group["params"]]
        choice = {} if foreach is None else {"foreach": foreach}
        return {**_copied_options(group), **choice, "params": parameters}

    def merge(self) -> dict[tuple[str, int, Any], Any]:
        """Write the shared values back to the optimizer. Raises if the parts did not agree on them."""
        merged: dict[tuple[str, int, Any], Any] = {}
        for change in self._changes:
            for place, value in change.items():
                if not _same(merged.setdefault(place, value), value):
                    raise NotSeparable(f"its {place[0]} value {place[2]!r} depends on all parameters")
        for place, value in merged.items():
            self._write(place, value)
        return merged

    def _write(self, place: tuple[str, int, Any], value: Any) -> None:
        space, index, name = place
        optimizer = self._optimizer
        spaces: dict[str, Any] = {"state": optimizer.state, "attribute": vars(optimizer)}
        target = optimizer.param_groups[index] if space == "group" else spaces[space]
        current = target.get(name)
        if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and current.shape == value.shape:
            current.copy_(value)  # others may hold on to it
        else:
            target[name] = value


class StepCall:
    """The arguments of one `step()`. A closure is evaluated once, before any bucket."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = list(args)
        self.kwargs = dict(kwargs)
        self._loss: Any = None
        self._had_closure = False

    @property
    def closure(self) -> Callable[[], Any] | None:
        closure: Callable[[], Any] | None = self.args[0] if self.args else self.kwargs.get("closure")
        return closure if callable(closure) else None

    def evaluate_closure(self) -> None:
        closure = self.closure
        if closure is not None:
            with torch.enable_grad():
                self._loss = closure()
            self._had_closure = True
            self._set_closure(None)

    def give_back_loss(self) -> None:
        """Let the outer step return what the closure returned."""
        if self._had_closure:
            self._set_closure(lambda: self._loss)

    def _set_closure(self, closure: Callable[[], Any] | None) -> None:
        if self.args:
            self.args[0] = closure
        else:
            self.kwargs["closure"] = closure


def _shared_values(stand_in: Optimizer) -> dict[tuple[str, int, Any], tuple[Any, Any]]:
    """Return every value that belongs to no single parameter, with a mark that changes when the value does."""
    spaces: list[tuple[str, int, Any]] = [("group", i, group) for i, group in enumerate(stand_in.param_groups)]
    spaces += [("state", 0, stand_in.state), ("attribute", 0, vars(stand_in))]
    return {
        (space, index, name): (value, mark_of(value))
        for space, index, values in spaces
        for name, value in values.items()
        if not isinstance(name, torch.Tensor) and name not in _OWN_ATTRIBUTES
    }


def mark_of(value: Any) -> Any:
    """Return a mark that changes when the value does. Device memory is not read."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return value if isinstance(value, int | float | str | bool | tuple) else id(value)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return first is second or (type(first) is type(second) and bool(first == second))


def _all_same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(_same, first, second))


# ------------------------------------------------------------------------------------------------- finding out


def skips_parameters_without_gradient(optimizer: Optimizer) -> bool:
    """Whether the optimizer skips parameters without a gradient. Torch's own do; others may decay or clamp them."""
    return type(optimizer) in _KNOWN_SEPARABLE


def own_way_of(optimizer: Optimizer) -> str:
    """How an optimizer takes care of its state's memory by itself, so that it is left alone; "" where it does not."""
    if getattr(optimizer, "is_paged", False):
        return "bitsandbytes pages its state between device and host by itself"
    if type(optimizer).__module__.partition(".")[0] == "torchao":
        return "torchao compiles its step and keeps its state in tensors of its own kind"
    return ""


def check_separable(optimizer: Optimizer) -> None:
    """Raise `NotSeparable` unless stepping parameters in parts is the same as stepping them at once.

    Torch's own classes are known. Others are inspected and then tried: three steps over cut-down stand-ins of their
    parameters, together and one by one, must give the same bits, must leave the same shared values (also inside of
    containers and objects that the optimizer keeps), and must return the same. They may draw no random numbers, which
    would be other ones where parameters are stepped in another order.
    """
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise NotSeparable("its step is differentiable")
    if type(optimizer) in _KNOWN_SEPARABLE:
        return
    if own_way := own_way_of(optimizer):
        raise NotSeparable(own_way)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise NotSeparable("its step() evaluates the closure several times")
    _check_attributes(optimizer)
    try:
        together, apart = _try_out(optimizer, in_parts=False), _try_out(optimizer, in_parts=True)
    except NotSeparable:
        raise
    except Exception as error:  # a third party's step may do anything on stand-ins
        raise NotSeparable(f"a trial step failed ({quoted(error)})") from error
    if together.shared.keys() != apart.shared.keys() or not _all_same(together.parameters, apart.parameters):
        raise NotSeparable("the update of one parameter depends on the others")
    if not all(_same(value, apart.shared[place]) for place, value in together.shared.items()):
        raise NotSeparable("values that all parameters share depend on all of them")
    if not _all_same(together.kept, apart.kept):
        raise NotSeparable("it changes what it keeps in its attributes once a call, not once a parameter")
    if not _same(together.returned, apart.returned):
        raise NotSeparable("its step() returns a value that depends on all parameters")


def _check_attributes(optimizer: Optimizer) -> None:
    mine = {id(p) for p in parameters_of(optimizer)}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        leaves = tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]
        if any(isinstance(leaf, Optimizer) for leaf in leaves):
            raise NotSeparable(f"it wraps another optimizer in .{name}")
        if any(id(leaf) in mine for leaf in leaves):
            raise NotSeparable(f"it keeps a list of parameters of its own in .{name}")


@dataclasses.dataclass(slots=True)
class _Trial:
    """The results of trial steps."""

    parameters: list[torch.Tensor]
    shared: dict[tuple[str, int, Any], Any]
    kept: list[Any]
    """The values inside of the optimizer's attributes."""
    returned: Any = None


def _try_out(optimizer: Optimizer, *, in_parts: bool) -> _Trial:
    """Run three trial steps. The optimizer and the random state stay as they are."""
    devices = {p.device for p in parameters_of(optimizer) if p.device.type != "cpu"}
    kinds = {device.type for device in devices}
    indices = [device.index or 0 for device in devices]
    rng = torch.random.fork_rng(devices=indices, device_type=kinds.pop() if kinds else None)
    with rng, HostRng().repeated(), quiet_steps():
        torch.manual_seed(0)
        groups, state = _stand_ins(optimizer)
        trial = shadow(optimizer, groups, _shared_state(optimizer))
        own = {name: _own_copy(value) for name, value in vars(trial).items() if name not in _OWN_ATTRIBUTES}
        vars(trial).update(own)
        draws = _Draws(devices, own)
        found = _Trial([p for group in groups for p in group["params"]], {}, [])
        for _ in range(3):
            split = SplitStep(trial)
            for part in [[p] for p in found.parameters] if in_parts else [found.parameters]:
                state.update(split.run(part, {p: state[p] for p in part if p in state}))
            found.shared = split.merge()
            if in_parts:
                split.run([], {})  # the rest of the outer step must not fail either
            found.returned = split.returned
        if draws.happened():
            raise NotSeparable("its step draws random numbers, in the order of its parameters")
        found.kept = [leaf for value in own.values() for leaf in _leaves(value)]
        return found


class _Draws:
    """Tells whether somebody has drawn a random number since it was made: from the process's generators, or from those
    that an optimizer keeps in its attributes."""

    def __init__(self, devices: Iterable[torch.device], attributes: Mapping[str, Any]) -> None:
        self._devices = sorted(devices, key=str)
        self._own = [value for value in attributes.values() if is_generator(value)]
        self._host, self._before = Fingerprint(), self._states()

    def happened(self) -> bool:
        return self._host.moved() or not _all_same(self._before, self._states())

    def _states(self) -> list[Any]:
        of_devices = [torch.get_device_module(device).get_rng_state(device) for device in self._devices]
        own = [state_of(generator) for generator in self._own]
        return [
            torch.get_rng_state(),
            *of_devices,
            *(state if isinstance(state, torch.Tensor) else repr(state) for state in own),
        ]


_CONTAINERS = (list, tuple, set, deque)


def _own_copy(value: Any, *, is_attribute: bool = True) -> Any:
    """Return a copy of an attribute that a trial may change. Models and other large objects are not copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return torch.Generator(device=value.device).set_state(value.get_state())
    if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
        return copy.deepcopy(value)
    if isinstance(value, dict) and hasattr(value, "copy"):
        duplicate = value.copy()
        duplicate.update((name, _own_copy(one, is_attribute=False)) for name, one in value.items())
        return duplicate
    if type(value) in _CONTAINERS:
        return type(value)(_own_copy(one, is_attribute=False) for one in value)
    if is_attribute and _is_plain_object(value):
        duplicate = type(value).__new__(type(value))  # type: ignore[call-overload]
        vars(duplicate).update(_own_copy(vars(value), is_attribute=False))
        return duplicate
    return value


def _is_plain_object(value: Any) -> bool:
    new: Any = type(value).__new__
    is_plain = new is object.__new__ or isinstance(value, types.SimpleNamespace)
    return is_plain and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type)


def _leaves(value: Any) -> list[Any]:
    """Return the parts of an attribute that can be compared."""
    if isinstance(value, dict):
        return [leaf for item in value.items() for leaf in _leaves(item)]
    if type(value) in _CONTAINERS:
        items = sorted(value, key=repr) if isinstance(value, set) else value
        return [len(value), *(leaf for one in items for leaf in _leaves(one))]
    if isinstance(value, torch.Tensor | int | float | str | bool):
        return [value]
    return _leaves(vars(value)) if _is_plain_object(value) and not callable(value) else []


def _stand_ins(optimizer: Optimizer) -> tuple[list[dict[str, Any]], State]:
    """Return two cut-down parameters a group, with gradients of different sizes and, where it can be cut, state."""
    generator = torch.Generator().manual_seed(1)
    groups: list[dict[str, Any]] = []
    state: State = {}
    for group in optimizer.param_groups:
        stand_ins: list[torch.Tensor] = []
        for parameter in [p for p in group["params"] if p.requires_grad][:2]:
            small = torch.nn.Parameter(_cut(parameter))
            small.grad = torch.randn(small.shape, generator=generator, device="cpu").to(small) * 10 ** (
                1 + len(stand_ins)
            )
            stand_ins.append(small)
            known = optimizer.state.get(parameter)
            if known and all(_can_cut(value, parameter) for value in known.values()):
                state[small] = {name: _cut_like(value, parameter) for name, value in known.items()}
        groups.append({**_copied_options(group), "params": stand_ins})
    return groups, state


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[tuple(slice(0, 4) for _ in tensor.shape)].clone()


def _can_cut(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state value can be cut like its parameter. Factored or packed state cannot; a trial starts without."""
    if type(value) is torch.Tensor:
        return value.shape == parameter.shape or value.numel() == 1
    return isinstance(value, int | float)


def _cut_like(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return _cut(value).to(parameter.device)
    return copy.deepcopy(value)
