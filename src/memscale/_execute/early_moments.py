"""The moments of a step at which optimizer state is asked for early, and those at which it is given up.

State is asked for where a layer's backward begins, in autograd's thread and on the stream that computes there, as a
streamed layer's weights are. It is given up where a forward begins, whatever that is for: of a step that has more
batches, of an evaluation, or after a step that was skipped; and where another backward begins, of which nothing is free
yet. A backward that keeps its graph frees nothing that state could come to. See NOTE [early state] in
techniques/offload/optimizer/early_arrivals.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from memscale._execute import reserving
from memscale._plan import ReleasePoint
from memscale._torch import private
from memscale._torch.overrides import OwnHook

if TYPE_CHECKING:
    from memscale._execute.attachment import Attachment
    from memscale.techniques.offload.optimizer.adoption import Adoption


def watch(to: Attachment) -> None:
    """Ask for state early as the plan says, until undone; nothing where no state waits, or where the compiler would
    trace our hooks. See NOTE [around compiled code] in overrides.py."""
    adoption, layers = to.users.get("optimizer"), [*map(to.find_module, to.early)]
    if not layers or adoption is None or any(map(private.is_compiled, (to.model, *layers))):
        return
    asked = _Asked(adoption, {action.module_fqn: action.num_bytes for action in to.early})
    adoption.expect_early(asked.num_bytes)
    to.undo.callback(adoption.expect_early, 0)
    reserving.watch(to.model, asked.points, asked.reach, to.undo)
    for module in {id(one): one for one in (to.model, *layers)}.values():
        to.undo.callback(module.register_forward_pre_hook(_GiveUp(adoption)).remove)


class _Asked:
    """How much is asked for at which layer."""

    def __init__(self, adoption: Adoption, sizes: dict[str, int]) -> None:
        self._adoption, self._sizes = adoption, sizes
        self.points = [ReleasePoint("backward", module_fqn) for module_fqn in sizes]
        self._pass = private.graph_task_id()
        """The backward pass that has asked last."""

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def reach(self, point: ReleasePoint) -> None:
        before, self._pass = self._pass, private.graph_task_id()
        if before != self._pass:
            self._adoption.drop_early()
        if not private.keeps_graph():
            self._adoption.fetch_early(self._sizes[point.module_fqn])


class _GiveUp(OwnHook):
    """A forward begins; what is computed again in backward is none."""

    def __init__(self, adoption: Adoption) -> None:
        self._adoption = adoption

    def __call__(self, module: nn.Module, args: Any) -> None:
        if private.graph_task_id() < 0:
            self._adoption.drop_early()
