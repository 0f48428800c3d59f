"""What is known to be harmless in code that is run a second time: values that cannot change, and calls that change
nothing but what they are given.

These are lists of what may be, not of what may not: an object or a function that is on none of them is taken for
one that remembers. `_planning/recovery/watched_run.py` asks them when a forward has run again.

What a call on these lists may do: make new objects, change the objects that it is given in ways that are seen elsewhere
(containers by their contents, tensors by their versions, random generators by their state), and call back what it is
given. It keeps nothing, and asks nobody else: no clock, no file, no other thread.
"""

from __future__ import annotations
import __future__

import collections
import contextvars
import dataclasses
import decimal
import enum
import fractions
import functools
import inspect
import itertools
import logging
import operator
import random
import re
import sys
import types
import typing
from typing import Any

import torch

from memscale._torch.entries import is_special


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IMMUTABLE = (
    type(None), type(...), type(NotImplemented), int, float, complex, str, bytes, range, slice, decimal.Decimal,
    fractions.Fraction, re.Pattern, enum.Enum, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    torch.finfo, torch.iinfo, types.CodeType, types.GenericAlias, types.UnionType, typing.TypeVar,
    operator.itemgetter, inspect.Signature, inspect.Parameter, __future__._Feature,
    type(dataclasses.MISSING),
)  # fmt: skip
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_ITERTOOLS = tuple(kind for kind in vars(itertools).values() if isinstance(kind, type))
_C_TYPES = frozenset(
    {
        *_IMMUTABLE, *_ITERTOOLS, bool, bytearray, list, tuple, dict, set, frozenset, object, type, super, property,
        staticmethod, classmethod, zip, map, filter, enumerate, reversed, collections.deque, collections.OrderedDict,
        collections.defaultdict, functools.partial, types.SimpleNamespace, types.FunctionType, types.MethodType,
        types.GeneratorType, types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()),
        type({}.__iter__()), type([].__iter__()), type(().__iter__()), type("".__iter__()), re.Match,
        *random.Random.__mro__, torch.Generator, torch.Stream, torch.Event, contextvars.ContextVar, contextvars.Token,
    }
)  # fmt: skip
"""Types of the interpreter and of extension modules whose making and whose methods do nothing else."""

_FUNCTIONS = {
    "builtins": words(
        "abs all any ascii bin callable chr dir divmod format getattr hasattr hash hex isinstance issubclass "
        "iter len locals max min next oct ord pow repr round sorted sum vars"
    ),
    "_warnings": frozenset({"warn", "warn_explicit"}),
    "_abc": frozenset({"_abc_instancecheck", "_abc_subclasscheck"}),
    "_functools": frozenset({"reduce", "cmp_to_key"}),
}
_PURE_EXTENSIONS = frozenset(
    {"math", "cmath", "_operator", "_bisect", "_heapq", "_collections", "_struct", "_statistics"}
)
_TORCH_EXTENSIONS = frozenset(f"torch._C._{each}" for each in ("nn", "fft", "linalg", "special", "sparse", "nested"))
_ASKING = ("is_", "_is_", "get_", "_get_", "are_", "_has_", "has_")

_TENSOR_METHODS = words(
    "size dim numel nelement ndimension tolist type cpu cuda float half bfloat16 double long int short "
    "char bool byte is_contiguous stride element_size get_device storage_offset type_as new new_tensor "
    "has_names is_shared as_subclass ipu xpu __getitem__ __setitem__"
)
_UNSEEN = words(
    "set_ set_data data resize_ resize_as_ resize_as_sparse_ requires_grad_ retain_grad detach_ rename_ "
    "backward _backward from_file from_numpy swapaxes_ share_memory_ apply_ map_ map2_ frombuffer "
    "as_tensor asarray quantize_per_tensor_dynamic fused_moving_avg_obs_fake_quant sparse_resize_ "
    "sparse_resize_and_clear_"
)
"""Operators that change a tensor without a new version, or that share memory with what has none."""

