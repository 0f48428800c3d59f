"""The gradients of a cross-entropy by rows: the bits of PyTorch's own backward, in fewer bytes."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import simgpu  # noqa: F401  (registers the device)
from memscale._execute.executor import execute
from memscale._torch.each_operator import EachOperator
from memscale.techniques.loss_by_rows import LossByRows
from memscale.techniques.loss_by_rows.cross_entropy import ROWS, rows_of
from tests.lanes import in_turns
from tests.models import SUITE
from tests.parity import plan_of
from tests.techniques.offload.runs import let_autograd_finish, on, train, without_caches

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WIDTHS = [7, 1000, 1024, 4096, 30522]
NUM_ROWS, WIDTH, HIDDEN = 100, 600, 8


@pytest.fixture(autouse=True)
def _clean(no_races, no_leaks) -> Iterator[None]:
    yield
    let_autograd_finish()


class Scores(nn.Module):
    """A head alone: the loss is computed outside."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


@contextlib.contextmanager
def by_rows(model: nn.Module, chunk_bytes: int = 1) -> Iterator[None]:
    executor = execute(model, plan_of([LossByRows(chunk_bytes)]))
    try:
        yield
    finally:
        executor.detach()


def inputs(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_ROWS, HIDDEN, generator=generator).to(dtype)
    target = torch.randint(0, WIDTH, (NUM_ROWS,), generator=generator)
    target[::7] = -100
    return x.to(device), target.to(device)


def is_ours(loss: torch.Tensor) -> bool:
    """Among the last few nodes of its graph: a cast, a division, and the loss itself."""
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes[:4]:
        nodes += [behind for behind, _ in node.next_functions if behind is not None]
    return any("_ByRows" in node.name() for node in nodes)


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(mine.grad.cpu(), other.grad.cpu()), name


def pair(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Scores, Scores]:
    torch.manual_seed(1)
    model = Scores(dtype).to(device)
    return model, copy.deepcopy(model)


# ---- the bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_the_kernels_stand_by_themselves(dtype: torch.dtype, width: int) -> None:
    """What all of it rests on."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(3 * ROWS + 5, width, generator=generator).to(dtype)
    target = torch.randint(0, width, (len(logits),), generator=generator)
    target[4] = -100
    log_probabilities = aten._log_softmax(logits, 1, False)
    _, total = aten.nll_loss_forward(log_probabilities, target, None, 1, -100)
    upstream = torch.tensor(0.37, dtype=dtype)

    def gradient(part: slice) -> torch.Tensor:
        rows = log_probabilities[part]
        each = aten.nll_loss_backward(upstream, rows, target[part], None, 1, -100, total)
        return aten._log_softmax_backward_data(each, rows, 1, dtype)

    whole = gradient(slice(None))
    for size in (1, 3, ROWS, 2 * ROWS):
        parts = [gradient(slice(first, first + size)) for first in range(0, len(logits), size)]
        assert torch.equal(torch.cat(parts), whole)


REDUCTIONS = ["mean", "sum", "none"]


@pytest.mark.parametrize(("dtype", "reduction"), list(itertools.product(DTYPES, REDUCTIONS)))
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_those_of_the_whole(dtype: torch.dtype, reduction: str, device: str, weighted: bool) -> None:
    model, plain = pair(dtype, device)
    x, target = inputs(dtype, device)
    weight = torch.linspace(0.5, 2, WIDTH).to(device, dtype) if weighted else None
    losses = []
    with by_rows(model, chunk_bytes=2 * ROWS * WIDTH * dtype.itemsize):
        for one in (model, plain):
            loss = F.cross_entropy(one(x), target, weight, reduction=reduction)
            assert is_ours(loss) == (one is model)
            losses.append(loss.detach().cpu())
            (loss * torch.linspace(1, 3, loss.numel()).to(loss).view(loss.shape)).sum().backward()
    assert torch.equal(*losses)
    same_gradients(model, plain)


class Odd(nn.Module):
    """Logits that do not lie one row after the other, as a slice of a sequence and the transpose of a product."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "transposed":
            return (self.head.weight @ x.t()).t()
        return self.head(x)[::2] if self.kind == "strided" else self.head(x)[:, 1:]


