"""What is trained, and in which ways. Data; needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memscale import zoo

PLAIN, AGAIN, BUDGET, LOWEST, CARD = "plain", "plain again", "budget", "lowest", "card"
WAYS = {
    PLAIN: "the unmodified model",
    AGAIN: "the same once more, which shows whether this device repeats its own bits",
    BUDGET: "memscale.wrap under three quarters of what the plain model was predicted to reserve",
    LOWEST: "memscale.wrap as low as BALANCED goes (force_optimize)",
    CARD: "memscale.wrap as it comes: it plans for what the card has free",
}
"""How a model may be trained."""
BUDGET_SHARE = 0.75
_SMALL, _LARGE = (PLAIN, AGAIN, BUDGET, LOWEST), (PLAIN, CARD)


@dataclasses.dataclass(frozen=True, slots=True)
class CardCase:
    """One model with one batch."""

    model: str
    """A name of the zoo."""
    batch: int
    seq: int | None = None
    """The length of sequences; None: as the model has it (images, sound)."""
    is_large: bool = False
    """It is not expected to fit every card: an out-of-memory error of the plain model is a result."""

    @property
    def title(self) -> str:
        """The name that tables call it by."""
        return f"{self.model}, {self.batch}{'' if self.seq is None else f' x {self.seq}'}"

    @property
    def ways(self) -> tuple[str, ...]:
        """How it is trained, in this order."""
        return _LARGE if self.is_large else _SMALL

    @property
    def num_steps(self) -> int:
        """Training steps of a trial; the first makes the optimizer's state and is not timed."""
        return 3 if self.is_large else 6


SMALL = (
    CardCase("bert-base", 16, 128),
    CardCase("gpt2", 4, 256),
    CardCase("qwen2.5-0.5b", 1, 256),
    CardCase("vit-base", 16),
    CardCase("resnet-50", 16),
)
LARGE = (CardCase("gpt2-large", 2, 512, is_large=True), CardCase("gpt2-xl", 1, 512, is_large=True))
ON_A_CPU = (CardCase("bert-mini", 8, 128), CardCase("gpt2", 1, 128), CardCase("vit-tiny", 8))
"""A processor trains these in minutes."""


def default_cases(device_type: str, *, with_large: bool = True) -> tuple[CardCase, ...]:
    """What is trained when nobody says what."""
    if device_type == "cpu":
        return ON_A_CPU
    return SMALL + (LARGE if with_large else ())


def named_cases(names: Sequence[str], batch: int | None, seq: int | None) -> tuple[CardCase, ...]:
    """These models; `UnknownModelError` names one that the zoo does not have."""
    known = {case.model: case for case in (*SMALL, *LARGE)}
    cases = []
    for name in names:
        zoo.find_entry(name)
        case = known.get(name, CardCase(name, 4))
        cases.append(dataclasses.replace(case, batch=batch or case.batch, seq=seq or case.seq))
    return tuple(cases)
