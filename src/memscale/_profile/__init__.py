"""`Profile`: what a training step of one model costs, layer by layer. Plain data; it needs no torch.

A step is cut into *segments*: the forward or backward of one layer, and what lies between layers. A segment knows
how high live bytes rise above its start and where they end, so segments of differently treated layers can be put
together into the timeline of any plan. How a profile is made: `memscale._profile.profiler`.

    profiler, rehearsal, shallow, observation            a step that is tried on a stage, in part, or seen at work
    inputs, layers, segments                             the batch, the model's layers, and the step cut by them
    operator_costs, device_kernels, kernels_in_place     what operators cost, and which a device would run
    values/, host_draws                                  values and random draws that decide sizes
    optimizer_twin/                                      what an optimizer keeps, and what its step needs
    ranks, sharding                                      several processes
    read_elsewhere, untrained, leftovers                 what a rehearsal shows of odd parts, and may leave behind
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Literal

from memscale import _json
from memscale._plan import OPTIMIZER_BUCKET_BYTES, TileAttention, TileHead, TileMlp

Phase = Literal["forward", "backward"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["", "bfloat16", "float16"]
"""The 16-bit type that is computed in; "": as the model says."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one input tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A module that techniques treat as one piece, or (`is_block=False`) a part of the model between such pieces."""

    module_fqn: str
    class_name: str
    param_bytes: int
    trainable_bytes: int
    is_block: bool
    fingerprint: str
    """Equal for layers of the same structure and shapes."""
    num_calls: int = 0
    """How often one forward of the model calls it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a training step."""

    phase: Phase
    module_fqn: str
    """The layer, or "" between layers."""
    peak_bytes: int
    """How far live bytes rise above the segment's start; at least 0."""
    net_bytes: int
    """Live bytes at its end less those at its start."""
    flops: int
    matmul_bytes: int
    """Bytes read and written by operators that are counted in `flops`."""
    other_bytes: int
    """Bytes read and written by all others; views are free."""
    half_flops: int = 0
    """The part of `flops` whose operands are in 16 bits."""
    num_launches: int = 0
    """Operators that do work; each costs the processor some time, however small it is."""
    num_random: int = 0
    """Numbers drawn. On a CPU each takes as long as fifty additions."""
    num_sends: int = 0
    """Transfers to the next tier that begin here."""
    sent_bytes: int = 0
    num_fetches: int = 0
    """Transfers from the next tier that begin here, for this segment or ahead of their use."""
    fetched_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LoopHolds:
    """What a training loop holds on the device beside the model, its gradients and its optimizer's state."""

    outputs: tuple[int, ...] = ()
    """Tensors of the model's output, by their place in it, that stay bound while backward and the optimizer run."""
    into_next: bool = False
    """The outputs that stay until the next forward has returned, as in `outputs = model(**batch)`."""
    other_bytes: int = 0
    """What is there all the time: copies of the model, tensors that are kept for later."""
    clears_late: bool = False
    """Gradients of earlier batches, where it keeps them, are let go of between forward and backward."""


NOTHING_HELD = LoopHolds()


@dataclasses.dataclass(frozen=True, slots=True)
class StepTrace:
    """Forward and backward of one step, with the model treated in one way."""

    segments: tuple[Segment, ...]
    gradients_at_peak: int = 0
    activations_at_peak: int = 0
    """The part of what is live at the peak, above the start of the step, that is activations; the rest is temporary."""

    @property
    def peak_bytes(self) -> int:
        """The peak above what was live before the step."""
        live = peak = 0
        for segment in self.segments:
            peak = max(peak, live + segment.peak_bytes)
            live += segment.net_bytes
        return peak

    def with_earlier_outputs(self, num_bytes: int) -> StepTrace:
        """The same step where so much of the step before is there until its forward has returned."""
        last = sum(segment.phase == "forward" for segment in self.segments) - 1
        if last < 0 or not num_bytes:
            return self
        segments = list(self.segments)
        first = segments[0]
        segments[0] = dataclasses.replace(
            first, peak_bytes=first.peak_bytes + num_bytes, net_bytes=first.net_bytes + num_bytes
        )
        segments[last] = dataclasses.replace(segments[last], net_bytes=segments[last].net_bytes - num_bytes)
        return dataclasses.replace(self, segments=tuple(segments))

    def raised_by(self, num_bytes: int) -> StepTrace:
        """The same step with so much more there from its beginning to its end."""
        if not num_bytes:
            return self
        more = Segment("forward", "", num_bytes, num_bytes, 0, 0, 0)
        return dataclasses.replace(self, segments=(more, *self.segments))

    def spans(self, other: StepTrace) -> bool:
        """Whether the other step goes the same way, and rises nowhere higher."""
        return len(self.segments) == len(other.segments) and all(
            (mine[:2] == theirs[:2]) and mine[2] >= theirs[2] and mine[3] >= theirs[3]
            for mine, theirs in zip(self._levels(), other._levels(), strict=True)
        )

    def _levels(self) -> Iterator[tuple[str, str, int, int]]:
        """The place of each segment, how far it rises, and how high that is above the start of the step."""
        live = 0
        for segment in self.segments:
            yield segment.phase, segment.module_fqn, segment.peak_bytes, live + segment.peak_bytes
            live += segment.net_bytes

    @property
    def end_bytes(self) -> int:
        """What the step leaves behind: the gradients."""
        return sum(segment.net_bytes for segment in self.segments)


