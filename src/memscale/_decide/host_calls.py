"""What calls cost on a CPU, beside the arithmetic: operators, checkpoints, the optimizer's loop. No torch.

On models of a few thousand values a layer this is most of a step; on large ones it is nothing. A GPU's host runs ahead
of it, so there it is not counted. The figures were fitted to the models of the suite, on one core
(`python -m benchmarks.timing`).
"""

from __future__ import annotations

from memscale._decide.choice import Treatment

_FORWARD_MS, _BACKWARD_MS = 0.02, 0.01
"""Of an operator: forward comes from Python, backward from the engine."""
_CHECKPOINT_MS = 0.8
"""Of PyTorch's checkpoint and our hooks around it, random state and module state included."""
_WATCHED_MS = 0.4
"""Of an operator that a selective checkpoint looks at, in forward and again in backward."""
_TENSOR_MS = 0.06
"""Of the optimizer's step, for each parameter."""
_RANDOM_MS = 7e-6
"""Of one random number: generators are not vectorized."""


def segment_ms(phase: str, num_launches: int, num_random: int) -> float:
    return num_launches * (_FORWARD_MS if phase == "forward" else _BACKWARD_MS) + num_random * _RANDOM_MS


def treatment_ms(treatment: Treatment, num_calls: int, num_operators: int) -> float:
    """What a treatment costs a block that is called so often and has so many operators in its forward.

    What is computed again is a forward, though it is in the traces of backward.
    """
    if treatment in ("keep", "offload"):
        return 0.0
    watched_ms = _WATCHED_MS if treatment == "selective" else 0.0
    again_ms = num_operators * (_FORWARD_MS - _BACKWARD_MS + watched_ms)
    return _CHECKPOINT_MS * max(1, num_calls) + again_ms


def optimizer_ms(num_tensors: int) -> float:
    return _TENSOR_MS * num_tensors
