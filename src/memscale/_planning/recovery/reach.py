"""All that code which ran can reach by its names: every object must be known, or the run is not repeated.

See the argument in watched_run.py. An object is known if it was compared, or put back, before the run (entries.py), or
cannot change (harmless.py). Objects that the run made itself need no look: they are reached only by what it ran.

NOTE [attributes by name]: an attribute that no code mentions is not read. So a model may hold what is not known (a
writer of logs, a data loader) as long as its forward leaves it alone. Code that makes up names (`getattr`) names all.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import random
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from memscale._planning.recovery.plain_code import is_shipped
from memscale._planning.recovery.watched_run import (
    OURS,
    RESETS,
    SETTERS,
    NotComparable,
    Uses,
    Watch,
    calls_something,
    name_of,
    uses_of,
)
from memscale._torch import harmless, private
from memscale._torch.entries import (
    CODE,
    CONTAINER_KINDS,
    CONTAINER_TYPES,
    ArrayValues,
    Attributes,
    BufferValues,
    CachedCalls,
    Cell,
    Contents,
    ContextValue,
    Entry,
    GeneratorState,
    LruCache,
    Slots,
    TensorNote,
    Variables,
    cell_contents,
    definitions_in,
    has_slots,
    is_own,
    is_plain_object,
    is_proxy,
    is_small_array,
    is_special,
    is_state_of,
)
from memscale._torch.messages import says_once
from memscale._torch.snapshots import ABSENT, is_generator

Found: TypeAlias = Callable[[type, Any], Entry | None]
"""Asks for the entry of a kind that was compared, or put back, of an object."""

_KNOWN_BASES = frozenset(
    {
        object,
        typing.Generic,
        tuple,
        frozenset,
        str,
        int,
        float,
        bytes,
        *CONTAINER_TYPES,
        *CONTAINER_KINDS,
        types.SimpleNamespace,
    }
)
_DYNAMIC = harmless.words("getattr hasattr vars dir attrgetter __dict__ __getattribute__ deepcopy copy asdict astuple")
"""Names by which attributes are read whose own names are not in the code."""
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOK_TABLES = frozenset(name for name in _OF_EVERY_MODULE - _TABLES if name.startswith("_"))
"""What every module has beside its own: which hooks, and how they are called. It is not compared."""
_STATISTICS = ("batch_norm", "instance_norm")
"""Operators that write to tensors without a new version have this in their names."""
_DEFINITIONS = (functools.partial, functools.cached_property, types.MethodType, LruCache)
_REBOUND = (type, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod)
_SEEN = types.BuiltinFunctionType
"""What is seen when it is called (`Watch`)."""
_SKIPPED = frozenset({"_abc_impl"})
_SETTING = frozenset({"huggingface_hub.dataclasses.__strict_setattr__"})
"""Functions that are the `__setattr__` of a class, and hand on what they are given."""
_OF_FIELDS = frozenset(dataclasses.Field.__slots__)
"""What the description of a dataclass's field has. No code that ran may store it."""


def refuse_unknown(watch: Watch, model: nn.Module, found: Found) -> None:
    """Raise `NotComparable` unless all that ran, and all that it could reach, is known."""
    if watch.reasons:
        raise NotComparable(watch.reasons[0])
    if any(issubclass(kind, type | torch.Tensor) for kind in watch.set_by_any_name):
        raise NotComparable("a class or a tensor stores its attributes by names that are not in the code")
    _refuse_threads(watch)
    for code, namespace in list(watch.own.items()):
        _refuse_ways(code, namespace)
    _Reach(watch, model, found).refuse()


def _refuse_threads(watch: Watch) -> None:
    """Another thread that is in the same package may see what the failed run did."""
    packages = {str(space.get("__name__")).partition(".")[0] for space in watch.own.values()}
    for ident, frame in sys._current_frames().items():
        each: types.FrameType | None = frame if ident != threading.get_ident() else None
        while each is not None:
            if str(each.f_globals.get("__name__")).partition(".")[0] in packages:
                raise NotComparable(f"another thread runs {name_of(each.f_code, each.f_globals)} at the same time")
            each = each.f_back


