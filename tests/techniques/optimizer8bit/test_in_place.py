"""State that waits in 8 bits: the user's optimizer steps on what 8 bits hold, and everything else stays the user's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu  # noqa: F401  before the first backward: autograd counts the devices then
from memscale import Config
from memscale._execute.executor import Executor, execute, executor_of
from memscale._execute.settings import ExecutionSettings
from memscale._plan import OffloadOptimizer, QuantizeOptimizer, StreamParameters
from memscale.techniques.offload.optimizer import adopted_optimizer
from memscale.techniques.offload.optimizer.buckets import Stretch, stretches_of
from memscale.techniques.optimizer8bit.blocks import dequantize, forget_tables, quantize
from memscale.techniques.optimizer8bit.eight_bit import moments_of
from tests.parity import plan_of
from tests.techniques.offload.tiers import on_host, same

O = torch.optim  # noqa: E741
BUCKET_BYTES = 40_000
TABLE_BYTES = 2 * (65536 + 1024)
"""What the packing keeps on a device without kernels of bitsandbytes'."""
ACTION = QuantizeOptimizer(BUCKET_BYTES, min_elements=1024)


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Every test gives its device memory back."""


class Net(nn.Module):
    """An embedding, matrices above and below the limit, biases, a transposed weight, one layer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.body = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64))
        self.wide = nn.Parameter(torch.randn(40, 64).t() * 0.1)
        self.small = nn.Linear(40, 8)
        self.unused = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.small(self.body(self.embedding(tokens)) @ self.wide)


