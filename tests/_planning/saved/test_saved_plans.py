"""A plan saved on one machine and executed on another does the same, or says why it cannot."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, DoesNotFitError, Plan, PlanError
from memscale._decide.eligible import resolve
from memscale._execute.executor import executor_of
from memscale._plan import Checkpoint, MixedPrecision, OffloadActivations, StreamParameters
from memscale._planning import make_plan
from memscale._planning.job import open_job
from memscale._planning.saved.saved_plans import device_for, refuse_plan
from memscale._profile.inputs import Inputs
from tests._torch.test_overrides import snapshot
from tests.models import Mlp, square_loss
from tests.parity import plan_of

QUIET = Config(enable_logging=False)

MAKE_AND_RUN = """
import sys, gc, json, torch, simgpu, memscale
from tests.models import Mlp
torch.set_num_threads(1)
made, executed, budget_gb = sys.argv[1], sys.argv[2], float(sys.argv[3])

def make():
    config = memscale.Config(device="simgpu", memory_budget_gb=budget_gb, enable_logging=False, async_offload=True,
                             async_config=memscale.AsyncOffloadConfig(min_tensor_bytes=1024, window_bytes=20_000))
    with memscale.optimize(Mlp(depth=4), config=config, sample_input=torch.zeros(64, 64)) as executor:
        executor.plan.save(made)

def run(path):
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    torch.manual_seed(0)
    model, moved = Mlp(depth=4), None
    if path is None:
        model.to("simgpu")
    else:
        executor = memscale.execute(model, memscale.Plan.load(path))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 64).to("simgpu")
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        del loss
    peak_bytes = torch.accelerator.max_memory_allocated()
    if path is not None:
        moved = executor.traffic()
        assert executor.settings.asynchronous
        memscale.detach(model)
    weights = [float(p.detach().cpu().double().sum()).hex() for p in model.parameters()]
    return losses, weights, peak_bytes, moved

make()
print(json.dumps([run(executed), run(None)]))
"""
"""Makes a plan, executes one, which may be another process's, and trains the plain model."""


