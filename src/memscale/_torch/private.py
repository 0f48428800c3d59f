"""Every use of PyTorch's private API, in one place. `tests/_torch/test_private.py` says when one of them breaks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._subclasses import fake_tensor
from torch.utils.flop_counter import flop_registry


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of the C++ storage: the same for every Python object that shows it, unique while it lives."""
    return int(storage._cdata)


def fake_tensor_mode() -> Any:
    """Tensors without memory: shapes, dtypes, devices and strides propagate, values do not exist."""
    return _RememberingMode(allow_non_fake_inputs=True)


_MAX_MADE = 100_000


class _RememberingMode(fake_tensor.FakeTensorMode):
    """Remembers what operators make of shapes.

    PyTorch's mode does so, too, but looking up takes it longer than all else that a rehearsal does with an operator.
    """

    _made: ClassVar[dict[tuple[Any, ...], _Made | tuple[_Made, ...] | None]] = {}
    """By the operator and the shapes of its arguments; for all modes, since nothing of it belongs to one of them."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # a question for a shape would go through everybody's modes
            key = _key_of(self, func, args, kwargs) if _depends_on_shapes(func) else None
            if key is not None and key in self._made:
                return self._make_again(self._made[key], args)
            result = super().dispatch(func, types, args, kwargs)
            made = NotImplemented if key is None else _describe(args, kwargs, result)
            if made is not NotImplemented and key is not None:
                if len(self._made) >= _MAX_MADE:
                    self._made.clear()
                self._made[key] = made
            return result

    def _make_again(self, made: _Made | tuple[_Made, ...] | None, args: Any) -> Any:
        guard = torch._C._DisableTorchDispatch()
        try:
            if made is None or isinstance(made, _Made):
                return None if made is None else made.again(self, args)
            return tuple(one.again(self, args) for one in made)
        finally:
            del guard


_VALUES_DECIDE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


@functools.cache
def _depends_on_shapes(func: Any) -> bool:
    """Whether what an operator does on fake tensors is said by the shapes of its arguments."""
    if getattr(func, "namespace", "") != "aten" or not hasattr(func, "_schema"):
        return False
    name, arguments = func._schema.name, func._schema.arguments
    is_out = any(argument.is_out for argument in arguments)
    is_placing = any(word in name for word in ("resize", "set_", "lift", "_to_copy", "is_pinned", "pin_memory"))
    return not (is_out or is_placing or any(tag in func.tags for tag in _VALUES_DECIDE))


_PLAIN_TYPES = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def _key_of(mode: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What decides the result; None where that is more than shapes and plain values."""
    parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    if not _add_to_key(parts, mode, args):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _add_to_key(parts, mode, (value,)):
            return None
    return tuple(parts)


def _add_to_key(parts: list[Any], mode: Any, values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind is fake_tensor.FakeTensor:
            if value.fake_mode is not mode or value.constant is not None or value.layout is not torch.strided:
                return False
            parts.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device))
            parts.append((value.is_conj(), value.is_neg(), value.is_inference()))
        elif kind in _PLAIN_TYPES:
            parts.append(kind)
            parts.append(value)
        elif kind is list or kind is tuple:
            parts.append((kind, len(value)))
            if not _add_to_key(parts, mode, value):
                return False
        else:
            return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """One tensor that an operator gives."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    same_as: int | None = None
    """The argument that it is."""
    view_of: int | None = None
    """The argument whose memory it shows."""

    def again(self, mode: Any, args: Any) -> Any:
        if self.same_as is not None:
            return args[self.same_as]
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.view_of is not None:
            made.set_(args[self.view_of].untyped_storage(), self.offset, self.shape, self.stride)
        return fake_tensor.FakeTensor(mode, made, self.device)


def _describe(args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """What is to be remembered of a result; NotImplemented where it cannot be made again from that."""
    if result is None:
        return None
    if type(result) is tuple:
        made = tuple(_describe(args, kwargs, one) for one in result)
        return made if all(isinstance(one, _Made) for one in made) else NotImplemented
    fake = fake_tensor.FakeTensor
    if type(result) is not fake:
        return NotImplemented
    size, stride, offset = tuple(result.shape), result.stride(), result.storage_offset()
    facts = (size, stride, int(offset), result.dtype, result.fake_device)
    same = [index for index, arg in enumerate(args) if arg is result]
    if same:
        return _Made(*facts, same_as=same[0])
    is_plain = result.constant is None and not (result.requires_grad or result.is_conj() or result.is_neg())
    if not is_plain or result.layout is not torch.strided:
        return NotImplemented
    key = storage_key(result.untyped_storage())
    shown = [i for i, arg in enumerate(args) if type(arg) is fake and storage_key(arg.untyped_storage()) == key]
    if len(shown) == 1:
        return _Made(*facts, view_of=shown[0])
    inside = [one for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple) for one in arg]
    if any(type(one) is fake and storage_key(one.untyped_storage()) == key for one in (*inside, *kwargs.values())):
        return NotImplemented
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else 0
    is_fresh = not shown and offset == 0 and result.untyped_storage().nbytes() == extent * result.itemsize
    return _Made(*facts) if is_fresh else NotImplemented


def fake_tensor_class() -> type[torch.Tensor]:
    return fake_tensor.FakeTensor


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise where an operator's result, or its shape, depends on values."""
    return fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


