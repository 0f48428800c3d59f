"""A program for `torchrun`: Lightning's DDP on two ranks, plain and with the callback. Prints a line a rank."""

from __future__ import annotations

import pathlib
import tempfile
import warnings

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy

from memscale.integrations.lightning import MemScaleCallback
from tests.integrations.test_lightning import FORCED, Lit, OfPart, Spy, assert_same, data, seed_everything


def fit(kind: type[Lit], directory: pathlib.Path, *callbacks: Callback) -> Lit:
    seed_everything(3, verbose=False)
    module = kind()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(directory),
        callbacks=list(callbacks),
    )
    trainer.fit(module, data())
    return module


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for kind, planned in ((Lit, ""), (OfPart, "net")):
        with tempfile.TemporaryDirectory() as directory:
            plain, spy = fit(kind, pathlib.Path(directory)), Spy()
            ours = fit(kind, pathlib.Path(directory), MemScaleCallback(FORCED), spy)
        assert_same(ours, plain)
        assert spy.planned == [planned], spy.planned
        assert spy.recomputes > 0
        print(f"{kind.__name__}: the same on rank {dist.get_rank()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
