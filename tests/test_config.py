"""Config: frozen, keyword-only, validated once; the message names the field, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import yaml

from memscale import AsyncOffloadConfig, Config, ConfigError, OptimizationMode

pytestmark = pytest.mark.unit
TECHNIQUES = (
    "enable_checkpointing",
    "enable_offloading",
    "enable_tiling",
    "enable_kept_offload",
    "enable_gradient_offload",
    "use_mixed_precision",
    "use_8bit_optimizer",
)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("conservative", (True, False, False, False, False, False, False)),
        ("balanced", (True, True, False, False, False, False, False)),
        ("aggressive", (True, True, True, False, False, True, True)),
    ],
)
def test_modes(mode: str, expected: tuple[bool, ...]) -> None:
    config = Config(mode=mode)
    assert tuple(getattr(config, name) for name in TECHNIQUES) == expected


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
    ("memory_budget_gb", -math.inf),
    ("memory_budget_gb", 1e300),
    ("memory_budget_gb", 2e9),
    ("max_cpu_offload_gb", 1e300),
    ("max_cpu_offload_gb", math.inf),
    ("max_cpu_offload_gb", -0.5),
    ("max_cpu_offload_gb", math.nan),
    ("target_gpu_utilization", 0),
    ("target_gpu_utilization", 1.0001),
    ("target_gpu_utilization", -0.1),
    ("target_gpu_utilization", math.nan),
    ("target_gpu_utilization", None),
    ("observability_port", -1),
    ("observability_port", 65536),
    ("observability_port", True),
    ("observability_port", "9000"),
    ("observability_host", ""),
    ("observability_host", None),
    ("warmup_steps", -1),
    ("warmup_steps", 1.5),
    ("warmup_steps", True),
    ("force_optimize", "yes"),
    ("force_optimize", None),
    ("enable_checkpointing", 1),
    ("enable_logging", 0),
    ("async_config", {"prefetch_depth": 2}),
    ("async_offload", "yes"),
    ("async_offload", 1),
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


@pytest.mark.parametrize("digits", [20, 400, 5000], ids=str)
@pytest.mark.parametrize(
    "name", ["memory_budget_gb", "max_cpu_offload_gb", "target_gpu_utilization", "warmup_steps", "observability_port"]
)
def test_numbers_beyond_all_bounds_are_named_in_few_words(name: str, digits: int) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Config(**{name: 10**digits})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["pinned_pool_bytes", "prefetch_depth", "window_bytes", "num_transfer_streams"])
@pytest.mark.parametrize("value", [2**63, 10**400])
def test_counts_beyond_64_bits(name: str, value: int) -> None:
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


def test_what_was_set_by_name_is_not_what_the_mode_says_though_the_value_is_the_same() -> None:
    """Another mode, or a card without 16 bits, treats the two differently: a plan for one is none for the other."""
    by_mode, by_name = Config(mode="aggressive"), Config(mode="aggressive", use_mixed_precision=True)
    assert by_mode.use_mixed_precision is by_name.use_mixed_precision is True
    assert by_mode != by_name
    assert len({by_mode, by_name, by_name.replace()}) == 2


def test_paths_and_devices_become_text() -> None:
    config = Config(device=torch.device("cpu"), offload_dir=pathlib.Path("/tmp/x"), log_file=pathlib.Path("a.log"))
    assert (config.device, config.offload_dir, config.log_file) == ("cpu", "/tmp/x", "a.log")


@pytest.mark.parametrize("mode", [mode.value for mode in OptimizationMode])
def test_a_config_is_wishes_alone(mode: str, tmp_path: pathlib.Path) -> None:
    """Nothing is imported, detected, measured or written when one is made or changed."""
    code = (
        "import sys; sys.modules['torch'] = None; from memscale import Config; "
        f"Config(mode={mode!r}, memory_budget_gb=8).replace(warmup_steps=1); "
        "assert 'memscale._hardware' not in sys.modules"
    )
    environment = os.environ | {"MEMSCALE_CACHE_DIR": str(tmp_path / "cache"), "MEMSCALE_MEASURE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert not list(tmp_path.iterdir())


def test_the_yaml_of_the_guide_is_a_config() -> None:
    guide = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "huggingface.md"
    settings = yaml.safe_load(guide.read_text().split("```yaml\n")[1].split("```")[0])
    assert Config(**settings["memscale"]) == Config(mode="balanced", memory_budget_gb=8)