class Lion(O.Optimizer):
    """As published: the sign of a mixture of momentum and gradient."""

    def __init__(self, parameters: Any, lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    moment = state.setdefault("exp_avg", torch.zeros_like(p))
                    p.add_(torch.sign(moment * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                    moment.mul_(0.99).add_(p.grad, alpha=0.01)


MAKES: dict[str, Any] = {
    "AdamW": lambda p: O.AdamW(p, lr=1e-3),
    "AdamW loop": lambda p: O.AdamW(p, lr=1e-3, foreach=False),
    "AdamW fused": lambda p: O.AdamW(p, lr=1e-3, fused=True),
    "AdamW groups": lambda p: O.AdamW([{"params": p[:3], "lr": 1e-2}, {"params": p[3:], "weight_decay": 0.0}]),
    "Adam amsgrad": lambda p: O.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "SGD momentum": lambda p: O.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: O.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: O.Adagrad(p, lr=1e-2),
    "Lion": Lion,
}
WAYS = ("cpu", "simgpu", "simgpu host", "simgpu host async", "cpu disk async")


def build(way: str) -> Net:
    torch.manual_seed(0)
    return Net().to(way.split()[0])


def step(net: Net, optimizer: O.Optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 50, (6, 5), generator=generator).to(net.wide.device)
    loss = net(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def eligible(net: Net) -> list[nn.Parameter]:
    embeddings = {id(net.embedding.weight)}
    return [p for p in net.parameters() if p.numel() >= ACTION.min_elements and id(p) not in embeddings]


def round_state(net: Net, optimizer: O.Optimizer) -> None:
    """What 8 bits hold of the state, put in its place: what a step by hand would do."""
    moments = moments_of(optimizer)
    assert moments is not None
    for parameter in eligible(net):
        for name, value in optimizer.state.get(parameter, {}).items():
            if name in moments:
                line = value.as_strided((value.numel(),), (1,))
                line.copy_(dequantize(*quantize(line, moments[name], 256), moments[name], 256))


@contextlib.contextmanager
def attached(
    net: Net, way: str, directory: Any, optimizer: O.Optimizer | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Executor]:
    moves = "host" in way or "disk" in way
    settings = ExecutionSettings(
        device=torch.device(way.split()[0]),
        asynchronous="async" in way,
        offload_dir=str(directory) if "disk" in way else None,
    )
    executor = Executor(net, settings, optimizer)
    packs = dataclasses.replace(ACTION, bucket_bytes=bucket_bytes)
    executor.apply(plan_of([packs, *([OffloadOptimizer(bucket_bytes)] if moves else [])]))
    try:
        yield executor
    finally:
        executor.detach()


def result(net: Net, optimizer: O.Optimizer) -> Any:
    return on_host([net.state_dict(), copy.deepcopy(optimizer.state_dict())])


# ------------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "cpu") for name in MAKES), *(("AdamW groups", way) for way in WAYS[1:])]
)
def test_a_step_is_the_users_own_on_what_8_bits_hold(name: str, way: str, tmp_path: Any) -> None:
    reference, net = build(way), build(way)
    plain, ours = MAKES[name](list(reference.parameters())), MAKES[name](list(net.parameters()))
    with attached(net, way, tmp_path) as executor:
        for number in range(4):
            expected = step(reference, plain, number)
            assert step(net, ours, number) == expected
            round_state(reference, plain)
        assert executor.stats().transfers["optimizer"].packed_bytes > 0
        assert same(result(net, ours), result(reference, plain))
    assert same(result(net, ours), result(reference, plain))
    assert {type(entry) for entry in ours.state.values()} == {dict}
    assert step(net, ours, 9) == step(reference, plain, 9)
    forget_tables()


@pytest.mark.parametrize("way", ["simgpu host", "simgpu host async", "simgpu disk async"])
def test_what_does_not_wait_in_8_bits_comes_in_stretches(
    way: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding's 12,800 bytes in three or four; every other parameter of that size is packed."""
    cut: list[tuple[torch.Tensor, int]] = []

    def noted(parameter: torch.Tensor, bucket_bytes: int) -> tuple[Stretch, ...]:
        found = stretches_of(parameter, bucket_bytes)
        cut.append((parameter, len(found)))
        return found

    monkeypatch.setattr(adopted_optimizer, "stretches_of", noted)
    reference, net = build(way), build(way)
    plain, ours = O.AdamW(reference.parameters()), O.AdamW(net.parameters())
    with attached(net, way, tmp_path, bucket_bytes=5_000):
        for number in range(4):
            expected = step(reference, plain, number)
            assert step(net, ours, number) == expected
            round_state(reference, plain)
        assert same(result(net, ours), result(reference, plain))
    assert same(result(net, ours), result(reference, plain))
    assert [parameter is net.embedding.weight and num > 1 for parameter, num in cut] == [True]
    forget_tables()


def test_a_known_optimizer_with_state_is_taken_at_once() -> None:
    reference, net = build("cpu"), build("cpu")
    plain, ours = O.AdamW(reference.parameters()), O.AdamW(net.parameters())
    step(net, ours, 0)
    step(reference, plain, 0)
    round_state(reference, plain)
    with attached(net, "cpu", None, ours):
        assert same(result(net, ours), result(reference, plain))
        assert step(net, ours, 1) == step(reference, plain, 1)
    forget_tables()


@pytest.mark.parametrize("way", ["cpu", "simgpu", "simgpu host async"])
def test_attaching_again_changes_nothing(way: str, tmp_path: Any) -> None:
    """Planning again detaches and attaches in the middle of training."""
    once, again = build(way), build(way)
    first, second = O.AdamW(once.parameters()), O.AdamW(again.parameters())
    with attached(once, way, tmp_path):
        expected = [step(once, first, number) for number in range(6)]
    losses = []
    for number in range(6):
        with attached(again, way, tmp_path, second if number else None):
            losses.append(step(again, second, number))
    assert losses == expected
    assert same(result(again, second), result(once, first))


# ------------------------------------------------------------------------------------------------- what is in 8 bits


@pytest.mark.parametrize("way", ["cpu", "simgpu"])
def test_the_state_falls_to_a_quarter_and_what_shall_stay_stays(way: str) -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(64, 64), "line": nn.Linear(512, 512)}).to(way)
    optimizer = O.AdamW(net.parameters())
    executor = execute(net, plan_of([QuantizeOptimizer(1 << 20)]))
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape).to(way)
    optimizer.step()
    stats = executor.stats().transfers["optimizer"]
    assert stats.unpacked_bytes == 2 * 4 * 512 * 512
    assert stats.packed_bytes == 2 * (512 * 512 + 4 * 1024)
    assert stats.unpacked_bytes / stats.packed_bytes > 3.9
    entry = dict.items(optimizer.state[net["embedding"].weight])
    assert all(value.dtype == torch.float32 for _, value in entry)
    assert not dict(dict.items(optimizer.state[net["line"].weight]))  # it waits
    executor.detach()


def test_device_bytes_between_and_in_steps() -> None:
    """Absolute bytes on the device: parameters and packed state between steps, a bucket more in a step."""
    size, layers = 256, 8
    net = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers))).to("simgpu")
    optimizer = O.AdamW(net.parameters(), foreach=False)
    matrix = 4 * size * size
    executor = execute(net, plan_of([QuantizeOptimizer(matrix)]))
    start = torch.accelerator.memory_allocated()

    def fill() -> None:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)

    fill()
    optimizer.step()
    optimizer.zero_grad()
    packed = layers * 2 * (size * size + size * size // 64)
    held = torch.accelerator.memory_allocated() - start
    assert packed <= held <= packed + TABLE_BYTES + 8192  # the tables of the packing, step counters
    fill()
    torch.accelerator.reset_peak_memory_stats()
    optimizer.step()
    gradients = layers * matrix
    peak = torch.accelerator.max_memory_allocated() - start
    unpacked, temporaries = 2 * matrix, 6 * matrix  # the step's own, and the packing's scratch over one matrix
    assert gradients + packed + unpacked <= peak <= gradients + packed + unpacked + temporaries + TABLE_BYTES + 8192
    assert peak < gradients + layers * 2 * matrix  # the plain optimizer's state alone is more
    optimizer.zero_grad()
    executor.detach()


def test_parameters_of_others_stay_in_32_bits() -> None:
    net, other = build("cpu"), nn.Linear(64, 64)
    optimizer = O.SGD([*net.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    with attached(net, "cpu", None, optimizer):
        other(torch.randn(3, 64)).sum().backward()
        step(net, optimizer, 0)
        assert type(optimizer.state[other.weight]["momentum_buffer"]) is torch.Tensor


def test_tied_weights_count_as_embeddings() -> None:
    embedding = nn.Embedding(64, 64)
    head = nn.Linear(64, 64, bias=False)
    head.weight = embedding.weight
    net = nn.ModuleDict({"embedding": embedding, "head": head})
    optimizer = O.AdamW(net.parameters())
    executor = execute(net, plan_of([QuantizeOptimizer(1 << 20)]))
    head(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert executor.stats().transfers["optimizer"].packed_bytes == 0
    executor.detach()


# --------------------------------------------------------------------------------------------------- save and resume


@pytest.mark.parametrize("way", ["cpu", "simgpu", "simgpu host async"])
def test_a_saved_state_resumes_bit_for_bit(way: str, tmp_path: Any) -> None:
    whole, net = build(way), build(way)
    first, second = O.AdamW(whole.parameters()), O.AdamW(net.parameters())
    with attached(whole, way, tmp_path):
        expected = [step(whole, first, number) for number in range(6)]
    with attached(net, way, tmp_path):
        losses = [step(net, second, number) for number in range(3)]
        file = io.BytesIO()
        torch.save([net.state_dict(), second.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = build(way)
    third = O.AdamW(resumed.parameters())
    with attached(resumed, way, tmp_path, third):
        resumed.load_state_dict(saved[0])
        third.load_state_dict(saved[1])
        losses += [step(resumed, third, number) for number in range(3, 6)]
        assert losses == expected
        assert same(result(resumed, third), result(whole, first))


@pytest.mark.parametrize("way", ["cpu", "simgpu"])
def test_a_plain_optimizer_loads_the_state_and_back(way: str) -> None:
    net = build(way)
    optimizer = O.AdamW(net.parameters())
    with attached(net, way, None, optimizer):
        step(net, optimizer, 0)
        saved = optimizer.state_dict()
        tensors = [value for entry in saved["state"].values() for value in entry.values() if value.numel() > 1]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
        other = build(way)
        plain = O.AdamW(other.parameters())
        plain.load_state_dict(saved)
        other.load_state_dict(net.state_dict())
        assert same(on_host(plain.state_dict()["state"]), on_host(saved["state"]))
        loss = step(other, plain, 1)
        assert step(net, optimizer, 1) == loss
        optimizer.load_state_dict(plain.state_dict())
        step(net, optimizer, 2)


def test_looking_at_the_state_changes_nothing() -> None:
    looked, net = build("cpu"), build("cpu")
    first, second = O.AdamW(looked.parameters()), O.AdamW(net.parameters())
    with attached(looked, "cpu", None), attached(net, "cpu", None):
        for number in range(3):
            assert step(looked, first, number) == step(net, second, number)
            assert first.state[looked.wide]["exp_avg"].dtype == torch.float32
            copy.deepcopy(first)
        assert same(result(looked, first), result(net, second))


def test_a_changed_moment_counts() -> None:
    net = build("cpu")
    optimizer = O.SGD(net.parameters(), lr=0.1, momentum=0.5)
    with attached(net, "cpu", None):
        step(net, optimizer, 0)
        optimizer.state[net.wide]["momentum_buffer"].zero_()
        before = net.wide.detach().clone()
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert torch.equal(net.wide, before)


# ------------------------------------------------------------------------------------------------ wishes not followed


def unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    forget_tables()


def broken(monkeypatch: pytest.MonkeyPatch, directory: pathlib.Path) -> None:
    """Installed, and made for another torch."""
    unavailable(monkeypatch)
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    (directory / "bitsandbytes.py").write_text("raise RuntimeError('CUDA driver is too old ' * 200)")
    monkeypatch.syspath_prepend(directory)


def test_a_broken_bitsandbytes_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    broken(monkeypatch, tmp_path)
    net = build("cpu")
    ours = O.AdamW(net.parameters())
    config = Config(use_8bit_optimizer=True, enable_logging=False)
    sample = torch.zeros(4, 6, dtype=torch.long)
    with pytest.warns(UserWarning, match=r"bitsandbytes is installed and cannot be imported.*too old") as caught:
        memscale.apply_all_optimizations(net, ours, config, sample)
    step(net, ours, 0)
    assert max(len(str(warning.message)) for warning in caught) < 1000
    memscale.detach(net)


def test_the_warning_names_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed parameters, which are on the host when the optimizer steps, do not tell."""
    unavailable(monkeypatch)
    net = build("simgpu")
    ours = O.AdamW(net.body.parameters())
    executor = execute(
        net, plan_of((StreamParameters("body"), ACTION)), ExecutionSettings(device=torch.device("simgpu"))
    )
    with pytest.warns(UserWarning, match="cannot be used on simgpu "):
        step(net, ours, 0)
    executor.detach()


def test_without_bitsandbytes_one_warning_and_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    unavailable(monkeypatch)
    reference, net = build("cpu"), build("cpu")
    plain, ours = O.AdamW(reference.parameters()), O.AdamW(net.parameters())
    with attached(net, "cpu", None):
        with pytest.warns(UserWarning, match=r"AdamW stays in 32 bits.*use_8bit_optimizer=False") as caught:
            step(net, ours, 0)
        assert 'bitsandbytes is not installed: pip install -c constraints.txt ".[quantization]"' in str(
            caught[0].message
        )
        step(net, ours, 1)  # no second warning: warnings are errors here
        step(reference, plain, 0)
        step(reference, plain, 1)
        assert same(result(net, ours), result(reference, plain))


def test_without_bitsandbytes_offloading_goes_on_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    unavailable(monkeypatch)
    net = build("simgpu")
    ours = O.AdamW(net.parameters())
    with attached(net, "simgpu host", None) as executor:
        with pytest.warns(UserWarning, match="bitsandbytes"):
            step(net, ours, 0)
        stats = executor.stats().transfers["optimizer"]
        assert stats.bytes_to_store > 0
        assert stats.packed_bytes == 0


def test_an_optimizer_without_counterpart_is_named_once() -> None:
    reference, net = build("cpu"), build("cpu")
    plain, ours = O.NAdam(reference.parameters()), O.NAdam(net.parameters())
    with attached(net, "cpu", None):
        with pytest.warns(UserWarning, match=r"NAdam has no 8-bit counterpart"):
            step(net, ours, 0)
        step(net, ours, 1)
        step(reference, plain, 0)
        step(reference, plain, 1)
        assert same(result(net, ours), result(reference, plain))


def test_bitsandbytes_own_optimizers_are_left_as_they_are() -> None:
    import bitsandbytes

    net = build("cpu")
    optimizer = bitsandbytes.optim.AdamW8bit(net.parameters())
    with attached(net, "cpu", None), warnings.catch_warnings():
        warnings.simplefilter("error")
        step(net, optimizer, 0)
        assert type(optimizer.state[net.wide]) is dict


# ------------------------------------------------------------------------------------------------------- the verbs


def test_optimize_keeps_the_users_object_and_gives_32_bits_back() -> None:
    net = build("cpu")
    optimizer = O.AdamW(net.parameters())
    scheduler = O.lr_scheduler.StepLR(optimizer, 1, 0.5)
    groups = optimizer.param_groups
    tokens = torch.randint(0, 50, (6, 5))
    config = Config(use_8bit_optimizer=True, enable_logging=False)
    with memscale.optimize(net, optimizer, config, sample_input=(tokens,)) as executor:
        assert any(isinstance(action, QuantizeOptimizer) for action in executor.plan.actions)
        step(net, optimizer, 0)
        scheduler.step()
        assert optimizer.param_groups is groups
        assert groups[0]["lr"] == 5e-4
        assert executor.stats().transfers["optimizer"].packed_bytes > 0
    assert type(optimizer) is O.AdamW
    assert all(type(entry) is dict for entry in optimizer.state.values())
    moments = [entry["exp_avg"] for entry in optimizer.state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}


def test_wrap_adopts_at_the_first_step() -> None:
    net = build("cpu")
    memscale.wrap(net, Config(use_8bit_optimizer=True, enable_logging=False))
    optimizer = O.AdamW(net.parameters())
    step(net, optimizer, 0)
    assert executor_of(net).stats().transfers["optimizer"].packed_bytes > 0
    memscale.detach(net)
    assert all(type(entry) is dict for entry in optimizer.state.values())


# ------------------------------------------------------------------------------------------------- in odd company


@pytest.mark.parametrize("overflows", [False, True])
def test_a_grad_scaler_skips_and_steps(overflows: bool) -> None:
    reference, net = build("cpu"), build("cpu")
    plain, ours = O.AdamW(reference.parameters()), O.AdamW(net.parameters())

    def scaled_steps(model: Net, optimizer: O.Optimizer, after: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for number in range(3):
            tokens = torch.randint(0, 50, (6, 5), generator=torch.Generator().manual_seed(number))
            loss = model(tokens).square().mean() * (float("inf") if overflows and number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after()

    scaled_steps(reference, plain, lambda: round_state(reference, plain))
    with attached(net, "cpu", None):
        scaled_steps(net, ours, lambda: None)
        states = [on_host(model.state_dict()) for model in (net, reference)]
        if not overflows:  # by hand the state is rounded once more in the step that is skipped
            assert same(*states)
        assert all(bool(torch.isfinite(value).all()) for value in states[0].values())


def test_two_optimizers_of_one_model() -> None:
    net = build("cpu")
    embeddings = O.SGD(net.embedding.parameters(), lr=0.1, momentum=0.9)
    rest = O.AdamW([p for name, p in net.named_parameters() if "embedding" not in name])
    with attached(net, "cpu", None) as executor:
        for number in range(2):
            net(torch.randint(0, 50, (6, 5), generator=torch.Generator().manual_seed(number))).sum().backward()
            embeddings.step()
            rest.step()
            net.zero_grad()
        stats = executor.stats().transfers["optimizer"]
        assert stats.num_optimizers == 2
        assert stats.packed_bytes > 0
        assert embeddings.state[net.embedding.weight]["momentum_buffer"].dtype == torch.float32
    assert all(type(entry) is dict for entry in rest.state.values())


def test_16_bit_parameters() -> None:
    net = build("cpu").bfloat16()
    optimizer = O.AdamW(net.parameters())
    with attached(net, "cpu", None) as executor:
        step(net, optimizer, 0)
        step(net, optimizer, 1)
        stats = executor.stats().transfers["optimizer"]
        assert 1.9 < stats.unpacked_bytes / stats.packed_bytes < 2
    assert optimizer.state[net.wide]["exp_avg"].dtype == torch.bfloat16


def test_an_optimizer_that_cannot_be_split_is_left_alone() -> None:
    net = nn.Linear(64, 64)
    optimizer = O.LBFGS(net.parameters(), max_iter=2)
    inputs = torch.randn(6, 64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss.backward()
        return loss

    executor = execute(net, plan_of([ACTION]))
    with pytest.warns(UserWarning, match="LBFGS is left as it is"):
        optimizer.step(closure)
    optimizer.step(closure)
    executor.detach()


def test_groups_that_come_later() -> None:
    net, other = build("cpu"), nn.Linear(64, 64)
    net.other = other
    optimizer = O.AdamW([p for name, p in net.named_parameters() if "other" not in name])
    with attached(net, "cpu", None) as executor:
        step(net, optimizer, 0)
        before = executor.stats().transfers["optimizer"].packed_bytes
        optimizer.add_param_group({"params": list(other.parameters())})
        other(torch.randn(2, 64)).sum().backward()
        step(net, optimizer, 1)
        assert executor.stats().transfers["optimizer"].packed_bytes > before
