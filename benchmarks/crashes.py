"""A training run with a disk tier that is killed again and again, and always goes on: `kill -9`, 50 times.

    python -m benchmarks.crashes [--kills 50] [--seed 1] [--device cpu|simgpu] [--forked]

A process trains a small model under MemScale and saves a checkpoint after each step. It is killed (SIGKILL, by itself)
when it comes to a random line of MemScale's source: while it starts, plans, reads or writes kept plans, trains, or
moves tensors to disk. The next process goes on from the last checkpoint. After each kill the offload directory is
empty, and in the end the run that was killed is where a run that nobody killed is, bit for bit: weights, optimizer
state, random numbers. The kills do not depend on how fast the machine is.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

import benchmarks
import memscale

KILLS, STEPS = 50, 40
BATCH, WIDTH = 256, 48
LINES = {
    "cpu": {"planning": 680_000, "start": 36_000, "training": 18_000},
    "simgpu": {"planning": 1_290_000, "start": 39_000, "training": 14_000},
}
"""About as many lines as a process goes through while it makes its plan, while it starts with a kept one, and in two
training steps: it is killed at one of them."""
COLD_SHARE = 0.1
"""Of the kills: while the plan is made. Of the others, every third is in a start."""
SOURCE = os.path.dirname(os.path.abspath(memscale.__file__))
CHECKPOINT = "checkpoint.pt"
TIMEOUT_S = 1200
"""There to end what hangs."""


# ---- one process


class Net(nn.Module):
    """Small, with random numbers and optimizer state that waits elsewhere."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width))
            for _ in range(3)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train(directory: pathlib.Path, device: str, steps: int, phase: str = "", die: int = 0) -> None:
    """From the last checkpoint to the end, or to the n-th line of a phase."""
    if phase in ("planning", "start"):
        die_at(die)
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = memscale.Config(
        device=device,
        memory_budget_gb=0.5,  # not what is free at the moment: then the kept plan is used again
        force_optimize=True,
        enable_logging=False,
        offload_dir=str(directory / "offload"),
        max_cpu_offload_gb=None if device == "cpu" else 2e-5,
        async_offload=False,
        async_config=memscale.AsyncOffloadConfig(min_tensor_bytes=0),
    )
    memscale.wrap(model, config, torch.randn(BATCH, WIDTH))
    torch.manual_seed(1)
    start = _resume(directory / CHECKPOINT, model, optimizer)
    if phase == "training":
        die_at(die)
    for step in range(start, steps):
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH).to(device)).square().mean().backward()
        optimizer.step()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save({**saved, "random": _random_states()}, directory / "unfinished.pt")
        os.replace(directory / "unfinished.pt", directory / CHECKPOINT)


def _resume(path: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"]["host"])
    if "device" in saved["random"]:
        _device_module().set_rng_state(saved["random"]["device"])
    return int(saved["step"])


def _random_states() -> dict[str, torch.Tensor]:
    found = {"host": torch.get_rng_state()}
    if torch.accelerator.is_available():
        found["device"] = _device_module().get_rng_state()
    return found


def _device_module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())


