"""The Hugging Face `Trainer`.

    trainer = memscale.wrap(trainer)
    trainer.train()

The model is planned with the trainer's own optimizer: when training begins, for the lengths of the dataset, where they
are known (trainer_lengths.py), else at the first training step, from the real batch. What the trainer does already is
recognised: under `gradient_checkpointing` nothing is checkpointed again, under `bf16` or `fp16`
the trainer's autocast and scaler stay in charge. Peak memory, reduction and samples per second appear in its logs.

With `use_8bit_optimizer`, what the trainer's `create_optimizer` makes is replaced by bitsandbytes' own 8-bit class at
once, before a scheduler or a checkpoint sees it. An optimizer that the trainer was given stays what it is, and its
waiting state is in 8 bits.

With `args.memscale_report = "run.html"`, or `MemScaleCallback(memscale_report="run.html")`, the end of a training
writes a page: the plan with its reasons, and what was predicted and measured.

How peaks and samples are counted is said in `memscale._torch.step_meter`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import pathlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import Config
from memscale._errors import DoesNotFitError, MemScaleError, install_command, runs_in_threads
from memscale._torch.host_rng import HostRng
from memscale._torch.step_meter import ForwardMeter, StepMeter
from memscale.integrations.trainer_lengths import Coming, batches_of
from memscale.techniques.offload.optimizer.separable import own_way_of
from memscale.techniques.optimizer8bit.convert import Conversion, NoCounterpart, convert

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise ImportError(f"the Trainer's MemScaleCallback needs transformers: {install_command('hf')}") from error

logger = logging.getLogger("memscale")

STATE_FILE = "memscale.json"
"""In every checkpoint of the trainer: what a resumed run needs beside the trainer's own files."""


class Attached(Protocol):
    """What `attach` gives: the model's executor."""

    @property
    def plan(self) -> Any: ...
    def on_detach(self, callback: Any, *args: Any) -> None: ...
    def detach(self) -> None: ...
    def report(self, path: Any, *, step_ms: float | None = None, live_peak_bytes: int | None = None) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """An executor with state that belongs into a checkpoint (the loss scale of fp16)."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


Attach = Callable[..., Attached]
"""Wraps a model without planning: the plan is made at its first training forward, or for the longest `batch=` and its
`lengths=`. Given are the model, the config, the optimizer, the one that it replaces, if any, and whether gradients are
added up over several batches."""


def wrap_trainer(trainer: Trainer, config: Config, attach: Attach, *, reads_lengths: bool = True) -> Trainer:
    """Wrap the trainer's model and stand beside its training. `memscale.detach(trainer)` undoes both.

    `reads_lengths`: when training begins, plan for the lengths of the trainer's dataset, where they are known.
    """
    config = _respecting_the_trainer(trainer.args, trainer.model, trainer.accelerator.mixed_precision, config)
    session = _Session(trainer.args, config, attach, reads_lengths=reads_lengths)
    if trainer.model is not None:
        session.attach_to(trainer.model, None)
    session.install(trainer)
    return trainer


def _respecting_the_trainer(args: TrainingArguments, model: Any, precision: str, config: Config) -> Config:
    """The config without the techniques that the trainer applies by itself."""
    if args.n_gpu > 1:
        raise runs_in_threads("the Trainer's model")
    changes: dict[str, Any] = {}
    checkpoints = args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False)
    if checkpoints and config.enable_checkpointing:
        logger.info("the Trainer's gradient_checkpointing is on: MemScale does not checkpoint again")
        changes["enable_checkpointing"] = False
    if precision != "no" and config.use_mixed_precision:
        logger.info("the Trainer computes in %s: its autocast stays in charge", precision)
        changes["use_mixed_precision"] = False
    return config.replace(**changes) if changes else config


def _autocast_of(args: TrainingArguments) -> contextlib.AbstractContextManager[Any]:
    """What the trainer's forwards run under."""
    if not (args.bf16 or args.fp16):
        return contextlib.nullcontext()
    return torch.autocast(args.device.type, torch.bfloat16 if args.bf16 else torch.float16)


