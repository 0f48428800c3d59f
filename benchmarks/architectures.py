"""Architectures that nobody here chose: tiny models of transformers, timm and diffusers with random weights.

An architecture has a library and a name. `build(library, name)` gives ways to build it, the tiniest first, each of
which may raise what the library says about a configuration that it does not take. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.torchvision_names import names_of_torchvision

BATCH, LENGTH, VOCABULARY = 2, 16, 128
LIBRARIES = ("transformers", "timm", "diffusers")
MAX_PARAMETERS = 20_000_000
"""Larger ones, which cannot be made tiny, are left out: they take minutes and gigabytes."""

Built = tuple[nn.Module, dict[str, Any]]

# ---- transformers

_HEADS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION",
)
_TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "image_size": 32,
    "patch_size": 8,
}
_LAYERS = {name: value for name, value in _TINY.items() if "layer" in name}
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id")


def transformers_names() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def build_transformers(name: str) -> Iterator[Callable[[], Built]]:
    """Ways to build this architecture, the tiniest first."""
    for sizes in (_TINY, _LAYERS):
        for head in _model_classes(name):
            yield lambda sizes=sizes, head=head: _transformers_model(name, head, sizes)  # type: ignore[misc]


def _model_classes(name: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in _HEADS]
    found = [table[name] for table in (*tables, modeling_auto.MODEL_MAPPING_NAMES) if name in table]
    flat = [each[0] if isinstance(each, tuple) else each for each in found]
    return list(dict.fromkeys([*flat[:1], *flat[-1:]]))


def _transformers_model(name: str, class_name: str, sizes: dict[str, int]) -> Built:
    import transformers

    config = transformers.AutoConfig.for_model(name)
    _shrink(config, sizes)
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters / 1e6:.0f} M parameters after making it small")
    model = model_class(config)
    return model, _transformers_inputs(model, config)


def _shrink(config: Any, sizes: dict[str, int]) -> None:
    for name, value in sizes.items():
        if isinstance(getattr(config, name, None), int):
            with contextlib.suppress(Exception):  # a name that is read only: another one stands for it
                setattr(config, name, value)
    if sizes is _TINY:
        for name in _SPECIAL_TOKENS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, 1)
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for child in vars(config).values():
        if type(child).__name__.endswith("Config"):
            _shrink(child, sizes)


def _transformers_inputs(model: nn.Module, config: Any) -> dict[str, Any]:
    parameters = inspect.signature(type(model).forward).parameters
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = min(VOCABULARY, getattr(text, "vocab_size", None) or VOCABULARY)
    ids = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % (vocabulary - 8) + 4
    ids[:, -1] = 1  # the end token of the tiny configuration
    inputs: dict[str, Any] = {}
    if "input_ids" in parameters:
        inputs["input_ids"] = ids
        if "attention_mask" in parameters:
            inputs["attention_mask"] = torch.ones_like(ids)
    main = getattr(model, "main_input_name", "input_ids")
    if main in ("pixel_values", "input_values", "input_features") or (not inputs and "pixel_values" in parameters):
        inputs.update(_senses(main if main in parameters else "pixel_values", config))
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = ids
    if "labels" in parameters and type(model).__name__.endswith(("LM", "LMHeadModel", "ConditionalGeneration", "CTC")):
        inputs["labels"] = ids
    return inputs


def _senses(name: str, config: Any) -> dict[str, torch.Tensor]:
    if name == "input_values":
        return {name: torch.randn(BATCH, 16000)}
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 80
        return {name: torch.randn(BATCH, bins, 2 * (getattr(config, "max_source_positions", None) or 50))}
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 64
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return {name: torch.randn(BATCH, getattr(vision, "num_channels", None) or 3, height, width)}


# ---- timm

SIDE = 64
_SMALL_WORDS = ("atto", "femto", "pico", "nano", "xxs", "test", "tiny", "_xs", "small", "18", "b0")


def _timm() -> Any:
    with names_of_torchvision():
        return importlib.import_module("timm")


def timm_names() -> list[str]:
    """The smallest, by its name, of each of timm's families."""
    timm = _timm()
    found = []
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            found.append(min(names, key=lambda name: (_how_large(name), len(name), name)))
    return found


def _how_large(name: str) -> int:
    return next((place for place, word in enumerate(_SMALL_WORDS) if word in name), len(_SMALL_WORDS))


def build_timm(name: str) -> Iterator[Callable[[], Built]]:
    """With small images where the model takes them, told so or not; else with those that it is made for."""
    yield lambda: _timm_model(name, SIDE, img_size=SIDE)
    yield lambda: _timm_model(name, SIDE)
    yield lambda: _timm_model(name, None)


def _timm_model(name: str, side: int | None, **options: int) -> Built:
    timm = _timm()
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in timm.create_model(name, num_classes=10, **options).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters / 1e6:.0f} M parameters")
    model = timm.create_model(name, num_classes=10, **options)
    channels, height, width = model.default_cfg["input_size"]
    return model, {"x": torch.randn(BATCH, channels, side or height, side or width)}


