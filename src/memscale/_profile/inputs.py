"""The batch that a step is profiled with: given by the user, derived from a `transformers` config, or seen at work."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map

from memscale._errors import MemScaleError
from memscale._profile import TensorSpec

DERIVED_SEQUENCE_LENGTH = 512
MOST_KEPT_BYTES = 2**20
"""The largest tensor whose values are kept of a batch that has passed."""
IMAGE_SIZE = 224
"""The side of an image for models that do not say one."""
DIFFUSION_SIZE = 128
"""A side of the VAE's space for images of 1024 pixels."""
CLIP_TEXT_LENGTH = 77
_ORDINARY = (torch.Tensor, nn.Parameter)
_NUM_TIME_IDS = 6
"""SDXL is told the original size, the crop and the target size, two numbers each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Positional and keyword arguments of a model's forward."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_sample(cls, sample: Any) -> Inputs:
        """A tensor, a tuple of positional or a mapping of keyword inputs; anything else is a `TypeError`."""
        if isinstance(sample, Inputs):
            return sample
        if isinstance(sample, torch.Tensor):
            return cls(args=(sample,))
        if isinstance(sample, tuple):
            return cls(args=sample)
        if isinstance(sample, Mapping):
            return cls(kwargs=dict(sample))
        raise TypeError(
            "sample_input must be a tensor, a tuple of positional inputs or a dict of keyword inputs, "
            f"not {type(sample).__name__}"
        )

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """A tensor that is given twice (as inputs and as labels) stays one tensor."""
        return self.replaced({id(tensor): function(tensor) for tensor in self.tensors()})

    def kept(self) -> Inputs | None:
        """The same batch without its memory on the device: shapes, and on the host the values of an accelerator's small
        tensors of integers, which may decide what a model does.

        None: something in it is neither an ordinary tensor nor a plain value, and may hold memory."""
        if not all(other is None or isinstance(other, bool | int | float | str) for other in self.others()):
            return None
        if not all(type(each) in _ORDINARY and each.layout is torch.strided for each in self.tensors()):
            return None
        return self.map_tensors(_kept)

    def replaced(self, tensors: Mapping[int, torch.Tensor], others: Mapping[int, Any] | None = None) -> Inputs:
        """The same inputs with other tensors, and with others of `others()`, by the ids of those that they replace."""
        args, kwargs = _map(lambda tensor: tensors[id(tensor)], (self.args, self.kwargs))
        if others is not None:
            args, kwargs = tree_map(lambda leaf: others[id(leaf)] if _is_other(leaf) else leaf, (args, kwargs))
        return Inputs(args, kwargs)

    def others(self) -> list[Any]:
        """What is neither a tensor nor a dataclass."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if _is_other(leaf)]

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.named_tensors()]

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All tensors with their place, as "0.1" or "1.attention_mask"."""
        return list(_named_tensors("", (self.args, self.kwargs)))

    def size(self, dimension: int) -> int | None:
        """What all tensors with that dimension agree on: 0 is the batch, 1 the length of integer sequences."""
        found = [t for t in self.tensors() if t.dim() > dimension and (dimension == 0 or not t.is_floating_point())]
        sizes = {tensor.shape[dimension] for tensor in found}
        return sizes.pop() if len(sizes) == 1 else None

    def resized(self, dimension: int, size: int) -> Inputs:
        """The same batch at another size of one dimension, without data."""
        now = self.size(dimension)

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if len(shape) > dimension and shape[dimension] == now:
                shape[dimension] = size
            return _meta(tuple(shape), tensor.dtype).requires_grad_(tensor.requires_grad)

        return self.map_tensors(resize)

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name.partition(".")[2], tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in _named_tensors("", (self.args, self.kwargs))
        )


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if is_number or tensor.device.type in ("cpu", "meta") or tensor.nbytes > MOST_KEPT_BYTES:
        return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    return tensor.detach().to("cpu")


def _named_tensors(prefix: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested containers and dataclasses, with their place as "0.ids"."""
    for path, leaf in tree_leaves_with_path(tree):
        name = ".".join([*([prefix] if prefix else []), *(str(_key_of(key)) for key in path)])
        if isinstance(leaf, torch.Tensor):
            yield name, leaf
        elif _is_record(leaf):
            yield from _named_tensors(name, {field: getattr(leaf, field) for field in _fields_of(leaf)})


