"""Other planners: what each predicts of the same step, how long it takes, and what it cannot express.

MemTracker, SACEstimator and the ILP live in `torch.distributed._tools`; `activation_memory_budget` is a setting of
torch.compile's partitioner, tried here with the backend that partitions and then runs the graphs by eager kernels. On a
CPU their predictions are held against live bytes that were measured, as ours is.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memscale
from benchmarks.peers.work import SHAPE, Training, build_batch, build_model, open_training, torch_device
from memscale import Config, Hardware
from memscale._decide.choice import Choice
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs

GIB = 2**30
BUDGET_SHARE = 0.7
"""Of the plain peak, where a planner is asked for a plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class OtherPlanner:
    """Someone's planner."""

    title: str
    ask: Callable[[str], dict[str, Any]]
    cannot: str
    """What it does not express, from its documentation and source."""


def _measured_peak(training: Training) -> int:
    for _ in range(2):
        with memscale.measure("cpu") as measured:
            training.step()
    return measured.peak_bytes


def _memscale_plain(device: str) -> dict[str, Any]:
    start = time.process_time()
    job = Job(build_model(), Config(enable_logging=False), Hardware.detect(torch_device(device)))
    planner = Planner(job, Inputs.from_sample(build_batch()))
    predicted = planner.cost_model().peak_of(planner.profile.plain, Choice())
    seconds = time.process_time() - start
    del job, planner  # its model is alive, too
    gc.collect()
    return {"predicted_bytes": predicted, "peak_bytes": _measured_peak(open_training("cpu")), "planning_s": seconds}


def _mem_tracker(device: str) -> dict[str, Any]:
    from torch.distributed._tools.mem_tracker import MemTracker

    start = time.process_time()
    with FakeTensorMode():
        training = _fake_training(device)
        tracker = MemTracker()
        tracker.track_external(training.model, training.optimizer, *_tensors(training))
        with tracker:
            for number in range(2):  # the first makes the optimizer's state
                if number:
                    tracker.reset_mod_stats()
                training.optimizer.zero_grad()
                training.model(**training.batch).loss.backward()
                training.optimizer.step()
        snapshot = tracker.get_tracker_snapshot("peak")
    predicted = max(sum_of["Total"] for sum_of in snapshot.values())
    seconds = time.process_time() - start
    return {"predicted_bytes": predicted, "peak_bytes": _measured_peak(open_training("cpu")), "planning_s": seconds}


def _fake_training(device: str) -> Training:
    """Made in its place: fake parameters cannot be moved."""
    with torch.device(torch_device(device)):
        model, ids = build_model(), torch.zeros(SHAPE.batch, SHAPE.length, dtype=torch.long)
        return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), {"input_ids": ids, "labels": ids})


def _tensors(training: Training) -> list[torch.Tensor]:
    return [value for value in training.batch.values() if isinstance(value, torch.Tensor)]


MAX_CLOCK_MHZ = 2100
"""The highest clock of an RTX 3090, as `nvidia-smi` names it."""


def _tell_the_clock() -> None:
    """The cost model of operators asks `nvidia-smi` for the card's clock, and the emulated card has no such program."""
    import triton.testing

    triton.testing.nvsmi = lambda asked: [MAX_CLOCK_MHZ for _ in asked]


def _ilp(device: str) -> dict[str, Any]:
    """The four steps of its own test: memory, run times, trade-offs, then the solver."""
    _tell_the_clock()
    from torch.distributed._tools.ilp_utils import aggregate_stats, get_peak_memory_runtime_baseline, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator
    from torch.distributed._tools.sac_ilp import sac_milp

    start = time.process_time()
    with FakeTensorMode():
        training = _fake_training(device)
        tracker, runtimes, trade_offs = MemTracker(), RuntimeEstimator(), SACEstimator()
        tracker.track_external(training.model, training.optimizer)
        with tracker:
            training.model(**training.batch).loss.backward()
        with runtimes("operator-level-cost-model"):
            training.model(**training.batch).loss.backward()
        with trade_offs("operator-level-cost-model"):
            training.model(**training.batch)
        place = torch.device(torch_device(device), torch.accelerator.current_device_index())
        graph = parse_module_info(aggregate_stats(training.model, tracker, runtimes, trade_offs, place))
    plain_bytes, plain_ms = get_peak_memory_runtime_baseline(graph)
    discarded, recompute_ms, bound_bytes = sac_milp(graph, memory_budget=BUDGET_SHARE * plain_bytes / GIB)
    planning_s = time.process_time() - start
    return {
        "predicted_bytes": plain_bytes,
        "peak_bytes": _measured_backward(device),
        "planning_s": planning_s,
        "what": f"for {BUDGET_SHARE:.0%} of it: {bound_bytes / 1e6:.1f} MB, {len(discarded)} modules computed again, "
        f"{1 + recompute_ms / plain_ms:.2f}x",
    }


def _measured_backward(device: str) -> int:
    """What the card's allocator hands out for forward and backward, without an optimizer's state or step."""
    training = open_training(device)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    training.model(**training.batch).loss.backward()
    return torch.accelerator.max_memory_allocated()


def _memory_budget(share: float) -> Callable[[str], dict[str, Any]]:
    def ask(device: str) -> dict[str, Any]:
        import torch._functorch.config as settings

        settings.activation_memory_budget = share
        training = open_training("cpu")
        plain_s = _step_s(training)
        training.model = torch.compile(training.model, backend="aot_eager_decomp_partition")
        start = time.process_time()
        training.step()
        compile_s = time.process_time() - start
        step_s = _step_s(training)
        # Graphs are compiled for the modes that are on: what was compiled above would be made anew by `measure`.
        return {
            "peak_bytes": _measured_peak(training),
            "planning_s": compile_s - step_s,
            "what": f"{step_s / plain_s:.2f}x the processor time of the eager step",
        }

    return ask


def _step_s(training: Training) -> float:
    training.step()
    seconds = []
    for _ in range(2):
        start = time.process_time()
        training.step()
        seconds.append(time.process_time() - start)
    return min(seconds)


PLANNERS = {
    "memscale": OtherPlanner(
        "MemScale",
        _memscale_plain,
        "graphs of torch.compile inside a block; communication beyond DDP and FSDP2",
    ),
    "mem_tracker": OtherPlanner(
        "`MemTracker`",
        _mem_tracker,
        "it tracks and decides nothing; no model of the allocator",
    ),
    "ilp": OtherPlanner(
        "`SACEstimator` and the ILP",
        _ilp,
        "recomputation only: no offloading, optimizer state, tiling, allocator; optimizer's step is left out; the "
        "result is a share to discard for each module, which the user turns into a policy; needs a card, pulp, pwlf",
    ),
    "budget_0.5": OtherPlanner(
        "`activation_memory_budget=0.5`",
        _memory_budget(0.5),
        "a share of activations, not bytes; no prediction; recomputation only; needs torch.compile",
    ),
    "budget_0.2": OtherPlanner(
        "`activation_memory_budget=0.2`",
        _memory_budget(0.2),
        "as above",
    ),
}
DEVICE_OF = {"ilp": "emucuda"}
"""Where a planner is asked, if not on the CPU."""
