"""The examples for libraries, plain and wrapped: the same losses, bit for bit, and a plan that does something."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest

from memscale._execute.executor import Executor
from memscale._plan import Checkpoint
from tests.lanes import full

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
CASES = [
    pytest.param("accelerate_loop", {}, id="accelerate"),
    pytest.param("peft_lora", {}, id="peft", marks=full),
    pytest.param("bitsandbytes_optimizer", {}, id="bitsandbytes", marks=full),
    pytest.param("qlora", {}, id="qlora"),
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
