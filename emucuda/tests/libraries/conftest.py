"""Libraries whose own kernels need a card: `make cuda-libraries`, which installs them beside the CUDA build of PyTorch.

Kernels compute nothing there, so losses are no numbers to compare: that is done where they compute.
"""

import importlib.util
import pathlib

import pytest

import emucuda

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


def pytest_configure(config):
    if not emucuda.is_active():
        raise pytest.UsageError(__doc__)


@pytest.fixture
def example():
    """Loads one of the examples by its name."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
