"""Plans that are kept: found again by the next start of a program, and by nothing else."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import pathlib
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

import memscale
from memscale._decide.budget import Held
from memscale._execute.executor import executor_of
from memscale._hardware import Hardware
from memscale._plan import AllocatorUse, ReleasePoint
from memscale._planning.job import Job, open_job
from memscale._planning.saved import plan_cache
from memscale._planning.saved.fingerprint import NoFingerprintError, _own_files, fingerprint
from memscale._profile.inputs import Inputs
from memscale._torch.overrides import OwnHook
from tests.models import WIDTH, Chain, TwoLinears, small

BATCH = torch.zeros(512, WIDTH)


@pytest.fixture
def directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("MEMSCALE_CACHE", "1")
    monkeypatch.setenv("MEMSCALE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture
def wrapped() -> Iterator[Callable[..., memscale.Plan]]:
    """Wraps a model and gives its plan."""
    models: list[nn.Module] = []

    def wrap(model: nn.Module, sample: torch.Tensor, **options: Any) -> memscale.Plan:
        memscale.wrap(model, memscale.Config(enable_logging=False, memory_budget_gb=1, **options), sample_input=sample)
        models.append(model)
        plan = executor_of(model).plan
        assert plan is not None
        return plan

    yield wrap
    for model in models:
        memscale.detach(model)


def key_of(model: nn.Module, sample: Any = BATCH, **changes: Any) -> str:
    job = open_job(model, memscale.Config(memory_budget_gb=1))
    return fingerprint(dataclasses.replace(job, **changes), Inputs.from_sample(sample))


# ---- what a plan rests on


def test_a_copy_has_the_same_fingerprint_and_other_weights_have_it_too() -> None:
    model = small()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    assert key_of(model) == key_of(other)


def _freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def _to_half(model: nn.Module) -> None:
    model.bfloat16()


def _hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, output: output)


def _attribute(model: nn.Module) -> None:
    model.num_repeats = 3


def _inner_attribute(model: nn.Module) -> None:
    next(m for m in model.modules() if isinstance(m, nn.Linear)).rate = 0.5


def _integers(model: nn.Module) -> None:
    model.register_buffer("order", torch.tensor([2, 1, 0]))


def _tied(model: nn.Module) -> None:
    first, second = [m for m in model.modules() if isinstance(m, nn.Linear)][:2]
    second.bias = first.bias


def _forward(model: nn.Module) -> None:
    model.forward = lambda x: x * 2


def _to_eval(model: nn.Module) -> None:
    model.eval()


CHANGES = [_freeze, _to_half, _hook, _attribute, _inner_attribute, _integers, _forward, _to_eval]


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_has_another_fingerprint(change: Callable[[nn.Module], None]) -> None:
    model = small()
    before = key_of(model)
    change(model)
    assert key_of(model) != before


def _repeating(times: int) -> nn.Module:
    """A model of a class that a function made: what its forward does is not in the model, nor in the class's name."""

    class Repeating(TwoLinears):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                x = super().forward(x) * self.scale
            return x

    torch.manual_seed(0)
    return Repeating()


def test_what_a_class_closes_over_and_what_was_set_on_it_counts() -> None:
    assert key_of(_repeating(2)) == key_of(_repeating(2))
    assert key_of(_repeating(2)) != key_of(_repeating(3))
    scaled = _repeating(2)
    type(scaled).scale = 2.0
    assert key_of(scaled) != key_of(_repeating(2))


def test_sharing_counts() -> None:
    def two() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    model = two()
    _tied(model)
    assert key_of(model) != key_of(two())


def test_values_of_integers_count_and_those_of_floats_do_not() -> None:
    def with_buffer(values: list[Any]) -> str:
        model = small()
        model.register_buffer("order", torch.tensor(values))
        return key_of(model)

    assert with_buffer([0, 1, 2]) != with_buffer([2, 1, 0])
    assert with_buffer([0.0, 1.0]) == with_buffer([5.0, 7.0])