def real_tensors() -> Any:
    """Inside, operators run without any mode: fake tensors are not made."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def asks_for_values(error: BaseException) -> bool:
    """Whether this error, or one that it came from, says that fake tensors lack a value or a kernel."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
        GuardOnDataDependentSymNode,
        NotImplementedError,
    )
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kinds):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def can_take_outermost_mode() -> bool:
    """Whether nobody traces this thread (fake tensors, functionalization, proxies): those modes have fixed places."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return all(getattr(mode, "_mode_key", None) is None for mode in _get_current_dispatch_mode_stack())


def insert_outermost_mode(mode: Any) -> None:
    """Put a dispatch mode below all that are active in this thread, where it may stay beyond the scope of the caller.

    Modes that others have entered stay above it and are left in their own order; a `with` block could not do that.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

    others = _get_current_dispatch_mode_stack()
    for _ in others:
        _pop_mode()
    for each in (mode, *others):
        _push_mode(each)


def remove_mode(mode: Any) -> bool:
    """Take a mode off this thread's stack, wherever it is there; False where it is not."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

    stack = _get_current_dispatch_mode_stack()
    if not any(each is mode for each in stack):
        return False
    above: list[Any] = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for each in reversed(above):
        _push_mode(each)
    return True


def detach_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """Without its graph but with its version counter, also inside a dispatch mode, where `detach` gives another."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares its version counter and no memory, also when made inside a dispatch mode."""
    witness = detach_with_version(tensor)
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def share_version_counter(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a change in place of one shows at the other. Views and detached tensors do; chunks made by
    `unsafe_chunk` and `.data` do not, though they share memory."""
    version = second._version
    if first._version != version:
        return False
    torch._C._autograd._unsafe_set_version_counter((second,), (version + 1,))
    try:
        return first._version != version
    finally:
        torch._C._autograd._unsafe_set_version_counter((second,), (version,))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no memory behind it."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def device_type_of(tensor: torch.Tensor) -> str:
    """The type of its device; asking a fake tensor in the usual way would run an operator."""
    device: torch.device = tensor.fake_device if is_fake(tensor) else tensor.device  # type: ignore[attr-defined]
    return device.type


def is_device_question(func: Any) -> bool:
    """Whether a mode was handed not an operator but somebody's question where a fake tensor lies."""
    return func is torch.ops.prim.device.default


def device_answer(tensor: torch.Tensor) -> torch.device:
    """What the fake tensor itself would answer."""
    if fake_mode_of(tensor).in_kernel_invocation:
        return torch.device("meta")
    device: torch.device = tensor.fake_device  # type: ignore[attr-defined]
    return device


def flop_formula(func: Any) -> Callable[..., int] | None:
    """PyTorch's own FLOP count of an operator; None for those that it takes as free."""
    formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    return formula


def wrapper_tensor(cls: type[Any], geometry: torch.Tensor, device: torch.device) -> Any:
    """A tensor of class `cls` with the shape, strides and dtype of `geometry` and no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        geometry.shape,
        strides=geometry.stride(),
        storage_offset=geometry.storage_offset(),
        dtype=geometry.dtype,
        device=device,
        storage_size=0,
    )


def is_composite(func: Any) -> bool:
    """Whether the operator is written in terms of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def without_torch_function() -> Any:
    """Tensor subclasses are called as plain tensors are, without their `__torch_function__`."""
    return torch._C.DisableTorchFunctionSubclass()


def is_own_node(node: Any) -> bool:
    """Whether a node of the graph is one of PyTorch's operators, and no custom function; DDP's sink passes for one."""
    from torch.nn.parallel.distributed import _DDPSink

    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return getattr(type(node), "_forward_cls", None) is _DDPSink
    return "CppNode" not in node.name()


def fake_mode_of(tensor: torch.Tensor) -> Any:
    """The mode that a fake tensor belongs to."""
    return tensor.fake_mode  # type: ignore[attr-defined]


def is_tracing() -> bool:
    """Whether TorchScript is recording."""
    return bool(torch._C._get_tracing_state())


def foreach_device_types() -> list[str]:
    """Devices on which optimizers take their multi-tensor implementation by default."""
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    return list(_get_foreach_kernels_supported_devices())


def chooses_by_device(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether PyTorch chooses an optimizer's implementation for this group by where its parameters are.

    Other libraries have options of the same names and rules of their own.
    """
    if group.get("foreach", False) is not None or group.get("fused") is not None or group.get("differentiable"):
        return False
    # Adam has no multi-tensor implementation for a learning rate in a tensor, and takes the loop on any device.
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    if is_adam and isinstance(group["lr"], torch.Tensor) and not group.get("capturable"):
        return False
    return _asks_pytorch(type(optimizer))


def _asks_pytorch(kind: type) -> bool:
    from torch.optim.optimizer import _default_to_fused_or_foreach as chooser

    modules = (sys.modules.get(base.__module__) for base in kind.__mro__ if base is not torch.optim.Optimizer)
    return any(getattr(module, chooser.__name__, None) is chooser for module in modules)


def is_foreach_by_default(parameters: list[torch.Tensor], *, differentiable: bool) -> bool:
    """Whether PyTorch's optimizers step these parameters with their multi-tensor implementation, if nobody chose."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    return bool(_default_to_fused_or_foreach(parameters, differentiable)[1])


def run_first(node: Any) -> None:
    """Let the autograd engine run this node as soon as it is ready, as it does with gradient accumulation."""
    node._set_sequence_nr(2**64 - 1)


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run as written under `torch.compile`; does not load the compiler before the first call."""
    from torch._compile import _disable_dynamo

    ordinary: Callable[..., Any] = _disable_dynamo(function)
    return ordinary


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` stands around this very module: `torch.compile(module)`, `module.compile()` or
    `module.forward = torch.compile(module.forward)`. Does not load the compiler."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # not loaded: then nobody can have compiled anything
    return compiler is not None and (
        is_compiled_module(module)
        or is_compiled_in_place(module)
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` returns: a module around the other one, `_orig_mod`."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


COMPILED_CALL = "_compiled_call_impl"
"""Where `module.compile()` leaves what stands in for the call of the module: its forward and its hooks."""


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    return vars(module).get(COMPILED_CALL) is not None


def uncompile_forward(module: torch.nn.Module) -> None:
    """A copy of a module whose `forward` was replaced by a compiled one still has that of the original, with the
    original's parameters. It gets its own instead, uncompiled."""
    compiled = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
    if compiled is not None and not is_compiled_module(module):
        plain = inspect.unwrap(compiled)  # PyTorch's own forwards are inside one more function
        if not isinstance(plain, types.MethodType):
            raise TypeError(f"the compiled forward of this {type(module).__name__} is no method of it")
        vars(module)["forward"] = types.MethodType(plain.__func__, module)


def never_while_compiled() -> Any:
    """Inside, what others have compiled runs as it is written."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def next_sequence_number() -> int:
    """What the next node of this thread's graph will be numbered with; those made before have lower numbers."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number(node: Any) -> int:
    """When a node was made, among those of its thread."""
    return int(node._sequence_nr())


def global_module_hooks() -> list[tuple[str, dict[int, Any]]]:
    """The hooks that run for every module: (forward or backward, hooks by id)."""
    from torch.nn.modules import module

    return [
        ("forward", module._global_forward_hooks),
        ("forward", module._global_forward_pre_hooks),
        ("backward", module._global_backward_hooks),
        ("backward", module._global_backward_pre_hooks),
    ]


def allocator_bytes(device_index: int) -> tuple[int, int] | None:
    """What the accelerator's allocator has handed out, now and at most; None where it does not count.

    What `torch.accelerator.memory_allocated` and `max_memory_allocated` say, at once and for a tenth of the time.
    """
    try:
        if not torch._C._accelerator_isAllocatorInitialized():
            return None
        counted = torch._C._accelerator_getDeviceStats(device_index)["allocated_bytes"]["all"]
    except RuntimeError:  # the backend has no allocator of PyTorch's kind
        return None
    return int(counted["current"]), int(counted["peak"])


def graph_task_id() -> int:
    """The backward pass that this thread works for; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def keeps_graph() -> bool:
    """Whether the backward pass that this thread works for leaves its graph for another one (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call this when the current backward pass is complete; if it fails, the callback is dropped uncalled."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine, with somebody around every backward pass that Python starts."""

    def __init__(self, run: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._run = run

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(functools.partial(super().run_backward, *args, **kwargs))


def replace_engine(run: Callable[[Callable[[], Any]], Any]) -> Callable[[], None]:
    """Let `run(backward)` call every backward pass from now on. Returns what undoes that."""
    variable: Any = torch.autograd.Variable
    before = variable._execution_engine
    ours = variable._execution_engine = _Engine(run)

    def restore() -> None:
        if variable._execution_engine is ours:
            variable._execution_engine = before

    return restore


def see_through_checkpoints(is_inside: Callable[[], bool], refuse: Callable[[str], None]) -> Callable[[], None]:
    """While `is_inside()`, `torch.utils.checkpoint` computes its function as if it were not there.

    What would not be the same is given to `refuse`, by its name. Returns what undoes that.
    """
    from torch.utils import checkpoint

    module: Any = checkpoint
    before = module._checkpoint_without_reentrant_generator

    def start(fn: Any, preserve: bool = True, context_fn: Any = module.noop_context_fn, *args: Any, **kw: Any) -> Any:
        if not is_inside():
            return before(fn, preserve, context_fn, *args, **kw)
        if context_fn is not module.noop_context_fn:
            refuse("context_fn")
        return iter([None])

    def apply(*args: Any, **kwargs: Any) -> Any:
        if is_inside():
            refuse("use_reentrant=True")
        return super(kind, kind).apply(*args, **kwargs)

    kind = module.CheckpointFunction
    module._checkpoint_without_reentrant_generator = start
    kind.apply = apply

    def restore() -> None:
        if module._checkpoint_without_reentrant_generator is start:
            module._checkpoint_without_reentrant_generator = before
        if vars(kind).get("apply") is apply:
            del kind.apply

    return restore


def ddp_looks_at_outputs() -> tuple[type[Any], str]:
    """The method in which DDP looks whether outputs have a node, which it neither keeps nor hooks."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel, "_post_forward"


def scale_replicator() -> type[Any]:
    """What `torch.amp.GradScaler` copies its scale to other devices with."""
    from torch.amp.grad_scaler import _MultiDeviceReplicator

    return _MultiDeviceReplicator


def step_pre_hooks(optimizer: Any) -> Any:
    """An optimizer's own step pre-hooks, in the order in which they run."""
    return optimizer._optimizer_step_pre_hooks


def global_step_hooks() -> list[dict[int, Any]]:
    """The hooks that run before and after the step of every optimizer, by id."""
    from torch.optim import optimizer

    return [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]


def is_last_load_hook(optimizer: Any, hook_id: int) -> bool:
    """Whether this is the last of an optimizer's load_state_dict pre-hooks."""
    return bool(next(reversed(optimizer._optimizer_load_state_dict_pre_hooks)) == hook_id)


def cast_optimizer_value(
    optimizer: Any, parameter: torch.Tensor, value: torch.Tensor, key: Any, groups: list[dict[str, Any]], name: Any
) -> torch.Tensor:
    """A loaded state tensor as the optimizer's `load_state_dict` would cast and move it."""
    cast: torch.Tensor = optimizer._process_value_according_to_param_policy(parameter, value, key, groups, name)
    return cast


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A tensor over this storage that is no view of another tensor."""
    tensor = torch.empty(0, dtype=dtype, device=device)
    if not is_fake(tensor):
        return tensor.set_(storage, offset, shape, stride)
    mode = fake_mode_of(tensor)  # its cache would keep the storage
    cached, mode.cache_enabled = mode.cache_enabled, False
    try:
        return tensor.set_(storage, offset, shape, stride)
    finally:
        mode.cache_enabled = cached


def inside_functional_transform() -> bool:
    """Whether `torch.func.grad`, `vmap` or the like is at work: they do not bear saved-tensor hooks."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return torch.autograd.forward_ad._current_level >= 0


def run_opened(func: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator's kernel for this device at once: active modes see the operators that it is written in."""
    key = getattr(torch._C.DispatchKey, device_type.upper())
    return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def has_own_kernel(operator: str, device_type: str) -> bool:
    """Whether an operator has a kernel written for this device, not only one made of other operators."""
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


NUM_HOLDERS_IN_DISPATCH = 2
"""How many hold a storage when an operator sees a tensor on it that only the operator's caller holds."""


def num_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and other owners a storage has, this object among them."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def set_allocator_settings(text: str) -> None:
    """Change what this text names of `PYTORCH_ALLOC_CONF`, also after memory was allocated; the rest stays as it is."""
    torch._C._accelerator_setAllocatorSettings(text)
