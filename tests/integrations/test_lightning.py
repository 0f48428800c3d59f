"""The real Lightning, plain and with the callback: the same training, the same files, and a module left as it was."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

import memscale
from memscale._plan import Checkpoint, StreamParameters
from memscale._plan import MixedPrecision as MixedPrecision16
from memscale.integrations import huggingface
from memscale.integrations.lightning import MemScaleCallback
from tests.models import WIDTH, Chain, HostDropout, TwoLinears, features, square_loss
from tests.techniques.offload.runs import DEVICE

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own use of PyTorch
]
FORCED = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False)
PROGRAM = pathlib.Path(__file__).with_name("lightning_ddp.py")
HANGS_AFTER_S = 1200
"""A guard against a hang, and no more: a busy machine is slow."""
ROWS = 256


class Lit(LightningModule):
    """`training_step` calls the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Chain(*(TwoLinears() for _ in range(4)), HostDropout())
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def called(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = square_loss(self.called(batch))
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class OfPart(Lit):
    """`training_step` calls a part of it: the module's own forward is never called."""

    def called(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Manual(OfPart):
    """Optimizes by itself, and clips."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = square_loss(self.net(batch))
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.losses.append(loss.detach().clone())


def data(count: int = 6) -> DataLoader:
    return DataLoader([features(number, ROWS, WIDTH) for number in range(count)], batch_size=None)


def make_trainer(directory: pathlib.Path, *callbacks: Callback, **options: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 4,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(directory),
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(kind: type[Lit], directory: pathlib.Path, *callbacks: Callback, **options: Any) -> Lit:
    seed_everything(3, verbose=False)
    module = kind()
    make_trainer(directory, *callbacks, **options).fit(module, data())
    return module


def assert_same(ours: Lit, theirs: Lit) -> None:
    assert len(ours.losses) == len(theirs.losses) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    states = ours.state_dict(), theirs.state_dict()
    assert list(states[0]) == list(states[1])
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


class Spy(Callback):
    """Is told after MemScale's."""

    def __init__(self) -> None:
        self.planned: list[str] = []
        self.recomputes = 0
        self.logged: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        names = {name: module for name, module in pl_module.named_modules() if hasattr(module, "_memscale_executor")}
        self.planned = list(names)
        self.recomputes = sum(module._memscale_executor.stats().num_recomputes for module in names.values())
        self.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("kind", "options", "planned"),
    [
        (Lit, {}, ""),
        (OfPart, {}, "net"),
        (Manual, {}, "net"),
        (OfPart, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_steps": 3}, "net"),
        (OfPart, {"precision": "bf16-mixed"}, "net"),
        (Lit, {"precision": "bf16-true"}, ""),
        (OfPart, {"precision": "64-true"}, "net"),
        (OfPart, {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 2}, "net"),
    ],
    ids=["itself", "a-part", "manual", "accumulation", "bf16-mixed", "bf16-true", "64-true", "epochs"],
)
def test_the_same_training(tmp_path: pathlib.Path, kind: type[Lit], options: Any, planned: str) -> None:
    plain = fit(kind, tmp_path, **options)
    callback, spy = MemScaleCallback(FORCED), Spy()
    ours = fit(kind, tmp_path, callback, spy, **options)
    assert_same(ours, plain)
    assert spy.planned == [planned]
    assert spy.recomputes > 0
    assert callback.plan is not None
    assert any(isinstance(action, Checkpoint) for action in callback.plan.actions)
    assert f"{ROWS}x{WIDTH}" in callback.plan.inputs[0]
    assert "adamw" in callback.plan.optimizer_name.lower()


class Simulated(Accelerator):
    """What Lightning must know of the simulated device."""

    def setup_device(self, device: torch.device) -> None: ...
    def teardown(self) -> None: ...
    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [DEVICE]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "simgpu"


class OnDevice(OfPart):
    """Without what draws on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Chain(*(TwoLinears() for _ in range(4)))


def on_device(precision: str) -> dict[str, Any]:
    """Options of a Trainer. The first loss of `16-mixed` overflows, so that its scaler leaves a step out."""
    plugin = None
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("simgpu", init_scale=2.0**18)
        plugin = MixedPrecision("16-mixed", device="simgpu", scaler=scaler)
    strategy = SingleDeviceStrategy(device=DEVICE, accelerator=Simulated(), precision_plugin=plugin)
    return {"strategy": strategy, "accelerator": "auto"}


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_the_same_training_on_a_device_with_streamed_layers(
    tmp_path: pathlib.Path, simgpu_device: Any, precision: str
) -> None:
    plain = fit(OnDevice, tmp_path, **on_device(precision))
    assert plain.losses[3] < plain.losses[0], "some steps are taken"
    callback = MemScaleCallback(memscale.Config(mode="aggressive", force_optimize=True, enable_logging=False))
    if precision == "32-true":
        callback.config = callback.config.replace(use_mixed_precision=False, use_8bit_optimizer=False)
    ours = fit(OnDevice, tmp_path, callback, **on_device(precision))
    assert any(isinstance(action, StreamParameters) for action in callback.plan.actions)
    assert not any(isinstance(action, MixedPrecision16) for action in callback.plan.actions)
    assert {parameter.device.type for parameter in ours.parameters()} == {"cpu"}, "Lightning moves a module there"
    assert_same(ours, plain)


def test_the_module_is_left_as_it_was(tmp_path: pathlib.Path) -> None:
    module = fit(OfPart, tmp_path, MemScaleCallback(FORCED))
    plain = fit(OfPart, tmp_path)
    for (name, ours), (_, theirs) in zip(module.named_modules(), plain.named_modules(), strict=True):
        assert vars(ours).keys() == vars(theirs).keys(), name
        assert len(ours._forward_pre_hooks) == len(theirs._forward_pre_hooks), name
        assert len(ours._forward_hooks) == len(theirs._forward_hooks), name


def test_figures_are_logged(tmp_path: pathlib.Path) -> None:
    callback, spy = MemScaleCallback(FORCED), Spy()
    fit(OfPart, tmp_path, callback, spy)
    plan = callback.plan
    assert plan is not None
    assert spy.logged["memscale_predicted_peak_gb"] == pytest.approx(plan.predicted_peak_bytes / 1e9)
    assert spy.logged["memscale_peak_gb"] == pytest.approx(plan.predicted_peak_bytes / 1e9, rel=0.02)
    assert spy.logged["memscale_reduction"] == pytest.approx(plan.reduction, abs=0.02)
    assert spy.logged["memscale_samples_per_second"] > 0


class Wide(OfPart):
    """Has more weights than activations, and no state of an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_gradients_that_live_through_forward_are_in_the_figures(tmp_path: pathlib.Path) -> None:
    """Lightning clears them between forward and backward, from the second step on."""
    config = memscale.Config(memory_budget_gb=1, enable_logging=False)
    first, later, spy = MemScaleCallback(config), MemScaleCallback(config), Spy()
    fit(Wide, tmp_path, first, max_steps=1)
    fit(Wide, tmp_path, later, spy)
    assert first.plan is not None
    assert later.plan is not None
    assert not later.plan.actions
    assert later.plan.predicted_peak_bytes > 1.01 * first.plan.predicted_peak_bytes
    assert spy.logged["memscale_peak_gb"] == pytest.approx(later.plan.predicted_peak_bytes / 1e9, rel=0.001)


def test_checkpoints_are_those_of_a_plain_run(tmp_path: pathlib.Path) -> None:
    files = []
    for name, callbacks in (("plain", []), ("ours", [MemScaleCallback(FORCED)])):
        saver = ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=2, save_top_k=-1)
        fit(OfPart, tmp_path, *callbacks, saver)
        files.append(sorted((tmp_path / name).iterdir()))
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    assert len(files[0]) == 2
    for plain, ours in zip(*files, strict=True):
        contents = [torch.load(file, weights_only=False) for file in (plain, ours)]
        for content in contents:
            content["callbacks"] = [{**state, "dirpath": ""} for state in content["callbacks"].values()]
        assert _same_tree(*[{k: v for k, v in c.items() if k not in ("callbacks", "loops")} for c in contents])
        assert contents[0].keys() == contents[1].keys()
        assert len(contents[0]["callbacks"]) == len(contents[1]["callbacks"])


def _same_tree(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same_tree(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same_tree, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
def test_a_run_is_resumed(tmp_path: pathlib.Path) -> None:
    """Each run resumes the other's files, and its own."""
    makers: dict[str, Any] = {"plain": list, "ours": lambda: [MemScaleCallback(FORCED)]}
    for name, make in makers.items():
        saver = ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=2, save_top_k=-1)
        fit(OfPart, tmp_path, *make(), saver, max_steps=2)

    def resume(saved: str, resumed: str) -> OfPart:
        (file,) = (tmp_path / saved).iterdir()
        module = OfPart()
        seed_everything(5, verbose=False)
        saver = ModelCheckpoint(dirpath=tmp_path / f"{saved} {resumed}", every_n_train_steps=2, save_top_k=-1)
        make_trainer(tmp_path, *makers[resumed](), saver).fit(module, data(), ckpt_path=file, weights_only=False)
        return module

    plain = resume("plain", "plain")
    for saved, resumed in (("ours", "ours"), ("ours", "plain"), ("plain", "ours")):
        assert_same(resume(saved, resumed), plain)


def test_a_fit_that_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    class Failing(OfPart):
        def called(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.losses) == 1:
                raise ZeroDivisionError
            return super().called(x)

    seed_everything(3, verbose=False)
    module = Failing()
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, MemScaleCallback(FORCED)).fit(module, data())
    assert not any(hasattr(part, "_memscale_executor") or part._forward_pre_hooks for part in module.modules())


def test_a_net_that_was_wrapped_by_the_user_stays_the_users(tmp_path: pathlib.Path) -> None:
    module = OfPart()
    memscale.wrap(module.net, FORCED)
    executor = module.net._memscale_executor
    callback = MemScaleCallback(memscale.Config())
    make_trainer(tmp_path, callback).fit(module, data())
    assert module.net._memscale_executor is executor
    assert callback.plan is executor.plan
    memscale.detach(module.net)


class Gan(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.other = Chain(*(TwoLinears() for _ in range(2)), width=WIDTH)

    def called(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).sum() + self.other(x)


def test_several_modules_are_named(tmp_path: pathlib.Path) -> None:
    spy = Spy()
    with pytest.warns(UserWarning, match=r"plans net.*leaves alone.* besides: other\. .*MemScaleCallback\(module"):
        fit(Gan, tmp_path, MemScaleCallback(FORCED), spy)
    assert "memscale_peak_gb" in spy.logged
    beside_a_part = {"memscale_reduction", "memscale_predicted_peak_gb"}
    assert not beside_a_part & spy.logged.keys(), "the plan counts one module, and the peak is that of the step"
    spy = Spy()
    fit(Gan, tmp_path, MemScaleCallback(FORCED, module="other"), spy)
    assert spy.planned == ["other"]
    assert "memscale_peak_gb" in spy.logged
    assert not beside_a_part & spy.logged.keys(), "what is called before the chosen one is not counted, either"


def test_a_module_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(memscale.ConfigError, match=r"module='nett' is no part of OfPart, whose parts are net"):
        fit(OfPart, tmp_path, MemScaleCallback(FORCED, module="nett"))
    with pytest.raises(TypeError, match=r"memscale\.Config or None, not dict"):
        MemScaleCallback({})  # type: ignore[arg-type]


class OfOne(Gan):
    def called(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).sum()


def test_a_part_that_is_not_called_is_named_with_what_is(tmp_path: pathlib.Path) -> None:
    spy = Spy()
    with pytest.warns(UserWarning, match=r"module='other'\) planned nothing: .* did not call other .*, but net\."):
        fit(OfOne, tmp_path, MemScaleCallback(FORCED, module="other"), spy)
    assert not spy.logged.keys() & {"memscale_peak_gb", "memscale_reduction"}


def test_a_callback_of_the_other_framework_is_refused_with_the_right_one(tmp_path: pathlib.Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(TypeError, match=r"for Lightning's Trainer\. .*integrations\.huggingface\.MemScaleCallback"):
        transformers.Trainer(TwoLinears(), arguments, callbacks=[MemScaleCallback()])
    with pytest.raises(TypeError, match=r"for the Trainer of transformers\. .*integrations\.lightning\.MemScale"):
        fit(OfPart, tmp_path, huggingface.MemScaleCallback())  # type: ignore[arg-type]


class OneByOne(OfPart):
    def called(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.forward(x)


class OfNoModule(OfPart):
    def called(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.net.head.weight)


def test_a_step_that_does_not_call_its_module_is_told_so(tmp_path: pathlib.Path) -> None:
    with pytest.warns(UserWarning, match=r"plans net\.blocks\.0, .*leaves alone.* besides: net\.blocks\.1, "):
        fit(OneByOne, tmp_path, MemScaleCallback(FORCED))
    with pytest.warns(UserWarning, match=r"planned nothing: training_step of OfNoModule called no module"):
        fit(OfNoModule, tmp_path, MemScaleCallback(FORCED))


def test_a_wrapped_lightning_module_that_is_never_called_says_so(tmp_path: pathlib.Path) -> None:
    module = memscale.wrap(OfPart(), FORCED)
    with pytest.warns(UserWarning, match=r"OfPart is wrapped.*never called.*MemScaleCallback"):
        make_trainer(tmp_path, max_steps=2).fit(module, data())
    memscale.detach(module)


def test_a_wrapped_lightning_module_that_is_called_trains_the_same(tmp_path: pathlib.Path) -> None:
    plain = fit(Lit, tmp_path)
    seed_everything(3, verbose=False)
    module = memscale.wrap(Lit(), FORCED)
    make_trainer(tmp_path).fit(module, data())
    assert_same(module, plain)
    assert module._memscale_executor.stats().num_recomputes > 0
    memscale.detach(module)


def test_a_missing_extra_gives_the_line_that_installs_it() -> None:
    program = "import sys; sys.modules['lightning'] = None\nimport memscale.integrations.lightning"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_AFTER_S)
    assert answer.returncode
    assert 'MemScaleCallback needs lightning: pip install -c constraints.txt ".[lightning]"' in answer.stderr


@pytest.mark.slow
def test_ddp() -> None:
    """Two processes, with gloo; Lightning sends `training_step` through the forward of what DDP holds."""
    answer = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    for kind in ("Lit", "OfPart"):
        for rank in (0, 1):
            assert f"{kind}: the same on rank {rank}" in answer.stdout


def test_nn_modules_hear_it_too() -> None:
    """Also without Lightning: parts that are called one by one."""
    model = memscale.wrap(Chain(TwoLinears(), TwoLinears()), FORCED)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.step()  # nothing to step on
    square_loss(model.head(model.blocks[0](features(0)))).backward()
    with pytest.warns(UserWarning, match=r"Chain is wrapped.*Wrap the module that the training loop calls"):
        optimizer.step()
    optimizer.step()  # once
    memscale.detach(model)


def test_a_step_on_zeros_is_no_training() -> None:
    model = memscale.wrap(Chain(TwoLinears(), TwoLinears()), FORCED)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # as some frameworks do before they load an optimizer's state
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    memscale.detach(model)
