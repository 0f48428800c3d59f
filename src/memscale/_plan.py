"""`Plan`: the decision as frozen data. It can be saved, read, diffed, edited and executed; it does nothing itself."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Literal, TypeAlias

from memscale import _json
from memscale._errors import PlanError, shortened, shown
from memscale._units import show_bytes, show_speed

DecisionSource = Literal["user_config", "rule", "rule_fallback", "ml"]
_HOST_KERNELS = ("cpu", "simgpu")
"""Devices that compute with the host's own kernels: what the host steps has the bits that they would have."""


def _check_count(value: object, name: str, *, minimum: int) -> None:
    count = getattr(value, name)
    if isinstance(count, bool) or not isinstance(count, int) or not minimum <= count < 2**63:
        raise PlanError(
            f"{type(value).__name__} with {name}={shown(count)} is not allowed; it must be an integer of at least "
            f"{minimum} and below 2**63"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why an action was chosen: the rule, and the numbers that it saw."""

    rule: str
    numbers: dict[str, int | float | str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        # Sorted, as they are in JSON: a plan that was saved explains itself in the same words.
        numbers = ", ".join(_show(name, value) for name, value in sorted(self.numbers.items()))
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

    def __post_init__(self) -> None:
        _check_count(self, "rows", minimum=1)


@dataclasses.dataclass(frozen=True, slots=True)
class TileMlp:
    """Compute this MLP a stretch of the sequence at a time, recomputed in backward."""

    module_fqn: str
    num_tiles: int
    reason: Reason = Reason("asked for")

    def __post_init__(self) -> None:
        _check_count(self, "num_tiles", minimum=1)


@dataclasses.dataclass(frozen=True, slots=True)
class TileAttention:
    """Compute this attention without materialising its scores: fused where possible, else by tiles of queries."""

    module_fqn: str
    rows: int
    """Queries whose scores exist at once, where no fused kernel applies."""
    reason: Reason = Reason("asked for")

    def __post_init__(self) -> None:
        _check_count(self, "rows", minimum=1)


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

    def __post_init__(self) -> None:
        _check_count(self, "bucket_bytes", minimum=1)


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

    def __post_init__(self) -> None:
        _check_count(self, "bucket_bytes", minimum=1)
        _check_count(self, "block_size", minimum=1)
        _check_count(self, "min_elements", minimum=0)


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
class FrontPoint:
    """A plan that no other beats in both peak and time: one point of the Pareto front."""

    peak_bytes: int
    """By the peak model."""
    slowdown: float
    what: str
    """What it does, in a few words."""
    is_exact: bool = True
    """False where it computes in 16 bits or keeps optimizer state in 8."""
    is_chosen: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Conditions:
    """What a plan's numbers rest on beside the model: how tensors travel, and how fast the hardware was taken to be."""

    async_offload: bool
    prefetch_depth: int
    prefetch_bytes: int
    window_bytes: int
    min_tensor_bytes: int
    speeds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Fields of `Hardware` that times were reckoned with, measured or from the card table."""

    def __str__(self) -> str:
        return ", ".join(_named_speed(name, value) for name, value in sorted(self.speeds.items()))


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
    front: tuple[FrontPoint, ...] = ()
    """Peak against time, the highest peak first: what there would be instead. Exact plans, and below the lowest of them
    the others. Empty in a plan that was not written by `decide`."""
    front_note: str = ""
    """What the front does not show, and why."""
    strategy: Reason | None = None
    """Why a policy chose this mode; None: the user did."""
    conditions: Conditions | None = None
    """None in a plan that was not written by `decide`, or that an earlier version saved."""
    provisional: bool = False
    """In force until a training step has been seen: `predicted_peak_bytes` is what is known to be there at least."""

    @property
    def reduction(self) -> float:
        """The share of the baseline peak that the plan removes."""
        return 1 - self.predicted_peak_bytes / self.baseline_peak_bytes if self.baseline_peak_bytes else 0.0

    def explain(self) -> str:
        """The plan as text: each choice with its rule and numbers, and what there would be instead."""
        parts = (self._head_lines(), self._run_lines(), self._table_lines(), self._front_lines())
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    @property
    def next_cheaper(self) -> FrontPoint | None:
        """The next plan of the front that is faster and peaks higher; None when there is none."""
        higher = self.front[: self._chosen_at]
        return higher[-1] if higher else None

    @property
    def next_smaller(self) -> FrontPoint | None:
        """The next plan of the front that peaks lower; None when there is none."""
        lower = self.front[self._chosen_at + 1 :]
        return lower[0] if lower else None

    @property
    def _chosen_at(self) -> int:
        return next((index for index, point in enumerate(self.front) if point.is_chosen), len(self.front))

    def _head_lines(self) -> list[str]:
        how = "confirmed by a rehearsal" if self.rehearsed else "from the peak model"
        numbers = [
            f"  baseline:  {show_bytes(self.baseline_peak_bytes)} peak; budget {show_bytes(self.budget_bytes)}",
            f"  planned:   {show_bytes(self.predicted_peak_bytes)} peak ({self.reduction:.1%} less, {how}), "
            f"{self.predicted_slowdown:.2f}x the time, {'fits' if self.fits else 'does not fit'}",
        ]
        if self.provisional:
            numbers = [
                f"  planned:   not known until a training step has been seen; at least "
                f"{show_bytes(self.predicted_peak_bytes)}, budget {show_bytes(self.budget_bytes)}"
            ]
        return [
            f"Plan for {self.model_class} on {self.device_name} ({self.device_type}), mode {self.mode}, "
            f"decided by {self.decision_source}",
            f"  batch:     {'; '.join(self.inputs) or 'unknown'}",
            f"  optimizer: {self.optimizer_name}; profile: {self.profile_source}",
            *numbers,
            f"  rule:      {self.summary}",
            *([f"  strategy:  {self.strategy}"] if self.strategy is not None else []),
            *([f"  times by:  {self.conditions}"] if self.conditions is not None and self.conditions.speeds else []),
            *self._bits_lines(),
        ]

    def _bits_lines(self) -> list[str]:
        """Where the same bits as the plain model's are not promised, though nothing of the plan is an approximation."""
        streams = any(isinstance(action, StreamParameters) for action in self.actions)
        if not streams or self.device_type in _HOST_KERNELS:
            return []
        return [
            "  bits:      parameters that are streamed are stepped by the host's kernels: by the same formula as on "
            f"{self.device_type}, which may round the last bit differently"
        ]

    def _run_lines(self) -> list[str]:
        """What is not about one layer; and the head, whose rows a layer's line does not say."""
        rows = [(_words_of(a), str(a.reason)) for a in self.actions if isinstance(a, TileHead) or _is_of_the_run(a)]
        return _columns([("for the run", "rule"), *rows]) if rows else []

    def _table_lines(self) -> list[str]:
        header = ("layer", "class", "calls", "params", "activations", "forward", "techniques", "rule")
        return _columns([header, *(_row_cells(row) for row in self.rows)])

    def _front_lines(self) -> list[str]:
        note = [f"({self.front_note})"] if self.front_note else []
        if not self.front:
            return note or ["(no front of peak against time: this plan does not carry one)"]
        header = ("", "peak", "time", "what would be done")
        lines = ["Peak against time, by the peak model:", *_columns([header, *map(_front_cells, self.front)])]
        if self._chosen_at < len(self.front):
            lines += [
                _neighbour("next cheaper", self.next_cheaper, self),
                _neighbour("next smaller", self.next_smaller, self),
            ]
        return [*lines, *note]

    def to_json(self) -> str:
        return _json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; `PlanError` says what is wrong with anything else."""
        try:
            plan: Plan = _json.decode(cls, _json.loads(text))
        except (ValueError, AttributeError) as error:
            raise PlanError(f"this is not a plan: {shortened(str(error))}") from error
        for name in ("baseline_peak_bytes", "predicted_peak_bytes", "budget_bytes", "host_bytes", "movable_bytes"):
            _check_count(plan, name, minimum=0)
        return plan

    def save(self, path: str | pathlib.Path) -> None:
        pathlib.Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"{path} is not a plan: it is not a text file") from error
        return cls.from_json(text)


def _is_of_the_run(action: Action) -> bool:
    return isinstance(action, OffloadOptimizer | MixedPrecision | QuantizeOptimizer)


def _words_of(action: Action) -> str:
    """ "OffloadOptimizer" in words: "offload optimizer"."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(action).__name__).strip()


def _columns(table: list[tuple[str, ...]]) -> list[str]:
    """Under a header, with a line below it."""
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
    return [line.rstrip() for line in (lines[0], "-" * sum(widths, 2 * len(widths) - 2), *lines[1:])]


def _front_cells(point: FrontPoint) -> tuple[str, ...]:
    mark = ">" if point.is_chosen else ""
    what = point.what if point.is_exact else f"{point.what} (not exact)"
    return mark, show_bytes(point.peak_bytes), f"{point.slowdown:.2f}x", what


def _neighbour(name: str, point: FrontPoint | None, plan: Plan) -> str:
    if point is None:
        return f"{name}: none"
    chosen = plan.front[plan._chosen_at]
    change = point.peak_bytes - chosen.peak_bytes
    over = ", above the budget" if point.peak_bytes > plan.budget_bytes else ""
    exact = "" if point.is_exact else ", not exact"
    return (
        f"{name}: {show_bytes(abs(change))} {'more' if change > 0 else 'less'}{over}, {point.slowdown:.2f}x the time "
        f"instead of {chosen.slowdown:.2f}x{exact}: {point.what}"
    )


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


def _named_speed(field_name: str, value: float) -> str:
    """ "link_bytes_per_s": 2.4e10 reads as "link 24 GB/s"."""
    name = re.sub("_(bytes_per_s|flops|s)$", "", field_name).replace("_", " ")
    return f"{name} {show_speed(field_name, value)}"


def _show(name: str, value: int | float | str) -> str:
    """ "budget_bytes": 2_610_000_000 reads as "budget 2.610 GB"."""
    if name.endswith("_bytes") and not isinstance(value, str):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {show_bytes(value)}"
    if name.endswith("_ms"):
        return f"{name.removesuffix('_ms').replace('_', ' ')} {value} ms"
    return f"{name.replace('_', ' ')} {value}"
