"""Says when a PyTorch release changes what we rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import checkpoint as checkpoint_internals
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import simgpu  # noqa: F401  (registers the device)
from memscale._torch import private


def test_storage_key_is_one_for_all_views() -> None:
    tensor, other = torch.randn(4, 4), torch.randn(4)
    views = (tensor, tensor[1:], tensor.t(), tensor.detach())
    assert len({private.storage_key(view.untyped_storage()) for view in views}) == 1
    assert private.storage_key(other.untyped_storage()) != private.storage_key(tensor.untyped_storage())


def test_fake_tensors_have_no_memory_and_run_a_training_step() -> None:
    mode = private.fake_tensor_mode()
    with mode:
        weight = nn.Parameter(torch.empty(1 << 20, 1 << 20))
        (weight[0, :8] * 2).sum().backward()
    assert private.is_fake(weight)
    assert private.is_fake(weight.grad)
    assert private.device_type_of(weight) == "cpu"
    assert not private.is_fake(torch.ones(1))
    assert private.device_type_of(torch.ones(1, device="meta")) == "meta"


def test_fake_tensors_say_where_a_value_decides() -> None:
    with private.fake_tensor_mode():
        numbers = torch.empty(4)
        assert type(numbers) is private.fake_tensor_class()
        for question in (numbers.nonzero, numbers.sum().item):
            with pytest.raises(private.data_dependent_errors()):
                question()


def test_questions_where_a_fake_tensor_is_reach_modes_as_an_operator() -> None:
    class Listens(TorchDispatchMode):
        heard: list[torch.device]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if private.is_device_question(func):
                self.heard.append(private.device_answer(args[0]))
            return func(*args, **(kwargs or {}))

    mode = Listens()
    mode.heard = []
    with private.fake_tensor_mode():
        weight = nn.Parameter(torch.empty(3))
        with mode:
            (weight * 2).sum().backward()
    assert set(mode.heard) == {torch.device("cpu")}


def test_flop_formulas() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 5)
    formula = private.flop_formula(torch.ops.aten.mm.default)
    assert formula is not None
    assert formula(a, b, out_val=a @ b) == 2 * 2 * 3 * 5
    assert private.flop_formula(torch.ops.aten.relu.default) is None


def test_storages_keep_their_python_object_alive_while_they_live() -> None:
    """`LiveBytes` hangs a weak reference on the storage's Python object; it must die with the storage, not before."""
    import weakref

    tensor = torch.ones(3)
    reference = weakref.ref(tensor.untyped_storage())
    view = tensor[1:]
    del tensor
    assert reference() is not None
    del view
    assert reference() is None


def test_foreach_devices() -> None:
    assert "cuda" in private.foreach_device_types()
    assert "cpu" not in private.foreach_device_types()


def test_nodes_are_numbered_as_they_are_made() -> None:
    weight = nn.Parameter(torch.ones(2))
    before = weight * 2
    first = private.next_sequence_number()
    after = before * 2
    assert private.sequence_number(before.grad_fn) < first <= private.sequence_number(after.grad_fn)


def test_hooks_of_every_module_are_seen() -> None:
    register = nn.modules.module.register_module_forward_pre_hook
    handle = register(lambda module, args: None)
    kinds = [kind for kind, hooks in private.global_module_hooks() if hooks]
    handle.remove()
    assert kinds == ["forward"]
    assert not any(hooks for _, hooks in private.global_module_hooks())


def test_hooks_of_every_optimizer_are_seen() -> None:
    register = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    handles = [each(lambda optimizer, args, kwargs: None) for each in register]
    assert [handle.id in hooks for handle, hooks in zip(handles, private.global_step_hooks(), strict=True)] == [
        True,
        True,
    ]
    for handle in handles:
        handle.remove()