# ---- diffusers

_UNET = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_BLOCKS_2D = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_CONDITION = {"sample": (BATCH, 4, 16, 16), "timestep": (), "encoder_hidden_states": (BATCH, 6, 16)}
_TEXT_UNET = {**_UNET, "cross_attention_dim": 16, "attention_head_dim": 4, "sample_size": 16}
_CODER = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4}
_CODER_TYPES = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_TRANSFORMER = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "UNet2DModel": (
        {
            **_UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        {"sample": (BATCH, 3, 16, 16), "timestep": ()},
    ),
    "UNet2DConditionModel": ({**_TEXT_UNET, **_BLOCKS_2D}, _CONDITION),
    "UNetMotionModel": (
        {
            **_TEXT_UNET,
            "motion_max_seq_length": 8,
            "motion_num_attention_heads": 2,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        },
        {**_CONDITION, "sample": (BATCH, 4, 4, 16, 16)},
    ),
    "UNet3DConditionModel": (
        {
            **_TEXT_UNET,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        {**_CONDITION, "sample": (BATCH, 4, 4, 16, 16)},
    ),
    "ControlNetModel": (
        {
            **{name: value for name, value in _TEXT_UNET.items() if name != "sample_size"},
            "down_block_types": _BLOCKS_2D["down_block_types"],
            "conditioning_embedding_out_channels": (4, 8),
        },
        {**_CONDITION, "controlnet_cond": (BATCH, 3, 32, 32)},
    ),
    "AutoencoderKL": ({**_CODER, **_CODER_TYPES}, {"sample": (BATCH, 3, 16, 16)}),
    "VQModel": ({**_CODER, **_CODER_TYPES, "num_vq_embeddings": 32}, {"sample": (BATCH, 3, 16, 16)}),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        {"sample": (BATCH, 3, 16, 16)},
    ),
    "Transformer2DModel": (
        {**_TRANSFORMER, "in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 16},
        {"hidden_states": (BATCH, 8, 8, 8), "encoder_hidden_states": (BATCH, 6, 16)},
    ),
    "PixArtTransformer2DModel": (
        {
            **_TRANSFORMER,
            "sample_size": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
        {"hidden_states": (BATCH, 4, 8, 8), "encoder_hidden_states": (BATCH, 6, 16), "timestep": (BATCH,)},
    ),
    "SD3Transformer2DModel": (
        {
            **_TRANSFORMER,
            "sample_size": 16,
            "in_channels": 4,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "out_channels": 4,
        },
        {
            "hidden_states": (BATCH, 4, 16, 16),
            "encoder_hidden_states": (BATCH, 6, 16),
            "pooled_projections": (BATCH, 16),
            "timestep": (BATCH,),
        },
    ),
    "FluxTransformer2DModel": (
        {
            **_TRANSFORMER,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (2, 2, 4),
            "guidance_embeds": False,
        },
        {
            "hidden_states": (BATCH, 16, 4),
            "encoder_hidden_states": (BATCH, 6, 16),
            "pooled_projections": (BATCH, 16),
            "timestep": (BATCH,),
            "img_ids": (16, 3),
            "txt_ids": (6, 3),
        },
    ),
    "PriorTransformer": (
        {**_TRANSFORMER, "embedding_dim": 16, "num_embeddings": 7, "additional_embeddings": 4},
        {
            "hidden_states": (BATCH, 16),
            "timestep": (BATCH,),
            "proj_embedding": (BATCH, 16),
            "encoder_hidden_states": (BATCH, 7, 16),
        },
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (8, 16),
            "sample_size": 32,
            "in_channels": 8,
            "out_channels": 8,
            "extra_in_channels": 0,
            "down_block_types": ("DownBlock1D", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1D"),
        },
        {"sample": (BATCH, 8, 32), "timestep": (BATCH,)},
    ),
}


def diffusers_names() -> list[str]:
    return list(DIFFUSERS)


def build_diffusers(name: str) -> Iterator[Callable[[], Built]]:
    yield lambda: _diffusers_model(name)


def _diffusers_model(name: str) -> Built:
    diffusers = importlib.import_module("diffusers")
    settings, shapes = DIFFUSERS[name]
    inputs = {
        key: torch.ones(shape, dtype=torch.long) if key == "timestep" else torch.randn(shape)
        for key, shape in shapes.items()
    }
    return getattr(diffusers, name)(**settings), inputs


_NAMES = {"transformers": transformers_names, "timm": timm_names, "diffusers": diffusers_names}
_BUILDERS = {"transformers": build_transformers, "timm": build_timm, "diffusers": build_diffusers}


def names(library: str) -> list[str]:
    """The architectures of a library, which must be installed."""
    return _NAMES[library]()


def build(library: str, name: str) -> Iterator[Callable[[], Built]]:
    """Ways to build this architecture and inputs for it, the tiniest first."""
    return _BUILDERS[library](name)


def called(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """A model of timm takes its image by position."""
    return model(*inputs.values()) if list(inputs) == ["x"] else model(**inputs)
