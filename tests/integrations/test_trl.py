"""The real trainers of TRL, and generation inside of training, plain and wrapped: the same training."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from huggingface_hub import constants as hub_constants
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tqdm import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import memscale
from memscale._execute.executor import executor_of
from memscale._plan import Checkpoint, StreamParameters
from tests.lanes import full

VOCABULARY = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "max_steps": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "learning_rate": 1e-2,
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars of `datasets`, and what TRL reports of itself over the network, would start threads that stay."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    monkeypatch.setattr(hub_constants, "HF_HUB_DISABLE_TELEMETRY", True)
    disable_progress_bar()


@pytest.fixture
def on_card(simgpu_device: Any, no_leaks: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate trains on the simulated card, as it would on one that it knows by itself."""
    states = (PartialState, AcceleratorState, GradientState)
    for state in states:
        state._reset_state()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "simgpu")
    yield
    for state in states:
        state._reset_state()


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(VOCABULARY), **sizes, **heads))


def texts(count: int = 24) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 20, (count,), generator=generator).tolist()
    words = [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"text": " ".join(f"w{number}" for number in row)} for row in words])


def sft(directory: pathlib.Path, **options: Any) -> SFTTrainer:
    arguments = {**OPTIONS, "output_dir": str(directory), "bf16": False, "use_cpu": True, **options}
    return SFTTrainer(model=llama(), args=SFTConfig(**arguments), train_dataset=texts(), processing_class=tokenizer())


def variety(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward: how many different words."""
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(directory: pathlib.Path) -> GRPOTrainer:
    sizes = {"num_generations": 4, "max_completion_length": 4}
    arguments = {**OPTIONS, **sizes, "output_dir": str(directory), "bf16": False, "gradient_checkpointing": False}
    prompts = Dataset.from_list([{"prompt": f"w{number} w{number + 1} w{number + 2}"} for number in range(20)])
    return GRPOTrainer(
        model=llama(),
        args=GRPOConfig(**arguments),
        reward_funcs=variety,
        train_dataset=prompts,
        processing_class=tokenizer(),
    )


def preferences(directory: pathlib.Path, kind: str) -> Trainer:
    """Trainers whose data are answers that are better than others. Two of them run a second model beside."""
    told = texts()["text"]
    rows = [
        {"prompt": "w1", "chosen": f" {a}", "rejected": f" {b}"} for a, b in zip(told[::2], told[1::2], strict=True)
    ]
    options = {**OPTIONS, "output_dir": str(directory), "bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    common = {"processing_class": tokenizer()}
    if kind == "dpo":
        data = Dataset.from_list(rows)
        return DPOTrainer(llama(), ref_model=llama(), args=DPOConfig(**options), train_dataset=data, **common)
    if kind == "kto":
        answers = [{"prompt": "w1", "completion": f" {a}", "label": n % 2 == 0} for n, a in enumerate(told)]
        data = Dataset.from_list(answers)
        return KTOTrainer(llama(), ref_model=llama(), args=KTOConfig(**options), train_dataset=data, **common)
    torch.manual_seed(1)
    scorer = LlamaForSequenceClassification(LlamaConfig(**{**llama().config.to_dict(), "num_labels": 1}))
    data = Dataset.from_list([{"chosen": row["chosen"], "rejected": row["rejected"]} for row in rows])
    return RewardTrainer(scorer, RewardConfig(**options), train_dataset=data, **common)


class Generating(Seq2SeqTrainer):
    """Remembers what it generated in its evaluations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generated: list[Any] = []
        super().__init__(*args, **kwargs, compute_metrics=self._take_down)

    def _take_down(self, prediction: Any) -> dict[str, float]:
        self.generated.append(np.array(prediction.predictions))
        return {}


def translation(directory: pathlib.Path) -> Generating:
    torch.manual_seed(1)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes, decoder_start_token_id=0))
    rows = torch.randint(2, 64, (16, 8), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row.flip(0)} for row in rows]
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "predict_with_generate": True, "generation_max_length": 6}
    arguments = Seq2SeqTrainingArguments(**OPTIONS, **evaluation, output_dir=str(directory))
    return Generating(model=model, args=arguments, train_dataset=data, eval_dataset=data[:6])


