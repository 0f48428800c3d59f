"""A stage on which a training step can be tried without a trace: on a copy of the model whose tensors have no memory.

It runs forward, a loss and backward, and records them segment by segment (segments.py). The user's model is never run:
where fake tensors do not suffice, its own training steps are observed (observation.py).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from memscale._profile import NOTHING_HELD, StepTrace
from memscale._profile.device_kernels import LinearAsTrained, cpu_kernels
from memscale._profile.host_draws import drawn_by_host
from memscale._profile.inputs import Inputs
from memscale._profile.kernels_in_place import gpu_kernels, linear_as_trained, sequences_unpacked
from memscale._profile.layers import find_blocks, find_pieces
from memscale._profile.leftovers import Caches
from memscale._profile.read_elsewhere import Readings, ReadingWatch
from memscale._profile.segments import FakeRecorder, SegmentRecorder, Traffic, no_traffic, with_gradient
from memscale._profile.sharding import Sharding
from memscale._profile.untrained import TrainedWatch
from memscale._profile.values import SEED, Recollection, Values, readable
from memscale._profile.values.carried import assume_value, keep_value, private_values
from memscale._profile.values.draws import LOWEST_DRAW, MIDDLE_DRAW
from memscale._torch import private
from memscale._torch.host_rng import HostRng
from memscale._torch.live_bytes import LiveBytes, Recall, rounding_of
from memscale._torch.outputs import tensors_in
from memscale._torch.overrides import plain_attributes
from memscale._torch.released_gradients import held_gradient
from memscale._torch.state_beside import Beside
from memscale._units import round_up

logger = logging.getLogger("memscale")

CLASSIFIER_WIDTH = 1000
"""An output this wide is taken for class scores when the model computes no loss of its own."""


OTHER_SEEDS = tuple(range(SEED + 1, SEED + 5))
"""Seeds with which a step is tried that draws numbers beside those that can be chosen."""


class Detachable(Protocol):
    def detach(self) -> None: ...


Attach = Callable[[nn.Module], Detachable]


class Rehearsal:
    """A stage for training steps. `run` tries one, with or without techniques attached."""

    source: Literal["static", "empirical"]
    is_fake: bool

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        device_type: str,
        rounding_bytes: int,
        blocks: Collection[str] | None = None,
    ) -> None:
        """`blocks` are the names of the model's blocks, where they are known already."""
        self.model = model
        self.blocks = find_blocks(model) if blocks is None else {fqn: model.get_submodule(fqn) for fqn in blocks}
        self.pieces = find_pieces(model, self.blocks)
        """Modules keep the names that they have in the whole model, also where some of its blocks are left out."""
        self.inputs = inputs
        self.device_type = device_type
        self.rounding_bytes = rounding_bytes
        self.num_calls: dict[str, int] = {}
        self.target_type = device_type
        self.holds_gradients = False
        """Steps begin with the gradients of earlier batches, to which theirs are added."""
        self.loop = NOTHING_HELD
        """What the loop holds in steps, beside gradients."""
        self.output_sizes: tuple[int, ...] = ()
        """The bytes of outputs that the loop kept of the last step."""
        self.untrained: frozenset[str] = frozenset()
        """The names of trainable parameters that get no gradient in any step, as far as the plain step shows it."""
        self.readings = Readings(model)
        """Which parameters the plain step reads, and where."""
        self.sharding: Sharding | None = None
        """How ranks that train together share the model out; None: each has all of it."""

    def _recorder(self, traffic: Traffic) -> SegmentRecorder:
        return SegmentRecorder(self.device_type, self.rounding_bytes, counts_fakes=self.is_fake, traffic=traffic)

    def recall(self) -> Recall | None:
        """What spares operators their way, for a recorder that is entered now; None: nothing does."""
        return None

    def books(self) -> LiveBytes:
        """Empty books for this stage's tensors."""
        return LiveBytes(self.device_type, self.rounding_bytes, counts_fakes=self.is_fake)

    def run(self, attach: Attach | None = None, *, num_steps: int = 1) -> StepTrace:
        """Forward and backward of one step, cut into segments, above what is live before it.

        Of several steps the highest: what is attached may learn in which order layers come.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.stage())
            attached = attach(self.model) if attach is not None else None
            if attached is not None:
                undo.callback(attached.detach)
            traffic: Traffic = getattr(attached, "traffic", no_traffic)  # what is attached may move nothing
            is_plain = attached is None and self.is_fake
            watch = TrainedWatch(self.model, undo) if is_plain else None
            if is_plain:
                self.readings.watch(undo)
            held: list[torch.Tensor] = getattr(attached, "held", [])
            traces = [self._record(traffic, held) for _ in range(num_steps)]
            if watch is not None:
                self.untrained = watch.untrained(self.num_calls)
        return max(traces, key=lambda trace: trace.peak_bytes)

    def _record(self, traffic: Traffic, held: list[torch.Tensor]) -> StepTrace:
        recorder = self._recorder(traffic)
        with contextlib.ExitStack() as undo:
            undo.enter_context(private.parametrized_anew())
            undo.callback(self._clear_gradients)
            undo.callback(recorder.remove_tensor_hooks)
            for module_fqn, module in self.pieces.items():
                recorder.watch(module_fqn, module, undo)
            recorder.watch_gradients(self.model, undo)
            recorder.see_all([list(self.model.parameters()), list(self.model.buffers())], "parameters")
            recorder.see_all(self.inputs.tensors(), "other")
            recorder.see_all(held, "optimizer state")
            recorder.open()
            recorder.recall = self.recall()
            with recorder:
                kept = self.pass_through(recorder)
            trace = recorder.close()
        self.num_calls = recorder.num_calls
        self.output_sizes = self._sizes_of(kept)
        if self.loop.into_next:
            trace = trace.with_earlier_outputs(sum(round_up(size, self.rounding_bytes) for size in self.output_sizes))
        return trace if self.sharding is None else self.sharding.applied(trace)

    def pass_through(self, recorder: SegmentRecorder) -> list[torch.Tensor]:
        """Forward and backward. Returns what the loop keeps of the output."""
        if self.holds_gradients:
            self.hold_gradients(recorder)
        torch.clear_autocast_cache()  # a forward that failed may have left casts, which no recompute would find
        with self.readings.during():
            output = self.model(*self.inputs.args, **self.inputs.kwargs)
        kept, loss = self.kept_of(output), loss_of(output)
        del output
        self.clear_late()
        recorder.move_to("backward", "", -1)
        run_backward(loss, self.device_type)
        return kept

    def kept_of(self, output: Any) -> list[torch.Tensor]:
        """The tensors of an output that the loop keeps through backward."""
        if not self.loop.outputs:
            return []
        return [tensor for place, tensor in enumerate(tensors_in(output)) if place in self.loop.outputs]

    def _sizes_of(self, kept: list[torch.Tensor]) -> tuple[int, ...]:
        if not kept:
            return ()
        books = LiveBytes(self.device_type, 1, counts_fakes=self.is_fake)
        others = {private.storage_key(tensor.untyped_storage()) for tensor in self._there_anyway()}
        sizes = _Sizes()
        books.log = sizes
        books.see_all(kept)
        return tuple(size for key, size in sizes.by_key.items() if key not in others)

    def _there_anyway(self) -> list[torch.Tensor]:
        """What is counted already where it is returned as it is."""
        return [*self.model.parameters(), *self.model.buffers(), *self.inputs.tensors()]

    def evaluate(self, attach: Attach | None = None, **changes: Any) -> int:
        """The peak of an evaluation with this batch above what is live before it; nothing is trained.

        `changes` are other keyword arguments for the model, or None for those that are left out.
        """
        kwargs = {name: value for name, value in {**self.inputs.kwargs, **changes}.items() if value is not None}
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.stage())
            if attach is not None:
                undo.callback(attach(self.model).detach)
            undo.callback(_set_training, {module: module.training for module in self.model.modules()})
            self.model.eval()
            books = self.books()
            books.see_all(self._there_anyway())
            before_bytes = books.total_bytes
            books.recall = self.recall()
            with torch.no_grad(), books:
                self.model(*self.inputs.args, **kwargs)
        return books.peak_bytes - before_bytes

    def hold_gradients(self, recorder: SegmentRecorder) -> None:
        """Give parameters the gradients of earlier batches, before a step."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and name not in self.untrained:
                parameter.grad = torch.zeros_like(parameter)
                recorder.see(parameter.grad, "gradients")

    @property
    def leaves_gradients(self) -> bool:
        """Steps leave their gradients to the next forward, after which they go."""
        return self.holds_gradients and self.loop.clears_late

    def clear_late(self) -> None:
        """Take the gradients of earlier batches away after forward, where the loop does."""
        if self.leaves_gradients:
            self._clear_gradients()

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Everything that must be put back after a step."""
        try:
            with torch.enable_grad(), private.parametrized_anew():
                yield
        finally:
            self._clear_gradients()

    def _clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class FakeRehearsal(Rehearsal):
    """A rehearsal on a copy of the model whose tensors have shapes and no memory."""

    source = "static"
    is_fake = True

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        device_type: str,
        blocks: Collection[str] | None = None,
        caches: Caches | None = None,
    ) -> None:
        """`caches`: those of the model's code, where they are known from another stage of the same model."""
        self.mode = private.fake_tensor_mode()
        # A card that is not in this machine is played by fake CPU tensors and its kernels' savings.
        self.emulates_gpu = not device_exists(device_type)
        on = "cpu" if self.emulates_gpu else device_type
        self._original = model
        fake_model = fake_copy(model, self.mode, torch.device(on))
        if not fake_model.training:
            fake_model.train()
        fake_inputs = _fake_inputs(inputs, self.mode, torch.device(on))
        self.values = Values()
        self.caches = caches or Caches(fake_model)
        self._beside = Beside.of_model(fake_model)
        self._is_worst_draw_known = False
        super().__init__(fake_model, fake_inputs, on, rounding_of(device_type), blocks)
        self.target_type = device_type

    @property
    def deciding_inputs(self) -> tuple[str, ...]:
        """The inputs of which a step has asked the values: with others, it may be another step."""
        return tuple(sorted(self.values.asked))

    def run(self, attach: Attach | None = None, *, num_steps: int = 1) -> StepTrace:
        """Run a step with those draws, among the ones that decide something, that showed the highest peak in the first
        step.

        `NotImplementedError` where random numbers decide something and none of those tried is the worst.
        """
        trace = super().run(attach, num_steps=num_steps)
        if not (self.values.was_draw_asked or self.values.was_host_asked):
            return trace
        self.untrained = frozenset()  # another draw may train it
        if self._is_worst_draw_known:
            return trace
        self._is_worst_draw_known = True
        if self.values.was_draw_asked:
            trace = self._run_worst_draw(trace, lambda: super(FakeRehearsal, self).run(attach, num_steps=num_steps))
        if self.values.was_host_asked:
            self._refuse_luck(trace, lambda: super(FakeRehearsal, self).run(attach, num_steps=num_steps))
        self.untrained = frozenset()
        return trace

    def _run_worst_draw(self, highest: StepTrace, run: Callable[[], StepTrace]) -> StepTrace:
        tried = {self.values.share: (highest, self.num_calls)}
        for self.values.share in (MIDDLE_DRAW, LOWEST_DRAW):
            try:
                tried[self.values.share] = run(), self.num_calls
            except Exception as error:  # e.g. a step in which all layers are dropped, and nothing has a gradient
                share = self.values.share
                logger.debug("the step does not run with draws of %s: %s: %s", share, type(error).__name__, str(error))
        self.values.share = max(tried, key=lambda share: tried[share][0].peak_bytes)
        trace, self.num_calls = tried[self.values.share]
        calls = [(name, count) for _, num_calls in tried.values() for name, count in num_calls.items()]
        missed = sorted({name for name, count in calls if count > self.num_calls.get(name, 0)})
        if missed:
            raise NotImplementedError(
                f"random draws decide which layers run, and of those tried the highest does not run {missed[0]}"
            )
        return trace

    def _refuse_luck(self, trace: StepTrace, run: Callable[[], StepTrace]) -> None:
        """Numbers that are not in our hands may decide nothing: then the step is the same whatever they are."""
        num_calls = self.num_calls
        for self.values.seed in OTHER_SEEDS:
            try:
                other = run()
            except Exception as error:
                raise NotImplementedError(f"the step does not run with other random numbers: {error}") from error
            if _sizes_of(other) != _sizes_of(trace):
                raise NotImplementedError("random numbers of Python's or NumPy's generator decide how large a step is")
        self.values.seed, self.num_calls = SEED, num_calls

    def _recorder(self, traffic: Traffic) -> SegmentRecorder:
        return FakeRecorder(self.device_type, self.rounding_bytes, traffic=traffic)

    def recall(self) -> Recall | None:
        """Where the stage's own modes are all that is active: others see operators, too."""
        is_bare = private.active_modes() == [self.mode, self.values]
        return Recollection(self.mode, self.values) if is_bare else None

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        kernels: Any = gpu_kernels() if self.emulates_gpu else cpu_kernels(self.model)
        packing = contextlib.nullcontext() if "position_ids" in self.inputs.kwargs else sequences_unpacked()
        # A step on the CPU can be measured only by a mode, which sees its operators.
        is_seen = self.target_type == "cpu"
        linear = LinearAsTrained((self.mode, self.values), (FakeRecorder, ReadingWatch), is_seen=is_seen)
        # Fake tensors do not bear two threads at once: backward of host and device runs in this one.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with (
            self._beside.kept(),
            private.never_while_compiled(),
            private_values(),
            self.caches.without_fakes(),
            _gradients_kept(self._original),
            super().stage(),
            host_rng_kept(),
            drawn_by_host(self.values),
            readable(self.values),
            packing,
            one_thread,
            self.mode,
            self.values,
            kernels,
            linear_as_trained(linear),
        ):
            yield


