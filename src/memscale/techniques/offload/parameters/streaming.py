"""Parameter streaming (exact): a layer's parameters live on the host and visit the device for forward and backward.

    Parameter (host) --_AtHome--> alias (host) --_Visiting--> weight (device) --> the layer

A streamed layer is a recomputed layer (`techniques/recompute`). *Inside* the recomputed region every weight is an
autograd function of the host parameter: the first forward drops the device copies, the recompute fetches them again,
and autograd itself carries the gradient home, where hooks, accumulation, sharing, clipping and the optimizer find it on
the user's own `Parameter`. `_Visiting.backward` starts the copy to the host; `_AtHome.backward`, which autograd runs in
the thread that called `backward()`, waits for it. Meanwhile the device's thread goes on.

Known limits: a layer that uses a parameter twice under autocast is refused (NOTE [casts] in shared_casts.py). A
parameter that is used outside of its layer, without being registered there too, is on the host.
Differentiating twice through a parameter's gradient (`create_graph=True`) is refused. Where a plan does not step
streamed parameters on the device (`StepOnDevice`), their update runs on the host's kernels, with the implementation of
the whole (in_parts.py). Norms of gradients on two devices are PyTorch's own, to the last bit, where they are taken by
`clip_grad_norm_` or `get_total_norm` (gradient_norms.py).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memscale._errors import OffloadError, PlanError
from memscale._plan import StreamParameters
from memscale._torch import private
from memscale._torch.carried_attributes import lend_attributes, return_attributes
from memscale._torch.overrides import OwnHook, find_module, keep_copies_clean
from memscale.techniques.offload.optimizer import implementations, in_parts
from memscale.techniques.offload.parameters import (
    computing_device,
    gradient_norms,
    inner_checkpoints,
    placed_copies,
    state_following,
)
from memscale.techniques.offload.parameters.borrowed_weights import Lender, hollow_like
from memscale.techniques.offload.parameters.newcomers import Arrangement, Newcomers, guard
from memscale.techniques.offload.parameters.parameter_homes import (
    LARGEST_SEGMENT_BYTES,
    Homes,
    Slot,
    is_expanded,
    overlapping,
    parameters_in,
    slots_of,
)
from memscale.techniques.offload.parameters.shared_casts import CannotBeJoined, Joining, Joint
from memscale.techniques.offload.parameters.state_placement import Followers
from memscale.techniques.offload.parameters.step_visits import StepVisits
from memscale.techniques.offload.parameters.streamer import Expectation, Passage, Stamp, Streamer, Visit
from memscale.techniques.offload.parameters.sum_order import follow
from memscale.techniques.offload.parameters.uses import Call, Use, Uses
from memscale.techniques.offload.store.host import HostStore
from memscale.techniques.offload.store.stores import ShapeStore, Store
from memscale.techniques.offload.store.tiers import has_streams
from memscale.techniques.offload.transfer.transfers import Transfers
from memscale.techniques.recompute import RecomputedForward, Region
from memscale.techniques.recompute.silent_writes import is_watched_here, may_write_silently

GRADIENT_WINDOW_BYTES = 32 * 1024 * 1024
"""The bytes of gradients on their way home that may still occupy the device."""


class _AtHome(torch.autograd.Function):
    """The host's end of the link. It runs in the thread that called `backward()`.

    NOTE [two nodes]: one node for both ends would let autograd sum the gradients of a shared parameter before they
    have arrived.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, passage: Passage) -> torch.Tensor:
        ctx.passage = passage
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        landing, ctx.passage.landing = ctx.passage.landing, None
        if landing is not None:
            landing.wait()
        return gradient, None


class _Visiting(torch.autograd.Function):
    """The device's end of the link."""

    @staticmethod
    def forward(ctx: Any, alias: torch.Tensor, weight: list[torch.Tensor], passage: Passage) -> torch.Tensor:
        ctx.passage = passage
        return weight[0]  # a list hides it from autograd, so that it is no input of the graph

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"the gradients of {ctx.passage.module_fqn}'s parameters cannot be differentiated again "
                "(create_graph=True) while they are streamed; leave this layer out of parameter streaming"
            )
        return ctx.passage.streamer.send_home(gradient, ctx.passage), None, None


