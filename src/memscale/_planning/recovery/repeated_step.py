"""One training forward, and what running it again needs: its batch, the model's state, its outputs and their gradients.

Also what can be read off its graph when the backward fails: which outputs the pass began at, and which parameters have
their gradients already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import operator
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from memscale._planning.recovery.not_repeatable import NotRepeatable
from memscale._planning.recovery.steps_beside import Taken
from memscale._torch import private
from memscale._torch.entries import is_own
from memscale._torch.moment import Draws, Moment
from memscale._torch.snapshots import groups_sharing_memory, versions_of
from memscale.techniques.recompute.backward_errors import BackwardCall
from memscale.techniques.recompute.module_state import Layout, Memory

LARGEST_GRADIENT_BYTES = 1 << 20
"""The size of outputs up to which their gradient is copied to the host, in case backward cannot be completed."""
_MARK = "memscale_output"
FIXED = (torch.Tensor, nn.Module, int, float, complex, str, bytes, type, type(None), torch.dtype, torch.device)
"""Attributes into which nobody needs to look: they cannot change, or are looked at by themselves."""
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What a batch may hold that is repeated: tensors, which know when they are written to, and what cannot change."""


class Attributes:
    """Which objects a model and its parts had as attributes when a forward was over, and the versions of its buffers.

    What those objects hold is compared when a step has failed, with what they held at an earlier look
    (steps_beside.py): copying it here would take a time in every step that grows with what the user keeps there.
    Where the forward is known to replace no attribute, they are what they were before it, and are not read again.
    """

    def __init__(self, model: nn.Module, memory: Memory) -> None:
        layout = memory.layout
        values: list[Any] | None
        if memory.attributes or layout.num_buffers() != len(layout.buffer_slots):
            values = layout.read()
            if values is None:  # the forward has made some
                layout = Layout(model)
                values = layout.read()
        else:
            values = [*memory.values]
            values[layout.buffers] = layout.read_buffers()
        self._layout, self._values = layout, values or []
        self._versions = versions_of(self._values[layout.buffers])

    @property
    def are_other(self) -> bool:
        """Whether they are not what they were."""
        now = self._layout.read()
        if now is None or len(now) != len(self._values) or not all(map(operator.is_, now, self._values)):
            return True
        return versions_of(now[self._layout.buffers]) != self._versions


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class Step:
    """A training forward, and what its repetition needs."""

    moment: Moment
    memory: Memory
    taken: Taken
    """The Python state beside the model."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: list[weakref.ref[torch.Tensor]] = dataclasses.field(default_factory=list)
    output_places: list[int] = dataclasses.field(default_factory=list)
    """Theirs."""
    gradients: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Those that have come to its outputs, by the outputs' places."""
    values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """What those outputs were."""
    before: tuple[list[torch.Tensor], list[torch.Tensor | None], list[int]] = ([], [], [])
    """The parameters when the backward began, their gradients, and the versions of these."""
    draws: Draws | None = None
    """Whether random numbers were drawn since the backward began."""
    is_reached: bool = False
    """A gradient has come to an output."""
    versions: list[tuple[torch.Tensor, int]] = dataclasses.field(default_factory=list)
    """Inputs, and how often each had been written to when the forward was over."""
    attributes: Attributes | None = None
    """Those of the model and its parts when the forward was over."""
    problem: str | None = None
    """Why it cannot be repeated."""
    trained: list[bool] = dataclasses.field(default_factory=list)
    """Which parameters, buffers and inputs needed a gradient when the forward began."""
    given: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """The inputs."""
    settings: tuple[Any, ...] = dataclasses.field(default_factory=private.settings_now)
    """PyTorch's own when the forward began."""
    places: list[int] = dataclasses.field(default_factory=list)
    """Where the parameters, and the inputs, lay in memory when the forward was over."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward: what its repetition would be given."""
        leaves = tree_leaves((args, kwargs))
        self.given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.trained = self._trained_now()
        if self.problem is not None:
            return
        if not all(map(_is_plain, leaves)):
            self.problem = "the batch holds objects that the forward may have changed"
        elif any(isinstance(leaf, torch.Tensor) and leaf.__dict__ for leaf in leaves):
            self.problem = "a tensor of the batch has attributes of its own, which the forward may have changed"
        self._note(self.given)

    def note_gradients(self) -> None:
        """Before the backward: which gradients are there, and as they are."""
        found = self.memory.values[self.memory.layout.parameters]
        parameters = [each for each in found if each is not None and each.is_leaf]
        gradients = [each.grad for each in parameters]
        self.before = parameters, gradients, [0 if each is None else each._version for each in gradients]

    def trained_before(self) -> dict[int, tuple[torch.Tensor | None, int]]:
        """What was noted, by the ids of the parameters that need a gradient."""
        noted = zip(*self.before, strict=True)
        return {id(each): (gradient, version) for each, gradient, version in noted if each.requires_grad}

    def note_inputs(self) -> None:
        """After the forward: what is not to change before its backward. Parameters are compared with what they were
        before it, and buffers with `attributes`."""
        self._note(leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor))
        self.places = self._places_now()

    def await_gradients(self, leaves: list[Any]) -> None:
        """The forward is over, and these are what it returned: gradients that come to them are noted."""
        shown = [
            (id(node), leaf.output_nr)
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and (node := private.node_of(leaf)) is not None
        ]
        if len(set(shown)) < len(shown):
            self.problem = "the model returns one tensor twice"
        for place, leaf in enumerate(leaves):
            if type(leaf) is torch.Tensor and leaf.grad_fn is not None:
                places = private.mark_of(leaf.grad_fn, _MARK) or {}
                private.mark_node(leaf.grad_fn, _MARK, {**places, place: weakref.ref(self)})
                self.outputs.append(weakref.ref(leaf))
                self.output_places.append(place)
                if (value := _on_host(leaf)) is not None:
                    self.values[place] = value
                leaf.register_hook(_Arrived(weakref.ref(self), place))

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        self.versions = [(one, one._version) for one in tensors if not one.is_inference()]

    def _trained_now(self) -> list[bool]:
        layout, values = self.memory.layout, self.memory.values
        tensors = [*values[layout.parameters], *values[layout.buffers], *self.given]
        return [tensor is not None and tensor.requires_grad for tensor in tensors]

    @property
    def trains_others(self) -> bool:
        """Whether the forward, run again, would lead to the gradients of other parameters."""
        return self._trained_now() != self.trained

    def refuse_other_settings(self) -> None:
        """The forward, run again, would compute with other types, on another device, or by other kernels."""
        if private.settings_now() != self.settings:
            raise NotRepeatable(
                "settings of PyTorch (the default type or device, precision, kernels of attention or threads) are not "
                "what they were when its forward began"
            )

    def refuse_shared_memory(self) -> None:
        """NumPy, or another process, may have written to memory of the host since, of which no tensor knows."""
        tensors = [*self.memory.values, *tree_leaves((self.args, self.kwargs))]
        if any(isinstance(each, torch.Tensor) and _may_be_written_unseen(each) for each in tensors):
            raise NotRepeatable(
                "an input, a buffer or a parameter lies in host memory, where NumPy or another process may have written"
            )

    def _places_now(self) -> list[int]:
        return [*map(_place_of, self.memory.values[self.memory.layout.parameters]), *map(_place_of, self.given)]

    @property
    def has_changed(self) -> bool:
        """Whether the forward, run again, would see other inputs, or other tensors in the place of parameters
        (`parameter.data = ...`, which gives it no new version)."""
        if self.places and self._places_now() != self.places:
            return True
        return any(tensor._version != version for tensor, version in self.versions)


