"""How PyTorch finds the kernel of an operator, and which modes and transforms stand before it.

Relies on: the stack of dispatch modes of a thread, the dispatcher's keys and kernels, the keys that a thread excludes
and those that it excluded when its modes were called, the registry of FLOP counts, and the states of TorchScript's
tracing, `torch.func`, forward-mode differentiation and autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def real_tensors() -> Any:
    """Inside, operators run without any mode: fake tensors are not made."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@contextlib.contextmanager
def real_tensors_only() -> Iterator[None]:
    """The same where no tensor is of a subclass: neither modes nor subclasses are asked, which takes less time."""
    guard = torch._C._DisableTorchDispatch()
    try:
        yield
    finally:
        del guard


def active_modes() -> list[Any]:
    """The dispatch modes of this thread, from the first that was entered to the last, which is asked first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


@contextlib.contextmanager
def left_autocast_blocks() -> Iterator[None]:
    """Inside, it is as if every `with torch.autocast(...)` around had been left: what a new one caches goes with it.

    PyTorch counts how many of them are nested, and empties its cache of cast weights when the last is left.
    """
    num_blocks = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    for _ in range(num_blocks):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(num_blocks):
            torch.autocast_increment_nesting()


class CastProbe:
    """Tells the lifetimes of autocast's cache of cast weights apart. It is emptied when the outermost
    `with torch.autocast(...)` is left, and by `torch.clear_autocast_cache()`."""

    def __init__(self) -> None:
        with real_tensors():
            self._leaf = torch.zeros(0, 0, device="cpu", requires_grad=True)
            self._others = torch.zeros(0, 0, device="cpu"), torch.zeros(0, 0, device="cpu")

    def lifetime(self) -> Any:
        """The node of the one cast of an empty tensor: the same object as long as the cache is not emptied.

        No mode and no hook on saved tensors sees it: `addmm` saves nothing for the tensor that it adds to.
        """
        with real_tensors(), without_function_modes(), torch.enable_grad():
            torch.autocast_increment_nesting()  # whoever switched autocast on without a block keeps the cache
            try:
                with torch.autocast("cpu", torch.bfloat16):
                    return torch.addmm(self._leaf, *self._others).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            finally:
                torch.autocast_decrement_nesting()


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


def flop_formula(func: Any) -> Callable[..., int] | None:
    """PyTorch's own FLOP count of an operator; None for those that it takes as free."""
    formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    return formula


def is_composite(func: Any) -> bool:
    """Whether the operator is written in terms of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def without_torch_function() -> Any:
    """Tensor subclasses are called as plain tensors are, without their `__torch_function__`."""
    return torch._C.DisableTorchFunctionSubclass()


def without_function_modes() -> Any:
    """Nobody's `__torch_function__` is called: neither that of modes nor that of tensor subclasses."""
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def left_function_modes() -> Iterator[None]:
    """No function mode is active, as in a backward pass that some of them have passed on; subclasses are asked."""
    modes = [torch.overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)


def is_tracing() -> bool:
    """Whether TorchScript is recording."""
    return bool(torch._C._get_tracing_state())


def inside_functional_transform() -> bool:
    """Whether `torch.func.grad`, `vmap` or the like is at work: they do not bear saved-tensor hooks."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether this stands for several tensors, as gradients do in `torch.autograd.grad(..., is_grads_batched=True)`."""
    return torch._C._dispatch_keys(tensor).has(torch._C._dispatch_key_parse("Batched"))


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return torch.autograd.forward_ad._current_level >= 0


_AUTOCAST_KEYS = tuple(
    torch._C._dispatch_key_parse(name) for name in dir(torch._C.DispatchKey) if name.startswith("Autocast")
)
"""One for each kind of device."""


def run_below_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a dispatch mode calls to run the operator that it was handed, for the result that there is without the mode.

    PyTorch switches autocast off for a mode: its own operators have been cast by then. An operator of a library
    (`torch.library`) may be written in others, which are cast while it runs, and would not be under a mode.

    Two of PyTorch's own are cast inside, too: `bilinear` on a CPU, and `linalg.pinv`. No operator that is itself cast
    is written in them there. (All others of PyTorch's list of operators were tried under autocast on a CPU.)

    Known limit: PyTorch says how autocast was when the outermost operator was called. Inside of one that is cast
    itself and is written in an operator of a library, autocast would be on where it is off.
    """
    if _is_cast_before(func, args):
        return func(*args, **kwargs)
    with _autocast_as_outside():
        return func(*args, **kwargs)


def below_mode(func: Any, args: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """The same for a mode that has PyTorch's own code run the operator."""
    return contextlib.nullcontext() if _is_cast_before(func, args) else _autocast_as_outside()


_PINV, _TRILINEAR = torch.ops.aten.linalg_pinv.atol_rtol_tensor, torch.ops.aten._trilinear.default


def _is_cast_before(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autocast has done all that it does before a mode is asked about this operator."""
    if func is _TRILINEAR:
        return not args or args[0].device.type != "cpu"  # elsewhere `bilinear` is cast as a whole
    return func.namespace == "aten" and func is not _PINV


@contextlib.contextmanager
def _autocast_as_outside() -> Iterator[None]:
    """Inside of a dispatch mode: autocast is on again where it was when the operator was called."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        outside = torch._C._dispatch_tls_local_exclude_set()
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    was_on = [key for key in _AUTOCAST_KEYS if is_excluded(key) and not outside.has(key)]
    for key in was_on:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in was_on:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def run_opened(func: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator's kernel for this device at once: active modes see the operators that it is written in."""
    key = getattr(torch._C.DispatchKey, device_type.upper())
    return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def has_own_kernel(operator: str, device_type: str) -> bool:
    """Whether an operator has a kernel written for this device, not only one made of other operators."""
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
