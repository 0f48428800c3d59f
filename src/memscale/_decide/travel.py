"""How tensors travel between a device and the next tier: beside compute, or with everything waiting. No torch.

    first, *others = travels(config, hardware)      # in the order in which they are tried

NOTE [two ways]: transfers that overlap with compute are faster, and need device memory for what is on its way. Where
the user leaves it to us, plans overlap; they block where only that fits the budget, or where it is predicted to be
faster: what needs less memory may need to send less away. `_planning/planner.py` looks into both as far as it must.
Where there is room for them, windows may be wider than they are by default (`wider`).

NOTE [how far ahead]: weights that are fetched two layers ahead take the device memory of one layer more than those that
are fetched one ahead, and hardly come earlier. The link is as busy either way: it only begins one layer sooner, where a
few streamed layers follow others. By simgpu's clock that is at most 1.1 % of the passes, and more than two ahead gains
nothing (`python -m benchmarks.ahead`). So a plan fetches two ahead where there is room, and one ahead (`one_ahead`)
where that lets it fit, or makes it faster, because it needs to send less away, by more than that. Times are predicted
as if weights came in time.
"""

from __future__ import annotations

import dataclasses

from memscale._config import AsyncOffloadConfig, Config
from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._hardware import Hardware
from memscale._plan import OPTIMIZER_BUCKET_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Travel:
    """One way in which tensors travel."""

    overlaps: bool
    """Transfers run beside compute; else everything waits for them."""
    transfers: AsyncOffloadConfig
    bucket_bytes: int = OPTIMIZER_BUCKET_BYTES
    """Bytes of parameters whose state comes and leaves together. No config says them: a plan's actions do."""

    def in_buckets_of(self, num_bytes: int) -> Travel:
        """The same, with state in buckets of this size."""
        return dataclasses.replace(self, bucket_bytes=num_bytes)

    def fetching_ahead(self, num_layers: int) -> Travel:
        """The same, with weights fetched so many layers ahead of their use."""
        return dataclasses.replace(self, transfers=dataclasses.replace(self.transfers, prefetch_depth=num_layers))

    def said_in(self, config: Config) -> Config:
        """The config, with this way and no other."""
        return config.travelling(overlaps=self.overlaps, transfers=self.transfers)


def travels(config: Config, hardware: Hardware) -> tuple[Travel, ...]:
    """The ways that a plan may take, the one that is tried first at the front. See NOTE [two ways].

    A device without streams has nothing to overlap with: there transfers block, unless the user asks for threads.
    """
    transfers = config.async_config or AsyncOffloadConfig()
    if config.async_offload is not None:
        return (Travel(config.async_offload, transfers),)
    blocking = Travel(False, transfers)
    return (Travel(True, transfers), blocking) if hardware.has_streams else (blocking,)


def wider(model: CostModel, travel: Travel, config: Config) -> Travel | None:
    """The same with windows as large as what one block saves; None where they are, or where the user says their size.

    See NOTE [far apart] in spaced.py.
    """
    sent = model.sent_by_blocks(RunOptions())
    largest = max((one.num_bytes for one in sent.values()), default=0)
    windows = travel.transfers.window_bytes, travel.transfers.prefetch_bytes
    if config.async_config is not None or not model.window_bytes or largest <= min(windows):
        return None
    window_bytes, prefetch_bytes = (max(size, largest) for size in windows)
    transfers = dataclasses.replace(travel.transfers, window_bytes=window_bytes, prefetch_bytes=prefetch_bytes)
    return dataclasses.replace(travel, transfers=transfers)


def one_ahead(travel: Travel, config: Config) -> Travel | None:
    """The same with weights that are fetched one layer ahead; None where they are, or where the user says how far.

    See NOTE [how far ahead].
    """
    if config.async_config is not None or not travel.overlaps or travel.transfers.prefetch_depth == 1:
        return None
    return travel.fetching_ahead(1)


def one_layer_bytes(model: CostModel, choice: Choice) -> int:
    """The weights of the largest layer that the choice streams: so much less is there if one less is on its way."""
    sizes = [model.blocks[fqn].param_bytes for fqn, treatment in choice.blocks if treatment.streams]
    rest_bytes = model.profile.rest_param_bytes if choice.run.streams_rest else 0
    return max(rest_bytes, *sizes, 0)


def most_in_flight_bytes(model: CostModel, travel: Travel) -> int:
    """What overlapping can add to the peak of a plan at most: all windows full, with the largest of all layers."""
    if not travel.overlaps:
        return 0
    transfers, optimizer = travel.transfers, model.profile.optimizer
    largest = max((layer.param_bytes for layer in model.blocks.values()), default=0)
    rest = model.profile.rest_param_bytes
    visiting = (transfers.prefetch_depth + 1) * max(largest, rest)  # the last layer stays until its backward
    return 2 * transfers.window_bytes + transfers.prefetch_bytes + visiting + (optimizer.offloaded_step_bytes or 0)