def test_batch_optimizer_wishes_and_hardware_count() -> None:
    model = small()
    job = open_job(model, memscale.Config(memory_budget_gb=1))
    faster = dataclasses.replace(job.hardware, fp32_flops=job.hardware.fp32_flops * 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keys = [
        key_of(model),
        key_of(model, torch.zeros(9, WIDTH)),
        key_of(model, (BATCH, True)),
        key_of(model, optimizer="sgd"),
        key_of(model, optimizer=sgd),
        key_of(model, optimizer=momentum),
        key_of(model, config=memscale.Config(memory_budget_gb=2)),
        key_of(model, hardware=faster),
        key_of(model, holds_gradients=True),
    ]
    assert len(set(keys)) == len(keys)


def test_options_that_an_optimizer_keeps_for_itself_count() -> None:
    """bitsandbytes has one class for 8 and 32 bits."""
    model = small()
    optimizers = [bnb.optim.AdamW(model.parameters(), optim_bits=bits) for bits in (32, 8, 8)]
    keys = [key_of(model, optimizer=optimizer) for optimizer in optimizers]
    assert keys[0] != keys[1] == keys[2]


def test_what_is_free_now_and_the_learning_rate_do_not_count() -> None:
    model = small()
    hardware = open_job(model, memscale.Config()).hardware
    fuller = dataclasses.replace(hardware, free_bytes=1, host_available_bytes=1)
    assert key_of(model, hardware=hardware) == key_of(model, hardware=fuller)
    fast, slow = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.01))
    assert key_of(model, optimizer=fast) == key_of(model, optimizer=slow)


def test_hooks_of_ours_do_not_count() -> None:
    class Ours(OwnHook):
        def __call__(self, module: nn.Module, args: Any) -> None: ...

    model = small()
    before = key_of(model)
    model.register_forward_pre_hook(Ours())
    assert key_of(model) == before


def test_how_many_hooks_the_process_has_had_does_not_count() -> None:
    """A model that is planned at its first forward has the hook that plans; hooks are numbered by the process."""
    first, second = small(), small()
    first.register_forward_pre_hook(_Ours(), with_kwargs=True)
    _inputs_seen(first)
    for _ in range(3):
        second.register_forward_pre_hook(_inputs, with_kwargs=True).remove()
    second.register_forward_pre_hook(_Ours(), with_kwargs=True)
    _inputs_seen(second)
    assert key_of(first) == key_of(second)
    other = small()
    other.register_forward_pre_hook(_inputs)
    assert key_of(other) != key_of(first), "whether a hook sees keywords counts"


def _inputs(module: nn.Module, args: Any, kwargs: Any = None) -> None: ...


def _inputs_seen(model: nn.Module) -> None:
    model.register_forward_pre_hook(_inputs, with_kwargs=True)