def test_version_counters_are_shared_by_views_and_not_by_unsafe_chunks_or_data() -> None:
    tensor = torch.zeros(4, 4)
    first, second = tensor.unsafe_chunk(2)
    for one, other, is_shared in (
        (tensor, tensor[1:], True),
        (tensor, tensor.detach(), True),
        (first, second, False),
        (tensor, tensor.data, False),
    ):
        assert private.share_version_counter(one, other) is is_shared
        assert one._version == other._version == 0


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_an_outermost_mode_lets_others_come_and_go() -> None:
    ours, first, second = _Counts(), _Counts(), _Counts()
    with first:
        assert private.can_take_outermost_mode()
        private.insert_outermost_mode(ours)
        torch.ones(1)
    assert (ours.count, first.count) == (1, 1)
    with second:
        torch.ones(1)
        assert private.remove_mode(ours)
        assert not private.remove_mode(ours)
        torch.ones(1)
    torch.ones(1)
    assert (ours.count, first.count, second.count) == (2, 1, 2)


def test_fake_tensor_modes_have_a_fixed_place() -> None:
    with private.fake_tensor_mode():
        assert not private.can_take_outermost_mode()


def test_errors_that_ask_for_values_are_told_from_errors_about_inputs() -> None:
    mode = private.fake_tensor_mode()
    errors: list[Exception] = []
    for function in (
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x @ torch.ones(7, 7),
        lambda x: x.no_such_name,
    ):
        with mode:
            try:
                function(torch.ones(3, 3))
            except Exception as error:
                errors.append(error)
    assert [private.asks_for_values(error) for error in errors] == [True, True, False, False]


def test_optimizers_that_choose_their_implementation_by_device() -> None:
    class Mine(torch.optim.RMSprop):
        """A subclass still asks PyTorch."""

    class Foreign(torch.optim.Optimizer):
        """Has an option of the same name and a rule of its own."""

    def chooses(kind: Any, **options: Any) -> bool:
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = kind([{"params": [weight], **options}], **({"defaults": {}} if kind is Foreign else {}))
        return private.chooses_by_device(optimizer, optimizer.param_groups[0])

    names = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
    assert all(chooses(getattr(torch.optim, name)) for name in names)
    assert chooses(Mine)
    assert not chooses(Foreign, foreach=None)
    assert not chooses(torch.optim.AdamW, foreach=True)
    assert not chooses(torch.optim.AdamW, foreach=False)
    assert not chooses(torch.optim.AdamW, fused=True)
    assert not chooses(torch.optim.AdamW, fused=False), "then it takes the loop on any device"
    assert not chooses(torch.optim.AdamW, lr=torch.tensor(0.1))
    assert chooses(torch.optim.AdamW, lr=torch.tensor(0.1), capturable=True)
    assert chooses(torch.optim.SGD, lr=torch.tensor(0.1))


def test_what_pytorch_chooses_for_parameters_on_the_host() -> None:
    assert not private.is_foreach_by_default([nn.Parameter(torch.ones(2))], differentiable=False)
    assert private.is_foreach_by_default([], differentiable=False)
    assert not private.is_foreach_by_default([], differentiable=True)


def test_backward_passes_can_be_watched():
    seen = []

    def run(backward: Callable[[], Any]) -> Any:
        seen.append(private.graph_task_id())
        return backward()

    engine = torch.autograd.Variable._execution_engine
    restore = private.replace_engine(run)
    try:
        x = torch.ones(2, requires_grad=True)
        (gradient,) = torch.autograd.grad((x * 2).sum(), x)
        (x * 3).sum().backward()
    finally:
        restore()
    assert seen == [-1, -1]
    assert torch.equal(gradient, torch.full((2,), 2.0))
    assert torch.equal(x.grad, torch.full((2,), 3.0))
    assert torch.autograd.Variable._execution_engine is engine


def test_checkpoints_can_be_seen_through():
    inside, refused = [False], []
    restore = private.see_through_checkpoints(lambda: inside[0], refused.append)
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(inside[0])
        return x.sin()

    try:
        for inside[0] in (False, True):
            x = torch.ones(2, requires_grad=True)
            checkpoint(function, x, use_reentrant=False).sum().backward()
            assert torch.equal(x.grad, torch.ones(2).cos())
        assert calls == [False, False, True]  # outside it is computed again
        checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=True)
        assert refused == ["use_reentrant=True"]
    finally:
        restore()
    assert "apply" not in vars(checkpoint_internals.CheckpointFunction)


