"""A training step that runs out of device memory is done again, once, under a tighter plan.

Others may have taken memory since the plan was made, or a step needs more than was foreseen. What happens then:

- in **forward**: what the forward had made is released, the model is as it was before (buffers, attributes, random
  state), a tighter plan takes the place of the one in force, and the same forward runs again with the same arguments;
- in **backward**: the forward is run again in the same way, inside `loss.backward()`, and the gradients that had come
  to the model's outputs are sent through the new graph. A parameter that had its gradient already gets no second one.

Both are exact: the same weights, batch and random state give the same bits under any exact plan. Python state beside
the model is put back before the repetition, and what cannot be compared is refused (steps_beside.py). In steps that do
not run out of memory nothing is held on the device that the plan does not count: a copy of buffers that change, and of
outputs and their gradients up to `_LARGEST_GRADIENT_BYTES`, goes to the host.

NOTE [what is not repeated]: where the repetition might not be exact, the error is raised with the reason: the loss
reaches parameters beside the model's output, or its own backward ran out of memory; the forward uses parameters that
are not registered with the model; a node ran a backward pass of its own, so that gradients may have come in part; an
input needs a gradient; an input or a parameter was written to after the forward; the graph is kept (`retain_graph`);
the forward changed something of which there is no copy; gradients are scaled by us (fp16) or stepped with in backward;
several processes train together; the plan is one under which steps are observed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from memscale._errors import DoesNotFitError, MemScaleError, shortened
from memscale._execute.executor import Executor
from memscale._plan import Plan
from memscale._planning.replanning import Replanner
from memscale._planning.step_watch import bytes_on
from memscale._profile.inputs import Inputs
from memscale._torch import private
from memscale._torch.moment import Moment
from memscale._torch.optimizer_steps import living_optimizers, owns_any
from memscale._torch.overrides import ForwardOverride, MethodOverride, OwnHook
from memscale._torch.snapshots import containers_copied, is_unchanged
from memscale._torch.steps_beside import NotComparable, StepsBeside, Taken
from memscale._units import show_bytes
from memscale.techniques.offload.optimizer.buckets import values_here
from memscale.techniques.offload.optimizer.resumed_steps import watch_plain_steps
from memscale.techniques.recompute import RecomputedForward
from memscale.techniques.recompute.backward_errors import BackwardCall, rescue_with
from memscale.techniques.recompute.module_state import Layout, Memory, ModuleState

logger = logging.getLogger("memscale")

_LARGEST_GRADIENT_BYTES = 1 << 20
"""The size of outputs up to which their gradient is copied to the host, in case backward cannot be completed."""
_TIGHTER = 0.9
"""The share of its predicted peak within which a plan must fit that takes the place of one which ran out of memory."""
_MARK = "memscale_output"
_FIXED = (torch.Tensor, nn.Module, int, float, complex, str, bytes, type, type(None), torch.dtype, torch.device)
"""Attributes into which nobody needs to look: they cannot change, or are looked at by themselves."""
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What a batch may hold that is repeated: tensors, which know when they are written to, and what cannot change."""


def _same(leaf: Any) -> Any:
    return leaf


class _NotRepeatable(MemScaleError):
    """Why a step is not run again."""


