"""Parameters are stepped in backward, as soon as their gradients are final; `optimizer.step()` only ends the step.

    with contextlib.ExitStack() as undo:
        BackwardSteps(model, bucket_bytes).attach(undo)

Autograd adds up all contributions to a parameter's gradient before it stores the sum, and calls a hook then. Everything
that needs the old value has run by that time: an operation that reads a parameter in backward also gives it a gradient,
or autograd notices that the parameter was written to. (A recompute may read a parameter again without giving it a
gradient; the rehearsal of the plan looks for that, in staged_steps.py.) Small parameters are collected, up to
`bucket_bytes`, and stepped together, on a shadow of the user's optimizer (separable.py), with the implementation that a
step of all parameters would have had. A `ReleasedGradient` takes the place of the gradient, and raises when somebody
looks at it.

NOTE [never silently wrong]: a loop may do things to gradients between backward and `step()`, and none of them can be
done here. Cases that are recognisable before any parameter is changed are refused then: losses scaled by a
`GradScaler`, closures, `create_graph`, optimizers that are not separable, several optimizers, several devices or
processes. Cases that show only after the step has been taken raise, and say what state the weights are in: reading or
clipping gradients, a second backward before `step()` or before `zero_grad()`, another learning rate between backward
and `step()`, a second `step()`.

NOTE [a backward that fails]: the parameters that were stepped before the error are updated, the others are not. The
error is the user's and is raised as it is; the next backward or step raises `PartialStepError` until
`optimizer.load_state_dict()` has put a whole state in place. If nothing was stepped, nothing has changed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from memscale._errors import PartialStepError, StepInBackwardError
from memscale._torch import private
from memscale._torch.interception import intercept
from memscale._torch.optimizer_steps import (
    StepOrder,
    StepWatcher,
    owns_any,
    parameters_of,
    watch_steps,
)
from memscale._torch.overrides import undo_with
from memscale._torch.released_gradients import ReleasedGradient, is_released
from memscale.techniques.offload.optimizer.separable import (
    NotSeparable,
    SplitStep,
    StepCall,
    check_separable,
    idle_shadow,
    is_shadow,
    mark_of,
    owners_of,
    skips_parameters_without_gradient,
)
from memscale.techniques.offload.optimizer.shared_memory import SharedMemory

_BROKEN: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
"""Optimizers whose last backward failed half-way, with the failure. This outlives a plan."""
_WITHOUT = "Set step_in_backward=False to train so."


class BackwardPass:
    """One backward, and the step that is taken in it."""

    def __init__(self, optimizer: Optimizer, bucket_bytes: int, let_go: Callable[[torch.Tensor], None]) -> None:
        self.number = private.graph_task_id()
        self.split = SplitStep(optimizer, _is_trained)
        self.num_stepped = 0
        self.options = options_of(optimizer)
        self._mine = {id(parameter) for parameter in parameters_of(optimizer)}
        self._bucket_bytes = bucket_bytes
        self._let_go = let_go
        self._ready: list[torch.Tensor] = []
        self._ready_bytes = 0

    def takes(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._mine

    def take(self, parameter: torch.Tensor) -> None:
        """Take in a parameter whose gradient is final."""
        self._ready.append(parameter)
        self._ready_bytes += parameter.nbytes
        if self._ready_bytes >= self._bucket_bytes:
            self.step()

    def step(self) -> None:
        """Step the parameters that were collected."""
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        if not ready:
            return
        self.num_stepped += len(ready)  # an error from here on may leave some of them changed
        self.split.run_in_place(ready)
        for parameter in ready:
            self._let_go(parameter)


def _is_trained(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of the groups, without their parameters, in a form that can be compared."""
    return [{name: mark_of(value) for name, value in g.items() if name != "params"} for g in optimizer.param_groups]


def release(parameter: torch.Tensor) -> None:
    """Free the gradient's memory, and put in its place an object that raises when it is looked at."""
    parameter.grad = ReleasedGradient(parameter)


