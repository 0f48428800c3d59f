"""A step cut into segments: what each layer's forward and backward hold, allocate, compute and move.

    recorder = SegmentRecorder(device_type, rounding_bytes, counts_fakes=False)     # or `FakeRecorder`
    recorder.watch(module_fqn, module, undo)        # hooks that tell where the step is
    recorder.open()
    with recorder:                                  # sees every operator
        ...                                         # forward and backward
    trace = recorder.close()

Where a step runs, and what is put back after it, is the stage's affair (rehearsal.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memscale._profile import Phase, Segment, StepTrace
from memscale._profile.device_kernels import WIDE_LOSSES, widen
from memscale._profile.operator_costs import Work
from memscale._torch import private
from memscale._torch.fake_numbers import ANY_VALUE, reads_fake_number
from memscale._torch.live_bytes import LiveBytes
from memscale._torch.outputs import tensors_in
from memscale._torch.overrides import OwnHook

Traffic = Callable[[], tuple[int, int, int, int]]
"""Transfers to the next tier so far and their bytes; those back, and theirs."""


def no_traffic() -> tuple[int, int, int, int]:
    return 0, 0, 0, 0


class SegmentRecorder(LiveBytes):
    """Live bytes and costs, segment by segment."""

    def __init__(
        self, device_type: str, rounding_bytes: int, *, counts_fakes: bool, traffic: Traffic = no_traffic
    ) -> None:
        super().__init__(device_type, rounding_bytes, counts_fakes=counts_fakes)
        self._traffic_so_far = traffic
        self.segments: list[Segment] = []
        self.num_calls: dict[str, int] = {}
        self._place: tuple[Phase, str, int] = ("forward", "", 0)
        self._start_bytes = 0
        self._work, self._traffic = Work(), (0, 0, 0, 0)
        self._entered: set[int] = set()
        self._highest_bytes = 0
        self._highest_by_kind = dict(self.by_kind)
        self._opened_by_kind = dict(self.by_kind)
        self._handles: list[RemovableHandle] = []
        """The hooks on tensors of the step, some of which may be the user's own and outlive it."""
        self.is_off = False
        """Nothing is seen any more: operators go through."""
        self.saw_backward = False
        self.ends_with_backward = False
        """The step is the user's, whose code goes on when backward is over."""
        self._open_passes: set[int] = set()
        """Backward passes at whose end we shall be called. One that raises has none."""
        self._finished: StepTrace | None = None
        """The trace up to the end of the last backward pass, where its end was noticed."""
        self._ends_recompute = False
        self.recomputes: list[int] = []
        """Which of the segments are the forward of a block, computed again in backward."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_off:
            return private.run_below_mode(func, args, kwargs)
        # Autograd asks every tensor where it is, many times: answered here that is twice as fast, and no traffic.
        if private.is_device_question(func) and private.is_fake(args[0]):
            return private.device_answer(args[0])
        if self._ends_recompute:
            self._cut()
        result = super().run(func, args, kwargs)
        if func in WIDE_LOSSES and widen(result, args):
            self.see(result)
        self._work.add(func, args, kwargs, result, self.device_type, self.known)
        return result

    def open(self) -> None:
        """Forget what came before the step."""
        self.segments, self.num_calls, self._entered, self.recomputes = [], {}, set(), []
        self._place, self._start_bytes = ("forward", "", 0), self.total_bytes
        self._work, self._traffic = Work(), self._traffic_so_far()
        self.reset_peak()
        self._highest_bytes, self._highest_by_kind = 0, dict(self.by_kind)
        self._opened_by_kind = dict(self.by_kind)

    def close(self) -> StepTrace:
        if self._finished is not None:
            return self._finished
        self._cut()
        return self._so_far()

    def _so_far(self) -> StepTrace:
        at_peak = {kind: self._highest_by_kind[kind] - self._opened_by_kind[kind] for kind in self.by_kind}
        return StepTrace(
            tuple(self.segments),
            gradients_at_peak=at_peak["gradients"],
            activations_at_peak=at_peak["activations"],
        )

    def move_to(self, phase: Phase, module_fqn: str, call: int) -> None:
        if (phase, module_fqn, call) != self._place:
            self._cut()
            self._place = (phase, module_fqn, call)

    def finish_backward(self, number: int) -> None:
        """A backward pass is over. What comes after the last one, up to `close`, is not part of the step."""
        self._open_passes.discard(number)
        self._cut()
        self._finished = self._so_far()

    def _cut(self) -> None:
        if self._ends_recompute:
            self._ends_recompute = False
            self.recomputes.append(len(self.segments))
        phase, module_fqn, _ = self._place
        traffic = self._traffic_so_far()
        work, moved = self._work, [now - before for now, before in zip(traffic, self._traffic, strict=True)]
        work.num_sends, work.sent_bytes = work.num_sends + moved[0], work.sent_bytes + moved[1]
        work.num_fetches, work.fetched_bytes = work.num_fetches + moved[2], work.fetched_bytes + moved[3]
        if self.peak_bytes > self._highest_bytes:
            self._highest_bytes, self._highest_by_kind = self.peak_bytes, self.peak_by_kind
        self.segments.append(
            Segment(
                phase=phase,
                module_fqn=module_fqn,
                peak_bytes=max(0, self.peak_bytes - self._start_bytes),
                net_bytes=self.total_bytes - self._start_bytes,
                **dataclasses.asdict(work),
            )
        )
        self._start_bytes, self._work, self._traffic = self.total_bytes, Work(), traffic
        self.reset_peak()

    # ---- hooks that tell where the step is

    def watch_gradients(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_leaf:  # others stand in for it, as in `functional_call`
                handle = parameter.register_post_accumulate_grad_hook(self._see_gradient)
                undo.callback(handle.remove)

    def _see_gradient(self, parameter: torch.Tensor) -> None:
        self._note_backward()
        if parameter.grad is not None:
            self.see(parameter.grad, "gradients")

    def _note_backward(self) -> None:
        self.saw_backward = True
        number = private.graph_task_id()
        if self.ends_with_backward and number >= 0 and number not in self._open_passes:
            self._open_passes.add(number)
            private.at_end_of_backward(functools.partial(self.finish_backward, number))

    @property
    def broke_off(self) -> bool:
        """Whether a backward pass has begun and not come to its end."""
        return bool(self._open_passes)

    def watch(self, module_fqn: str, module: nn.Module, undo: contextlib.ExitStack) -> None:
        enter = _Hook(self._enter_forward, module_fqn)
        leave = _Hook(self._leave_forward, module_fqn)
        undo.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(leave, with_kwargs=True).remove)

    def remove_tensor_hooks(self) -> None:
        """Leave nothing on the tensors that the step has met: an input or an output may be the user's parameter."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_recompute(self, module_fqn: str) -> None:
        """A block's forward is about to be computed again in backward."""
        if self._place[:2] != ("backward", module_fqn):
            self.move_to("backward", module_fqn, self.num_calls.get(module_fqn, 1))
        self._cut()

    def end_recompute(self, module_fqn: str) -> None:
        """Its segment ends with the next operator: PyTorch leaves a recompute early, by an exception, and what the
        frames of the forward held is gone only when that has been caught."""
        self._ends_recompute = True

    def _enter_forward(self, module_fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.num_calls[module_fqn] = self.num_calls.get(module_fqn, 0) + 1
        self.move_to("forward", module_fqn, self.num_calls[module_fqn])

    def _leave_forward(self, module_fqn: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self.num_calls.setdefault(module_fqn, 1)  # the hooks may have come after the call had begun
        key = len(self.segments)
        # A hook on lazy logits would make them build themselves: whoever hooks them wants their gradient.
        for tensor in (each for each in with_gradient(output) if not getattr(each, "is_lazy", False)):
            enter = functools.partial(self._enter_backward, module_fqn, call, key)
            self._handles.append(tensor.register_hook(enter))
        for tensor in with_gradient((args, kwargs)):
            leave = functools.partial(self._leave_backward, module_fqn, call)
            self._handles.append(tensor.register_hook(leave))
        self.move_to("forward", "", 0)

    def _enter_backward(self, module_fqn: str, call: int, key: int, gradient: torch.Tensor) -> None:
        """The first gradient of an output has arrived: the layer's backward begins, once."""
        self._note_backward()
        if key not in self._entered:
            self._entered.add(key)
            self.move_to("backward", module_fqn, call)

    def _leave_backward(self, module_fqn: str, call: int, gradient: torch.Tensor) -> None:
        """An input's gradient is complete. Inputs shared with other layers complete later: then it is not our turn."""
        if self._place == ("backward", module_fqn, call):
            self.move_to("backward", "", 0)


@private.without_compiler
class FakeRecorder(SegmentRecorder):
    """Live bytes and costs of a step on fake tensors."""

    def __init__(self, device_type: str, rounding_bytes: int, *, traffic: Traffic = no_traffic) -> None:
        super().__init__(device_type, rounding_bytes, counts_fakes=True, traffic=traffic)
        self.reads_any_number = False
        """An optimizer steps, which may read numbers of fake tensors. See `AnyValue`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Two of three times it is asked where a tensor is, which is no operator."""
        if private.is_device_question(func) and private.is_fake(args[0]):
            return private.device_answer(args[0])
        if self.reads_any_number and reads_fake_number(func, args):
            return ANY_VALUE
        return self.run(func, args, kwargs or {})


class _Hook(OwnHook):
    """A hook on a module that knows the module's name; copies of the module leave it behind."""

    def __init__(self, function: Callable[..., None], module_fqn: str) -> None:
        self._function = function
        self._module_fqn = module_fqn

    def __call__(self, *args: Any) -> None:
        self._function(self._module_fqn, *args)


def with_gradient(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.requires_grad]