@contextlib.contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """A forward that somebody has replaced may close over the user's own model (TRL's fused loss does), and backward
    then gives its parameters gradients without memory."""
    before = [(parameter, held_gradient(parameter)) for parameter in model.parameters() if parameter.is_leaf]
    try:
        yield
    finally:
        for parameter, gradient in before:
            now = held_gradient(parameter)
            if now is not None and private.is_fake(now) and not private.is_fake(parameter):
                parameter.grad = gradient


def _set_training(modes: dict[nn.Module, bool]) -> None:
    """Module by module: some of a model in training may not be."""
    for module, training in modes.items():
        module.training = training


class _Sizes:
    """The sizes of storages, as books are told of them."""

    def __init__(self) -> None:
        self.by_key: dict[int, int] = {}

    def allocate(self, key: int, num_bytes: int) -> None:
        self.by_key[key] = num_bytes

    def free(self, key: int) -> None:
        """They are all alive."""


@contextlib.contextmanager
def left_autocast(device_type: str) -> Iterator[None]:
    """The state after the user's `with torch.autocast(...)`: backward comes behind it, and weights that it had cast for
    the forward are let go. A rehearsal may be inside of it from beginning to end."""
    active = [kind for kind in {"cpu", device_type} if torch.is_autocast_enabled(kind)]
    for kind in active:
        torch.set_autocast_enabled(kind, False)
    try:
        with private.left_autocast_blocks():
            yield
    finally:
        for kind in active:
            torch.set_autocast_enabled(kind, True)


