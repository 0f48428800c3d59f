"""`Record`: what `memscale verify` found on one machine, as data. It has no names of users, hosts or paths."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

from memscale import _json
from memscale._errors import MemScaleError

FORMAT = 1
"""The format of the file; a reader refuses another one."""
Outcome = Literal["trained", "out of memory", "does not fit", "failed"]


@dataclasses.dataclass(frozen=True, slots=True)
class Numbers:
    """Bytes of a step: predicted, or measured. None: nobody knows it here."""

    live: int | None = None
    """Storages that exist, as `memscale.measure()` counts them."""
    allocated: int | None = None
    reserved: int | None = None
    total: int | None = None
    """Reserved bytes, the context, and what others hold of the card."""
    host: int | None = None
    """What waits in host memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One model, trained in one way."""

    title: str
    way: str
    outcome: Outcome
    detail: str = ""
    """Why it did not train."""
    what: str = "nothing"
    """What the plan does."""
    predicted: Numbers = dataclasses.field(default_factory=Numbers)
    measured: Numbers = dataclasses.field(default_factory=Numbers)
    nvidia_smi: int | None = None
    """Memory in use of the whole card after the steps, as `nvidia-smi` says it."""
    driver_used: int | None = None
    """The same by the driver's own count, read at the same moment."""
    budget_bytes: int | None = None
    predicted_step_ms: float | None = None
    step_ms: float | None = None
    """The median of the timed steps."""
    planning_s: float | None = None
    losses: tuple[str, ...] = ()
    """The loss of each step, as `float.hex`: every bit, and "nan" where there is none."""
    weights: str = ""
    """A hash of every parameter and buffer after the last step."""
    error: str = ""
    """The last lines of what went wrong, without paths."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran."""

    device_name: str
    device_type: str
    total_bytes: int
    free_bytes: int
    architecture: str
    host_total_bytes: int
    versions: dict[str, str]
    computes: bool
    """The device computes what it should; False: its values are garbage (an emulated card), parity means nothing."""
    clock: Literal["wall", "modelled", "none"] = "wall"
    """What step times are: this machine's own, a model's (a simulated device), or nothing (nothing is computed)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Everything that was found; what `memscale verify` writes."""

    machine: Machine
    trials: tuple[Trial, ...] = ()
    format: int = FORMAT
    made: str = ""
    """The day."""

    def with_trial(self, trial: Trial) -> Record:
        """The record with this trial, in the place of an earlier one of the same model and way."""
        others = tuple(each for each in self.trials if (each.title, each.way) != (trial.title, trial.way))
        return dataclasses.replace(self, trials=(*others, trial))

    def trial(self, title: str, way: str) -> Trial | None:
        """The trial of a model in one way; None: it was not tried."""
        return next((each for each in self.trials if (each.title, each.way) == (title, way)), None)

    def titles(self) -> list[str]:
        """The models, in the order in which they were trained."""
        return list(dict.fromkeys(trial.title for trial in self.trials))

    def save(self, path: pathlib.Path) -> None:
        """Write it as JSON, as a whole."""
        _json.save(self, path)

    @classmethod
    def load(cls, path: pathlib.Path) -> Record:
        """What `save` wrote; `MemScaleError` says why a file is none."""
        record = _json.load(cls, path, "what memscale verify writes")
        if record.format != FORMAT:
            raise MemScaleError(f"{path} has format {record.format}; this version reads {FORMAT}")
        return record


def parity_of(record: Record, title: str, way: str) -> str:
    """Whether this trial trained the same as the plain model, in words."""
    plain, again, trial = (record.trial(title, each) for each in ("plain", "plain again", way))
    if trial is None or trial.outcome != "trained" or way == "plain":
        return "-"
    if not record.machine.computes:
        return "not meaningful: this device computes no values"
    if plain is None or plain.outcome != "trained":
        return "nothing to compare with: the plain model did not train"
    if (trial.losses, trial.weights) == (plain.losses, plain.weights):
        return "identical, bit for bit"
    if again is not None and (again.losses, again.weights) != (plain.losses, plain.weights):
        return f"plain runs differ by themselves here; losses differ by {_difference(plain, trial):.1e} at most"
    unsure = "" if again is not None else " (the plain model was not tried twice)"
    return f"DIFFERS: losses by {_difference(plain, trial):.1e} at most{unsure}"


def _difference(one: Trial, other: Trial) -> float:
    pairs = zip(one.losses, other.losses, strict=False)
    return max((abs(float.fromhex(a) - float.fromhex(b)) for a, b in pairs), default=0.0)