def apart(code: str, *args: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_same_in_other_processes_bytes_and_bits(tmp_path: pathlib.Path) -> None:
    path, again = tmp_path / "plan.json", tmp_path / "again.json"
    paths, budget_gb = (str(path), str(path)), "0.0008"
    first, plain = json.loads(apart(MAKE_AND_RUN, *paths, budget_gb, PYTHONHASHSEED="1", MEMSCALE_MEASURE="0"))
    paths = (str(again), str(path))
    elsewhere = {"PYTHONHASHSEED": "2", "MEMSCALE_CACHE_DIR": str(tmp_path)}
    second, plain_there = json.loads(apart(MAKE_AND_RUN, *paths, budget_gb, **elsewhere))
    assert path.read_bytes() == again.read_bytes()
    plan = Plan.load(path)
    assert any(isinstance(action, StreamParameters) for action in plan.actions)
    assert first == second
    assert plain == plain_there
    assert first[:2] == plain[:2]
    assert first[2] == pytest.approx(plan.predicted_peak_bytes, rel=0.005)
    assert first[2] <= plan.budget_bytes < plain[2]


def made(**changes: Any) -> Plan:
    config = QUIET.replace(force_optimize=True, **changes)
    return make_plan(open_job(Mlp(), config), Inputs.from_sample(torch.zeros(64, 64)))


def test_an_executed_plan_trains_as_the_plain_model_does() -> None:
    plan = Plan.from_json(made().to_json())
    torch.manual_seed(0)
    plain, model = Mlp(), Mlp()
    model.load_state_dict(plain.state_dict())
    executor = memscale.execute(model, plan, QUIET)
    assert executor_of(model) is executor
    x = torch.randn(64, 64)
    for one in (plain, model):
        torch.manual_seed(1)
        square_loss(one(x)).backward()
    assert executor.stats().num_recomputes > 0
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    memscale.detach(model)


def test_it_takes_the_place_of_what_was_attached() -> None:
    model = Mlp()
    before = snapshot(model)
    memscale.wrap(model, QUIET.replace(force_optimize=True), torch.zeros(64, 64))
    executor = memscale.execute(model, plan_of([Checkpoint("blocks.1")]), QUIET)
    square_loss(model(torch.randn(4, 64))).backward()
    assert executor.stats().num_recomputes == 1
    memscale.detach(model)
    assert snapshot(model) == before


def test_the_optimizer_is_known_to_the_executor() -> None:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    executor = memscale.execute(model, plan_of([]), QUIET, optimizer)
    known = executor._offloading._optimizer
    assert known is not None
    assert known() is optimizer
    executor.detach()


# ---- what does not belong here


def refusal(plan: Any, kind: type[Exception], text: str, config: Config = QUIET) -> None:
    model = Mlp()
    before = snapshot(model)
    with pytest.raises(kind, match=text):
        memscale.execute(model, plan, config)
    assert snapshot(model) == before


def test_another_kind_of_device_says_so() -> None:
    plan = plan_of([Checkpoint("blocks.0")], device_type="cuda", device_name="RTX 3090")
    refusal(plan, PlanError, r"made for RTX 3090 \(cuda\), and there is none here.*memscale\.wrap")
    refusal(plan, PlanError, "config.device is 'cpu'", QUIET.replace(device="cpu"))


def test_a_plan_for_the_device_that_is_here_goes_there() -> None:
    plan = plan_of([], device_type="cpu")
    assert device_for(plan, Mlp(), QUIET) == torch.device("cpu")
    assert device_for(plan, Mlp().to("meta"), QUIET) == torch.device("cpu")


def test_less_memory_than_where_it_was_made_says_so() -> None:
    plan = plan_of([Checkpoint("blocks.0")], predicted_peak_bytes=3_000_000, device_name="that machine")
    refusal(
        plan, DoesNotFitError, "made for that machine, peaks at 3[.]0 MB.*is 2[.]0 MB", Config(memory_budget_gb=0.002)
    )


def test_a_disk_is_asked_for(tmp_path: pathlib.Path) -> None:
    plan = plan_of([OffloadActivations("blocks.0")])
    refusal(plan, PlanError, "offload_dir")
    plan = dataclasses.replace(plan, movable_bytes=1 << 60)
    refusal(plan, DoesNotFitError, "or on disk; here.*max_cpu_offload_gb", QUIET.replace(offload_dir=str(tmp_path)))


def test_less_host_memory_and_no_bfloat16_say_so() -> None:
    card = memscale.Hardware.from_name("T4")
    plan = plan_of([], device_type="cuda", host_bytes=2_000_000)
    refuse_plan(plan, resolve(QUIET, card))
    with pytest.raises(DoesNotFitError, match=r"2\.0 MB wait on the host"):
        refuse_plan(plan, resolve(QUIET.replace(max_cpu_offload_gb=0.001), card))
    with pytest.raises(PlanError, match="bfloat16, which T4 cannot"):
        refuse_plan(plan_of([MixedPrecision("bfloat16")]), resolve(QUIET, card))


@pytest.mark.parametrize("wrong", ["plan.json", None, nn.Linear(2, 2)], ids=lambda value: type(value).__name__)
def test_what_is_no_plan_is_a_type_error(wrong: Any) -> None:
    refusal(wrong, TypeError, r"takes a memscale\.Plan")


# ---- what a plan remembers


def test_conditions_are_saved_and_explained() -> None:
    plan = made(async_offload=True, async_config=memscale.AsyncOffloadConfig(window_bytes=12345))
    assert plan.conditions is not None
    assert plan.conditions.async_offload
    assert plan.conditions.window_bytes == 12345
    assert plan.conditions.speeds["fp32_flops"] > 0
    assert Plan.from_json(plan.to_json()) == plan
    line = next(line for line in plan.explain().splitlines() if "times by" in line)
    assert "TFLOP/s" in line
    assert "memory" in line
    assert Plan.from_json(plan.to_json()).explain() == plan.explain()


def test_plans_saved_before_they_said_why_transfers_block_still_load_and_run() -> None:
    plan = made(async_offload=False)
    data = json.loads(plan.to_json())
    del data["conditions"]["blocking"]
    old = Plan.from_json(json.dumps(data))
    assert old == plan
    memscale.execute(Mlp(), old, QUIET).detach()


def test_plans_saved_before_conditions_still_load_and_run() -> None:
    plan = made()
    data = json.loads(plan.to_json())
    del data["conditions"]
    old = Plan.from_json(json.dumps(data))
    assert old == dataclasses.replace(plan, conditions=None)
    assert "times by" not in old.explain()
    memscale.execute(Mlp(), old, QUIET).detach()
