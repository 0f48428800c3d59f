"""Nodes of autograd's graphs, and the backward passes that run them.

Relies on: sequence numbers and metadata of nodes, the id and the callbacks of the current graph task, and the engine
that `Variable` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memscale._torch.private.dispatch import without_torch_function


def node_of(tensor: torch.Tensor) -> Any:
    """What computed a tensor; None: nothing that autograd knows. Its class is not asked: lazy logits give up tiling for
    one who takes their node and may hook it (`techniques/tiling/head/functions.py`). So whoever asks here must not
    change a gradient."""
    with without_torch_function():
        return tensor.grad_fn


def is_hooked(node: Any) -> bool:
    """Whether somebody else has put a hook on a node of the graph. PyTorch does not say, but hands out the table of its
    hooks to whoever registers one."""
    for register in (node.register_hook, getattr(node, "register_prehook", None)):
        if register is None:
            continue
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref() or {}
        handle.remove()
        if not all(map(_is_known_hook, hooks.values())):
            return True
    return False


def _is_known_hook(hook: Any) -> bool:
    """Ours. PyTorch's own stand for hooks of modules, which may have been taken off since."""
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return bool(module.partition(".")[0] == "memscale")


def _nothing(*_: Any) -> None:
    pass


def is_own_node(node: Any) -> bool:
    """Whether a node of the graph is one of PyTorch's operators, and no custom function; DDP's sink passes for one."""
    from torch.nn.parallel.distributed import _DDPSink

    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return getattr(type(node), "_forward_cls", None) is _DDPSink
    return "CppNode" not in node.name()


def run_first(node: Any) -> None:
    """Let the autograd engine run this node as soon as it is ready, as it does with gradient accumulation."""
    node._set_sequence_nr(2**64 - 1)


def next_sequence_number() -> int:
    """What the next node of this thread's graph will be numbered with; those made before have lower numbers."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number(node: Any) -> int:
    """When a node was made, among those of its thread."""
    return int(node._sequence_nr())


def graph_task_id() -> int:
    """The backward pass that this thread works for; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def keeps_graph() -> bool:
    """Whether the backward pass that this thread works for leaves its graph for another one (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call this when the current backward pass is complete; if it fails, the callback is dropped uncalled."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def mark_node(node: Any, key: str, value: Any) -> None:
    """Leave something on a node of a graph, which lives as long as the node does."""
    node.metadata[key] = value


def mark_of(node: Any, key: str) -> Any:
    """What was left on a node; None: nothing."""
    return node.metadata.get(key)


class AutogradEngine(torch._C._ImperativeEngine):
    """Autograd's engine. Every backward pass that Python starts calls `run_backward` of the engine in use."""


def replace_engine(engine: AutogradEngine) -> Callable[[], None]:
    """Use this engine from now on. Returns what undoes that."""
    variable: Any = torch.autograd.Variable
    before, variable._execution_engine = variable._execution_engine, engine

    def restore() -> None:
        if variable._execution_engine is engine:
            variable._execution_engine = before

    return restore
