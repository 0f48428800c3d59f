"""`Plan`: the decision as frozen data. It can be saved, read, diffed, edited and executed; it does nothing itself."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Literal, TypeAlias

from memscale import _json
from memscale._errors import PlanError
from memscale._units import show_bytes

DecisionSource = Literal["user_config", "rule", "rule_fallback", "ml"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why an action was chosen: the rule, and the numbers that it saw."""

    rule: str
    numbers: dict[str, int | float | str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        numbers = ", ".join(_show(name, value) for name, value in self.numbers.items())
        return f"{self.rule} ({numbers})" if numbers else self.rule


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """Recompute this layer's activations in backward instead of keeping them."""

    module_fqn: str
    keep: tuple[Literal["matmul", "attention"], ...] = ()
    """Operators whose outputs are kept all the same (op-level selective checkpointing)."""
    reason: Reason = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class TileHead:
    """Compute this language-model head and its cross-entropy a few rows at a time; the logits never exist whole."""

    module_fqn: str
    rows: int
    """Rows of logits that exist at once."""
    weight_fqn: str | None = None
    """The head's weight, when the module's own forward multiplies with it; None when the module is the head."""
    reason: Reason = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class TileMlp:
    """Compute this MLP a stretch of the sequence at a time, recomputed in backward."""

    module_fqn: str
    num_tiles: int
    reason: Reason = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class TileAttention:
    """Compute this attention without materialising its scores: fused where possible, else by tiles of queries."""

    module_fqn: str
    rows: int
    """Queries whose scores exist at once, where no fused kernel applies."""
    reason: Reason = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadActivations:
    """This layer's saved tensors wait on the next tier until backward needs them."""

    module_fqn: str
    reason: Reason = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadOptimizer:
    """Optimizer state waits on the next tier; the step runs bucket by bucket."""

    bucket_bytes: int
    """Bytes of parameters whose state is brought to the device at once."""
    reason: Reason = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class StreamParameters:
    """This layer's parameters live on the host and visit the device for its forward and backward."""

    module_fqn: str
    reason: Reason = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The model computes in 16 bits; its parameters, gradients and outputs stay in 32."""

    dtype: Literal["bfloat16", "float16"]
    """float16 comes with dynamic loss scaling."""
    reason: Reason = Reason("asked for")

    @staticmethod
    def choose_dtype(
        device_type: str, *, supports_bf16: bool, supports_fp16: bool, has_fast_16bit: bool
    ) -> Literal["bfloat16", "float16"] | None:
        """What this hardware computes best in; None where 16-bit math would only cost accuracy."""
        if device_type == "cpu" or supports_bf16:
            return "bfloat16"
        return "float16" if supports_fp16 and has_fast_16bit else None


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizeOptimizer:
    """Optimizer state waits in 8 bits, quantised block by block; every step unpacks a bucket of it at a time."""

    bucket_bytes: int
    """Bytes of parameters whose state is unpacked at once."""
    block_size: int = 256
    """Elements that share one scale."""
    min_elements: int = 4096
    """State of smaller parameters stays in 32 bits, and so does that of embeddings."""
    reason: Reason = Reason("asked for")


Action: TypeAlias = (
    Checkpoint
    | TileHead
    | TileAttention
    | TileMlp
    | OffloadActivations
    | OffloadOptimizer
    | StreamParameters
    | MixedPrecision
    | QuantizeOptimizer
)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRow:
    """One line of `Plan.explain()`: a layer, what it costs and what is done about it."""

    module_fqn: str
    class_name: str
    num_calls: int
    param_bytes: int
    activation_bytes: int
    """Live bytes that its forward leaves behind when nothing is done."""
    forward_ms: float
    techniques: tuple[str, ...]
    reason: Reason


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What will be done, what it will peak at, what it will cost, and why."""

    actions: tuple[Action, ...]
    baseline_peak_bytes: int
    """The peak of the unmodified model."""
    predicted_peak_bytes: int
    predicted_slowdown: float
    """Predicted step time over that of the unmodified model."""
    budget_bytes: int
    fits: bool
    decision_source: DecisionSource
    mode: str
    device_type: str
    device_name: str
    optimizer_name: str
    profile_source: Literal["static", "empirical"]
    model_class: str
    inputs: tuple[str, ...]
    """The planned batch, one "name: shape dtype" a tensor."""
    summary: Reason
    """The rule that settled the plan as a whole."""
    rows: tuple[LayerRow, ...]
    host_bytes: int = 0
    """Parameters, gradients and their optimizer state that wait in host memory."""
    movable_bytes: int = 0
    """Activations and offloaded optimizer state, which wait on the host or on disk."""
    rehearsed: bool = False
    """The predicted peak was confirmed by running this very plan on fake tensors."""

    @property
    def reduction(self) -> float:
        """The share of the baseline peak that the plan removes."""
        return 1 - self.predicted_peak_bytes / self.baseline_peak_bytes if self.baseline_peak_bytes else 0.0

    def explain(self) -> str:
        """The plan as text: each layer, its cost, its techniques, and the rule and numbers behind them."""
        return "\n".join([*self._head_lines(), "", *self._table_lines()])

    def _head_lines(self) -> list[str]:
        how = "confirmed by a rehearsal" if self.rehearsed else "from the peak model"
        return [
            f"Plan for {self.model_class} on {self.device_name} ({self.device_type}), mode {self.mode}, "
            f"decided by {self.decision_source}",
            f"  batch:     {'; '.join(self.inputs) or 'unknown'}",
            f"  optimizer: {self.optimizer_name}; profile: {self.profile_source}",
            f"  baseline:  {show_bytes(self.baseline_peak_bytes)} peak; budget {show_bytes(self.budget_bytes)}",
            f"  planned:   {show_bytes(self.predicted_peak_bytes)} peak ({self.reduction:.1%} less, {how}), "
            f"{self.predicted_slowdown:.2f}x the time, {'fits' if self.fits else 'does not fit'}",
            f"  rule:      {self.summary}",
        ]

    def _table_lines(self) -> list[str]:
        header = ("layer", "class", "calls", "params", "activations", "forward", "techniques", "rule")
        table = [header, *(_row_cells(row) for row in self.rows)]
        widths = [max(len(cells[column]) for cells in table) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
        return [line.rstrip() for line in (lines[0], "-" * sum(widths, 2 * len(widths) - 2), *lines[1:])]

    def to_json(self) -> str:
        return _json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; `PlanError` says what is wrong with anything else."""
        try:
            plan: Plan = _json.decode(cls, json.loads(text))
        except (ValueError, AttributeError) as error:
            raise PlanError(f"this is not a plan: {error}") from error
        return plan

    def save(self, path: str | pathlib.Path) -> None:
        pathlib.Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        return cls.from_json(pathlib.Path(path).read_text())


def _row_cells(row: LayerRow) -> tuple[str, ...]:
    return (
        row.module_fqn or "(model)",
        row.class_name,
        str(row.num_calls),
        show_bytes(row.param_bytes),
        show_bytes(row.activation_bytes),
        f"{row.forward_ms:.2f} ms",
        " + ".join(row.techniques) or "keep",
        str(row.reason),
    )


def _show(name: str, value: int | float | str) -> str:
    """ "budget_bytes": 2_610_000_000 reads as "budget 2.610 GB"."""
    if name.endswith("_bytes") and not isinstance(value, str):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {show_bytes(value)}"
    if name.endswith("_ms"):
        return f"{name.removesuffix('_ms').replace('_', ' ')} {value} ms"
    return f"{name.replace('_', ' ')} {value}"
