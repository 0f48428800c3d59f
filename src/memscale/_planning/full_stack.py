"""What `apply_all_optimizations` does beside `wrap`: another optimizer in the place of the user's, and a report."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from memscale._config import Config
from memscale._decide.eligible import Eligible
from memscale._execute.executor import Executor
from memscale._plan import Plan
from memscale._planning.job import device_of
from memscale.report import console, outcomes
from memscale.techniques.optimizer8bit.convert import Conversion, NoCounterpart, convert
from memscale.techniques.optimizer8bit.eight_bit import is_8bit, moments_of


def convert_optimizer(optimizer: Optimizer, model: nn.Module, config: Config) -> tuple[Conversion | None, str | None]:
    """bitsandbytes' class in the optimizer's place, or None; and what to say about it, if it is known by now."""
    if not config.use_8bit_optimizer:
        return None, None
    name = type(optimizer).__name__
    if is_8bit(optimizer):
        return None, f"{name} keeps its state in 8 bits by itself"
    try:
        conversion = convert(optimizer, model, device_of(model, config))
    except NoCounterpart as reason:
        if moments_of(optimizer) is None:
            return None, None
        return None, f"{name} itself, its waiting state packed in place ({reason})"
    except ImportError:
        return None, None  # the executor says so
    stays = f"; {conversion.num_embeddings} embeddings stay in 32 bits" if conversion.num_embeddings else ""
    return conversion, f"{name} is replaced by bitsandbytes' {type(conversion.optimizer).__name__}{stays}"


class StackReport:
    """Says after every plan what the full stack came to."""

    def __init__(self, config: Config, optimizer_detail: str | None) -> None:
        self.config = config
        self.optimizer_detail = optimizer_detail

    def __call__(self, executor: Executor, plan: Plan, eligible: Eligible) -> None:
        executor.outcomes = outcomes.outcomes(plan, self.config, eligible.hindrances, self.optimizer_detail)
        if self.config.enable_logging:
            console.show(outcomes.describe(plan, executor.outcomes))
