"""Overrides come off in any order, and copies of a wrapped model are plain models."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import itertools
import pickle
import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import memscale
from memscale import PlanError
from memscale._execute.executor import execute
from memscale._plan import Checkpoint
from memscale._torch.overrides import EXECUTOR_ATTRIBUTE, ForwardOverride, OwnHook, SurroundedForward, find_module
from tests.models import Case, Chain, Mlp, MlpBlock, Parallel, ResNet, TwoLinears, case, odd, square_loss
from tests.parity import assert_same, checkpoint_all, plan_of, seed, train

QUIET = memscale.Config(force_optimize=True, enable_logging=False)


class PassThrough(ForwardOverride):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner()(*args, **kwargs)


class OwnState(TwoLinears):
    """Pickles as it likes: a tuple, without one of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = [1]

    def __getstate__(self) -> Any:
        state = dict(self.__dict__)
        state.pop("scratch")
        return ("version 2", state)

    def __setstate__(self, state: Any) -> None:
        assert state[0] == "version 2"
        self.__dict__.update(state[1], scratch=[])


class OwnDeepcopy(TwoLinears):
    """Copies its dict by hand, as parametrized modules do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDeepcopy:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


class OwnReduce(TwoLinears):
    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type, state: dict[str, Any]) -> Any:
    rebuilt = kind.__new__(kind)
    rebuilt.__dict__.update(state)
    return rebuilt


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": by_pickle, "torch.save": by_torch_save}
by_way = pytest.mark.parametrize("way", COPIES)


def assert_plain(model: nn.Module) -> None:
    for module in model.modules():
        assert not isinstance(vars(module).get("forward"), ForwardOverride)
        assert not {EXECUTOR_ATTRIBUTE, "__getstate__", "__deepcopy__", "__reduce_ex__"} & set(vars(module))
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            assert not any(isinstance(hook, OwnHook) for hook in vars(module)[name].values())
        assert not module._forward_pre_hooks_with_kwargs or module._forward_pre_hooks


# ---- copies


@by_way
@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2", "lora llama", "nested"])
def test_copies_are_plain_and_train_the_same(name: str, way: str) -> None:
    entry = case(name)
    seed(1)
    model = entry.build()
    twin = copy.deepcopy(model)
    executor = checkpoint_all(model)
    copied = COPIES[way](model)
    assert_plain(copied)
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
    assert model._memscale_executor is executor, "the original stays wrapped"
    assert_same(train(copied, entry), train(twin, entry))


@by_way
@pytest.mark.parametrize("block", [OwnState, OwnDeepcopy, OwnReduce])
def test_modules_that_copy_themselves(block: Any, way: str) -> None:
    entry = Case("own", lambda: Chain(*(block() for _ in range(2))), odd("keywords only").batch, square_loss)
    seed(1)
    model = entry.build()
    expected = COPIES[way](model)
    checkpoint_all(model)
    copied = COPIES[way](model)
    assert_plain(copied)
    assert [set(vars(m)) for m in copied.modules()] == [set(vars(m)) for m in expected.modules()]
    assert_same(train(copied, entry), train(expected, entry))


class Pausing:
    """A part of a module whose copy waits until something else has happened."""

    def __init__(self, is_reached: threading.Event, may_go_on: threading.Event) -> None:
        self.is_reached, self.may_go_on = is_reached, may_go_on

    def __deepcopy__(self, memo: Any) -> None:
        self.is_reached.set()
        assert self.may_go_on.wait(60)

    def __reduce__(self) -> Any:
        self.__deepcopy__({})
        return type(None), ()


class Remembering(TwoLinears):
    """Its forward sets attributes, old and new ones, and it copies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.part: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        setattr(self, f"seen_{self.num_calls}", tuple(x.shape))
        return super().forward(x)

    def __getstate__(self) -> Any:
        return {name: copy.deepcopy(value) if name == "part" else value for name, value in vars(self).items()}

    def __deepcopy__(self, memo: Any) -> Any:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin


@by_way
def test_a_thread_may_train_while_another_one_copies(way: str) -> None:
    """The module that is being copied keeps its overrides, and what its forward sets meanwhile is not lost."""
    model = Chain(*(Remembering() for _ in range(2)))
    block: Any = model.blocks[0]
    is_reached, may_go_on = threading.Event(), threading.Event()
    block.part = Pausing(is_reached, may_go_on)
    checkpoint_all(model)
    override, copies = vars(block)["forward"], []
    thread = threading.Thread(target=lambda: copies.append(COPIES[way](model)))
    thread.start()
    try:
        assert is_reached.wait(60)
        seen = vars(block).get("forward")
        square_loss(model(torch.randn(2, 16))).backward()
    finally:
        may_go_on.set()
        thread.join()
    assert isinstance(override, ForwardOverride)
    assert seen is override
    assert vars(block)["forward"] is override
    assert block.num_calls == 1
    assert block.seen_1 == (2, 16)
    assert_plain(copies[0])
    assert copies[0].blocks[0].num_calls == 0, "the copy is of the moment in which it began"


