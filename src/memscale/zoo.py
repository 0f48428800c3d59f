"""Models by name, for the command line: the usual sizes, on the meta device, with nothing downloaded or allocated.

The configs are written out as numbers. They give a model its shapes and so its memory; what changes neither (token
ids, rotary bases, normalisation epsilons) is left at the defaults of `transformers` or `diffusers`. A name may also be
`path/to/file.py:factory`, for a model of the user's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import logging
import pathlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from memscale._errors import UnknownModelError, install_command, quoted, shown

if TYPE_CHECKING:
    from torch import nn

    from memscale._profile.inputs import Inputs

logger = logging.getLogger("memscale")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A model class of `transformers` and the numbers of its config; or one of `diffusers`, which takes the numbers
    itself and has no class for its config."""

    config_class: str
    model_class: str
    numbers: dict[str, Any]

    @property
    def library(self) -> str:
        return "transformers" if self.config_class else "diffusers"


def _bert(layers: int, width: int, heads: int) -> Entry:
    return Entry(
        "BertConfig",
        "BertForMaskedLM",
        {
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
        },
    )


def _distilbert(layers: int, width: int, heads: int) -> Entry:
    numbers = {"vocab_size": 30522, "n_layers": layers, "dim": width, "n_heads": heads, "hidden_dim": 4 * width}
    return Entry("DistilBertConfig", "DistilBertForMaskedLM", numbers)


def _roberta(layers: int, width: int, heads: int) -> Entry:
    numbers = {
        **_bert(layers, width, heads).numbers,
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
    }
    return Entry("RobertaConfig", "RobertaForMaskedLM", numbers)


def _gpt2(layers: int, width: int, heads: int) -> Entry:
    numbers = {"vocab_size": 50257, "n_positions": 1024, "n_layer": layers, "n_embd": width, "n_head": heads}
    return Entry("GPT2Config", "GPT2LMHeadModel", numbers)


def _t5(layers: int, width: int, heads: int, head_width: int, inner_width: int) -> Entry:
    return Entry(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 32128,
            "num_layers": layers,
            "d_model": width,
            "num_heads": heads,
            "d_kv": head_width,
            "d_ff": inner_width,
            "decoder_start_token_id": 0,
        },
    )


def _vit(layers: int, width: int, heads: int, patch: int) -> Entry:
    return Entry(
        "ViTConfig",
        "ViTForImageClassification",
        {
            "image_size": 224,
            "patch_size": patch,
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
            "num_labels": 1000,
        },
    )


def _causal(
    family: str, layers: int, width: int, inner_width: int, heads: int, kv_heads: int | None, **more: Any
) -> Entry:
    """A decoder of the shape that Llama has made usual; `more` are numbers of its own."""
    numbers: dict[str, Any] = {
        "vocab_size": 32000,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner_width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }
    return Entry(f"{family}Config", f"{family}ForCausalLM", numbers)


def _llama(
    layers: int,
    width: int,
    inner_width: int,
    heads: int,
    kv_heads: int,
    *,
    vocabulary: int = 32000,
    positions: int = 4096,
    tied: bool = False,
) -> Entry:
    more = {"vocab_size": vocabulary, "max_position_embeddings": positions, "tie_word_embeddings": tied}
    return _causal("Llama", layers, width, inner_width, heads, kv_heads, **more)


def _qwen(layers: int, width: int, inner_width: int, heads: int, kv_heads: int, vocabulary: int = 151936) -> Entry:
    """The small ones use the matrix of their embeddings for the head, too."""
    tied = vocabulary == 151936
    more = {"vocab_size": vocabulary, "tie_word_embeddings": tied, "max_position_embeddings": 32768}
    return _causal("Qwen2", layers, width, inner_width, heads, kv_heads, **more)


def _whisper(layers: int, width: int, heads: int) -> Entry:
    sides = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}
    numbers = {f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in sides.items()}
    return Entry("WhisperConfig", "WhisperForConditionalGeneration", {"vocab_size": 51865, "d_model": width, **numbers})


def _clip(text: tuple[int, int, int], vision: tuple[int, int, int], patch: int, projection: int) -> Entry:
    """Layers, width and heads of both sides."""
    sides = [
        {"num_hidden_layers": n, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width}
        for n, width, heads in (text, vision)
    ]
    vision_config = {**sides[1], "patch_size": patch, "image_size": 224}
    numbers = {"text_config": sides[0], "vision_config": vision_config, "projection_dim": projection}
    return Entry("CLIPConfig", "CLIPModel", numbers)


