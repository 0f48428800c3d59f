"""Models whose code is seen beforehand to keep nothing: those whose failing steps are repeated without being asked for.

    verified = PlainModel(model)                # raises `NotComparable` with the reason
    ...                                         # the step runs again, watched (watched_run.py)
    verified.refuse_others(watch.own)           # raises if other code of the user ran

The argument of watched_run.py is about what a run could reach; this one is about what its code can do at all, and
neither leans on the other. Code of the user is **plain** if

- its bytecode has nothing but local variables, arithmetic, branches, loops and calls: it stores no attribute, no
  element, no global and no variable of a function around it, and has no `try`, `with`, `yield`, `import` or `del`;
- all that its names lead to cannot change, or is known: parts of the model, its registered tensors, numbers and texts,
  tuples of such, functions that are plain themselves, settings (objects of which only such values are read), and
  PyTorch's own functions. No list, no dictionary, no iterator, no generator, no object with a method of its own kind.

So there is no place where a first run could have left something for the second. Classes of `torch.nn` and of the
libraries in `LIBRARIES` are taken as they were shipped: code that came from elsewhere in their place is the user's.
Hooks of others, tensors of other classes and instances with methods of their own are refused.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memscale._planning.recovery.watched_run import OURS, NotComparable, name_of, uses_of
from memscale._torch import harmless, private
from memscale._torch.entries import is_own, is_special
from memscale._torch.overrides import OWN_ATTRIBUTES, MethodOverride
from memscale._torch.snapshots import ABSENT

LIBRARIES = frozenset({"transformers", "diffusers", "peft", "huggingface_hub"})
"""Libraries whose models are tried with failing steps (tests/_planning/recovery/loop_programs.py)."""

_STEPS = harmless.words(
    "CACHE RESUME NOP POP_TOP PUSH_NULL COPY SWAP ROT_TWO ROT_THREE ROT_FOUR DUP_TOP DUP_TOP_TWO EXTENDED_ARG PRECALL "
    "KW_NAMES RETURN_VALUE RETURN_CONST RAISE_VARARGS GET_ITER FOR_ITER END_FOR POP_ITER GET_LEN COMPARE_OP IS_OP "
    "CONTAINS_OP TO_BOOL NOT_TAKEN LIST_APPEND LIST_EXTEND LIST_TO_TUPLE SET_ADD SET_UPDATE MAP_ADD DICT_UPDATE "
    "DICT_MERGE FORMAT_VALUE FORMAT_SIMPLE FORMAT_WITH_SPEC CONVERT_VALUE MAKE_FUNCTION SET_FUNCTION_ATTRIBUTE "
    "MAKE_CELL COPY_FREE_VARS STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST STORE_FAST_MAYBE_NULL "
    "BINARY_SUBSCR BINARY_SLICE BINARY_OP INPLACE_ADD INPLACE_SUBTRACT INPLACE_MULTIPLY INPLACE_TRUE_DIVIDE"
)
_KINDS = ("LOAD_", "UNARY_", "BINARY_", "BUILD_", "UNPACK_", "CALL", "JUMP_", "POP_JUMP_")
_NEVER = harmless.words("LOAD_BUILD_CLASS LOAD_NAME LOAD_CLASSDEREF LOAD_FROM_DICT_OR_GLOBALS")
_OF_GENERATORS = harmless.words("RETURN_GENERATOR YIELD_VALUE GEN_START CALL_INTRINSIC_1")
"""What a generator expression has beside: it is made and used up inside of plain code."""
_BUILTINS = harmless.words(
    "abs all any bool dict divmod enumerate float int isinstance len list max min pow range reversed round slice "
    "sorted str sum super tuple zip NotImplementedError ValueError TypeError RuntimeError AssertionError Exception None"
)
_DYNAMIC = harmless.words(
    "getattr setattr delattr hasattr vars dir __dict__ __class__ __globals__ __code__ __closure__ data grad "
    "register_buffer register_parameter register_module add_module set_submodule out"
)
"""Names by which more is reached, or changed, than the code says."""
_SPECIAL_OF_CLASSES = harmless.words(
    "__init__ __module__ __doc__ __qualname__ __annotations__ __annotate__ __annotate_func__ __annotations_cache__ "
    "__dict__ __weakref__ __repr__ __str__ __firstlineno__ __static_attributes__ __parameters__ __orig_bases__ "
    "__dataclass_fields__ __dataclass_params__ __match_args__ __eq__ __hash__ __post_init__ __abstractmethods__ "
    "__constants__ __jit_unused_properties__ __replace__ __slotnames__"
)
"""Special names that a class of the user may have: no forward runs them, or they are generated."""
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_METHODS = frozenset(name for name, value in vars(nn.Module).items() if callable(value)) | {"forward"}
_OF_CALLS = harmless.words(
    "_call_impl _wrapped_call_impl _slow_forward _get_backward_hooks _get_backward_pre_hooks "
    "_maybe_warn_non_full_backward_hook"
)
"""What PyTorch runs in every call of a module, beside special methods."""


def _refuse(what: str) -> None:
    raise NotComparable(f"without recover_from_oom=True only models of plain code are run again, and {what}")


def is_shipped(code: types.CodeType, namespace: Mapping[str, Any]) -> bool:
    """Whether it is code of PyTorch, the standard library, MemScale, or of a known library: of their own files."""
    name = str(namespace.get("__name__") or "")
    root = name.partition(".")[0]
    if not name or (is_own(name) and root not in LIBRARIES):
        return False
    file = getattr(sys.modules.get(root), "__file__", None)
    if file is None:
        return not is_own(name)
    is_generated = code.co_filename == "<string>" and (is_own(name) or is_special(code.co_name))  # of a dataclass
    return is_generated or code.co_filename.startswith((os.path.dirname(file) + os.sep, "<frozen "))


def _is_shipped_class(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    if root in OURS or root in LIBRARIES:
        return True
    return kind is object or (not is_own(kind.__module__) and harmless.is_harmless_python(kind.__module__, "forward"))


class PlainModel:
    """A model of plain code. Making one raises `NotComparable` for any other."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = {id(part): part for part in model.modules()}
        tensors = [*model.parameters(), *model.buffers()]
        self._registered = {id(tensor) for tensor in tensors}
        self._codes: dict[types.CodeType, str] = {}
        """Plain code, and what it is called."""
        self._functions: set[int] = set()
        """Functions that were seen: two of the same code may have other variables around them, and other defaults."""
        self._names: set[str] = set()
        self._holders: dict[int, tuple[Any, Mapping[str, Any], str]] = {}
        """Objects of which code may read attributes; by id, with what they have by name. The user may have put
        something on a layer of `torch.nn`, or on a parameter."""
        self._alive: list[Any] = []
        for tensor in tensors:
            _refuse_tensor(tensor)
            self._holders[id(tensor)] = tensor, vars(tensor), "a tensor of the model"
        for part in self._parts.values():
            self._enter(part)
        for _, hooks in private.global_module_hooks():
            _refuse_hooks("all modules", hooks)
        self._follow_names()
        for kind in {torch.Tensor, nn.Parameter, *map(type, self._parts.values())}:
            self._refuse_hung(kind)

    def refuse_others(self, ran: Mapping[types.CodeType, Mapping[str, Any]]) -> None:
        """Raise `NotComparable` if code of the user ran that is not among what was seen."""
        for code, namespace in ran.items():
            if code not in self._codes and not is_shipped(code, namespace):
                _refuse(f"{name_of(code, dict(namespace))} ran, which was not found from the model's classes")

    # ---- parts

    def _enter(self, part: nn.Module) -> None:
        kind = type(part)
        own = [base for base in kind.__mro__ if not _is_shipped_class(base)]
        if own and type(kind) is not type:
            _refuse(f"{kind.__name__} has a metaclass of its own")
        for base in own:
            _refuse_class(base)
        for name, value in vars(part).items():
            if isinstance(value, dict) and name.endswith("_hooks"):
                _refuse_hooks(kind.__name__, value)
            elif name in _METHODS:
                _refuse_override(kind, name, value)
        forward = getattr(kind, "forward", None)
        self._hold(part, vars(part), kind)
        if own:
            self._verify_function(forward, f"{kind.__name__}.forward")

    def _hold(self, owner: Any, values: Mapping[str, Any], kind: type) -> None:
        found: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            if not _is_shipped_class(base):
                found.update(vars(base))
                self._holders[id(base)] = base, vars(base), base.__name__  # what `super()` finds
        self._alive.append(owner)
        self._holders[id(owner)] = owner, {**found, **values}, kind.__name__

    # ---- code

    def _verify_function(self, function: Any, name: str) -> None:
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        if not isinstance(function, types.FunctionType):
            _refuse(f"{name} is no plain function")
        if id(function) in self._functions or is_shipped(function.__code__, function.__globals__):
            return
        self._functions.add(id(function))
        self._alive.append(function)
        if function.__dict__:
            _refuse(f"{name} has attributes")
        self._verify_code(function.__code__, name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._verify_value(value, f"a default of {name}")
        for cell, variable in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            if variable != "__class__":
                self._verify_value(_content_of(cell, name), f"{variable} around {name}")
        self._verify_globals(function.__code__, function.__globals__, name)

    def _verify_code(self, code: types.CodeType, name: str, *, is_inner: bool = False) -> None:
        self._codes[code] = name
        if getattr(code, "co_exceptiontable", b"") and not is_inner:
            _refuse(f"{name} has a try or a with")
        for step in dis.get_instructions(code):
            if not _is_plain_step(step, code, is_inner=is_inner):
                _refuse(f"{name} is not plain ({step.opname.lower()} {step.argrepr})".replace(" )", ")"))
        uses = uses_of(code)
        if bad := {each for each in uses.attributes | uses.texts if each in _DYNAMIC or _is_in_place(each, uses)}:
            _refuse(f"{name} uses {min(bad)!r}")
        self._names |= uses.attributes
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._verify_code(inner, name, is_inner=True)

    def _verify_globals(self, code: types.CodeType, namespace: Mapping[str, Any], name: str) -> None:
        uses = uses_of(code)
        for chain in uses.chains:
            self._verify_chain(namespace.get(chain[0]), chain, name)
        for each in uses.globals:
            if each in namespace:
                self._verify_value(namespace[each], f"{name} uses {each}, which")
            elif each not in _BUILTINS or not hasattr(builtins, each):
                _refuse(f"{name} uses {each}")
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._verify_globals(inner, namespace, name)

    def _verify_chain(self, place: Any, chain: tuple[str, ...], name: str) -> None:
        """What is read through PyTorch's modules, by names that follow each other: it may lead out of them again
        (`torch.os.environ`), and somebody may have hung something there."""
        if not isinstance(place, types.ModuleType) or not _is_of_pytorch(place):
            return
        for attribute in chain[1:]:
            if not isinstance(place, types.ModuleType):
                return
            place = getattr(place, attribute, ABSENT)
        if isinstance(place, types.ModuleType) or place is ABSENT:
            _refuse(f"{name} uses {'.'.join(chain)}, which is no function of PyTorch")
        if not _is_shipped_with_pytorch(place):
            self._verify_value(place, f"{name} uses {'.'.join(chain)}, which")

    def _follow_names(self) -> None:
        """What the names in the code lead to, until nothing is new."""
        done: set[tuple[int, str]] = set()
        while True:
            new = [
                (key, name)
                for key, (_, values, _) in self._holders.items()
                for name in self._names
                if name in values and (key, name) not in done
            ]
            if not new:
                return
            for key, name in new:
                done.add((key, name))
                _, values, kind = self._holders[key]
                self._verify_value(values[name], f"{kind}.{name}")

    def _refuse_hung(self, kind: type) -> None:
        """The user may have put something on a class of PyTorch, too, by a name that his code uses."""
        for base in kind.__mro__:
            if is_own(base.__module__) and base.__module__.partition(".")[0] not in LIBRARIES:
                continue
            for name in self._names & vars(base).keys():
                value = vars(base)[name]
                function: Any = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                is_bound = isinstance(function, types.BuiltinFunctionType | types.MethodWrapperType)
                if is_bound and not isinstance(function.__self__, type | types.ModuleType | types.NoneType):
                    _refuse(f"{base.__name__}.{name} is a method of {_article(type(function.__self__))}")
                if isinstance(function, types.FunctionType) and not is_shipped(function.__code__, function.__globals__):
                    _refuse(f"{base.__name__}.{name} is a function of others")
                if is_own(type(function).__module__) or isinstance(function, functools.partial):
                    _refuse(f"{base.__name__}.{name} is {_article(type(function))}")

    # ---- values

    def _verify_value(self, value: Any, name: str) -> None:
        kind = type(value)
        if harmless.is_immutable(value) and not isinstance(value, enum.Enum) and not is_own(kind.__module__):
            return
        if isinstance(value, nn.Module):
            if id(value) not in self._parts:
                _refuse(f"{name} is a module that the model does not know of")
        elif isinstance(value, torch.Tensor):
            if id(value) not in self._registered:
                _refuse(f"{name} is a tensor that is not registered with the model")
        elif isinstance(value, types.FunctionType | staticmethod | classmethod):
            self._verify_function(value, name)
        elif isinstance(value, property):
            self._verify_function(value.fget, name)
        elif isinstance(value, types.BuiltinFunctionType):
            _refuse_unless(_is_shipped_with_pytorch(value), f"{name} is no function of PyTorch")
        elif kind is tuple or kind is frozenset:
            for each in value:
                self._verify_value(each, name)
        elif isinstance(value, types.ModuleType):
            self._verify_module(value, name)
        elif isinstance(value, type):
            if is_own(value.__module__) and value.__module__.partition(".")[0] not in LIBRARIES:
                _refuse(f"{name} is a class of its own")
        elif kind.__module__.partition(".")[0] in OURS or harmless.is_harmless_operator(value):
            return
        else:
            self._verify_settings(value, name)

    def _verify_module(self, module: types.ModuleType, name: str) -> None:
        root = module.__name__.partition(".")[0]
        if root in ("torch", "math"):
            return
        if not is_own(module.__name__) or id(module) in self._holders:
            _refuse_unless(id(module) in self._holders, f"{name} is the module {module.__name__}")
            return
        self._alive.append(module)
        self._holders[id(module)] = module, vars(module), module.__name__

    def _verify_settings(self, value: Any, name: str) -> None:
        """An object of which only values are read that cannot change; nobody writes to it, as no code here stores."""
        kind = type(value)
        is_known = kind.__module__.partition(".")[0] in LIBRARIES and kind.__name__.endswith("Config")
        is_plain = kind is types.SimpleNamespace or (is_own(kind.__module__) and harmless.c_bases_of(kind) == [object])
        if id(value) in self._holders:
            return
        if not (is_known or is_plain) or not hasattr(value, "__dict__"):
            _refuse(f"{name} is {_article(kind)}, which may change")
        if not is_known:
            for base in kind.__mro__[:-1]:
                if is_own(base.__module__):
                    _refuse_class(base)
        self._hold(value, vars(value), kind)


def _is_of_pytorch(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "torch"


def _is_shipped_with_pytorch(value: Any) -> bool:
    """Whether it is a function or a class of its own; what else hangs on its modules is looked at like anything."""
    if isinstance(value, types.FunctionType):
        return is_shipped(value.__code__, value.__globals__)
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__ if isinstance(value.__self__, type | types.ModuleType) else type(value.__self__)
        return str(value.__module__ or getattr(owner, "__module__", "")).partition(".")[0] in ("torch", "math")
    return isinstance(value, type) and value.__module__.partition(".")[0] == "torch"


def _refuse_unless(is_fine: bool, what: str) -> None:
    if not is_fine:
        _refuse(what)


def _article(kind: type) -> str:
    return f"an object of {kind.__qualname__}"


def _refuse_class(base: type) -> None:
    for name, value in vars(base).items():
        if is_special(name) and name not in _SPECIAL_OF_CLASSES:
            _refuse(f"{base.__name__} has {name}")
        if is_special(name) and callable(value) and not isinstance(value, types.FunctionType):
            _refuse(f"{base.__name__}.{name} is no plain function")  # it would not be seen when it runs
        if name in _OF_CALLS:
            _refuse(f"{base.__name__} has a {name} of its own")
        kind = type(value)
        if hasattr(kind, "__get__") and not _is_known_descriptor(value) and is_own(kind.__module__):
            _refuse(f"{base.__name__}.{name} is a descriptor")


def _is_known_descriptor(value: Any) -> bool:
    return isinstance(value, types.FunctionType | staticmethod | classmethod | property)


def _refuse_tensor(tensor: torch.Tensor) -> None:
    if type(tensor) not in _TENSORS:
        _refuse(f"it has tensors of the class {type(tensor).__name__}")
    for hook in (tensor._backward_hooks or {}).values():  # PyTorch's own call the user's (`register_multi_grad_hook`)
        if type(hook).__module__.partition(".")[0] not in OURS:
            _refuse("a parameter has a hook of others")


def _is_shipped_function(hook: Any) -> bool:
    """Whether it is a function of a known library that keeps nothing around it."""
    is_bare = isinstance(hook, types.FunctionType) and not hook.__closure__ and not hook.__dict__
    return is_bare and is_shipped(hook.__code__, hook.__globals__)


def _refuse_hooks(owner: str, hooks: Mapping[int, Any]) -> None:
    for hook in hooks.values():
        if _is_shipped_function(hook):
            continue
        kind = hook if isinstance(hook, types.FunctionType) else type(hook)
        if is_own(kind.__module__) or kind.__module__.partition(".")[0] in ("functools", "builtins"):
            _refuse(f"{owner} has a hook of others")


def _refuse_override(kind: type, name: str, value: Any) -> None:
    while isinstance(value, MethodOverride):
        value = value._replaced
    if value is not None and not (name in OWN_ATTRIBUTES and type(value).__module__.startswith("memscale.")):
        module = getattr(value, "__module__", None) or ""
        if not (name in OWN_ATTRIBUTES - {"forward"} and module.startswith("memscale.")):
            _refuse(f"one {kind.__name__} has a {name} of its own")


def _content_of(cell: Any, name: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        _refuse(f"a variable around {name} is empty")


def _is_plain_step(step: dis.Instruction, code: types.CodeType, *, is_inner: bool) -> bool:
    name = step.opname
    if name == "STORE_DEREF":
        return step.argval in code.co_cellvars
    if is_inner and name in _OF_GENERATORS:
        return True
    if is_inner and name in ("RERAISE", "SEND", "COPY", "JUMP_BACKWARD_NO_INTERRUPT"):
        return True
    if name in _NEVER:
        return False
    return name in _STEPS or name.startswith(_KINDS)


def _is_in_place(name: str, uses: Any) -> bool:
    """Whether it writes to a tensor in a way that gives it no new version: others are seen where they matter, as all
    tensors that plain code can reach, and that outlive a forward, are the model's or the batch's."""
    return name in uses.attributes and name.endswith("_") and not is_special(name) and not harmless.is_operator(name)
