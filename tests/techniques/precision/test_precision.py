"""Mixed precision: the same as plain autocast, scaling that nobody sees, and bytes that moved."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import simgpu  # noqa: F401  before the first backward: autograd counts the devices then
from benchmarks.precision import LARGEST_BOUND, MEAN_BOUND, NUM_BOUNDED_STEPS, measure_distance
from benchmarks.real_step import RealRehearsal
from memscale._config import AsyncOffloadConfig
from memscale._errors import ConfigError, MemScaleError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Checkpoint, MixedPrecision, OffloadActivations, OffloadOptimizer, StreamParameters, TileHead
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.rehearsal import FakeRehearsal
from memscale._torch.live_bytes import LiveBytes
from memscale.techniques.checkpointing import checkpointed_forward as checkpointing
from memscale.techniques.precision import autocast as precision
from memscale.techniques.precision.loss_scale import LossScale
from tests.lanes import in_turns
from tests.models import WIDTH, Case, Chain, TwoLinears, case, features, square_loss
from tests.techniques.tiling import models as tiled

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
both = pytest.mark.parametrize("dtype", list(DTYPES))
models = pytest.mark.parametrize("name", ["mlp", "resnet", "bert", "gpt2", "t5", "lora llama", "nested"])


@contextlib.contextmanager
def in_16_bits(model: nn.Module, dtype: str, device_type: str = "cpu", scale: LossScale | None = None) -> Iterator[Any]:
    with contextlib.ExitStack() as undo:
        yield precision.attach(MixedPrecision(dtype), model, device_type, undo, scale=scale)


def to(device: str, tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name


def simple() -> nn.Module:
    torch.manual_seed(3)
    return Chain(*(TwoLinears() for _ in range(3)))


# ---- the same as plain autocast, bit for bit


def step_by_hand(model: nn.Module, entry: Case, dtype: str, step: int, device: str) -> torch.Tensor:
    """What a careful user would write: autocast, outputs in fp32, a fixed loss scale taken off again."""
    factor = 2.0**16 if dtype == "float16" else 1.0
    with torch.autocast(device, DTYPES[dtype], cache_enabled=False):
        output = model(**to(device, entry.batch(step)))
    loss = entry.loss(torch.utils._pytree.tree_map_only(torch.Tensor, widen, output))
    (loss * factor).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= factor
    return loss


def widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def assert_like_autocast(name: str, dtype: str, device: str) -> None:
    entry = case(name)
    model = entry.build().to(device)
    twin = copy.deepcopy(model)
    for mine in (model, twin):
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)
        torch.manual_seed(5)
        with in_16_bits(model, dtype, device) if mine is model else contextlib.nullcontext():
            for step in range(3):
                if mine is model:
                    entry.loss(model(**to(device, entry.batch(step)))).backward()
                else:
                    step_by_hand(twin, entry, dtype, step, device)
                optimizer.step()
                if step < 2:
                    optimizer.zero_grad()
    assert_equal(gradients_of(model), gradients_of(twin))
    assert_equal(dict(model.named_parameters()), dict(twin.named_parameters()))


@models
def test_bf16_is_plain_autocast(name):
    assert_like_autocast(name, "bfloat16", "cpu")


@pytest.mark.parametrize("name", ["mlp", "resnet", "bert", "gpt2", "t5", "lora llama"])
def test_fp16_is_plain_autocast_with_the_scale_taken_off(name):
    assert_like_autocast(name, "float16", "cpu")


@both
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_on_an_accelerator(name, dtype, simgpu_device, no_races):
    assert_like_autocast(name, dtype, "simgpu")


@both
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("keep", [(), ("matmul", "attention")])
def test_recompute_sees_the_same_autocast(device, dtype, keep, simgpu_device):
    entry = case("gpt2")
    model = entry.build().to(device)
    model.config.use_cache = False
    twin = copy.deepcopy(model)
    batch = to(device, entry.batch(0))
    with contextlib.ExitStack() as undo:
        for fqn in find_blocks(model):
            checkpointing.attach(Checkpoint(fqn, keep), model.get_submodule(fqn), undo, verify=True)
        precision.attach(MixedPrecision(dtype), model, device, undo)
        precision.attach(MixedPrecision(dtype), twin, device, undo)
        losses = []
        for mine in (model, twin):
            torch.manual_seed(5)
            losses.append(entry.loss(mine(**batch)))
            losses[-1].backward()
    assert torch.equal(*losses)
    assert_equal(gradients_of(model), gradients_of(twin))


BLOCKS = tuple(f"transformer.h.{index}" for index in range(4))
BESIDE = {
    "streamed parameters": tuple(StreamParameters(fqn) for fqn in BLOCKS),
    "offloaded activations": tuple(OffloadActivations(fqn) for fqn in BLOCKS),
    "offloaded optimizer state": (OffloadOptimizer(bucket_bytes=2**16),),
}


def train_beside(actions: tuple[Any, ...], dtype: str) -> tuple[dict[str, torch.Tensor], LossScale]:
    """Four steps on simgpu; the third overflows in fp16."""
    entry, scale = case("gpt2"), LossScale()
    torch.manual_seed(3)
    model = entry.build().to("simgpu")
    model.config.use_cache = False
    settings = ExecutionSettings(
        device=torch.device("simgpu"), async_config=AsyncOffloadConfig(min_tensor_bytes=0), asynchronous=True
    )
    executor = Executor(model, settings)
    executor.attach(actions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with in_16_bits(model, dtype, "simgpu", scale):
        torch.manual_seed(5)
        for step in range(4):
            loss = entry.loss(model(**to("simgpu", entry.batch(step))))
            (loss * (1e30 if step == 2 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    executor.detach()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}, scale


@both
@pytest.mark.parametrize("beside", list(BESIDE))
def test_beside_techniques_that_move_tensors(beside, dtype, simgpu_device, no_races):
    ours, scale = train_beside(BESIDE[beside], dtype)
    theirs, _ = train_beside((), dtype)
    assert_equal(ours, theirs)
    assert scale.num_skipped_steps == (1 if dtype == "float16" else 0)


def small_gradients(model: nn.Module, dtype: str) -> dict[str, torch.Tensor]:
    """Of a loss so small that they vanish in fp16 unless they are scaled."""
    with in_16_bits(model, dtype):
        output = model(input_ids=tiled.tokens(), labels=tiled.labels())
        (output.loss * 1e-5).backward()
    return gradients_of(model)


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], dtype: str) -> None:
    """Up to a few roundings; what is zero but for rounding (a key's bias) has no digits."""
    assert list(ours) == list(theirs)
    for name, gradient in theirs.items():
        bound = 4 * torch.finfo(DTYPES[dtype]).eps * gradient.norm() + 1e-9
        assert (ours[name] - gradient).norm() <= bound, name


@both
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_tiled_head_stays_tiled(kind, dtype):
    """Its logits are never built, though the model hands them out, and its gradients are scaled like all others."""
    ours, theirs = tiled.pair(lambda: tiled.hugging_face(kind).eval())
    plain = small_gradients(theirs, dtype)
    with tiled.Attached(ours, TileHead(tiled.HEADS[kind], rows=8)), tiled.builds() as built:
        found = small_gradients(ours, dtype)
    assert not built
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    assert_close(found, plain, dtype)


@both
def test_a_loss_on_tiled_logits_outside_the_model_is_right(dtype):
    """Whoever scales stands between the logits and the loss: in fp16 they are built, in bf16 they are not."""
    ours, theirs = tiled.pair(tiled.HandWritten)
    found = []
    with tiled.Attached(ours, TileHead("head", rows=8)), tiled.builds() as built:
        for model in (ours, theirs):
            with in_16_bits(model, dtype):
                (tiled.flat_loss(model(tiled.tokens()), tiled.labels()) * 1e-5).backward()
            found.append(gradients_of(model))
    assert bool(built) == (dtype == "float16")
    assert_close(found[0], found[1], dtype)


@both
def test_saved_tensors_travel_in_16_bits(dtype):
    model, packed = simple(), []
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.dtype) or t.clone(), lambda t: t)
    with in_16_bits(model, dtype), pack:
        square_loss(model(features(0))).backward()
    ours = gradients_of(model)
    model.zero_grad()
    with in_16_bits(model, dtype):
        square_loss(model(features(0))).backward()
    assert_equal(ours, gradients_of(model))
    assert packed.count(DTYPES[dtype]) > packed.count(torch.float32)


