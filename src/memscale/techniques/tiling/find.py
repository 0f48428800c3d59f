"""Which modules can be tiled: found from a forward on fake tensors, never from class names.

`record` runs the model once without memory and notes products with parameters, attentions that materialise scores and
the shapes that modules are called with. The finders read that; when they are not sure they offer nothing, and say why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale._errors import quoted
from memscale._plan import TileHead
from memscale._torch import private
from memscale.techniques.tiling.attention import ScoreCatcher
from memscale.techniques.tiling.head import attach_head, product_with
from memscale.techniques.tiling.head.lazy import LazyLogits
from memscale.techniques.tiling.mlp.positions import why_not_position_wise

WIDER = 2
"""How many times wider than its input a head's output, or an MLP's inside, must be to be worth tiling."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a finder offers, and why; nothing (and false) when it is not sure."""

    module_fqns: tuple[str, ...]
    reason: str
    weight_fqn: str | None = None
    """The weight of a head, when the module's own forward multiplies with it."""
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    """The shape of a head; the positions of each MLP or attention."""

    def __bool__(self) -> bool:
        return bool(self.module_fqns)


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A product of activations with a parameter."""

    module_fqn: str
    """The module in whose forward it happened."""
    weight_fqn: str
    is_module: bool
    """Whether that module is a linear and this its weight."""
    num_rows: int
    in_width: int
    out_width: int


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module with a single tensor."""

    module_fqn: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass(slots=True)
class Recording:
    """What one forward did."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: Any
    products: list[Product] = dataclasses.field(default_factory=list)
    calls: list[ModuleCall] = dataclasses.field(default_factory=list)
    materialised: dict[str, int] = dataclasses.field(default_factory=dict)
    """Attentions whose scores would exist whole: the queries of the longest, by module."""
    fused: dict[str, int] = dataclasses.field(default_factory=dict)
    """Fused attentions, by module."""
    unreachable: set[str] = dataclasses.field(default_factory=set)
    """Modules that ask `F.multi_head_attention_forward` for its weights, which it then materialises."""
    failure: str | None = None
    """Why the model could not be run on fake tensors."""


def record(model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Recording:
    """One forward of the model on fake tensors. The model may be real or a fake copy; it is left as it was."""
    fake = next((p for p in model.parameters() if private.is_fake(p)), None)
    mode = private.fake_tensor_mode() if fake is None else private.fake_mode_of(fake)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    args, kwargs = tree_map_only(torch.Tensor, lambda t: _fake_like(t, mode, device), (args, kwargs or {}))
    recording = Recording(model, args, kwargs, mode)
    try:
        _run(recording, _Watcher(recording))
    except Exception as error:  # whatever a stranger's forward may raise
        recording.failure = f"the model does not run on fake tensors ({quoted(error)})"
    return recording


def _fake_like(tensor: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
    if private.is_fake(tensor):
        return tensor
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _run(recording: Recording, watcher: _Watcher | None) -> Any:
    with contextlib.ExitStack() as undo:
        undo.enter_context(_attributes_kept(recording.model))
        undo.enter_context(recording.mode)
        if watcher is not None:
            watcher.follow_modules(undo)
            undo.enter_context(watcher)
        return recording.model(*recording.args, **recording.kwargs)


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """A forward may leave fake tensors in attributes, and draw from Python's random numbers."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    state = random.getstate()
    for module, before in attributes:
        # Stand-ins: an in-place operator on a small real tensor is really done, also among fake ones.
        buffers = {name: None if b is None else b.clone() for name, b in before["_buffers"].items()}
        object.__setattr__(module, "_buffers", type(before["_buffers"])(buffers))
    try:
        yield
    finally:
        random.setstate(state)
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)