@pytest.mark.parametrize("kind", ["transposed", "strided", "narrow"])
def test_logits_may_lie_anyhow(kind: str) -> None:
    torch.manual_seed(1)
    model = Odd(kind)
    plain = copy.deepcopy(model)
    x, target = inputs()
    target = target.clamp(max=WIDTH - 2)
    with by_rows(model):
        for one in (model, plain):
            logits = one(x)
            assert not logits.is_contiguous()
            loss = F.cross_entropy(logits, target[: len(logits)])
            assert is_ours(loss) == (one is model)
            loss.backward()
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)


@pytest.mark.parametrize(("name", "device"), in_turns(["gpt2", "bert", "llama"], ["cpu", "simgpu"]))
def test_models_with_their_own_loss_train_the_same(name: str, device: str) -> None:
    case = next(one for one in SUITE if one.name == name)
    torch.manual_seed(1)
    model = without_caches(case.build()).to(device)
    place = torch.device(device)
    theirs = train(copy.deepcopy(model), case, steps=3, device=place)
    with by_rows(model):
        train(model, case, steps=3, device=place).assert_same(theirs)
        assert is_ours(case.loss(model(**on(place, case.batch(0)))))


def test_a_graph_that_is_kept_can_be_gone_through_again() -> None:
    model, plain = pair()
    x, target = inputs()
    with by_rows(model):
        for one in (model, plain):
            loss = F.cross_entropy(one(x), target)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    same_gradients(model, plain)


def test_gradients_can_be_differentiated_again() -> None:
    model, plain = pair(torch.float64)
    x, target = inputs(torch.float64)
    with by_rows(model):
        for one in (model, plain):
            loss = F.cross_entropy(one(x), target)
            first = torch.autograd.grad(loss, list(one.parameters()), create_graph=True)
            (loss + sum(each.square().sum() for each in first)).backward()
    same_gradients(model, plain)


def test_several_gradients_can_be_taken_at_once() -> None:
    model, plain = pair()
    x, target = inputs()
    found = []
    with by_rows(model):
        for one in (model, plain):
            loss, scales = F.cross_entropy(one(x), target), torch.tensor([1.0, 2.0])
            assert is_ours(loss) == (one is model)
            found.append(torch.autograd.grad(loss, list(one.parameters()), scales, is_grads_batched=True))
    assert all(map(torch.equal, *found))


def test_who_holds_what_is_saved_finds_it_as_it_was() -> None:
    model, _ = pair()
    x, target = inputs()
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append((tensor, tensor.detach().clone()))
        return tensor

    with by_rows(model):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = F.cross_entropy(model(x), target)
        assert is_ours(loss)
        loss.backward()
    assert len(held) >= 4
    assert all(torch.equal(now, before) for now, before in held)


def test_a_pass_that_failed_half_way_is_not_taken_up_again() -> None:
    """Some log-probabilities are gradients by then: an error, never a wrong gradient."""
    model, _ = pair()
    x, target = inputs()
    calls: list[Any] = []

    def fail(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(op)
        if calls.count(aten.copy_.default) == 3:
            raise RuntimeError("out of memory")
        return op(*args, **kwargs)

    with by_rows(model):
        loss = F.cross_entropy(model(x), target)
        with EachOperator(fail), pytest.raises(RuntimeError, match="out of memory"):
            loss.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_loss_may_be_changed_in_place_and_logits_may_keep_their_gradient() -> None:
    model, plain = pair()
    x, target = inputs()
    kept = []
    with by_rows(model):
        for one in (model, plain):
            logits = one(x)
            logits.retain_grad()
            loss = F.cross_entropy(logits, target)
            loss /= 3
            loss.backward()
            kept.append(logits.grad)
    assert torch.equal(*kept)
    same_gradients(model, plain)


# ---- where it is not so


def losses_left_alone(logits: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "smoothed": F.cross_entropy(logits, target, label_smoothing=0.1),
        "probabilities": F.cross_entropy(logits, logits.detach().softmax(1)),
        "positions": F.cross_entropy(logits.view(10, 10, WIDTH).movedim(2, 1), target.view(10, 10)),
        "one row": F.cross_entropy(logits[0], target[1]),
        "few rows": F.cross_entropy(logits[:ROWS], target[:ROWS]),
        "old names": F.cross_entropy(logits, target, size_average=False),
    }


@pytest.mark.filterwarnings("ignore:size_average")
def test_what_the_kernels_are_not_for_is_left_to_pytorch() -> None:
    model, plain = pair()
    x, target = inputs()
    theirs = losses_left_alone(plain(x), target)
    with by_rows(model):
        ours = losses_left_alone(model(x), target)
        with pytest.raises(TypeError, match="argument"):
            F.cross_entropy(model(x), target, nonsense=1)
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
            F.cross_entropy(model(x), target, torch.ones(WIDTH, requires_grad=True))
        with torch.no_grad():
            assert F.cross_entropy(model(x), target).grad_fn is None
    for name, loss in ours.items():
        assert torch.equal(loss, theirs[name]), name
        assert not is_ours(loss), name


def test_losses_of_others_are_left_alone() -> None:
    model, other = pair()
    x, target = inputs()
    with by_rows(model):
        assert is_ours(F.cross_entropy(model(x).view(-1, WIDTH)[3:] * 2, target[3:]))
        assert not is_ours(F.cross_entropy(other(x), target))
    assert not is_ours(F.cross_entropy(model(x), target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype: torch.dtype) -> None:
    model, plain = pair()
    x, target = inputs()
    with by_rows(model):
        for one in (model, plain):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(one(x).to(dtype), target)
            assert is_ours(loss) == (one is model and dtype == torch.float32)
            loss.backward()
    same_gradients(model, plain)


def test_transforms_of_functions_see_pytorchs_own() -> None:
    model, _ = pair()
    x, target = inputs()
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)), target)

    plain = torch.func.grad(loss)(parameters)
    with by_rows(model):
        ours = torch.func.grad(loss)(parameters)
    assert all(torch.equal(ours[name], plain[name]) for name in parameters)


