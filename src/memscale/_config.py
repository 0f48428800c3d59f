"""What the user wishes: `Config`, keyword-only, frozen, validated once."""

from __future__ import annotations

import copy
import dataclasses
import enum
import os
import re
from typing import Any, Literal

from memscale._errors import ConfigError, is_system_name, shown

_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:\d+)?")
_MAX_COUNT = 2**63 - 1
_MAX_PORT = 65535
_MAX_GB = 1e9
"""Budgets are counted in bytes, in 64 bits; no machine has an exabyte."""


class OptimizationMode(str, enum.Enum):
    """How far MemScale may go; an explicit `Config` field always wins over the mode.

        model = memscale.wrap(model, memscale.Config(mode=memscale.OptimizationMode.AGGRESSIVE))
        model = memscale.wrap(model, memscale.Config(mode="aggressive"))  # the same

    Each mode may do all that the one before it may.
    """

    CONSERVATIVE = "conservative"
    """Checkpointing, the optimizer's step in buckets and the loss by rows: exact, and the cheapest in time."""
    BALANCED = "balanced"
    """Checkpointing and offloading: exact."""
    AGGRESSIVE = "aggressive"
    """Everything: tiling, 16-bit math where it is fast, an 8-bit optimizer."""


_TECHNIQUES_OF_MODE: dict[OptimizationMode, dict[str, bool]] = {
    OptimizationMode.CONSERVATIVE: {
        "enable_checkpointing": True,
        "enable_offloading": False,
        "enable_bucketed_step": True,
        "enable_loss_by_rows": True,
        "step_in_backward": False,
        "enable_tiling": False,
        "enable_kept_offload": False,
        "enable_gradient_offload": False,
        "use_mixed_precision": False,
        "use_8bit_optimizer": False,
    },
    OptimizationMode.BALANCED: {
        "enable_checkpointing": True,
        "enable_offloading": True,
        "enable_bucketed_step": True,
        "enable_loss_by_rows": True,
        "step_in_backward": False,
        "enable_tiling": False,
        "enable_kept_offload": False,
        "enable_gradient_offload": False,
        "use_mixed_precision": False,
        "use_8bit_optimizer": False,
    },
    OptimizationMode.AGGRESSIVE: {
        "enable_checkpointing": True,
        "enable_offloading": True,
        "enable_bucketed_step": True,
        "enable_loss_by_rows": True,
        "step_in_backward": False,
        "enable_tiling": True,
        "enable_kept_offload": False,
        "enable_gradient_offload": False,
        "use_mixed_precision": True,  # a wish: planning follows it where the hardware has fast 16-bit math
        "use_8bit_optimizer": True,
    },
}


def modes_of(technique: str) -> frozenset[OptimizationMode]:
    """The modes that turn this switch on."""
    return frozenset(mode for mode, techniques in _TECHNIQUES_OF_MODE.items() if techniques[technique])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AsyncOffloadConfig:
    """How transfers between the device and the host overlap with compute.

        model = memscale.wrap(model, async_config=memscale.AsyncOffloadConfig(prefetch_depth=4))

    Without one, the plan chooses windows and depths from the budget. Each field says below what it bounds.

    Raises:
        ConfigError: A value is outside what is allowed; the message names the field and the range.
    """

    pinned_pool_bytes: int = 512 * 1024 * 1024
    """Pinned host memory through which transfers between a device and the disk go; beside `max_cpu_offload_gb`."""
    prefetch_depth: int = 2
    """How many layers ahead of their use parameters are fetched."""
    prefetch_bytes: int = 64 * 1024 * 1024
    """Device memory that activations fetched ahead of their use may take, beyond what is in use; 0: none are."""
    window_bytes: int = 64 * 1024 * 1024
    """Device memory that what is on its way out may still hold: activations and state, and gradients up to 32 MiB."""
    num_transfer_streams: int | None = None
    """Side streams; None: two where the device has two copy engines, else one."""
    min_tensor_bytes: int = 1024 * 1024
    """Smaller tensors stay on the device."""
    debug: bool = False
    """Compare every transferred tensor with what was sent, at some cost; a difference raises `OffloadError`."""

    def __post_init__(self) -> None:
        _check_int(self, "pinned_pool_bytes", minimum=1)
        _check_int(self, "prefetch_depth", minimum=1)
        _check_int(self, "prefetch_bytes", minimum=0)
        _check_int(self, "window_bytes", minimum=0)
        _check_int(self, "min_tensor_bytes", minimum=0)
        if self.num_transfer_streams is not None:
            _check_int(self, "num_transfer_streams", minimum=1)
        _check_bool(self, "debug")