def _refuse_ways(code: types.CodeType, namespace: dict[str, Any]) -> None:
    """Raise `NotComparable` for code whose way the argument does not cover."""
    uses, name = uses_of(code), name_of(code, namespace)
    if code.co_name in ("__exit__", "__aexit__"):
        raise NotComparable(f"{name} may handle errors itself")
    if code.co_name == RESETS and calls_something(code):
        raise NotComparable(f"{name} may be called after an error, and do something else then")
    if code.co_name == "__del__":
        raise NotComparable(f"{name} runs when an object dies, which is not known beforehand")
    if refused := harmless.refused_names(uses.attributes, uses.stored_attributes):
        raise NotComparable(
            f"{name} uses the attribute {min(refused)!r}, by which it may see or change what is not compared"
        )
    if hidden := uses.attributes & harmless.HIDDEN_WRITES:
        raise NotComparable(f"{name} uses {min(hidden)!r} of a tensor, by which it may be written to unseen")
    if uses.sets_any:
        raise NotComparable(f"{name} sets attributes by names that are not in its code")
    if hooks := uses.attributes & _HOOK_TABLES:
        raise NotComparable(f"{name} uses {min(hooks)!r} of a module")


class _Reach:
    """All objects that the code which ran can reach by names: each must be known."""

    def __init__(self, watch: Watch, model: nn.Module, found: Found) -> None:
        self._watch, self._found = watch, found
        self._parts = {id(part) for part in model.modules()}
        self._registered = {id(each) for each in (*model.parameters(), *model.buffers())}
        used = [uses_of(code) for code in watch.own]
        self._stored = frozenset(watch.stored_by_call).union(*(uses.stored_attributes for uses in used))
        self._flagged = {id(tensor) for each in watch.flagged if (tensor := each()) is not None}
        self._stored_on_classes = watch.stored_on_classes.union(*(uses.stored_elsewhere for uses in used))
        self._attributes = frozenset().union(*(uses.attributes for uses in used))
        said = [self._attributes, *(uses.globals | uses.texts for uses in used)]
        said += [frozenset(code.co_names) for code in watch.others]
        self._names = frozenset().union(*said)
        self._stored_anywhere = self._stored.union(*(uses.stored_globals for uses in used))
        self._settable = self._stored_on_classes - harmless.ATTRIBUTES_OF_TENSORS
        self._writes_tables = any(
            uses_of(code).writes_tables and not is_shipped(code, namespace) for code, namespace in watch.own.items()
        )
        self._is_dynamic = any((uses.attributes | uses.globals) & _DYNAMIC for uses in used)
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._waiting: list[tuple[Any, str]] = []
        self._reached: set[types.CodeType] = set()
        self._verified: set[int] = set()
        """Tensors whose versions are compared together with what holds them."""
        self._loose: list[str] = []
        """Where tensors were met that are not registered with the model."""
        self._wait_for_model(model)
        for code, namespace in list(watch.own.items()):
            self._wait_for_code(code, namespace)

    def refuse(self) -> None:
        while self._waiting:
            self._visit(*self._waiting.pop())
        self._refuse_code_from_elsewhere()
        used = [uses_of(code) for code in self._watch.own]
        named = {name for uses in used for name in uses.attributes | uses.globals}
        if self._loose and any(part in name for name in named for part in _STATISTICS):
            raise NotComparable(f"{self._loose[0]} holds a tensor that may be written to unseen")
        if self._loose and "requires_grad" in self._stored:
            raise NotComparable(f"{self._loose[0]} holds a tensor that may have been told to need a gradient")

    def _refuse_code_from_elsewhere(self) -> None:
        """Code that ran must have been found, or be of a function inside of such code."""
        known = {code for code in self._reached if code in self._watch.own}
        known |= {inner for code in known for inner in _codes_in(code)}
        for code, namespace in list(self._watch.own.items()):
            if code not in known:
                raise NotComparable(f"{name_of(code, namespace)} uses state that had not been found before it ran")

    # ---- where it begins

    def _wait_for_model(self, model: nn.Module) -> None:
        for part in model.modules():
            kind = type(part)
            self._wait(kind, kind.__name__)
            if any(base not in _KNOWN_BASES for base in harmless.c_bases_of(kind)) or has_slots(kind):
                _refuse(kind.__name__, part)
            if not is_own(kind.__module__) and not harmless.is_harmless_python(kind.__module__, "forward"):
                _refuse(kind.__name__, part)
            for name, value in vars(part).items():
                if name in _HOOK_TABLES:
                    for hook in value.values() if isinstance(value, dict) else ():
                        self._wait(hook, f"a hook of {kind.__name__}")
                elif name not in _OF_EVERY_MODULE and self._is_named(name):
                    self._wait_verified(value, f"{kind.__name__}.{name}")
        for tensor in (*model.parameters(), *model.buffers()):
            self._wait(tensor, "a parameter")
            for hook in (tensor._backward_hooks or {}).values():
                self._wait(hook, "a hook of a parameter")
        for _, hooks in private.global_module_hooks():
            for hook in hooks.values():
                self._wait(hook, "a hook of all modules")

    def _wait_for_code(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        uses, name = uses_of(code), name_of(code, namespace)
        builtins = namespace.get("__builtins__", {})
        builtins = vars(builtins) if isinstance(builtins, types.ModuleType) else builtins
        for each in sorted(uses.globals):
            if each in namespace or each in uses.stored_globals:
                self._visit_variable(namespace, each, name, uses)
            elif each in builtins and not (each in uses.called and isinstance(builtins[each], _SEEN)):
                self._wait(builtins[each], name)
        for dots, module, taken in uses.imports:
            full = importlib.util.resolve_name("." * dots + module, namespace.get("__package__") or None)
            # The package is bound by `import a.b`.
            for path in {full} if dots or taken else {full, full.partition(".")[0]}:
                if path in sys.modules and taken and path == full:
                    self._visit_taken(sys.modules[path], taken, uses, name)
                elif path in sys.modules:
                    self._visit_module(sys.modules[path], uses if path == full else _named_by(uses), name, set())

    def _visit_variable(self, namespace: dict[str, Any], each: str, name: str, uses: Uses) -> None:
        value = namespace.get(each)
        if isinstance(value, types.ModuleType) and each not in uses.stored_globals:
            if not self._visit_chains(value, each, uses, name):
                self._visit_module(value, uses, name, set())
            return
        is_constant = harmless.is_immutable(value) and each not in self._stored_anywhere
        if not is_constant and (not isinstance(value, CODE) or each in uses.stored_globals):
            entry = self._found(Variables, namespace)
            is_rebound = isinstance(value, CODE)  # which is not put back, see NOTE [what was loaded stays]
            if entry is None or is_rebound or each not in entry.names:  # type: ignore[attr-defined]
                raise NotComparable(f"{name} uses {each!r}, which had not been found before it ran")
        self._wait_verified(value, f"{name}: {each}")

    def _visit_chains(self, module: types.ModuleType, each: str, uses: Uses, name: str) -> bool:
        """Visit what code reads from a Python module, and from those in it, if it does no more with any of them than
        to read attributes at once: then nobody else is handed one of them, and nobody asks it for all of its names."""
        read: list[tuple[types.ModuleType, str]] = []
        for chain in uses.chains:
            place: Any = module if chain[0] == each else None
            for attribute in chain[1:]:
                if isinstance(place, types.ModuleType):
                    read.append((place, attribute))
                    place = vars(place).get(attribute)
            if isinstance(place, types.ModuleType):
                return False
        for owner, attribute in read:
            self._visit_read(owner, attribute, uses, name)
        return True

    def _visit_taken(self, module: types.ModuleType, taken: Iterable[str], uses: Uses, name: str) -> None:
        """What code takes from a Python module by `from ... import`."""
        for each in taken:
            value = vars(module).get(each)
            if isinstance(value, types.ModuleType):
                self._visit_module(value, uses, name, set())
            else:
                self._visit_read(module, each, uses, name)

    def _visit_read(self, module: types.ModuleType, each: str, uses: Uses, name: str) -> None:
        namespace, value = vars(module), vars(module).get(each)
        if each not in namespace or isinstance(value, types.ModuleType):
            return
        if is_own(module.__name__):
            self._visit_variable(namespace, each, f"{name}: {module.__name__}", uses)
        else:
            self._wait(value, f"{name}: {module.__name__}.{each}")

    def _visit_module(self, module: types.ModuleType, uses: Uses, name: str, seen: set[int]) -> None:
        """What code reads, or writes, by the names of a Python module."""
        if id(module) in seen:
            return
        seen.add(id(module))
        namespace, owns = vars(module), is_own(module.__name__)
        changed = [n for n in uses.stored_elsewhere if n in namespace or n in vars(type(module))]
        if changed and not owns:
            raise NotComparable(f"{name} may write to {module.__name__}.{changed[0]}")
        # An own module may have been handed on to other code, or asked by `getattr`: names that others said count, too.
        is_whole = bool((uses.globals | uses.attributes) & _DYNAMIC)
        said = [each for each in namespace if (is_whole or each in self._names) and not is_special(each)]
        names = said if owns else uses.attributes
        for each in sorted(names):
            value = namespace.get(each)
            if isinstance(value, types.ModuleType):
                self._visit_module(value, uses, name, seen)
            elif each in namespace and owns:
                self._visit_variable(namespace, each, f"{name}: {module.__name__}", uses)
            elif each in namespace:
                self._wait(value, f"{name}: {module.__name__}.{each}")

    def _is_named(self, name: str) -> bool:
        return self._is_dynamic or name in self._names

    def _wait(self, value: Any, where: str) -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._alive.append(value)
            self._waiting.append((value, where))

    def _wait_verified(self, value: Any, where: str) -> None:
        """Wait for what something holds whose values are compared, with the versions of tensors among them."""
        if isinstance(value, torch.Tensor):
            self._verified.add(id(value))
        self._wait(value, where)

    def _wait_all(self, values: Iterable[Any], where: str) -> None:
        for value in values:
            self._wait(value, where)

    # ---- one object

    def _visit(self, value: Any, where: str) -> None:
        kind = type(value)
        if kind.__module__.partition(".")[0] in OURS:
            return
        if is_proxy(kind) and not isinstance(value, types.GenericAlias):
            _refuse(where, value)
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, where)
        elif isinstance(value, nn.Module):
            self._visit_other_module(value, where)
        elif is_generator(value):
            self._visit_generator(value, where)
        elif kind in CONTAINER_TYPES:
            self._visit_extras(value, where, ())
            self._visit_container(value, where)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, where)
        elif isinstance(value, type):
            self._visit_class(value, where)
        elif isinstance(value, types.ModuleType):
            none: frozenset[str] = frozenset()
            uses = Uses(
                self._names, self._attributes, none, self._stored, self._stored, none, (), none, none, False, False
            )
            self._visit_module(value, uses, where, set())
        elif isinstance(value, tuple | frozenset) and not hasattr(value, "__dict__"):
            self._wait_all(value, where)
        elif isinstance(value, property | staticmethod | classmethod):
            self._wait_all([*(definitions_in(value) or ()), kind], where)
        elif is_plain_object(value):
            self._visit_object(value, where)
        elif kind is dataclasses.Field and not (self._stored & _OF_FIELDS or value.metadata):
            self._wait_all([value.default, value.default_factory], where)
        elif kind is weakref.ref and id(value()) in self._registered and value.__callback__ is None:
            return  # an LSTM has such of its parameters
        elif harmless.is_inert(value):
            self._visit_extras(value, where, harmless.ATTRIBUTES_OF_INERT)
        elif not harmless.is_immutable(value) and not self._visit_callable(value, where):
            self._visit_array(value, where)

    def _visit_extras(self, value: Any, where: str, known: Iterable[str]) -> None:
        """Attributes that own code may have given to an object of others: nobody compares them."""
        extras = {name: each for name, each in getattr(value, "__dict__", {}).items() if name not in frozenset(known)}
        if self._writes_tables and not harmless.is_inert(value) and not all(map(is_special, extras)):
            raise NotComparable(f"{where} may write to the attributes of an object of type {type(value).__name__}")
        if changed := self._stored & extras.keys():
            raise NotComparable(f"{where} may write to {min(changed)!r} of an object of type {type(value).__name__}")
        self._wait_all((each for name, each in extras.items() if name in self._attributes), where)

    def _visit_tensor(self, tensor: torch.Tensor, where: str) -> None:
        if tensor.is_inference():
            raise NotComparable(
                f"{where} holds a tensor of inference mode, of which it is not known when it is written to"
            )
        if id(tensor) in self._flagged:
            raise NotComparable(f"{where} holds a tensor that was told to need a gradient")
        if id(tensor) not in self._registered:
            self._loose.append(where)
            if id(tensor) not in self._verified and self._found(TensorNote, tensor) is None:
                raise NotComparable(f"{where} holds a tensor that was written to, or was not there at first")
        if is_own(type(tensor).__module__):
            self._wait(type(tensor), where)
        for name, value in vars(tensor).items():
            if name in self._stored:
                raise NotComparable(f"{where} holds a tensor whose attribute {name!r} may be written to")
            if self._is_named(name):
                self._wait(value, f"{where}: {name} of a tensor")

    def _visit_other_module(self, module: nn.Module, where: str) -> None:
        """Allow a module that is no part of the model only if it cannot change: a loss without weights."""
        if id(module) in self._parts:
            return
        kinds = {type(part) for part in module.modules()}
        has_tensors = any(True for _ in (*module.parameters(), *module.buffers()))
        has_hooks = any(
            value for part in module.modules() for name, value in vars(part).items() if name in _HOOK_TABLES
        )
        named = {name for part in module.modules() for name in vars(part)}
        if has_tensors or has_hooks or self._stored & named or any(is_own(kind.__module__) for kind in kinds):
            raise NotComparable(
                f"{where} uses what cannot be compared: a module ({type(module).__name__}) that is no part of the model"
            )
        self._wait_all(kinds, where)

    def _visit_generator(self, generator: Any, where: str) -> None:
        if is_own(type(generator).__module__) or getattr(generator, "__dict__", {}).keys() - {"gauss_next"}:
            _refuse(where, generator)
        if self._found(GeneratorState, generator) is None and not _is_global_generator(generator):
            _refuse(where, generator)

    def _visit_container(self, container: Any, where: str) -> None:
        if self._found(Contents, container) is None:
            _refuse(where, container)
        for element in Contents(container).elements():
            self._wait_verified(element, where)
        if isinstance(container, collections.defaultdict):
            self._wait(container.default_factory, where)
        if isinstance(container, dict):
            self._wait_all(dict.keys(container), where)

    def _visit_function(self, function: types.FunctionType, where: str) -> None:
        code, module = function.__code__, function.__globals__.get("__name__") or ""
        if module.partition(".")[0] in OURS:
            return
        self._reached.add(code)
        owns, cells = is_own(module) or not module, function.__closure__ or ()
        if not owns:
            self._visit_extras(function, where, ())
        if not owns and code in self._watch.others and not harmless.is_harmless_python(module, code.co_name):
            raise NotComparable(f"{where} uses {module}.{code.co_name}, which is not known to change nothing else")
        if code not in self._watch.own and code not in self._watch.others:
            return
        where = f"{module}.{code.co_name}"
        stored = uses_of(code).stored_around
        for name, cell in zip(code.co_freevars, cells, strict=True):
            if owns and self._found(Cell, cell) is None:
                raise NotComparable(f"{where} uses variables around it, which had not been found before it ran")
            held = cell_contents(cell)
            if isinstance(held, CODE) and name in stored:  # which is not put back
                raise NotComparable(f"{where} binds {name!r} around it to a function or a class")
            if held is not ABSENT:
                self._wait_verified(held, where) if owns else self._wait(held, where)
        if owns:
            self._wait_all([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()], where)
            if function.__dict__:
                self._wait(function.__dict__, where)

    def _visit_class(self, cls: type, where: str) -> None:
        if cls is contextlib.suppress:
            raise NotComparable(f"{where} may handle errors itself")
        if harmless.is_defined_in_c(cls):
            if not harmless.is_harmless_type(cls):
                _refuse(where, cls)
            return
        owns = is_own(cls.__module__)
        if not owns and (changed := self._settable & vars(cls).keys()):
            raise NotComparable(f"{where} may write to {cls.__name__}.{min(changed)}")
        if owns and self._found(Attributes, cls) is None and not self._is_constant(cls):
            raise NotComparable(f"{where} uses {cls.__name__}, which had not been found before it ran")
        if owns and "__del__" in vars(cls):
            raise NotComparable(f"{where} uses {cls.__name__}, whose objects do something when they die")
        for name, value in list(vars(cls).items()):
            if owns and name in self._stored and isinstance(value, _REBOUND):
                raise NotComparable(f"{where} may bind {cls.__name__}.{name} anew")
            if self._belongs(name, value, owns):
                self._wait(value, f"{cls.__name__}.{name}")
        self._wait_all((each for each in (*cls.__mro__[1:], type(cls)) if is_own(each.__module__)), where)

    def _is_constant(self, cls: type) -> bool:
        """Whether a class that nobody compared has only attributes that cannot change, and that no code sets."""
        state = {
            name: value for name, value in vars(cls).items() if is_state_of(cls, name, value) and name not in _SKIPPED
        }
        fixed = (*_DEFINITIONS, types.MemberDescriptorType)
        return not self._stored_on_classes & state.keys() and all(
            harmless.is_immutable(value) or isinstance(value, fixed) for value in state.values()
        )

    def _belongs(self, name: str, value: Any, owns: bool) -> bool:
        """Whether code may use this attribute of a class."""
        if owns and isinstance(value, (*CODE, *_DEFINITIONS)):
            return not isinstance(value, type | types.ModuleType) or self._is_named(name)
        is_used = self._is_named(name) if owns else name in self._attributes
        return is_used and not isinstance(value, CODE) and not is_special(name) and name not in _SKIPPED

    def _visit_object(self, value: Any, where: str) -> None:
        kind = type(value)
        if any(base not in _KNOWN_BASES for base in harmless.c_bases_of(kind)):
            _refuse(where, value)
        if isinstance(value, CONTAINER_KINDS):
            self._visit_container(value, where)
        if isinstance(value, tuple | frozenset):
            self._wait_all(value, where)
        if isinstance(getattr(value, "__dict__", None), dict):
            if self._found(Attributes, value) is None:
                _refuse(where, value)
            for name, each in list(vars(value).items()):
                may_be_stored = name in self._stored or kind in self._watch.set_by_any_name
                if may_be_stored and isinstance(each, CODE):  # which is not put back
                    raise NotComparable(f"{where} may bind {name!r} of an object anew")
                if self._is_named(name):
                    self._wait_verified(each, f"{where}.{name}")
        if self._found(Slots, value) is None:
            _refuse(where, value)
        for each in Slots(value).take():
            self._wait_verified(each, where)
        self._wait(kind, where)

    def _visit_callable(self, value: Any, where: str) -> bool:
        """Whether it is something that can be called, or holds such, and is known."""
        if isinstance(value, types.BuiltinFunctionType):
            if not harmless.is_harmless_builtin(value):
                _refuse(where, value)
            if not isinstance(value.__self__, types.ModuleType | type(None)):
                self._wait(value.__self__, where)
        elif isinstance(value, types.MethodWrapperType):
            _refuse_setter(value, where)
            self._wait(value.__self__, where)
        elif isinstance(value, types.MethodDescriptorType | types.WrapperDescriptorType):
            _refuse_setter(value, where)
            if not harmless.is_harmless_descriptor(value):
                _refuse(where, value)
        elif isinstance(value, LruCache):
            if says_once(value):
                return True
            if self._found(CachedCalls, value) is None:
                _refuse(where, value)
            self._wait_all(definitions_in(value) or (), where)
            self._visit_extras(value, where, vars(value.__wrapped__))
        elif isinstance(value, contextvars.ContextVar):
            if self._found(ContextValue, value) is None:
                _refuse(where, value)
            self._wait(value.get(None), where)
        elif (inside := definitions_in(value)) is not None:
            self._visit_extras(value, where, ("data", "maps"))
            self._wait_all(inside, where)
        else:
            return bool(harmless.is_harmless_dispatcher(value)) or harmless.is_harmless_operator(value)
        return True

    def _visit_array(self, value: Any, where: str) -> None:
        if (
            is_small_array(value)
            and not value.dtype.hasobject
            and not (value.base is not None and self._is_named("base"))
        ):
            kind: type = ArrayValues
        elif isinstance(value, bytearray | array.array):
            kind = BufferValues
        else:
            _refuse(where, value)
        if self._found(kind, value) is None:
            _refuse(where, value)


def _refuse_setter(value: Any, where: str) -> None:
    """`object.__setattr__` as a value: what it sets is not in the code."""
    if value.__name__ in SETTERS and where not in _SETTING:
        raise NotComparable(f"{where} holds {value.__qualname__}, which sets attributes by any name")


def _refuse(where: str, value: Any) -> None:
    name = (
        value.__qualname__ if isinstance(value, type | types.BuiltinFunctionType) else f"of type {type(value).__name__}"
    )
    raise NotComparable(f"{where} uses what cannot be compared: an object {name}")


def _named_by(uses: Uses) -> Uses:
    """The same without `getattr`: of a package that code imports a part of, it asks nothing."""
    return uses._replace(globals=uses.globals - _DYNAMIC, attributes=uses.attributes - _DYNAMIC)


def _is_global_generator(generator: Any) -> bool:
    """Whether it is one whose state is noted in every step (moment.py)."""
    numpy_random = sys.modules.get("numpy.random")
    numpys = [] if numpy_random is None else [numpy_random.mtrand._rand]
    ours: list[Any] = [random.random.__self__, torch.default_generator, *numpys]  # type: ignore[attr-defined]
    return any(generator is each for each in ours)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes_in(constant)
