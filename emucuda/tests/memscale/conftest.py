"""MemScale on the card: `python -m emucuda --races --lag 100000 -m pytest emucuda/tests/memscale`, from the repository.

A lag, because an event that is asked and found ready orders as much as one that is waited for.
"""

import pytest
import torch

import emucuda


def pytest_configure(config):
    if not emucuda.is_active():
        raise pytest.UsageError(__doc__)


@pytest.fixture(autouse=True)
def fresh():
    torch.cuda.synchronize()
    emucuda.take_reports()
