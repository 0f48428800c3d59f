"""Overrides on a user's modules that can be taken off again, in any order, and that copies do not inherit.

PyTorch's hooks come first; this is for what hooks cannot do: re-entering a forward, and keeping MemScale out of
copies. See NOTE [override chain] and NOTE [clean copies].
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from memscale._errors import MemScaleError, PlanError
from memscale._torch import private

EXECUTOR_ATTRIBUTE = "_memscale_executor"
OWN_ATTRIBUTES = frozenset(
    {EXECUTOR_ATTRIBUTE, "forward", private.COMPILED_CALL, "__getstate__", "__deepcopy__", "__reduce_ex__"}
)
"""What a wrapped module may carry of ours."""


class OwnHook:
    """Base of every hook that MemScale registers on a module: copies of the module leave it behind."""


def is_failing(output: Any) -> bool:
    """Whether a forward hook that is always called is called because its forward has raised.

    NOTE [hooks of a failing forward]: PyTorch goes through the very dictionary of the module's hooks then. If one of
    them is added or removed meanwhile, the user sees "OrderedDict mutated during iteration" and not what was raised. So
    a hook that is there for one forward stays until another one has ended, or until `detach`.

    The model may be called where another exception is being handled; a forward that raises has no output.
    """
    return output is None and sys.exc_info()[1] is not None


def undo_with(owner: Any, callback: Callable[[], Any], undo: contextlib.ExitStack) -> None:
    """Undo what the whole process sees: with the rest, or when the owner is gone without that."""
    undo.callback(weakref.finalize(owner, callback))


class MethodOverride:
    """Stands in for one method of one module.

    NOTE [override chain]: several overrides may sit on one module (nested wraps). Each knows what it replaced; taking
    one off relinks its neighbours, and one that is buried under a stranger's override turns itself into a pass-through.
    No override holds its module strongly, so a wrapped model dies with its last reference.
    """

    method: str
    may_be_compiled: ClassVar[bool] = False
    """Does all that it does also where the compiler traces it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._replaced: Callable[..., Any] | None = vars(module).get(self.method)
        self.active = True

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "an override is only called through its module"
        return module

    def inner(self) -> Callable[..., Any]:
        """What this override replaced."""
        if self._replaced is not None:
            return self._replaced
        module = self.module
        method: Callable[..., Any] = getattr(type(module), self.method).__get__(module)
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.inner()(*args, **kwargs)
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and not self.may_be_compiled:
            refuse_compiler(type(self.module).__name__)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def __signature__(self) -> Any:
        import inspect  # frameworks ask a forward for its parameters

        return inspect.signature(self.inner())

    def attach(self, undo: contextlib.ExitStack) -> None:
        vars(self.module)[self.method] = self
        undo.callback(self.detach)
        keep_copies_clean(self.module, undo)

    def detach(self) -> None:
        self.active = False
        module = self._module()
        if module is None:
            return
        top = vars(module).get(self.method)
        if top is self:
            _restore(module, self.method, self._replaced)
            return
        while isinstance(top, MethodOverride):
            if top._replaced is self:
                top._replaced = self._replaced
                return
            top = top._replaced


def find_module(model: nn.Module, module_fqn: str) -> nn.Module:
    """The module that a plan names."""
    try:
        return model.get_submodule(module_fqn)
    except AttributeError as error:
        raise PlanError(
            f"the plan names {module_fqn!r}, which {type(model).__name__} does not have: it was made for another model"
        ) from error


class ForwardOverride(MethodOverride):
    """Stands in for one module's forward.

    NOTE [around compiled code]: where a module is compiled in place (`module.compile()`), it stands around the compiled
    call. Inside, the compiler would trace it, and what must happen at every call would happen once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.method = private.COMPILED_CALL if private.is_compiled_in_place(module) else "forward"
        super().__init__(module)

    @staticmethod
    def top_of(module: nn.Module) -> Any:
        """What stands in for this module's forward now, whoever put it there; None: nothing."""
        return vars(module).get(private.COMPILED_CALL) or vars(module).get("forward")


@contextlib.contextmanager
def transforms_refused(module_fqn: str) -> Iterator[None]:
    """Inside, a treated layer computes. Say which one it is if it uses `torch.func`, whose transforms refuse to run
    where what is saved for backward goes through hooks."""
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise MemScaleError(
            f"{module_fqn} uses a transform of torch.func (grad, jacrev, vjp and the like) in its forward, which "
            "cannot run where activations are computed again or wait elsewhere: leave this layer out of the plan"
        ) from error


class Surrounding(Protocol):
    """Is told of each forward of a module; what it does then calls nothing of this file."""

    def begin(self, module: nn.Module) -> None:
        """A forward begins."""

    def end(self, output: Any) -> None:
        """It has ended, with this output; or has failed: then that is None."""


class SurroundedForward(ForwardOverride):
    """A forward that is left as it is. Somebody is told when it begins and when it ends, whatever ends it."""

    def __init__(self, module: nn.Module, surrounding: Surrounding) -> None:
        super().__init__(module)
        self._surrounding = surrounding

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._surrounding.begin(self.module)
        output = None
        try:
            output = self.inner()(*args, **kwargs)
        finally:
            self._surrounding.end(output)
        return output


