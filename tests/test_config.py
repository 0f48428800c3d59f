"""Config: frozen, keyword-only, validated once; the message names the field, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from memscale import AsyncOffloadConfig, Config, ConfigError, OptimizationMode

TECHNIQUES = (
    "enable_checkpointing",
    "enable_offloading",
    "enable_tiling",
    "use_mixed_precision",
    "use_8bit_optimizer",
)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("conservative", (True, False, False, False, False)),
        ("balanced", (True, True, False, False, False)),
        ("aggressive", (True, True, True, None, True)),
    ],
)
def test_modes(mode: str, expected: tuple[bool | None, ...]) -> None:
    config = Config(mode=mode)
    for name, value in zip(TECHNIQUES, expected, strict=True):
        if value is not None:
            assert getattr(config, name) is value
        else:  # as the hardware is
            assert isinstance(getattr(config, name), bool)


@pytest.mark.parametrize("mode", ["AGGRESSIVE", "Aggressive", OptimizationMode.AGGRESSIVE])
def test_modes_by_any_spelling(mode: Any) -> None:
    assert Config(mode=mode).mode is OptimizationMode.AGGRESSIVE


def test_defaults() -> None:
    config = Config()
    assert config.mode is OptimizationMode.BALANCED
    assert config.target_gpu_utilization == 0.85
    assert config.warmup_steps == 2
    assert config.enable_logging is True
    assert config.force_optimize is False
    for name in ("memory_budget_gb", "max_cpu_offload_gb", "offload_dir", "log_file", "observability_port", "device"):
        assert getattr(config, name) is None


@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize("mode", list(OptimizationMode))
@pytest.mark.parametrize("value", [True, False])
def test_an_explicit_value_wins_over_the_mode(name: str, mode: OptimizationMode, value: bool) -> None:
    config = Config(mode=mode, **{name: value})
    assert getattr(config, name) is value
    for other in OptimizationMode:
        assert getattr(config.replace(mode=other), name) is value


def test_replace_resolves_again_what_was_left_to_the_mode() -> None:
    assert Config(mode="conservative").replace(mode="balanced").enable_offloading is True
    assert Config(mode="conservative", enable_offloading=False).replace(mode="balanced").enable_offloading is False


BAD: list[tuple[str, Any]] = [
    ("mode", "fast"),
    ("mode", 3),
    ("mode", None),
    ("memory_budget_gb", -1),
    ("memory_budget_gb", 0),
    ("memory_budget_gb", math.nan),
    ("memory_budget_gb", math.inf),
    ("memory_budget_gb", "8"),
    ("memory_budget_gb", True),
    ("max_cpu_offload_gb", -0.5),
    ("max_cpu_offload_gb", math.nan),
    ("target_gpu_utilization", 0),
    ("target_gpu_utilization", 1.0001),
    ("target_gpu_utilization", -0.1),
    ("target_gpu_utilization", math.nan),
    ("target_gpu_utilization", None),
    ("observability_port", 0),
    ("observability_port", 65536),
    ("observability_port", "9000"),
    ("observability_port", 90.5),
    ("warmup_steps", -1),
    ("warmup_steps", 1.5),
    ("warmup_steps", True),
    ("force_optimize", "yes"),
    ("force_optimize", None),
    ("enable_checkpointing", 1),
    ("enable_logging", 0),
    ("async_config", {"prefetch_depth": 2}),
    ("log_file", 3),
    ("offload_dir", b"x"),
    ("device", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value))
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Config(**{name: value})
    assert isinstance(caught.value, ConfigError)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["pinned_pool_bytes", "prefetch_depth", "num_transfer_streams", "min_tensor_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_bad_async_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        AsyncOffloadConfig(**{name: value})


def test_unknown_fields_and_positions_are_type_errors() -> None:
    with pytest.raises(TypeError, match="memory_budget"):
        Config(memory_budget=8)
    with pytest.raises(TypeError):
        Config("balanced")


def test_frozen_and_comparable() -> None:
    config = Config(memory_budget_gb=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.memory_budget_gb = 9
    assert config == Config(memory_budget_gb=8)
    assert config != Config(memory_budget_gb=9)
    assert config.replace() == config


def test_paths_and_devices_become_text() -> None:
    config = Config(device=torch.device("cpu"), offload_dir=pathlib.Path("/tmp/x"), log_file=pathlib.Path("a.log"))
    assert (config.device, config.offload_dir, config.log_file) == ("cpu", "/tmp/x", "a.log")


def test_importing_and_building_a_config_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from memscale import Config; Config(memory_budget_gb=8)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_16_bit_math_left_to_the_mode_depends_on_the_hardware() -> None:
    left, said = Config(mode="aggressive"), Config(mode="aggressive", use_mixed_precision=False)
    assert left.resolved_for(has_fast_16bit=True).use_mixed_precision is True
    assert left.resolved_for(has_fast_16bit=False).use_mixed_precision is False
    assert not left.resolved_for(has_fast_16bit=True).asks_for("use_mixed_precision")
    assert said.resolved_for(has_fast_16bit=True).use_mixed_precision is False
    assert Config().resolved_for(has_fast_16bit=True).use_mixed_precision is False