# ---- what comes out


@dataclasses.dataclass(frozen=True)
class Result:
    logits: torch.Tensor
    pair: tuple[torch.Tensor, torch.Tensor]
    text: str


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, kind: str) -> Any:
        y = self.linear(x)
        assert y.dtype == torch.bfloat16
        if kind == "dataclass":
            return Result(y, (y, y.argmax()), "text")
        return {"tensor": y, "tuple": (y, 3), "dict": {"logits": y, "again": y, "index": y.argmax()}, "none": None}[
            kind
        ]


@pytest.mark.parametrize("training", [True, False])
def test_outputs_arrive_in_fp32(training):
    model = Speaker().train(training)
    context = torch.enable_grad() if training else torch.inference_mode()
    with in_16_bits(model, "bfloat16"), context:
        assert model(features(0), "tensor").dtype == torch.float32
        assert model(features(0), "none") is None
        first, number = model(features(0), "tuple")
        assert (first.dtype, number) == (torch.float32, 3)
        named = model(features(0), "dict")
        assert named["logits"].dtype == torch.float32
        assert named["index"].dtype == torch.int64
        result = model(features(0), "dataclass")
        assert isinstance(result, Result)
        assert result.logits.dtype == result.pair[0].dtype == torch.float32
        assert result.text == "text"