class Circular(Remembering):
    def __init__(self) -> None:
        super().__init__()
        self.part = [self]


def test_a_module_that_copies_itself_may_hold_itself() -> None:
    model = Chain(*(Circular() for _ in range(2)))
    checkpoint_all(model)
    copied = copy.deepcopy(model)
    assert_plain(copied)
    block: Any = copied.blocks[0]
    assert block.part[0] is block
    assert block is not model.blocks[0]


class Slotted(OwnDeepcopy):
    __slots__ = ("beside",)

    def __deepcopy__(self, memo: Any) -> Any:
        twin = super().__deepcopy__(memo)
        twin.beside = self.beside
        return twin


def test_what_a_module_keeps_in_slots_is_copied() -> None:
    model = Chain(*(Slotted() for _ in range(2)))
    for block in model.blocks:
        object.__setattr__(block, "beside", 7)
    checkpoint_all(model)
    assert copy.deepcopy(model).blocks[0].beside == 7


class Closing(OwnState):
    closed: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.closed.append(id(self))


@by_way
def test_copying_closes_nothing_that_the_module_holds(way: str) -> None:
    Closing.closed.clear()
    model = Chain(*(Closing() for _ in range(2)))
    checkpoint_all(model)
    copied = COPIES[way](model)
    gc.collect()
    assert not Closing.closed
    del copied