def _place_of(tensor: torch.Tensor | None) -> int:
    try:
        return 0 if tensor is None else tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return 0


def _is_plain(leaf: Any) -> bool:
    """Numbers and texts of own classes may have methods that remember."""
    return isinstance(leaf, _PLAIN) and (
        isinstance(leaf, torch.Tensor | enum.Enum) or not is_own(type(leaf).__module__)
    )


def _may_be_written_unseen(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    return storage.is_shared() or not storage.resizable()


class _Arrived:
    """Hangs on an output: its gradient is sent to the host, in the order of the device's work, unless it is large."""

    __torch_unserializable__ = True
    """Whoever saves an output need not be warned that this hook is not saved with it."""

    def __init__(self, step: weakref.ref[Step], place: int) -> None:
        self._step = step
        self._place = place

    def __call__(self, gradient: torch.Tensor | None) -> None:
        step = self._step()
        if step is None or gradient is None:  # of an output beside it, of the same node, that the loss does not use
            return
        step.is_reached = True
        if (copy := _on_host(gradient)) is not None:
            step.gradients[self._place] = copy


class OpenOutputs:
    """What forwards have returned whose backward has not come: true while there is any whose graph lives."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[_Open] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return len(self._open) > 0

    def add(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            if type(leaf) is torch.Tensor and leaf.grad_fn is not None:
                hook = _Open(self._open)
                leaf.register_hook(hook)
                self._open.add(hook)


class _Open:
    """Hangs on an output, and lives as long as its graph does."""

    __torch_unserializable__ = True
    """Whoever saves an output need not be warned of it either."""

    def __init__(self, opened: weakref.WeakSet[_Open]) -> None:
        self._opened = opened

    def __call__(self, gradient: torch.Tensor | None) -> None:
        self._opened.discard(self)


def _on_host(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy that is on its way to the host, in the order of the device's work; None if it would be large."""
    if tensor.layout is not torch.strided or tensor.nbytes > LARGEST_GRADIENT_BYTES:
        return None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type != "cpu")
    return copy.copy_(tensor.detach(), non_blocking=True)