@both
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit"])
def test_hugging_face_outputs(name, dtype):
    entry = case(name)
    model = entry.build()
    plain = model(**entry.batch(0))
    with in_16_bits(model, dtype):
        output = model(**entry.batch(0))
    assert type(output) is type(plain)
    assert output.loss.dtype == output.logits.dtype == torch.float32
    assert output.logits.requires_grad


class Fp32Head(nn.Module):
    """A region that must stay in fp32, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        self.seen["body"] = x.dtype
        x = self.norm(x)
        self.seen["norm"] = x.dtype
        with torch.autocast(x.device.type, enabled=False):
            y = self.head(x.float())
        self.seen["head"] = y.dtype
        return y


@both
def test_what_must_stay_in_fp32_does(dtype, simgpu_device):
    model = Fp32Head().to("simgpu")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    with in_16_bits(model, dtype, "simgpu"):
        square_loss(model(features(0).to("simgpu"))).backward()
        optimizer.step()
    assert model.seen == {"body": DTYPES[dtype], "norm": torch.float32, "head": torch.float32}
    for parameter in model.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


def test_weight_decay_is_exact_in_fp32():
    """Far below the resolution of 16 bits, and still there."""
    model, optimizer_of = simple(), lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, weight_decay=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with in_16_bits(model, "bfloat16"):
        (model(features(0)) * 0.0).sum().backward()
        optimizer_of(model).step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] + (-1e-3) * (before[name] * 1e-3)), name


# ---- a user's own autocast


@both
def test_inside_a_users_autocast(dtype):
    model = simple()
    twin = copy.deepcopy(model)
    with in_16_bits(model, dtype), torch.autocast("cpu", torch.bfloat16):
        ours = model(features(0))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = twin(features(0))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    square_loss(ours).backward()
    square_loss(theirs).backward()
    assert_equal(gradients_of(model), gradients_of(twin))


@both
def test_evaluation_trains_nothing_and_leaves_no_autocast(dtype):
    model = simple().eval()
    with in_16_bits(model, dtype):
        with torch.no_grad():
            ours = model(features(0))
        assert not torch.is_autocast_enabled("cpu")
    with torch.no_grad(), torch.autocast("cpu", DTYPES[dtype], cache_enabled=False):
        assert torch.equal(ours, model(features(0)).float())


@both
def test_a_failing_forward_leaves_no_autocast(dtype):
    model = simple()
    with in_16_bits(model, dtype):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, WIDTH + 1))
        assert not torch.is_autocast_enabled("cpu")
        assert model(features(0)).dtype == torch.float32
    handle = model.register_forward_pre_hook(fail)
    with in_16_bits(model, dtype):
        with pytest.raises(ZeroDivisionError):
            model(features(0))
        assert not torch.is_autocast_enabled("cpu")
    handle.remove()


def fail(*_: Any) -> None:
    raise ZeroDivisionError


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        return self(self.linear(x), depth - 1) if depth else x


@both
def test_a_model_that_calls_itself(dtype):
    model = Recursive()
    twin = copy.deepcopy(model)
    with in_16_bits(model, dtype):
        square_loss(model(features(0), 3)).backward()
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", DTYPES[dtype], cache_enabled=False):
        output = twin(features(0), 3)
    (square_loss(output.float()) * 2.0**16).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad / 2.0**16) or dtype == "bfloat16"


def test_a_16_bit_model_is_left_alone():
    model = simple().bfloat16()
    with in_16_bits(model, "bfloat16") as attached:
        assert attached is None
        assert model(features(0).bfloat16()).dtype == torch.bfloat16


def test_a_device_without_16_bit_math_warns_once_and_stays_in_full_precision():
    model = simple()
    with pytest.warns(UserWarning, match="stays in full precision") as caught, in_16_bits(model, "float16", "meta"):
        assert model(features(0)).dtype == torch.float32
    assert len(caught) == 1
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("device_type", "bf16", "fp16", "fast", "chosen"),
    [
        ("cpu", False, False, False, "bfloat16"),
        ("cuda", True, True, True, "bfloat16"),
        ("cuda", False, True, True, "float16"),
        ("cuda", False, True, False, None),
        ("mps", False, False, True, None),
    ],
)
def test_choice_of_dtype(device_type, bf16, fp16, fast, chosen):
    assert (
        MixedPrecision.choose_dtype(device_type, supports_bf16=bf16, supports_fp16=fp16, has_fast_16bit=fast) == chosen
    )


# ---- everything is undone


@both
def test_detach_leaves_no_trace(dtype):
    model = simple()
    before = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(model).items()}
    with in_16_bits(model, dtype):
        duplicate = copy.deepcopy(model)
        square_loss(model(features(0))).backward()
    after = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(model).items()}
    assert before == after
    assert not duplicate._forward_hooks
    assert not duplicate._forward_pre_hooks


@both
def test_a_backward_after_detach_is_still_right(dtype):
    model = simple()
    with in_16_bits(model, dtype):
        square_loss(model(features(0))).backward()
        expected = gradients_of(model)
        model.zero_grad()
        loss = square_loss(model(features(0)))
    loss.backward()
    assert_equal(gradients_of(model), expected)


class _PlansInside:
    """Attaches in the model's first pre-hook, as the planner does."""

    def __init__(self) -> None:
        self.undo = contextlib.ExitStack()

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.undo.close()
        attached = precision.attach(MixedPrecision("bfloat16"), model, "cpu", self.undo)
        attached.enter(model, args, kwargs)


