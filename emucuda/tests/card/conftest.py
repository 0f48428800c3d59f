"""These tests run on the card: `python -m emucuda --races --kernels -m pytest tests/card`."""

import gc

import pytest
import torch

import emucuda


def pytest_configure(config):
    if not emucuda.is_active():
        raise pytest.UsageError(__doc__)


@pytest.fixture(autouse=True)
def fresh():
    """No cache of an earlier test, no reports, peaks from here."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    emucuda.reset_peaks()
    emucuda.take_kernels()
    emucuda.take_reports()