def run_backward(loss: torch.Tensor, device_type: str) -> None:
    """Backward as it runs behind the user's autocast. Function modes end there, see NOTE [modes end at backward]: it is
    begun without them, so that they do not stand around all that it calls."""
    with left_autocast(device_type), private.left_function_modes():
        loss.backward()


def _sizes_of(trace: StepTrace) -> list[tuple[str, str, int, int]]:
    return [(each.phase, each.module_fqn, each.peak_bytes, each.net_bytes) for each in trace.segments]


def loss_of(output: Any) -> torch.Tensor:
    """The loss that the model computes, or a stand-in for the one that its user will compute outside.

    Class scores (a last dimension of 1000 and more) get a cross-entropy, other outputs a mean square. What comes in 16
    bits is made 32 first, as losses want it: a user who does not takes less than is predicted, never more.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss if loss.dim() == 0 else loss.mean()
    tensors = with_gradient(output)
    if not tensors:
        raise RuntimeError("the model's output does not depend on any trainable parameter")
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]  # itself, not a number made of it: what its memory holds lives as long as the user's loss
    del output
    return torch.stack([_stand_in_loss(tensor) for tensor in tensors]).sum()


def _stand_in_loss(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0 or tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    if tensor.dim() == 0:
        return tensor
    if tensor.dim() >= 2 and tensor.shape[-1] >= CLASSIFIER_WIDTH:
        rows = tensor.reshape(-1, tensor.shape[-1])
        return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long, device=tensor.device)).float()
    return (tensor.abs() if tensor.is_complex() else tensor).square().mean().float()


def fake_copy(model: nn.Module, mode: Any, device: torch.device) -> nn.Module:
    """The model with every tensor replaced by one without memory on `device`; sharing is kept."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        # A dict of another class would be one leaf, and a streamed module's tables are such dicts.
        held = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for leaf in tree_leaves(held):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
                memo[id(leaf)] = _fake_like(leaf, mode, device)
    kept_alive = list(memo.values())  # deepcopy looks the replacements up by the originals' ids
    for original, shell in private.plain_shells(model, memo):
        private.fill_shell(original, shell, copy.deepcopy(plain_attributes(original), memo))
    duplicate = copy.deepcopy(model, memo)
    del kept_alive
    for module in duplicate.modules():
        private.uncompile_forward(module)
    return duplicate