def test_attached_in_the_first_moment_of_a_forward():
    model, planner = simple(), _PlansInside()
    handle = model.register_forward_pre_hook(planner, prepend=True, with_kwargs=True)
    seen = []
    watch = model.head.register_forward_hook(lambda m, a, o: seen.append(o.dtype))
    for _ in range(3):  # the second time, an earlier pair of hooks is taken off on the way
        assert model(features(0)).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
    planner.undo.close()
    handle.remove()
    watch.remove()
    assert seen == [torch.bfloat16] * 3


def test_taken_off_in_the_first_moment_of_a_forward():
    """A new plan without 16 bits: the hook that is gone is still called once, and must not enter."""
    model, undo = simple(), contextlib.ExitStack()
    precision.attach(MixedPrecision("bfloat16"), model, "cpu", undo)
    handle = model.register_forward_pre_hook(lambda module, args: undo.close(), prepend=True)
    expected = simple()(features(0))
    assert torch.equal(model(features(0)), expected)
    assert not torch.is_autocast_enabled("cpu")
    handle.remove()


# ---- fp16: where the scale enters and leaves


def test_underflow_without_scaling_and_none_with_it():
    model = simple()
    small = lambda output: square_loss(output) * 1e-6  # noqa: E731
    small(model(features(0))).backward()
    exact = gradients_of(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.float16):
        output = model(features(0))
    small(output.float()).backward()
    unscaled = gradients_of(model)
    model.zero_grad()
    with in_16_bits(model, "float16"):
        small(model(features(0))).backward()
    scaled = gradients_of(model)
    lost = sum((unscaled[name] == 0).sum().item() for name in exact) / sum(g.numel() for g in exact.values())
    assert lost > 0.5, "the unscaled run must fail for this test to mean something"
    for name in exact:
        torch.testing.assert_close(scaled[name], exact[name], rtol=0.02, atol=1e-3 * exact[name].abs().max().item())


