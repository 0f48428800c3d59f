"""A stage on which a training step can be tried without a trace: on fake tensors, or for real.

Both stages run forward, a loss and backward, cut into segments by hooks on the layers. The fake stage works on a
copy of the model whose tensors have no memory. The real stage works on the model itself and puts back everything
that a step changes: RNG, buffers, gradients, flags and attributes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from memscale import _torch_private
from memscale._host_rng import HostRng
from memscale._memory import LiveBytes, rounding_of
from memscale._profile import Phase, Segment, StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.kernels import cpu_kernels, gpu_kernels, sequences_unpacked
from memscale._profile.layers import find_pieces
from memscale._profile.work import Work

CLASSIFIER_WIDTH = 1000
"""An output this wide is taken for class scores when the model computes no loss of its own."""


class Detachable(Protocol):
    def detach(self) -> None: ...


Attach = Callable[[nn.Module], Detachable]
Traffic = Callable[[], tuple[int, int, int, int]]
"""Transfers to the next tier so far and their bytes; those back, and theirs."""


def _no_traffic() -> tuple[int, int, int, int]:
    return 0, 0, 0, 0


class SegmentRecorder(LiveBytes):
    """Live bytes and costs, segment by segment."""

    def __init__(
        self, device_type: str, rounding_bytes: int, *, counts_fakes: bool, traffic: Traffic = _no_traffic
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Autograd asks every tensor where it is, many times: answered here that is twice as fast, and no traffic.
        if _torch_private.is_device_question(func) and _torch_private.is_fake(args[0]):
            return _torch_private.device_answer(args[0])
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._work.add(func, args, kwargs, result, self.device_type)
        return result

    def open(self) -> None:
        """Forget what came before the step."""
        self.segments, self.num_calls, self._entered = [], {}, set()
        self._place, self._start_bytes = ("forward", "", 0), self.total_bytes
        self._work, self._traffic = Work(), self._traffic_so_far()
        self.reset_peak()
        self._highest_bytes, self._highest_by_kind = 0, dict(self.by_kind)
        self._opened_by_kind = dict(self.by_kind)

    def close(self) -> StepTrace:
        self._cut()
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

    def _cut(self) -> None:
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
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._see_gradient)
                undo.callback(handle.remove)

    def _see_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.see(parameter.grad, "gradients")

    def watch(self, module_fqn: str, module: nn.Module, undo: contextlib.ExitStack) -> None:
        enter = functools.partial(self._enter_forward, module_fqn)
        leave = functools.partial(self._leave_forward, module_fqn)
        undo.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(leave, with_kwargs=True).remove)

    def _enter_forward(self, module_fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.num_calls[module_fqn] = self.num_calls.get(module_fqn, 0) + 1
        self.move_to("forward", module_fqn, self.num_calls[module_fqn])

    def _leave_forward(self, module_fqn: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self.num_calls[module_fqn]
        key = len(self.segments)
        # A hook on lazy logits would make them build themselves: whoever hooks them wants their gradient.
        for tensor in (each for each in _with_gradient(output) if not getattr(each, "is_lazy", False)):
            tensor.register_hook(functools.partial(self._enter_backward, module_fqn, call, key))
        for tensor in _with_gradient((args, kwargs)):
            tensor.register_hook(functools.partial(self._leave_backward, module_fqn, call))
        self.move_to("forward", "", 0)

    def _enter_backward(self, module_fqn: str, call: int, key: int, gradient: torch.Tensor) -> None:
        """The first gradient of an output has arrived: the layer's backward begins, once."""
        if key not in self._entered:
            self._entered.add(key)
            self.move_to("backward", module_fqn, call)

    def _leave_backward(self, module_fqn: str, call: int, gradient: torch.Tensor) -> None:
        """An input's gradient is complete. Inputs shared with other layers complete later: then it is not our turn."""
        if self._place == ("backward", module_fqn, call):
            self.move_to("backward", "", 0)


def _with_gradient(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in _tensors_in(tree) if tensor.requires_grad]


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Also those in dataclasses, which PyTorch's trees take for leaves."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors_in([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])