def _refuse(name: str) -> None:
    raise MemScaleError(
        f"{name} runs inside a function or module that torch.compile has compiled, and was wrapped by MemScale: the "
        "compiler would trace through what must run at every step (planning, recomputing, moving tensors). Compile the "
        "blocks instead, before the model is wrapped: `for block in model.blocks: block.compile()`, then "
        "`memscale.wrap(model)`, and leave what is around them uncompiled."
    )


refuse_compiler = private.never_compiled(_refuse)
"""Is called by what the compiler traces: it breaks the graph there and runs this for real, which raises."""


def is_redirected(module: nn.Module) -> bool:
    """Whether a call of this module runs another of its methods: Lightning sends `training_step` through the forward of
    the module that DDP holds, and puts a function of its own in the place of that forward for the moment."""
    return "_ForwardRedirection" in getattr(vars(module).get("forward"), "__qualname__", "")


def _restore(module: nn.Module, name: str, value: Any) -> None:
    if value is None:
        del vars(module)[name]
    else:
        vars(module)[name] = value


class _CleanCopies:
    """Answers for a module that carries anything of ours when it is to be copied.

    NOTE [clean copies]: `copy.deepcopy`, `copy.copy`, `pickle` and `torch.save` ask an object for `__getstate__`, and
    for `__deepcopy__` and `__reduce_ex__` if its class has its own; all are looked up on the instance. Ours ask the
    class in the name of a double: another instance of the class that has the module's attributes without ours. So
    copies are plain, working models, and the module itself is only read: a thread that trains it sees no change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.users = 0
        kind = type(module)
        self.answers: dict[str, Callable[..., Any]] = {"__getstate__": self._getstate}
        if hasattr(kind, "__deepcopy__"):
            self.answers["__deepcopy__"] = self._deepcopy
        if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
            self.answers["__reduce_ex__"] = self._reduce_ex

    def _getstate(self) -> Any:
        with _laid_to_rest(self._double()) as double:
            own: Any = getattr(type(double), "__getstate__", None)
            if own is not None:
                return own(double)
            return object.__reduce_ex__(double, 4)[2]  # Python 3.10, whose objects have no such method

    def _deepcopy(self, memo: dict[Any, Any]) -> Any:
        """A class notes its copy under the id of what it copies, so that cycles end: there is one double for a memo.

        The memo holds the double, because the ids of objects that are gone come back.
        """
        begun = memo.get(self)
        if begun is not None and id(begun) in memo:
            return memo[id(begun)]
        memo[self] = self._double()
        with _laid_to_rest(memo[self]) as double:
            return type(double).__deepcopy__(double, memo)  # type: ignore[attr-defined]

    def _reduce_ex(self, protocol: Any) -> Any:
        with _laid_to_rest(self._double()) as double:
            return type(double).__reduce_ex__(double, protocol)

    def _double(self) -> nn.Module:
        module = self._module()
        assert module is not None
        double: nn.Module = object.__new__(type(module))
        for name in _slots_of(type(module)):
            if hasattr(module, name):
                object.__setattr__(double, name, getattr(module, name))
        object.__setattr__(double, "__dict__", self._plain_dict(module))
        return double

    def _plain_dict(self, module: nn.Module) -> dict[str, Any]:
        plain = vars(module).copy()  # at once: a forward in another thread may set attributes
        for name in (*self.answers, EXECUTOR_ATTRIBUTE):
            plain.pop(name, None)
        _drop_overrides(plain)
        _drop_hooks(plain)
        return plain


@contextlib.contextmanager
def _laid_to_rest(double: nn.Module) -> Iterator[nn.Module]:
    """The double shares what the module holds (files, connections), which a `__del__` of its class may close."""
    try:
        yield double
    finally:
        if hasattr(double, "__del__"):
            object.__setattr__(double, "__class__", nn.Module)


def _slots_of(kind: type) -> list[str]:
    """Attributes that instances keep beside their dict."""
    declared = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _drop_overrides(state: dict[str, Any]) -> None:
    for name, value in [*state.items()]:
        if isinstance(value, MethodOverride):
            while isinstance(value, MethodOverride):
                value = value._replaced
            state[name] = value
            if value is None:
                del state[name]


def _drop_hooks(state: dict[str, Any]) -> None:
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        ours = {key for key, hook in list(state[name].items()) if isinstance(hook, OwnHook)}
        if not ours:
            continue
        for related in [key for key in state if key.startswith(name)] + ["_forward_hooks_always_called"]:
            table = state[related]
            state[related] = type(table)((key, value) for key, value in list(table.items()) if key not in ours)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes without anything of ours, for a copy that is made by hand."""
    keeper = getattr(vars(module).get("__getstate__"), "__self__", None)
    return keeper._plain_dict(module) if isinstance(keeper, _CleanCopies) else vars(module).copy()


def keep_copies_clean(module: nn.Module, undo: contextlib.ExitStack) -> None:
    """Make copies of this module plain, as long as anyone of ours is on it."""
    keeper = getattr(vars(module).get("__getstate__"), "__self__", None)
    if not isinstance(keeper, _CleanCopies):
        keeper = _CleanCopies(module)
        vars(module).update(keeper.answers)
    keeper.users += 1
    undo.callback(_release, weakref.ref(module), keeper)


def _release(module_ref: weakref.ref[nn.Module], keeper: _CleanCopies) -> None:
    keeper.users -= 1
    module = module_ref()
    if keeper.users == 0 and module is not None:
        for name, answer in keeper.answers.items():
            if vars(module).get(name) == answer:
                del vars(module)[name]