def wrap(trainer: Any, **fields: Any) -> Any:
    options = {"mode": "conservative", "force_optimize": True, "enable_logging": False, **fields}
    return memscale.wrap(trainer, memscale.Config(**options))


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logged(trainer: Trainer) -> list[dict[str, Any]]:
    """All that a training has logged, but for what its speed decides and for what MemScale adds."""
    return [
        {
            key: value
            for key, value in entry.items()
            if not key.endswith(("runtime", "per_second", "step_time")) and not key.startswith("memscale_")
        }
        for entry in trainer.state.log_history
    ]


def assert_same_training(ours: Trainer, theirs: Trainer) -> None:
    """Losses, norms, rewards and all other metrics, to the last bit; and the weights."""
    assert losses(ours)
    assert all("grad_norm" in entry for entry in ours.state.log_history if "loss" in entry)
    assert logged(ours) == logged(theirs)
    for (name, mine), their in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), their.cpu()), name


def actions_of(trainer: Trainer, kind: type) -> list[Any]:
    return [action for action in executor_of(trainer.model).plan.actions if isinstance(action, kind)]


def test_the_checkpoints_of_sft_are_not_doubled(tmp_path, caplog):
    """They are on unless somebody turns them off."""
    plain = sft(tmp_path)
    plain.train()
    with caplog.at_level(logging.INFO, logger="memscale"):
        ours = wrap(sft(tmp_path))
    ours.train()
    assert_same_training(ours, plain)
    assert "does not checkpoint again" in caplog.text
    assert not actions_of(ours, Checkpoint)
    memscale.detach(ours)


@pytest.mark.parametrize("packing", [False, pytest.param(True, marks=full)])
def test_the_same_training_of_sft(tmp_path, packing):
    """Its fused head is called by no module, and metrics come from it; a packed batch is one row."""
    options = {"gradient_checkpointing": False, "packing": packing, "max_length": 16}
    plain = sft(tmp_path, **options)
    plain.train()
    ours = wrap(sft(tmp_path, **options))
    ours.train()
    assert_same_training(ours, plain)
    assert len(actions_of(ours, Checkpoint)) == 2
    assert all({"entropy", "mean_token_accuracy"} <= entry.keys() for entry in logged(ours)[:-1])
    memscale.detach(ours)


@pytest.mark.parametrize("kind", ["dpo", pytest.param("reward", marks=full), pytest.param("kto", marks=full)])
def test_the_same_training_on_preferences(tmp_path, kind):
    plain = preferences(tmp_path, kind)
    plain.train()
    ours = wrap(preferences(tmp_path, kind))
    ours.train()
    assert_same_training(ours, plain)
    assert actions_of(ours, Checkpoint)
    memscale.detach(ours)


def test_the_chunked_loss_of_sft_is_no_head_to_tile(tmp_path):
    """Its logits never exist whole already, so tiling has nothing to find."""
    options = {"gradient_checkpointing": False, "max_steps": 2}
    plain = sft(tmp_path, **options)
    plain.train()
    ours = wrap(sft(tmp_path, **options), enable_tiling=True)
    ours.train()
    assert losses(ours) == losses(plain)
    assert not any("Head" in type(action).__name__ for action in executor_of(ours.model).plan.actions)
    memscale.detach(ours)


@pytest.mark.parametrize("build", [pytest.param(translation, marks=full), grpo])
def test_a_streamed_model_generates_inside_training(tmp_path, on_card, build: Callable[[pathlib.Path], Any]):
    plain = build(tmp_path)
    plain.train()
    ours = wrap(build(tmp_path), mode="balanced")
    ours.train()
    assert len(actions_of(ours, StreamParameters)) > 2
    assert_same_training(ours, plain)
    assert ours.model.device.type == "simgpu"
    if build is translation:
        assert len(ours.generated) == 2
        assert all(map(np.array_equal, ours.generated, plain.generated))
    else:
        assert all({"reward", "entropy"} <= entry.keys() for entry in logged(ours)[:-1])
    memscale.detach(ours)
