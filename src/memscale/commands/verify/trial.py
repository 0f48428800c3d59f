"""One model trained in one way, in a process of its own: `python -m memscale.commands.verify.trial ORDER`.

The order is JSON; the answer is the last line of standard output. What goes wrong in training is an answer, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any, Literal

import torch
from torch import nn

import memscale
from memscale import _json, zoo
from memscale._config import Config
from memscale._decide.choice import Choice
from memscale._errors import ConfigError, DoesNotFitError, MemScaleError, shortened
from memscale._execute.executor import executor_of
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs, derive_inputs
from memscale._profile.rehearsal import loss_of
from memscale._torch.device_memory import total_peak_bytes
from memscale.commands.verify.cases import AGAIN, BUDGET, LOWEST, PLAIN, CardCase
from memscale.commands.verify.record import Machine, Numbers, Trial
from memscale.commands.verify.session import MARK, without_paths
from memscale.report.explain import what_is_done

_TOO_MANY_LINES = 6


def look(device_name: str | None) -> Machine:
    """The machine, and whether its device computes what it should."""
    device = open_device(device_name)
    hardware = Hardware.detect(device)
    computes = device.type == "cpu" or _computes(device)
    clock: Literal["wall", "modelled", "none"] = "modelled" if _has_own_clock(device) else "wall"
    return Machine(
        hardware.device_name,
        hardware.device_type,
        hardware.total_bytes,
        hardware.free_bytes,
        hardware.architecture,
        hardware.host_total_bytes,
        _versions(device),
        computes,
        clock if computes else "none",
    )


def open_device(name: str | None) -> torch.device:
    """The device of this name; None: the machine's accelerator. `ConfigError` says what to do where there is none."""
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise ConfigError(_no_device())
        return torch.device(found.type, torch.accelerator.current_device_index())
    try:
        return torch.device(name)
    except RuntimeError as error:
        try:  # a backend outside of PyTorch registers its device when it is imported
            importlib.import_module(name.partition(":")[0])
            return torch.device(name)
        except (ImportError, RuntimeError):
            raise ConfigError(f"--device {name}: PyTorch knows no such device") from error


def _no_device() -> str:
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    why = (
        f"PyTorch {torch.version.__version__} is built for {built}, and its driver shows no card: look at nvidia-smi"
        if built
        else f"PyTorch {torch.version.__version__} is built for processors: install the build for your card from "
        "https://pytorch.org/get-started/locally"
    )
    return (
        f"there is no GPU to verify on. {why}. `memscale verify --device cpu` compares live bytes and parity on the "
        "processor, in a few minutes"
    )


def _computes(device: torch.device) -> bool:
    """Whether a few operators of the kind that training uses give what they should, by numbers that Python knows."""
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    there = torch.tensor(rows, device=device)
    product = (there @ there.T + 1).cpu().tolist()
    softmax = torch.softmax(there, -1).cpu().flatten().tolist()
    powers = [math.exp(value) for value in rows[0]]
    shares = 2 * [power / sum(powers) for power in powers]  # both rows have the same differences
    is_near = all(math.isclose(seen, share, rel_tol=1e-3) for seen, share in zip(softmax, shares, strict=True))
    return product == [[15.0, 33.0], [33.0, 78.0]] and is_near


def _has_own_clock(device: torch.device) -> bool:
    """A simulated device says by which clock it counts; a real one has none but the machine's."""
    return device.type != "cpu" and getattr(_properties(device), "clock", None) is not None


