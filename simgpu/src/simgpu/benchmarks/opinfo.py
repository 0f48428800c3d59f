"""Every operator of torch's OpInfo database on simgpu against the CPU: forward and gradient, float32.

An operator counts as equal if the first samples (four each) give results on the device with the CPU's values and
gradients. What is not tried and what is known to differ stands in opinfo_exceptions.json, with the reasons.
"""

import collections
import dataclasses
import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import simgpu  # noqa: F401  registers the device

BAR = 0.99
_SAMPLES = 4
_EXCEPTIONS: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "opinfo_exceptions.json").read_text())


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    status: str
    """equal, not tried, or what went wrong"""


def operators() -> list[Any]:
    """The OpInfo database, in its own order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def why_not_tried(op: Any) -> str | None:
    """The reason from the exceptions file, or None if the operator is to be tried."""
    if torch.float32 not in op.dtypes:
        return "no float32 samples"
    for part, reason in _EXCEPTIONS["not tried, by part of the name"].items():
        if part in op.name:
            return reason
    return _EXCEPTIONS["not tried"].get(full_name(op))


def known_difference(name: str) -> str | None:
    return _EXCEPTIONS["known to differ"].get(name)


def check(op: Any) -> Outcome:
    """Runs the operator's first samples on both devices."""
    name = full_name(op)
    if why_not_tried(op):
        return Outcome(name, "not tried")
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for sample in itertools.islice(samples, _SAMPLES):
        try:
            torch.manual_seed(0)
            expected = op(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
            continue  # a sample that the CPU refuses says nothing about the device
        try:
            _compare(op, sample, expected)
        except Exception as error:  # whatever goes wrong on the device is the finding
            return Outcome(name, f"{type(error).__name__}: {error}".splitlines()[0][:160])
    return Outcome(name, "equal")


def _compare(op: Any, sample: Any, expected: Any) -> None:
    torch.manual_seed(0)
    device_input = tree_map(_to_device, sample.input)
    actual = op(device_input, *tree_map(_to_device, sample.args), **tree_map(_to_device, sample.kwargs))
    expected_tensors, actual_tensors = _tensors(expected), _tensors(actual)
    assert len(expected_tensors) == len(actual_tensors), "another number of results"
    for want, have in zip(expected_tensors, actual_tensors, strict=True):
        assert have.device.type == "simgpu", f"a result is on {have.device}"
        _assert_close(have, want)
    if op.supports_autograd:
        _compare_gradients(sample.input, device_input, expected_tensors, actual_tensors)


def _compare_gradients(
    host: Any, device: Any, expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]
) -> None:
    host_leaf, device_leaf = _differentiable(_tensors(host)), _differentiable(_tensors(device))
    host_results, device_results = _differentiable(expected), _differentiable(actual)
    if not (host_leaf and device_leaf and host_results):
        return
    assert len(host_results) == len(device_results), "another number of differentiable results"
    want = _gradient(host_results, host_leaf[0])
    have = _gradient(device_results, device_leaf[0])
    assert (want is None) == (have is None), "a gradient is missing"
    if want is not None and have is not None:
        _assert_close(have, want)


def _gradient(results: Iterable[torch.Tensor], leaf: torch.Tensor) -> torch.Tensor | None:
    total = torch.stack([result.sum().cpu() for result in results]).sum()
    return torch.autograd.grad(total, leaf, allow_unused=True)[0]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _differentiable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()]


def _assert_close(have: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(have.detach().cpu(), want.detach(), equal_nan=True, check_stride=False)


def _to_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("simgpu").requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return torch.device("simgpu")
    return value


def sweep(ops: Sequence[Any], progress: bool = False) -> list[Outcome]:
    """Checks them all, quietly about torch's own warnings."""
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch's own test database
        for number, op in enumerate(ops):
            outcomes.append(check(op))
            if progress and number % 100 == 99:
                print(f"{number + 1} of {len(ops)} operators", file=sys.stderr, flush=True)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> tuple[int, int, list[Outcome]]:
    """(tried, equal, the others)"""
    counts = collections.Counter(outcome.status in ("equal", "not tried") for outcome in outcomes)
    tried = [outcome for outcome in outcomes if outcome.status != "not tried"]
    different = [outcome for outcome in tried if outcome.status != "equal"]
    assert counts[False] == len(different)
    return len(tried), len(tried) - len(different), different


def main(only: str | None) -> int:
    torch.set_num_threads(1)
    started = time.monotonic()
    ops = [op for op in operators() if not only or only in full_name(op)]
    tried, equal, different = summary(sweep(ops, progress=True))
    for outcome in different:
        reason = known_difference(outcome.name)
        print(f"{outcome.name}: {outcome.status} [{reason or 'NOT LISTED'}]")
    seconds = time.monotonic() - started
    print(f"{equal} of {tried} operators tried are equal to the CPU ({equal / max(tried, 1):.2%}), {seconds:.0f} s")
    return int(equal < BAR * tried or any(known_difference(outcome.name) is None for outcome in different))
