"""One trial, in a process of its own: what it costs in memory ends with it, and what fails ends one row."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import benchmarks

if TYPE_CHECKING:
    from benchmarks.peers.ways import Peer
    from benchmarks.peers.work import Training

SECONDS = 1500
MARK = "benchmarks.peers: "
Order = dict[str, Any]
Answer = dict[str, Any]
HEAP_IS_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""For glibc: what is freed stays in the process. Otherwise pages go back and forth as the heap happens to lie: equal
steps had 18 to 33 thousand page faults, 36 to 55 ms of 1,230."""


def ask(order: Order, interpreter: str = sys.executable) -> Answer:
    """What the trial came to, or why there is nothing."""
    launch = ["-m", "emucuda"] if order["device"] == "emucuda" else []
    command = [interpreter, *launch, "-m", "benchmarks.peers.trial", json.dumps(order)]
    # Kernels that do nothing would be measured as those of an impossibly fast card.
    extra = {"MEMSCALE_MEASURE": "0"} if launch else HEAP_IS_KEPT if order["device"] == "cpu" else {}
    paths = [str(benchmarks.ROOT / folder) for folder in ("src", "emucuda/src")]
    env = benchmarks.environment(OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error", **extra)
    env["PYTHONPATH"] = os.pathsep.join([*paths, env["PYTHONPATH"]])
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"failure": f"took over {SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if lines:
        answer: Answer = json.loads(lines[-1].removeprefix(MARK))
        return answer
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return {"failure": f"the process ended with code {done.returncode}: {last[:160]}"}


def obey(order: Order) -> Answer:
    import torch

    torch.set_num_threads(1)
    if order["device"] == "emucuda":
        _show_triton_the_driver()
    if order["device"] == "simgpu":
        import simgpu
        from benchmarks.peers.work import CARD

        simgpu.set_card(CARD)
        simgpu.set_race_mode("off")  # it takes time and changes none
    kinds = {"peer": _peer, "peak": _within_peak, "time": _within_time, "planner": _planner}
    return kinds[order["kind"]](order)


def _show_triton_the_driver() -> None:
    """Triton asks the system's linker where the driver is, which knows nothing of the emulated one."""
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    driver = next((path for path in preloaded if "libcuda.so" in path), None)
    if driver is not None:
        os.environ.setdefault("TRITON_LIBCUDA_PATH", os.path.dirname(driver))


def _peer(order: Order) -> Answer:
    from benchmarks.peers.ways import peer_called
    from benchmarks.peers.work import open_training, run

    peer, device = peer_called(order["peer"]), order["device"]
    training = open_training(device)
    peer.setup(training, device)
    gc.collect()
    return {**dataclasses.asdict(run(training, device)), "versions": _versions(peer.packages)}


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {name: importlib.metadata.version(name.replace("_", "-")) for name in packages}


def _within_peak(order: Order) -> Answer:
    from benchmarks.peers.ours import open_wrapped
    from benchmarks.peers.ways import peer_called
    from benchmarks.peers.work import run, side_by_side_ms

    peer, device = peer_called(order["peer"]), order["device"]
    with tempfile.TemporaryDirectory(prefix="memscale-peers-") as folder:
        disk = {"offload_dir": folder} if device == "cpu" else {}
        training, said = open_wrapped(device, {**peer.allowed, **disk}, order["budget_bytes"])
        found = {**said, **dataclasses.asdict(run(training, device))}
        if device == "cpu":  # whose clock is no fact: all are timed again, in one process
            theirs, again = _started(peer, device), _started(peer, device)
            found["step_ms"], *both_ms = side_by_side_ms(training, theirs, again)
            found["peer_step_ms"], found["peer_again_ms"] = both_ms
        return found


def _started(peer: Peer, device: str) -> Training:
    """A training of the peer, after its first step."""
    from benchmarks.peers.work import open_training, run

    training = open_training(device)
    peer.setup(training, device)
    run(training, device, num_steps=1)
    return training


def _within_time(order: Order) -> Answer:
    from benchmarks.peers.ours import least_budget
    from benchmarks.peers.ways import peer_called

    allowed = peer_called(order["peer"]).allowed
    budget = least_budget(order["device"], allowed, order["most_bytes"], order["most_slowdown"])
    return {**_within_peak({**order, "budget_bytes": budget}), "budget_bytes": budget}


def _planner(order: Order) -> Answer:
    from benchmarks.peers.planners import PLANNERS

    return PLANNERS[order["peer"]].ask(order["device"])


def main(text: str) -> None:
    warnings.simplefilter("ignore")
    try:
        answer = obey(json.loads(text))
    except Exception as error:  # whatever another's library raises is the answer of its row
        answer = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]}
    print(MARK + json.dumps(answer), flush=True)
    os._exit(0)  # what is attached need not be taken off


if __name__ == "__main__":
    main(sys.argv[1])