def gradients_in_fp16(model: nn.Module, loss: Any, scale: LossScale | None = None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with in_16_bits(model, "float16", scale=scale or LossScale()):
        loss(model).backward()
    return gradients_of(model)


def test_a_penalty_on_weights_is_not_scaled_down():
    model = simple()
    penalty = lambda m: 0.5 * sum(p.square().sum() for p in m.parameters())  # noqa: E731
    plain = gradients_in_fp16(model, lambda m: square_loss(m(features(0))))
    both_terms = gradients_in_fp16(model, lambda m: square_loss(m(features(0))) + penalty(m))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(both_terms[name], plain[name] + parameter.detach())


def test_accumulation_over_changing_scales():
    model, scale = simple(), LossScale()
    parts = [gradients_in_fp16(model, lambda m, n=n: square_loss(m(features(n)))) for n in range(3)]
    model.zero_grad()
    with in_16_bits(model, "float16", scale=scale):
        for n in range(3):
            square_loss(model(features(n))).backward()
            scale.value /= 4
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, parts[0][name] + parts[1][name] + parts[2][name])


def test_several_forwards_in_one_backward_and_shared_weights():
    model = simple()
    one = gradients_in_fp16(model, lambda m: square_loss(m(features(0))))
    two = gradients_in_fp16(model, lambda m: square_loss(m(features(0))) + square_loss(m(features(0))))
    assert_equal(two, {name: 2 * gradient for name, gradient in one.items()})


class Auxiliary(Chain):
    """Leaves a loss behind on a module, a list and a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.blocks[0].auxiliary = x.square().mean()
        self.trail = [x.abs().mean()]
        return self.head(x)


def test_losses_left_on_modules():
    torch.manual_seed(3)
    model = Auxiliary(TwoLinears(), TwoLinears())
    loss = lambda m: square_loss(m(features(0))) + m.blocks[0].auxiliary + m.trail[0]  # noqa: E731
    loss(model).backward()
    exact = gradients_of(model)
    scaled = gradients_in_fp16(model, loss)
    for name in exact:
        torch.testing.assert_close(scaled[name], exact[name], rtol=0.01, atol=1e-3)


class Cell(nn.Module):
    """Hands a state from call to call: as an argument, and on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = x if state is None else x + state
        if self.memory is not None:
            mixed = mixed + self.memory
        y = torch.tanh(self.linear(mixed))
        self.memory = 0.5 * y
        return y, y


def unrolled(model: nn.Module) -> torch.Tensor:
    model.memory, state, total = None, None, 0.0
    for n in range(3):
        output, state = model(features(n), state)
        total = total + square_loss(output)
    return total


def test_a_state_that_goes_from_call_to_call():
    torch.manual_seed(3)
    model = Cell()
    unrolled(model).backward()
    exact = gradients_of(model)
    scaled = gradients_in_fp16(model, unrolled)
    for name in exact:
        torch.testing.assert_close(scaled[name], exact[name], rtol=0.01, atol=1e-3)
    model.memory = None


def test_gradients_of_inputs_are_true():
    """Of a leaf, of a computed tensor that comes in, and by `torch.autograd.grad`."""
    model = simple()

    def input_gradients(m: nn.Module) -> list[torch.Tensor]:
        leaf = features(0).requires_grad_()
        inner = leaf * 2.0
        found = [torch.autograd.grad(square_loss(m(x)), x)[0] for x in (leaf, inner)]
        square_loss(m(inner)).backward()
        return [*found, leaf.grad]

    exact = input_gradients(model)
    with in_16_bits(model, "float16"):
        scaled = input_gradients(model)
    for ours, theirs in zip(scaled, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=1e-5)


def test_a_loss_may_be_changed_in_place_and_logits_may_not():
    model = nn.Linear(4, 4)
    reference = copy.deepcopy(model)
    x = torch.randn(3, 4)

    class Net(nn.Module):
        def __init__(self, line):
            super().__init__()
            self.line = line

        def forward(self, x):
            logits = self.line(x)
            return logits.float().square().mean(), logits

    net, plain = Net(model), Net(reference)
    with in_16_bits(net, "float16"):
        loss, logits = net(x)
        loss /= 4
        loss.backward()
        with pytest.raises(RuntimeError, match="inplace"):
            logits.div_(2)
    (plain(x)[0] / 4).backward()
    assert torch.allclose(model.weight.grad, reference.weight.grad, rtol=1e-2, atol=1e-4)