def _properties(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    return module.get_device_properties(index) if hasattr(module, "get_device_properties") else None


def _versions(device: torch.device) -> dict[str, str]:
    found = {
        "memscale": memscale.__version__,
        "torch": str(torch.version.__version__),
        "transformers": str(zoo.load_transformers().__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    driver = _nvidia_smi(device, "driver_version")
    return found if driver is None else {**found, "driver": driver}


def _nvidia_smi(device: torch.device, field: str) -> str | None:
    """One figure of this card; None where the program is not there or does not answer."""
    program = shutil.which("nvidia-smi")
    uuid = getattr(_properties(device), "uuid", None) if device.type == "cuda" else None
    if program is None or uuid is None:
        return None
    command = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", f"GPU-{uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# ---- training


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What a trial is to do."""

    case: CardCase
    way: str
    device: str | None
    budget_bytes: int | None = None


def run(order: Order) -> Trial:
    """Train, and say what was predicted and seen. Running out of memory and having no plan are answers."""
    begun = Trial(order.case.title, order.way, "trained", budget_bytes=order.budget_bytes)
    device = open_device(order.device)
    with zoo.quiet(), tempfile.TemporaryDirectory(prefix="memscale-verify-") as directory:
        work = _Work(order, device, directory)
        try:
            begun = work.prepare(begun)
            return work.train(begun)
        except torch.OutOfMemoryError as error:
            return dataclasses.replace(work.known or begun, outcome="out of memory", detail=_one_line(error))
        except DoesNotFitError as error:
            return dataclasses.replace(work.known or begun, outcome="does not fit", detail=_one_line(error))


class _Work:
    """The model, its batch and what is known of it so far."""

    def __init__(self, order: Order, device: torch.device, directory: str) -> None:
        self._order, self._device = order, device
        self._directory = directory if device.type == "cpu" else None
        """A processor's next tier is the disk."""
        torch.manual_seed(0)
        self._model = zoo.build(order.case.model, with_weights=True)
        self._inputs = real_inputs(self._model, order.case)
        self.known: Trial | None = None
        """The trial with its predictions, once they are there: what an error must not lose."""

    @property
    def _is_plain(self) -> bool:
        return self._order.way in (PLAIN, AGAIN)

    def prepare(self, trial: Trial) -> Trial:
        """Predict, and put the model where it computes: wrapped, or as it is."""
        start = time.perf_counter()
        if self._is_plain:
            predicted, predicted_ms = self._predict_plain()
            self.known = dataclasses.replace(trial, predicted=predicted, predicted_step_ms=predicted_ms)
            self._model.to(self._device)
            return self.known
        memscale.wrap(self._model, self._config(), sample_input=self._inputs.kwargs)
        plan = self._plan()
        self.known = dataclasses.replace(
            trial,
            predicted=_predicted_by(plan),
            predicted_step_ms=plan.predicted_step_ms,
            what=what_is_done(plan),
            budget_bytes=plan.budget_bytes,
            planning_s=round(time.perf_counter() - start, 2),
        )
        return self.known

    def _config(self) -> Config:
        budget = self._order.budget_bytes
        return Config(
            device=str(self._device),
            memory_budget_gb=budget / 1e9 if self._order.way == BUDGET and budget is not None else None,
            force_optimize=self._order.way == LOWEST,
            offload_dir=self._directory,
            enable_logging=False,
        )

    def _plan(self) -> Plan:
        executor = executor_of(self._model)
        assert executor is not None
        assert executor.plan is not None, "the sample was given"
        return executor.plan

    def _predict_plain(self) -> tuple[Numbers, float]:
        """Whether it fits or not."""
        config = Config(device=str(self._device), enable_logging=False)
        planner = Planner(Job(self._model, config, Hardware.detect(self._device)), self._inputs)
        outcome, held = planner.cost_model().evaluate(Choice()), planner.held((), config)
        live = planner.cost_model().peak_of(planner.profile.plain, Choice())
        if held is None:
            return Numbers(live), outcome.step_ms
        return Numbers(live, held.allocated_bytes, held.reserved_bytes, held.total_bytes, 0), outcome.step_ms

    def train(self, trial: Trial) -> Trial:
        """The steps: their time, their losses, what they took; then what came of the weights."""
        on_card = self._device.type != "cpu"
        inputs = self._inputs.map_tensors(lambda tensor: tensor.to(self._device))
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        torch.manual_seed(2)
        if on_card:
            torch.accelerator.empty_cache()  # segments that only building the model needed are none of the steps'
            torch.accelerator.reset_peak_memory_stats()
        times, losses = [], []
        for _ in range(self._order.case.num_steps):
            ms, loss = self._step(optimizer, inputs)
            times.append(ms)
            losses.append(loss.hex())
        measured = self._measured() if on_card else self._live_bytes(optimizer, inputs)
        smi, used = (_nvidia_smi(self._device, "memory.used"), _driver_used()) if on_card else (None, None)
        return dataclasses.replace(
            trial,
            measured=measured,
            nvidia_smi=None if smi is None else int(float(smi) * 2**20),
            driver_used=used,
            step_ms=round(statistics.median(times[1:]), 3),
            losses=tuple(losses),
            weights=hash_of(self._model),
        )

    def _step(self, optimizer: torch.optim.Optimizer, inputs: Inputs) -> tuple[float, float]:
        self._wait()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(self._model(*inputs.args, **inputs.kwargs))
        loss.backward()
        optimizer.step()
        self._wait()
        return (time.perf_counter() - start) * 1e3, float(loss.detach())

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def _measured(self) -> Numbers:
        return Numbers(
            None,
            torch.accelerator.max_memory_allocated(),
            torch.accelerator.max_memory_reserved(),
            total_peak_bytes(),
            self._host_bytes(),
        )

    def _live_bytes(self, optimizer: torch.optim.Optimizer, inputs: Inputs) -> Numbers:
        """One step more, on a processor, where nothing else counts. The same for every way."""
        with memscale.measure("cpu") as seen:
            self._step(optimizer, inputs)
        return Numbers(live=seen.peak_bytes, host=self._host_bytes())

    def _host_bytes(self) -> int:
        executor = executor_of(self._model)
        return 0 if executor is None else executor.stats().host_bytes


def _predicted_by(plan: Plan) -> Numbers:
    return Numbers(
        plan.predicted_peak_bytes,
        plan.predicted_allocated_bytes,
        plan.predicted_reserved_bytes,
        plan.predicted_total_bytes,
        plan.host_bytes + plan.movable_bytes,
    )


def _driver_used() -> int:
    free_bytes, total_bytes = torch.accelerator.get_memory_info()
    return int(total_bytes - free_bytes)


def real_inputs(model: nn.Module, case: CardCase) -> Inputs:
    """A batch of random data of the model's shapes, the same for every way."""
    shapes = derive_inputs(model, case.batch, case.seq)
    if shapes is None:
        raise MemScaleError(f"no inputs can be derived for {case.model}")
    generator = torch.Generator().manual_seed(1)
    most = min(number for number in (_sizes_of(model)) if number > 1)

    def fill(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator)
        if "mask" in name:
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return torch.randint(0, most, tensor.shape, generator=generator, dtype=tensor.dtype)

    filled = {name: fill(name, value) for name, value in shapes.kwargs.items() if isinstance(value, torch.Tensor)}
    return Inputs(kwargs={**shapes.kwargs, **filled})


def _sizes_of(model: nn.Module) -> list[int]:
    """The sizes of vocabularies and numbers of classes: ids and labels must be below each of them."""
    config: Any = model.config
    return [int(size) for name in ("vocab_size", "num_labels") if (size := getattr(config, name, None))]


def hash_of(model: nn.Module) -> str:
    """The hash of every parameter and buffer, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda entry: entry[0]):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


# ---- a process


def _one_line(error: BaseException) -> str:
    return shortened(without_paths(" ".join(str(error).split())))


def _obey(text: str) -> None:
    order = _json.loads(text)
    try:
        answer: Any = look(order["look"]) if "look" in order else run(_json.decode(Order, order["run"]))
    except ConfigError as error:
        answer = {"refused": str(error)}
    except Exception as error:  # a result: the next trial must still be made
        lines = traceback.format_exc().strip().splitlines()[-_TOO_MANY_LINES:]
        answer = {"crashed": without_paths("\n".join(lines)), "detail": f"{type(error).__name__}: {_one_line(error)}"}
    print(MARK + json.dumps(_json.encode(answer)), flush=True)
    os._exit(0)  # what is attached need not be taken off, nor moved back to where it does not fit


if __name__ == "__main__":
    _obey(sys.argv[1])