def test_a_compiler_sees_pytorchs_own() -> None:
    model, other = pair()
    x, target = inputs()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target)

    logits = model(x).detach().requires_grad_()
    with by_rows(model):
        compiled = torch.compile(loss, backend="eager", fullgraph=True)(logits)
    assert not is_ours(compiled)
    assert torch.equal(compiled, loss(other(x)))
    torch._dynamo.reset()


def test_everything_is_undone() -> None:
    before, model = F.cross_entropy, Scores()
    with by_rows(model):
        assert F.cross_entropy is not before
    assert F.cross_entropy is before
    assert "forward" not in vars(model)


@pytest.mark.parametrize("is_met", [True, False])
def test_a_loss_that_is_not_met_is_said_once(is_met: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = pair()
    x, target = inputs()
    with by_rows(model), caplog.at_level("WARNING", "memscale"):
        if is_met:  # though it has few rows
            F.cross_entropy(model(x)[:3], target[:3]).backward()
        for _ in range(12):
            (-model(x).log_softmax(1).gather(1, target.clamp(min=0)[:, None])).mean().backward()
    assert len(caplog.records) == (not is_met)
    assert ("enable_loss_by_rows=False" in caplog.text) is not is_met


# ---- the bytes


def peak_bytes(model: nn.Module, x: torch.Tensor, target: torch.Tensor, *, holds: bool) -> int:
    """Above what is there before the step. `holds`: the loop keeps the logits through backward."""
    accelerator = torch.accelerator
    accelerator.synchronize()
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    logits = model(x)
    loss = F.cross_entropy(logits, target)
    if not holds:
        del logits
    loss.backward()
    peak = accelerator.max_memory_allocated() - before
    model.zero_grad()
    return peak


@pytest.mark.parametrize(("holds", "whole", "in_rows"), [(False, 3, 2), (True, 4, 2)])
def test_one_tensor_is_there_where_three_were(holds: bool, whole: int, in_rows: int) -> None:
    """As many tensors of the logits' size; with 16 rows at a time what comes on top is small."""
    num_rows, width = 1024, 1024
    model = nn.Linear(HIDDEN, width).to("simgpu")
    x = torch.randn(num_rows, HIDDEN).to("simgpu")
    target = torch.randint(0, width, (num_rows,)).to("simgpu")
    logits_bytes, chunk_bytes = num_rows * width * 4, ROWS * width * 4
    plain = peak_bytes(model, x, target, holds=holds)
    with by_rows(model):
        ours = peak_bytes(model, x, target, holds=holds)
    assert 0 <= plain - whole * logits_bytes < chunk_bytes
    assert 0 <= ours - in_rows * logits_bytes <= 3 * chunk_bytes


def test_chunks_are_of_whole_sixteens() -> None:
    assert rows_of(1, torch.empty(1, 50257)) == ROWS
    assert rows_of(8 * 2**20, torch.empty(1, 50257)) == 32
    assert rows_of(8 * 2**20, torch.empty(1, 50257, dtype=torch.bfloat16)) == 80
