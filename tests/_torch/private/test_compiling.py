"""Says when a PyTorch release changes what `_torch/private/compiling.py` relies on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memscale._torch import private


def test_what_is_compiled_is_recognised() -> None:
    def module() -> nn.Module:
        return nn.Linear(2, 2)

    replaced, in_place = module(), module()
    replaced.forward = torch.compile(replaced.forward, backend="eager")  # type: ignore[method-assign]
    in_place.compile(backend="eager")
    around = torch.compile(module(), backend="eager")
    assert not private.is_compiled(module())
    assert [private.is_compiled(one) for one in (replaced, in_place, around)] == [True] * 3
    assert [private.is_compiled_in_place(one) for one in (replaced, in_place, around)] == [False, True, False]
    assert [private.is_compiled_module(one) for one in (replaced, in_place, around)] == [False, False, True]
    private.uncompile_forward(replaced)
    assert not private.is_compiled(replaced)
    assert replaced(torch.zeros(1, 2)).shape == (1, 2)


def test_compiled_code_runs_as_written_where_nobody_compiles() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend)
    with private.never_while_compiled():
        function(torch.ones(1))
    assert not graphs
    function(torch.ones(1))
    assert len(graphs) == 1
    torch.compiler.reset()


def test_the_compiler_is_back_when_the_last_thread_is_done() -> None:
    """Whoever began first may end first."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x + 3, backend=backend)
    first, second = private.never_while_compiled(), private.never_while_compiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    function(torch.ones(1))
    assert not graphs
    second.__exit__(None, None, None)
    function(torch.ones(1))
    assert len(graphs) == 1
    torch.compiler.reset()


def test_what_is_never_compiled_runs_as_written() -> None:
    graphs: list[Any] = []
    calls: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @private.never_compiled
    def written(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x.sin()

    function = torch.compile(lambda x: written(x + 1) * 2, backend=backend)
    for _ in range(2):
        function(torch.ones(1))
    assert calls == [False, False]
    assert len(graphs) == 2, "one before the break, and one after it"
    torch.compiler.reset()


def test_a_module_compiled_in_place_keeps_its_call_under_this_name() -> None:
    module = nn.Linear(2, 2)
    assert getattr(module, private.COMPILED_CALL) is None
    module.compile(backend="eager")
    assert callable(vars(module)[private.COMPILED_CALL])


def test_a_mode_without_the_compiler_is_asked_directly() -> None:
    class Direct(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    assert hasattr(Direct.__torch_dispatch__, "__wrapped__"), "PyTorch keeps the compiler out by functions around it"
    assert private.without_compiler(Direct) is Direct
    assert not hasattr(Direct.__torch_dispatch__, "__wrapped__")
    with Direct() as mode:
        torch.ones(1)
    assert mode.count == 1
