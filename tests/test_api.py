"""The public verbs: what they return, refuse, replace and undo."""

from __future__ import annotations

import inspect
import logging
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, ConfigError, DoesNotFitError, ProfileError
from memscale._execute.executor import executor_of
from tests._torch.test_overrides import snapshot
from tests.models import Mlp, features, small, square_loss
from tests.parity import attached_plan

QUIET = Config(force_optimize=True, enable_logging=False)
SAMPLE = torch.ones(64, 16)


# ---- wrap


def test_wrap_returns_the_same_object() -> None:
    model = small()
    assert memscale.wrap(model, QUIET, SAMPLE) is model
    assert model._memscale_executor is executor_of(model)
    assert attached_plan(model).actions
    assert attached_plan(model).rehearsed
    assert attached_plan(model).fits


def test_the_executor_of_a_wrapped_model_has_a_public_name() -> None:
    model = memscale.wrap(small(), QUIET, SAMPLE)
    executor = memscale.executor_of(model)
    assert executor is executor_of(model)
    assert isinstance(executor, memscale.Executor)
    memscale.detach(model)
    with pytest.raises(memscale.MemScaleError, match="is not wrapped"):
        memscale.executor_of(model)


@pytest.mark.parametrize(
    "sample", [SAMPLE, (SAMPLE,), {"x": SAMPLE}, SAMPLE.to("meta")], ids=["tensor", "tuple", "dict", "meta"]
)
def test_samples_of_every_kind_give_the_same_plan(sample: Any) -> None:
    plans = {attached_plan(memscale.wrap(small(), QUIET, given)).predicted_peak_bytes for given in (sample, SAMPLE)}
    assert len(plans) == 1


@pytest.mark.parametrize("target", [None, 3, "model", torch.ones(3), Mlp, [Mlp()]], ids=lambda t: type(t).__name__)
def test_anything_but_a_model_is_named(target: Any) -> None:
    for verb in (memscale.wrap, memscale.detach, memscale.executor_of):
        named = target if isinstance(target, type) else type(target)
        with pytest.raises(TypeError, match=named.__name__):
            verb(target)


def test_what_to_do_with_the_object_of_a_known_package_is_said() -> None:
    for package, said in {
        "accelerate": "Known of accelerate: wrap the model, before or after accelerator.prepare",
        "diffusers": "Known of diffusers: wrap the network that is trained",
        "lightning": r"Known of lightning: .*MemScaleCallback\(config\)",
        "peft": "Known of peft: wrap what get_peft_model returns",
        "pytorch_lightning": r"Known of pytorch_lightning: .*MemScaleCallback\(config\)",
        "transformers": "Known of transformers: wrap the model, or the Trainer that has it",
    }.items():
        target = type("Known", (), {"__module__": f"{package}.inside"})()
        theirs = type("Theirs", (type(target),), {"__module__": "program"})()
        for verb in (memscale.wrap, memscale.estimate):
            with pytest.raises(TypeError, match=said):
                verb(target)
            with pytest.raises(TypeError, match=said.replace("Known of", "Theirs of")):
                verb(theirs)
    with pytest.raises(TypeError, match="the class Mlp: make an instance of it"):
        memscale.wrap(Mlp)


def test_other_wrong_arguments_are_named() -> None:
    model = small()
    before = snapshot(model)
    with pytest.raises(TypeError, match="str"):
        memscale.wrap(model, QUIET, ["a batch"])
    with pytest.raises(ValueError, match="empty list"):
        memscale.wrap(model, QUIET, [])
    with pytest.raises(TypeError, match="str"), memscale.optimize(model, "adamw", QUIET):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="config"):
        memscale.wrap(model, "aggressive")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config"):
        memscale.wrap(model, {"mode": "aggressive"})  # type: ignore[arg-type]
    assert snapshot(model) == before


def test_a_model_that_fits_is_left_alone() -> None:
    model = memscale.wrap(small(), Config(enable_logging=False), SAMPLE)
    assert attached_plan(model).actions == ()
    assert all("forward" not in vars(module) for module in model.modules())
    square_loss(model(SAMPLE)).backward()
    memscale.detach(model)