@dataclasses.dataclass(frozen=True, slots=True)
class Treatment:
    """What is done to a block."""

    recompute: Recompute = "none"
    """How much of its forward runs again in backward; "selective" keeps the outputs of expensive operators."""
    offloads: bool = False
    """What it keeps for backward waits on the next tier: its activations, or the input that it is recomputed from."""
    streams: bool = False
    """Its parameters are on the device only while it computes. Such a block is recomputed in full."""

    def __post_init__(self) -> None:
        if self.streams and self.recompute != "full":
            raise ValueError(f"a block whose parameters are streamed is recomputed in full, not {self.recompute}")

    @property
    def name(self) -> str:
        """What it is called where some treatments are left out of a search (`Config.withheld`)."""
        recomputed = {"none": "keep", "selective": "selective checkpoint", "full": "checkpoint"}[self.recompute]
        return ", ".join([*(["stream"] if self.streams else [recomputed]), *(["offload"] if self.offloads else [])])

    @property
    def without_offload(self) -> Treatment:
        """The same, with what it keeps left on the device."""
        return dataclasses.replace(self, offloads=False)


KEEP = Treatment()
SELECTIVE = Treatment("selective")
OFFLOAD = Treatment(offloads=True)
CHECKPOINT = Treatment("full")
CHECKPOINT_OFFLOAD = Treatment("full", offloads=True)
STREAM = Treatment("full", streams=True)
STREAM_OFFLOAD = Treatment("full", offloads=True, streams=True)


@dataclasses.dataclass(frozen=True, slots=True)
class TraceKey:
    """What was rehearsed. Without arguments: the model as it is."""

    treatment: Treatment = KEEP
    """The treatment of every block."""
    head_rows: int = 0
    """Rows of logits at once; 0: the head is not tiled."""
    num_tiles: int = 0
    """The number of tiles that attention and MLPs are cut into inside the blocks; 0: they are not."""
    streams_rest: bool = False
    """Embeddings, norms and heads are streamed."""
    precision: Precision = ""
    loss_by_rows: bool = False
    """The gradients of the loss are made some rows at a time."""
    waits: float = 0.0
    """The share of each block's gradients that waits elsewhere until the optimizer steps."""

    @property
    def tile_size(self) -> int:
        """Rows of the head's tiles, or the number of tiles inside the blocks; 0: nothing is tiled."""
        return self.head_rows or self.num_tiles

    def with_tile_size(self, size: int) -> TraceKey:
        """The same in tiles of another size; itself where nothing is tiled."""
        if self.head_rows:
            return dataclasses.replace(self, head_rows=size)
        return dataclasses.replace(self, num_tiles=size) if self.num_tiles else self

    @property
    def of_any_size(self) -> TraceKey:
        """Equal for keys that differ in the size of their tiles alone."""
        return self.with_tile_size(1)


@dataclasses.dataclass(frozen=True, slots=True)
class StateShare:
    """What an optimizer takes while this share of its state stays on the device and the rest waits elsewhere."""

    resident_share: float
    state_bytes: int
    """State that is on the device all the time."""
    step_bytes: int
    """State and temporaries at the peak of a step, above that."""
    stays: tuple[bool, ...]
    """Whether each bucket of `OptimizerCost.bucket_bytes` stays on the device."""


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardStep:
    """What an optimizer takes while parameters are stepped in backward."""

    step_bytes: int
    """Temporaries of the largest part that is stepped at once."""
    num_launches: int
    """Operators of a step."""
    num_buckets: int


