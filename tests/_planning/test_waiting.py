"""What a plan says of host memory is enough: a host that has just so much trains."""

from __future__ import annotations

import pytest
import torch

import simgpu  # noqa: F401  before the first backward: autograd counts the devices then
from memscale import Config
from memscale._decide.choice import Choice, RunOptions
from memscale._decide.search import Candidate
from memscale._decide.write_plan import Decision, write_plan
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._hardware import Hardware
from memscale._plan import Plan, Reason
from memscale._planning import Planner
from memscale._planning.job import Job
from memscale._profile import STREAM
from memscale._profile.inputs import Inputs
from tests._profile.test_shallow import Deep

IDS = torch.zeros(2, 16, dtype=torch.long)


def planned(num_streamed: int, run: RunOptions, *, is_confirmed: bool) -> Plan:
    """Some blocks are streamed, and a share of the state of the others stays on the device."""
    with torch.device("meta"):
        model, ids = Deep(8, width=256), torch.zeros_like(IDS)
    planner = Planner(Job(model, Config(async_offload=False), Hardware.from_name("RTX 3070")), Inputs.from_sample(ids))
    eligible = planner.job.eligible
    planner.look_into_everything(eligible)
    costs = planner.cost_model()
    choice = Choice(tuple((fqn, STREAM) for fqn in list(planner.rehearsal.blocks)[:num_streamed]), run)
    chosen = Candidate(choice, costs.evaluate(choice))
    plan = write_plan(
        costs, eligible, Decision("rules", costs.evaluate(Choice()), chosen, True, Reason("asked for", {}))
    )
    return planner.confirm(plan, eligible) if is_confirmed else plan


@pytest.mark.parametrize("is_confirmed", [False, True])
@pytest.mark.parametrize(("num_streamed", "streams_rest"), [(0, False), (3, False), (3, True), (6, False)])
def test_the_host_memory_of_a_plan_is_enough_where_a_share_of_the_state_stays(
    num_streamed: int, streams_rest: bool, is_confirmed: bool
) -> None:
    """With some blocks streamed the others' state comes in other buckets, and fewer of these stay than of all."""
    run = RunOptions(offloads_optimizer=0.75, streams_rest=streams_rest, steps_on_device=num_streamed > 0)
    plan = planned(num_streamed, run, is_confirmed=is_confirmed)
    model = Deep(8, width=256).to("simgpu")
    optimizer = torch.optim.AdamW(model.parameters())
    device, host_bytes = torch.device("simgpu"), plan.host_bytes + plan.movable_bytes
    executor = Executor(model, ExecutionSettings(device, host_budget_bytes=host_bytes), optimizer)
    executor.attach(plan.actions, plan.movable_bytes)
    for _ in range(2):
        model(IDS.to(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    executor.detach()