@pytest.mark.parametrize("name", ["spectral norm by parametrization", "weight norm", "orthogonal"])
def test_deepcopy_of_parametrized_blocks(name: str) -> None:
    """Such a layer has a class of its own, with its own `__deepcopy__`; here it is the block itself."""
    make = {
        "spectral norm by parametrization": nn.utils.parametrizations.spectral_norm,
        "weight norm": nn.utils.parametrizations.weight_norm,
        "orthogonal": nn.utils.parametrizations.orthogonal,
    }[name]
    entry = Case(
        name, lambda: Chain(*(make(nn.Linear(16, 16)) for _ in range(2))), odd("weight norm").batch, square_loss
    )
    seed(1)
    model = entry.build()
    twin = copy.deepcopy(model)
    checkpoint_all(model)
    copied = copy.deepcopy(model)
    assert_plain(copied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(train(copied, entry), train(twin, entry))


def test_symbolically_traced_models_copy_cleanly() -> None:
    entry = odd("parallel wrapper")
    seed(1)
    inner = torch.fx.symbolic_trace(Chain(*(TwoLinears() for _ in range(2))))
    twin = copy.deepcopy(inner)
    memscale.wrap(inner, QUIET, sample_input=entry.batch(0)["x"])
    copied = copy.deepcopy(inner)
    assert_plain(copied)
    assert_same(train(copied, entry), train(twin, entry))


def test_deepcopy_of_a_part() -> None:
    model: Any = Mlp()
    checkpoint_all(model)
    part = copy.deepcopy(model.blocks[1])
    assert_plain(part)
    assert torch.equal(part.up.weight, model.blocks[1].up.weight)
    assert square_loss(part(torch.randn(3, 64))).requires_grad


def test_shallow_copies_are_plain() -> None:
    model = Mlp()
    checkpoint_all(model)
    assert_plain_top(copy.copy(model))
    assert_plain_top(copy.copy(model.blocks[0]))


def assert_plain_top(module: nn.Module) -> None:
    assert not {EXECUTOR_ATTRIBUTE, "forward", "__getstate__"} & set(vars(module))


def test_copies_keep_the_users_own_override_and_hooks() -> None:
    model: Any = Mlp()
    seen: list[int] = []
    model.blocks[0].register_forward_hook(_Note(seen))
    model.blocks[0].forward = _Doubling(model.blocks[0])
    memscale.wrap(model, QUIET, sample_input=torch.randn(4, 64))
    copied: Any = copy.deepcopy(model)
    assert isinstance(copied.blocks[0].forward, _Doubling)
    assert len(copied.blocks[0]._forward_hooks) == 1


class _Note:
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.seen.append(1)


class _Doubling:
    def __init__(self, module: nn.Module) -> None:
        self.module_type = type(module)
        self.modules = [module]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.module_type.forward(self.modules[0], x)


# ---- names and identity


def test_names_parameters_and_signatures_are_untouched() -> None:
    model: Any = case("gpt2").build()
    before = (list(model.state_dict()), [(n, id(p)) for n, p in model.named_parameters()], list(model.named_modules()))
    signature = inspect.signature(model.transformer.h[0].forward)
    kinds = [type(module) for module in model.modules()]
    checkpoint_all(model)
    assert before == (
        list(model.state_dict()),
        [(n, id(p)) for n, p in model.named_parameters()],
        list(model.named_modules()),
    )
    assert inspect.signature(model.transformer.h[0].forward) == signature
    assert [type(module) for module in model.modules()] == kinds
    model.load_state_dict(case("gpt2").build().state_dict())


# ---- taking off


def snapshot(model: nn.Module) -> list[Any]:
    """Every module's class and dict, and what is in its tables, by identity."""
    return [
        (type(module), {name: (id(value), _contents(value)) for name, value in vars(module).items()})
        for module in model.modules()
    ]


def _contents(value: Any) -> Any:
    return [(key, id(item)) for key, item in value.items()] if isinstance(value, dict) else None


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2", "t5", "albert", "lora llama"])
@pytest.mark.parametrize("steps", [0, 2])
def test_detach_restores_everything_exactly(name: str, steps: int) -> None:
    entry = case(name)
    model = entry.build()
    before = snapshot(model)
    checkpoint_all(model)
    assert snapshot(model) != before
    if steps:
        train(model, entry, steps=steps)
    memscale.detach(model)
    assert [kind for kind, _ in snapshot(model)] == [kind for kind, _ in before]
    assert snapshot(model) == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_detach_in_any_order(order: tuple[int, ...]) -> None:
    inner: Any = Chain(TwoLinears(), TwoLinears())
    model = Parallel(Parallel(inner))
    before = snapshot(model)
    executors = [checkpoint_all(each) for each in (inner, model.module, model)]
    chain = vars(inner.blocks[0])["forward"]
    assert chain._replaced._replaced._replaced is None
    x = torch.randn(4, 16)
    expected = copy.deepcopy(model)(x)
    for index in order:
        executors[index].detach()
        assert torch.equal(model(x), expected)
    assert snapshot(model) == before


def test_an_override_buried_under_a_strangers_passes_through() -> None:
    model: Any = Mlp(depth=1)
    block, x = model.blocks[0], torch.randn(2, 64)
    with contextlib.ExitStack() as undo:
        PassThrough(block).attach(undo)
        ours = vars(block)["forward"]
        block.forward = lambda x: ours(x) * 2
        stranger = block.forward
    assert block.forward is stranger, "what is no longer ours is not restored"
    torch.manual_seed(3)
    result = block(x)
    del block.forward
    torch.manual_seed(3)
    assert torch.equal(result, block(x) * 2)
    assert not ours.active


def test_pass_through_and_signature() -> None:
    block = MlpBlock(8)
    with contextlib.ExitStack() as undo:
        override = PassThrough(block)
        override.attach(undo)
        assert inspect.signature(block.forward) == inspect.signature(MlpBlock(8).forward)
    assert "forward" not in vars(block)


@pytest.mark.parametrize("build", [Mlp, ResNet, lambda: odd("buffers replaced").build()])
def test_a_wrapped_model_dies_with_its_last_reference(build: Any) -> None:
    """No cycle through us: freed at once, not when the garbage collector happens to run."""
    model = build()
    batch = (
        torch.randn(4, 3, 8, 8) if isinstance(model, ResNet) else torch.randn(4, 64 if isinstance(model, Mlp) else 16)
    )
    checkpoint_all(model)
    square_loss(model(batch)).backward()
    reference = weakref.ref(model)
    block = weakref.ref(next(m for m in model.modules() if isinstance(vars(m).get("forward"), ForwardOverride)))
    gc.collect()
    gc.disable()
    try:
        del model
        assert reference() is None
        assert block() is None
    finally:
        gc.enable()


def test_an_executor_whose_model_is_gone_says_so() -> None:
    model = Mlp()
    executor = execute(model, plan_of([Checkpoint("blocks.0")]))
    del model
    gc.collect()
    with pytest.raises(ReferenceError, match="gone"):
        _ = executor.model
    executor.detach()


def test_find_module() -> None:
    model = Mlp()
    assert find_module(model, "blocks.2.up") is model.blocks[2].up
    assert find_module(model, "") is model
    for name in ("blocks.9", "nothing", "blocks.2.up.weight"):
        with pytest.raises(PlanError, match=name):
            find_module(model, name)


class Told:
    """Notes what it is told of forwards."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def begin(self, module: nn.Module) -> None:
        self.heard.append(module)

    def end(self, output: Any) -> None:
        self.heard.append(output)


def test_who_surrounds_a_forward_is_told_of_its_beginning_and_of_its_end_whatever_ends_it() -> None:
    model, told, x = nn.Linear(2, 2), Told(), torch.ones(1, 2)
    with contextlib.ExitStack() as undo:
        SurroundedForward(model, told).attach(undo)
        output = model(x)
        assert told.heard[0] is model
        assert told.heard[1] is output
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 3))
        assert told.heard[2:] == [model, None]
    model(x)
    assert len(told.heard) == 4
    assert "forward" not in vars(model)
