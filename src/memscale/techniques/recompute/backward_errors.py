"""An error leaves `backward()` only when autograd's threads are done with that backward pass.

Each device has a thread of autograd's own, which computes what belongs to that device; the thread that called
`backward()` computes what belongs to the CPU. When one of them raises (a user's hook, Ctrl-C), PyTorch hands the error
to the caller at once, while another is still in the middle of a node. If that node recomputes a layer, the caller finds
a model that shows copies in the place of its parameters and random states that are set back behind its back.

So while anything of ours recomputes, the engine is one that waits before it passes an error on. A device's thread takes
up one node after another, and none of a failed pass, so it is enough to send an empty graph through it: when that comes
back, what the thread was doing is over.

NOTE [a pass within a pass]: a node may run a backward pass itself (reentrant checkpointing does), and the thread then
serves its queue in the middle of that node. The empty graph says nothing in that case, so it is sent again until no
such pass was under way meanwhile.

Known limit: who calls `backward()` inside a node and catches its error there does not wait for other devices.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.overrides import undo_with

logger = logging.getLogger("memscale")


class Owner(Protocol):
    """Who has something done in backward that nobody may see half-done."""

    def devices(self) -> Iterable[torch.device]:
        """Where it computes."""
        ...


class Rescuer(Protocol):
    """Who may be able to do what is left of a backward pass that ran out of memory."""

    def begin(self) -> None:
        """A pass begins."""
        ...

    def end(self) -> None:
        """Called when it has ended well."""
        ...

    def rescue(self, call: BackwardCall, error: torch.OutOfMemoryError) -> bool:
        """The pass ran out of memory, and autograd's threads are done with it. True: what was left of it is done.

        May raise an error that says more. Nobody holds what the pass was doing but its graph.
        """
        ...


class BackwardCall(NamedTuple):
    """What a pass was asked for."""

    roots: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]
    is_simple: bool
    """Gradients are added to those of all leaves, once, and the graph is not needed again."""
    had_inner_passes: bool = False
    """A node may have run a pass itself, which adds to gradients before all of what belongs to them has come."""

    @classmethod
    def of(cls, backward: Callable[[], Any], *, had_inner_passes: bool) -> BackwardCall:
        roots, gradients, keeps, creates, inputs = cast(Any, backward).args[:5]
        options = cast(Any, backward).keywords
        is_simple = not keeps and not creates and not inputs and options.get("accumulate_grad", False)
        return cls(tuple(roots), tuple(gradients), bool(is_simple), had_inner_passes)


class _InnerPasses:
    """Backward passes that were started by a node of another one. See NOTE [a pass within a pass]."""

    def __init__(self) -> None:
        self.num_started = 0
        self._num_running = 0
        self._changed = threading.Condition()

    def enter(self) -> None:
        with self._changed:
            self.num_started += 1
            self._num_running += 1

    def leave(self) -> None:
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def wait(self) -> int:
        """Block until none is running; returns how many there have been so far."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_running == 0)
            return self.num_started


class _Guard:
    """Puts the waiting engine in the place of PyTorch's for as long as anybody needs it."""

    def __init__(self) -> None:
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_users = 0
        self._inner = _InnerPasses()
        self._lock = threading.RLock()  # garbage may be collected in here, and with it a model of ours
        self._undo = contextlib.ExitStack()
        self._settling = threading.local()
        self._rescuers: weakref.WeakSet[Any] = weakref.WeakSet()

    def add_rescuer(self, rescuer: Rescuer) -> None:
        self._rescuers.add(rescuer)

    def enter(self, owner: Owner) -> None:
        with self._lock:
            self._owners.add(owner)
            self._num_users += 1
            if self._num_users == 1:
                self._undo.callback(private.replace_engine(_WaitingEngine(self)))

    def leave(self, owner_ref: weakref.ref[Any]) -> None:
        with self._lock:
            owner = owner_ref()
            if owner is not None:
                self._owners.discard(owner)
            self._num_users -= 1
            if self._num_users == 0:
                self._undo.close()

    def run(self, backward: Callable[[], Any]) -> Any:
        """One backward pass."""
        if getattr(self._settling, "is_on", False):
            return backward()
        if private.graph_task_id() >= 0:
            self._inner.enter()
            try:
                return backward()
            finally:
                self._inner.leave()
        rescuers: list[Rescuer] = [*self._rescuers]
        for rescuer in rescuers:
            rescuer.begin()
        num_inner = self._inner.num_started
        try:
            result = backward()
        except torch.OutOfMemoryError as error:
            self._settle()
            failure = error.with_traceback(None)  # its frames hold activations
        except BaseException:
            self._settle()
            raise
        else:
            for rescuer in rescuers:
                rescuer.end()
            return result
        call = BackwardCall.of(backward, had_inner_passes=self._inner.num_started > num_inner)
        del backward
        return self._rescued(call, rescuers, failure)

    def _rescued(self, call: BackwardCall, rescuers: list[Rescuer], failure: torch.OutOfMemoryError) -> Any:
        if not any(rescuer.rescue(call, failure) for rescuer in rescuers):
            raise failure
        return ()

    def _settle(self) -> None:
        """Wait for autograd's threads. An interrupt does not cut that short: it is raised when it is over."""
        interrupt: BaseException | None = None
        failure: Exception | None = None
        self._settling.is_on = True
        for _ in range(2):
            try:
                self._pass_through_threads()
                failure = None
                break
            except Exception as error:  # a device that is broken for good, or a signal handler that raises
                failure = error
            except BaseException as error:
                interrupt = error
        self._settling.is_on = False
        if failure is not None:
            logger.warning(
                "After an error in backward(), MemScale could not wait for autograd's threads (%s: %s): a layer may "
                "still be computed again.",
                type(failure).__name__,
                failure,
            )
        if interrupt is not None:
            raise interrupt

    def _pass_through_threads(self) -> None:
        """See NOTE [a pass within a pass]."""
        devices = {device for owner in [*self._owners] for device in owner.devices() if device.type != "cpu"}
        num_before = -1
        while num_before != self._inner.wait():
            num_before = self._inner.num_started
            for device in devices:
                _pass_through(device)


class _WaitingEngine(private.AutogradEngine):
    """Autograd's engine, with the guard around every backward pass that Python starts."""

    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self._guard = guard

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._guard.run(functools.partial(super().run_backward, *args, **kwargs))


def _pass_through(device: torch.device) -> None:
    """Send a graph through the device's thread that takes no memory and starts no kernel."""
    with torch.inference_mode(False), torch.enable_grad():
        start = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(start.view(0), start, torch.empty(0, device=device))


_GUARD = _Guard()


def rescue_with(rescuer: Rescuer, owner: Owner, module: nn.Module, undo: contextlib.ExitStack) -> None:
    """Ask this rescuer when a backward pass runs out of memory, until undone or until the module is gone."""
    _GUARD.add_rescuer(rescuer)
    wait_on_errors(owner, module, undo)


def wait_on_errors(owner: Owner, module: nn.Module, undo: contextlib.ExitStack) -> None:
    """Let errors wait for what the owner does in backward, until undone or until the module is gone."""
    _GUARD.enter(owner)
    undo_with(module, functools.partial(_GUARD.leave, weakref.ref(owner)), undo)