def _resnet(depths: list[int], widths: list[int], layer: str = "bottleneck") -> Entry:
    numbers = {"depths": depths, "hidden_sizes": widths, "layer_type": layer, "num_labels": 1000}
    return Entry("ResNetConfig", "ResNetForImageClassification", numbers)


def _convnext(depths: list[int], widths: list[int]) -> Entry:
    numbers = {"depths": depths, "hidden_sizes": widths, "num_labels": 1000}
    return Entry("ConvNextConfig", "ConvNextForImageClassification", numbers)


def _unet(widths: list[int], cross_width: int, heads: Any, size: int, **more: Any) -> Entry:
    """The network of Stable Diffusion that is trained; text encoder and VAE beside it are models of their own."""
    numbers = {"block_out_channels": widths, "cross_attention_dim": cross_width, "attention_head_dim": heads}
    return Entry("", "UNet2DConditionModel", {**numbers, "sample_size": size, **more})


_SDXL = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_SD3 = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
_FLUX = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
}


MODELS: dict[str, Entry] = {
    "bert-tiny": _bert(2, 128, 2),
    "bert-mini": _bert(4, 256, 4),
    "bert-small": _bert(4, 512, 8),
    "bert-medium": _bert(8, 512, 8),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "distilbert-base": _distilbert(6, 768, 12),
    "roberta-base": _roberta(12, 768, 12),
    "roberta-large": _roberta(24, 1024, 16),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "t5-small": _t5(6, 512, 8, 64, 2048),
    "t5-base": _t5(12, 768, 12, 64, 3072),
    "t5-large": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "vit-tiny": _vit(12, 192, 3, 16),
    "vit-small": _vit(12, 384, 6, 16),
    "vit-base": _vit(12, 768, 12, 16),
    "vit-large": _vit(24, 1024, 16, 16),
    "vit-huge": _vit(32, 1280, 16, 14),
    "tinyllama-1.1b": _llama(22, 2048, 5632, 32, 4, positions=2048),
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, vocabulary=128256, positions=8192),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, vocabulary=128256, positions=131072, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, 8, vocabulary=128256, positions=131072, tied=True),
    "qwen2.5-0.5b": _qwen(24, 896, 4864, 14, 2),
    "qwen2.5-1.5b": _qwen(28, 1536, 8960, 12, 2),
    "qwen2.5-7b": _qwen(28, 3584, 18944, 28, 4, 152064),
    "qwen3-0.6b": _causal("Qwen3", 28, 1024, 3072, 16, 8, vocab_size=151936, head_dim=128, tie_word_embeddings=True),
    "mistral-7b": _causal("Mistral", 32, 4096, 14336, 32, 8),
    "gemma-2b": _causal("Gemma", 18, 2048, 16384, 8, 1, vocab_size=256000, head_dim=256),
    "gemma-2-2b": _causal("Gemma2", 26, 2304, 9216, 8, 4, vocab_size=256000, head_dim=256),
    "phi-2": _causal("Phi", 32, 2560, 10240, 32, None, vocab_size=51200),
    "phi-3-mini": _causal("Phi3", 32, 3072, 8192, 32, 32, vocab_size=32064),
    "whisper-tiny": _whisper(4, 384, 6),
    "whisper-small": _whisper(12, 768, 12),
    "whisper-medium": _whisper(24, 1024, 16),
    "clip-vit-base-patch32": _clip((12, 512, 8), (12, 768, 12), 32, 512),
    "clip-vit-large-patch14": _clip((12, 768, 12), (24, 1024, 16), 14, 768),
    "resnet-18": _resnet([2, 2, 2, 2], [64, 128, 256, 512], "basic"),
    "resnet-50": _resnet([3, 4, 6, 3], [256, 512, 1024, 2048]),
    "resnet-101": _resnet([3, 4, 23, 3], [256, 512, 1024, 2048]),
    "convnext-tiny": _convnext([3, 3, 9, 3], [96, 192, 384, 768]),
    "convnext-base": _convnext([3, 3, 27, 3], [128, 256, 512, 1024]),
    "sd-1.5-unet": _unet([320, 640, 1280, 1280], 768, 8, 64),
    "sdxl-unet": _unet([320, 640, 1280], 2048, [5, 10, 20], 128, **_SDXL),
    "sd3-medium-transformer": Entry("", "SD3Transformer2DModel", _SD3),
    "flux.1-dev-transformer": Entry("", "FluxTransformer2DModel", {**_FLUX, "guidance_embeds": True}),
    "flux.1-schnell-transformer": Entry("", "FluxTransformer2DModel", {**_FLUX, "guidance_embeds": False}),
}

