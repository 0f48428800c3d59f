"""What calls cost on a CPU, beside the arithmetic: operators, checkpoints, the optimizer's loop. No torch.

On models of a few thousand values a layer this is most of a step; on large ones it is nothing. A GPU's host runs ahead
of it, so there it is not counted. The figures are multiples of one operator's call in forward and backward, fitted to
the models of the suite (`python -m memscale.benchmarks.timing`).
"""

from __future__ import annotations

from memscale._choice import Treatment

_CALL_MS = 0.04
_CALLS_A_CHECKPOINT = 36
"""Of PyTorch's checkpoint and our hooks around it, random state and module state included."""
_CALLS_AN_OPERATOR = 10
"""Of an operator that a selective checkpoint looks at, in forward and again in backward."""
_CALLS_A_TENSOR = 1.3
"""Of the optimizer's step, for each parameter."""


def calls_ms(num_calls: float) -> float:
    return num_calls * _CALL_MS


def treatment_ms(treatment: Treatment, num_calls: int, num_operators: int) -> float:
    """What a treatment costs a block that is called so often and has so many operators in its forward."""
    if treatment in ("keep", "offload"):
        return 0.0
    seen = _CALLS_AN_OPERATOR * num_operators if treatment == "selective" else 0
    return calls_ms(_CALLS_A_CHECKPOINT * max(1, num_calls) + seen)


def optimizer_ms(num_tensors: int) -> float:
    return calls_ms(_CALLS_A_TENSOR * num_tensors)