class _Attributes:
    """The attributes of a model and its parts at one moment: which objects they are, and what containers and plain
    objects among them hold."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        values = layout.read()
        if values is None:  # the forward has made some
            layout = Layout(model)
            values = layout.read()
        self._layout, self._values = layout, values
        self._held = {id(value): (value, _held_by(value)) for value in values or () if not isinstance(value, _FIXED)}

    @property
    def are_other(self) -> bool:
        """Whether they are not what they were."""
        now = self._layout.read()
        if now is None or self._values is None or not all(map(operator.is_, now, self._values)):
            return True
        return not all(is_unchanged(held, _held_by(value)) for value, held in self._held.values())


def _held_by(value: Any) -> Any:
    """What a container holds; of another object, its attributes."""
    return containers_copied(vars(value) if hasattr(value, "__dict__") else value)


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class _Step:
    """A training forward, and what its repetition needs."""

    moment: Moment
    memory: Memory
    taken: Taken
    """The Python state beside the model."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: list[weakref.ref[torch.Tensor]] = dataclasses.field(default_factory=list)
    gradients: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Those that have come to its outputs, by the outputs' places."""
    values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """What those outputs were."""
    before: dict[int, tuple[torch.Tensor | None, int]] = dataclasses.field(default_factory=dict)
    """Gradients before the backward with their versions, by the id of the parameter."""
    is_reached: bool = False
    """A gradient has come to an output."""
    versions: list[tuple[torch.Tensor, int]] = dataclasses.field(default_factory=list)
    """Inputs and parameters, and how often each had been written to when the forward was over."""
    attributes: _Attributes | None = None
    """Those of the model and its parts when the forward was over."""
    problem: str | None = None
    """Why it cannot be repeated."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward: what its repetition would be given."""
        leaves = tree_leaves((args, kwargs))
        if any(not isinstance(leaf, _PLAIN) for leaf in leaves):
            self.problem = "the batch holds objects that the forward may have changed"
        self._note(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def note_versions(self, *held: Iterable[torch.Tensor]) -> None:
        """After the forward: what is not to change before its backward."""
        inputs = (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor))
        self._note([*inputs, *(tensor for tensors in held for tensor in tensors)])

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        self.versions = [(one, one._version) for one in tensors if not one.is_inference()]

    @property
    def has_changed(self) -> bool:
        """Whether the forward, run again, would see other inputs or weights."""
        return any(tensor._version != version for tensor, version in self.versions)