HIDDEN_WRITES = frozenset({"data", "grad", "_grad", "set_data", "__array_interface__", "__cuda_array_interface__"})
"""Attributes of tensors by which they are written to without a new version, or whose values a backward changes."""

INTROSPECTION = words(
    "_version f_back f_locals f_globals f_builtins gi_frame gi_yieldfrom cr_frame ag_frame tb_frame tb_next "
    "cell_contents"
)
"""Attributes that lead to other code's variables, or say how often a tensor was written to, which is not put back."""
STORED_FLAGS = words("default_factory names")
"""Attributes of tensors and containers that are not compared: code that sets them is not repeated."""
_SPECIAL = words(
    "__init__ __new__ __code__ __class__ __name__ __qualname__ __module__ __doc__ __dict__ __version__ __file__ "
    "__members__ __call__ __len__ __getitem__ __setitem__ __delitem__ __contains__ __iter__ __next__ "
    "__reversed__ __getattr__ __getattribute__ __setattr__ __delattr__ __enter__ __exit__ __repr__ "
    "__str__ __format__ __hash__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __bool__ __int__ __float__ "
    "__index__ __post_init__ __init_subclass__ __torch_function__ __mro__ __bases__ __get__ __set__ "
    "__missing__ __copy__ __deepcopy__ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ "
    "__rmul__ __imul__ __matmul__ __rmatmul__ __truediv__ __rtruediv__ __itruediv__ __floordiv__ __mod__ "
    "__pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __or__ __xor__ __lshift__ __rshift__"
)
"""Special names that code may read: methods, which are seen when they are called, and what cannot change."""


def refused_names(read: frozenset[str], stored: frozenset[str]) -> set[str]:
    """The attributes among these by which code may see, or change, what nobody compares."""
    special = {name for name in read if is_special(name) and name not in _SPECIAL}
    return special | (read & INTROSPECTION) | (stored & STORED_FLAGS) | set(filter(is_special, stored))