class BackwardSteps(StepWatcher):
    """The steps of one model's optimizer. See NOTE [never silently wrong]."""

    order = StepOrder.TAKE_OVER

    def __init__(self, model: nn.Module, bucket_bytes: int, optimizer: Optimizer | None = None) -> None:
        """`optimizer=None` means the one that owns the model's parameters when the first gradient comes."""
        self._model = weakref.ref(model)
        self._bucket_bytes = bucket_bytes
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self._hooks = contextlib.ExitStack()
        """The hooks on the optimizer."""
        self._under_way: BackwardPass | None = None
        self._done: BackwardPass | None = None
        """The step whose backward is over and whose `optimizer.step()` has not come yet."""
        self._scaled_pass = -1
        """The last backward that began at a loss that a scaler had multiplied."""
        self._has_checked = False
        self._shared = SharedMemory()

    def attach(self, undo: contextlib.ExitStack) -> None:
        model = self._model()
        assert model is not None, "who attaches holds the model"
        undo.callback(self._let_go_of_all)
        undo.callback(self._hooks.close)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                undo.callback(parameter.register_post_accumulate_grad_hook(self._on_gradient).remove)
        undo_with(model, watch_steps(self), undo)
        undo_with(model, intercept(torch.amp.GradScaler, "scale", _ScaledLosses(self)), undo)

    def _let_go_of_all(self) -> None:
        model = self._model()
        for parameter in [] if model is None else model.parameters():
            if parameter.is_leaf and isinstance(parameter.grad, ReleasedGradient):
                parameter.grad.leave()

    # ---- in backward

    def note_scaled(self, gradient: torch.Tensor) -> None:
        """Note that the backward that runs now began at a scaled loss."""
        self._scaled_pass = private.graph_task_id()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None or is_released(parameter.grad):
            return
        if self._under_way is None or self._under_way.number != private.graph_task_id():
            self._begin()
        one = self._under_way
        assert one is not None
        if one.takes(parameter):
            self._refuse_gradient(parameter)
            one.take(parameter)

    def _begin(self) -> None:
        """Begin a step at the first gradient of a backward, before anything is changed."""
        optimizer = self._found()
        self._note_failed_pass(optimizer)
        _refuse_broken(optimizer)
        for group in self._shared.new_groups(parameters_of(optimizer)):
            _refuse_shared(group)
        if self._done is not None:
            raise StepInBackwardError(
                "Backward runs a second time before optimizer.step(): gradients are accumulated over several batches, "
                "or a reentrant checkpoint runs a backward of its own. With step_in_backward=True the first of them "
                f"has stepped {self._done.num_stepped} parameters already, and the weights are those after that step. "
                f"{_WITHOUT}"
            )
        if private.graph_task_id() == self._scaled_pass:
            raise StepInBackwardError(
                "The loss was scaled by a torch.amp.GradScaler, which unscales gradients after backward; with "
                "step_in_backward=True there are none left then. Nothing was stepped. Train in bfloat16, which needs "
                "no scaler, or set step_in_backward=False."
            )
        self._under_way = BackwardPass(optimizer, self._bucket_bytes, release)
        private.at_end_of_backward(functools.partial(self._end, self._under_way))

    def _end(self, one: BackwardPass) -> None:
        """Note that the backward of this step is over."""
        one.step()
        if self._under_way is one:
            self._under_way, self._done = None, one

    def _refuse_gradient(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.requires_grad:
            raise StepInBackwardError(
                "Backward runs with create_graph=True, and its graph would need weights that step_in_backward=True has "
                f"changed by then. {_WITHOUT}"
            )
        if gradient.is_sparse and isinstance(self._found(), torch.optim.Adagrad):
            raise StepInBackwardError(
                "Adagrad steps all parameters in another way where one has a sparse gradient, which is not known "
                f"before the end of backward. {_WITHOUT}"
            )

    # ---- the optimizer

    def _found(self) -> Optimizer:
        """Return the optimizer, checked once; raise if its steps cannot be taken in backward."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is None:
            model = self._model()
            optimizer = _owner_of([] if model is None else model.parameters())
            self._optimizer, self._has_checked = weakref.ref(optimizer), False
        if not self._has_checked:
            _refuse_optimizer(optimizer)
            self._has_checked = True
            self._hooks.close()
            self._hooks.callback(optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True).remove)
        return optimizer

    def _after_load(self, optimizer: Optimizer) -> None:
        """Forget earlier failures: a whole state is in place."""
        _BROKEN.pop(optimizer, None)
        self._under_way = self._done = None
        self._let_go_of_all()

    def _note_failed_pass(self, optimizer: Optimizer) -> None:
        """See NOTE [a backward that fails]."""
        failed, self._under_way = self._under_way, None
        if failed is not None and failed.num_stepped:
            total = sum(map(_is_trained, parameters_of(optimizer)))
            _BROKEN[optimizer] = (
                f"a backward failed when {failed.num_stepped} of {total} parameters had been stepped in it. Those are "
                "updated, the others are not: load a checkpoint of the model and of the optimizer before going on"
            )

    # ---- the step that the training loop takes

    def concerns(self, optimizer: Optimizer) -> bool:
        model = self._model()
        return not is_shadow(optimizer) and model is not None and owns_any(optimizer, model.parameters())

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = StepCall(args[1:], kwargs)
        if call.closure is not None:
            raise StepInBackwardError(
                f"{type(optimizer).__name__}.step() was given a closure, which runs backward inside of the step; with "
                f"step_in_backward=True backward is the step. Nothing was stepped. {_WITHOUT}"
            )
        known = self._optimizer() if self._optimizer is not None else None
        if known is optimizer:
            self._note_failed_pass(optimizer)
        _refuse_broken(optimizer)
        released = [parameter for parameter in parameters_of(optimizer) if is_released(parameter.grad)]
        if not released and (self._done is None or known is not optimizer):
            return None  # gradients that came in another way are stepped as usual
        self._refuse_step(optimizer, known)
        self._step_rest(optimizer, call)
        return (idle_shadow(optimizer), *call.args), call.kwargs

    def _refuse_step(self, optimizer: Optimizer, known: Optimizer | None) -> None:
        name = type(optimizer).__name__
        if known is not None and known is not optimizer:
            raise StepInBackwardError(
                f"{name} is to step parameters that {type(known).__name__} has stepped in backward. {_WITHOUT}"
            )
        if self._done is None:
            raise StepInBackwardError(
                f"{name}.step() comes a second time for one backward. With step_in_backward=True the gradients are "
                f"used up, and the weights are those after one step. {_WITHOUT}"
            )
        changed = _changes(self._done.options, options_of(optimizer))
        if changed:
            raise StepInBackwardError(
                f"{', '.join(changed)} of {name} changed between backward and step(). With step_in_backward=True the "
                "step was taken in backward, with what it was before. Set it before backward, or set "
                "step_in_backward=False."
            )

    def _step_rest(self, optimizer: Optimizer, call: StepCall) -> None:
        """Step what got its gradient in another way, and parameters that the optimizer changes without a gradient."""
        done, self._done = self._done, None
        assert done is not None
        every = not skips_parameters_without_gradient(optimizer)
        rest = [p for p in parameters_of(optimizer) if not is_released(p.grad) and (every or p.grad is not None)]
        _BROKEN[optimizer] = (
            f"a step failed at {len(rest)} parameters when {done.num_stepped} others had been stepped in backward. "
            "Those are updated, and some of these are not: load a checkpoint of the model and of the optimizer before "
            "going on"
        )
        try:
            if rest:
                done.split.run_in_place(rest, call.args, call.kwargs)
            done.split.merge()
        except Exception as error:
            raise PartialStepError(_BROKEN[optimizer]) from error
        del _BROKEN[optimizer]  # not after what is no `Exception`, either: Ctrl-C leaves the same behind


class _ScaledLosses:
    """Wraps `GradScaler.scale` and marks the tensors that it returns."""

    def __init__(self, steps: BackwardSteps) -> None:
        self._steps = weakref.ref(steps)

    def __call__(self, pass_on: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled, steps = pass_on(scaler, outputs), self._steps()
        if steps is not None and scaler.is_enabled():
            for tensor in tree_leaves(scaled):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(steps.note_scaled)
        return scaled


def _changes(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Return the names of the options that differ, each once. Groups that were added since have stepped nothing."""
    pairs = zip(before, now, strict=False)
    return list(dict.fromkeys(name for old, new in pairs for name in {**old, **new} if old.get(name) != new.get(name)))


def _refuse_broken(optimizer: Optimizer) -> None:
    if optimizer in _BROKEN:
        raise PartialStepError(_BROKEN[optimizer])


def _owner_of(parameters: Iterable[torch.Tensor]) -> Optimizer:
    """Return the only optimizer that steps these parameters; raise if there is none, or more than one."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    found = owners_of(trained)
    if len(found) > 1:
        gc.collect()  # an optimizer that was replaced may only wait to be collected
        found = owners_of(trained)
    if not found:
        raise StepInBackwardError(
            "No optimizer owns parameters of this model, so nothing can be stepped in backward. Create it before the "
            "first backward, or set step_in_backward=False."
        )
    if len(found) > 1:
        names = " and ".join(sorted(type(optimizer).__name__ for optimizer in found))
        raise StepInBackwardError(
            f"{len(found)} optimizers own parameters of this model ({names}), and which of them steps after a backward "
            "is not known before. Use memscale.optimize(model, optimizer), or set step_in_backward=False."
        )
    return found[0]


def refuse_inseparable(optimizer: Optimizer) -> None:
    try:
        check_separable(optimizer)
    except NotSeparable as reason:
        raise StepInBackwardError(
            f"{type(optimizer).__name__} cannot step in backward, where one parameter is stepped after the other: "
            f"{reason}. Nothing was stepped. {_WITHOUT}"
        ) from reason


def _refuse_optimizer(optimizer: Optimizer) -> None:
    refuse_inseparable(optimizer)
    devices = sorted({str(parameter.device) for parameter in parameters_of(optimizer) if parameter.requires_grad})
    if len(devices) > 1:
        raise StepInBackwardError(
            f"The parameters of {type(optimizer).__name__} are on {' and '.join(devices)}, and with "
            f"step_in_backward=True they must be on one device. Nothing was stepped. {_WITHOUT}"
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise StepInBackwardError(
            f"{distributed.get_world_size()} processes train together, and their gradients are put together after "
            f"they are final in each; with step_in_backward=True that is too late. Nothing was stepped. {_WITHOUT}"
        )


def _refuse_shared(group: list[torch.Tensor]) -> None:
    raise StepInBackwardError(
        f"{len(group)} parameters of shape {tuple(group[0].shape)} share their memory: with step_in_backward=True one "
        f"would be stepped while the other is in use. Nothing was stepped. {_WITHOUT}"
    )