@dataclasses.dataclass(slots=True, eq=False)
class Link:
    """One parameter in one call."""

    parameter: torch.Tensor
    slot: Slot
    """One of its places."""
    lifetime: Any = None
    """The lifetime of autocast's cache, if autocast remembers casts in this call."""
    joint: Joint | None = None
    """What its copy stands behind, if autocast may share its cast with other calls."""
    end: torch.Tensor | None = None
    """What comes before the joint, in the first call under one autocast."""


class StreamedForward(RecomputedForward):
    """The forward of a streamed layer."""

    def __init__(self, module: nn.Module, module_fqn: str, streamer: Streamer, index: int, *, verify: bool) -> None:
        super().__init__(module, module_fqn, verify=verify)
        self.state.computes_with_copies = True
        self.streamer = streamer
        self.index = index
        self.anchor = streamer.anchor
        self.slots: list[Slot] = []
        self.newcomers: Newcomers | None = None
        self._arrangement = Arrangement(module)
        self._uses = Uses()
        self.needs_weights_in_backward = verify or not _is_lookup(module)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._admit_newcomers()  # before the region notes what is to be put back for its recompute
        return super().call(*args, **kwargs)

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region | None) -> Any:
        notes = None if region is None else Expectation(Stamp.of(parameters_in(self.slots)))
        if region is not None:
            region.notes = notes
        visit = self.streamer.fetch_forward(self.index, notes)
        looks = self.verify or (self._is_first(region) and is_watched_here() and may_write_silently(self.module))
        try:
            with self._weights(visit, follows=notes is not None, looks=looks) as (links, lent):
                del visit
                call = self._begin_call(links) if notes is not None else None
                with (
                    inner_checkpoints.seen_through(self.module_fqn),
                    contextlib.nullcontext() if call is None else call.computing(),
                ):
                    output = self.inner()(*args, **kwargs)
                if call is not None and notes is not None:
                    self._leave_tails(links, notes, call.counted(output))
            if notes is not None and any(lender.is_used for lender in lent):
                notes.kept = None  # lenders bring the weights where they are used
            return output
        except BaseException as error:
            self.streamer.drop_ahead()
            if notes is not None:
                notes.kept = None  # a traceback may hold the graph, and with it the copies
            if isinstance(error, RuntimeError) and (reason := self._reason(error, args, kwargs)) is not None:
                raise OffloadError(f"{self.module_fqn} {reason}; leave it out of parameter streaming") from error
            raise

    def _reason(self, error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """What about streaming makes a forward fail; None if it is nothing that is known."""
        if "change requires_grad flags of leaf variables" in str(error):
            return "freezes or unfreezes its parameters in its forward, where copies stand in their place"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type == "cpu" != self.streamer.device.type and tensor.dim() > 0 for tensor in tensors):
            return (
                f"computes on {self.streamer.device} and is given tensors on the CPU: the model may send them to where "
                "this layer's parameters are, which is the host while they are streamed"
            )
        return None

    def recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        notes: Expectation = region.notes
        if not self.active:
            raise RuntimeError(
                f"MemScale was detached, or planned again, between the forward of {self.module_fqn} and its backward; "
                "call backward() first"
            )
        if notes.stamps != Stamp.of(parameters_in(self.slots)):
            raise RuntimeError(
                f"a parameter of {self.module_fqn} was changed between the layer's forward and its backward: "
                "the recompute would give other gradients. Call backward() before the optimizer steps."
            )
        if self.needs_weights_in_backward:
            visit = self.streamer.fetch_backward(self.index, notes)
        else:
            parameters = parameters_in(self.slots)
            visit = Visit(parameters, [hollow_like(p, self.streamer.device) for p in parameters], -1)
        with self._weights(visit, looks=self.verify), inner_checkpoints.seen_through(self.module_fqn):
            return self.inner()(*args, **kwargs)

    def _admit_newcomers(self) -> None:
        """Stream parameters from where they are now, if the layer was changed since its last forward."""
        if self.newcomers is not None and self._arrangement.has_changed():
            self.streamer.drop_ahead()
            self.slots = self.newcomers.settle(self.module, self.slots)
            self._arrangement.note()
            if self.streamer.following is not None:
                self.streamer.following.know(parameters_in(self.slots))
            self._uses = Uses()

    def _begin_call(self, links: list[Link]) -> Call:
        return self._uses.begin(
            self.module,
            [link.slot.get() for link in links],
            shares_casts=any(link.lifetime is not None for link in links),
            is_called_again=self.streamer.is_called_again(self.index),
        )

    def _leave_tails(self, links: list[Link], notes: Expectation, uses: Sequence[Use]) -> None:
        """Leave tails and joints for later calls: see NOTE [order of sums] in sum_order.py and NOTE [casts] in
        shared_casts.py."""
        tails = self.streamer.tails
        for link, use in zip(links, uses, strict=True):
            parameter, weight = link.parameter, link.slot.get()
            follows = parameter.requires_grad and tails.of(parameter) is not None
            if self._leave_joint(link, notes, use):
                weight, follows = link.end, follows and link.end is not None
            if use.count > 1 or follows:
                tails.leave(parameter, weight, notes)

    def _leave_joint(self, link: Link, notes: Expectation, use: Use) -> bool:
        """Leave the joint of a cast that later calls may share. Returns whether there is one."""
        casts, joint = self.streamer.casts, link.joint
        if joint is None and use.casts > 0:
            joint = casts.new_joint(link.parameter, link.lifetime)
        if joint is None:
            return False
        try:
            is_left = casts.leave(link.parameter, joint, use, notes)
        except CannotBeJoined:
            raise RuntimeError(
                f"{self.module_fqn} uses a parameter more than once under autocast, whose gradients PyTorch adds up in "
                "16 bits; those of a streamed layer would be added up in 32. Leave it out of parameter streaming"
            ) from None
        if is_left:
            joint.tail = self.streamer.tails.tail_of(link.slot.get())
        return is_left

    @contextlib.contextmanager
    def _weights(
        self, visit: Visit, *, follows: bool = False, looks: bool
    ) -> Iterator[tuple[list[Link], list[Lender]]]:
        """Put device copies in place of the parameters."""
        places = {id(parameter): slot for slot in reversed(self.slots) if (parameter := slot.get()) is not None}
        lifetime = self.streamer.casts.lifetime() if follows else None
        links = [Link(parameter, places[id(parameter)], lifetime) for parameter in visit.parameters]
        weights = {
            id(link.parameter): self._link(link, position, weight, follows=follows)
            for position, (link, weight) in enumerate(zip(links, visit.weights(), strict=True))
        }
        visit.arrivals = []  # the graph alone decides how long the copies live
        lent = [Lender.of(weight) for weight in weights.values()]
        real = [(slot, slot.get()) for slot in self.slots]
        loans = [_Loan(slot, weights[id(parameter)], parameter) for slot, parameter in real if parameter is not None]
        try:
            try:
                for slot, parameter in real:
                    if parameter is not None:
                        slot.table()[slot.name] = weights[id(parameter)]
                del weights
                _refresh_flat_weights(real)
                yield links, [lender for lender in lent if lender is not None]
                self._refuse_changed(loans, looks)
            finally:
                for loan in loans:
                    loan.return_attributes()
                _put_back(real)
        finally:
            _put_back(real)  # once more: Ctrl-C may have come in the middle, and copies in their places train nothing
            visit.leave_homes()

    def _is_first(self, region: Region | None) -> bool:
        """Whether this is the first forward in this state of the training flags."""
        return region is not None and region.memory.flags not in self.changes_saved

    def _refuse_changed(self, loans: list[_Loan], looks: bool) -> None:
        """Raise if a forward changed its copies: the change would be lost. Values are compared, on a copy, under
        `verify`, and in the first forwards of layers whose code may write past autograd."""
        if any(loan.was_changed(look=looks) for loan in loans):
            raise RuntimeError(
                f"{self.module_fqn} changes its parameters in its forward (an embedding with max_norm does), "
                "and a streamed layer would lose that; leave it out of parameter streaming"
            )

    def _link(self, link: Link, position: int, weight: torch.Tensor, *, follows: bool) -> torch.Tensor:
        """Return the weight with its place in the graph."""
        if not torch.is_grad_enabled():
            return weight
        if not link.parameter.requires_grad:
            Lender(weight, link.parameter, self.streamer).attach()
            return weight
        if follows and self._uses.may_be_cast(position):
            link.joint = self.streamer.casts.new_joint(link.parameter, link.lifetime)
        if link.joint is None:
            linked = self._link_end(link.parameter, weight, follows=follows)
        else:
            linked = self._link_joint(link, link.joint, weight)
        Lender(linked, link.parameter, self.streamer).attach()
        return linked

    def _link_joint(self, link: Link, joint: Joint, weight: torch.Tensor) -> torch.Tensor:
        hollow, before = self.streamer.tails.hollow(weight), joint.before
        if before is None or before.tail is None:
            link.end = end = self._link_end(link.parameter, hollow, follows=True)
        else:
            before.rounding.is_on = True
            end = follow(before.tail, hollow)
        linked: torch.Tensor = Joining.apply(end, [weight], joint.rounding)  # type: ignore[no-untyped-call]
        private.run_first(linked.grad_fn)
        joint.is_placed = True
        return linked

    def _link_end(self, parameter: torch.Tensor, weight: torch.Tensor, *, follows: bool) -> torch.Tensor:
        """Let the gradient go to the tail that an earlier call has left, or home."""
        tail = self.streamer.tails.of(parameter) if follows else None
        return self._link_home(parameter, weight) if tail is None else follow(tail, weight)

    def _link_home(self, parameter: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        passage = Passage(self.streamer, parameter, self.module_fqn)
        alias = _AtHome.apply(parameter, passage)  # type: ignore[no-untyped-call]
        linked: torch.Tensor = _Visiting.apply(alias, [weight], passage)  # type: ignore[no-untyped-call]
        private.run_first(linked.grad_fn)  # the gradient leaves at once, not after the whole layer
        return linked


class _Loan:
    """A device copy in place of one parameter."""

    def __init__(self, slot: Slot, weight: torch.Tensor, parameter: torch.Tensor) -> None:
        self._slot = slot
        self._weight = weakref.ref(weight)
        self._parameter = parameter
        private.show_version(weight, parameter)  # a layer may remember something by it
        self._version = None if weight.is_inference() else weight._version
        self._storage_key = private.storage_key(weight.untyped_storage())
        self._lent = lend_attributes(parameter, weight)

    def return_attributes(self) -> None:
        """Put on the parameter what the forward has put on its copy."""
        weight = self._weight()
        if weight is not None and self._lent is not None:
            return_attributes(self._parameter, weight, self._lent)

    def was_changed(self, *, look: bool) -> bool:
        """Whether the copy was written to or replaced. `look` also finds writes past the version counter (`.data`)."""
        weight = self._weight()
        if weight is None or weight is not self._slot.get():
            return True
        if self._version is not None and weight._version != self._version:
            return True
        if private.is_fake(weight) or ((lender := Lender.of(weight)) is not None and lender.is_away):
            return False
        if private.storage_key(weight.untyped_storage()) != self._storage_key:
            return True
        return look and not torch.equal(_bits(weight), _bits(self._parameter))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _is_lookup(module: nn.Module) -> bool:
    """Whether a layer's backward needs indices alone, so that its recompute ends before it reads the weight."""
    if (
        not isinstance(module, nn.Embedding)
        or module.sparse
        or [name for name, _ in module.named_parameters()] != ["weight"]
    ):
        return False  # a parametrized weight is computed, and its backward may need the parameter
    return type(module).forward is nn.Embedding.forward and "forward" not in vars(module)


def _put_back(real: list[tuple[Slot, torch.Tensor | None]]) -> None:
    """The parameters themselves, in their places."""
    for slot, parameter in real:
        slot.table()[slot.name] = parameter
    _refresh_flat_weights(real)


def _refresh_flat_weights(real: list[tuple[Slot, Any]]) -> None:
    """Update the list of weights that recurrent modules keep beside the parameters."""
    for module in {id(slot.module()): slot.module() for slot, _ in real}.values():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


# ------------------------------------------------------------------------------------------------------------ attach


@dataclasses.dataclass(frozen=True, slots=True)
class Streaming:
    """How parameters are streamed."""

    asynchronous: bool = False
    """Copies run beside compute, where the device has streams."""
    prefetch_depth: int = 1
    """How many layers arrive before they are computed."""
    host_budget_bytes: int | None = None
    """What homes may take of the host's memory."""
    gradient_window_bytes: int = GRADIENT_WINDOW_BYTES
    verify: bool = False
    """Look whether layers change the copies of their parameters, or compute something else a second time."""
    placed_from: torch.device | None = None
    """Where what is on the device now is to go back to; None: it stays there."""


AS_USUAL = Streaming()


def attach(
    actions: Iterable[StreamParameters],
    model: nn.Module,
    device: torch.device,
    undo: contextlib.ExitStack,
    how: Streaming = AS_USUAL,
    previous: Streamer | None = None,
) -> Streamer:
    """Stream the parameters of these layers until undone. Everything else of the model is placed on `device`.

    `previous` has streamed other layers of this model and has handed its homes over. If those are not pinned, copies
    block as before.
    """
    modules = _find(actions, model)
    device = torch.empty(0, device=device).device  # with its index, as tensors report it
    is_fake = any(private.is_fake(parameter) for parameter in model.parameters())
    overlaps = how.asynchronous and has_streams(device)
    if device.type == "cpu" and not is_fake:
        raise PlanError("parameters are streamed between the host and an accelerator; this plan computes on the CPU")
    if previous is None:
        homes, transfers = _open(device, undo, dataclasses.replace(how, asynchronous=overlaps), is_fake=is_fake)
    else:
        homes, transfers = previous.homes, previous.transfers
        overlaps = overlaps and transfers.can_overlap
        undo.callback(_close, homes, transfers.store)
        undo.callback(_close, homes, transfers)
    streamer = Streamer(device, transfers, homes, overlaps=overlaps, prefetch_depth=how.prefetch_depth)
    undo.callback(streamer.drop_ahead)
    streamed = streamable(model, modules.values())
    newcomers = None if is_fake else Newcomers(model, modules.values(), homes, streamable, undo)
    _attach_layers(streamer, modules, streamed, undo, newcomers, verify=how.verify)
    _attach_model(streamer, model, undo)
    _move_in(streamer, model, streamed, undo, is_fake=is_fake, previous=previous)
    placed_copies.attach(model, homes, undo)
    if not is_fake:
        gradient_norms.attach(model, homes, undo)
    return streamer


def _move_in(
    streamer: Streamer,
    model: nn.Module,
    streamed: set[int],
    undo: contextlib.ExitStack,
    *,
    is_fake: bool,
    previous: Streamer | None,
) -> None:
    """Move streamed parameters home, with their state. Some of them may be there already, from the plan before."""
    homes = streamer.homes
    following = state_following.attach(model, undo)  # undone after the homes: state follows its parameters both ways
    following.leaves_adopted = previous is not None
    streamer.following = following
    undo.callback(_leave_adopted, following, homes)
    if not is_fake:
        _announce(streamer, model, undo)
    undo.callback(homes.restore)
    is_move = homes.move_in(model, streamed)
    streamer.make_room_for_landings()
    if previous is not None and previous.following is not None:
        following.take_over(previous.following)
        if not is_move:
            return  # nothing has moved, so no state has to: see NOTE [a change of plans]
    if not is_fake:  # on a stage there is no state yet, and looking for optimizers goes through all of Python's objects
        in_parts.refuse_joined_gradients(model)
        state_following.follow_all(following)
        torch.accelerator.empty_cache()  # otherwise the segments that parameters have left stay reserved


def _attach_layers(
    streamer: Streamer,
    modules: dict[str, nn.Module],
    streamed: Collection[int],
    undo: contextlib.ExitStack,
    newcomers: Newcomers | None,
    *,
    verify: bool,
) -> None:
    """Let each layer compute with weights that visit the device. `streamed` holds the ids of their parameters."""
    for index, (module_fqn, module) in enumerate(modules.items()):
        layer = StreamedForward(module, module_fqn, streamer, index, verify=verify)
        layer.slots = [slot for slot in slots_of(module.modules()) if id(slot.get()) in streamed]
        layer.newcomers = newcomers
        layer.attach(undo)
        streamer.add(layer)
        guard(layer.slots, streamer.homes, undo)


def _attach_model(streamer: Streamer, model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Attach what concerns the model as a whole: its forward, copies of it, and checkpoints inside of it."""
    undo.callback(model.register_forward_pre_hook(_ForwardStart(streamer)).remove)
    undo.callback(model.register_forward_hook(_ForwardEnd(streamer), always_call=True).remove)
    keep_copies_clean(model, undo)
    inner_checkpoints.attach(model, undo)
    computing_device.attach(model, streamer.homes, undo)


def _announce(streamer: Streamer, model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Tell optimizers that some parameters live on the host, so that they step each device's on their own."""
    visits = StepVisits(streamer)
    implementations.begin_streaming(visits)
    undo.callback(implementations.end_streaming, visits)
    in_parts.attach(model, undo)


class _ForwardStart(OwnHook):
    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def __call__(self, model: nn.Module, args: Any) -> None:
        if private.inside_functional_transform():
            raise OffloadError(
                "torch.func's transforms (grad, vmap, jvp and the like) cannot run over a model whose parameters are "
                "streamed: call memscale.detach(model) before, or set Config(enable_offloading=False)"
            )
        self._streamer.is_in_forward = True


class _ForwardEnd(OwnHook):
    """Note that the model's forward has ended or failed."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        self._streamer.is_in_forward = False
        self._streamer.drop_ahead()


def _find(actions: Iterable[StreamParameters], model: nn.Module) -> dict[str, nn.Module]:
    """The modules by name. A part that holds parameters belongs to one of them; an activation or a table of rotations
    may be in all of them, as it holds nothing that visits the device."""
    modules: dict[str, nn.Module] = {}
    inside: dict[nn.Module, str] = {}
    for action in actions:
        module = find_module(model, action.module_fqn)
        holders = [part for part in module.modules() if any(p is not None for p in part._parameters.values())]
        for part in holders:
            if part in inside:
                raise PlanError(
                    f"{action.module_fqn!r} and {inside[part]!r} share a module with parameters: stream one of them"
                )
        inside.update(dict.fromkeys(holders, action.module_fqn))
        modules[action.module_fqn] = module
    places = {id(module): place for place, module in enumerate(model.modules())}
    return dict(sorted(modules.items(), key=lambda item: places[id(item[1])]))  # a first guess at their order


def rest_of(model: nn.Module, block_fqns: Iterable[str]) -> tuple[str, ...]:
    """Return what could be streamed beside the blocks: embeddings, norms, heads, as the smallest modules possible.

    Parameters of modules that contain others are left out, but for attention, which reads the weights of a module of
    its own without calling that. Whoever streams a weight must stream all modules that share it.
    """
    inside = {part for module_fqn in block_fqns for part in model.get_submodule(module_fqn).modules()}
    whole = [part for part in model.modules() if isinstance(part, nn.MultiheadAttention) and part not in inside]
    inside |= {part for attention in whole for part in attention.modules() if part is not attention}
    return tuple(
        module_fqn
        for module_fqn, module in model.named_modules()
        if module not in inside
        and any(True for _ in module.parameters())
        and (module in whole or not any(True for _ in module.children()))
    )


def streamable(model: nn.Module, modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters that can live on the host: plain memory, registered only in these layers."""
    inside = {part for module in modules for part in module.modules()}
    streamed: set[int] = set()
    outside = {id(p) for part in model.modules() if part not in inside for p in part._parameters.values()}
    for group in overlapping(model.parameters()):
        if all(id(p) not in outside and _is_plain(p) for p in group):
            streamed.update(id(p) for p in group)
    return streamed


def shared(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that several modules have, such as tied embeddings; each of them once."""
    counts = collections.Counter(id(slot.get()) for slot in slots_of(model.modules()))
    return [parameter for parameter in model.parameters() if counts[id(parameter)] > 1]


def _is_plain(parameter: torch.Tensor) -> bool:
    is_plain = type(parameter) in (nn.Parameter, torch.Tensor) or private.is_fake(parameter)
    return is_plain and parameter.layout is torch.strided and not is_expanded(parameter)


def _open(
    device: torch.device, undo: contextlib.ExitStack, how: Streaming, *, is_fake: bool
) -> tuple[Homes, Transfers]:
    store: Store
    if is_fake:
        store = ShapeStore()
    else:
        largest_bytes = LARGEST_SEGMENT_BYTES
        store = HostStore(how.host_budget_bytes, pinned=how.asynchronous, segment_bytes=largest_bytes, splits=False)
    homes = Homes(device, store if how.asynchronous or is_fake else None, how.placed_from)
    undo.callback(_close, homes, store)
    transfers = Transfers(device, store, asynchronous=how.asynchronous, window_bytes=how.gradient_window_bytes)
    undo.callback(_close, homes, transfers)
    return homes, transfers


def _leave_adopted(following: Followers, homes: Homes) -> None:
    """Keep state that waits, or will wait, from coming to the device as a whole between two plans."""
    following.leaves_adopted = homes.are_handed_over


def _close(homes: Homes, part: Store | Transfers) -> None:
    """Close what homes need, unless another plan has taken the homes over and closes it later."""
    if not homes.are_handed_over:
        part.close()


def let_go(streamer: Streamer, model: nn.Module) -> None:
    """Take back homes that were handed over to a plan that did not come. Their state returns with them."""
    with contextlib.ExitStack() as undo:
        undo.callback(streamer.store.close)
        undo.callback(streamer.transfers.close)
        state_following.follow_all(state_following.attach(model, undo))
        streamer.homes.keep()
        undo.callback(streamer.homes.restore)
