"""The examples for libraries, plain and wrapped: the same losses, bit for bit, and a plan that does something."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from memscale._execute.executor import Executor
from memscale._plan import Checkpoint
from tests.lanes import full

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
CASES = [
    pytest.param("accelerate_loop", {}, id="accelerate"),
    pytest.param("peft_lora", {}, id="peft", marks=full),
    pytest.param("bitsandbytes_optimizer", {}, id="bitsandbytes", marks=full),
    pytest.param("qlora", {}, id="qlora", marks=full),
    pytest.param("qlora", {"bf16": True}, id="qlora-bf16"),
    pytest.param("diffusion", {"network": "unet"}, id="unet", marks=full),
    pytest.param("diffusion", {"network": "unet", "lora": True}, id="unet-lora"),
    pytest.param("diffusion", {"network": "dit"}, id="dit"),
    pytest.param("diffusion", {"network": "dit", "lora": True}, id="dit-lora", marks=full),
]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_example_trains_the_same(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    detach = Executor.detach

    def see(executor: Executor) -> None:
        plans.append(executor.plan)  # those of rehearsals have none
        detach(executor)

    monkeypatch.setattr(Executor, "detach", see)
    example = load(name)
    plain = example.main(wrapped=False, **options)
    assert example.main(wrapped=True, **options) == plain
    assert len(plain) > 2
    assert any(isinstance(action, Checkpoint) for plan in plans if plan is not None for action in plan.actions)


def test_the_slurm_file_starts_torchrun_on_every_machine(tmp_path: pathlib.Path) -> None:
    """With stand-ins for Slurm's commands; the options are read by torchrun's own parser."""
    for name, does in {"scontrol": "echo node7; echo node8", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "31"}
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    file = EXAMPLES / "several_machines.slurm"
    answer = subprocess.run(
        ["bash", "-eu", str(file)], capture_output=True, text=True, check=True, env=os.environ | slurm | {"PATH": path}
    )
    command, *options = answer.stdout.splitlines()
    assert command == "torchrun"
    read = get_args_parser().parse_args(options)
    assert (read.nnodes, read.nproc_per_node, read.rdzv_backend, read.rdzv_id) == ("2", "8", "c10d", "31")
    assert read.rdzv_endpoint == "node7:29500"
    assert (EXAMPLES.parent / read.training_script).is_file()
    assert read.training_script_args == ["fsdp2"]
    assert "#SBATCH --gpus-per-node=8" in file.read_text(), "as many as processes on each"
