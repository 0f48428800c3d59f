"""`Plan`: the decision as frozen data. It can be saved, read, diffed, edited and executed; it does nothing itself."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, ClassVar, Literal

from memscale import _json
from memscale._errors import PlanError, is_system_name, shortened, shown

DecisionSource = Literal["user_config", "rule", "rule_fallback", "ml"]


def check_count(value: object, name: str, *, minimum: int) -> None:
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


class Action:
    """One thing that a plan does. Each type of action belongs to one technique of `memscale.techniques.TECHNIQUES`.

    Those of the first techniques are below; that of a later one may be declared in the technique's own file.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    reason: Reason

    @classmethod
    def kinds(cls) -> tuple[type[Action], ...]:
        """All types of actions: what a saved plan may hold."""
        from memscale.techniques import TECHNIQUES  # the table knows them, so it lies above them

        return tuple(kind for technique in TECHNIQUES for kind in technique.actions)


class LayerAction(Action):
    """An action on one layer."""

    __slots__ = ()
    module_fqn: str


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint(LayerAction):
    """Recompute this layer's activations in backward instead of keeping them."""

    module_fqn: str
    keep: tuple[Literal["matmul", "attention"], ...] = ()
    """Operators whose outputs are kept all the same (op-level selective checkpointing)."""
    reason: Reason = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class TileHead(LayerAction):
    """Compute this language-model head and its cross-entropy a few rows at a time; the logits never exist whole."""

    module_fqn: str
    rows: int
    """Rows of logits that exist at once."""
    weight_fqn: str | None = None
    """The head's weight, when the module's own forward multiplies with it; None when the module is the head."""
    reason: Reason = Reason("asked for")

    def __post_init__(self) -> None:
        check_count(self, "rows", minimum=1)


@dataclasses.dataclass(frozen=True, slots=True)
class TileMlp(LayerAction):
    """Compute this MLP a stretch of the sequence at a time, recomputed in backward."""

    module_fqn: str
    num_tiles: int
    reason: Reason = Reason("asked for")

    def __post_init__(self) -> None:
        check_count(self, "num_tiles", minimum=1)


@dataclasses.dataclass(frozen=True, slots=True)
class TileAttention(LayerAction):
    """Compute this attention without materialising its scores: fused where possible, else by tiles of queries."""

    module_fqn: str
    rows: int
    """Queries whose scores exist at once, where no fused kernel applies."""
    reason: Reason = Reason("asked for")

    def __post_init__(self) -> None:
        check_count(self, "rows", minimum=1)


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadActivations(LayerAction):
    """This layer's saved tensors wait on the next tier until backward needs them."""

    module_fqn: str
    reason: Reason = Reason("asked for")


OPTIMIZER_BUCKET_BYTES = 16 * 1024 * 1024
"""Planned buckets: state is brought to the device in pieces that belong to parameters of this many bytes."""


STEP_BUCKET_BYTES = 64 * 1024 * 1024
"""Planned buckets of a step whose state stays where it is. Larger than those that travel: few of them keep the host's
share of the step small, and temporaries of so many bytes are little beside a state that is all on the device."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepInBuckets(Action):
    """The optimizer steps a few parameters at a time, and needs temporaries for these; its state stays where it is."""

    bucket_bytes: int
    """Bytes of parameters that are stepped at once; a larger parameter is stepped alone."""
    reason: Reason = Reason("asked for")

    def __post_init__(self) -> None:
        check_count(self, "bucket_bytes", minimum=1)


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadOptimizer(Action):
    """Optimizer state waits on the next tier; the step runs bucket by bucket."""

    bucket_bytes: int
    """Bytes of parameters whose state is brought to the device at once."""
    resident_share: float = 0.0
    """The share of the state, by bytes of parameters, that stays on the device. Whole buckets stay, never more than the
    share, spread evenly, so that a bucket travels while those that stay are stepped."""
    reason: Reason = Reason("asked for")

    def __post_init__(self) -> None:
        check_count(self, "bucket_bytes", minimum=1)
        share = self.resident_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise PlanError(
                f"OffloadOptimizer with resident_share={shown(share)} is not allowed; it must be a number from 0 up "
                "to, but not including, 1"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class StreamParameters(LayerAction):
    """This layer's parameters live on the host and visit the device for its forward and backward."""

    module_fqn: str
    reason: Reason = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class MixedPrecision(Action):
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
class QuantizeOptimizer(Action):
    """Optimizer state waits in 8 bits, quantised block by block; every step unpacks a bucket of it at a time."""

    bucket_bytes: int
    """Bytes of parameters whose state is unpacked at once."""
    block_size: int = 256
    """Elements that share one scale."""
    min_elements: int = 4096
    """State of smaller parameters stays in 32 bits, and so does that of embeddings."""
    reason: Reason = Reason("asked for")

    def __post_init__(self) -> None:
        check_count(self, "bucket_bytes", minimum=1)
        check_count(self, "block_size", minimum=1)
        check_count(self, "min_elements", minimum=0)


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
    is_block: bool = True
    """False for what is left of a model beside its blocks: embeddings, stem, head."""


