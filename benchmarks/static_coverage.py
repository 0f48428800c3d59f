"""Which architectures are profiled without being run: tiny models of transformers, timm and diffusers on fake tensors.

    python -m benchmarks.static_coverage [--library NAME] [--only NAME ...] [--seconds N] [--out FILE]

Every architecture that builds from the installed libraries with random weights, in a tiny configuration, is trained for
one real step; those that train are rehearsed on fake tensors. The table names those that are not profiled statically,
and what stopped them. What does not build or train here (an architecture that needs files, or other inputs than this
command can make up) is counted apart: nothing is said about it. No network is used.

Models are tried in a process of their own, which is ended and started again when one takes more than `--seconds`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import platform
import queue
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import benchmarks
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal, loss_of

BATCH, LENGTH, VOCABULARY = 2, 16, 128
LIBRARIES = ("transformers", "timm", "diffusers")
SECONDS = 60
MAX_PARAMETERS = 60_000_000
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

_SMALL_WORDS = ("atto", "femto", "pico", "nano", "xxs", "test", "tiny", "_xs", "small", "18", "b0")


def timm_names() -> list[str]:
    """The smallest, by its name, of each of timm's families."""
    timm = importlib.import_module("timm")
    found = []
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            found.append(min(names, key=lambda name: (_how_large(name), len(name), name)))
    return found


def _how_large(name: str) -> int:
    return next((place for place, word in enumerate(_SMALL_WORDS) if word in name), len(_SMALL_WORDS))


def build_timm(name: str) -> Iterator[Callable[[], Built]]:
    yield lambda: _timm_model(name)


def _timm_model(name: str) -> Built:
    timm = importlib.import_module("timm")
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in timm.create_model(name, num_classes=10).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters / 1e6:.0f} M parameters")
    model = timm.create_model(name, num_classes=10)
    return model, {"x": torch.randn(BATCH, *model.default_cfg["input_size"])}


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


# ---- one architecture

_NAMES = {"transformers": transformers_names, "timm": timm_names, "diffusers": diffusers_names}
_BUILDERS = {"transformers": build_transformers, "timm": build_timm, "diffusers": build_diffusers}


def try_architecture(library: str, name: str) -> dict[str, str]:
    """Its status (static, stopped, not built) and what stopped it."""
    reason = "no model class"
    for build in _BUILDERS[library](name):
        torch.manual_seed(0)
        try:
            model, inputs = build()
            model.train()
            _train_one_step(copy.deepcopy(model), inputs)
        except Exception as error:  # whatever a library raises on a configuration or inputs that it does not take
            reason = _said(error)
            continue
        return _rehearse(model, inputs)
    return {"status": "not built", "why": reason}


def _train_one_step(model: nn.Module, inputs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    loss_of(_called(model, inputs)).backward()


def _called(model: nn.Module, inputs: dict[str, Any]) -> Any:
    return model(*inputs.values()) if list(inputs) == ["x"] else model(**inputs)


def _rehearse(model: nn.Module, inputs: dict[str, Any]) -> dict[str, str]:
    sample = Inputs(args=tuple(inputs.values())) if list(inputs) == ["x"] else Inputs(kwargs=inputs)
    try:
        FakeRehearsal(model, sample, "cpu").run()
    except Exception as error:  # this is what the table is about
        frames = traceback.extract_tb(error.__traceback__)
        places = [frame for frame in frames if any(f"/{library}/" in frame.filename for library in LIBRARIES)]
        where = f"{pathlib.Path(places[-1].filename).name}: {places[-1].line}" if places else ""
        return {"status": "stopped", "class": type(model).__name__, "why": _said(error), "where": where}
    return {"status": "static", "class": type(model).__name__}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def serve() -> int:
    """Names come in, one a line; results go out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        library, name = line.split()
        print(
            json.dumps({"library": library, "name": name, **try_architecture(library, name)}), file=answers, flush=True
        )
    return 0


# ---- all of them


class Server:
    """A process that tries architectures; one that hangs is ended."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.static_coverage", "--serve"]
        environment = benchmarks.environment(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def ask(self, library: str, name: str, seconds: float) -> dict[str, str] | None:
        """None where the process died or took too long; it is of no use after that."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{library} {name}\n")
        self.process.stdin.flush()
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            line = ""
        if line:
            found: dict[str, str] = json.loads(line)
            return found
        self.close()
        return None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(
    libraries: list[str], only: list[str], seconds: float, known: dict[str, dict[str, str]]
) -> list[dict[str, str]]:
    results = []
    server = None
    for library in libraries:
        names = [name for name in _NAMES[library]() if not only or name in only]
        for number, name in enumerate(names, 1):
            result = known.get(f"{library} {name}")
            if result is None:
                server = server or Server()
                result = server.ask(library, name, seconds)
            if result is None:
                server = None
                result = {"library": library, "name": name, "status": "too slow", "why": f"over {seconds:.0f} s"}
            results.append(result)
            print(
                f"{library} {number}/{len(names)} {name}: {result['status']} {result.get('why', '')}", file=sys.stderr
            )
            if server is not None:
                _append(result)
    if server is not None:
        server.close()
    return results


_LOG: list[pathlib.Path] = []


def _append(result: dict[str, str]) -> None:
    for path in _LOG:
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")


def describe(results: list[dict[str, str]], missing: list[str]) -> str:
    lines = [
        f"Measured with torch {importlib.metadata.version('torch')}, Python {platform.python_version()}, "
        f"on {platform.machine()}.",
        "",
    ]
    lines += [f"{library} is not installed, so nothing of it was measured." for library in missing]
    for library in LIBRARIES:
        found = collections.Counter(r["status"] for r in results if r["library"] == library)
        trained = found["static"] + found["stopped"]
        if trained:
            share = f"{100 * found['static'] / trained:.1f} %"
            lines.append(
                f"{library}: {found['static']} of {trained} architectures that train in a tiny configuration are "
                f"profiled statically ({share}). {found['not built']} more do not build or train with made-up inputs, "
                f"and {found['too slow']} took too long or ended the process, in building, training or rehearsal."
            )
    stopped = [result for result in results if result["status"] == "stopped"]
    lines += ["", "Not profiled statically:" if stopped else "All of them are profiled statically."]
    for result in stopped:
        lines.append(f"  {result['library']} {result['name']} ({result['class']}): {result['why']}")
        if result.get("where"):
            lines.append(f"      at {result['where']}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="only this one; default: all")
    parser.add_argument("--only", nargs="*", default=[], help="only these architectures")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at most so long for one of them")
    parser.add_argument("--out", type=pathlib.Path, help="write the table here, too")
    parser.add_argument("--log", type=pathlib.Path, help="one line a result; what is in it is not tried again")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return serve()
    wanted = options.library or list(LIBRARIES)
    missing = [library for library in wanted if importlib.util.find_spec(library) is None]
    known = {}
    if options.log is not None:
        _LOG[:] = [options.log]
        if options.log.exists():
            found = [json.loads(line) for line in options.log.read_text().splitlines()]
            known = {f"{result['library']} {result['name']}": result for result in found}
    results = measure([name for name in wanted if name not in missing], options.only, options.seconds, known)
    text = describe(results, missing)
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