def is_of_model(call: BackwardCall, model: nn.Module) -> bool:
    """Whether a pass leads to parameters of this model."""
    ours = {id(parameter) for parameter in model.parameters()}
    return any(id(leaf) in ours for leaf in _leaves_under([root.grad_fn for root in call.roots if root.grad_fn]))


def refuse_other_values(step: Step, outputs: list[Any]) -> None:
    """What the forward gave must be what it gave the first time, to the last bit."""
    for place, before in step.values.items():
        if not _is_same(before, outputs[place].detach().to("cpu")):
            raise NotRepeatable("the forward gave other values when it was run again with the same inputs")


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit, so that NaN is NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*bits)


def refuse_other_containers(before: Any, now: Any) -> None:
    """What the failed forward put into a list of the loop's own would stay there, beside what the next one puts."""
    if not is_given_back(before, now):
        raise NotRepeatable("the forward changed a list or a dictionary that it was given")


def is_given_back(before: Any, now: Any) -> bool:
    """Whether the containers of a batch hold what they held."""
    (first, first_spec), (second, second_spec) = tree_flatten(before), tree_flatten(now)
    return first_spec == second_spec and all(map(operator.is_, first, second))


def refuse_draws(step: Step) -> None:
    """Where a backward draws random numbers, a second one would draw others."""
    if step.draws is not None and step.draws.moved():
        raise NotRepeatable("its backward draws random numbers")


def shown_values(output: Any) -> list[Any]:
    """What a forward gave, on the host. Tensors of other classes, and large ones that are not in one piece, are left
    out: copying them takes memory of the device."""
    return [_shown(leaf) for leaf in tree_leaves(output)]


def _shown(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, int | float | complex | str | bytes) else None
    is_plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
    return leaf.detach().cpu() if is_plain and (leaf.is_contiguous() or leaf.nbytes <= LARGEST_GRADIENT_BYTES) else None


def refuse_other_outputs(first: list[Any], output: Any) -> None:
    """See NOTE [run twice]."""
    second = shown_values(output)
    if len(first) != len(second) or not all(map(_is_shown_again, first, second)):
        raise NotRepeatable("the forward gave other values when it was run again in what should be the same state")