def test_wrapping_twice_replaces_the_plan_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    before = snapshot(model)
    first = executor_of(memscale.wrap(model, QUIET, SAMPLE))
    with caplog.at_level(logging.INFO, "memscale"):
        memscale.wrap(model, QUIET.replace(enable_checkpointing=False, enable_offloading=False), SAMPLE)
    assert len([r for r in caplog.records if "replaced" in r.getMessage()]) == 1
    assert executor_of(model) is not first
    assert first is not None
    assert first.detached
    assert attached_plan(model).actions == ()
    memscale.detach(model)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("config", "sample", "error"),
    [
        (QUIET, torch.ones(3, 5), ProfileError),
        (QUIET, {"y": SAMPLE}, ProfileError),
        (QUIET.replace(memory_budget_gb=1e-6, force_optimize=False), SAMPLE, DoesNotFitError),
        (QUIET.replace(log_file="/nonexistent/x.log"), SAMPLE, ConfigError),
        (QUIET.replace(device="mps"), SAMPLE, ConfigError),
    ],
    ids=["wrong shape", "wrong name", "too big", "no log", "no device"],
)
def test_an_error_half_way_leaves_no_trace(config: Config, sample: Any, error: type[Exception]) -> None:
    model = small()
    before = snapshot(model)
    with pytest.raises(error):
        memscale.wrap(model, config, sample)
    assert snapshot(model) == before
    square_loss(model(SAMPLE)).backward()


# ---- detach


def test_detach_is_idempotent_and_warns_where_there_is_nothing() -> None:
    model = small()
    before = snapshot(model)
    memscale.wrap(model, QUIET, SAMPLE)
    memscale.detach(model)
    assert snapshot(model) == before
    with pytest.warns(UserWarning, match="Chain is not wrapped"):
        memscale.detach(model)
    assert snapshot(model) == before


def test_the_warning_is_shown_once() -> None:
    model = small()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            memscale.detach(model)
    assert len(caught) == 1


def test_a_part_of_a_wrapped_model_is_not_wrapped_itself() -> None:
    model = memscale.wrap(small(), QUIET, SAMPLE)
    with pytest.warns(UserWarning, match="not wrapped"):
        memscale.detach(model.blocks[0])
    assert attached_plan(model).actions


# ---- optimize and apply_all_optimizations


def test_optimize_is_wrap_for_a_while() -> None:
    model = small()
    before = snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with memscale.optimize(model, optimizer, QUIET, SAMPLE) as executor:
        assert executor_of(model) is executor
        assert executor.plan is not None
        assert executor.plan.optimizer_name == "SGD"
        square_loss(model(SAMPLE)).backward()
        optimizer.step()
    assert executor.detached
    assert snapshot(model) == before


def test_optimize_without_its_block_attaches_nothing_and_says_so() -> None:
    model = small()
    with pytest.warns(UserWarning, match="without `with`, so nothing was attached"):
        memscale.optimize(model, None, QUIET, SAMPLE)
    assert executor_of(model) is None
    block = memscale.optimize(model, None, QUIET, SAMPLE)
    with block as executor:
        assert executor_of(model) is executor
    with pytest.raises(RuntimeError, match="entered before"), block:
        pass


def test_optimize_undoes_after_an_exception() -> None:
    model = small()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), memscale.optimize(model, None, QUIET, SAMPLE):
        _ = 1 / 0
    assert snapshot(model) == before


def test_optimize_survives_a_detach_inside() -> None:
    model = small()
    with memscale.optimize(model, None, QUIET, SAMPLE):
        memscale.detach(model)
    assert executor_of(model) is None


# ---- the environment


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_async_offload_by_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", text)
    assert executor_of(memscale.wrap(small(), QUIET)).settings.asynchronous is True
    assert executor_of(memscale.wrap(small(), QUIET, async_offload=False)).settings.asynchronous is False


@pytest.mark.parametrize("text", ["0", "false", "No", "off", ""])
def test_no_async_offload_by_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", text)
    config = QUIET.replace(async_offload=True)
    assert executor_of(memscale.wrap(small(), config)).settings.asynchronous is False
    assert executor_of(memscale.wrap(small(), config, async_offload=True)).settings.asynchronous is True


def test_async_offload_by_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMSCALE_ASYNC_OFFLOAD", raising=False)
    config = QUIET.replace(async_offload=True)
    assert executor_of(memscale.wrap(small(), config)).settings.asynchronous is True


def test_async_offload_is_left_to_the_plan_and_a_cpu_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMSCALE_ASYNC_OFFLOAD", raising=False)
    assert QUIET.async_offload is None
    executor = executor_of(memscale.wrap(small(), QUIET.replace(force_optimize=True), features(0)))
    assert executor.settings.asynchronous is False
    assert executor.plan.conditions.async_offload is False


def test_nonsense_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", "maybe")
    model = small()
    before = snapshot(model)
    with pytest.raises(memscale.MemScaleError, match="MEMSCALE_ASYNC_OFFLOAD='maybe'"):
        memscale.wrap(model, QUIET)
    assert snapshot(model) == before