def die_at(line: int) -> None:
    """Kill this process when it comes to the n-th line of MemScale's from here on.

    A line that is repeated at once, as in a comprehension over all objects, counts once: most kills would be there.
    """
    left, last = [line], [(0, 0)]

    def at_call(frame: FrameType, event: str, argument: Any) -> Any:
        return at_line if frame.f_code.co_filename.startswith(SOURCE) else None

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        is_new = event == "line" and last[0] != (id(frame), frame.f_lineno)
        last[0] = id(frame), frame.f_lineno
        left[0] -= is_new
        if left[0] == 0 and is_new:
            print(f"{frame.f_code.co_filename[len(SOURCE) + 1 :]}:{frame.f_lineno}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return at_line

    sys.settrace(at_call)


# ---- all of them


def run(directory: pathlib.Path, device: str, steps: int, phase: str = "", die: int = 0) -> str | None:
    """Where the process was killed; None if it came to its end."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.crashes", "--process", str(directory)]
    command += ["--device", device, "--steps", str(steps), "--die-at", phase, str(die)]
    environment = benchmarks.environment(
        OMP_NUM_THREADS="1", MEMSCALE_CACHE="1", MEMSCALE_CACHE_DIR=str(directory / "cache"), MEMSCALE_MEASURE="0"
    )
    answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    if answer.returncode == -signal.SIGKILL:
        return answer.stdout.strip()
    if answer.returncode:
        raise RuntimeError(f"the process failed instead of going on: {answer.stderr[-2000:]}")
    return None


def run_forked(directory: pathlib.Path, device: str, steps: int, phase: str = "", die: int = 0) -> str | None:
    """As `run`, in a fork of this process, which has imported everything and run nothing: several times as fast."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(writer, 1)
        os.environ.update(MEMSCALE_CACHE="1", MEMSCALE_CACHE_DIR=str(directory / "cache"), MEMSCALE_MEASURE="0")
        try:
            train(directory, device, steps, phase, die)
            os._exit(0)
        finally:  # only with an error: nothing of the parent's is run here
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as answer:
        place = answer.read().strip()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return place
    if status:
        raise RuntimeError("the process failed instead of going on")
    return None


def survive(
    directory: pathlib.Path,
    device: str,
    kills: int,
    seed: int,
    steps: int = STEPS,
    cold_share: float = COLD_SHARE,
    run: Callable[..., str | None] = run,
) -> list[str]:
    """Where it was killed. `RuntimeError` where it did not go on, left files, or ended elsewhere."""
    whole, killed = directory / "whole", directory / "killed"
    for each in (whole, killed):
        (each / "offload").mkdir(parents=True)
    run(whole, device, steps)
    generator, places = random.Random(seed), list[str]()
    for number in range(kills):
        phase = "planning" if number < cold_share * kills else "start" if number % 3 == 0 else "training"
        if phase != "planning" and not (killed / "cache").exists():
            run(killed, device, 0)
        place = run(killed, device, steps, phase, generator.randint(1, LINES[device][phase]))
        if place is None:
            continue  # it came to its end
        places.append(f"{phase}: {place}")
        print(f"{number + 1}/{kills} in {phase}, at {place}, after {_steps_done(killed)} steps", file=sys.stderr)
        _refuse_left_files(killed / "offload", after_start=False)
    run(killed, device, steps)
    _refuse_left_files(killed / "offload", after_start=True)
    wrong = differences(*(torch.load(each / CHECKPOINT, weights_only=True) for each in (whole, killed)))
    if wrong:
        raise RuntimeError(f"the run that was killed ends elsewhere: {wrong[:4]}")
    return places


def _steps_done(directory: pathlib.Path) -> int:
    path = directory / CHECKPOINT
    return int(torch.load(path, weights_only=True)["step"]) if path.exists() else 0


def _refuse_left_files(directory: pathlib.Path, *, after_start: bool) -> None:
    """An empty name may be left for a moment, until the next start."""
    left = [path for path in directory.iterdir() if after_start or not path.is_file() or path.stat().st_size]
    if left:
        raise RuntimeError(f"files are left: {', '.join(path.name for path in left)}")


def differences(one: Any, other: Any, name: str = "checkpoint") -> list[str]:
    """Where two checkpoints differ in at least a bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = list({**one, **other})
        return [d for key in keys for d in differences(one.get(key), other.get(key), f"{name}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [d for n, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{name}.{n}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [name]
    return [] if type(one) is type(other) and one == other else [name]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=1, help="of the places")
    parser.add_argument("--device", choices=("cpu", "simgpu"), default="cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--forked", action="store_true", help="fork the processes from one that has imported everything"
    )
    parser.add_argument("--process", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--die-at", nargs=2, default=("", "0"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.process is not None:
        if options.device == "simgpu":
            import simgpu  # noqa: F401
        torch.set_num_threads(1)
        phase, line = options.die_at
        train(options.process, options.device, options.steps, phase, int(line))
        return 0
    start = run
    if options.forked:
        if options.device != "cpu":
            parser.error("--forked is for the CPU: no device can be used in a fork")
        torch.set_num_threads(1)
        importlib.import_module("memscale._planning.planner")
        start = run_forked
    with tempfile.TemporaryDirectory() as directory:
        places = survive(pathlib.Path(directory), options.device, options.kills, options.seed, options.steps, run=start)
    files = collections.Counter(place.rpartition(":")[0] for place in places)
    print(f"{len(places)} kills on {options.device}: every run went on, no file was left, and the end is the same.")
    print("\n".join(f"  {count:3} in {file}" for file, count in files.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
