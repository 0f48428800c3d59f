"""How long does the second start of a program take? Processor seconds of `wrap`, with its plan in the cache.

    python -m benchmarks.second_start [--starts 3]

Each start is a process of its own: a small BERT on the simulated device, wrapped with a budget that needs a plan. The
cache lies in a directory of this run and is empty at first, so that the first start plans and all others find its plan.
What counts is the time of the processor inside `wrap`, not that of importing libraries and building the model. Exits
with 1 when a later start takes longer than the bar.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

BAR_S = 1.0
BLOCKS, WIDTH, BATCH, LENGTH = 12, 256, 8, 128
BUDGET_GB = 0.25
"""Below what the plain step takes, and fixed: an estimate in the same process would do some of the work of `wrap`."""


def start() -> float:
    """Processor seconds that `wrap` takes in this process."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    import memscale
    import simgpu  # noqa: F401  (registers the device)

    torch.manual_seed(0)
    shape = BertConfig(
        num_hidden_layers=BLOCKS, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=4, vocab_size=8000
    )
    model = BertForMaskedLM(shape).to("simgpu").train()
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="simgpu")
    sample = {"input_ids": ids, "labels": ids}
    config = memscale.Config(memory_budget_gb=BUDGET_GB, enable_logging=False)
    begun = time.process_time()
    memscale.wrap(model, config, sample_input=sample)
    seconds = time.process_time() - begun
    memscale.detach(model)
    return seconds


def seconds_of_starts(num_starts: int) -> list[float]:
    """Those of so many starts, one after the other, with a cache that is empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MEMSCALE_CACHE": "1", "MEMSCALE_CACHE_DIR": folder}
        command = [sys.executable, "-m", "benchmarks.second_start", "--once"]
        runs = [
            subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            for _ in range(num_starts)
        ]
    return [float(run.stdout.split()[-1]) for run in runs]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_start")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="one start, in this process")
    asked = parser.parse_args(arguments)
    if asked.once:
        print(f"{start():.3f}")
        return 0
    first, *later = seconds_of_starts(asked.starts)
    print(f"first start {first:.2f} s, later ones {', '.join(f'{one:.2f}' for one in later)} s; bar {BAR_S:.0f} s")
    return int(any(one > BAR_S for one in later))


if __name__ == "__main__":
    sys.exit(main())