class Recovery:
    """Runs the steps of one model again that ran out of memory."""

    def __init__(self, executor: Executor, replanner: Replanner) -> None:
        self._executor = executor
        self._replanner = replanner
        self._state = ModuleState(executor.model, on_host=True)
        self._beside = StepsBeside(executor.model, self._held_by_attributes)
        self._step: _Step | None = None
        """The latest training forward, until its backward is over."""
        self._raw: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """What the forward that begins was called with."""
        self._is_again = False
        self._outputs_again: list[Any] | None = None
        self._lowest: Plan | None = None
        """A plan for which a tighter one was looked for in vain."""

    def attach(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        """Before any plan is: what plans put around the model's forward is around ours."""
        _Repeated(model, self).attach(undo)
        undo.callback(model.register_forward_pre_hook(_Called(self), prepend=True, with_kwargs=True).remove)
        undo.callback(model.register_forward_hook(_Returned(self)).remove)
        rescue_with(self, self, model, undo)
        watch_plain_steps(model, undo)
        undo.callback(self._forget)

    def _forget(self) -> None:
        self._step = self._raw = self._outputs_again = None
        self._beside.forget()

    def _held_by_attributes(self) -> list[Any]:
        layout = Layout(self._executor.model)
        return [value for value in (layout.read() or [])[layout.attributes] if not isinstance(value, _FIXED)]

    def devices(self) -> set[torch.device]:
        device = self._executor.settings.device
        return set() if device is None or self._executor.detached else {device}

    # ---- forward

    def called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_again:
            self._step = None
            self._raw = (args, kwargs) if self._repeats(model) else None

    def _repeats(self, model: nn.Module) -> bool:
        """Whether this is a training forward on a device that holds to a plan."""
        if torch.compiler.is_compiling() or private.inside_functional_transform() or private.graph_task_id() >= 0:
            return False
        is_training = model.training and torch.is_grad_enabled()
        return is_training and any(device.type != "cpu" for device in self.devices())

    def run(self, module: nn.Module, inner: Callable[[], Callable[..., Any]], args: Any, kwargs: Any) -> Any:
        raw, self._raw = self._raw, None
        if raw is None or self._is_again:
            return inner()(*args, **kwargs)
        (device,) = self.devices()
        step = _Step(Moment(device), self._state.before(), self._beside.before())
        again_args, again_kwargs = tree_map(_same, (args, kwargs))  # a forward may change the containers themselves
        raw = tree_map(_same, raw)
        step.begin(args, kwargs)
        try:
            output = inner()(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames hold activations
        else:
            self._remember(step, *raw)
            return output
        with _in_words(failure, "forward"):
            self._prepare(module, step, Inputs(again_args, again_kwargs), failure, "forward")
        try:
            with _in_words(failure, "forward"), _in_other_words(failure), self._beside.ran() as check:
                output = inner()(*again_args, **again_kwargs)
                check()
        except torch.OutOfMemoryError as error:
            failure = _unless_in_words(error)
        else:
            self._remember(step, *raw)
            return output
        raise _in_numbers(failure, "The batch was run again, and ran out of memory again", self._numbers(device))

    def _remember(self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward has succeeded; its backward may not."""
        step.args, step.kwargs = args, kwargs
        try:
            self._state.after(step.memory)
        except RuntimeError as error:
            step.problem = str(error)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
            step.problem = "an input of the model needs a gradient itself"
        if step.has_changed:
            step.problem = "the forward wrote to its input"
        model = self._executor.model
        self._beside.after(step.taken)
        step.note_versions(model.parameters(), model.buffers())
        step.attributes = _Attributes(model, step.memory.layout)
        self._step = step

    def _prepare(self, model: nn.Module, step: _Step, inputs: Inputs, failure: Exception, where: str) -> None:
        """All that the failed attempt made is released, and the model is as it was before, under a tighter plan."""
        self._refuse_unrepeatable(model)
        if step.problem is not None:
            raise _NotRepeatable(step.problem)
        if step.has_changed:
            raise _NotRepeatable("an input or a parameter of the model was written to after its forward")
        if step.attributes is not None and step.attributes.are_other:
            raise _NotRepeatable("an attribute of the model, or of one of its parts, was changed after its forward")
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.synchronize()
        try:
            self._beside.refuse_changes(step.taken)
            self._state.restore(step.memory)
        except RuntimeError as error:
            raise _NotRepeatable(str(error)) from None
        self._beside.show_before(step.taken)
        changed = self._tighten(model, inputs, inside=where == "forward")
        step.moment.restore()
        logger.warning(
            "out of memory in the %s of %s (%s): the step's memory was released, %s, and the batch runs again from the "
            "same weights and random state",
            where,
            type(model).__name__,
            shortened(str(failure)),
            changed,
        )

    def _refuse_unrepeatable(self, model: nn.Module) -> None:
        """See NOTE [what is not repeated]."""
        if self._executor.plan is None or self._replanner.is_observing:
            raise _NotRepeatable("its steps are being observed, under the most careful plan that there is")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise _NotRepeatable("several processes train together, and the others do not run it again")
        top = ForwardOverride.top_of(model)
        while isinstance(top, MethodOverride):
            if isinstance(top, RecomputedForward):
                raise _NotRepeatable("the model as a whole is recomputed or streamed")
            top = top._replaced

    def _tighten(self, model: nn.Module, inputs: Inputs, *, inside: bool) -> str:
        """Put a plan in force that takes less, and say what changed."""
        plan = self._executor.plan
        assert plan is not None
        # What the plan counts of the loop's own is not part of what is left for the model.
        promised, available = _promised(plan), self._available(model, inputs) + plan.loop_bytes
        budgets = {min(int(_TIGHTER * promised), available), min(promised - 1, available)}
        misfit = "It is the lowest that there is."
        for budget in sorted(budgets) if plan is not self._lowest else ():
            try:
                self._replanner.tighten(model, inputs, budget, inside=inside)
            except DoesNotFitError as error:
                misfit = str(error)
                continue
            now = self._executor.plan
            assert now is not None
            return f"the plan was tightened from {show_bytes(promised)} to {show_bytes(_promised(now))}"
        self._lowest = plan
        if promised > available:
            raise _NotRepeatable(f"{show_bytes(available)} are left for it, and no tighter plan fits. {misfit}")
        return f"no plan takes less than the one in force ({show_bytes(promised)})"

    def _available(self, model: nn.Module, inputs: Inputs) -> int:
        """What the device has for the step: what is free, and what the model has of it already."""
        (device,) = self.devices()
        free, _ = torch.accelerator.get_memory_info(device)
        unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        owners = [optimizer for optimizer in living_optimizers() if owns_any(optimizer, model.parameters())]
        state = tree_leaves([values_here(entry) for optimizer in owners for entry in optimizer.state.values()])
        gradients = [parameter.grad for parameter in model.parameters() if parameter.is_leaf]
        ours = bytes_on([*model.parameters(), *model.buffers(), *gradients, *state, *inputs.tensors()], device.type)
        return int(free + unused + ours)

    def _numbers(self, device: torch.device) -> str:
        plan = self._executor.plan
        free, total = torch.accelerator.get_memory_info(device)
        promise = "" if plan is None else f"the plan promises {show_bytes(_promised(plan))}; "
        return (
            f"{promise}{device} has {show_bytes(free)} free of {show_bytes(total)}, and this process holds "
            f"{show_bytes(torch.accelerator.memory_allocated(device))}. Free what others hold, lower the batch size, "
            "or set a memory_budget_gb that leaves room for them"
        )

    # ---- backward

    def returned(self, output: Any) -> None:
        """The forward is over: gradients that come to its outputs are noted."""
        if self._is_again:
            self._outputs_again = tree_leaves(output)
            return
        step = self._step
        if step is None:
            return
        leaves = tree_leaves(output)
        shown = [
            (id(leaf.grad_fn), leaf.output_nr) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn
        ]
        if len(set(shown)) < len(shown):
            step.problem = "the model returns one tensor twice"
        for place, leaf in enumerate(leaves):
            if type(leaf) is torch.Tensor and leaf.grad_fn is not None:
                places = private.mark_of(leaf.grad_fn, _MARK) or {}
                private.mark_node(leaf.grad_fn, _MARK, {**places, place: weakref.ref(step)})
                step.outputs.append(weakref.ref(leaf))
                if (value := _on_host(leaf)) is not None:
                    step.values[place] = value
                leaf.register_hook(_Arrived(weakref.ref(step), place))

    def begin(self) -> None:
        """A backward begins: which gradients are there, and as they are."""
        step = self._step
        if step is not None and not self._is_again:
            found = step.memory.values[step.memory.layout.parameters]
            parameters = [p for p in found if p is not None and p.requires_grad and p.is_leaf]
            step.before = {id(p): (p.grad, 0 if p.grad is None else p.grad._version) for p in parameters}

    def end(self) -> None:
        if self._step is not None and self._step.is_reached and not self._is_again:
            self._step = None

    def rescue(self, call: BackwardCall, error: torch.OutOfMemoryError) -> bool:
        step = self._step
        if step is None or self._is_again or self._executor.is_orphaned:
            return False
        self._step = None
        model = self._executor.model
        with _in_words(error, "backward"):
            reached = self._reached(call, step)
            if reached is None:
                return False
            if step.problem is not None:
                raise _NotRepeatable(step.problem)
            self._refuse_backward(call)
            _refuse_hooks(model, step)
            gradients = _gradients_of(step, reached)
            rest = _without_gradient(model, step)
            if call.had_inner_passes and rest is not None:
                raise _NotRepeatable(
                    "a part of the model ran a backward pass of its own (reentrant checkpointing does), so that "
                    "gradients may have come in part"
                )
            _let_go(call.roots, step)
        del call
        self._run_again(model, step, gradients, rest, error)
        return True

    def _refuse_backward(self, call: BackwardCall) -> None:
        if not call.is_simple:
            raise _NotRepeatable("its graph is kept, or only some gradients are asked for")
        if self._replanner.config.step_in_backward or self._executor.scales_gradients:
            raise _NotRepeatable("gradients are scaled, or stepped with, before the backward is over")

    def _reached(self, call: BackwardCall, step: _Step) -> list[int] | None:
        """The places of the outputs that the pass began at, seen from the loss; None: it is no pass of this model."""
        found, leaves = _walk([root.grad_fn for root in call.roots], step)
        if not found:
            return None
        if leaves:
            raise _NotRepeatable("the loss depends on parameters beside what the model returns")
        places = [place for _, marks in found for place in marks]
        inner = [following for node, _ in found for following, _ in node.next_functions]
        if any(id(leaf) not in step.before for leaf in _leaves_under([node for node, _ in found])):
            raise _NotRepeatable("its forward uses parameters that are not registered with the model")
        if len(found) > 1 and _walk(inner, step)[0]:
            raise _NotRepeatable("the loss depends on several outputs of the model, one of which depends on another")
        return places

    def _run_again(
        self,
        model: nn.Module,
        step: _Step,
        gradients: dict[int, torch.Tensor],
        rest: list[torch.Tensor] | None,
        failure: torch.OutOfMemoryError,
    ) -> None:
        (device,) = self.devices()
        now = Moment(device)
        self._is_again = True
        try:
            with _in_words(failure, "backward"):
                self._prepare(model, step, Inputs(step.args, step.kwargs), failure, "backward")
            self._replanner.is_repeating = True
            with _in_words(failure, "backward"):
                self._forward_again(model, step, failure)
                outputs, self._outputs_again = self._outputs_again or [], None
                _refuse_other_values(step, outputs)
                chosen = [(outputs[place], gradient.to(outputs[place].device)) for place, gradient in gradients.items()]
                del outputs
                _go_back(chosen, rest)
                self._refuse_changes(step)
        except torch.OutOfMemoryError as error:
            again = _unless_in_words(error)
        else:
            return
        finally:
            self._is_again, self._outputs_again = False, None
            self._replanner.is_repeating = False
            now.restore()
        raise _in_numbers(again, "The batch was run again, and ran out of memory again", self._numbers(device))

    def _forward_again(self, model: nn.Module, step: _Step, failure: torch.OutOfMemoryError) -> None:
        with _in_other_words(failure), step.moment.repeated(), torch.enable_grad(), self._beside.ran() as check:
            model(*step.args, **step.kwargs)
            check()
        self._beside.show_after(step.taken)

    def _refuse_changes(self, step: _Step) -> None:
        """The failed pass and its repetition have left what is beside the model as the forward had left it."""
        try:
            self._beside.refuse_changes(step.taken)
        except NotComparable as error:
            raise _NotRepeatable(f"{error}, by the backward itself") from None


def _refuse_other_values(step: _Step, outputs: list[Any]) -> None:
    """What the forward gave must be what it gave the first time, to the last bit."""
    for place, before in step.values.items():
        if not _is_same(before, outputs[place].detach().to("cpu")):
            raise _NotRepeatable("the forward gave other values when it was run again with the same inputs")


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit, so that NaN is NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*bits)


def _refuse_hooks(model: nn.Module, step: _Step) -> None:
    """Hooks of the loop's own see the failed attempt, or are not there in the second."""
    outputs = [output for reference in step.outputs if (output := reference()) is not None]
    if any(len(output._backward_hooks or ()) > 1 for output in outputs):
        raise _NotRepeatable("an output of the model has hooks of the loop's own")
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        raise _NotRepeatable("parameters have hooks that use their gradients during backward")


def _go_back(chosen: list[tuple[torch.Tensor, torch.Tensor]], rest: list[torch.Tensor] | None) -> None:
    if rest is None or rest:
        outputs, gradients = [pair[0] for pair in chosen], [pair[1] for pair in chosen]
        chosen.clear()
        torch.autograd.backward(outputs, gradients, inputs=rest)


def _promised(plan: Plan) -> int:
    """What the plan says the device will hold."""
    return plan.predicted_peak_bytes if plan.predicted_reserved_bytes is None else plan.predicted_reserved_bytes


def _gradients_of(step: _Step, reached: list[int]) -> dict[int, torch.Tensor]:
    if any(place not in step.gradients for place in reached):
        raise _NotRepeatable(
            "the gradient of the model's output was not complete, or is too large to be kept for this: return the loss "
            "from the model's forward, and its backward can be repeated"
        )
    return {place: step.gradients[place] for place in reached}


def _without_gradient(model: nn.Module, step: _Step) -> list[torch.Tensor] | None:
    """Parameters whose gradient has not come in the failed pass; None: all of them."""
    parameters: list[torch.Tensor] = [p for p in model.parameters() if id(p) in step.before]
    rest = [p for p in parameters if not _has_come(p, *step.before[id(p)])]
    step.before = {}
    return None if len(rest) == len(parameters) else rest


def _has_come(parameter: torch.Tensor, before: torch.Tensor | None, version: int) -> bool:
    return parameter.grad is not before or (before is not None and before._version != version)


def _let_go(roots: tuple[torch.Tensor, ...], step: _Step) -> None:
    """The loop holds the loss, and maybe the output: they are cut off the graph, so that it can die."""
    outputs = [output for reference in step.outputs if (output := reference()) is not None]
    for tensor in (*roots, *outputs):
        with contextlib.suppress(RuntimeError):  # a view
            tensor.detach_()
    step.outputs = []


def _walk(starts: list[Any], step: _Step) -> tuple[list[tuple[Any, list[int]]], bool]:
    """The first nodes of this step's outputs that are met, with their places; whether leaves are met beside them."""
    waiting = [node for node in starts if node is not None]
    seen, found, leaves = set(waiting), [], False
    while waiting:
        node = waiting.pop()
        marks = private.mark_of(node, _MARK) or {}
        places = [place for place, reference in marks.items() if reference() is step]
        if places:
            found.append((node, places))
            continue
        leaves = leaves or hasattr(node, "variable")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found, leaves


def _leaves_under(starts: list[Any]) -> list[torch.Tensor]:
    """The tensors to which a graph adds gradients."""
    waiting, leaves = [*starts], []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return leaves


@contextlib.contextmanager
def _in_other_words(failure: torch.OutOfMemoryError) -> Iterator[None]:
    """What else fails in a repetition is not the user's to see: the step ran out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, _NotRepeatable):
        raise
    except NotComparable as error:
        raise _NotRepeatable(str(error)) from None
    except Exception as error:
        said = f"{type(error).__name__}: {shortened(str(error))}"
        raise _NotRepeatable(f"run again, it failed with {said}") from None


def _unless_in_words(error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
    """The error without its frames, which hold activations; one that says all is raised as it is."""
    if getattr(error, "_is_in_words", False):
        raise error
    return error.with_traceback(None)


@contextlib.contextmanager
def _in_words(failure: torch.OutOfMemoryError, where: str) -> Iterator[None]:
    """What cannot be repeated is the error that it was, with the reason."""
    try:
        yield
    except _NotRepeatable as reason:
        said = f"The batch is not run again after this failure in {where}: {reason}"
    else:
        return
    raise _in_numbers(failure, said, "")


def _in_numbers(failure: torch.OutOfMemoryError, said: str, numbers: str) -> torch.OutOfMemoryError:
    text = f"{shortened(str(failure))} {said}{'; ' if numbers else ''}{numbers}"
    error = torch.OutOfMemoryError(text)
    error._is_in_words = True  # type: ignore[attr-defined]
    return error


class _Repeated(ForwardOverride):
    """The model's forward, which may be run twice."""

    may_be_compiled = True

    def __init__(self, module: nn.Module, recovery: Recovery) -> None:
        super().__init__(module)
        self._recovery = recovery

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner()(*args, **kwargs)
        return self._recovery.run(self.module, self.inner, args, kwargs)


class _Called(OwnHook):
    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery

    @private.never_compiled
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recovery.called(model, args, kwargs)


class _Returned(OwnHook):
    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery

    @private.never_compiled
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        self._recovery.returned(output)


class _Arrived:
    """Hangs on an output: its gradient is sent to the host, in the order of the device's work, unless it is large."""

    def __init__(self, step: weakref.ref[_Step], place: int) -> None:
        self._step = step
        self._place = place

    def __call__(self, gradient: torch.Tensor | None) -> None:
        step = self._step()
        if step is None or gradient is None:  # of an output beside it, of the same node, that the loss does not use
            return
        step.is_reached = True
        if (copy := _on_host(gradient)) is not None:
            step.gradients[self._place] = copy


def _on_host(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy that is on its way to the host, in the order of the device's work; None if it would be large."""
    if tensor.layout is not torch.strided or tensor.nbytes > _LARGEST_GRADIENT_BYTES:
        return None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type != "cpu")
    return copy.copy_(tensor.detach(), non_blocking=True)
