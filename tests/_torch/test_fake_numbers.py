"""Numbers that an optimizer reads from fake tensors."""

from __future__ import annotations

import pytest
import torch

from memscale._profile.optimizer_twin.books import Books
from memscale._profile.segments import FakeRecorder
from memscale._torch import private
from memscale._torch.fake_numbers import AnyValue

pytestmark = pytest.mark.unit


def test_fake_numbers_are_read_as_a_half_and_real_ones_as_they_are() -> None:
    with private.fake_tensor_mode():
        fake, count = torch.ones(()), torch.ones((), dtype=torch.long)
    real = torch.tensor(3.0)
    with AnyValue():
        assert (fake.item(), float(fake), count.item()) == (0.5, 0.5, 0.5)
        assert (real.item(), float(real)) == (3.0, 3.0)


def test_no_answer_of_yes_or_no_is_made_up() -> None:
    with private.fake_tensor_mode():
        is_large = torch.ones(()) > 2
    with AnyValue(), pytest.raises(RuntimeError, match="_local_scalar_dense"):
        bool(is_large)


def test_whoever_keeps_books_of_an_optimizer_reads_numbers_so_and_counts_nothing() -> None:
    books, recorder = Books("cpu", 1), FakeRecorder("cpu", 1)
    with private.fake_tensor_mode():
        fake = torch.ones(())
    with books:
        assert fake.item() == 0.5
    assert books.work.num_launches == 0
    recorder.reads_any_number = True
    with recorder:
        assert fake.item() == 0.5
    recorder.reads_any_number = False
    with recorder, pytest.raises(RuntimeError, match="_local_scalar_dense"):
        fake.item()
