"""PEFT's comparison of methods on an L40S: what PyTorch reserved while FLUX.2-klein-4B and Llama-3.2-3B were trained.

Images have one shape in every step, so that a run is one figure: the most that was reserved. The transformer is
trained in bf16 with gradient checkpointing, AdamW and clipped gradients; beside it, the card holds all prompts and
images, encoded, and the model that judges results. Texts have lengths that we do not know: a run is compared by its
ratio to LoRA of rank 32, at one length for all (`TEXT_LENGTH`), chosen so that this one comes out right.

Models are built as `diffusers`, `transformers` and `peft` build them, without memory. A method whose adapter has
another number of parameters than the published one is another method: it counts as missed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.published.page import Entry
from memscale import Hardware, MemScaleError
from memscale._planning.reserved.allocations import reserved_of
from memscale._planning.reserved.recording import record_steps
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal

CARD = "L40S"
GB = 1e9
INSTALL = "pip install --no-deps diffusers==0.38.0 requests importlib_metadata zipp"
SHARE = 0.03
"""By how much a prediction may differ."""
MAX_NORM = 1.0
BF16 = torch.bfloat16

NUM_IMAGES, BATCH, TEXT, EMBEDDED, SIDE, CHANNELS = 20, 2, 512, 7680, 32, 128
LINEAR = ["to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]
LINEAR += ["to_qkv_mlp_proj", "linear_in", "linear_out"]
"""The layers that methods change in FLUX.2, unless they say others."""

TEXT_BATCH, TEXT_LENGTH = 4, 620
REFERENCE = "lora/llama-3.2-3B-rank32"


CAUSES = {
    "BOFT": "Rehearsed without values, PEFT's permutation asks a tensor for one. Its own code would have to change.",
    "FOURIERFT": "A whole weight is transformed: cuFFT's workspace, an estimate, is a large part of the figure.",
    "FROD": "It decomposes the weights when it is built, which have no values here.",
    "GLORA": "Why the run took more is not known.",
    "HRA": "A product for each of 32 directions in every layer takes more than ten minutes to rehearse.",
    "SHIRA": "Which weights are trained is drawn when the model is built, and without values nothing can be drawn.",
    "WAVEFT": "Whole weights are convolved. What is missing is three times the largest of them in fp32: cuDNN's"
    " workspace, we suppose, of which nothing is published. The emulated card takes what is predicted, by the same"
    " estimate.",
}
"""Why methods are missed, as far as we know."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    name: str
    kind: str
    """PEFT's name of the method; empty: all weights are trained."""
    settings: dict[str, Any] | str
    """Those that are not PEFT's defaults, or why the run is not predicted."""
    trainable: int
    reserved: int


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    row: Row
    reserved_bytes: int
    trouble: str = ""


# ---- the models