def _is_shown_again(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _is_same(first, second)
    return type(first) is type(second) and (first is second or repr(first) == repr(second))


def refuse_unused_outputs(call: BackwardCall, step: Step) -> None:
    """An output that the loss does not lead to may be used by another loss, and its graph would be gone."""
    under = _nodes_under([root.grad_fn for root in call.roots if root.grad_fn])
    outputs = [output for reference in step.outputs if (output := reference()) is not None]
    if any(output.grad_fn is not None and output.grad_fn not in under for output in outputs):
        raise NotRepeatable("the model returned a tensor that this loss does not use, and another one may")


def refuse_written_outputs(step: Step) -> None:
    """The graph may have saved what it gives: where the loop has written to that (through `.data`, or a version would
    tell), the first backward used it as it is now."""
    for reference, place in zip(step.outputs, step.output_places, strict=True):
        output = reference()
        if output is not None and place in step.values and not _is_same(step.values[place], output.detach().cpu()):
            raise NotRepeatable("an output of the model was written to after its forward")


def refuse_hooks(model: nn.Module, step: Step) -> None:
    """Hooks of the loop's own see the failed attempt, or are not there in the second."""
    outputs = [output for reference in step.outputs if (output := reference()) is not None]
    if any(_has_other_hooks(output) or output.retains_grad for output in outputs):
        raise NotRepeatable("an output of the model has hooks of the loop's own, or keeps its gradient")
    if any(_is_awaited(value) for value in Layout(model).read() or ()):
        raise NotRepeatable("a tensor that the model keeps as an attribute has hooks, or keeps its gradient")
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        raise NotRepeatable("parameters have hooks that use their gradients during backward")


def _has_other_hooks(output: torch.Tensor) -> bool:
    return any(type(hook) not in (_Arrived, _Open) for hook in (output._backward_hooks or {}).values())


def refuse_hooked_nodes(call: BackwardCall) -> None:
    """Hooks of the loop's own on nodes of the graph: the repeated one has other nodes."""
    if any(private.is_hooked(node) for node in _nodes_under([root.grad_fn for root in call.roots if root.grad_fn])):
        raise NotRepeatable("a node of its graph has hooks of the loop's own")


def _is_awaited(value: Any) -> bool:
    """Whether somebody waits for the gradient of a tensor that the forward has computed: it would not come."""
    if type(value) is not torch.Tensor or value.grad_fn is None:
        return False
    return bool(value._backward_hooks) or value.retains_grad


def gradients_of(step: Step, reached: list[int]) -> dict[int, torch.Tensor]:
    if any(place not in step.gradients for place in reached):
        raise NotRepeatable(
            "the gradient of the model's output was not complete, or is too large to be kept for this: return the loss "
            "from the model's forward, and its backward can be repeated"
        )
    return {place: step.gradients[place] for place in reached}


def without_gradient(model: nn.Module, step: Step) -> list[torch.Tensor] | None:
    """Parameters whose gradient has not come in the failed pass; None: all of them."""
    before = step.trained_before()
    parameters: list[torch.Tensor] = [p for p in model.parameters() if id(p) in before]
    rest = [p for p in parameters if not _has_come(p, *before[id(p)])]
    if len(rest) < len(parameters) and _share_memory(gradient for gradient, _ in before.values()):
        raise NotRepeatable(
            "gradients of several parameters lie in one tensor, so that it is not known which of them have come"
        )
    step.before = [], [], []
    return None if len(rest) == len(parameters) else rest


def _has_come(parameter: torch.Tensor, before: torch.Tensor | None, version: int) -> bool:
    return parameter.grad is not before or (before is not None and before._version != version)


def _share_memory(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether some of them are, or are parts of, one tensor: a write to one is a new version of all."""
    found = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
    return len(groups_sharing_memory(found)) < len(found)


def let_go(roots: tuple[torch.Tensor, ...], step: Step) -> None:
    """The loop holds the loss, and maybe the output: they are cut off the graph, so that it can die."""
    outputs = [output for reference in step.outputs if (output := reference()) is not None]
    for tensor in (*roots, *outputs):
        with contextlib.suppress(RuntimeError):  # a view
            tensor.detach_()
    step.outputs = []


def reached_outputs(call: BackwardCall, step: Step) -> list[int] | None:
    """The places of the outputs that the pass began at, seen from the loss; None: it is no pass of this model."""
    found, leaves = _walk([root.grad_fn for root in call.roots], step)
    if not found:
        return None
    if leaves:
        raise NotRepeatable("the loss depends on parameters beside what the model returns")
    places = [place for _, marks in found for place in marks]
    inner = [following for node, _ in found for following, _ in node.next_functions]
    known = step.trained_before()
    if any(id(leaf) not in known for leaf in _leaves_under([node for node, _ in found])):
        raise NotRepeatable("its forward uses parameters that are not registered with the model")
    if len(found) > 1 and _walk(inner, step)[0]:
        raise NotRepeatable("the loss depends on several outputs of the model, one of which depends on another")
    return places


def _walk(starts: list[Any], step: Step) -> tuple[list[tuple[Any, list[int]]], bool]:
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
    return [node.variable for node in _nodes_under(starts) if hasattr(node, "variable")]


def _nodes_under(starts: list[Any]) -> set[Any]:
    waiting, seen = [*starts], set(starts)
    while waiting:
        following = {each for each, _ in waiting.pop().next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return seen