_ALIASES = {
    "gpt2-small": "gpt2",
    "distilbert": "distilbert-base",
    "tinyllama": "tinyllama-1.1b",
    "mistral-7b-v0.1": "mistral-7b",
    "phi-3-mini-4k-instruct": "phi-3-mini",
    "convnext-tiny-224": "convnext-tiny",
    "stable-diffusion-v1-5": "sd-1.5-unet",
    "stable-diffusion-xl-base-1.0": "sdxl-unet",
    "stable-diffusion-3-medium": "sd3-medium-transformer",
    "stable-diffusion-3-medium-diffusers": "sd3-medium-transformer",
    "sd-1.5": "sd-1.5-unet",
    "sd1.5": "sd-1.5-unet",
    "sdxl": "sdxl-unet",
    "sd3": "sd3-medium-transformer",
    "sd3-medium": "sd3-medium-transformer",
    "flux": "flux.1-dev-transformer",
    "flux.1-dev": "flux.1-dev-transformer",
    "flux.1-schnell": "flux.1-schnell-transformer",
}
_EXTRAS = {"transformers": "hf", "diffusers": "libraries"}
_SUFFIXES = ("-uncased", "-cased", "-hf")


def find_entry(name: str) -> Entry:
    """The entry of this name; `UnknownModelError` suggests names that are near."""
    plain = name.lower().replace("_", "-").rpartition("/")[2]  # "openai-community/gpt2" is gpt2
    for suffix in _SUFFIXES:
        plain = plain.removesuffix(suffix)
    plain = _ALIASES.get(plain, plain)
    if plain in MODELS:
        return MODELS[plain]
    near = difflib.get_close_matches(plain, MODELS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(MODELS)}."
    raise UnknownModelError(
        f"no model called {shown(name)} is known; {hint} A model of your own is path/to/file.py:factory."
    )


def build(name: str, *, with_weights: bool = False) -> nn.Module:
    """The model of this name on the meta device: shapes without weights; or in host memory, with random weights."""
    entry = find_entry(name)
    library = _load(entry.library)
    kinds = [_class_of(library, kind) for kind in (entry.config_class, entry.model_class) if kind]
    import torch

    with quiet(), torch.device("cpu" if with_weights else "meta"):
        model: nn.Module = kinds[-1](kinds[0](**entry.numbers)) if len(kinds) == 2 else kinds[0](**entry.numbers)
    return model.train()


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """LoRA by PEFT: weights frozen in bf16, and adapters of this rank in fp32 on every linear layer; in models of
    `diffusers` on those of attention, as its training examples have them."""
    try:
        import peft
    except ImportError as error:
        raise UnknownModelError(
            f"LoRA is PEFT's, which cannot be imported ({quoted(error)}): {install_command('hf')}"
        ) from error
    import torch

    tensors = next(model.parameters())
    with quiet(), warnings.catch_warnings(), torch.device(tensors.device):
        warnings.simplefilter("ignore")  # that GPT-2's layers are transposed: it sets what it asks for by itself
        adapted: nn.Module = peft.get_peft_model(
            model.to(torch.bfloat16), peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_targets(model))
        )
    return adapted.train()


def with_adapters_for(model: nn.Module, inputs: Inputs, rank: int) -> tuple[nn.Module, Inputs]:
    """The model with adapters, and its batch: networks of `diffusers` take it in the type of their weights."""
    import torch

    if find_library(model) == "diffusers":
        inputs = inputs.map_tensors(lambda each: each.to(torch.bfloat16) if each.is_floating_point() else each)
    return with_adapters(model, rank), inputs


def find_library(model: nn.Module) -> str:
    """The package that the model's class is from."""
    return type(model).__module__.partition(".")[0]


def _targets(model: nn.Module) -> Any:
    """Every linear layer but the head, which PEFT knows of models of `transformers`; of others, those of attention."""
    if hasattr(model, "get_output_embeddings"):
        return "all-linear"
    return ["to_q", "to_k", "to_v", "to_out.0"] if find_library(model) == "diffusers" else ["query", "value"]


def load_transformers() -> Any:
    """The package, or a sentence that says how to install it."""
    return _load("transformers")