class ClippingAdamW(torch.optim.AdamW):
    """Gradients are clipped before each step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], MAX_NORM)
        return super().step(closure)


def _flux() -> nn.Module:
    from diffusers import Flux2Transformer2DModel  # type: ignore[import-not-found, unused-ignore]

    model: Any = Flux2Transformer2DModel(
        num_layers=5,
        num_single_layers=20,
        num_attention_heads=24,
        attention_head_dim=128,
        joint_attention_dim=EMBEDDED,
        in_channels=CHANNELS,
        guidance_embeds=False,
    )
    model.to(BF16).enable_gradient_checkpointing()
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(BF16)


def _adapted(model: nn.Module, row: Row, targets: Sequence[str]) -> nn.Module:
    """As the run made it; raises `MemScaleError` where it cannot be made here."""
    if not row.kind:
        return model.requires_grad_(True)
    if isinstance(row.settings, str):
        raise MemScaleError(row.settings)
    import peft

    settings = {"target_modules": list(targets), **row.settings}
    if settings.get("feedforward_modules") == "all":
        settings["feedforward_modules"] = settings["target_modules"]
    made = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(row.kind)](**settings)
    return peft.get_peft_model(model, made)


class Denoising(nn.Module):
    """A step on noisy images, with what the run keeps on the card beside the transformer."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        from transformers import Dinov2Config, Dinov2Model

        self.judge = Dinov2Model(Dinov2Config()).requires_grad_(False)
        self.transformer = transformer

    def forward(
        self, images: Any, prompts: Any, text_ids: Any, image_ids: Any, chosen: Any, noise_share: Any, beside: Any
    ) -> Any:
        """`beside` is what the method keeps on the card without computing with it in a step."""
        latents, prompts, text_ids = (kept.index_select(0, chosen) for kept in (images, prompts, text_ids))
        noise = torch.randn_like(latents)
        noisy = (1.0 - noise_share) * latents + noise_share * noise
        packed = noisy.flatten(2).permute(0, 2, 1)
        output = self.transformer(
            hidden_states=packed,
            timestep=noise_share.flatten().float(),
            guidance=None,
            encoder_hidden_states=prompts,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        output = torch.stack([_placed(row, ids) for row, ids in zip(output, image_ids, strict=True)])
        weight, target = torch.ones_like(noise_share), noise - latents
        return (weight.float() * (output.float() - target.float()) ** 2).flatten(1).mean(1).mean()


def _placed(row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    place = (ids[:, 1] * SIDE + ids[:, 2]).unsqueeze(1).expand(-1, CHANNELS)
    empty = torch.zeros(SIDE * SIDE, CHANNELS, dtype=row.dtype, device=row.device)
    return empty.scatter_(0, place, row).view(SIDE, SIDE, CHANNELS).permute(2, 0, 1)


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _images(row: Row) -> Inputs:
    """AdaLoRA follows how much each of its parameters matters: by three numbers for each."""
    ids = torch.int64
    num_beside = 3 * row.trainable if row.kind == "ADALORA" else 1
    return Inputs(
        (
            _empty(NUM_IMAGES, CHANNELS, SIDE, SIDE),
            _empty(NUM_IMAGES, TEXT, EMBEDDED),
            _empty(NUM_IMAGES, TEXT, 4, dtype=ids),
            _empty(BATCH, SIDE * SIDE, 4, dtype=ids),
            _empty(BATCH, dtype=ids),
            _empty(BATCH, 1, 1, 1),
            _empty(num_beside, dtype=torch.float32),
        )
    )


def _texts() -> Inputs:
    words = _empty(TEXT_BATCH, TEXT_LENGTH, dtype=torch.int64)
    return Inputs(kwargs={"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words})


# ---- predicting


def predict_images(row: Row) -> Outcome:
    return _predicted(row, lambda: Denoising(_adapted(_flux(), row, LINEAR)), _images(row))


@functools.cache
def _predict_text(row_name: str, kind: str, settings: str, trainable: int) -> Outcome:
    row = Row(row_name, kind, json.loads(settings), trainable, 0)
    return _predicted(row, lambda: _adapted(_llama(), row, ()), _texts())


def predict_texts(row: Row) -> Outcome:
    found = _predict_text(row.name, row.kind, json.dumps(row.settings), row.trainable)
    return dataclasses.replace(found, row=row)


def _predicted(row: Row, build: Callable[[], nn.Module], inputs: Inputs) -> Outcome:
    try:
        with torch.device("meta"):
            model = build()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        trainable = sum(parameter.numel() for parameter in trained)
        if trainable != row.trainable:
            return Outcome(row, 0, f"{trainable:,} parameters are trained here, {row.trainable:,} there")
        rehearsal = FakeRehearsal(model, inputs, "cuda")
        log = record_steps(rehearsal, model, ClippingAdamW(trained), hardware=Hardware.from_name(CARD))
    except Exception as error:  # a method that needs values, or is not known here
        return Outcome(row, 0, str(error).partition("\n")[0][:100])
    return Outcome(row, reserved_of(log).reserved_peak_bytes)


def predict_all(
    rows: Sequence[Row], predict: Callable[[Row], Outcome], say: Callable[[str], None]
) -> Iterator[Outcome]:
    for number, row in enumerate(rows, 1):
        say(f"[{number}/{len(rows)}] {row.name}")
        yield predict(row)


# ---- entries


def image_entry(outcome: Outcome) -> Entry:
    row, predicted = outcome.row, outcome.reserved_bytes
    return _entry(outcome, f"{row.reserved / GB:.3f} GB", f"{predicted / GB:.3f} GB", predicted / row.reserved)


def text_entry(outcome: Outcome, reference: Outcome) -> Entry:
    published = outcome.row.reserved / reference.row.reserved
    predicted = outcome.reserved_bytes / reference.reserved_bytes
    return _entry(outcome, f"{published:.3f}", f"{predicted:.3f}", predicted / published)


def _entry(outcome: Outcome, published: str, predicted: str, ratio: float) -> Entry:
    is_near = abs(ratio - 1) <= SHARE
    missed = "missed: not predicted" if outcome.trouble else "missed"
    return Entry(
        name=outcome.row.name,
        card=CARD,
        published=published,
        predicted=outcome.trouble or predicted,
        difference="-" if outcome.trouble else f"{ratio - 1:+.2%}",
        verdict=f"within {SHARE:.0%}" if is_near else missed,
        note="" if is_near else CAUSES.get(outcome.row.kind, ""),
    )


def read_table(path: pathlib.Path) -> list[Row]:
    return [Row(**entry) for entry in json.loads(path.read_text())["rows"]]
