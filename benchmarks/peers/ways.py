"""The peers: what each does to a plain training, by its own documented call."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers.work import Training, torch_device

Setup = Callable[[Training, str], None]
EXACT: dict[str, Any] = {"mode": "balanced"}
TILED: dict[str, Any] = {"mode": "aggressive", "use_mixed_precision": False, "use_8bit_optimizer": False}
EIGHT_BIT: dict[str, Any] = {"mode": "aggressive", "use_mixed_precision": False, "enable_tiling": False}


class CannotRunError(Exception):
    """A peer does not support this device."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One way to save memory that is not ours."""

    name: str
    title: str
    setup: Setup
    allowed: dict[str, Any]
    """What MemScale may do when it is compared: no more than the peer does to the numbers."""
    packages: tuple[str, ...] = ()


def _plain(training: Training, device: str) -> None:
    """Nothing."""


def _checkpoint(training: Training, device: str) -> None:
    training.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _selective(training: Training, device: str, *, attention: bool = True) -> None:
    """Results of matrix products and of attention stay, the rest is computed again: the example of PyTorch's page.

    Without attention it is the same training as the plain one: what is kept draws no random numbers.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    if attention:
        kept += [
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
        ]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    arguments = {"use_reentrant": False, "context_fn": contexts}
    training.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def _save_on_cpu(training: Training, device: str) -> None:
    place = torch_device(device)
    if place == "cpu":
        raise CannotRunError("tensors of a CPU are on the CPU")
    training.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=place)


def _trl_offload(training: Training, device: str) -> None:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    if device == "cpu":
        raise CannotRunError("it asks for an accelerator")
    context = get_act_offloading_ctx_manager(training.model)
    training.around = lambda: context


def _trl_loss(training: Training, device: str) -> None:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(training.model)
    training.batch["fused_lm_head"] = True


def _torchao_8bit(training: Training, device: str) -> None:
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")  # it compiles its step, which neither a measured CPU nor these cards can
    training.optimizer = AdamW8bit(training.model.parameters(), lr=1e-4)


def _torchao_offload(training: Training, device: str, *, gradients: bool = False) -> None:
    from torchao.optim import CPUOffloadOptimizer

    parameters = training.model.parameters()
    training.optimizer = CPUOffloadOptimizer(parameters, torch.optim.AdamW, offload_gradients=gradients, lr=1e-4)


def _bitsandbytes(training: Training, device: str) -> None:
    import bitsandbytes

    if device == "simgpu":
        raise CannotRunError("its kernels know no such device")
    training.optimizer = bitsandbytes.optim.AdamW8bit(training.model.parameters(), lr=1e-4)


_BUCKET = 1 << 20
"""Elements of DeepSpeed's buffer for gradients: one matrix of this model. Its own choice, 5e8, is 2 GB."""


def _deepspeed(training: Training, device: str) -> None:
    import deepspeed

    if device == "simgpu":
        raise CannotRunError("its accelerators are a closed list")
    settings = {
        "train_batch_size": training.batch["input_ids"].shape[0],
        "gradient_clipping": 0.0,  # what is not set is 1.0 in 0.19.8, which is another training
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": device != "cpu"},
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    }
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(
        model=training.model, model_parameters=training.model.parameters(), config=settings
    )
    training.model, training.optimizer, training.backward = engine, engine, engine.backward


def _liger(training: Training, device: str) -> None:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss()
    original = training.model

    def forward(input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = original.transformer(input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        return _WithLoss(fused(original.lm_head.weight, hidden, labels[:, 1:].flatten()))

    original.forward = forward


@dataclasses.dataclass(frozen=True, slots=True)
class _WithLoss:
    loss: torch.Tensor


PEERS = (
    Peer("plain", "plain PyTorch", _plain, EXACT),
    Peer("checkpointing", "`gradient_checkpointing_enable()`", _checkpoint, EXACT),
    Peer("selective", "PyTorch's selective checkpointing", _selective, EXACT),
    Peer(
        "selective_exact",
        "PyTorch's selective checkpointing, attention computed again",
        functools.partial(_selective, attention=False),
        EXACT,
    ),
    Peer("save_on_cpu", "`torch.autograd.graph.save_on_cpu`, pinned", _save_on_cpu, EXACT),
    Peer("trl_offload", "TRL's activation offloading", _trl_offload, EXACT, ("trl",)),
    Peer("trl_loss", "TRL's chunked loss", _trl_loss, TILED, ("trl",)),
    Peer("torchao_8bit", "torchao's `AdamW8bit`", _torchao_8bit, EIGHT_BIT, ("torchao",)),
    Peer("torchao_offload", "torchao's `CPUOffloadOptimizer`", _torchao_offload, EXACT, ("torchao",)),
    Peer(
        "torchao_gradients",
        "torchao's `CPUOffloadOptimizer`, gradients too",
        functools.partial(_torchao_offload, gradients=True),
        {**EXACT, "step_in_backward": True},
        ("torchao",),
    ),
    Peer("bitsandbytes", "bitsandbytes' `AdamW8bit`", _bitsandbytes, EIGHT_BIT, ("bitsandbytes",)),
    Peer("deepspeed", "DeepSpeed ZeRO-Offload, stage 2", _deepspeed, EXACT, ("deepspeed",)),
    Peer("liger", "Liger's fused linear cross-entropy", _liger, TILED, ("liger_kernel",)),
)


def peer_called(name: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == name)
