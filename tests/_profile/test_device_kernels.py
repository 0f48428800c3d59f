"""Rehearsals take a card's kernels in their own thread: a thread that trains beside them computes as it always does."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memscale._profile import kernels_in_place
from memscale._profile.device_kernels import OPENED
from memscale._profile.inputs import Inputs
from memscale._profile.kernels_in_place import gpu_kernels, sequences_unpacked
from memscale._profile.rehearsal import FakeRehearsal

PAUSE_S = 60.0
"""Only a test that fails waits so long."""


class Beside:
    """Pauses a rehearsal at a point in its forward, for as long as another thread does something."""

    def __init__(self) -> None:
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()

    def pause(self) -> None:
        self.is_reached.set()
        assert self.may_go_on.wait(PAUSE_S)

    def run(self, rehearse: Callable[[], Any], beside: Callable[[], Any]) -> tuple[Any, Any]:
        """What `beside` gives in this thread while the rehearsal in another thread is at its pause; what that gives."""
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(rehearse()))
        thread.start()
        try:
            assert self.is_reached.wait(PAUSE_S)
            answer = beside()
        finally:
            self.may_go_on.set()
            thread.join()
        return answer, results[0]


BESIDE = Beside()


@pytest.fixture(autouse=True)
def _anew() -> None:
    global BESIDE
    BESIDE = Beside()


class Attending(nn.Module):
    """Dropout and attention as models call them, once in a checkpoint of its own."""

    def __init__(self, is_rehearsed: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.is_rehearsed = is_rehearsed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self._own, x, use_reentrant=False)
        if self.is_rehearsed:
            BESIDE.pause()
        return F.dropout(self.attention(x, x, x, need_weights=False)[0], 0.5)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        parts = F.dropout(self.project(x), 0.25).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts, dropout_p=0.5).transpose(1, 2).flatten(-2)


def train_once() -> list[torch.Tensor]:
    torch.manual_seed(5)
    model, x = Attending(), torch.randn(2, 6, 8)
    loss = model(x).square().sum()
    loss.backward()
    drawn = torch.rand(3)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == 6
    return [loss.detach(), drawn, *gradients]


def rehearse() -> int:
    rehearsal = FakeRehearsal(Attending(is_rehearsed=True), Inputs((torch.randn(2, 6, 8),), {}), "cuda")
    assert rehearsal.emulates_gpu
    return rehearsal.run().peak_bytes


def test_a_thread_that_trains_beside_a_rehearsal_computes_bit_for_bit_the_same() -> None:
    alone = train_once()
    beside, peak_bytes = BESIDE.run(rehearse, train_once)
    assert all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))
    assert peak_bytes > 0


def test_the_rehearsal_itself_is_the_same_beside_a_thread_that_trains() -> None:
    BESIDE.may_go_on.set()
    alone = rehearse()
    assert BESIDE.run(rehearse, train_once)[1] == alone


def test_what_the_kernels_are_replaced_by_is_not_called_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: set[int] = set()
    for name in ("fused_dropout", "efficient_attention"):
        monkeypatch.setattr(kernels_in_place, name, _noting(callers, getattr(kernels_in_place, name)))
    _, rehearser = BESIDE.run(lambda: (rehearse(), threading.get_ident())[1], train_once)
    assert callers == {rehearser}


def _noting(callers: set[int], function: Any) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        callers.add(threading.get_ident())
        return function(*args, **kwargs)

    return noting


def test_a_recompute_takes_the_cards_kernels_too() -> None:
    """A backward pass runs without the function modes of its caller."""
    seen: list[str] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x.exp(), 0.5)
        seen.append(y.grad_fn.name() if y.grad_fn is not None else "none")
        return y.square()

    with gpu_kernels():
        checkpoint(block, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == ["NativeDropoutBackward0"] * 2


def test_transformers_finds_packed_sequences_in_other_threads() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    original = masking.find_packed_sequence_indices

    def unpacked() -> Any:
        with sequences_unpacked():
            BESIDE.pause()
            return masking.find_packed_sequence_indices(packed)

    beside, inside = BESIDE.run(unpacked, lambda: masking.find_packed_sequence_indices(packed))
    assert inside is None
    assert beside is not None
    assert masking.find_packed_sequence_indices is original


class Drawing(nn.Module):
    """Asks Python and NumPy for numbers, as layer drop does."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        BESIDE.pause()
        is_kept = random.random() > 0.5 and numpy.random.rand() > 0.5 and numpy.random.uniform(0, 2) > 1
        return self.project(x) if is_kept else x + self.project.bias


def draw() -> list[float]:
    random.seed(3)
    numpy.random.seed(3)
    return [
        random.random(),
        random.uniform(1, 2),
        numpy.random.rand(),
        *numpy.random.uniform(0, 1, 2),
        numpy.random.random(),
    ]


def test_a_thread_beside_a_rehearsal_draws_numbers_of_its_own() -> None:
    def rehearse() -> bool:
        rehearsal = FakeRehearsal(Drawing(), Inputs((torch.randn(2, 4),), {}), "cpu")
        rehearsal.run()
        return rehearsal.values.was_draw_asked

    alone = draw()
    beside, was_draw_asked = BESIDE.run(rehearse, draw)
    assert beside == alone
    assert was_draw_asked


# ---- what kernels allocate inside themselves; the figures are those of the emulated card

_aten = torch.ops.aten


def test_a_safe_softmax_is_the_same_in_its_operators() -> None:
    scores = torch.randn(2, 3, 5, 5).masked_fill(torch.ones(5, 5).triu(0).bool(), float("-inf"))
    opened = OPENED[_aten._safe_softmax.default](scores, -1)
    assert torch.equal(opened, _aten._safe_softmax(scores, -1))
    assert opened[0, 0, 0].eq(0).all(), "its first row is masked as a whole"


@pytest.mark.parametrize(("is_causal", "mask"), [(True, None), (False, None), (False, torch.ones(6, 6).tril().bool())])
def test_attention_of_grouped_queries_in_full_precision(is_causal: bool, mask: torch.Tensor | None) -> None:
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    expected = F.scaled_dot_product_attention(query, key, key, mask, is_causal=is_causal, enable_gqa=True)
    with gpu_kernels():
        found = F.scaled_dot_product_attention(query, key, key, mask, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(found, expected)


def test_rms_norm_saves_its_input_and_a_number_a_row_as_on_a_card() -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    norm = nn.RMSNorm(1024)
    x = torch.ones(64, 1024, requires_grad=True)
    with gpu_kernels(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = norm(x)
        output.sum().backward()
    assert [tuple(tensor.shape) for tensor in saved] == [(64, 1024), (1024,), (64, 1)]
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert (x.grad.shape, norm.weight.grad.shape) == (x.shape, norm.weight.shape)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # PyTorch's own, once in a process
def test_rms_norm_of_two_types_runs_its_operators() -> None:
    norm = nn.RMSNorm(8)
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    plain = norm(x)
    with gpu_kernels():
        assert torch.equal(norm(x), plain)