@dataclasses.dataclass(frozen=True, slots=True)
class FrontPoint:
    """A plan that no other beats in both peak and time: one point of the Pareto front."""

    peak_bytes: int
    """The peak by the peak model."""
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
    blocking: Reason | None = None
    """Why transfers block although they could overlap with compute; None where they do, where the user asked for it and
    where the device has no streams."""
    nearer: Reason | None = None
    """Why weights are fetched fewer layers ahead than they are by default; None where they are not, and where the user
    asked for it."""

    @property
    def transfers(self) -> dict[str, Any]:
        """Fields of `AsyncOffloadConfig` that the peak rests on: what is on its way is part of it."""
        return {
            "prefetch_depth": self.prefetch_depth,
            "prefetch_bytes": self.prefetch_bytes,
            "window_bytes": self.window_bytes,
            "min_tensor_bytes": self.min_tensor_bytes,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class ReleasePoint:
    """A moment of each training step: just before the forward, or the backward, of a module, or after its forward."""

    phase: Literal["forward", "after", "backward"]
    module_fqn: str = ""
    """"": the model itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllocatorUse:
    """What a plan asks of PyTorch's caching allocator, so that less is reserved for what is allocated."""

    settings: str = ""
    """Settings in the words of `PYTORCH_ALLOC_CONF`; "": those of the process stay as they are."""
    releases: tuple[ReleasePoint, ...] = ()
    """When memory that is cached and unused goes back to the card. The host waits for the device at each."""
    otherwise_reserved_bytes: int = 0
    """What would be reserved without this."""
    compacted_bytes: int = 0
    """What stays on the device and is moved together, by way of host memory: weights when the plan is attached, and
    once more with the optimizer's state before the second step. 0: nothing is moved."""

    def does_the_same(self, other: AllocatorUse | None) -> bool:
        return other is not None and dataclasses.replace(self, otherwise_reserved_bytes=0) == dataclasses.replace(
            other, otherwise_reserved_bytes=0
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What will be done, what it will peak at, what it will cost, and why.

        with memscale.optimize(model, sample_input=batch) as executor:
            print(executor.plan.explain())
            executor.plan.save("plan.json")
        executor = memscale.execute(other_model, memscale.Plan.load("plan.json"))

    A plan is data: it can be saved, read, compared and edited, and does nothing until it is executed.
    """

    actions: tuple[Action, ...]
    baseline_peak_bytes: int
    """The peak of the unmodified model."""
    predicted_peak_bytes: int
    """The highest sum of live storages, as `memscale.measure()` shows it."""
    predicted_slowdown: float
    """Predicted step time over that of the unmodified model."""
    budget_bytes: int
    """What may be reserved on the device; on a CPU, where nothing is reserved: what may be live."""
    fits: bool
    """Reserved (else live) bytes are within the budget, the total is within the card, and host and disk have room."""
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
    least_slowdown: float | None = None
    """What no exact plan could be below at this budget, by the time model (`_decide/bound.py`); None: not looked at."""
    provisional: bool = False
    """Whether it is in force only until a training step is seen: `predicted_peak_bytes` is what is known to be there at
    least."""
    predicted_allocated_bytes: int | None = None
    """The highest that `torch.accelerator.max_memory_allocated()` will show: live bytes, rounded up, and workspaces.
    This and the next two are None where no caching allocator is, as on a CPU, and where a step was not recorded."""
    predicted_reserved_bytes: int | None = None
    """The highest that `torch.accelerator.max_memory_reserved()` will show, which the budget bounds."""
    predicted_total_bytes: int | None = None
    """What the card will hold then: reserved bytes, the context, and what others held when it was planned."""
    allocator: AllocatorUse | None = None
    """What is asked of the caching allocator; None: nothing."""
    loop_bytes: int = 0
    """What the training loop holds on the device all the time beside the model, and every peak counts."""
    other_peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    """Live bytes at the peak of what is done between steps, with the planned batch: "evaluation", "generate" where the
    model has it, "saving" and "resuming". Empty where nothing was rehearsed."""
    baseline_step_ms: float | None = None
    """The predicted time of the unmodified model's step, by the time model; None where nothing was timed."""

    @property
    def predicted_step_ms(self) -> float | None:
        """The predicted time of a step under this plan; None where the plain step's is not known."""
        return None if self.baseline_step_ms is None else self.baseline_step_ms * self.predicted_slowdown

    @property
    def reduction(self) -> float:
        """The share of the baseline peak that the plan removes."""
        return 1 - self.predicted_peak_bytes / self.baseline_peak_bytes if self.baseline_peak_bytes else 0.0

    @property
    def of_bound(self) -> float | None:
        """Its predicted time, as a multiple of the least that any exact plan could take; None where that is not known,
        where nothing is done, and where something is not exact."""
        from memscale.techniques import technique_of  # the table knows them, so it lies above them

        is_exact = all(technique_of(action).is_exact for action in self.actions)
        if self.least_slowdown is None or not self.actions or not is_exact:
            return None
        return self.predicted_slowdown / self.least_slowdown

    def explain(self) -> str:
        """The plan as text: each choice with its rule and numbers, and what there would be instead.

            print(executor.plan.explain())

        Returns:
            Lines for a terminal; the same for the same plan.
        """
        from memscale.report.explain import explain  # the one describer reads plans, so it lies above them

        return explain(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from memscale.report.page import Report

        return Report(self).summary()

    @property
    def chosen(self) -> FrontPoint | None:
        """The point of the front that this plan is; None where there is no front."""
        return next((point for point in self.front if point.is_chosen), None)

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

    def to_json(self) -> str:
        """The plan as JSON: the same bytes for the same plan, on every machine."""
        return _json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

            assert memscale.Plan.from_json(plan.to_json()) == plan

        Args:
            text: What `to_json` has returned.

        Returns:
            An equal plan.

        Raises:
            TypeError: It is no text.
            PlanError: The text is no plan; the message says what is wrong with it.
        """
        if not isinstance(text, str | bytes | bytearray):
            raise TypeError(f"Plan.from_json takes the text of a plan, not {type(text).__name__}")
        try:
            plan: Plan = _json.decode(cls, _json.loads(text))
        except (ValueError, AttributeError) as error:
            raise PlanError(f"this is not a plan: {shortened(str(error))}") from error
        for name in ("baseline_peak_bytes", "predicted_peak_bytes", "budget_bytes", "host_bytes", "movable_bytes"):
            check_count(plan, name, minimum=0)
        for name in ("predicted_allocated_bytes", "predicted_reserved_bytes", "predicted_total_bytes"):
            if getattr(plan, name) is not None:
                check_count(plan, name, minimum=0)
        check_count(plan, "loop_bytes", minimum=0)
        return plan

    def save(self, path: str | pathlib.Path) -> None:
        """Write the plan to a file, as JSON.

            executor.plan.save("plan.json")

        Args:
            path: The file; what is there is overwritten, as a whole or not at all.

        Raises:
            TypeError: `path` is no path.
            OSError: The file cannot be written.
        """
        _write_whole(_path_of(path), self.to_json())

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        """Read a plan that was saved.

            executor = memscale.execute(model, memscale.Plan.load("plan.json"))

        Args:
            path: The file that `save` wrote.

        Returns:
            An equal plan.

        Raises:
            TypeError: `path` is no path.
            PlanError: The file holds no plan; the message says what is wrong with it.
            OSError: The file cannot be read.
        """
        file = _path_of(path)
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"{path} is not a plan: it is not a text file") from error
        return cls.from_json(text)


def _write_whole(path: pathlib.Path, text: str) -> None:
    """Whoever reads the file meanwhile, or a full disk, finds what was there. A pipe is written to as it is."""
    file = path.resolve()
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _path_of(path: object) -> pathlib.Path:
    """The file that this names; whether it is there is the system's to say."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"the path of a plan is a string or a pathlib.Path, not {type(path).__name__}")
    text = os.fspath(path)
    if not is_system_name(text):
        raise PlanError(f"there is no file with the name {shown(text)}")
    return pathlib.Path(text)