_RECOVERED = (True, False, "forward", "plain")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What the user wishes. A technique left at `None` is set as the mode says, once, at construction.

        config = memscale.Config(mode="aggressive", memory_budget_gb=8.0, use_8bit_optimizer=False)
        model = memscale.wrap(model, config)

    Nothing is detected, measured or written here: what of it the hardware can follow is found out by planning. A config
    cannot be changed; `config.replace(memory_budget_gb=6.0)` is a copy with another budget. Each field says below what
    it means.

    Raises:
        ConfigError: A value is outside what is allowed; the message names the field, the value and the range.
    """

    mode: OptimizationMode = OptimizationMode.BALANCED
    """An `OptimizationMode` or its name in any case."""
    enable_checkpointing: bool | None = None
    """Recompute activations in backward instead of keeping them (exact)."""
    enable_offloading: bool | None = None
    """Let tensors wait on the host or on disk (exact)."""
    enable_bucketed_step: bool | None = None
    """Step a few parameters at a time, where the optimizer updates each by itself (exact)."""
    enable_loss_by_rows: bool | None = None
    """Make the gradients of a large cross-entropy a few rows at a time (exact)."""
    step_in_backward: bool | None = None
    """Step parameters as soon as their gradients are final, so that these never exist together (exact). No mode turns
    it on: gradients can then not be read, clipped, scaled or accumulated. Used wherever it is True."""
    enable_tiling: bool | None = None
    """Compute the largest tensors tile by tile (exact up to the order of summation)."""
    enable_kept_offload: bool | None = None
    """Let outputs that selective checkpoints keep wait on the next tier, too (exact). No mode turns it on."""
    enable_gradient_offload: bool | None = None
    """Let gradients wait in host memory between backward and the optimizer's step, where that is faster (exact). No
    mode turns it on: gradients can then not be read, clipped or scaled before the step."""
    use_mixed_precision: bool | None = None
    """Compute in bf16 or fp16. Where the mode says so, only on hardware that is faster in 16 bits."""
    use_8bit_optimizer: bool | None = None
    """Keep optimizer state in 8 bits."""
    allow_host_step: bool | None = None
    """Let the host's kernels step streamed parameters where that is faster or takes less. They compute by the same
    formula as the device's, and may round the last bit differently. None: where they do not (a simulated device)."""
    device: str | None = None
    """Where the model computes; None: where its parameters are."""
    max_cpu_offload_gb: float | None = None
    """Host RAM that offloading may use, in GB (1e9 bytes); None: what is available less a safe margin."""
    target_gpu_utilization: float = 0.85
    """The share of the device's memory that a plan may fill."""
    memory_budget_gb: float | None = None
    """A hard budget in GB (1e9 bytes); wins over the utilisation."""
    force_optimize: bool = False
    """Go as low as the mode allows, even when the model fits as it is."""
    offload_dir: str | None = None
    """A directory for the disk tier."""
    use_static_profiling: bool = True
    """Profile on fake tensors first: no memory, no data."""
    use_empirical_fallback: bool = True
    """Where fake tensors do not suffice, observe the user's first training steps; else that is an error."""
    recover_from_oom: bool | Literal["forward", "plain"] = "forward"
    """Where a training step runs out of device memory, tighten the plan and run the batch once more, where that is
    exact; else the error says why not: docs/guides/out_of_memory.md. "forward": failing forwards of models of plain
    code, which can be seen to keep nothing; "plain": their failing backwards, too; True: also models whose state can be
    compared and put back; False: never."""
    warmup_steps: int = 2
    """Training steps that are observed under a careful plan before the plan is made from them; at least one is."""
    enable_logging: bool = True
    """Show the hardware line and the plan."""
    log_file: str | None = None
    """Write them to this file as well."""
    observability_port: int | None = None
    """Serve Prometheus metrics on this port; 0: any that is free. Each further process of a node takes the next."""
    observability_host: str = "127.0.0.1"
    """The address to serve them on. Metrics are for anybody who can reach it."""
    verify_correctness: bool = False
    """Compare every recomputation with the first computation, bit for bit, and what comes back from the disk with what
    was written, by a checksum; raise where they differ."""
    async_offload: bool | None = None
    """Overlap transfers with compute. None: wherever the device has streams, unless blocking serves the budget better;
    the plan says which."""
    async_config: AsyncOffloadConfig | None = None
    """How transfers overlap with compute; None: the plan chooses."""
    auto_policy: bool | Literal["rule", "learned"] = False
    """Let a policy choose the mode, the techniques that are not set here, and what is worth rehearsing: "learned",
    "rule" for the rule table, or True for the best that there is, which is the learned one."""
    _explicit: frozenset[str] = dataclasses.field(default=frozenset(), init=False, repr=False)
    _withheld: frozenset[str] = dataclasses.field(default=frozenset(), init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("device", "offload_dir", "log_file"):
            _make_text(self, name)
        _set(self, "mode", _parse_mode(self.mode))
        _resolve_techniques(self)
        for name in _BOOLEAN_FIELDS:
            _check_bool(self, name)
        if self.allow_host_step is not None:
            _check_bool(self, "allow_host_step")
        if not isinstance(self.recover_from_oom, bool | str) or self.recover_from_oom not in _RECOVERED:
            raise _bad("recover_from_oom", self.recover_from_oom, 'True, False, "forward" or "plain"')
        if not isinstance(self.auto_policy, bool | str) or self.auto_policy not in (True, False, "rule", "learned"):
            raise _bad("auto_policy", self.auto_policy, 'True, False, "rule" or "learned"')
        for name in ("max_cpu_offload_gb", "memory_budget_gb"):
            _check_gb(self, name)
        if self.device is not None and not _DEVICE.fullmatch(self.device):
            raise _bad("device", self.device, 'a device like "cpu" or "cuda:0", or None')
        for name, what in (("offload_dir", "a directory"), ("log_file", "a file")):
            if getattr(self, name) is not None and not is_system_name(getattr(self, name)):
                raise _bad(name, getattr(self, name), f"{what}, or None")
        _check_share(self, "target_gpu_utilization")
        _check_int(self, "warmup_steps", minimum=0)
        _check_port(self, "observability_port")
        if not isinstance(self.observability_host, str) or not is_system_name(self.observability_host):
            raise _bad("observability_host", self.observability_host, 'an address like "127.0.0.1" or "0.0.0.0"')
        if self.async_offload is not None:
            _check_bool(self, "async_offload")
        if self.step_in_backward and self.asks_for("use_8bit_optimizer"):
            raise ConfigError(
                "step_in_backward=True and use_8bit_optimizer=True do not go together: state in 8 bits is unpacked for "
                "a step of all parameters, after backward. Set one of them to False"
            )
        if self.async_config is not None and not isinstance(self.async_config, AsyncOffloadConfig):
            raise _bad("async_config", self.async_config, "an AsyncOffloadConfig or None")

    @property
    def withheld(self) -> frozenset[str]:
        """Techniques, and treatments of blocks, by their names, that are not eligible though nobody has said so.

        The way in which a model is trained rules them out, or a policy does not find them worth a rehearsal.
        """
        return self._withheld

    def asks_for(self, technique: str) -> bool:
        """Whether this technique was set to True by name, not by the mode."""
        return technique in self._explicit and bool(getattr(self, technique))

    def under(self, mode: OptimizationMode, **techniques: bool) -> Config:
        """A copy as another mode says, with some techniques otherwise; what was set by name stays as it is."""
        wanted = {**_TECHNIQUES_OF_MODE[mode], **techniques}
        return self._changed(mode=mode, **{name: wanted[name] for name in wanted if name not in self._explicit})

    def travelling(self, *, overlaps: bool, transfers: AsyncOffloadConfig) -> Config:
        """A copy in which tensors travel in just this way, and nothing else is another."""
        return self._changed(async_offload=overlaps, async_config=transfers)

    def without(self, withheld: frozenset[str]) -> Config:
        """A copy in which these techniques and treatments are not eligible, whatever is wished."""
        return self if withheld == self._withheld else self._changed(_withheld=withheld)

    def _changed(self, **changes: Any) -> Config:
        """A copy of every field as it is, but for these; none of them becomes anybody's explicit wish."""
        changed = copy.copy(self)
        for name, value in changes.items():
            _set(changed, name, value)
        return changed

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed. Techniques that were left to the mode are resolved again.

            smaller = config.replace(memory_budget_gb=6.0)

        Args:
            changes: Fields and their new values.

        Returns:
            Another `Config`; this one stays as it is.

        Raises:
            ConfigError: A value is outside what is allowed.
            TypeError: There is no such field.
        """
        kept = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.init and (field.name not in SWITCHES or field.name in self._explicit)
        }
        return Config(**{**kept, **changes}).without(self._withheld)


SWITCHES = tuple(_TECHNIQUES_OF_MODE[OptimizationMode.BALANCED])
"""The fields that turn techniques on."""
_BOOLEAN_FIELDS = (
    *SWITCHES,
    "force_optimize",
    "use_static_profiling",
    "use_empirical_fallback",
    "enable_logging",
    "verify_correctness",
)


def _parse_mode(value: object) -> OptimizationMode:
    if isinstance(value, str):
        try:
            return OptimizationMode(value.lower())
        except ValueError:
            pass
    raise _bad("mode", value, "one of " + ", ".join(repr(mode.value) for mode in OptimizationMode))


def _resolve_techniques(config: Config) -> None:
    _set(config, "_explicit", frozenset(name for name in SWITCHES if getattr(config, name) is not None))
    for name, default in _TECHNIQUES_OF_MODE[config.mode].items():
        if getattr(config, name) is None:
            _set(config, name, default)


def _set(config: object, name: str, value: object) -> None:
    object.__setattr__(config, name, value)


def _make_text(config: Config, name: str) -> None:
    """`torch.device` and `pathlib.Path` are as good as their text; the text is what serialises."""
    value = getattr(config, name)
    if value is None or isinstance(value, str):
        return
    if isinstance(value, os.PathLike) and isinstance(os.fspath(value), str):
        _set(config, name, os.fspath(value))
    elif name == "device" and type(value).__name__ == "device":
        _set(config, name, str(value))
    else:
        raise _bad(name, value, "a string or None")


def _check_bool(config: object, name: str) -> None:
    if not isinstance(getattr(config, name), bool):
        raise _bad(name, getattr(config, name), "True or False")


def _check_int(config: object, name: str, *, minimum: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_COUNT:
        raise _bad(name, value, f"an integer from {minimum} up to 2**63 - 1")


def _check_port(config: Config, name: str) -> None:
    value = getattr(config, name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_PORT):
        raise _bad(name, value, f"an integer from 0 up to {_MAX_PORT}, or None")


def _check_gb(config: Config, name: str) -> None:
    value = getattr(config, name)
    if value is not None and not (_is_number(value) and 0 < value <= _MAX_GB):
        raise _bad(name, value, f"a number of GB above 0 and of at most {_MAX_GB:.0e}, or None")


def _check_share(config: Config, name: str) -> None:
    value = getattr(config, name)
    if not (_is_number(value) and 0 < value <= 1):
        raise _bad(name, value, "a number in (0, 1]")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bad(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={shown(value)} is not allowed; it must be {allowed}")
