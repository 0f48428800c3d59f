"""What is done between training steps has peaks of its own: evaluation, generation, saving and resuming.

    other_peaks(planner, plan, eligible)    # {"evaluation": 412_304_384, "saving": 301_989_888, ...}

Each is in live bytes, with the batch that was planned for, and begins where a step ends: gradients are gone, and
parameters and optimizer state are where the plan keeps them.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch import nn

from memscale._config import Config
from memscale._decide.choice import choice_of
from memscale._decide.eligible import Eligible
from memscale._errors import quoted
from memscale._plan import Plan
from memscale._planning.one_way import OneWay
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs
from memscale._progress import stage
from memscale._units import show_bytes

logger = logging.getLogger("memscale")

REMEDIES = {
    "evaluation": "evaluate with smaller batches than those of training",
    "generate": "generate for fewer sequences at once, or shorter ones",
    "saving": "save before the loop takes more memory",
    "resuming": "load checkpoints with torch.load(..., map_location='cpu')",
}


def other_peaks(planner: Planner, plan: Plan, eligible: Eligible) -> dict[str, int]:
    """Peaks by what is done beside training. What does not run on fake tensors is left out."""
    way = planner.by(eligible.travel_of(plan))
    model, choice = way.cost_model(), choice_of(plan.actions, way.profile)
    resident_bytes = model.resident_bytes(choice)
    between_bytes = resident_bytes - way.profile.input_bytes
    peaks = {}
    for name, changes in (("evaluation", {}), ("generate", _as_generate_calls(planner.model, planner.inputs))):
        if changes is not None:
            taken_bytes = _evaluated(way, plan, eligible.config, name, changes)
            if taken_bytes is not None:
                peaks[name] = resident_bytes + taken_bytes
    # A checkpoint is written tensor by tensor; read, it lies beside the model until it is copied there.
    peaks["saving"] = between_bytes
    peaks["resuming"] = between_bytes + model.resident_model_bytes(choice)
    return peaks


def warn_of_other_peaks(plan: Plan) -> None:
    """Log what is done between steps and takes more than training may."""
    above = {name: peak for name, peak in plan.other_peaks.items() if peak > plan.budget_bytes}
    if above:
        said = "; ".join(f"{name} to {show_bytes(peak)} ({REMEDIES[name]})" for name, peak in above.items())
        budget = show_bytes(plan.budget_bytes)
        logger.warning("the budget is %s, and with the planned batch other things come above it: %s", budget, said)


def _evaluated(way: OneWay, plan: Plan, config: Config, name: str, changes: dict[str, Any]) -> int | None:
    attach = way.attacher(plan.actions, config) if plan.actions else None
    try:
        with stage(f"rehearsing {name}"):
            return way.rehearsal.evaluate(attach, **changes)
    except Exception as error:  # whatever a user's model raises in evaluation
        logger.debug("the peak of %s is not known: %s", name, quoted(error), exc_info=True)
        return None


def _as_generate_calls(model: nn.Module, inputs: Inputs) -> dict[str, Any] | None:
    """How `generate` calls the model with a prompt of the planned length; None where the model has no such method, or
    its inputs are not those of a decoder."""
    is_decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", True)
    if not callable(getattr(model, "generate", None)) or not is_decoder or "input_ids" not in inputs.kwargs:
        return None
    taken = inspect.signature(model.forward).parameters
    changes = {"labels": None, "use_cache": True, "logits_to_keep": 1}
    return {name: value for name, value in changes.items() if name in taken or name in inputs.kwargs}