def _key_of(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", key))


def _map(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    return tree_map(functools.partial(_map_leaf, function), tree)


def _map_leaf(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if not _is_record(leaf):
        return leaf
    record = copy.copy(leaf)
    for field in _fields_of(leaf):
        object.__setattr__(record, field, _map(function, getattr(leaf, field)))  # also where it is frozen
    return record


def _is_other(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) and not _is_record(leaf)


def _is_record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _fields_of(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]


def derive_inputs(model: nn.Module, batch: int = 1, sequence_length: int | None = None) -> Inputs | None:
    """Meta inputs for a Hugging Face model, from its config; None for any other model."""
    config = getattr(model, "config", None)
    names = set(inspect.signature(type(model).forward).parameters)
    if {"timestep", "encoder_hidden_states"} <= names and hasattr(config, "in_channels"):
        return _diffusion_inputs(config, names, batch, sequence_length)
    if config is None or not hasattr(config, "model_type"):
        return None
    if {"input_ids", "pixel_values", "return_loss"} <= names:  # pairs of texts and images, as CLIP takes them
        text, image = _text_inputs(model, config, names, batch, sequence_length), _image_inputs(config, names, batch)
        return Inputs(kwargs={**text.kwargs, **image.kwargs, "return_loss": True})
    if "input_features" in names and getattr(config, "is_encoder_decoder", False):
        return _speech_inputs(config, batch)
    if "input_ids" in names:
        return _text_inputs(model, config, names, batch, sequence_length)
    if "pixel_values" in names:
        return _image_inputs(config, names, batch)
    return None


def _diffusion_inputs(config: Any, names: set[str], batch: int, sequence_length: int | None) -> Inputs:
    """Noisy images in the VAE's space, their times, and encoded texts, for a network of `diffusers`."""
    size = getattr(config, "sample_size", None) or DIFFUSION_SIZE
    text_width = getattr(config, "joint_attention_dim", None) or config.cross_attention_dim
    # UNets are told what CLIP makes of a text, transformers what T5 makes of it.
    length = sequence_length or (CLIP_TEXT_LENGTH if "sample" in names else DERIVED_SEQUENCE_LENGTH)
    kwargs: dict[str, Any] = {"timestep": _meta((batch,), torch.long)}
    kwargs["encoder_hidden_states"] = _meta((batch, length, text_width), torch.float32)
    image = _meta((batch, config.in_channels, size, size), torch.float32)
    if "img_ids" in names:  # FLUX takes patches of 2 x 2 as a sequence, and the place of each
        num_patches = (size // 2) ** 2
        image = _meta((batch, num_patches, config.in_channels), torch.float32)
        kwargs |= {"img_ids": _meta((num_patches, 3), torch.float32), "txt_ids": _meta((length, 3), torch.float32)}
    if getattr(config, "guidance_embeds", False):
        kwargs["guidance"] = _meta((batch,), torch.float32)
    if "pooled_projections" in names:
        kwargs["pooled_projections"] = _meta((batch, config.pooled_projection_dim), torch.float32)
    if getattr(config, "addition_embed_type", None) == "text_time":
        width = config.projection_class_embeddings_input_dim - _NUM_TIME_IDS * config.addition_time_embed_dim
        texts, times = _meta((batch, width), torch.float32), _meta((batch, _NUM_TIME_IDS), torch.float32)
        kwargs["added_cond_kwargs"] = {"text_embeds": texts, "time_ids": times}
    return Inputs(kwargs={"sample" if "sample" in names else "hidden_states": image, **kwargs})


def longest_sequence(model: nn.Module) -> int | None:
    """How many positions a Hugging Face model has learned; None where nothing limits the length."""
    longest = _positions(getattr(model, "config", None))
    return longest if longest is not None and _has_position_table(model, longest) else None


def _positions(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)


def _text_inputs(model: nn.Module, config: Any, names: set[str], batch: int, sequence_length: int | None) -> Inputs:
    longest = _positions(config)
    length = sequence_length or min(DERIVED_SEQUENCE_LENGTH, longest or DERIVED_SEQUENCE_LENGTH)
    if longest is not None and length > longest and _has_position_table(model, longest):
        raise MemScaleError(f"a sequence of {length} is longer than the {longest} positions of this model")
    kwargs: dict[str, Any] = {"input_ids": _meta((batch, length), torch.long)}
    if not getattr(config, "is_encoder_decoder", False) and "attention_mask" in names and _is_encoder(model):
        kwargs["attention_mask"] = _meta((batch, length), torch.long)
    if "labels" in names:
        kwargs["labels"] = _meta(_label_shape(model, batch, length), torch.long)
    elif getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = _meta((batch, length), torch.long)
    return Inputs(kwargs=kwargs)


def _has_position_table(model: nn.Module, longest: int) -> bool:
    """Learned positions limit the length; rotary and relative ones do not."""
    return any(isinstance(m, nn.Embedding) and m.num_embeddings == longest for m in model.modules())


def _speech_inputs(config: Any, batch: int) -> Inputs | None:
    """A window of sound, and the longest text for it; None where the config does not say how long that is."""
    positions, length = getattr(config, "max_source_positions", None), getattr(config, "max_target_positions", None)
    bands = getattr(config, "num_mel_bins", None)
    if positions is None or length is None or bands is None:
        return None
    sound = _meta((batch, bands, 2 * positions), torch.float32)  # the first convolutions halve it
    return Inputs(kwargs={"input_features": sound, "labels": _meta((batch, length), torch.long)})


def _image_inputs(config: Any, names: set[str], batch: int) -> Inputs:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or IMAGE_SIZE  # nets of convolutions take images of any size
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    kwargs: dict[str, Any] = {
        "pixel_values": _meta((batch, getattr(config, "num_channels", 3), height, width), torch.float32)
    }
    if "labels" in names:
        kwargs["labels"] = _meta((batch,), torch.long)
    return Inputs(kwargs=kwargs)


def _is_encoder(model: nn.Module) -> bool:
    """Encoders get an attention mask from every tokenizer; causal models are trained without one here."""
    can_generate = getattr(model, "can_generate", None)
    return not (can_generate() if can_generate is not None else hasattr(model, "lm_head"))


def _label_shape(model: nn.Module, batch: int, length: int) -> tuple[int, ...]:
    """Classification heads take one label a sequence, language models one a token."""
    return (
        (batch,)
        if "Classification" in type(model).__name__ and "Token" not in type(model).__name__
        else (batch, length)
    )


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
