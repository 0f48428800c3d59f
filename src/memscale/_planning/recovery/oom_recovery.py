"""A training step that runs out of device memory is done again, once, under a tighter plan.

Others may have taken memory since the plan was made, or a step needs more than was foreseen. What happens then:

- in **forward**: what the forward had made is released, the model is as it was before (buffers, attributes, random
  state), a tighter plan takes the place of the one in force, and the same forward runs again with the same arguments;
- in **backward**: the forward is run again in the same way, inside `loss.backward()`, and the gradients that had come
  to the model's outputs are sent through the new graph. A parameter that had its gradient already gets no second one.

Both are exact: the same weights, batch and random state give the same bits under any exact plan. Python state beside
the model is put back before the repetition, and what cannot be compared is refused (steps_beside.py). In steps that do
not run out of memory nothing is held on the device that the plan does not count: a copy of buffers that change, and of
outputs and their gradients up to `LARGEST_GRADIENT_BYTES`, goes to the host.

NOTE [run twice]: after a failing forward nothing is known of what it would have given. So the forward is then run
twice, and both must give the same bits: state that is not seen, and so not put back, shows itself. The second counts.

NOTE [by default]: where nobody has asked for it, only steps of models are repeated whose code is seen to keep nothing
before anything runs again (plain_code.py), and beside which nothing changes from step to step. All that is refused
where it was asked for is refused there, too: two arguments that do not lean on each other. And only failures in
**forward** are: between a forward and its backward the loop may write to weights without a trace
(`weight.data.mul_(0.5)`, a kernel of an extension), and where a gate is zero no output tells of that. Until a forward
has failed, only its own code ran.

NOTE [what is not repeated]: where the repetition might not be exact, the error is raised with the reason: the loss
reaches parameters beside the model's output, or its own backward ran out of memory; the forward uses parameters that
are not registered with the model; a node ran a backward pass of its own, so that gradients may have come in part; an
input needs a gradient; an input or a parameter was written to after the forward; the graph is kept (`retain_graph`);
the forward changed something of which there is no copy; gradients are scaled by us (fp16) or stepped with in backward;
several processes train together; the plan is one under which steps are observed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from memscale._errors import DoesNotFitError, MemScaleError, shortened
from memscale._execute.executor import Executor
from memscale._plan import Plan
from memscale._planning.loop.replanning import Replanner
from memscale._planning.loop.step_watch import bytes_on
from memscale._planning.recovery.not_repeatable import (
    NotRepeatable,
    in_numbers,
    in_other_words,
    in_words,
    unless_in_words,
)
from memscale._planning.recovery.plain_code import PlainModel
from memscale._planning.recovery.repeated_step import (
    FIXED,
    Attributes,
    OpenOutputs,
    Step,
    gradients_of,
    is_given_back,
    is_of_model,
    let_go,
    reached_outputs,
    refuse_draws,
    refuse_hooked_nodes,
    refuse_hooks,
    refuse_other_containers,
    refuse_other_outputs,
    refuse_other_values,
    refuse_unused_outputs,
    refuse_written_outputs,
    shown_values,
    without_gradient,
)
from memscale._planning.recovery.steps_beside import MOST_NOTED, StepsBeside, Taken
from memscale._planning.recovery.watched_run import NotComparable
from memscale._profile.inputs import Inputs
from memscale._torch import private
from memscale._torch.moment import Draws, Moment, is_recorded
from memscale._torch.optimizer_steps import living_optimizers, owns_any
from memscale._torch.overrides import ForwardOverride, MethodOverride, OwnHook
from memscale._torch.snapshots import num_elements_in
from memscale._torch.unversioned_steps import STEPS
from memscale._units import show_bytes
from memscale.techniques.offload.optimizer.buckets import values_here
from memscale.techniques.offload.optimizer.resumed_steps import watch_plain_steps
from memscale.techniques.recompute import RecomputedForward
from memscale.techniques.recompute.backward_errors import BackwardCall, rescue_with
from memscale.techniques.recompute.module_state import Layout, ModuleState

logger = logging.getLogger("memscale")

_TIGHTER = 0.9
"""The share of its predicted peak within which a plan must fit that takes the place of one which ran out of memory."""
_ONLY_FORWARDS = (
    "what a loop has written to weights since the forward cannot always be seen, so a failing backward is repeated "
    'only where that is asked for (recover_from_oom="plain" or True)'
)


def _same(leaf: Any) -> Any:
    return leaf


class Recovery:
    """Runs the steps of one model again that ran out of memory."""

    def __init__(self, executor: Executor, replanner: Replanner, extent: bool | str = True) -> None:
        """`extent`: `Config.recover_from_oom`. See NOTE [by default]."""
        self._is_asked_for = extent is True
        """Steps of models that are not of plain code are run again, too."""
        self.repeats_backward = extent != "forward"
        self._plain: PlainModel | None = None
        self._executor = executor
        self._replanner = replanner
        self._state = ModuleState(executor.model, on_host=True)
        self._beside = StepsBeside(executor.model, self._held_by_attributes)
        self._step: Step | None = None
        """The latest training forward, until its backward is over."""
        self._raw: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """What the forward that begins was called with."""
        self._is_again = False
        self._open = OpenOutputs()
        """What earlier forwards under autocast have returned, until their backward comes."""
        self._outputs_again: list[Any] | None = None
        self._lowest: Plan | None = None
        """A plan for which a tighter one was looked for in vain."""
        self._refused_under: Plan | None = None
        """The plan under which the latest step ran out of memory and was not run again."""
        self._hindrance: str | None = None
        """Why no step of this model is run again, whatever happens. Nothing is noted then."""
        if not self._is_asked_for:
            self._hindrance = _why_not_plain(executor.model)

    @property
    def may_repeat(self) -> bool:
        """Whether there are steps of this model that are run again."""
        return self._hindrance is None

    def attach(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        """Before any plan is: what plans put around the model's forward is around ours."""
        _Repeated(model, self).attach(undo)
        undo.callback(model.register_forward_pre_hook(_Called(self), prepend=True, with_kwargs=True).remove)
        undo.callback(model.register_forward_hook(_Returned(self)).remove)
        rescue_with(self, self, model, undo)
        watch_plain_steps(model, undo)
        if self.may_repeat and self.repeats_backward:
            undo.callback(weakref.finalize(model, STEPS.watch()))  # a fused step between a forward and its backward
        undo.callback(self._forget)

    def _forget(self) -> None:
        self._step = self._raw = self._outputs_again = None
        self._beside.forget()

    def _held_by_attributes(self) -> list[Any]:
        layout = Layout(self._executor.model)
        return [value for value in (layout.read() or [])[layout.attributes] if not isinstance(value, FIXED)]

    def devices(self) -> set[torch.device]:
        device = self._executor.settings.device
        return set() if device is None or self._executor.detached else {device}

    # ---- forward

    def called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_again:
            self._step = None
            self._raw = (args, kwargs) if self._repeats(model) else None

    def _repeats(self, model: nn.Module) -> bool:
        """Whether this is a training forward on a device that holds to a plan, and that runs what it is given."""
        if torch.compiler.is_compiling() or private.inside_functional_transform() or private.graph_task_id() >= 0:
            return False
        is_training = model.training and torch.is_grad_enabled()
        return is_training and any(device.type != "cpu" and not is_recorded(device) for device in self.devices())

    def run(self, module: nn.Module, inner: Callable[[], Callable[..., Any]], args: Any, kwargs: Any) -> Any:
        raw, self._raw = self._raw, None
        if raw is None or self._is_again:
            return inner()(*args, **kwargs)
        self._tighten_after_refusal(module, Inputs(args, kwargs))
        with self._noting_refusals():
            return self._run_step(module, inner, args, kwargs, raw)

    @contextlib.contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        plan = self._executor.plan
        try:
            yield
        except torch.OutOfMemoryError:
            self._refused_under = plan if self._executor.plan is plan else None
            raise

    def _tighten_after_refusal(self, module: nn.Module, inputs: Inputs) -> None:
        """The step before ran out of memory and was not run again: the loop goes on, and this one needs less."""
        plan, self._refused_under = self._refused_under, None
        if plan is None or plan is not self._executor.plan:
            return
        (device,) = self.devices()
        now = Moment(device)
        try:
            self._refuse_unrepeatable(module)
            changed = self._tighten(module, inputs, inside=True)
        except NotRepeatable as reason:
            logger.warning("no tighter plan was made after a step that ran out of memory: %s", str(reason))
        else:
            logger.warning("after a step that ran out of memory and was not run again, %s", changed)
        finally:
            now.restore()

    def _run_step(
        self, module: nn.Module, inner: Callable[[], Callable[..., Any]], args: Any, kwargs: Any, raw: Any
    ) -> Any:
        (device,) = self.devices()
        taken = self._taken()
        if taken is None:
            return self._run_once(inner, args, kwargs)
        step = Step(Moment(device), self._state.before(), taken)
        step.problem = private.strange_contexts()
        given = tree_map(_same, (args, kwargs))  # a forward may change the containers themselves
        raw = tree_map(_same, raw)
        step.begin(args, kwargs)
        try:
            output = inner()(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames hold activations
        else:
            self._remember(step, *raw)
            return output
        with in_words(failure, "forward", self._numbers), in_other_words(failure):
            refuse_other_containers(given, (args, kwargs))
            self._refuse_shared_casts()
            self._prepare(module, step, Inputs(*given), failure, "forward")
        try:
            with in_words(failure, "forward", self._numbers), in_other_words(failure):
                with self._beside.ran() as check:
                    output = inner()(*args, **kwargs)  # themselves: the loop may look into a list that it gave
                    check()
                    self._refuse_other_code()
                if is_given_back(given, (args, kwargs)) and self._can_be_put_back(step):
                    shown = shown_values(output)
                    del output
                    self._put_back(step)
                    output = inner()(*args, **kwargs)
                    refuse_other_outputs(shown, output)
        except torch.OutOfMemoryError as error:
            failure = unless_in_words(error)
        else:
            self._remember(step, *raw)
            return output
        raise in_numbers(failure, "The batch was run again, and ran out of memory again", self._numbers())

    def _refuse_shared_casts(self) -> None:
        """Autocast has cast the weights once for two forwards, so that their gradients are added before the cast."""
        if self._open and self._shares_casts():
            raise NotRepeatable("it is the second forward before a backward, and may share casts of the weights")

    def _shares_casts(self) -> bool:
        kinds = {"cpu", *(device.type for device in self.devices())}
        return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, kinds))

    def _can_be_put_back(self, step: Step) -> bool:
        """Whether all that a repeated forward changed is known to change, so that it can run once more."""
        try:
            self._beside.refuse_changes(step.taken)
            self._state.refuse_lost(step.memory)
        except RuntimeError:  # something has changed for the first time in this step
            return False
        return not step.has_changed

    def _put_back(self, step: Step) -> None:
        torch.clear_autocast_cache()  # casts of the run before, which no recompute of this one would find
        self._state.restore(step.memory)
        self._beside.show_before(step.taken)
        step.moment.restore()

    def _taken(self) -> Taken | None:
        """The Python state beside the model; None where that is too much. See NOTE [no work that grows]."""
        if self._hindrance is None:
            try:
                return self._beside.before()
            except NotComparable as reason:
                self._give_up(str(reason))
        return None

    def _give_up(self, reason: str) -> None:
        self._hindrance = reason
        logger.info("steps that run out of memory will not be run again: %s", reason)
        self._forget()

    def _run_once(self, inner: Callable[[], Callable[..., Any]], args: Any, kwargs: Any) -> Any:
        try:
            return inner()(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)
        raise self._refusal(failure, "forward", self._hindrance)

    def _refusal(self, failure: torch.OutOfMemoryError, where: str, why: str | None) -> torch.OutOfMemoryError:
        said = f"The batch is not run again after this failure in {where}: {why}"
        return in_numbers(failure, said, self._numbers())

    def _remember(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward has succeeded; its backward may not."""
        try:
            self._state.after(step.memory)
        except RuntimeError as error:
            step.problem = str(error)
        self._beside.after(step.taken)
        if self.repeats_backward:
            self._await_backward(step, args, kwargs)
        num_elements = num_elements_in(step.memory.attributes.values(), MOST_NOTED)
        if num_elements > MOST_NOTED:
            self._give_up(f"its forward changes attributes that hold more than {MOST_NOTED:,} elements")

    def _await_backward(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step.args, step.kwargs = args, kwargs
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
            step.problem = "an input of the model needs a gradient itself"
        if step.has_changed:
            step.problem = "the forward wrote to its input"
        step.note_inputs()
        step.attributes = Attributes(self._executor.model, step.memory)
        self._step = step

    def _prepare(self, model: nn.Module, step: Step, inputs: Inputs, failure: Exception, where: str) -> None:
        """All that the failed attempt made is released, and the model is as it was before, under a tighter plan."""
        self._refuse_unrepeatable(model)
        if step.problem is not None:
            raise NotRepeatable(step.problem)
        if step.has_changed:
            raise NotRepeatable("an input or a parameter of the model was written to after its forward")
        if step.trains_others:
            raise NotRepeatable("which parameters of the model need gradients was changed after its forward began")
        if step.attributes is not None and step.attributes.are_other:
            raise NotRepeatable(
                "an attribute of the model, or of one of its parts, was changed by its forward or after it"
            )
        if not torch.is_grad_enabled() or not step.memory.layout.has_the_parts_of(Layout(model)):
            raise NotRepeatable("the forward changed which parts the model has, or whether gradients are computed")
        step.refuse_other_settings()
        if where == "backward":
            step.refuse_shared_memory()
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.synchronize()
        try:
            if not self._is_asked_for:
                self._plain = PlainModel(model)
                self._beside.refuse_moving(step.taken)
            self._beside.refuse_changes(step.taken)
            self._state.restore(step.memory)
            self._beside.show_before(step.taken)
        except RuntimeError as error:
            raise NotRepeatable(str(error)) from None
        are_remembered = self._beside.caches()
        changed = self._tighten(model, inputs, inside=where == "forward")
        if not are_remembered():
            raise NotRepeatable("a function that remembers its results (lru_cache) has forgotten them")
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
            raise NotRepeatable("its steps are being observed, under the most careful plan that there is")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise NotRepeatable("several processes train together, and the others do not run it again")
        top = ForwardOverride.top_of(model)
        while isinstance(top, MethodOverride):
            if isinstance(top, RecomputedForward):
                raise NotRepeatable("the model as a whole is recomputed or streamed")
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
            except MemScaleError as error:
                raise NotRepeatable(f"no tighter plan could be made. {error}") from None
            now = self._executor.plan
            assert now is not None
            return f"the plan was tightened from {show_bytes(promised)} to {show_bytes(_promised(now))}"
        self._lowest = plan
        if promised > available:
            raise NotRepeatable(f"{show_bytes(available)} are left for it, and no tighter plan fits. {misfit}")
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

    def _numbers(self) -> str:
        (device,) = self.devices()
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
        if self.may_repeat and torch.is_grad_enabled() and self._shares_casts():
            self._open.add(tree_leaves(output))
        if self._step is not None:
            self._step.await_gradients(tree_leaves(output))

    def begin(self) -> None:
        """A backward begins: which gradients are there, and as they are."""
        step = self._step
        if step is not None and not self._is_again:
            step.note_gradients()
            step.draws = Draws(*self.devices())

    def end(self) -> None:
        if self._step is not None and self._step.is_reached and not self._is_again:
            self._step = None

    def rescue(self, call: BackwardCall, error: torch.OutOfMemoryError) -> bool:
        with self._noting_refusals():
            return self._rescue(call, error)

    def _rescue(self, call: BackwardCall, error: torch.OutOfMemoryError) -> bool:
        step = self._step
        hindrance = self._hindrance if self.repeats_backward else self._hindrance or _ONLY_FORWARDS
        if hindrance is not None and is_of_model(call, self._executor.model):
            raise self._refusal(error, "backward", hindrance)
        if step is None or self._is_again or self._executor.is_orphaned:
            return False
        self._step = None
        model = self._executor.model
        with in_words(error, "backward", self._numbers):
            reached = reached_outputs(call, step)
            if reached is None:
                return False
            if step.problem is not None:
                raise NotRepeatable(step.problem)
            self._refuse_backward(call)
            refuse_draws(step)
            refuse_hooks(model, step)
            refuse_hooked_nodes(call)
            refuse_unused_outputs(call, step)
            refuse_written_outputs(step)
            gradients = gradients_of(step, reached)
            rest = without_gradient(model, step)
            if call.had_inner_passes and rest is not None:
                raise NotRepeatable(
                    "a part of the model ran a backward pass of its own (reentrant checkpointing does), so that "
                    "gradients may have come in part"
                )
            let_go(call.roots, step)
        del call
        self._run_again(model, step, gradients, rest, error)
        return True

    def _refuse_backward(self, call: BackwardCall) -> None:
        if around := private.strange_contexts():
            raise NotRepeatable(around)
        if not call.is_simple:
            raise NotRepeatable("its graph is kept, or only some gradients are asked for")
        if self._replanner.job.config.step_in_backward or self._executor.scales_gradients:
            raise NotRepeatable("gradients are scaled, or stepped with, before the backward is over")

    def _run_again(
        self,
        model: nn.Module,
        step: Step,
        gradients: dict[int, torch.Tensor],
        rest: list[torch.Tensor] | None,
        failure: torch.OutOfMemoryError,
    ) -> None:
        (device,) = self.devices()
        now = Moment(device)
        self._is_again = True
        try:
            with in_words(failure, "backward", self._numbers), in_other_words(failure):
                self._prepare(model, step, Inputs(step.args, step.kwargs), failure, "backward")
            self._replanner.is_repeating = True
            with in_words(failure, "backward", self._numbers):
                self._forward_again(model, step, failure)
                outputs, self._outputs_again = self._outputs_again or [], None
                refuse_other_values(step, outputs)
                chosen = [(outputs[place], gradient.to(outputs[place].device)) for place, gradient in gradients.items()]
                del outputs
                with in_other_words(failure), self._beside.ran(backward_of=device) as check:
                    step.draws = Draws(device)
                    _go_back(chosen, rest)
                    check()
                    self._refuse_other_code()
                refuse_draws(step)
                self._refuse_changes(step)
        except torch.OutOfMemoryError as error:
            again = unless_in_words(error)
        else:
            return
        finally:
            self._is_again, self._outputs_again = False, None
            self._replanner.is_repeating = False
            now.restore()
        raise in_numbers(again, "The batch was run again, and ran out of memory again", self._numbers())

    def _forward_again(self, model: nn.Module, step: Step, failure: torch.OutOfMemoryError) -> None:
        with in_other_words(failure), step.moment.repeated(), torch.enable_grad(), self._beside.ran() as check:
            model(*step.args, **step.kwargs)
            check()
            self._refuse_other_code()
            self._beside.show_after(step.taken)

    def _refuse_other_code(self) -> None:
        if self._plain is not None:
            self._plain.refuse_others(self._beside.code_that_ran)

    def _refuse_changes(self, step: Step) -> None:
        """The failed pass and its repetition have left what is beside the model as the forward had left it."""
        try:
            self._beside.refuse_changes(step.taken)
        except NotComparable as error:
            raise NotRepeatable(f"{error}, by the backward itself") from None


def _go_back(chosen: list[tuple[torch.Tensor, torch.Tensor]], rest: list[torch.Tensor] | None) -> None:
    if rest is None or rest:
        outputs, gradients = [pair[0] for pair in chosen], [pair[1] for pair in chosen]
        chosen.clear()
        torch.autograd.backward(outputs, gradients, inputs=rest)


def _why_not_plain(model: nn.Module) -> str | None:
    try:
        PlainModel(model)
    except NotComparable as reason:
        return str(reason)
    return None


def _promised(plan: Plan) -> int:
    """What the plan says the device will hold."""
    return plan.predicted_peak_bytes if plan.predicted_reserved_bytes is None else plan.predicted_reserved_bytes


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
