"""More than one thing at a time: threads that train, plan and save, and processes beside each other.

Each thread trains its own model; the random numbers of torch are one stream for all threads, so nothing here draws any
while threads are at work.
"""

from __future__ import annotations

import copy
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import benchmarks
import memscale
from memscale import Config
from tests.techniques.offload.runs import Gpt, same, weights
from tests.training.histories import plan_for

STEPS = 6
ENDS_S = 600
"""There to end what hangs."""


@pytest.fixture(autouse=True)
def _device(simgpu_device: Any, no_leaks: None) -> None:
    pass


def built(number: int, device: str) -> nn.Module:
    torch.manual_seed(number)
    return Gpt(2, dropout=0.0).to(device)


def trained(
    model: nn.Module, number: int, device: str, steps: int = STEPS, after: Callable[[], None] | None = None
) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(100 * number + step)).to(device)
        F.cross_entropy(model(ids).reshape(-1, 64), ids.roll(1, 1).reshape(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()
    return model


def at_once(*works: Callable[[], Any]) -> None:
    """Each in a thread of its own, beginning together; what one raises is raised."""
    errors: list[BaseException] = []
    together = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        try:
            together.wait(ENDS_S)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ENDS_S)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def config(device: str, directory: pathlib.Path) -> Config:
    return Config(device=device, offload_dir=str(directory), enable_logging=False)


@pytest.mark.parametrize(
    ("ways", "asynchronous"),
    [(("everything", "optimizer"), True), (("stream, step on the device", "buckets"), False)],
    ids=lambda value: str(value),
)
def test_two_wrapped_models_in_two_threads(ways: tuple[str, str], asynchronous: bool, tmp_path: pathlib.Path) -> None:
    expected = [weights(trained(built(n, "simgpu"), n, "simgpu")) for n in range(2)]
    models = [built(n, "simgpu") for n in range(2)]
    for model, way in zip(models, ways, strict=True):
        memscale.execute(model, plan_for(model, way, "simgpu", asynchronous), config("simgpu", tmp_path))
    at_once(*(lambda n=n: trained(models[n], n, "simgpu") for n in range(2)))
    for model, there in zip(models, expected, strict=True):
        memscale.detach(model)
        assert same(weights(model), there)
    assert not list(tmp_path.iterdir())


def test_a_plain_model_is_not_touched_while_another_is_planned(tmp_path: pathlib.Path) -> None:
    """Rehearsals run on fake tensors, under modes and overrides that are this thread's alone."""
    expected = weights(trained(built(1, "cpu"), 1, "cpu", steps=30))
    plain, model = built(1, "cpu"), built(2, "cpu")
    marks = [sorted(vars(module)) for module in plain.modules()]
    ids = torch.zeros(2, 8, dtype=torch.int64)
    wanted = Config(force_optimize=True, enable_logging=False, offload_dir=str(tmp_path))
    at_once(lambda: trained(plain, 1, "cpu", steps=30), lambda: memscale.wrap(model, wanted, ids))
    memscale.detach(model)
    assert same(weights(plain), expected)
    assert [sorted(vars(module)) for module in plain.modules()] == marks


@pytest.mark.parametrize("way", ["everything", "optimizer"])
def test_a_checkpoint_taken_by_another_thread_between_two_steps(way: str, tmp_path: pathlib.Path) -> None:
    """As those that save in the background do: the loop waits only until the state was copied."""
    reference, saved_plain = built(1, "simgpu"), []
    trained(reference, 1, "simgpu", after=lambda: saved_plain.append(weights(reference)))
    model, saved = built(1, "simgpu"), list[dict[str, torch.Tensor]]()
    memscale.execute(model, plan_for(model, way, "simgpu", True), config("simgpu", tmp_path))

    def save() -> None:
        saver = threading.Thread(target=lambda: saved.append(weights(copy.deepcopy(model))))
        saver.start()
        saver.join(ENDS_S)

    trained(model, 1, "simgpu", after=save)
    memscale.detach(model)
    assert len(saved) == STEPS
    assert all(same(ours, theirs) for ours, theirs in zip(saved, saved_plain, strict=True))


def test_state_is_read_by_another_thread_while_training_goes_on(tmp_path: pathlib.Path) -> None:
    """What is read may be of either side of a step, in part, as of a plain model; training does not notice."""
    expected = weights(trained(built(1, "cpu"), 1, "cpu", steps=20))
    model = built(1, "cpu")
    memscale.execute(model, plan_for(model, "checkpoint and activations", "cpu", False), config("cpu", tmp_path))
    over, copies = threading.Event(), list[nn.Module]()

    def read() -> None:
        while not over.is_set():
            copies[:] = [copy.deepcopy(model)]
            assert set(model.state_dict()) == set(expected)

    def train() -> None:
        try:
            trained(model, 1, "cpu", steps=20)
        finally:
            over.set()

    at_once(train, read)
    memscale.detach(model)
    assert same(weights(model), expected)
    assert copies
    assert all("forward" not in vars(module) for module in copies[0].modules()), "a copy is a plain model"


# ---- processes

PROGRAM = """
import multiprocessing, pathlib, pickle, sys
import torch
from tests.training import test_threads_and_processes as here
import memscale

torch.set_num_threads(1)
DIRECTORY = pathlib.Path(sys.argv[1])

def wrapped(model):
    memscale.execute(model, here.plan_for(model, "optimizer", "cpu", False), here.config("cpu", DIRECTORY))
    return model

def child(sent, answers, begun):
    model = pickle.loads(sent)
    assert "_memscale_executor" not in vars(model), "a model that is sent is a plain one"
    wrapped(model)
    begun.wait(600)
    here.trained(model, 2, "cpu", steps=6)
    memscale.detach(model)
    answers.put({name: value.tolist() for name, value in here.weights(model).items()})

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    model, twin = wrapped(here.built(1, "cpu")), here.built(1, "cpu")
    for one in (model, twin):
        here.trained(one, 1, "cpu", steps=2)
    other = here.copy.deepcopy(twin)
    answers, begun = context.Queue(), context.Barrier(2)
    process = context.Process(target=child, args=(pickle.dumps(model), answers, begun))
    process.start()
    begun.wait(600)
    here.trained(model, 3, "cpu", steps=6)
    theirs = answers.get(timeout=600)
    process.join()
    assert process.exitcode == 0, process.exitcode
    memscale.detach(model)
    here.trained(twin, 3, "cpu", steps=6)
    here.trained(other, 2, "cpu", steps=6)
    assert here.same(here.weights(model), here.weights(twin)), "the parent trained differently"
    assert {n: v.tolist() for n, v in here.weights(other).items()} == theirs, "the child trained differently"
    print("both are well")
"""


@pytest.mark.slow
def test_two_processes_train_over_one_directory(tmp_path: pathlib.Path) -> None:
    """The second is spawned by the first, and gets the wrapped model as a plain one: pickled, since what PyTorch sends
    to a process by itself stays shared with it. (Forks: `test_fork.py`.)"""
    program, directory = tmp_path / "program.py", tmp_path / "offload"
    program.write_text(PROGRAM)
    directory.mkdir()
    environment = benchmarks.environment(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    command = [sys.executable, str(program), str(directory)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_S, env=environment)
    assert answer.stdout.strip() == "both are well", answer.stderr
    assert list(directory.iterdir()) == []