def _fake_like(tensor: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
    """Parameters are shapes; what a model holds beside them (positions, masks, tables) keeps its values if small."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    if not tensor.requires_grad:
        keep_value(fake, tensor)
    return fake.requires_grad_(tensor.requires_grad)


def _fake_inputs(inputs: Inputs, mode: Any, device: torch.device) -> Inputs:
    """Integers of the batch keep their values; of those that never had any, masks hide nothing and all else is 0."""
    names = {id(tensor): name for name, tensor in inputs.named_tensors()}

    def fake_input(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            name = names[id(tensor)]
            if tensor.device.type == "meta":
                assume_value(fake, int(name.endswith("mask") or tensor.dtype == torch.bool), name)
            else:
                keep_value(fake, tensor, name)
        return fake.requires_grad_(tensor.requires_grad)

    fakes = {id(tensor): fake_input(tensor) for tensor in inputs.tensors()}
    return inputs.replaced(fakes, {id(leaf): _own_copy(leaf) for leaf in inputs.others()})


_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)


def _own_copy(leaf: Any) -> Any:
    """An argument that the rehearsal may change or use up. Its tensors are not copied: they are read."""
    if isinstance(leaf, _IMMUTABLE) or callable(leaf):
        return leaf
    held = vars(leaf).values() if hasattr(leaf, "__dict__") else ()
    memo = {id(value): value for value in held if isinstance(value, torch.Tensor)}
    try:
        return copy.deepcopy(leaf, memo)
    except Exception as error:
        raise NotImplementedError(f"an argument of type {type(leaf).__name__} cannot be copied") from error


def device_exists(device_type: str) -> bool:
    if device_type == "cpu":
        return True
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == device_type


@contextlib.contextmanager
def host_rng_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's CPU random state are as before."""
    host_state, torch_state = HostRng(), torch.get_rng_state()
    try:
        yield
    finally:
        host_state.restore()
        torch.set_rng_state(torch_state)