@dataclasses.dataclass(frozen=True, slots=True)
class GuestCost:
    """What it takes to step streamed parameters on the device, which they visit with their gradients and state."""

    step_bytes: int
    """The bytes on the device at the peak of such a step: parameters, gradients, state and temporaries."""
    in_bytes: int
    """What comes in a step."""
    out_bytes: int
    """What leaves."""
    num_copies: int
    num_launches: int
    """Operators of the step."""
    launched_bytes: int
    """Bytes that these read and write."""
    num_buckets: int
    """How many buckets the parameters come in, one after the other."""
    largest_bytes: int
    """The most bytes that come at once."""
    beside_bytes: int = 0
    """What is coming and leaving while something else is stepped, at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerCost:
    """What an optimizer keeps, and what its step needs on top."""

    name: str
    state_bytes: int
    step_bytes: int
    """Temporaries at the peak of `step()`, above parameters, gradients and state."""
    moved_bytes: int
    """Bytes that one step reads and writes."""
    offloaded_step_bytes: int | None = None
    """State and temporaries on the device at the peak of a step whose state waits elsewhere, above what stays; None:
    not separable."""
    offloaded_state_bytes: int = 0
    """The state that stays on the device even when the rest waits elsewhere."""
    num_tensors: int = 0
    """Parameters that it steps."""
    num_launches: int = 0
    """Operators of a step on the device."""
    launched_bytes: int = 0
    """Bytes that these read and write, one after the other."""
    split_step_bytes: int | None = None
    """Temporaries of a step of one parameter after the other, to which PyTorch falls back when some are on the host and
    the optimizer cannot be stepped in parts; None: what is on the device is stepped at once even then."""
    split_launches: int = 0
    """Operators of such a step."""
    bucketed_step_bytes: int | None = None
    """Temporaries of a step in buckets whose state stays where it is, the step that makes the state included; None: it
    would take no less than all at once, or is not separable."""
    bucketed_launches: int = 0
    """Operators of such a step."""
    num_step_buckets: int = 0
    bucket_bytes: tuple[int, ...] = ()
    """The buckets in which its state moves, one after the other, when it waits elsewhere."""
    bucket_launches: int = 0
    """Operators of such a step."""
    num_pieces: int = 0
    """Turns of such a step: buckets, and stretches of parameters that are larger than one."""
    piece_bytes: int = 0
    """The most state that travels for one of them."""
    shares: tuple[StateShare, ...] = ()
    """What there is between all of the state elsewhere and all of it here, the smallest share first."""
    in_backward: BackwardStep | None = None
    """None: the user has not asked for it, or the optimizer cannot."""

    def share(self, resident_share: float) -> StateShare | None:
        """What it takes with this share of the state on the device, or with the next larger one; None: with nothing of
        it."""
        if not resident_share or not self.shares:
            return None
        return next((one for one in self.shares if one.resident_share >= resident_share), self.shares[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """What a training step of one model costs on one device."""

    device_type: str
    source: Literal["static", "empirical"]
    model_class: str
    inputs: tuple[TensorSpec, ...]
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    layers: tuple[Layer, ...]
    optimizer: OptimizerCost
    plain: StepTrace
    """The unmodified model."""
    variants: dict[TraceKey, StepTrace] = dataclasses.field(default_factory=dict)
    """The step with every block under one treatment, with tiles of some size, with the rest of the model streamed, in
    16 bits. What nobody asked for or did not run is not there."""
    head: TileHead | None = None
    """How the language-model head would be tiled."""
    inside: tuple[TileAttention | TileMlp, ...] = ()
    """How attention and MLPs would be tiled inside the blocks."""
    rest_optimizer: OptimizerCost | None = None
    """The optimizer over what is left when every block is streamed."""
    guests: GuestCost | None = None
    """The step of all blocks on the device when they are streamed; None: they cannot be, or not be stepped in parts."""
    rest_guests: GuestCost | None = None
    """The same of what can be streamed beside them."""
    rest: tuple[str, ...] = ()
    """Modules beside the blocks whose parameters could be streamed: embeddings, norms, heads."""
    rest_param_bytes: int = 0
    rest_trainable_bytes: int = 0
    rest_shared_bytes: int = 0
    """The part of these bytes that is parameters of several modules (tied weights)."""
    eight_bit_optimizer: OptimizerCost | None = None
    """The optimizer with its state in 8 bits."""
    deciding_inputs: tuple[str, ...] = ()
    """Inputs whose values, not only shapes, decided something in this step: with others it may be another step. By
    their place, as "0.1" (the second positional) or "1.attention_mask"."""
    communication_bytes: int = 0
    """Buffers through which ranks exchange gradients, there all the time."""
    loop_bytes: int = 0
    """What the training loop holds beside the model all the time."""
    bucket_bytes: int = OPTIMIZER_BUCKET_BYTES
    """The size of the buckets in which state travels, which the costs of the optimizer are those of."""

    @property
    def static_bytes(self) -> int:
        """What is live before a step begins."""
        return self.base_bytes + self.optimizer.state_bytes

    @property
    def base_bytes(self) -> int:
        """The same, without the optimizer's state."""
        return self.parameter_bytes + self.buffer_bytes + self.input_bytes + self.communication_bytes + self.loop_bytes

    @property
    def trainable_bytes(self) -> int:
        return sum(layer.trainable_bytes for layer in self.layers)

    def to_json(self) -> str:
        return _json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        profile: Profile = _json.decode(cls, json.loads(text))
        return profile