class _Ours(OwnHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None: ...


def test_circles_end_and_sets_have_no_order() -> None:
    model, other = small(), small()
    model.names, other.names = {"a", "b", "c"}, {"c", "b", "a"}
    model.owner, other.owner = [model], [other]
    assert key_of(model) == key_of(other)


def test_code_without_a_file_has_no_fingerprint() -> None:
    space: dict[str, Any] = {"nn": nn, "__name__": "__nowhere__"}
    exec("class Odd(nn.Linear):\n    pass", space)
    with pytest.raises(NoFingerprintError, match="__nowhere__"):
        key_of(space["Odd"](16, 16))


# ---- kept and found


@pytest.mark.parametrize("link", ["none", "file", "folder"])
def test_what_is_linked_into_installed_packages_is_the_users_own_code(
    link: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of installed packages the version counts; of code that is edited elsewhere, every file."""
    edited, packages = tmp_path / "edited" / "linked.py", tmp_path / "site-packages"
    edited.parent.mkdir()
    edited.write_text("")
    packages.mkdir()
    places = {"none": packages / "linked.py", "file": packages / "linked.py", "folder": packages / "here" / "linked.py"}
    if link == "folder":
        (packages / "here").symlink_to(edited.parent)
    elif link == "file":
        places[link].symlink_to(edited)
    else:
        places[link].write_text("")
    module = types.ModuleType("linked")
    module.__file__ = str(places[link])
    monkeypatch.setitem(sys.modules, "linked", module)
    own = _own_files()
    assert (edited.resolve() in own) == (link != "none")
    assert places["none"].resolve() not in own or link == "file"


def test_the_second_wrap_finds_the_plan(directory: pathlib.Path, wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = wrapped(small(), BATCH, force_optimize=True)
    assert first.actions
    [file] = directory.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    monkeypatch.setattr("memscale._planning.loop.standing_job.make_plan", None)  # nothing is planned again
    assert wrapped(small(), BATCH, force_optimize=True) == first


def test_nothing_is_kept_when_it_is_switched_off(
    directory: pathlib.Path, wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSCALE_CACHE", "0")
    wrapped(small(), BATCH)
    assert not directory.exists()


def test_training_under_a_kept_plan_is_exact(directory: pathlib.Path, wrapped: Any) -> None:
    wrapped(small(), BATCH, force_optimize=True)
    model = small()
    twin = copy.deepcopy(model)
    wrapped(model, BATCH, force_optimize=True)
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters())
        for step in range(3):
            optimizer.zero_grad()
            each(torch.full((512, WIDTH), 0.1 * step)).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


class Masked(TwoLinears):
    """Values of its input decide how much it computes."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x[mask])


def test_a_plan_for_values_is_not_kept(directory: pathlib.Path) -> None:
    model = Masked()
    sample = (torch.zeros(8, WIDTH), torch.ones(8, dtype=torch.bool))
    memscale.wrap(model, memscale.Config(enable_logging=False), sample_input=sample)
    memscale.detach(model)
    assert not directory.exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "plan": {"actions": 3}}', "\x00" * 100])
def test_a_file_that_is_no_plan_is_planned_over(directory: pathlib.Path, wrapped: Any, content: str) -> None:
    first = wrapped(small(), BATCH)
    [file] = directory.iterdir()
    file.write_text(content)
    assert wrapped(small(), BATCH) == first
    assert json.loads(file.read_text())["key"] == file.stem


def _another_module(plan: dict[str, Any]) -> None:
    plan["rows"][0]["module_fqn"] = "elsewhere"


def _another_peak(plan: dict[str, Any]) -> None:
    plan["predicted_peak_bytes"] -= 1


def _misfit(plan: dict[str, Any]) -> None:
    plan["fits"] = False


@pytest.mark.parametrize("change", [_another_module, _another_peak, _misfit])
def test_a_plan_that_is_not_as_it_was_written_is_made_again(
    directory: pathlib.Path, wrapped: Any, change: Callable[[dict[str, Any]], None]
) -> None:
    """It may still be read as a plan, which names what the model does not have, or promises what it does not keep."""
    first = wrapped(small(), BATCH)
    [file] = directory.iterdir()
    written = file.read_text()
    content = json.loads(written)
    change(content["plan"])
    file.write_text(json.dumps(content))
    [kept] = plan_cache.kept_plans()
    assert kept.plan is None
    assert wrapped(small(), BATCH) == first
    assert json.loads(file.read_text())["plan"] == json.loads(written)["plan"]


def test_what_lies_behind_a_link_is_not_touched(directory: pathlib.Path, wrapped: Any, tmp_path: pathlib.Path) -> None:
    wrapped(small(), BATCH)
    [file] = directory.iterdir()
    precious = tmp_path / "precious"
    precious.write_text(file.read_text())
    before = precious.read_text()
    file.unlink()
    file.symlink_to(precious)
    wrapped(small(), BATCH)
    assert precious.read_text() == before
    assert not file.is_symlink()


def test_a_directory_that_cannot_be_written_costs_nothing(
    wrapped: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv("MEMSCALE_CACHE", "1")
    monkeypatch.setenv("MEMSCALE_CACHE_DIR", str(blocked))
    assert wrapped(small(), BATCH).fits


# ---- budgets that drift


def slot_with(plan: memscale.Plan, job: Job) -> plan_cache.PlanSlot:
    slot = plan_cache.slot_for(job, Inputs.from_sample(BATCH))
    assert slot is not None
    slot.write(plan)
    return slot


def job_with(free_bytes: int, plan: memscale.Plan, model: nn.Module) -> Job:
    hardware = dataclasses.replace(Hardware.detect("cpu"), free_bytes=free_bytes, total_bytes=100 * free_bytes)
    return Job(model, memscale.Config(), hardware)


@pytest.mark.parametrize(("factor", "is_used"), [(0.5, False), (1.0, True), (1.01, True), (1.5, False)])
def test_a_plan_is_used_while_about_as_much_is_free(
    directory: pathlib.Path, wrapped: Any, factor: float, is_used: bool
) -> None:
    model = small()
    plan = wrapped(small(), BATCH, force_optimize=True)
    then_bytes = plan.predicted_peak_bytes + 10
    made = dataclasses.replace(plan, budget_bytes=then_bytes)
    now_bytes = int(then_bytes * factor)
    found = slot_with(made, job_with(now_bytes, plan, model)).read()
    assert (found is not None) == is_used
    assert found is None or found.budget_bytes == now_bytes


def test_a_plan_without_techniques_is_used_however_much_is_free(directory: pathlib.Path, wrapped: Any) -> None:
    plan = wrapped(small(), BATCH)
    assert not plan.actions
    found = slot_with(plan, job_with(plan.budget_bytes * 3, plan, small())).read()
    assert found is not None


def test_a_kept_plan_asks_the_same_of_the_allocator(directory: pathlib.Path, wrapped: Any) -> None:
    """It was left out of what was read: the second start reserved up to a quarter more than the plan promised."""
    card = Hardware.from_name("RTX 3090")
    asked = AllocatorUse("expandable_segments:True", (ReleasePoint("backward", "0"),), 5_000_000)
    held = Held.on(card, 3_000_000, 4_000_000, asked)
    plan = dataclasses.replace(held.written_in(wrapped(small(), BATCH, force_optimize=True)), device_type="cuda")
    job = Job(small(), memscale.Config(), card)
    made = dataclasses.replace(plan, budget_bytes=job.eligible.budget.device_bytes)
    assert slot_with(made, job).read() == made


def test_the_oldest_plans_go_first(directory: pathlib.Path, wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_MAX_PLANS", 2)
    batches = []
    for size in (4, 5, 6):
        batches.append(wrapped(small(), torch.zeros(size, WIDTH)).inputs)
        for file in directory.iterdir():  # the clock of a file system may be coarse
            os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9))
    assert [each.plan.inputs for each in plan_cache.kept_plans() if each.plan] == [batches[2], batches[1]]


# ---- across processes

PROGRAM = """
    import sys, torch, memscale
    from torch import nn
    import layers

    class Setting:
        def __init__(self):
            self.names = {"some", "names", "in a set"}
            self.own_hash = hash("differs in every process")

    model = nn.Sequential(*(layers.Block() for _ in range(3)))
    model.setting = Setting()
    memscale.wrap(model, memscale.Config(enable_logging=False, force_optimize=True), sample_input=torch.zeros(8, 16))
    print(model._memscale_executor.plan.predicted_peak_bytes)
"""
LAYERS = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, WIDTH)
            self.outer = nn.Linear(WIDTH, 16)

        def forward(self, x):
            return x + self.outer(FUNCTION(self.inner(x)))
