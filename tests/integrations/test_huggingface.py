"""The real Trainer, plain and wrapped: the same training, checkpoints that resume, and a trainer left as it was."""

from __future__ import annotations

import importlib.util
import json
import logging
import pathlib
import sys
import warnings
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import memscale
from memscale import _api
from memscale._execute.executor import executor_of
from memscale._plan import Checkpoint, MixedPrecision, OffloadOptimizer
from memscale._torch.step_meter import StepMeter
from memscale.integrations import huggingface
from memscale.integrations.huggingface import STATE_FILE, MemScaleCallback, _Callback, wrap_trainer
from tests.lanes import full, in_turns

VOCABULARY, LENGTH = 64, 16


@pytest.fixture(autouse=True)
def _no_progress_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar of `save_pretrained` would start a thread that stays."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def wrap(trainer: Trainer, **fields: Any) -> Trainer:
    options = {"mode": "conservative", "force_optimize": True, "enable_logging": False, **fields}
    return memscale.wrap(trainer, memscale.Config(**options))


def samples(count: int, length: int = LENGTH, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def build() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def make_trainer(directory: pathlib.Path, data: Any = None, *, model: Any = None, **options: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "learning_rate": 1e-2,
    }
    callbacks = options.pop("callbacks", None)
    model_init = options.pop("model_init", None)
    collator = options.pop("data_collator", None)
    return Trainer(
        model=None if model_init is not None else (model if model is not None else build()),
        args=TrainingArguments(**{**arguments, **options}),
        train_dataset=data if data is not None else samples(32),
        eval_dataset=samples(6, seed=9),
        callbacks=callbacks,
        data_collator=collator,
        model_init=model_init,
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_training(ours: Trainer, theirs: Trainer) -> None:
    assert losses(ours) == losses(theirs)
    assert losses(ours)
    norms = [[entry["grad_norm"] for entry in t.state.log_history if "loss" in entry] for t in (ours, theirs)]
    assert norms[0] == norms[1]
    for (name, a), (_, b) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def checkpointed_blocks(trainer: Trainer) -> list[str]:
    plan = executor_of(trainer.model).plan
    return [action.module_fqn for action in plan.actions if isinstance(action, Checkpoint)]


# ---- the same training


def test_only_a_user_who_wraps_twice_is_told_so(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=1)
    with caplog.at_level(logging.INFO, logger="memscale"):
        wrap(trainer)
        trainer.train()
        trainer.train()  # with another optimizer: the session wraps the model again by itself
    assert "wrapped already" not in caplog.text
    with caplog.at_level(logging.INFO, logger="memscale"):
        wrap(trainer)
    assert "wrapped already" in caplog.text
    memscale.detach(trainer)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_training(tmp_path, accumulation):
    options = {"gradient_accumulation_steps": accumulation, "warmup_steps": 2, "weight_decay": 0.1}
    plain = make_trainer(tmp_path, **options)
    plain.train()
    ours = wrap(make_trainer(tmp_path, **options))
    ours.train()
    assert_same_training(ours, plain)
    assert checkpointed_blocks(ours)
    assert executor_of(ours.model).stats().num_recomputes > 0


def test_evaluate_and_predict(tmp_path):
    plain = make_trainer(tmp_path)
    plain.train()
    ours = wrap(make_trainer(tmp_path))
    ours.train()
    assert ours.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert (ours.predict(samples(6)).predictions == plain.predict(samples(6)).predictions).all()


def test_it_returns_the_trainer(tmp_path):
    trainer = make_trainer(tmp_path)
    model = trainer.model
    assert wrap(trainer) is trainer
    assert trainer.model is model


# ---- planned from the real batch


def test_the_plan_is_for_the_real_batch_and_optimizer(tmp_path):
    trainer = wrap(make_trainer(tmp_path, optim="sgd", max_steps=1))
    assert executor_of(trainer.model).plan is None
    trainer.train()
    plan = executor_of(trainer.model).plan
    assert any(f"({4}, {LENGTH})" in text or f"{4}x{LENGTH}" in text or "[4, 16]" in text for text in plan.inputs)
    assert "sgd" in plan.optimizer_name.lower()


def test_a_longer_batch_is_planned_again(tmp_path):
    data = samples(4) + samples(4, length=32)
    trainer = wrap(make_trainer(tmp_path, data, max_steps=2, train_sampling_strategy="sequential"))
    trainer.train()
    assert any("32" in text for text in executor_of(trainer.model).plan.inputs)


class Endless(IterableDataset):
    """Can be read only once; reading ahead would change the training."""

    def __init__(self) -> None:
        self.rows = iter(samples(64))

    def __iter__(self) -> Any:
        return self.rows


def test_a_stream_of_data_is_not_read_ahead(tmp_path):
    plain = make_trainer(tmp_path, Endless())
    plain.train()
    ours = wrap(make_trainer(tmp_path, Endless()))
    ours.train()
    assert_same_training(ours, plain)


def test_a_model_made_by_the_trainer(tmp_path):
    plain = make_trainer(tmp_path, model_init=build)
    plain.train()
    ours = wrap(make_trainer(tmp_path, model_init=build))
    ours.train()
    assert_same_training(ours, plain)
    assert checkpointed_blocks(ours)


# ---- what the trainer does already


def test_the_trainers_checkpointing_is_not_doubled(tmp_path, caplog):
    plain = make_trainer(tmp_path, gradient_checkpointing=True)
    plain.train()
    with caplog.at_level(logging.INFO, logger="memscale"):
        ours = wrap(make_trainer(tmp_path, gradient_checkpointing=True))
    ours.train()
    assert_same_training(ours, plain)
    assert not checkpointed_blocks(ours)
    assert "does not checkpoint again" in caplog.text


def test_the_trainers_bf16_is_not_doubled(tmp_path, caplog):
    plain = make_trainer(tmp_path, bf16=True, max_steps=2)
    plain.train()
    with caplog.at_level(logging.INFO, logger="memscale"):
        ours = wrap(make_trainer(tmp_path, bf16=True, max_steps=2), use_mixed_precision=True)
    ours.train()
    assert_same_training(ours, plain)
    assert "bf16: its autocast stays in charge" in caplog.text
    assert not any(isinstance(action, MixedPrecision) for action in executor_of(ours.model).plan.actions)


def test_the_trainers_fp16_is_not_doubled(tmp_path, caplog):
    """Accelerate's fp16 needs a GPU, so only what it says is tried here."""
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.accelerator.state._mixed_precision = "fp16"
    with caplog.at_level(logging.INFO, logger="memscale"):
        wrap(trainer, use_mixed_precision=True)
    trainer.accelerator.state._mixed_precision = "no"
    assert "fp16: its autocast stays in charge" in caplog.text
    trainer.train()
    assert not any(isinstance(action, MixedPrecision) for action in executor_of(trainer.model).plan.actions)
    memscale.detach(trainer)


def test_the_batch_that_fits_is_taken_under_auto_find_batch_size(tmp_path, caplog):
    """The run is that of a plain trainer that was asked for that batch."""
    data = samples(64, length=48)
    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 32, "max_steps": 2}
    ours = make_trainer(tmp_path, data, **options)
    with caplog.at_level(logging.INFO, logger="memscale"):
        wrap(ours, memory_budget_gb=0.003, force_optimize=False)
        ours.train()
    found = ours.state.train_batch_size
    assert 1 < found < 32
    assert f"auto_find_batch_size takes the batch size {found}: The peak is" in caplog.text
    plan = executor_of(ours.model).plan
    assert plan.fits
    plain = make_trainer(tmp_path, data, **options | {"per_device_train_batch_size": found})
    plain.train()
    assert_same_training(ours, plain)
    memscale.detach(ours)


def test_what_does_not_fit_is_refused_without_auto_find_batch_size(tmp_path):
    ours = make_trainer(tmp_path, samples(64, length=48), per_device_train_batch_size=32)
    wrap(ours, memory_budget_gb=0.003, force_optimize=False)
    with pytest.raises(memscale.DoesNotFitError, match="lower the batch size from 32 to") as raised:
        ours.train()
    assert f"from 32 to {raised.value.batch_size}" in str(raised.value)
    memscale.detach(ours)


@pytest.mark.parametrize("way", ["wrap", "callback"])
def test_a_trainer_that_would_run_copies_in_threads_is_refused(tmp_path, way):
    """Where it sees several GPUs and was not started by `torchrun`."""
    ours = make_trainer(tmp_path, callbacks=[MemScaleCallback()] if way == "callback" else None)
    ours.args._n_gpu = 2
    with pytest.raises(memscale.MemScaleError, match=r"the Trainer's model runs in nn\.DataParallel.*torchrun"):
        ours.train() if way == "callback" else memscale.wrap(ours)
    assert "train" not in vars(ours)
    assert not hasattr(ours.model, "_memscale_executor")


# ---- 16 bits by MemScale


def test_bf16_by_memscale_is_bf16_by_the_trainer(tmp_path):
    plain = make_trainer(tmp_path, bf16=True, max_steps=3)
    plain.train()
    ours = wrap(make_trainer(tmp_path, max_steps=3), use_mixed_precision=True, enable_checkpointing=False)
    ours.train()
    assert any(isinstance(action, MixedPrecision) for action in executor_of(ours.model).plan.actions)
    for mine, theirs in zip(losses(ours), losses(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=0.01)


@pytest.fixture
def fp16(monkeypatch):
    """As on a card that has fast fp16 and no bf16."""
    monkeypatch.setattr(MixedPrecision, "choose_dtype", staticmethod(lambda *args, **kwargs: "float16"))


def test_fp16_in_the_trainer(tmp_path, fp16):
    plain = make_trainer(tmp_path, max_grad_norm=0.5)
    plain.train()
    ours = wrap(make_trainer(tmp_path, max_grad_norm=0.5), use_mixed_precision=True)
    ours.train()
    stats = executor_of(ours.model).stats()
    assert stats.loss_scale == 2.0 ** (16 - stats.num_skipped_steps)
    norms = [[entry["grad_norm"] for entry in t.state.log_history if "loss" in entry] for t in (ours, plain)]
    for mine, theirs in zip(norms[0] + losses(ours), norms[1] + losses(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=0.02)  # the trainer clips and logs true values
    memscale.detach(ours)


class Overflow(TrainerCallback):
    """Makes the loss infinite in one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.handle = None
        if state.global_step == self.step:
            self.handle = model.register_forward_hook(self.spoil)

    def spoil(self, module: nn.Module, args: Any, output: Any) -> Any:
        output["loss"] = output["loss"] * float("inf")
        return output

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.handle is not None:
            self.handle.remove()


def test_an_fp16_run_resumes_with_its_scale(tmp_path, fp16):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
    only_fp16 = {"use_mixed_precision": True, "enable_checkpointing": False}  # beside it: test_fp16_in_the_trainer
    whole = wrap(make_trainer(tmp_path / "whole", callbacks=[Overflow(1)], **options), **only_fp16)
    whole.train()
    assert executor_of(whole.model).stats().num_skipped_steps == 1
    first = wrap(make_trainer(tmp_path / "parts", callbacks=[Overflow(1)], **options), **only_fp16)
    first.add_callback(StopAt(3))
    first.train()
    saved = json.loads((tmp_path / "parts" / "checkpoint-3" / STATE_FILE).read_text())
    assert saved == {"loss_scale": {"scale": 2.0**15, "good_steps": 1, "num_skipped_steps": 1}}
    second = wrap(make_trainer(tmp_path / "parts", model=build(), **options), **only_fp16)
    second.train(resume_from_checkpoint=True)
    assert losses(second)[3:] == losses(whole)[3:]
    assert executor_of(second.model).state_dict() == executor_of(whole.model).state_dict()
    for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for trainer in (whole, first, second):
        memscale.detach(trainer)


# ---- the 8-bit optimizer


ONLY_8_BITS = {"use_8bit_optimizer": True, "enable_checkpointing": False}
"""Beside other techniques: test_the_full_stack_in_the_trainer."""


def inner(trainer: Trainer) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def wide() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("optim", "kind"),
    [
        ("adamw_torch", bnb.optim.AdamW8bit),
        ("adamw_torch_fused", bnb.optim.AdamW8bit),
        ("adagrad", bnb.optim.Adagrad8bit),
    ],
)
def test_the_8_bit_class_comes_through_the_trainers_creation(tmp_path, optim, kind):
    options = {"optim": optim, "learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1}
    trainer = wrap(make_trainer(tmp_path, model=wide(), **options), **ONLY_8_BITS)
    trainer.train()
    optimizer = inner(trainer)
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    states = {name: optimizer.state[p]["state1"].dtype for name, p in trainer.model.named_parameters()}
    assert states["transformer.h.0.mlp.c_fc.weight"] == torch.uint8
    assert states["transformer.wte.weight"] == torch.float32
    assert losses(trainer)[-1] < losses(trainer)[0]
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(set(rates)) > 2  # the trainer's scheduler moves the rate that the optimizer sees
    memscale.detach(trainer)
    assert type(inner(trainer)).__module__.startswith("torch.")
    assert {v.dtype for entry in inner(trainer).state.values() for v in entry.values()} == {torch.float32}
    assert "create_optimizer" not in vars(trainer)


def test_an_optimizer_that_is_bitsandbytes_own_already_is_left_alone(tmp_path):
    trainer = wrap(make_trainer(tmp_path, model=wide(), optim="lion_8bit"), **ONLY_8_BITS)
    trainer.train()
    assert type(inner(trainer)) is bnb.optim.Lion
    memscale.detach(trainer)


def test_a_paged_optimizer_is_left_alone(tmp_path, caplog):
    """On a CPU bitsandbytes pages nothing, and says so; the optimizer is the same."""
    options = {"model": wide(), "optim": "paged_adamw_32bit", "max_steps": 2}
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger="memscale"):
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
        plain = make_trainer(tmp_path, **options)
        plain.train()
        ours = wrap(make_trainer(tmp_path, **options | {"model": wide()}), mode="balanced", offload_dir=str(tmp_path))
        ours.train()
    assert_same_training(ours, plain)
    assert inner(ours).is_paged
    assert not any(isinstance(action, OffloadOptimizer) for action in executor_of(ours.model).plan.actions)
    assert "the Trainer's AdamW is left alone: bitsandbytes pages its state" in caplog.text
    memscale.detach(ours)


@pytest.mark.full  # torchao compiles its step: a minute or more; the sibling is the paged optimizer
def test_an_optimizer_of_torchao_is_left_alone(tmp_path, caplog):
    options = {"model": wide(), "optim": "adamw_torch_8bit", "max_steps": 3}
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger="memscale"):
        warnings.simplefilter("ignore")  # of torchao and of the compiler
        plain = make_trainer(tmp_path, **options)
        plain.train()
        ours = wrap(make_trainer(tmp_path, **options | {"model": wide()}), mode="balanced", offload_dir=str(tmp_path))
        ours.train()
    assert_same_training(ours, plain)
    assert type(inner(ours)).__module__.startswith("torchao")
    assert not any(isinstance(action, OffloadOptimizer) for action in executor_of(ours.model).plan.actions)
    assert "the Trainer's AdamW8bit is left alone: torchao compiles its step" in caplog.text
    assert "memscale_peak_gb" not in ours.state.log_history[-1], "a compiled step cannot be measured"
    memscale.detach(ours)


def test_an_8_bit_run_resumes_bit_for_bit(tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = wrap(make_trainer(tmp_path / "whole", model=wide(), **options), **ONLY_8_BITS)
    whole.train()
    first = wrap(make_trainer(tmp_path / "parts", model=wide(), **options), **ONLY_8_BITS)
    first.add_callback(StopAt(3))
    first.train()
    second = wrap(make_trainer(tmp_path / "parts", model=wide(), **options), **ONLY_8_BITS)
    second.train(resume_from_checkpoint=True)
    assert losses(second)[3:] == losses(whole)[3:]
    for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for trainer in (whole, first, second):
        memscale.detach(trainer)


def test_an_optimizer_that_was_given_stays_and_waits_in_8_bits(tmp_path):
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = make_trainer(tmp_path, model=model)
    trainer.optimizer = optimizer
    wrap(trainer, use_8bit_optimizer=True)
    trainer.train()
    assert inner(trainer) is optimizer
    assert executor_of(model).stats().transfers["optimizer"].packed_bytes > 0
    memscale.detach(trainer)
    assert all(type(entry) is dict for entry in optimizer.state.values())


def test_the_full_stack_in_the_trainer(tmp_path):
    trainer = make_trainer(tmp_path, model=wide(), max_steps=8, learning_rate=3e-3)
    asked = {"use_mixed_precision": True, "use_8bit_optimizer": True}
    wrap(trainer, mode="aggressive", offload_dir=str(tmp_path), **asked)
    trainer.train()
    kinds = {type(action).__name__ for action in executor_of(trainer.model).plan.actions}
    assert kinds >= {"MixedPrecision", "QuantizeOptimizer"}
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert trainer.state.log_history[-1]["memscale_reduction"] > 0
    memscale.detach(trainer)


def test_a_trainer_with_caches_trains_as_the_plain_one(tmp_path):
    """The cache's way through the kernels is kept, and so is the flag, in checkpoints too."""
    options = {"max_steps": 2, "use_cache": True, "save_strategy": "steps", "save_steps": 2}
    plain = make_trainer(tmp_path / "plain", **options)
    plain.train()
    ours = wrap(make_trainer(tmp_path / "ours", **options))  # which seeds
    ours.train()
    assert any(isinstance(action, Checkpoint) for action in executor_of(ours.model).plan.actions)
    assert losses(ours) == losses(plain)
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    saved = json.loads((tmp_path / "ours" / "checkpoint-2" / "config.json").read_text())
    assert saved == json.loads((tmp_path / "plain" / "checkpoint-2" / "config.json").read_text())
    assert saved["use_cache"] is True
    memscale.detach(ours)


# ---- logs


class Reporter(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def test_figures_in_the_trainers_logs(tmp_path):
    reporter = Reporter()
    trainer = wrap(make_trainer(tmp_path, callbacks=[reporter], eval_strategy="steps", eval_steps=2))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    baseline = executor_of(trainer.model).plan.baseline_peak_bytes
    assert "memscale_peak_gb" not in steps[0], "the first step is not the one that is measured"
    for entry in steps[1:]:
        assert entry["memscale_samples_per_second"] > 0
        assert entry["memscale_reduction"] == 1 - entry["memscale_peak_gb"] * 1e9 / baseline
    assert [entry for entry in reporter.seen if "memscale_peak_gb" in entry and "loss" in entry]
    assert "memscale_peak_gb" in trainer.state.log_history[-1], "the summary has it, too"
    assert not any("memscale_peak_gb" in entry for entry in trainer.state.log_history if "eval_loss" in entry)


@pytest.mark.parametrize("way", ["arguments", "callback"])
def test_the_end_of_a_training_writes_a_report(tmp_path, way):
    page = tmp_path / "run.html"
    if way == "callback":
        config = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False)
        trainer = make_trainer(tmp_path, max_steps=3, callbacks=[MemScaleCallback(config, memscale_report=page)])
    else:
        trainer = wrap(make_trainer(tmp_path, max_steps=3))
        trainer.args.memscale_report = str(page)
    trainer.train()
    text = page.read_text()
    assert "Predicted and measured" in text
    assert "GPT2LMHeadModel" in text
    if way == "arguments":  # the callback has left the model as it was
        memscale.detach(trainer)


def test_a_report_that_cannot_be_written_ends_no_training(tmp_path, caplog):
    trainer = wrap(make_trainer(tmp_path, max_steps=1))
    trainer.args.memscale_report = str(tmp_path / "nowhere" / "run.html")
    with caplog.at_level(logging.WARNING, "memscale"):
        trainer.train()
    assert "memscale_report=" in caplog.text
    assert trainer.state.global_step == 1
    memscale.detach(trainer)


def test_the_logged_peak_is_measured_and_as_predicted(tmp_path):
    options = {"max_steps": 3, "per_device_train_batch_size": 16}
    trainer = wrap(make_trainer(tmp_path, samples(64, length=64), **options))
    trainer.train()
    plan = executor_of(trainer.model).plan
    logged = trainer.state.log_history[-1]["memscale_peak_gb"] * 1e9
    memscale.detach(trainer)
    with memscale.measure("cpu") as measured:
        trainer.train()
    others = measured.timeline[0].total_bytes - sum(p.nbytes for p in trainer.model.parameters())
    assert logged == pytest.approx(plan.predicted_peak_bytes, rel=0.02)
    assert logged < measured.peak_bytes - others - 500_000


class Meter(TrainerCallback):
    """The peak of the second step of a trainer that nobody wrapped, measured as the log's is."""

    def __init__(self) -> None:
        self.meter = StepMeter()
        self.each_step = False
        """Measure all but the first, instead of the second."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.begin(kwargs["model"], kwargs["optimizer"].optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.each_step:
            self.meter.measure_again()
        self.meter.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.step_ends()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_logged_reduction_is_that_of_the_plain_trainer(tmp_path, accumulation):
    """Under accumulation both hold the gradients of earlier batches in their forwards."""
    options = {"max_steps": 2, "per_device_train_batch_size": 16, "gradient_accumulation_steps": accumulation}
    data = samples(96, length=64)
    plain = Meter()
    make_trainer(tmp_path, data, callbacks=[plain], **options).train()
    trainer = wrap(make_trainer(tmp_path, data, **options))
    trainer.train()
    plan, logged = executor_of(trainer.model).plan, trainer.state.log_history[-1]
    assert plan.baseline_peak_bytes == pytest.approx(plain.meter.peak_bytes, rel=0.02)
    assert plan.predicted_peak_bytes == pytest.approx(logged["memscale_peak_gb"] * 1e9, rel=0.02)
    measured = 1 - logged["memscale_peak_gb"] * 1e9 / plain.meter.peak_bytes
    assert logged["memscale_reduction"] == pytest.approx(measured, abs=0.01)


def ragged(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    """Samples of these lengths, which the trainer takes in this order."""
    return [samples(1, length=length, seed=index)[0] for index, length in enumerate(lengths)]


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """To the longest of the batch."""
    ids = [row["input_ids"] for row in rows]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=full)])
def test_the_logged_reduction_under_dynamic_padding(tmp_path, accumulation):
    """The peak is that of the longest batch, and it is compared with what the plain trainer takes for that one."""
    lengths = [24, 8, 12, 16] + [32] * 4 + [60, 40, 8, 60] + [10] * 4
    options = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    options |= {"max_steps": 4, "train_sampling_strategy": "sequential"}
    plain = Meter()
    plain.each_step = True
    theirs = make_trainer(tmp_path, ragged(lengths), callbacks=[plain], data_collator=pad, **options)
    theirs.train()
    ours = wrap(make_trainer(tmp_path, ragged(lengths), data_collator=pad, **options))
    ours.train()
    assert_same_training(ours, theirs)
    logged = [entry for entry in ours.state.log_history if "loss" in entry]
    highest = plain.meter.peak_bytes
    plan = executor_of(ours.model).plan
    assert plan.predicted_peak_bytes == pytest.approx(logged[-1]["memscale_peak_gb"] * 1e9, rel=0.02)
    assert logged[-1]["memscale_reduction"] == pytest.approx(
        1 - logged[-1]["memscale_peak_gb"] * 1e9 / highest, abs=0.01
    )
    assert logged[1]["memscale_peak_gb"] < logged[2]["memscale_peak_gb"] == logged[3]["memscale_peak_gb"]


def test_no_reduction_is_logged_that_compares_a_short_batch_with_a_long_one(tmp_path):
    options = {"max_steps": 2, "train_sampling_strategy": "sequential"}
    trainer = wrap(make_trainer(tmp_path, ragged([60] * 4 + [8] * 4), data_collator=pad, **options))
    trainer.train()
    last = trainer.state.log_history[-1]
    assert last["memscale_peak_gb"] > 0
    assert "memscale_reduction" not in last


def test_the_peak_with_the_8_bit_class_is_as_predicted(tmp_path):
    """Also where the model fits as it is: the class was replaced all the same."""
    trainer = wrap(make_trainer(tmp_path, max_steps=3), use_8bit_optimizer=True, force_optimize=False)
    trainer.train()
    plan, logged = executor_of(trainer.model).plan, trainer.state.log_history[-1]
    assert type(trainer.optimizer.optimizer) is bnb.optim.AdamW8bit
    assert plan.predicted_peak_bytes == pytest.approx(logged["memscale_peak_gb"] * 1e9, rel=0.02)


def test_real_samples_are_counted(tmp_path):
    """A last batch that is smaller counts as what it is."""
    trainer = wrap(make_trainer(tmp_path, samples(10), max_steps=-1, num_train_epochs=2))
    trainer.train()
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, _Callback)]
    assert callback.session.meter.num_samples == 20
    assert callback.session.meter.num_steps == 6


# ---- save and resume


@pytest.mark.parametrize(("wrapped_before", "wrapped_after"), in_turns([True, False], [False, True]))
def test_a_run_resumes_bit_for_bit(tmp_path, wrapped_before, wrapped_after):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(tmp_path / "whole", **options)
    whole.train()
    first = make_trainer(tmp_path / "parts", **options)
    if wrapped_before:
        wrap(first)
    first.add_callback(StopAt(3))
    first.train()
    second = make_trainer(tmp_path / "parts", model=build(), **options)
    if wrapped_after:
        wrap(second)
    second.train(resume_from_checkpoint=True)
    assert losses(second)[3:] == losses(whole)[3:]
    assert len(losses(second)) == 6
    for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.step:
            control.should_training_stop = True
        return control


def test_what_the_executor_keeps_is_in_the_checkpoint(tmp_path):
    """The scale of fp16, say: written by every save, read when the run resumes from it."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}

    def attach(model: nn.Module, config: memscale.Config, *rest: Any) -> Any:
        executor = _api.attach_unplanned(model, config, *rest)
        executor.state_dict = lambda: {"scale": 128.0}
        executor.load_state_dict = loaded.append
        return executor

    loaded: list[Any] = []
    config = memscale.Config(mode="conservative", enable_logging=False)
    wrap_trainer(make_trainer(tmp_path, **options), config, attach).train()
    assert json.loads((tmp_path / "checkpoint-1" / STATE_FILE).read_text()) == {"scale": 128.0}
    assert loaded == []
    wrap_trainer(make_trainer(tmp_path, **options), config, attach).train(str(tmp_path / "checkpoint-1"))
    assert loaded == [{"scale": 128.0}]


# ---- everything is undone


def trace_of(trainer: Trainer) -> Any:
    hooks = [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in trainer.model.named_modules()]
    return (
        list(trainer.callback_handler.callbacks),
        sorted(vars(trainer)),
        sorted(vars(trainer.model)),
        hooks,
        trainer.model.config.to_dict(),
    )


@pytest.mark.parametrize(("by_model", "trained"), in_turns([True, False], [True, False]))
def test_detach_leaves_the_trainer_as_it_was(tmp_path, by_model, trained):
    plain, trainer = make_trainer(tmp_path), make_trainer(tmp_path)
    before = [type(callback) for callback in trainer.callback_handler.callbacks]
    wrap(trainer)
    if trained:
        plain.train()
        trainer.train()
    memscale.detach(trainer.model if by_model else trainer)
    assert [type(callback) for callback in trainer.callback_handler.callbacks] == before
    ours, theirs = trace_of(trainer), trace_of(plain)
    assert ours[1:4] == theirs[1:4]
    trainer.train()
    assert "memscale_peak_gb" not in trainer.state.log_history[-1]


def test_wrapping_twice_is_wrapping_once(tmp_path):
    trainer = wrap(wrap(make_trainer(tmp_path)))
    assert sum(isinstance(callback, _Callback) for callback in trainer.callback_handler.callbacks) == 1
    trainer.train()
    memscale.detach(trainer)
    assert not any(isinstance(callback, _Callback) for callback in trainer.callback_handler.callbacks)
    assert "train" not in vars(trainer)


class FailAt(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            raise ZeroDivisionError


def test_a_training_that_fails_in_its_measured_step_leaves_nothing_open(tmp_path):
    trainer = wrap(make_trainer(tmp_path, callbacks=[FailAt()]))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.remove_callback(FailAt)
    trainer.train()
    assert "memscale_peak_gb" in trainer.state.log_history[-1]


def test_a_trainer_of_ones_own_keeps_its_train(tmp_path):
    calls = []
    trainer = make_trainer(tmp_path, max_steps=1)
    own = lambda *args, **kwargs: calls.append(args) or Trainer.train(trainer, *args, **kwargs)  # noqa: E731
    trainer.train = own
    wrap(trainer)
    trainer.train()
    assert len(calls) == 1
    memscale.detach(trainer)
    assert trainer.train is own
    del trainer.train


# ---- as a callback


FORCED = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False)


def test_the_callback_trains_the_same_and_leaves_the_model_as_it_was(tmp_path):
    plain = make_trainer(tmp_path, gradient_accumulation_steps=2)
    plain.train()
    callback = MemScaleCallback(FORCED)
    ours = make_trainer(tmp_path, gradient_accumulation_steps=2, callbacks=[callback])
    ours.train()
    assert_same_training(ours, plain)
    assert any(isinstance(action, Checkpoint) for action in callback.plan.actions)
    assert ours.state.log_history[-1]["memscale_peak_gb"] > 0
    assert executor_of(ours.model) is None
    assert vars(ours.model).keys() == vars(plain.model).keys()
    assert not ours.model._forward_pre_hooks
    ours.train()  # again, with another optimizer
    assert executor_of(ours.model) is None


def test_the_callback_resumes_and_saves_what_a_plain_trainer_saves(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "plain", **options)
    whole.model.config.use_cache = True
    whole.train()
    ours = make_trainer(tmp_path / "ours", callbacks=[MemScaleCallback(FORCED)], **options)
    ours.model.config.use_cache = True
    ours.train()
    saved = [directory / "checkpoint-2" / "config.json" for directory in (tmp_path / "plain", tmp_path / "ours")]
    assert saved[0].read_text() == saved[1].read_text()
    assert json.loads(saved[1].read_text())["use_cache"] is True
    again = make_trainer(tmp_path / "ours", callbacks=[MemScaleCallback(FORCED)], **options)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_after_a_training_that_fails_detach_undoes_the_callback_too(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[MemScaleCallback(FORCED), FailAt()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    memscale.detach(trainer.model)
    assert executor_of(trainer.model) is None


def test_a_missing_extra_gives_the_line_that_installs_it(monkeypatch):
    spec = importlib.util.spec_from_file_location("anew", huggingface.__file__)
    monkeypatch.setitem(sys.modules, "transformers", None)  # makes the import fail, as without the package
    with pytest.raises(ImportError, match=r'pip install -c constraints.txt "\.\[hf\]"'):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_callback_takes_a_config():
    with pytest.raises(TypeError, match=r"memscale\.Config or None, not dict"):
        MemScaleCallback({})