def test_bytes_of_the_allocator_are_those_that_the_public_functions_show() -> None:
    held = torch.ones(1000, device="simgpu")
    index = torch.accelerator.current_device_index()
    counted = private.allocator_bytes(index)
    assert counted == (torch.accelerator.memory_allocated(index), torch.accelerator.max_memory_allocated(index))
    del held


def test_ddp_looks_for_nodes_of_outputs_in_one_method():
    kind, name = private.ddp_looks_at_outputs()
    assert name in kind.forward.__code__.co_names
    assert "grad_fn" in getattr(kind, name).__code__.co_names


def test_a_storage_says_how_many_hold_it() -> None:
    tensor = torch.ones(4)
    alone = private.num_holders(tensor.untyped_storage())
    view = tensor[:2]
    assert private.num_holders(tensor.untyped_storage()) == alone + 1
    del view
    assert private.num_holders(tensor.untyped_storage()) == alone == private.NUM_HOLDERS_IN_DISPATCH


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


def test_allocator_settings_can_be_set_at_any_time() -> None:
    private.set_allocator_settings("expandable_segments:True,large_segment_size_mb:12")
    private.set_allocator_settings("expandable_segments:False,large_segment_size_mb:20")
    with pytest.raises(ValueError, match="large_segment_size_mb"):
        private.set_allocator_settings("large_segment_size_mb:10")


def _shown(result: Any, given: tuple[torch.Tensor, ...]) -> Any:
    """What a rehearsal sees of a result: shapes, and whose memory it lies in."""
    if isinstance(result, tuple | list):
        return [_shown(one, given) for one in result]
    keys = [private.storage_key(tensor.untyped_storage()) for tensor in given]
    key, storage = private.storage_key(result.untyped_storage()), result.untyped_storage()
    place = keys.index(key) if key in keys else storage.nbytes()
    same = [index for index, tensor in enumerate(given) if tensor is result]
    return tuple(result.shape), result.stride(), result.storage_offset(), result.dtype, str(result.device), place, same


@pytest.mark.parametrize(
    "operator",
    [
        lambda x, y: x + y,
        lambda x, y: x.t() @ y,
        lambda x, y: x.add_(y),
        lambda x, y: x[1:, ::2],
        lambda x, y: x.expand(3, *x.shape),
        lambda x, y: x.split(2),
        lambda x, y: x.contiguous(),
        lambda x, y: x.t().contiguous(),
        lambda x, y: torch.native_dropout(x, 0.5, True),
        lambda x, y: torch.native_layer_norm(x, [6], None, None, 1e-5),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.to(torch.float16),
        lambda x, y: x.max(dim=0),
        lambda x, y: torch.zeros_like(x.t()),
        lambda x, y: x.new_empty(0),
        lambda x, y: torch.conj(x.to(torch.complex64)),
    ],
)
def test_what_is_remembered_of_operators_is_what_pytorch_says(operator: Callable[..., Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    shown = []
    for mode, device in ((FakeTensorMode(), "cpu"), *[(private.fake_tensor_mode(), "cpu")] * 2):
        with mode:
            given = (torch.empty(4, 6, device=device), torch.empty(4, 6, device=device))
            shown += [_shown(operator(*given), given) for _ in range(2)]
    assert all(one == shown[0] for one in shown)


def test_another_dtype_device_or_layout_is_not_taken_for_what_is_remembered() -> None:
    with private.fake_tensor_mode():
        for dtype in (torch.float32, torch.float64):
            for device in ("cpu", "meta"):
                for tensor in (torch.empty(4, 6), torch.empty(6, 4).t()):
                    result = tensor.to(device, dtype) * 2
                    assert (result.dtype, result.device.type) == (dtype, device)
                    assert result.stride() == tensor.stride()


def test_a_default_dtype_counts_for_what_is_remembered() -> None:
    with private.fake_tensor_mode():
        numbers = torch.ones(3, dtype=torch.long)
        assert (numbers / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (numbers / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
