"""A predicted step as a snapshot of PyTorch's caching allocator, for PyTorch's own viewer.

    path.write_bytes(step_snapshot(planner, (), config))                # of the unmodified model
    path.write_bytes(step_snapshot(planner, plan.actions, config))      # as a plan changes it

The file is what `torch.cuda.memory._dump_snapshot` writes after `_record_memory_history`: a pickle of dicts, lists,
numbers and strings. https://pytorch.org/memory_viz opens it, and `python -m torch.cuda._memory_viz trace_plot FILE`
makes a page of it. In the place of the Python frames that allocated something there are the operator, the module and
the part of the step. There is no clock: an event comes a microsecond after the one before it.
"""

from __future__ import annotations

import pickle
from typing import Any

from memscale._config import Config
from memscale._decide.allocator import CachingAllocator, Movement
from memscale._decide.allocator.blocks import Block, SegmentState
from memscale._decide.allocator.settings import NUM_DIVISIONS, AllocatorSettings
from memscale._plan import Action
from memscale._planning.one_way import OneWay
from memscale._planning.reserved.allocation_log import AllocationLog, Place
from memscale._planning.reserved.allocations import NUM_STEPS, WORKSPACE_BYTES, Replay

FIRST_ADDRESS = 0x7F00_0000_0000
"""Where the first segment lies, as the driver would have it: a viewer may take 0 for nothing."""
_STATES = {"allocated": "active_allocated", "awaiting events": "active_pending_free", "free": "inactive"}
_POOL_ID = (0, 0)


def snapshot_of(
    log: AllocationLog, settings: AllocatorSettings | None = None, *, workspace_bytes: int = WORKSPACE_BYTES
) -> dict[str, Any]:
    """The steps of `reserved_of`, event by event, and what the allocator holds after them."""
    settings = settings or AllocatorSettings()
    traced = _TracedAllocator(settings)
    replay = Replay(traced, workspace_bytes, log)
    for events in log.played(NUM_STEPS):
        for event in events:
            traced.place = getattr(event, "place", None) or Place("workspace of cuBLAS")
            replay.play([event])
    return {
        "segments": [traced.segment_entry(segment) for segment in traced.segments()],
        "device_traces": [traced.trace],
        "allocator_settings": _settings_entry(settings),
        "external_annotations": [],
    }


def step_snapshot(planner: OneWay, actions: tuple[Action, ...], config: Config) -> bytes:
    """The contents of such a file: of the step as these actions change it, on the planner's card."""
    log = planner.steps(actions, config, names_modules=True)
    snapshot = snapshot_of(log, planner.allocator, workspace_bytes=planner.hardware.workspace_bytes)
    return pickle.dumps(snapshot, protocol=4)


class _TracedAllocator(CachingAllocator):
    """The model, which writes down what it does."""

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(settings, on_memory=self._note)
        self.trace: list[dict[str, Any]] = []
        self.place = Place("")
        self._frames: dict[int, list[dict[str, Any]]] = {}
        """The frames of what is allocated, by address."""

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        block = super().allocate(num_bytes, stream)
        self._frames[block.address] = _frames_of(self.place)
        self._note("alloc", block.address, num_bytes)
        return block

    def free(self, block: Block) -> None:
        address, num_bytes = block.address, block.requested_bytes
        self._note("free_requested", address, num_bytes)
        super().free(block)
        self._note("free_completed", address, num_bytes)

    def _note(self, action: Movement | str, address: int, num_bytes: int) -> None:
        is_allocation = action == "alloc"
        self.trace.append(
            {
                "action": action,
                "addr": FIRST_ADDRESS + address,
                "size": num_bytes,
                "stream": 0,
                "time_us": len(self.trace),
                "frames": self._frames[address] if is_allocation else [],
                "compile_context": "N/A",
                "pool_id": _POOL_ID,
                "user_metadata": "",
            }
        )

    def segment_entry(self, segment: SegmentState) -> dict[str, Any]:
        blocks, address = [], segment.address
        for block in segment.blocks:
            blocks.append(
                {
                    "address": FIRST_ADDRESS + address,
                    "size": block.size_bytes,
                    "requested_size": block.requested_bytes,
                    "state": _STATES[block.state],
                    "frames": self._frames.get(address, []) if block.state == "allocated" else [],
                }
            )
            address += block.size_bytes
        active = [block for block in blocks if block["state"] != "inactive"]
        return {
            "device": 0,
            "address": FIRST_ADDRESS + segment.address,
            "total_size": segment.size_bytes,
            "allocated_size": sum(block["size"] for block in blocks if block["state"] == "active_allocated"),
            "active_size": sum(block["size"] for block in active),
            "requested_size": sum(block["requested_size"] for block in active),
            "stream": segment.stream,
            "segment_type": "small" if segment.is_small else "large",
            "segment_pool_id": _POOL_ID,
            "is_expandable": self.settings.expandable_segments,
            "frames": [],
            "blocks": blocks,
        }


def _frames_of(place: Place) -> list[dict[str, Any]]:
    """Innermost first, as those of a program; what they show as files are modules of the model."""
    module = place.module_fqn or "model"
    frames = [{"name": place.operator, "filename": module, "line": 0}] if place.operator else []
    return [*frames, {"name": place.phase, "filename": "memscale", "line": 0}]


def _settings_entry(settings: AllocatorSettings) -> dict[str, Any]:
    divisions = settings.roundup_power2_divisions
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "expandable_segments": settings.expandable_segments,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
        "roundup_power2_divisions": {str(1 << index): divisions[index] for index in range(NUM_DIVISIONS)},
        "graph_capture_record_stream_reuse": False,
        "max_cached_size": -1,
        "max_round_threshold": -1,
        "pinned_num_register_threads": 1,
        "pinned_use_cuda_host_register": False,
        "release_lock_on_cudamalloc": False,
    }