# ---- saving while wrapped


def test_checkpoints_are_exchanged_with_plain_models(tmp_path: pathlib.Path) -> None:
    model = memscale.wrap(small(), QUIET, SAMPLE)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    plain = small()
    plain.load_state_dict(torch.load(tmp_path / "w.pt"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model.load_state_dict(plain.state_dict())


def test_lazy_modules_are_named() -> None:
    model = nn.Sequential(nn.Sequential(nn.LazyLinear(8), nn.ReLU()))
    with pytest.raises(memscale.MemScaleError, match=r"lazy.*run a batch"):
        memscale.wrap(model, Config(force_optimize=True, enable_logging=False), torch.zeros(2, 8))


@pytest.mark.parametrize("device", ["nonsense", "", "cuda:x"])
def test_a_device_that_is_none_names_the_field(device: str) -> None:
    with pytest.raises(ValueError, match="device="):
        memscale.wrap(nn.Linear(2, 2), Config(device=device, enable_logging=False))


def test_an_offload_dir_that_is_none_names_the_field(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in ("", str(file)):
        with pytest.raises(ValueError, match="offload_dir="):
            memscale.wrap(nn.Linear(2, 2), Config(offload_dir=path, enable_logging=False))


def test_a_budget_beyond_floats_names_the_field() -> None:
    with pytest.raises(ValueError, match="memory_budget_gb="):
        Config(memory_budget_gb=10**400)


def test_an_offload_dir_that_cannot_be_made_is_an_error_at_once(tmp_path: pathlib.Path) -> None:
    """Also for a model that fits as it is: the batch that does not may come hours later."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"offload_dir='/proc/none' cannot be written"):
        memscale.wrap(model, Config(offload_dir="/proc/none", enable_logging=False), torch.zeros(1, 2))
    assert not hasattr(model, "_memscale_executor")
    memscale.wrap(model, Config(offload_dir=str(tmp_path / "a" / "b"), enable_logging=False), torch.zeros(1, 2))
    assert list(tmp_path.iterdir()) == []  # made when it is needed
    memscale.detach(model)


def test_what_has_no_weights_and_what_takes_no_hooks_is_refused_with_the_reason() -> None:
    with pytest.raises(memscale.MemScaleError, match=r"Linear is on the meta device"):
        memscale.wrap(nn.Linear(2, 2, device="meta"), QUIET, torch.zeros(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated, and still met
        scripted = torch.jit.script(nn.Linear(2, 2))
    for model, name in ((scripted, "RecursiveScriptModule"), (nn.Sequential(scripted), r"Sequential\.0")):
        with pytest.raises(memscale.MemScaleError, match=rf"^{name} is TorchScript"):
            memscale.wrap(model, QUIET, torch.zeros(1, 2))


@pytest.mark.parametrize(
    "name",
    [
        *("wrap", "optimize", "execute", "detach", "apply_all_optimizations", "estimate", "measure"),
        *("park", "resume", "parked"),
    ],
)
def test_public_docstrings_teach(name: str) -> None:
    """An example, every argument, what is returned and what is raised."""
    function = getattr(memscale, name)
    text = inspect.getdoc(function) or ""
    assert f"memscale.{name}(" in text
    for argument in inspect.signature(function).parameters:
        assert f"    {argument}: " in text
    assert "Raises:" in text
    assert "Returns:" in text or inspect.signature(function).return_annotation in (None, "None")


CLASSES = [name for name in memscale.__all__ if inspect.isclass(getattr(memscale, name))]
"""Every public class; an error's example is that of its base."""


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.endswith("Error")])
def test_public_classes_show_how_they_are_used(name: str) -> None:
    _, *example = (inspect.getdoc(getattr(memscale, name)) or "").splitlines()
    assert any("memscale." in line for line in example)


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_public_in_a_class_is_documented(name: str) -> None:
    for member, value in vars(getattr(memscale, name)).items():
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize(
    "function",
    [
        Config.replace,
        memscale.Hardware.detect,
        memscale.Hardware.from_name,
        memscale.Plan.from_json,
        memscale.Plan.load,
        memscale.Plan.save,
    ],
    ids=lambda function: function.__qualname__,
)
def test_public_methods_with_arguments_teach(function: Callable[..., object]) -> None:
    text = inspect.getdoc(function) or ""
    for argument in inspect.signature(function).parameters:
        assert argument == "self" or f"    {argument}: " in text
    assert "Raises:" in text
    assert "Returns:" in text or inspect.signature(function).return_annotation in (None, "None")