class _Watcher(ScoreCatcher):
    """Notes what happens, and in which module."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(rows=1)
        self.recording = recording
        self.stack: list[str] = []
        self._parameters = {id(p): name for name, p in recording.model.named_parameters()}

    def follow_modules(self, undo: contextlib.ExitStack) -> None:
        for module_fqn, module in self.recording.model.named_modules():
            place = _Place(self, module_fqn)
            undo.callback(module.register_forward_pre_hook(place.enter).remove)
            undo.callback(module.register_forward_hook(place.leave, with_kwargs=True, always_call=True).remove)

    def note_fused(self) -> None:
        where = self.stack[-1] if self.stack else ""
        self.recording.fused[where] = self.recording.fused.get(where, 0) + 1

    def note_caught(self, num_queries: int) -> None:
        super().note_caught(num_queries)
        where = self.stack[-1] if self.stack else ""
        self.recording.materialised[where] = max(self.recording.materialised.get(where, 0), num_queries)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note_product(func, args, kwargs or {})
        if func is F.multi_head_attention_forward:
            self._note_multi_head(kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def _note_multi_head(self, kwargs: dict[str, Any]) -> None:
        """PyTorch's own attention: what it does inside is out of a mode's reach."""
        if kwargs.get("need_weights", True):
            self.recording.unreachable.add(self.stack[-1] if self.stack else "")
        else:
            self.note_fused()

    def _note_product(self, func: Any, args: Any, kwargs: Any) -> None:
        right = args[1] if len(args) > 1 else None
        weight = right if id(right) in self._parameters else getattr(right, "_base", None)
        if not isinstance(weight, nn.Parameter) or id(weight) not in self._parameters:
            return
        hidden, _ = product_with(weight, func, args, kwargs)
        if hidden is None or weight.dim() != 2:
            return
        where = self.stack[-1] if self.stack else ""
        module = self.recording.model.get_submodule(where)
        self.recording.products.append(
            Product(
                where,
                self._parameters[id(weight)],
                isinstance(module, nn.Linear) and module.weight is weight,
                hidden.numel() // max(hidden.shape[-1], 1),
                *reversed(weight.shape),
            )
        )


class _Place:
    """The hooks of one module."""

    def __init__(self, watcher: _Watcher, module_fqn: str) -> None:
        self.watcher, self.module_fqn = watcher, module_fqn

    def enter(self, module: nn.Module, args: Any) -> None:
        self.watcher.stack.append(self.module_fqn)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.watcher.stack.pop()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if len(args) == 1 and len(tensors) == 1 and not kwargs and isinstance(output, torch.Tensor):
            (hidden,) = tensors
            self.watcher.recording.calls.append(
                ModuleCall(self.module_fqn, tuple(hidden.shape), tuple(output.shape), hidden.dtype, hidden.device)
            )


# ---- heads


def find_head(recording: Recording) -> Found:
    """The last product of the forward, if it is much wider than its input and comes out, or ends in a loss."""
    if recording.failure is not None:
        return Found((), recording.failure)
    if not recording.products:
        return Found((), "no product with a parameter was seen")
    last = recording.products[-1]
    together = _with_companions(recording, last)
    in_width = max(product.in_width for product in together)
    if last.out_width < WIDER * in_width:
        return Found((), f"the last product, in {last.module_fqn!r}, is {in_width} to {last.out_width}: no head")
    numbers = {"num_rows": last.num_rows, "hidden": in_width, "vocabulary": last.out_width}
    numbers["rows"] = suggested_rows(**numbers)
    module_fqn = _common_parent(product.module_fqn for product in together)
    weight_fqn = None if last.is_module else last.weight_fqn
    return _probed(
        recording, Found((module_fqn,), "the last product is much wider than its input", weight_fqn, numbers)
    )


def _with_companions(recording: Recording, last: Product) -> list[Product]:
    """The last product, and those that one module adds up with it: a head and its low-rank adapter."""
    widths = {call.module_fqn: call.out_shape[-1] for call in recording.calls if call.out_shape}
    return [
        product
        for product in recording.products
        if product == last
        or (
            (product.num_rows, product.out_width) == (last.num_rows, last.out_width)
            and widths.get(_common_parent((product.module_fqn, last.module_fqn))) == last.out_width
        )
    ]


def _common_parent(module_fqns: Iterable[str]) -> str:
    parts = [name.split(".") for name in module_fqns]
    common = [level[0] for level in zip(*parts, strict=False) if len(set(level)) == 1]
    return ".".join(common)


def _probed(recording: Recording, found: Found) -> Found:
    """Tiled on fake tensors: does the forward leave the logits alone but for a loss?"""
    if found.numbers["num_rows"] < 2:
        return Found((), "the head sees a single row")
    action = TileHead(found.module_fqns[0], rows=found.numbers["num_rows"] // 2, weight_fqn=found.weight_fqn)
    with contextlib.ExitStack() as undo:
        attach_head(action, recording.model, undo)
        with _Builds() as builds:
            _run(recording, None)
    if builds.count:
        return Found((), f"the model's own forward reads the logits of {found.module_fqns[0]!r}")
    return found


class _Builds(contextlib.AbstractContextManager["_Builds"]):
    """Counts how often this thread builds lazy logits; another one may train meanwhile."""

    def __init__(self) -> None:
        self.count = 0
        self._thread_id = threading.get_ident()

    def __enter__(self) -> _Builds:
        LazyLogits.on_build.append(self._count)
        return self

    def __exit__(self, *_: Any) -> None:
        LazyLogits.on_build.remove(self._count)

    def _count(self, logits: LazyLogits) -> None:
        self.count += threading.get_ident() == self._thread_id


def suggested_rows(*, num_rows: int, hidden: int, vocabulary: int) -> int:
    """A tile whose logits take about as much as the hidden states of the whole batch, as a power of two."""
    rows = -(-num_rows // max(1, -(-vocabulary // hidden)))
    return 1 << max(0, rows - 1).bit_length()


# ---- MLPs and attentions


def find_mlps(recording: Recording) -> Found:
    """Outermost modules that mix no positions, are no wider outside than they are told, and much wider inside."""
    if recording.failure is not None:
        return Found((), recording.failure)
    found: list[str] = []
    reasons: dict[str, str] = {}
    for call in sorted(recording.calls, key=lambda call: call.module_fqn.count(".")):
        if any(call.module_fqn == name or call.module_fqn.startswith(f"{name}.") for name in found):
            continue
        module = recording.model.get_submodule(call.module_fqn)
        if not _has_mlp_shape(call, module):
            continue
        why_not = why_not_position_wise(module, call.in_shape, call.dtype, call.device, recording.mode, wider=WIDER)
        if why_not is None:
            found.append(call.module_fqn)
        else:
            reasons[call.module_fqn] = why_not
    if found:
        order = [name for name, _ in recording.model.named_modules() if name in found]
        lengths = {call.module_fqn: call.in_shape[1] for call in recording.calls if call.module_fqn in found}
        return Found(tuple(order), "position-wise, and much wider inside", numbers=lengths)
    return Found((), "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:3]) or "no MLP was seen")


def _has_mlp_shape(call: ModuleCall, module: nn.Module) -> bool:
    """[batch, sequence, width] to the same, with at least two weight matrices below."""
    matrices = [p for p in module.parameters() if p.dim() == 2]
    return call.module_fqn != "" and len(call.in_shape) >= 3 and call.out_shape == call.in_shape and len(matrices) >= 2


def find_attentions(recording: Recording) -> Found:
    """Modules in whose forward scores would exist whole."""
    if recording.failure is not None:
        return Found((), recording.failure)
    order = [name for name, _ in recording.model.named_modules() if name in recording.materialised]
    if order:
        queries = {name: recording.materialised[name] for name in order}
        reason = "scores are materialised: a product of queries and keys, softmax, values"
        return Found(tuple(order), reason, numbers=queries)
    if recording.unreachable:
        return Found(
            (), "nn.MultiheadAttention materialises its scores because it is asked for them: need_weights=True"
        )
    if recording.fused:
        return Found((), f"attention is fused already, in {len(recording.fused)} modules")
    return Found((), "no attention was seen")