def test_second_derivatives_are_refused():
    model, x = simple(), features(0).requires_grad_()
    with in_16_bits(model, "float16"), pytest.raises(MemScaleError, match="create_graph"):
        torch.autograd.grad(square_loss(model(x)), x, create_graph=True)
    with in_16_bits(model, "bfloat16"):
        (gradient,) = torch.autograd.grad(square_loss(model(x)), x, create_graph=True)
        gradient.square().sum().backward()


def test_parameters_that_the_model_does_not_register():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.loose = [nn.Linear(WIDTH, WIDTH)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.loose[0](self.linear(x))

    torch.manual_seed(3)
    model = Odd()
    square_loss(model(features(0))).backward()
    weight = model.loose[0].weight
    exact, weight.grad = weight.grad, None
    gradients_in_fp16(model, lambda m: square_loss(m(features(0))))
    torch.testing.assert_close(weight.grad, exact, rtol=0.01, atol=1e-4)


def test_a_hook_inside_the_model_switches_scaling_off_with_a_warning():
    """A distillation loss on a captured activation would enter unscaled: its gradient must not be divided."""
    model, captured = simple(), []
    handle = model.blocks[1].register_forward_hook(lambda m, a, output: captured.append(output))
    model(features(0)).sum().backward()
    captured.pop().detach_()

    def loss(m: nn.Module) -> torch.Tensor:
        return square_loss(m(features(0))) + square_loss(captured.pop())

    model.zero_grad()
    loss(model).backward()
    exact = gradients_of(model)
    with pytest.warns(UserWarning, match=r"'blocks\.1' has a forward hook"):
        scaled = gradients_in_fp16(model, loss)
    handle.remove()
    for name in exact:
        torch.testing.assert_close(scaled[name], exact[name], rtol=0.01, atol=1e-3)


def test_reentrant_checkpointing_is_refused():
    class Reentrant(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            return self.head(torch.utils.checkpoint.checkpoint(self.blocks[1], x, use_reentrant=True))

    model = Reentrant(TwoLinears(), TwoLinears())
    with in_16_bits(model, "float16"), pytest.raises(MemScaleError, match="use_reentrant=False"):
        model(features(0))
    assert not torch.is_autocast_enabled("cpu")


# ---- fp16: steps that must not be taken


def overflow(output: torch.Tensor) -> torch.Tensor:
    return square_loss(output) * 1e30


def test_an_overflow_skips_the_step_and_halves_the_scale():
    model, scale = simple(), LossScale()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    before = copy.deepcopy(dict(model.named_parameters()))
    with in_16_bits(model, "float16", scale=scale):
        overflow(model(features(0))).backward()
        bad = gradients_of(model)
        optimizer.step()
        schedule.step()
        assert_equal(dict(model.named_parameters()), before)
        assert not optimizer.state
        assert all(p.grad is not None for p in model.parameters())
        assert any(not gradient.isfinite().all() for gradient in bad.values())
        optimizer.zero_grad()
        square_loss(model(features(0))).backward()
        optimizer.step()
    assert (scale.value, scale.num_skipped_steps, scale.good_steps) == (2.0**15, 1, 1)
    assert not torch.equal(model.head.weight, before["head.weight"])


def test_the_scale_grows_again():
    model, scale = simple(), LossScale(initial=4.0, growth_interval=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    with in_16_bits(model, "float16", scale=scale):
        for n in range(7):
            square_loss(model(features(n))).backward()
            optimizer.step()
            seen.append(scale.value)
    assert seen == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]


def test_clipped_infinities_are_still_found():
    model, scale = simple(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = model.head.weight.detach().clone()
    with in_16_bits(model, "float16", scale=scale):
        overflow(model(features(0))).backward()
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0, 1.0, -1.0)
        optimizer.step()
    assert torch.equal(model.head.weight, before)
    assert scale.num_skipped_steps == 1


def test_one_bad_backward_of_an_accumulation_skips_its_step_only():
    model, scale = simple(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    weights = []
    with in_16_bits(model, "float16", scale=scale):
        for n, loss in enumerate([square_loss, overflow, square_loss, square_loss, square_loss, square_loss]):
            loss(model(features(n))).backward()
            if n % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                weights.append(model.head.weight.detach().clone())
    assert scale.num_skipped_steps == 1
    assert not torch.equal(*weights)


def test_two_optimizers_share_a_backward():
    model, scale = simple(), LossScale(growth_interval=2)
    optimizers = [torch.optim.SGD(model.blocks.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    before = copy.deepcopy(dict(model.named_parameters()))
    with in_16_bits(model, "float16", scale=scale):
        overflow(model(features(0))).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(dict(model.named_parameters()), before)
        assert (scale.value, scale.num_skipped_steps) == (2.0**15, 1)
        model.zero_grad()
        square_loss(model(features(0))).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert scale.good_steps == 1
    assert not torch.equal(model.head.bias, before["head.bias"])
    assert not torch.equal(model.blocks[0].up.bias, before["blocks.0.up.bias"])


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_looked_at_after_it_ran(by_name):
    model, scale = simple(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(dict(model.named_parameters()))
    losses = iter([overflow, square_loss])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = next(losses)(model(features(0)))
        loss.backward()
        return loss

    with in_16_bits(model, "float16", scale=scale):
        for bad in (True, False):
            value = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            assert value is not None
            assert torch.equal(model.head.weight, before["head.weight"]) == bad
    assert scale.num_skipped_steps == 1


def test_another_models_optimizer_is_none_of_our_business():
    model, other, scale = simple(), nn.Linear(2, 2), LossScale()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with in_16_bits(model, "float16", scale=scale):
        overflow(model(features(0))).backward()
        other(torch.ones(1, 2)).sum().backward()
        before = other.weight.detach().clone()
        optimizer.step()
    assert not torch.equal(other.weight, before)
    assert scale.num_skipped_steps == 0


def test_an_overflow_on_another_rank_is_found_in_the_reduced_gradients():
    """One process plays the rank that did not overflow itself."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, scale = simple(), LossScale()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.head.weight.detach().clone()
        with in_16_bits(model, "float16", scale=scale):
            for bad in (True, False):
                square_loss(model(features(0))).backward()
                if bad:
                    model.blocks[0].up.bias.grad[0] = float("inf")
                optimizer.step()
                optimizer.zero_grad()
                assert torch.equal(model.head.weight, before) == bad
    finally:
        torch.distributed.destroy_process_group()
    assert (scale.num_skipped_steps, scale.good_steps) == (1, 1)


def test_a_loss_that_is_nan_is_reported():
    model, scale = simple(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with in_16_bits(model, "float16", scale=scale), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(25):
            (square_loss(model(features(0))) * float("nan")).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(caught) == 1
    assert "20 steps in a row" in str(caught[0].message)
    assert scale.num_skipped_steps == 25


# ---- a user's own GradScaler


def train_with_scaler(model: nn.Module, scaler: torch.amp.GradScaler) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for n in range(4):
        loss = square_loss(model(features(n)))
        scaler.scale(loss * (1e30 if n == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms


def test_a_users_scaler_stays_in_charge():
    model, scale = simple(), LossScale()
    twin = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu")
    with in_16_bits(model, "float16", scale=scale):
        ours = train_with_scaler(model, scaler)
        assert scaler.get_scale() == 2.0**15
    assert (scale.value, scale.num_skipped_steps) == (2.0**16, 0)
    with in_16_bits(twin, "float16", scale=LossScale(initial=1.0)):
        theirs = train_with_scaler(twin, torch.amp.GradScaler("cpu"))
    assert ours[0] == theirs[0]
    assert_equal(dict(model.named_parameters()), dict(twin.named_parameters()))


def test_a_scaler_that_appears_later_takes_over():
    model, scale = simple(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with in_16_bits(model, "float16", scale=scale):
        square_loss(model(features(0))).backward()
        optimizer.step()
        assert scale.is_ours()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(square_loss(model(features(0)))).backward()
        scaler.step(optimizer)
        assert not scale.is_ours()


def test_a_scaler_of_another_model_is_told_apart_at_the_first_step():
    model, scale = simple(), LossScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stranger = torch.amp.GradScaler("cpu")
    with in_16_bits(model, "float16", scale=scale):
        square_loss(model(features(0))).backward()
        assert not scale.is_ours()
        optimizer.step()
        assert scale.is_ours()
    assert stranger.is_enabled()


# ---- save and resume


def test_the_scale_is_saved_and_resumed():
    scale = LossScale()
    scale.value, scale.good_steps, scale.num_skipped_steps = 2.0**9, 7, 3
    resumed = LossScale()
    resumed.load_state_dict(scale.state_dict())
    assert (resumed.value, resumed.good_steps, resumed.num_skipped_steps) == (2.0**9, 7, 3)


@pytest.mark.parametrize("value", [0.0, -2.0, 3.0, float("inf"), float("nan")])
def test_a_scale_that_is_no_power_of_two_is_refused(value):
    with pytest.raises(ConfigError, match="power of two"):
        LossScale().load_state_dict({"scale": value, "good_steps": 0, "num_skipped_steps": 0})


# ---- bytes


def held_after_forward(model: nn.Module, x: torch.Tensor) -> int:
    books = LiveBytes("cpu", 1)
    books.see_all([x, list(model.parameters())], "other")
    before = books.total_bytes
    with books:
        output = model(x)
        held = books.total_bytes - before
    del output
    return held


@both
def test_activations_take_half_the_bytes(dtype):
    rows, width, depth = 4096, 64, 6
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    x = torch.randn(rows, width)
    activation, weight = rows * width, width * width
    # The inputs of all layers but the first, which is the batch, and the output.
    assert held_after_forward(model, x) == 4 * depth * activation
    with in_16_bits(model, dtype):
        held = held_after_forward(model, x)
    # All inputs, with a cast of the batch; the weights through which gradients pass; the widened output.
    assert held == 2 * depth * activation + 2 * (depth - 1) * weight + 4 * activation


def test_unscaling_costs_no_memory_of_its_own():
    """The division is done in place where a cast has just made the gradient: fp16 peaks where bf16 does."""
    entry = case("mlp")
    peaks = {}
    for dtype in DTYPES:
        model = entry.build()
        with in_16_bits(model, dtype), LiveBytes("cpu", 1) as books:
            entry.loss(model(**entry.batch(0))).backward()
        peaks[dtype] = books.peak_bytes
    widest = 4 * 64 * 64  # the batch's gradient, scaled beside unscaled, and a few single numbers
    assert peaks["float16"] - peaks["bfloat16"] <= widest


class _Attached:
    """A technique on a rehearsal's model."""

    def __init__(self, model: nn.Module, dtype: str, device: str) -> None:
        self.undo = contextlib.ExitStack()
        precision.attach(MixedPrecision(dtype), model, device, self.undo)

    def detach(self) -> None:
        self.undo.close()


@both
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_a_rehearsal_on_fake_tensors_shows_the_same_bytes(name, device, dtype, simgpu_device):
    entry = case(name)
    model = entry.build().to(device)
    inputs = Inputs(kwargs=to(device, entry.batch(0)))
    attach = functools.partial(_Attached, dtype=dtype, device=device)
    fake = FakeRehearsal(model, inputs, device).run(attach)
    real = RealRehearsal(model, inputs, torch.device(device), warmup_steps=0).run(attach)
    bytes_of = lambda trace: [(s.phase, s.module_fqn, s.peak_bytes, s.net_bytes) for s in trace.segments]  # noqa: E731
    assert bytes_of(fake) == bytes_of(real)


# ---- quality: loss curves


@pytest.mark.parametrize(
    ("num_steps", "learned"), [(60, 0.9), pytest.param(NUM_BOUNDED_STEPS, 0.6, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(("name", "dtype"), in_turns(["gpt2", "bert"], ["bfloat16", "float16"]))
def test_loss_curves_stay_close_to_fp32(name, dtype, num_steps, learned):
    """The bounds that docs/design/precision.md states."""
    found = measure_distance(name, dtype, num_steps)
    assert found.last_loss < learned * found.first_loss, "the models must learn for this test to mean something"
    assert 0 < found.mean < MEAN_BOUND[dtype]
    assert found.largest < LARGEST_BOUND[dtype]