"""


@pytest.mark.slow
def test_files_that_another_process_deletes_meanwhile_are_left_out(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:064x}.json" for number in range(3)]
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_text('{"plan": null}')
    kept = plan_cache.kept_plans()
    seen = [next(kept).file_name]
    (directory / next(name for name in names if name not in seen)).unlink()
    assert len({*seen, *(each.file_name for each in kept)}) == 2

    listed = sorted(directory.iterdir())
    listed[0].unlink()
    monkeypatch.setattr(pathlib.Path, "iterdir", lambda path: iter(listed))  # listed before it was deleted
    assert plan_cache.clear() == 1
    assert not any(path.exists() for path in listed)


def test_another_process_finds_it_and_changed_code_does_not(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))

    def run(function: str) -> set[str]:
        text = textwrap.dedent(LAYERS).replace("WIDTH", "64").replace("FUNCTION", function)
        (tmp_path / "layers.py").write_text(text)
        subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, capture_output=True, timeout=600)
        return {file.name for file in directory.iterdir()}

    once = run("torch.relu")
    assert len(once) == 1
    assert run("torch.relu") == once
    assert len(run("torch.sigmoid")) == 2


def test_it_says_that_a_kept_plan_is_used(
    directory: pathlib.Path, wrapped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped(small(), BATCH)
    with caplog.at_level(logging.INFO, "memscale"):
        wrapped(small(), BATCH)
    assert "was made for this before" in caplog.text


def test_a_chain_of_another_length_is_another(directory: pathlib.Path) -> None:
    assert key_of(Chain(*(TwoLinears() for _ in range(2)))) != key_of(Chain(*(TwoLinears() for _ in range(3))))
