"""What there is to spend: `Hardware`, detected on this machine or looked up by a card's name.

The data is plain and needs no torch; only `Hardware.detect` loads it (`detect.py`). GB = 1e9 bytes.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from memscale._errors import ConfigError, shown
from memscale._hardware.cards import KNOWN_CARDS, Card, find_card
from memscale._hardware.footprints import footprint_of
from memscale._hardware.host import host_memory

if TYPE_CHECKING:
    import torch

_MATMUL_EFFICIENCY = 0.6
"""The share of nominal throughput that dense matrix products reach."""
HALF_MATMUL_EFFICIENCY = 0.85
MEMORY_EFFICIENCY = 0.6
"""The same of products in 16 bits, and the share of nominal bandwidth that all other operators reach. Fitted to the
published step times of transformers on an RTX 3090: docs/results/published_times.md."""
LAUNCH_S = 5e-6
"""What each operator that the host gives to a GPU costs the host."""
_HOST_BYTES_PER_S = 1.2e10
PAGEABLE_BYTES_PER_S = 8e9
"""The bandwidth between host memory that is not pinned and a GPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """The device that computes, the host beside it and the disk below, as numbers.

        here = memscale.Hardware.detect()
        there = memscale.Hardware.from_name("RTX 3090")
        print(memscale.estimate(model, batch, hardware=there).recommended_mode)

    `detect` reads this machine, `from_name` a table of published figures.

    Raises:
        ConfigError: A number of bytes is negative, or a speed is not above zero: no step could be counted with it.
    """

    device_type: str
    device_name: str
    device_count: int
    total_bytes: int
    """Memory of one device; on a CPU-only machine RAM, or the control group's limit when lower."""
    free_bytes: int
    """What this process may hold in all: free memory and what it holds already. Others have the rest."""
    architecture: str
    supports_bf16: bool
    supports_fp16: bool
    has_fast_16bit: bool
    """16-bit math is really faster here, not merely possible."""
    unified_memory: bool
    """Device and host share one memory, so offloading to the host gains nothing."""
    host_total_bytes: int
    """RAM, or the control group's limit when lower."""
    host_available_bytes: int
    disk_free_bytes: int | None
    """Free space of `offload_dir`; None without one."""
    fp32_flops: float
    half_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """The bandwidth to the next tier: the host link of a GPU, the disk of a CPU."""
    blocking_link_bytes_per_s: float | None = None
    """The same for transfers that wait, whose host memory is not pinned; None: no slower."""
    link_directions: int = 2
    """2: to the next tier and back at once; 1: by turns."""
    launch_s: float = 0.0
    """What an operator costs the host before the device can begin with it; 0 on a CPU, where `_decide`
    counts calls."""
    matmul_efficiency: float = _MATMUL_EFFICIENCY
    """The share of the throughput above that dense matrix products reach."""
    half_matmul_efficiency: float | None = None
    """The same in 16 bits; None: the same."""
    memory_efficiency: float | None = None
    """The share of `memory_bytes_per_s` that operators reach which do little arithmetic; None: all of it."""
    host_bytes_per_s: float | None = _HOST_BYTES_PER_S
    """The optimizer's step over parameters that live on the host; None: a simulated clock that does not count it."""
    has_one_host_thread: bool = False
    """A simulated clock that knows one: while a gradient arrives in host memory, nothing is launched."""
    present: bool = True
    """False for a card from the table that need not be in this machine."""
    has_caching_allocator: bool = False
    """PyTorch reserves memory here in segments and keeps them, as on CUDA: a plan is then held to reserved bytes."""
    context_bytes: int = 0
    """What the driver takes for a process, by architecture; 0 where nothing is known to be taken."""
    num_multiprocessors: int = 80
    """How many a GPU has: how much memory some kernels take inside themselves depends on it."""
    workspace_bytes: int = 0
    """What each thread that multiplies matrices takes, by architecture."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and "None" in str(field.type):
                continue
            if field.name.endswith(("_per_s", "_flops", "_efficiency")):
                _check_number(field.name, value, "above 0", isinstance(value, int | float) and 0 < value <= sys.maxsize)
            elif field.name.endswith("_bytes"):
                _check_number(field.name, value, "of bytes", isinstance(value, int) and 0 <= value <= sys.maxsize)

    @property
    def has_streams(self) -> bool:
        """Whether copies to the next tier can run beside compute, as on PyTorch's accelerators."""
        return self.device_type != "cpu" and not self.unified_memory

    @property
    def held_bytes(self) -> int:
        """What this process cannot have: its own context and what others hold. Read from a card that is present."""
        return max(0, self.total_bytes - self.free_bytes)

    @classmethod
    def detect(cls, device: str | torch.device | None = None, offload_dir: str | None = None) -> Hardware:
        """Read this machine.

            print(memscale.Hardware.detect().describe())

        Args:
            device: The device that is to compute; None: the machine's accelerator if it has one, else the CPU.
            offload_dir: A directory on the disk that tensors may wait on; None: there is no disk tier.

        Returns:
            What there is to spend, with figures of speed that were measured or that the card's table says.

        Raises:
            ConfigError: PyTorch knows no such device, or this machine has none.
        """
        from memscale._hardware.detect import detect_hardware  # loads torch, which the data does without

        return detect_hardware(device, offload_dir)

    @classmethod
    def from_name(cls, name: str) -> Hardware:
        """A known card with this machine's host beside it, both idle.

            card = memscale.Hardware.from_name("RTX 3090")

        Args:
            name: The name of a card, as `memscale estimate --gpu` takes it.

        Returns:
            The card's memory and speeds; it need not be in this machine.

        Raises:
            ConfigError: No such card is known; the message lists those that are.
            TypeError: The name is not a string.
        """
        card = _known_card(name)
        host_total, _ = host_memory()
        footprint = footprint_of(card.architecture)
        return cls(
            device_type="cuda",
            device_name=card.name,
            device_count=1,
            total_bytes=card.total_bytes,
            free_bytes=card.total_bytes - footprint.context_bytes,
            architecture=card.architecture,
            supports_bf16=card.bf16,
            supports_fp16=True,
            has_fast_16bit=card.half_flops > card.fp32_flops,
            unified_memory=False,
            host_total_bytes=host_total,
            host_available_bytes=host_total,
            disk_free_bytes=None,
            fp32_flops=card.fp32_flops,
            half_flops=card.half_flops,
            memory_bytes_per_s=card.memory_bytes_per_s,
            link_bytes_per_s=card.link_bytes_per_s,
            blocking_link_bytes_per_s=min(card.link_bytes_per_s, PAGEABLE_BYTES_PER_S),
            launch_s=LAUNCH_S,
            half_matmul_efficiency=HALF_MATMUL_EFFICIENCY,
            memory_efficiency=MEMORY_EFFICIENCY,
            present=False,
            has_caching_allocator=True,
            context_bytes=footprint.context_bytes,
            num_multiprocessors=card.num_multiprocessors,
            workspace_bytes=footprint.workspace_bytes,
        )

    def describe(self) -> str:
        """One line for people."""
        maths = [name for name, has in (("bf16", self.supports_bf16), ("fp16", self.supports_fp16)) if has]
        return (
            f"{self.device_name} ({self.device_type}, {self.architecture}): "
            f"{self.total_bytes / 1e9:.1f} GB, {self.free_bytes / 1e9:.1f} GB free; "
            f"host {self.host_available_bytes / 1e9:.1f} GB available; {' and '.join(maths) or 'no 16-bit math'}"
        )


def _check_number(name: str, value: object, what: str, is_allowed: bool) -> None:
    if isinstance(value, bool) or not is_allowed:
        raise ConfigError(f"{name}={shown(value)} is not allowed; it must be a number {what}")


def _known_card(name: object) -> Card:
    if not isinstance(name, str):
        raise TypeError(f"Hardware.from_name takes the name of a card as a string, not {type(name).__name__}")
    card = find_card(name)
    if card is None:
        known = ", ".join(card.name for card in KNOWN_CARDS)
        raise ConfigError(f"no card called {shown(name)} is known; known are: {known}")
    return card