def _load(library: str) -> Any:
    install = install_command(_EXTRAS[library])
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UnknownModelError(
            f"model names need {library}, which cannot be imported ({quoted(error)}); install the extra: {install}"
        ) from error
    except Exception as error:  # one that does not fit another package raises what it likes
        raise _broken(library, error) from error


def _class_of(library: Any, name: str) -> Any:
    """A class of the library, which imports what the class needs only when it is asked for it."""
    try:
        return getattr(library, name)
    except Exception as error:
        raise _broken(library.__name__, error) from error


def _broken(library: str, error: Exception) -> UnknownModelError:
    logger.debug("%s cannot be imported", library, exc_info=True)
    root: BaseException = error
    while root.__cause__ is not None:  # transformers says that it failed; the cause says which package did
        root = root.__cause__
    return UnknownModelError(
        f"model names need {library}, which is installed and cannot be imported ({quoted(root)}). A package that it "
        "loads was probably built for another version of torch (torchvision, say): remove it, or install all of them "
        f"together: {install_command(_EXTRAS[library])}"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """`transformers`, if it is loaded, says nothing below an error for as long as this is open."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@contextlib.contextmanager
def speaking_on_stderr() -> Iterator[None]:
    """What a user's own code prints goes to stderr: standard output is for results, which may be read as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def is_factory(name: str) -> bool:
    """Whether a name means `path/to/file.py:factory` rather than a model of the table."""
    return ":" in name or name.endswith(".py")


def check_name(name: str) -> None:
    """What can be said about a name without importing anything: `UnknownModelError` when it cannot be right."""
    if is_factory(name):
        _split(name)
    else:
        find_entry(name)


def _split(spec: str) -> tuple[pathlib.Path, str]:
    path_text, _, factory_name = spec.rpartition(":")
    if not path_text or not factory_name.isidentifier():
        raise UnknownModelError(f"{shown(spec)} does not say which factory to call; write path/to/file.py:factory")
    try:
        is_file = pathlib.Path(path_text).is_file()
    except (OSError, ValueError) as error:  # a name that is too long, or that no file can have
        raise UnknownModelError(f"there can be no file {shown(path_text)}: {quoted(error)}") from error
    if not is_file:
        raise UnknownModelError(f"there is no file {shown(path_text)}")
    return pathlib.Path(path_text), factory_name


def load_factory(spec: str, *, with_weights: bool = False) -> tuple[nn.Module, Any]:
    """Call the factory of `path/to/file.py:factory`: its model, and its sample or None.

    It is called on the meta device, so that nothing is allocated, unless the weights are wanted.
    """
    path, factory_name = _split(spec)
    factory = getattr(_import_file(path), factory_name, None)
    if not callable(factory):
        raise UnknownModelError(f"{path} has no function {factory_name!r}")
    return _checked_result(spec, _call(spec, factory, with_weights=with_weights))


def _import_file(path: pathlib.Path) -> types.ModuleType:
    """Run the file as a module; files beside it can be imported by it."""
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise UnknownModelError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    directory = str(path.parent.absolute())
    before = sys.modules.get(path.stem)
    sys.path.insert(0, directory)
    sys.modules[path.stem] = module  # dataclasses and pickle look a class's module up by its name
    try:
        with speaking_on_stderr():
            module_spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, and what others derive from it
        raise UnknownModelError(f"{path} cannot be imported: {quoted(error)}") from error
    finally:
        sys.path.remove(directory)
        if before is not None:
            sys.modules[path.stem] = before
    return module


def _call(spec: str, factory: Callable[[], Any], *, with_weights: bool) -> Any:
    import torch

    place: Any = contextlib.nullcontext() if with_weights else torch.device("meta")
    try:
        with place, speaking_on_stderr():
            return factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, and what others derive from it
        where = "" if with_weights else " on the meta device; if it needs real tensors, pass --with-weights"
        raise UnknownModelError(f"{spec} raised {quoted(error)}{where}") from error


def _checked_result(spec: str, result: Any) -> tuple[nn.Module, Any]:
    import torch
    from torch import nn

    model, sample = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise UnknownModelError(f"{spec} must return a torch.nn.Module or (module, sample), not {_type_names(result)}")
    if not (sample is None or isinstance(sample, torch.Tensor | tuple | dict)):
        raise UnknownModelError(
            f"{spec} must give its sample as a tensor, a tuple of positional or a dict of keyword inputs, "
            f"not {type(sample).__name__}"
        )
    return model, sample


def _type_names(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__