class _Session:
    """One trainer while it is wrapped, or one training of a trainer that has the callback."""

    def __init__(self, args: TrainingArguments, config: Config, attach: Attach, *, reads_lengths: bool = True) -> None:
        self._args = args
        self._reads_lengths = reads_lengths
        self._trainer: weakref.ref[Trainer] | None = None
        """None: a callback does not know it."""
        self._attach = attach
        self._undo = contextlib.ExitStack()
        self.config = config
        self.executor: Attached | None = None
        self.optimizer: Optimizer | None = None
        self.meter = StepMeter()
        self.resume_from: str | None = None
        self.conversion: Conversion | None = None
        self.replaced: Optimizer | None = None
        """What the trainer had made, while bitsandbytes' class stands in for it."""
        self.report_to: str | None = None
        """The page to write when a training ends; None: as the arguments say."""
        self._has_planned = False

    def install(self, trainer: Trainer) -> None:
        """Be the first callback, so that the trainer's reporters see what is added to the logs."""
        reference = self._trainer = weakref.ref(trainer)
        callbacks, callback = trainer.callback_handler.callbacks, _Callback(self)
        callbacks.insert(0, callback)
        self._undo.callback(_remove, callbacks, callback)
        replacement = _Train(self, trainer)
        vars(trainer)["train"] = replacement
        self._undo.callback(_restore_method, reference, "train", replacement)
        if self.config.use_8bit_optimizer:
            creation = _CreateOptimizer(self, trainer)
            vars(trainer)["create_optimizer"] = creation
            self._undo.callback(_restore_method, reference, "create_optimizer", creation)
            self._undo.callback(self._give_back_optimizer)

    def attach_to(self, model: nn.Module, optimizer: Optimizer | None, coming: Coming | None = None) -> None:
        earlier, self.executor = self.executor, None  # it goes without ending the session
        if earlier is not None:
            earlier.detach()  # our own: nobody wrapped the model twice
        config = self.config
        if self.conversion is not None:
            config = config.replace(use_8bit_optimizer=True)  # it is, whether the plan needs it or not
        accumulates = self._args.gradient_accumulation_steps > 1
        known = {} if coming is None else coming._asdict()
        with contextlib.nullcontext() if coming is None else _autocast_of(self._args):
            executor = self._attach(model, config, optimizer, self.replaced, accumulates, **known)
        executor.on_detach(self._on_detach, executor)
        told = model.register_forward_pre_hook(ForwardMeter(self.meter, self._baseline_bytes), with_kwargs=True)
        executor.on_detach(told.remove)
        self.executor, self.optimizer = executor, optimizer

    def _on_detach(self, executor: Attached) -> None:
        if executor is self.executor:
            self.executor = None
            self.meter.stop()
            self._undo.close()

    def convert(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        """bitsandbytes' class in the place of what the trainer made; the same where there is none."""
        try:
            device = None if self.config.device is None else torch.device(self.config.device)
            conversion = convert(optimizer, model, device)
        except (NoCounterpart, ImportError) as reason:
            logger.info("%s is not replaced by one of bitsandbytes' (%s)", type(optimizer).__name__, str(reason))
            return optimizer
        self._give_back_optimizer()
        self.conversion, self.replaced = conversion, optimizer
        logger.info("the Trainer's %s is bitsandbytes' %s", type(optimizer).__name__, conversion.counterpart.name)
        return conversion.optimizer

    def _give_back_optimizer(self) -> None:
        """The trainer has what it made, with its state in 32 bits."""
        conversion, replaced = self.conversion, self.replaced
        trainer = self._trainer() if self._trainer is not None else None
        self.conversion = self.replaced = None
        if conversion is None or replaced is None:
            return
        conversion.undo()
        if trainer is None:
            return
        if trainer.optimizer is conversion.optimizer:
            trainer.optimizer = replaced
        elif getattr(trainer.optimizer, "optimizer", None) is conversion.optimizer:
            trainer.optimizer.optimizer = replaced  # accelerate's is around it

    def begin(self, model: nn.Module, optimizer: Any, loader: Any) -> None:
        """Training begins: the trainer has its optimizer now, and perhaps another model (`model_init`)."""
        inner = getattr(optimizer, "optimizer", optimizer)  # under accelerate's
        inner = inner if isinstance(inner, Optimizer) else None
        coming: Coming | None = None
        if self._reads_lengths:
            trainer = self._trainer() if self._trainer is not None else None
            counts_items = getattr(trainer, "model_accepts_loss_kwargs", None)
            coming = batches_of(loader, self._args, model, counts_items=counts_items)
        is_other = inner is not self.optimizer or model is not self._wrapped_model()
        if coming is not None or self.executor is None or is_other:
            self.attach_to(model, inner, coming)
        self._load_state()
        if inner is not None and (own_way := own_way_of(inner)):
            logger.info("the Trainer's %s is left alone: %s", type(inner).__name__, own_way)
        self.meter.begin(model, inner, self._args.device.type)  # streamed parameters are not where it computes
        self._has_planned = False
        self._forget_peak()  # the peak that is logged is this training's

    def figures(self) -> dict[str, float]:
        """What goes into the trainer's logs."""
        return self.meter.figures(self.meter.baseline_bytes)

    def _baseline_bytes(self) -> int | None:
        """The plain peak by the plan in force, when a forward begins under it."""
        plan = self.executor.plan if self.executor is not None else None
        if plan is not None and not self._has_planned:
            self._has_planned = True
            self._forget_peak()  # what was on the device before anything was planned is no part of the plan
        return None if plan is None else plan.baseline_peak_bytes

    def _forget_peak(self) -> None:
        if self.meter.device_type != "cpu":
            torch.accelerator.reset_peak_memory_stats()

    def write_report(self) -> None:
        """The page about this training, where one is wanted; what cannot be written ends no training."""
        path = self.report_to or getattr(self._args, "memscale_report", None)
        if path is None or self.executor is None:
            return
        meter = self.meter
        step_ms = meter.seconds / meter.num_steps * 1e3 if meter.num_steps else None
        live = meter.peak_bytes if meter.device_type == "cpu" else None
        try:
            self.executor.report(path, step_ms=step_ms, live_peak_bytes=live)
        except (MemScaleError, OSError, TypeError, ValueError) as error:
            logger.warning("memscale_report=%r cannot be written: %s", str(path), str(error))

    def _wrapped_model(self) -> nn.Module | None:
        return getattr(self.executor, "model", None)

    def save_state(self, directory: pathlib.Path) -> None:
        executor: object = self.executor
        if isinstance(executor, Stateful):
            (directory / STATE_FILE).write_text(json.dumps(executor.state_dict()))

    def _load_state(self) -> None:
        executor: object = self.executor
        path = pathlib.Path(self.resume_from or "") / STATE_FILE
        if self.resume_from is not None and isinstance(executor, Stateful) and path.exists():
            executor.load_state_dict(json.loads(path.read_text()))


class _Callback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """What the session does at the trainer's events."""

    def __init__(self, session: _Session) -> None:
        self.session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.session.begin(kwargs["model"], kwargs.get("optimizer"), kwargs.get("train_dataloader"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.session.meter.step_ends()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.session.meter.pause_ends()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.session.write_report()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            checkpoint = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self.session.save_state(pathlib.Path(args.output_dir) / checkpoint)
        self.session.meter.pause_ends()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs or "train_loss" in logs:
            figures = self.session.figures()
            logs.update(figures)
            state.log_history[-1].update(figures)


class MemScaleCallback(_Callback):
    """Make a model train in less memory, for those who give a `Trainer` its callbacks.

        trainer = Trainer(model=model, args=args, callbacks=[MemScaleCallback(memscale.Config(memory_budget_gb=8))])
        trainer.train()

    As `memscale.wrap(trainer)`, with three differences, because a callback does not know its trainer. The model is
    wrapped for the length of a training and is left as it was when that is over (after one that fails, call
    `memscale.detach(model)`). The figures are in `trainer.state.log_history`; reporters that come before this callback
    do not see them. With `use_8bit_optimizer` the optimizer stays what it is, and its waiting state is in 8 bits.

    Args:
        config: What may be done, and the budget; None: the mode BALANCED.
        memscale_report: An HTML file that the end of a training writes, with what was predicted and measured; None:
            none.

    Raises:
        DoesNotFitError: In the first training step, where no plan that the config allows fits the budget.
    """

    def __init__(self, config: Config | None = None, memscale_report: str | pathlib.Path | None = None) -> None:
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config must be a memscale.Config or None, not {type(config).__name__}")
        self.config = Config() if config is None else config
        self.memscale_report = memscale_report
        self.plan: Any = None
        """What was in force at the end of the latest training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from memscale import _api

        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        self.session = _Session(
            args, _respecting_the_trainer(args, model, precision, self.config), _api.attach_unplanned
        )
        if self.memscale_report is not None:
            self.session.report_to = str(self.memscale_report)
        if state.global_step:
            self.session.resume_from = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self.session.begin(model, optimizer, kwargs.get("train_dataloader"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        executor = self.session.executor
        if executor is not None:
            self.plan = executor.plan
            executor.detach()

    state_key = "MemScaleCallback"
    """Lightning's Trainer asks for it before `setup`."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The first event of Lightning's Trainer, which takes another callback.

        Raises:
            TypeError: Always: it says what that trainer takes.
        """
        raise TypeError(
            "memscale.integrations.huggingface.MemScaleCallback is for the Trainer of transformers. Give Lightning's "
            "memscale.integrations.lightning.MemScaleCallback(config)"
        )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning tells of what `setup` has raised."""


class _Train:
    """Stands in for `trainer.train`: knows from where it resumes, and leaves no measurement open if it fails."""

    def __init__(self, session: _Session, trainer: Trainer) -> None:
        self.session = session
        self.trainer = trainer  # like a bound method: `wrap(Trainer(...)).train()` has no other reference
        self.replaced = vars(trainer).get("train")

    def __call__(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        trainer = self.trainer
        if resume_from_checkpoint is True:
            self.session.resume_from = get_last_checkpoint(trainer.args.output_dir)
        elif resume_from_checkpoint:
            self.session.resume_from = str(resume_from_checkpoint)
        train = self.replaced if self.replaced is not None else type(trainer).train.__get__(trainer)
        try:
            return self._find_batch(functools.partial(train, resume_from_checkpoint, *args, **kwargs))
        finally:
            self.session.meter.stop()
            self.session.resume_from = None

    def _find_batch(self, train: Callable[[], Any]) -> Any:
        """Under `auto_find_batch_size`, train with the batch size that fits, as if it had been asked for.

        A plan that does not fit is refused before the first step, so nothing has been trained, and with the state of
        random numbers put back the run is that of a trainer with the smaller batch.
        """
        before, random_state = math.inf, _RandomState(self.trainer.args.device)
        while True:
            try:
                return train()
            except DoesNotFitError as error:
                found = self._smaller_batch(error)
                if found is None or found >= before:
                    raise
                logger.info("auto_find_batch_size takes the batch size %d: %s", found, str(error))
                self.trainer._train_batch_size = before = found
            random_state.restore()

    def _smaller_batch(self, error: DoesNotFitError) -> int | None:
        """The batch size of the error, where the trainer may take it: other processes would go on with theirs."""
        trainer = self.trainer
        may_take = trainer.args.auto_find_batch_size and trainer.accelerator.num_processes == 1
        has_trained = trainer.state.global_step > getattr(trainer, "_initial_global_step", 0)
        return error.batch_size if may_take and not has_trained else None


class _RandomState:
    """The random states of the host and of the device, at one moment."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device) if device.type != "cpu" else None
        self._host, self._torch = HostRng(), torch.get_rng_state()
        self._device = self._module.get_rng_state() if self._module is not None else None

    def restore(self) -> None:
        self._host.restore()
        torch.set_rng_state(self._torch)
        if self._module is not None:
            self._module.set_rng_state(self._device)


def _remove(callbacks: list[Any], callback: _Callback) -> None:
    if callback in callbacks:
        callbacks.remove(callback)


class _CreateOptimizer:
    """Stands in for `trainer.create_optimizer`."""

    def __init__(self, session: _Session, trainer: Trainer) -> None:
        self.session = session
        self.trainer = trainer
        self.replaced = vars(trainer).get("create_optimizer")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self.trainer
        was_given = trainer.optimizer is not None
        create = self.replaced if self.replaced is not None else type(trainer).create_optimizer.__get__(trainer)
        optimizer = create(*args, **kwargs)
        if not was_given and isinstance(optimizer, Optimizer) and trainer.optimizer is optimizer:
            trainer.optimizer = optimizer = self.session.convert(optimizer, trainer.model)
        return optimizer


def _restore_method(trainer_ref: weakref.ref[Trainer], name: str, ours: _Train | _CreateOptimizer) -> None:
    trainer = trainer_ref()
    if trainer is None or vars(trainer).get(name) is not ours:
        return
    if ours.replaced is None:
        del vars(trainer)[name]
    else:
        vars(trainer)[name] = ours.replaced
