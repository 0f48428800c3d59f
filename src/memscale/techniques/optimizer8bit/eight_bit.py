"""Optimizer state in 8 bits, in place: the user's optimizer stays the user's, its waiting state is packed.

`EightBit` says which state tensors of which optimizers wait in 8 bits, and how. The buckets of an adopted optimizer ask
it: a bucket is unpacked for the user's own step and packed again, and nothing else of the state is ever in 32 bits.

State of 16-bit parameters is packed too; there, loading what was saved may round once more.

What stays in 32 bits: embeddings, as bitsandbytes advises (most of their rows get no gradient in a step, so a block
mixes very different ages); parameters with few elements; parameters that are not the model's; everything that is no
moment of the gradient (step counters, say).

Bound: a value with a sign is stored to within 0.71 % of its block's largest; to within 0.15 % of it if it is below a
tenth of that, 0.03 % below a hundredth, 0.008 % below a thousandth. Without a sign it is half of that.
What that does to a training is measured by
`python -m benchmarks.optimizer8bit`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._errors import install_command, quoted
from memscale._plan import QuantizeOptimizer
from memscale._torch.optimizer_steps import parameters_of
from memscale.techniques.optimizer8bit.blocks import BlockPacking, dequantize, forget_tables, quantize

__all__ = [
    "BlockPacking",
    "Chooser",
    "EightBit",
    "eligible_parameters",
    "embeddings_of",
    "find_problem",
    "is_8bit",
    "load_bitsandbytes",
    "moments_of",
]

logger = logging.getLogger("memscale")

"""How a parameter's state tensor of this name waits; None: as it is."""

_ADAM = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
_MOMENTS: tuple[tuple[type[Optimizer], dict[str, bool]], ...] = (
    (torch.optim.Adam, _ADAM),
    (torch.optim.AdamW, _ADAM),
    (torch.optim.SGD, {"momentum_buffer": True}),
    (torch.optim.RMSprop, {"square_avg": False, "momentum_buffer": True, "grad_avg": True}),
    (torch.optim.Adagrad, {"sum": False}),
)
_KINDS = (torch.float32, torch.bfloat16, torch.float16)


def moments_of(optimizer: Optimizer) -> dict[str, bool] | None:
    """The state tensors that can wait in 8 bits, and whether they have a sign; None for an unknown optimizer."""
    for kind, moments in _MOMENTS:
        if isinstance(optimizer, kind):
            return moments
    is_foreign = type(optimizer).__module__.startswith("bitsandbytes.")
    if (
        type(optimizer).__name__ == "Lion" and not is_foreign
    ):  # torch has none; those in use keep one moment under this name
        return {"exp_avg": True}
    return None


def find_problem(device: torch.device) -> str | None:
    """Why 8-bit numbers cannot be made on this device; None if they can."""
    try:
        load_bitsandbytes()
        values = torch.linspace(-1, 1, 64, device=device)
        dequantize(*quantize(values, True, 64), True, 64)
    except Exception as error:  # whatever a native library that does not fit this machine raises
        logger.debug("bitsandbytes does not work on %s", device, exc_info=True)
        return quoted(error)
    return None


def load_bitsandbytes() -> Any:
    """The package; `ImportError` where it is not installed, and where it is and cannot be loaded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise  # it is there, and something that it needs is not
        raise ImportError(f"bitsandbytes is not installed: {install_command('quantization')}") from error
    except ImportError:
        raise
    except Exception as error:  # made for another torch, or another driver: it raises what it likes
        raise ImportError(
            f"bitsandbytes is installed and cannot be imported ({quoted(error)}). Install one that fits torch "
            f"{torch.version.__version__}, or set use_8bit_optimizer=False."
        ) from error


def eligible_parameters(model: nn.Module, min_elements: int) -> frozenset[int]:
    """The ids of those whose state may wait in 8 bits: large ones, and no embeddings."""
    embeddings = embeddings_of(model)
    large = (parameter for parameter in model.parameters() if parameter.numel() >= min_elements)
    return frozenset(id(parameter) for parameter in large if id(parameter) not in embeddings)


def embeddings_of(model: nn.Module) -> frozenset[int]:
    """The ids of parameters whose state stays in 32 bits, as bitsandbytes advises; tied heads are among them."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    modules = (module for module in model.modules() if isinstance(module, kinds))
    return frozenset(id(parameter) for module in modules for parameter in module.parameters(recurse=False))


class EightBit:
    """Which state of one model's optimizers waits in 8 bits. Warns once for each wish that is not followed."""

    def __init__(
        self,
        action: QuantizeOptimizer,
        model: nn.Module,
        undo: contextlib.ExitStack,
        device: torch.device | None = None,
    ) -> None:
        self.action = action
        self._device = device
        """Where the model computes; None: where its parameters are. Those that are streamed do not tell."""
        undo.callback(forget_tables)
        self._eligible = eligible_parameters(model, action.min_elements)

    def choose(self, optimizer: Optimizer) -> Chooser | None:
        """How this optimizer's state waits; None, and a warning, where it cannot wait in 8 bits."""
        if is_8bit(optimizer):
            logger.info("%s keeps its state in 8 bits by itself", type(optimizer).__name__)
            return None
        moments = moments_of(optimizer)
        if moments is None:
            warnings.warn(
                f"{type(optimizer).__name__} has no 8-bit counterpart: its state stays in 32 bits. "
                "Known are Adam, AdamW, SGD with momentum, RMSprop, Adagrad and Lion.",
                stacklevel=2,
            )
            return None
        devices = {p.device for p in parameters_of(optimizer)}
        for device in devices:
            problem = find_problem(device)
            if problem is not None:
                warnings.warn(
                    f"bitsandbytes cannot be used on {(self._device or device).type} ({problem}): the state of "
                    f"{type(optimizer).__name__} stays in 32 bits. Install a bitsandbytes that fits this machine, or "
                    "set use_8bit_optimizer=False.",
                    stacklevel=2,
                )
                return None
        return Chooser(self._eligible, moments, self.action.block_size)


class Chooser:
    """Chooses how the state of one optimizer is packed."""

    def __init__(self, eligible: frozenset[int], moments: dict[str, bool], block_size: int) -> None:
        self.eligible = eligible
        self.packings = {name: BlockPacking(signed, block_size) for name, signed in moments.items()}

    def __call__(self, parameter: torch.Tensor, name: Any, value: torch.Tensor) -> BlockPacking | None:
        return self.packing(id(parameter), name, value) if value.shape == parameter.shape else None

    def packs(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self.eligible

    def packing(self, parameter_id: int, name: Any, value: torch.Tensor) -> BlockPacking | None:
        """How a state tensor of the parameter's shape is packed; None: it is not."""
        if parameter_id not in self.eligible or value.dtype not in _KINDS:
            return None
        return self.packings.get(name)


def is_8bit(optimizer: Optimizer) -> bool:
    """Whether it is one of bitsandbytes' own that keeps its state in 8 bits."""
    return type(optimizer).__module__.startswith("bitsandbytes.") and (
        getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8
    )
