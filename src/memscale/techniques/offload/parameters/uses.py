"""How the calls of a streamed layer use its weights: how often each, and how many of these uses are autocast's casts.

Uses are counted in the graph that a call has made: at a layer's first forward in each mode (training or not, with and
without autocast), at every forward that makes another number of nodes than those that were counted (a layer that leaves
parts out by chance), and at every forward of a layer that is called again while an earlier call still waits for its
backward. A cast by autocast and one by the layer's code look the same there: a function mode sees the latter, in calls
of which nothing is known beforehand and in layers that have made such a cast.

Known limits: it is not noticed if a call uses one parameter more often than the calls before it and another less, with
as many nodes, in the first step in which the layer is called twice. Casts by code that Python does not run
(TorchScript, extensions in C++) pass for autocast's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memscale._torch import private

_CAST = "ToCopyBackward0"


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """How one call uses one of its weights."""

    count: int = 0
    casts: int = 0
    """How many of them are autocast's casts."""


class _CastsByHand(TorchFunctionMode):
    """Counts the casts of these nodes' tensors that Python asks for while it is entered."""

    def __init__(self, nodes: Iterable[Any]) -> None:
        super().__init__()
        self._nodes = {node for node in nodes if node is not None}
        self._casts: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            node = private.node_of(result)
            if node is not None and node.name() == _CAST and node.next_functions[0][0] in self._nodes:
                self._casts.add(node)
        return result

    def counts(self) -> collections.Counter[Any]:
        """Return how often each node's tensor was cast, and let go of the casts."""
        casts, self._casts = self._casts, set()
        return collections.Counter(node.next_functions[0][0] for node in casts)


class Uses:
    """Knows how the calls of one layer use its weights."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, ...], dict[int, Sequence[Use]]] = {}
        """The uses by training mode, by whether autocast shares casts, and by which weights are trained; there by the
        number of nodes that the call has made."""
        self._counts_always = False
        self._casts_by_hand = False
        self._last_shared: Sequence[Use] | None = None

    def may_be_cast(self, position: int) -> bool:
        """Whether autocast casts this weight, by the last call that was counted under it."""
        last = self._last_shared
        return last is None or last[position].casts > 0 or last[position].count == 0

    def begin(self, module: nn.Module, weights: list[Any], *, shares_casts: bool, is_called_again: bool) -> Call:
        """Return the call that begins, with these weights; its uses are counted unless they are known."""
        self._counts_always = self._counts_always or is_called_again
        key = (module.training, shares_casts, *(getattr(weight, "grad_fn", None) is not None for weight in weights))
        known = {} if self._counts_always else self._known.get(key, {})
        looks = shares_casts and (self._casts_by_hand or not known)
        return Call(self, key, known, module, weights, sees_casts=looks)

    def note(self, key: tuple[bool, ...], num_nodes: int, uses: Sequence[Use], *, casts_by_hand: bool) -> None:
        self._known.setdefault(key, {})[num_nodes] = uses
        self._casts_by_hand = self._casts_by_hand or casts_by_hand
        if key[1]:
            self._last_shared = uses


class Call:
    """One call, whose uses are counted unless `known` has them for so many nodes as it makes."""

    def __init__(
        self,
        uses: Uses,
        key: tuple[bool, ...],
        known: dict[int, Sequence[Use]],
        module: nn.Module,
        weights: list[Any],
        *,
        sees_casts: bool,
    ) -> None:
        self._uses, self._key, self._known, self._module = uses, key, known, module
        self._nodes = [getattr(weight, "grad_fn", None) for weight in weights]
        self._since = private.next_sequence_number()
        self._by_hand = _CastsByHand(self._nodes) if sees_casts else None

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, the call computes."""
        return contextlib.nullcontext() if self._by_hand is None else self._by_hand

    def counted(self, output: Any) -> Sequence[Use]:
        num_nodes = private.next_sequence_number() - self._since
        by_hand = collections.Counter() if self._by_hand is None else self._by_hand.counts()
        known = self._known.get(num_nodes)
        if known is not None:
            return known
        kept = [value for part in self._module.modules() for value in vars(part).values()]
        leaves = [leaf for leaf in (*tree_leaves(output), *kept) if isinstance(leaf, torch.Tensor)]
        # Asking lazy logits for their graph would build them; they use their weight once, whatever their tiles.
        roots = [leaf.grad_fn for leaf in leaves if not getattr(leaf, "is_lazy", False)]
        users = _users(roots, self._nodes, self._since)
        casts = [each.count(_CAST) - by_hand[node] for each, node in zip(users, self._nodes, strict=True)]
        shares_casts = self._key[1]
        counted = [Use(len(each), num if shares_casts else 0) for each, num in zip(users, casts, strict=True)]
        self._uses.note(self._key, num_nodes, counted, casts_by_hand=by_hand.total() > 0)
        return counted


def _users(roots: Iterable[Any], targets: list[Any], since: int) -> list[list[str]]:
    """The names of what uses each target in the graph above them, once a use, among nodes no older than `since`."""
    found: dict[Any, list[str]] = {target: [] for target in targets if target is not None}
    waiting = [root for root in roots if root is not None and root not in found]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if private.sequence_number(node) < since:
            continue
        for following, _ in node.next_functions:
            if following in found:
                found[following].append(node.name())
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return [found.get(target, []) for target in targets]
