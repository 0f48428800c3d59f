"""Lightning: `Trainer(callbacks=[MemScaleCallback(config)])`.

The module that is planned is the one that `training_step` really calls: the LightningModule itself (`self(x)`) or a
part of it (`self.net(x)`). It is found in the first training step, in the first moment of its forward, which follows
the plan already. So the plan is made from the real batch, on the device that Lightning has moved the model to, with
Lightning's own optimizer, and made again when a batch comes that may need more.

What Lightning does by itself stays its own: with another precision than 32 or 64 bits its autocast and scaler are in
charge. Checkpoints are those of a plain run: the module keeps its classes, names and parameters, and an optimizer whose
state waits elsewhere saves the whole of it. Only where MemScale scales the losses of fp16 by itself does the callback
have a state of its own in them. When the fit is over, or fails, the module is left as it was.

Known limits: where `training_step` calls several modules with trained parameters one after another (the two of a GAN),
the first one is planned and a warning names the others; `MemScaleCallback(module="generator")` chooses. Plans of
several modules would each promise a peak that does not count the other.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale import _api
from memscale._config import Config
from memscale._errors import ConfigError, install_command
from memscale._plan import Plan
from memscale._torch.optimizer_steps import owns_any
from memscale._torch.overrides import EXECUTOR_ATTRIBUTE, OwnHook, is_redirected, keep_copies_clean
from memscale._torch.step_meter import ForwardMeter, StepMeter

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(f"MemScaleCallback needs lightning: {install_command('lightning')}") from error

logger = logging.getLogger("memscale")

_FULL_PRECISIONS = ("32-true", "64-true", "32", "64")


class MemScaleCallback(Callback):  # type: ignore[misc]  # lightning is not followed by the type checker
    """Make a LightningModule train in less memory.

        trainer = Trainer(callbacks=[MemScaleCallback(memscale.Config(memory_budget_gb=8))])
        trainer.fit(module)

    Logged with every training step: `memscale_peak_gb`, `memscale_predicted_peak_gb`, `memscale_reduction` and
    `memscale_samples_per_second`.

    Args:
        config: What may be done, and the budget; None: the mode BALANCED.
        module: The name of the part that is to be planned (`"net"`); None: what `training_step` calls first.

    Raises:
        ConfigError: At the start of training, where the LightningModule has no part of that name.
        DoesNotFitError: In the first training step, where no plan that the config allows fits the budget.
    """

    def __init__(self, config: Config | None = None, *, module: str | None = None) -> None:
        self.config = Config() if config is None else config
        if not isinstance(self.config, Config):
            raise TypeError(f"config must be a memscale.Config or None, not {type(config).__name__}")
        self.module_fqn = module
        self.plan: Plan | None = None
        """What was in force at the latest step; also when the fit is over."""
        self.executor: Any = None
        """The executor of the module that is planned, while the fit lasts."""
        self._is_ours = False
        self._meter = StepMeter()
        self._search: _Search | None = None
        self._num_steps = 0
        self._runs_others = False
        """A training step calls trained modules that no plan counts."""
        self._loaded: dict[str, Any] = {}

    # ---- events of the Trainer of transformers, which takes another callback

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """The first event of that trainer.

        Raises:
            TypeError: Always: it says what that trainer takes.
        """
        raise TypeError(
            "memscale.integrations.lightning.MemScaleCallback is for Lightning's Trainer. Give that of transformers "
            "memscale.integrations.huggingface.MemScaleCallback(config), or wrap it: memscale.wrap(trainer, config)"
        )

    # ---- Lightning's events

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        self._num_steps = trainer.global_step
        self._search = _Search(self, trainer, pl_module, self.module_fqn)
        self._runs_others = False
        self._meter.begin(pl_module, _sole(trainer.optimizers), pl_module.device.type)
        if pl_module.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()  # the peak that is logged is this training's

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter.step_begins(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._num_steps:
            self._num_steps = trainer.global_step
            self._meter.step_ends()
        if self._search is not None:
            self._search.close(trainer)
            self._runs_others = self._search.found_others
            self._search = None
        self._log(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.pause_ends()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """The loss scale of fp16, where MemScale scales; else nothing, so that checkpoints are those of a plain run."""
        state = self.executor.state_dict() if self.executor is not None else self._loaded
        return {name: value for name, value in state.items() if value is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = dict(state_dict)

    # ---- what they come to

    def attach_inside(self, trainer: Trainer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """This is the module that runs: plan it for the forward that has just begun."""
        self._is_ours = not hasattr(module, EXECUTOR_ATTRIBUTE)
        if self._is_ours:
            owners = [optimizer for optimizer in trainer.optimizers if owns_any(optimizer, module.parameters())]
            accumulates = trainer.accumulate_grad_batches > 1
            config = _respecting_the_trainer(trainer, self.config)
            self.executor = _api.attach_inside(module, config, _sole(owners), accumulates, args, kwargs)
        else:
            self.executor = getattr(module, EXECUTOR_ATTRIBUTE)
            logger.info("%s is wrapped already: its own plan stays", type(module).__name__)
        if self._loaded:
            self.executor.load_state_dict(self._loaded)
        told = ForwardMeter(self._meter, self._baseline_bytes)
        self.executor.on_detach(module.register_forward_pre_hook(told, with_kwargs=True).remove)
        told(module, args, kwargs)  # PyTorch goes through the hooks that were there when the forward began

    def _baseline_bytes(self) -> int | None:
        plan = None if self.executor is None else self.executor.plan
        return None if plan is None else plan.baseline_peak_bytes

    def _log(self, pl_module: LightningModule) -> None:
        if self.executor is None or self.executor.plan is None:
            return
        self.plan = self.executor.plan
        # The measured peak is that of the whole step: no figure of one module alone stands beside it.
        promised = (None, None) if self._runs_others else (self._meter.baseline_bytes, self.plan.predicted_peak_bytes)
        figures = self._meter.figures(*promised)
        pl_module.log_dict(figures, on_step=True, on_epoch=False)

    def _end(self) -> None:
        """Leave the module as it was. A second call does nothing."""
        self._meter.stop()
        if self._search is not None:
            self._search.stop()
            self._search = None
        executor, self.executor = self.executor, None
        if executor is not None:
            self._loaded = executor.state_dict()
            if self._is_ours:
                executor.detach()


class _Search(OwnHook):
    """A forward pre-hook on every part that trains, for the length of one training step: who is called by it?"""

    def __init__(
        self, callback: MemScaleCallback, trainer: Trainer, pl_module: LightningModule, module_fqn: str | None
    ) -> None:
        self._callback, self._trainer = callback, trainer
        self._names = {id(module): name for name, module in pl_module.named_modules()}
        self._chosen = _part(pl_module, module_fqn) if module_fqn is not None else None
        self._found: nn.Module | None = None
        self._others: list[nn.Module] = []
        """What is called besides, without its parts."""
        self._undo = contextlib.ExitStack()
        for module in pl_module.modules():
            if any(parameter.requires_grad for parameter in module.parameters()):
                keep_copies_clean(module, self._undo)
                handle = module.register_forward_pre_hook(self, prepend=True, with_kwargs=True)
                self._undo.callback(handle.remove)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_redirected(module) or not (module.training and torch.is_grad_enabled()):
            return
        if self._found is None and (self._chosen is None or module is self._chosen):
            self._found = module  # before planning, which runs copies of it
            self._callback.attach_inside(self._trainer, module, args, kwargs)
        elif not self._is_known(module):
            self._others.append(module)

    def _is_known(self, module: nn.Module) -> bool:
        """Whether this is a part of what was called before or is planned, or calls what was chosen."""
        if self._chosen is not None and any(part is self._chosen for part in module.modules()):
            return True
        whole = (self._found if self._chosen is None else self._chosen, *self._others)
        return any(part is module for each in whole if each is not None for part in each.modules())

    def _why_nothing(self, name: str) -> str:
        how = "It must call the module (self.net(x)), not its forward (self.net.forward(x))."
        if self._chosen is None:
            called = f"training_step of {name} called no module with trained parameters in training mode"
            return f"MemScaleCallback planned nothing: {called}. {how}"
        chosen = self._names[id(self._chosen)]
        others = ", ".join(self._names[id(module)] or name for module in self._others)
        return (
            f"MemScaleCallback(module={chosen!r}) planned nothing: training_step of {name} did not call {chosen} in "
            f"training mode with trained parameters, {f'but {others}' if others else 'nor any other module'}. {how}"
        )

    @property
    def found_others(self) -> bool:
        """Whether the step has called trained modules besides the one that is planned."""
        return bool(self._others)

    def stop(self) -> None:
        self._undo.close()

    def close(self, trainer: Trainer) -> None:
        """The training step is over: say what was found, if it is not what was expected."""
        self.stop()
        name = type(trainer.lightning_module).__name__
        if self._found is None:
            warnings.warn(self._why_nothing(name), stacklevel=2)
        elif self._others and self._chosen is None:
            found = self._names[id(self._found)] or name
            also = ", ".join(self._names[id(module)] for module in self._others)
            warnings.warn(
                f"MemScaleCallback plans {found}, which training_step of {name} calls first, and leaves alone what it "
                f"calls besides: {also}. The promised peak does not count that. Let one module call them all, or "
                'choose one: MemScaleCallback(module="...").',
                stacklevel=2,
            )


def _respecting_the_trainer(trainer: Trainer, config: Config) -> Config:
    """The config without the techniques that the trainer applies by itself."""
    if str(trainer.precision) not in _FULL_PRECISIONS and config.use_mixed_precision:
        logger.info("Lightning computes in %s: its precision plugin stays in charge", trainer.precision)
        return config.replace(use_mixed_precision=False)
    return config


def _part(pl_module: LightningModule, module_fqn: str) -> nn.Module:
    try:
        part: nn.Module = pl_module.get_submodule(module_fqn)
        return part
    except AttributeError as error:
        parts = ", ".join(name for name, _ in pl_module.named_children())
        raise ConfigError(
            f"module={module_fqn!r} is no part of {type(pl_module).__name__}, whose parts are {parts}"
        ) from error


def _sole(optimizers: list[Any]) -> Optimizer | None:
    """The optimizer, if there is one and no more: what several cost together is not known beforehand."""
    inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    return inner[0] if len(inner) == 1 and isinstance(inner[0], Optimizer) else None
