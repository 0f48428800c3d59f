"""Trials for real: on the simulated device in this process, and on a processor through the command."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import transformers  # noqa: F401  its own set-up is not a trace that a test leaves
from torch.utils._python_dispatch import TorchDispatchMode

import simgpu
from memscale._errors import ConfigError
from memscale.cli import main
from memscale.commands.verify import trial
from memscale.commands.verify.cases import CardCase
from memscale.commands.verify.record import Record, parity_of
from tests.lanes import full

TINY = CardCase("bert-tiny", 4, 32)


@pytest.fixture(scope="module")
def plain() -> Any:
    return trial.run(trial.Order(TINY, "plain", "simgpu"))


def test_the_simulated_device_is_called_so() -> None:
    machine = trial.look("simgpu")
    assert (machine.computes, machine.clock) == (True, "modelled")


def test_a_wrapped_model_trains_the_same_within_its_budget(plain: Any) -> None:
    budget_bytes = plain.predicted.live * 3 // 4
    wrapped = trial.run(trial.Order(TINY, "budget", "simgpu", budget_bytes))
    for each in (plain, wrapped):
        assert each.outcome == "trained"
        assert each.measured.allocated == pytest.approx(each.predicted.live, rel=0.01)
    assert wrapped.measured.allocated <= budget_bytes < plain.measured.allocated
    assert wrapped.what != "nothing"
    assert wrapped.predicted_step_ms > plain.predicted_step_ms > 0
    record = Record(trial.look("simgpu"), (plain, wrapped))
    assert parity_of(record, TINY.title, "budget") == "identical, bit for bit"


def test_running_out_of_memory_is_a_result(plain: Any) -> None:
    simgpu.set_cap(plain.predicted.live // 2)
    found = trial.run(trial.Order(TINY, "plain", "simgpu"))
    assert found.outcome == "out of memory"
    assert found.predicted.live == plain.predicted.live, "what was predicted is not lost"
    assert found.measured.allocated is None


def test_having_no_plan_is_a_result() -> None:
    found = trial.run(trial.Order(TINY, "budget", "simgpu", 1_000_000))
    assert found.outcome == "does not fit"
    assert "1.0 MB" in found.detail


def test_a_device_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="PyTorch knows no such device"):
        trial.open_device("quantumgpu")


class Garbage(TorchDispatchMode):
    """Products come out as whatever the memory held."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.fill_(7.0) if func is torch.ops.aten.mm.default else result


def test_values_that_are_not_computed_are_found() -> None:
    assert trial._computes(torch.device("cpu"))
    assert trial._computes(torch.device("simgpu"))
    with Garbage():
        assert not trial._computes(torch.device("cpu"))


@pytest.mark.parametrize("model", ["vit-tiny", "gpt2", "clip-vit-base-patch32"])
def test_batches_have_the_shapes_and_ids_that_a_model_takes(model: str) -> None:
    from memscale import zoo

    inputs = trial.real_inputs(zoo.build(model), CardCase(model, 2))
    assert all(tensor.device.type == "cpu" for tensor in inputs.tensors())


def test_without_a_gpu_the_command_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify"]) == 2
    said = capsys.readouterr().err
    assert "there is no GPU to verify on" in said
    assert "memscale verify --device cpu" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "2"], "of models that are named"),
        (["gpt9"], "no model called"),
        (["bert-tiny", "--output", "/nowhere/x.json"], "there is no directory"),
    ],
)
def test_bad_input_is_said_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    assert said in capsys.readouterr().err


@full
def test_a_processor_through_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.json"
    command = ["verify", "bert-tiny", "--batch", "2", "--seq", "16", "--device", "cpu", "--output", str(path)]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "1 of 4: bert-tiny, 2 x 16, plain" in shown.err
    assert "identical, bit for bit" in shown.out
    record = Record.load(path)
    trained = [each for each in record.trials if each.outcome == "trained"]
    assert [each.way for each in trained] == ["plain", "plain again", "lowest"]
    for each in trained:
        assert each.measured.live == pytest.approx(each.predicted.live, rel=0.05)
    refused = record.trial("bert-tiny, 2 x 16", "budget")
    assert refused is not None
    assert refused.outcome == "does not fit", "embeddings and their state are all of it, and on a processor they stay"
    assert "raise the budget" in refused.detail
    assert f"budget: does not fit: {refused.detail}" in shown.out
    assert main(command) == 0
    again = capsys.readouterr()
    assert "going on from" in again.err
    assert "1 of 4" not in again.err