_PYTHON_MODULES = words(
    "functools contextlib collections _collections_abc typing dataclasses enum abc types operator "
    "numbers copy re string warnings random copyreg fractions decimal statistics bisect heapq keyword "
    "reprlib _weakrefset torch._ops torch._compile torch._library.simple_registry "
    "torch.functional torch._tensor torch.autograd.function torch.autograd.grad_mode "
    "torch.autograd.profiler torch.overrides torch.random torch._utils torch._VF torch._jit_internal "
    "torch.utils._contextlib torch.utils._pytree torch.utils.checkpoint torch.utils._python_dispatch "
    "torch.nn torch.nn.functional torch.nn.parameter torch.nn.grad torch.nn._reduction torch.compiler"
)
_PYTHON_FAMILIES = (
    "torch.nn.modules.", "torch.nn.attention", "torch.nn.utils.rnn", "torch.nn.utils.parametri",
    "torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm", "torch.amp.", "torch.distributions.",
    "torch.compiler.", "numpy._core.", "re.", "collections.",
)  # fmt: skip
_PYTHON_FUNCTIONS = {
    "torch": frozenset(
        {"is_tensor", "typename", "sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "is_storage"}
    ),
    "torch._dynamo.eval_frame": frozenset({"_fn"}),  # what `torch.compiler.disable` puts around a function
    "inspect": words(
        "signature isclass isfunction ismethod isroutine isbuiltin unwrap getfullargspec getmro parameters name kind "
        "default annotation return_annotation bind bind_partial apply_defaults"
    ),
    "torch.jit": frozenset({"is_scripting", "is_tracing"}),
    "torch.jit._trace": frozenset({"is_tracing"}),
    "logging": frozenset(["debug", "info", "warning", "isEnabledFor", "getEffectiveLevel", "getLogger"]),
}
_REFUSED_PYTHON = {
    "torch._tensor": words(
        "backward register_hook register_post_accumulate_grad_hook share_memory_ storage module_load "
        "__setstate__ __dlpack__ __array__ refine_names rename_ resize resize_as"
    ),
    "torch.nn.modules.module": words(
        "add_module register_module register_parameter requires_grad_ zero_grad load_state_dict to cuda cpu "
        "half float double bfloat16 type to_empty apply _apply share_memory compile"
    ),
    "logging": frozenset({"_log", "handle", "callHandlers"}),
    "warnings": frozenset({"_showwarnmsg", "showwarning"}),
    "contextlib": frozenset({"push", "push_async_exit"}),
    "abc": frozenset({"register"}),
    "copyreg": words("pickle constructor add_extension remove_extension clear_extension_cache"),
    "random": frozenset({"__init__"}),
    "torch._jit_internal": words("_overload _overload_method"),
    "torch.distributions.distribution": frozenset({"set_default_validate_args"}),
    "torch.nn.attention._registry": words(
        "register_flash_attention_impl activate_flash_attention_impl restore_flash_attention_impl"
    ),
    "torch.utils._pytree": words("register_pytree_node _private_register_pytree_node register_constant"),
    "torch.utils.checkpoint": words("set_device_type set_checkpoint_debug_enabled set_checkpoint_early_stop"),
}
"""Functions of these modules that change what nobody compares."""


def is_immutable(value: Any) -> bool:
    """Whether it cannot change, and leads nowhere."""
    kind = type(value)
    if kind is object:  # a mark: it is equal to itself alone
        return True
    if isinstance(value, _IMMUTABLE) and (kind in _IMMUTABLE or not hasattr(value, "__dict__")):
        return True
    if isinstance(value, (enum.Enum, *_DESCRIPTORS)) or kind.__module__ in ("typing", "torch._C", "torch.return_types"):
        return kind.__module__ != "torch._C" or _is_of_enumeration(kind)
    return _is_numpys(kind, "generic", "dtype", "ufunc")


def _is_of_enumeration(kind: type) -> bool:
    """A value of one of torch's enumerations (`SDPBackend`), which are classes of an extension module."""
    return hasattr(kind, "__members__")


def _is_numpys(kind: type, *names: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, tuple(getattr(numpy, name) for name in names))


ATTRIBUTES_OF_INERT = frozenset(vars(logging.Logger(""))) | {"prev", "mode"}
ATTRIBUTES_OF_TENSORS = frozenset(name for kind in torch.Tensor.__mro__ for name in vars(kind))
"""What code stores by these names is taken for a tensor's, whose versions are compared."""


def is_inert(value: Any) -> bool:
    """Whether it does nothing as long as it is not called, which is seen: a logger for example."""
    kind = type(value)
    is_disabling = kind.__module__ == "torch._dynamo.eval_frame" and kind.__name__ == "DisableContext"
    is_grad_mode = kind in (torch.no_grad, torch.enable_grad)  # of a function that is decorated: it is copied when used
    is_handle = kind is torch.utils.hooks.RemovableHandle
    return kind in (logging.Logger, logging.RootLogger) or is_disabling or is_grad_mode or is_handle


def is_defined_in_c(cls: type) -> bool:
    """Whether a class may keep state where Python does not see it: it is no class that a `class` statement made."""
    if isinstance(cls, enum.EnumMeta):  # it has methods of the class that its members are of
        return False
    made_by_c = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
    return any(
        isinstance(value, made_by_c)
        or (isinstance(value, types.GetSetDescriptorType) and name not in ("__dict__", "__weakref__"))
        or (name == "__new__" and isinstance(value, types.BuiltinFunctionType))
        for name, value in vars(cls).items()
    )


def c_bases_of(cls: type) -> list[type]:
    """The classes that it is derived from which extension modules, or the interpreter, define."""
    return [base for base in cls.__mro__ if is_defined_in_c(base)]


def is_harmless_type(cls: type) -> bool:
    """Whether making one of these, and calling its methods, does nothing else."""
    known = (*_C_TYPES, BaseException, typing.Generic, torch.Tensor, *torch.Tensor.__mro__[1:])
    return all(
        base in known or issubclass(base, BaseException) or _is_numpys(base, "ndarray", "generic", "dtype")
        for base in c_bases_of(cls)
    )


def is_harmless_builtin(function: Any) -> bool:
    """Whether a function or a bound method of an extension module, or of the interpreter, does nothing else."""
    owner, name = function.__self__, function.__name__
    if owner is None or isinstance(owner, types.ModuleType):
        module = function.__module__ or getattr(owner, "__name__", "")
        return _is_harmless_function(module, name)
    if isinstance(owner, torch.Tensor):
        return is_operator(name) or name in _TENSOR_METHODS
    kind = owner if isinstance(owner, type) else type(owner)
    if _is_numpys(kind, "ndarray"):
        return name not in ("tofile", "dump", "setflags", "data", "resize")
    return is_harmless_type(kind) or _is_numpys_generator(kind)


def _is_numpys_generator(kind: type) -> bool:
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random is not None and issubclass(kind, (numpy_random.Generator, numpy_random.RandomState))


def _is_harmless_function(module: str, name: str) -> bool:
    if module == "torch" or module == "torch._C":
        return is_operator(name) or name.startswith(_ASKING) or name in ("tensor", "_log_api_usage_once")
    if module.partition(".")[0] == "numpy":
        return not name.startswith(("set", "from", "save", "load", "mem")) and name != "tofile"
    if module in _TORCH_EXTENSIONS:
        return name not in _UNSEEN
    return module in _PURE_EXTENSIONS or name in _FUNCTIONS.get(module, ())


@functools.lru_cache(maxsize=4096)
def is_operator(name: str) -> bool:
    """Whether it is an operator of ATen, which gives tensors that it writes to a new version."""
    if name in _UNSEEN:
        return False
    is_arithmetic = name.startswith("__") and name.endswith("__") and name not in ("__setstate__", "__reduce_ex__")
    return is_arithmetic or hasattr(torch.ops.aten, name)


def is_harmless_descriptor(value: Any) -> bool:
    """Whether a method as its class has it (`list.append`, `torch.Tensor.add_`) does nothing else."""
    if issubclass(value.__objclass__, torch.Tensor.__mro__[-2]):
        return is_operator(value.__name__) or value.__name__ in _TENSOR_METHODS
    return is_harmless_type(value.__objclass__)


def is_harmless_dispatcher(value: Any) -> bool | None:
    """Whether a function of NumPy that arrays may answer for does nothing else; None if it is no such function."""
    if type(value).__name__ == "cython_function_or_method":  # of a generator, or of the global one: both are noted
        return str(value.__module__).startswith("numpy.random") and not value.__name__.startswith("set_bit")
    if type(value).__name__ != "_ArrayFunctionDispatcher":
        return None
    return not value.__name__.startswith(("set", "from", "save", "load", "mem"))


def is_harmless_operator(value: Any) -> bool:
    """Whether it is an operator of PyTorch's own (`torch.ops.aten.add`) that does nothing else."""
    namespace, _, name = str(value).partition(".")
    return type(value).__module__ == "torch._ops" and namespace in ("aten", "prims") and name not in _UNSEEN


def is_harmless_python(module: str, name: str) -> bool:
    """Whether a function of PyTorch, NumPy or the standard library that is written in Python does nothing else."""
    if name in _REFUSED_PYTHON.get(module, ()) or (module == "torch.nn.modules.module" and name.endswith("_hook")):
        return False
    if module.startswith("torch.") and name.startswith(_ASKING):
        return "memory" not in name and "memory" not in module  # which is another one when a step is run again
    if module in _PYTHON_FUNCTIONS:
        return name in _PYTHON_FUNCTIONS[module]
    return module in _PYTHON_MODULES or module.startswith(_PYTHON_FAMILIES)


def is_never_harmless(module: str, name: str) -> bool:
    """Whether it does something else whoever calls it: a line that is written to a log, a warning that is shown."""
    return module in ("logging", "warnings") and name in _REFUSED_PYTHON[module]