class Rehearsal:
    """A stage for training steps. `run` tries one, with or without techniques attached."""

    source: Literal["static", "empirical"]
    is_fake: bool

    def __init__(self, model: nn.Module, inputs: Inputs, device_type: str, rounding_bytes: int) -> None:
        self.model = model
        self.inputs = inputs
        self.device_type = device_type
        self.rounding_bytes = rounding_bytes
        self.num_calls: dict[str, int] = {}
        self.target_type = device_type
        self.holds_gradients = False
        """Steps begin with the gradients of earlier batches, to which theirs are added."""

    def books(self) -> LiveBytes:
        """Empty books for this stage's tensors."""
        return LiveBytes(self.device_type, self.rounding_bytes, counts_fakes=self.is_fake)

    def run(self, attach: Attach | None = None, *, num_steps: int = 1) -> StepTrace:
        """Forward and backward of one step, cut into segments, above what is live before it.

        Of several steps the highest: what is attached may learn in which order layers come.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.stage())
            attached = attach(self.model) if attach is not None else None
            if attached is not None:
                undo.callback(attached.detach)
            traffic: Traffic = getattr(attached, "traffic", _no_traffic)  # what is attached may move nothing
            traces = [self._record(traffic) for _ in range(num_steps)]
        return max(traces, key=lambda trace: trace.peak_bytes)

    def _record(self, traffic: Traffic) -> StepTrace:
        recorder = SegmentRecorder(self.device_type, self.rounding_bytes, counts_fakes=self.is_fake, traffic=traffic)
        with contextlib.ExitStack() as undo:
            undo.callback(self._clear_gradients)
            for module_fqn, module in find_pieces(self.model).items():
                recorder.watch(module_fqn, module, undo)
            recorder.watch_gradients(self.model, undo)
            recorder.see_all([list(self.model.parameters()), list(self.model.buffers())], "parameters")
            recorder.see_all((self.inputs.args, self.inputs.kwargs), "other")
            recorder.open()
            with recorder:
                self._step(recorder)
            trace = recorder.close()
        self.num_calls = recorder.num_calls
        return trace

    def _step(self, recorder: SegmentRecorder) -> None:
        if self.holds_gradients:
            self._hold_gradients(recorder)
        loss = loss_of(self.model(*self.inputs.args, **self.inputs.kwargs))
        recorder.move_to("backward", "", -1)
        loss.backward()

    def _hold_gradients(self, recorder: SegmentRecorder) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                recorder.see(parameter.grad, "gradients")

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Everything that must be put back after a step."""
        try:
            with torch.enable_grad():
                yield
        finally:
            self._clear_gradients()

    def _clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class FakeRehearsal(Rehearsal):
    """On a copy of the model whose tensors have shapes and no memory."""

    source = "static"
    is_fake = True

    def __init__(self, model: nn.Module, inputs: Inputs, device_type: str) -> None:
        self.mode = _torch_private.fake_tensor_mode()
        # A card that is not in this machine is played by fake CPU tensors and its kernels' savings.
        self.emulates_gpu = not device_exists(device_type)
        on = "cpu" if self.emulates_gpu else device_type
        fake_model = fake_copy(model, self.mode, torch.device(on))
        if not fake_model.training:
            fake_model.train()
        fake_inputs = inputs.map_tensors(lambda tensor: _fake_like(tensor, self.mode, torch.device(on)))
        super().__init__(fake_model, fake_inputs, on, rounding_of(device_type))
        self.target_type = device_type

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        kernels: Any = gpu_kernels() if self.emulates_gpu else cpu_kernels(self.model)
        packing = contextlib.nullcontext() if "position_ids" in self.inputs.kwargs else sequences_unpacked()
        # Fake tensors do not bear two threads at once: backward of host and device runs in this one.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with super().stage(), host_rng_kept(), packing, one_thread, self.mode, kernels:
            yield


class RealRehearsal(Rehearsal):
    """On the model itself, with real data, where fake tensors do not suffice."""

    source = "empirical"
    is_fake = False

    def __init__(self, model: nn.Module, inputs: Inputs, device: torch.device, warmup_steps: int) -> None:
        inputs = inputs.map_tensors(lambda tensor: _real_like(tensor, device))
        super().__init__(model, inputs, device.type, rounding_of(device.type))
        self.warmup_steps = warmup_steps

    def _step(self, recorder: SegmentRecorder) -> None:
        for _ in range(self.warmup_steps):
            super()._step(recorder)
            for parameter in self.model.parameters():
                parameter.grad = None
        recorder.open()
        super()._step(recorder)

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        with host_rng_kept(), _device_rng_kept(self.device_type), _module_state_kept(self.model):
            if not self.model.training:
                self.model.train()
            with super().stage():
                yield


def loss_of(output: Any) -> torch.Tensor:
    """The loss that the model computes, or a stand-in for the one that its user will compute outside.

    Class scores (a last dimension of 1000 and more) get a cross-entropy, other outputs a mean square.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss if loss.dim() == 0 else loss.mean()
    tensors = _with_gradient(output)
    if not tensors:
        raise RuntimeError("the model's output does not depend on any trainable parameter")
    del output
    return torch.stack([_stand_in_loss(tensor) for tensor in tensors]).sum()


def _stand_in_loss(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor.float()
    if tensor.dim() >= 2 and tensor.shape[-1] >= CLASSIFIER_WIDTH:
        rows = tensor.reshape(-1, tensor.shape[-1])
        return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long, device=tensor.device)).float()
    return (tensor.abs() if tensor.is_complex() else tensor).square().mean().float()


def fake_copy(model: nn.Module, mode: Any, device: torch.device) -> nn.Module:
    """The model with every tensor replaced by one without memory on `device`; sharing is kept."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for leaf in tree_leaves(vars(module)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
                memo[id(leaf)] = _fake_like(leaf, mode, device)
    kept_alive = list(memo.values())  # deepcopy looks the replacements up by the originals' ids
    duplicate = copy.deepcopy(model, memo)
    del kept_alive
    return duplicate


def _fake_like(tensor: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _real_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device.type != "meta":
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def device_exists(device_type: str) -> bool:
    if device_type == "cpu":
        return True
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == device_type


@contextlib.contextmanager
def host_rng_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's CPU random state are as before."""
    host_state, torch_state = HostRng(), torch.get_rng_state()
    try:
        yield
    finally:
        host_state.restore()
        torch.set_rng_state(torch_state)


@contextlib.contextmanager
def _device_rng_kept(device_type: str) -> Iterator[None]:
    if device_type == "cpu":
        yield
        return
    module = torch.get_device_module(device_type)
    state = module.get_rng_state()
    try:
        yield
    finally:
        module.set_rng_state(state)


@contextlib.contextmanager
def _module_state_kept(model: nn.Module) -> Iterator[None]:
    """Buffers are stand-ins during the step; gradients, flags and attributes are put back after it."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    stand_ins: dict[int, torch.Tensor] = {}
    for module, before in attributes:
        buffers = {n: b if b is None else stand_ins.setdefault(id(b), b.clone()) for n, b in module._buffers.items()}
        object.__setattr__(module, "_buffers", type(before["_buffers"])(buffers))
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
