"""What is trained, and in which ways: models and their batches, and what MemScale does about a run by its name."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import memscale
from memscale import Config
from memscale._execute.executor import executor_of

BATCHES = {"bert-base": (16, 128), "gpt2-medium": (4, 512)}
"""By model: sequences and their length."""
MIN_STATE_REDUCTION = 3.5
"""How many times smaller optimizer state is to be in 8 bits."""


def fresh_model(name: str) -> tuple[nn.Module, int]:
    """On the host; and the size of its vocabulary."""
    from memscale import zoo

    torch.manual_seed(0)
    entry, transformers = zoo.find_entry(name), zoo.load_transformers()
    with zoo.quiet():
        config = getattr(transformers, entry.config_class)(**entry.numbers)
        model: nn.Module = getattr(transformers, entry.model_class)(config).train()
    return model, config.vocab_size


@contextlib.contextmanager
def prepared(name: str, model: nn.Module, optimizer: Optimizer, sample: Any) -> Iterator[Optimizer]:
    """The optimizer to train with, and MemScale as this run wants it."""
    with tempfile.TemporaryDirectory() as directory:
        if name == "AdamW":
            yield optimizer
            return
        if name == "AdamW, 8-bit state":
            config = Config(use_8bit_optimizer=True, enable_logging=False)
            with memscale.optimize(model, optimizer, config, sample):
                yield optimizer
            return
        config = Config(mode=memscale.OptimizationMode.AGGRESSIVE, force_optimize=True, enable_logging=False)
        changes: dict[str, Any] = {"use_mixed_precision": True, "offload_dir": directory}
        if name == "AdamW8bit":
            changes = dict.fromkeys(("enable_checkpointing", "enable_tiling", "enable_offloading"), False)
        _, used = memscale.apply_all_optimizations(model, optimizer, config.replace(**changes), sample)
        try:
            yield used
        finally:
            memscale.detach(model)


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """What the state takes between steps, wherever it waits; tables that all parameters share count once."""
    executor = executor_of(model)
    adoption = executor.stats().transfers.get("optimizer") if executor is not None else None
    storages = {
        value.untyped_storage().data_ptr(): value.nbytes
        for entry in optimizer.state.values()
        for value in dict.values(entry)  # without looking: what waits is not brought back
        if isinstance(value, torch.Tensor)
    }
    kept = [
        value
        for entry in optimizer.state.values()
        for value in getattr(entry, "kept", {}).values()
        if isinstance(value, torch.Tensor)
    ]
    waiting = adoption.waiting_bytes if adoption is not None else 0
    return sum(storages.values()) + sum(value.nbytes for value in kept) + waiting
