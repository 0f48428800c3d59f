"""`python -m emucuda.peaks`: what memscale predicts beside what the emulated card takes, one table.

    python -m emucuda.peaks                                          # the five published models, plain and wrapped
    python -m emucuda.peaks bert-base gpt2 --modes plain balanced    # some of them
    python -m emucuda.peaks --json docs/results/cuda.json            # the table as data; rows that are there stay

Each row is a process of its own on an RTX 3090: three training steps in fp32 with AdamW, unless its name says
otherwise (`gpt2-fused`, `gpt2-autocast`: the user's own fp16 autocast and GradScaler, `gpt2-trainer`: Hugging Face's
Trainer, `gpt2-lora`: adapters on frozen weights); the highest figures of all three. All figures are GiB, as the
published ones. "live" is memscale's prediction of live storages; then follow what it predicts that PyTorch allocates
and reserves, what PyTorch did allocate and reserve, and how far off that is.
A mode is `plain`, or one of memscale.Config with how tensors travel: `balanced-sync`, `balanced-async`. Where nothing
that the mode allows fits the card, the row is memscale's sentence about that. Plans may use as much of the host
everywhere (`HOST_GB`): what a machine has free at the moment would decide what GPT-2 XL keeps on the card.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

GIB = 2**30
_MARK = "emucuda.peaks: "
NUM_STEPS = 3
HOST_GB = 16.0
"""How much host memory a plan may use."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A published training step: the shape of the model and the batch, and its peak on a real RTX 3090."""

    family: str
    width: int
    layers: int
    heads: int
    batch: int
    length: int
    """Of sequences; of images, the height."""
    published_gib: float | None = None
    """None: it ran out of memory, or nothing was published."""
    loop: Literal["plain", "autocast", "trainer"] = "plain"
    is_fused: bool = False


ROWS = {
    "bert-base": Row("bert", 768, 12, 12, 16, 128, 3.14),
    "bert-large": Row("bert", 1024, 24, 16, 16, 128, 7.60),
    "gpt2-medium": Row("gpt2", 1024, 24, 16, 4, 512, 10.87),
    "gpt2-large": Row("gpt2", 1280, 36, 20, 2, 512, 14.87),
    "gpt2-xl": Row("gpt2", 1600, 48, 25, 1, 512, None),
    "gpt2": Row("gpt2", 768, 12, 12, 4, 256),
    "gpt2-fused": Row("gpt2", 768, 12, 12, 4, 256, is_fused=True),
    "gpt2-autocast": Row("gpt2", 768, 12, 12, 4, 256, loop="autocast"),
    "gpt2-trainer": Row("gpt2", 768, 12, 12, 4, 256, loop="trainer"),
    "gpt2-lora": Row("lora", 768, 12, 12, 4, 256),
    "vit-base": Row("vit", 768, 12, 12, 16, 224),
    "resnet-50": Row("resnet", 0, 0, 0, 16, 224),
}
PUBLISHED = ("bert-base", "bert-large", "gpt2-medium", "gpt2-large", "gpt2-xl")
MODES = ("plain", "balanced-sync", "balanced-async")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m emucuda.peaks", description="Predicted and emulated peaks.")
    parser.add_argument("models", nargs="*", default=list(PUBLISHED), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--modes", nargs="+", default=list(MODES), help="plain, or e.g. balanced-sync")
    parser.add_argument("--json", type=Path, help="also write the rows to this file, in the place of those it has")
    options = parser.parse_args(arguments)
    if unknown := set(options.models) - set(ROWS):
        parser.error(f"There is no model {sorted(unknown)[0]!r}. Models are {', '.join(ROWS)}.")
    print(_HEADER)
    for name in options.models:
        for mode in options.modes:
            row = _measured(name, mode)
            print(_line(row), flush=True)
            if options.json is not None:
                _write(options.json, row)


def _write(path: Path, row: dict[str, Any]) -> None:
    """Put a row into the file, with what it was measured with."""
    data = json.loads(path.read_text()) if path.exists() else {"card": "RTX 3090, emulated", "rows": []}
    rows = [each for each in data["rows"] if (each["model"], each["mode"]) != (row["model"], row["mode"])]
    data["rows"] = sorted([*rows, row], key=lambda each: (each["model"], each["mode"]))
    path.write_text(json.dumps(data, indent=1) + "\n")


def versions() -> dict[str, str]:
    """What a figure was measured with, to be kept beside it."""
    names = ("torch", "transformers", "memscale")
    return {name: importlib.metadata.version(name) for name in names} | {"commit": _commit()}


def _commit() -> str:
    """Of the source that memscale and this package are from; empty outside of a repository."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip()


def _measured(name: str, mode: str) -> dict[str, Any]:
    """One row, from a process on the card."""
    from emucuda import Settings, run

    settings = Settings(copy_limit_bytes=1 << 20)  # nobody looks at the weights
    # Kernels that do nothing would be measured as those of an impossibly fast card: plan by the data sheet instead.
    env = os.environ | {"MEMSCALE_MEASURE": "0"}
    done = run(["-m", "emucuda.peaks", "--child", name, mode], settings, env=env, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"The row {name} {mode} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
    row: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    return row


_HEADER = (
    f"{'model':12} {'mode':18} {'published':>9} {'live':>8} | predicted: {'alloc.':>8} {'reserved':>8} | "
    f"emulated: {'alloc.':>8} {'reserved':>8} {'total':>8} | off by"
)


def _line(row: dict[str, Any]) -> str:
    def gib(value: int | None) -> str:
        return "-" if value is None else f"{value / GIB:.4f}"

    if "does_not_fit" in row:
        return f"{row['model']:12} {row['mode']:18} does not fit: {row['does_not_fit']}"
    published = ROWS[row["model"]].published_gib
    is_published = row["mode"] == "plain" and row["model"] in PUBLISHED
    stated = "" if not is_published else "OOM" if published is None else f"{published:.2f}"
    predicted = f"{gib(row['predicted_allocated_bytes']):>8} {gib(row['predicted_reserved_bytes']):>8}"
    emulated = " ".join(f"{gib(row[f'{kind}_bytes']):>8}" for kind in ("allocated", "reserved", "total"))
    off = "out of memory" if row["out_of_memory"] else " ".join(_off(row, kind) for kind in ("allocated", "reserved"))
    return (
        f"{row['model']:12} {row['mode']:18} {stated:>9} {gib(row['live_bytes']):>8} |            {predicted} |"
        f"           {emulated} | {off}"
    )


def _off(row: dict[str, Any], kind: str) -> str:
    predicted = row[f"predicted_{kind}_bytes"]
    return "-" if predicted is None else f"{100 * (predicted / row[f'{kind}_bytes'] - 1):+.2f} %"


# ---- on the card


def _build(row: Row) -> Any:
    return _model(row).train().cuda()


def _model(row: Row) -> Any:
    import transformers

    models: Any = transformers
    sizes: dict[str, Any] = {
        "hidden_size": row.width,
        "num_hidden_layers": row.layers,
        "num_attention_heads": row.heads,
        "intermediate_size": 4 * row.width,
    }
    match row.family:
        case "gpt2" | "lora":
            config = models.GPT2Config(n_embd=row.width, n_layer=row.layers, n_head=row.heads)
            model = _without_values(models.GPT2LMHeadModel, config)
            return _with_adapters(model) if row.family == "lora" else model
        case "bert":
            return _without_values(models.BertForMaskedLM, models.BertConfig(**sizes))
        case "vit":
            return _without_values(models.ViTForImageClassification, models.ViTConfig(**sizes, num_labels=1000))
        case _:
            return _without_values(models.ResNetForImageClassification, models.ResNetConfig(num_labels=1000))


def _without_values(kind: Any, config: Any) -> Any:
    """A model of this kind whose weights have memory alone: nobody looks at their values, and drawing takes minutes."""
    from transformers.initialization import no_init_weights

    with no_init_weights():  # and does not tie them
        model = kind(config)
    model.tie_weights()
    return model


def _with_adapters(model: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def _inputs(row: Row) -> dict[str, Any]:
    import torch

    if row.family in ("vit", "resnet"):
        labels = torch.zeros(row.batch, dtype=torch.long)
        return {"pixel_values": torch.zeros(row.batch, 3, row.length, row.length), "labels": labels}
    ids = torch.randint(0, 30000, (row.batch, row.length))
    return {"input_ids": ids, "labels": ids}


def _autocast(row: Row) -> Any:
    import torch

    return torch.autocast("cuda", torch.float16, enabled=row.loop == "autocast")


def _wrapped(model: Any, inputs: Any, mode: str) -> dict[str, Any]:
    """Wrap the model; what memscale predicts."""
    import memscale
    from memscale.report.explain import what_is_done

    kind, _, travels = mode.partition("-")
    config = memscale.Config(
        mode=memscale.OptimizationMode(kind),
        async_offload=travels == "async",
        async_config=memscale.AsyncOffloadConfig(),  # the same windows in every run, not the smallest that there are
        max_cpu_offload_gb=HOST_GB,
        force_optimize=True,
        enable_logging=False,
    )
    memscale.wrap(model, config, sample_input=inputs)
    plan = model._memscale_executor.plan
    return _predicted(plan) | {"what": what_is_done(plan), "host_gb": HOST_GB}


def _plain(model: Any, inputs: Any, optimizer: Any) -> dict[str, Any]:
    """What memscale predicts of the unmodified model, whether it fits or not."""
    import memscale
    from memscale._planning.job import Job
    from memscale._planning.planner import Planner
    from memscale._profile.inputs import Inputs

    config = memscale.Config(async_offload=False, enable_logging=False)
    hardware = memscale.Hardware.detect("cuda")
    planner = Planner(Job(model, config, hardware, optimizer), Inputs.from_sample(inputs))
    held = planner.held((), config)
    assert held is not None
    plain = planner.profile.static_bytes + planner.profile.plain.peak_bytes
    return {
        "live_bytes": plain,
        "predicted_allocated_bytes": held.allocated_bytes,
        "predicted_reserved_bytes": held.reserved_bytes,
        "what": "nothing",
    }


def _predicted(plan: Any) -> dict[str, Any]:
    return {
        "live_bytes": plan.predicted_peak_bytes,
        "predicted_allocated_bytes": plan.predicted_allocated_bytes,
        "predicted_reserved_bytes": plan.predicted_reserved_bytes,
    }


def _train(row: Row, model: Any, inputs: Any, optimizer: Any) -> None:
    """Three steps, each with a batch that comes from the host."""
    import torch

    scaler = torch.amp.GradScaler("cuda", enabled=row.loop == "autocast")
    for _ in range(NUM_STEPS):
        batch = {name: value.cuda() for name, value in inputs.items()}
        optimizer.zero_grad()
        with _autocast(row):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _trainer(row: Row, model: Any, folder: str) -> Any:
    """Hugging Face's, for as many steps."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=row.batch,
        max_steps=NUM_STEPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    samples = [{name: value[0] for name, value in _inputs(row).items()} for _ in range(row.batch)]
    return transformers.Trainer(model=model, args=arguments, train_dataset=samples)


def _trains(row: Row, mode: str) -> tuple[dict[str, Any], bool]:
    """What memscale predicts, and whether the steps ran."""
    import torch

    model = _build(row)
    inputs = _inputs(row)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(row, model, folder) if row.loop == "trainer" else None
        if trainer is not None:
            optimizer = trainer.create_optimizer()
        else:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trained, fused=row.is_fused or None)
        with _autocast(row):
            predicted = _plain(model, inputs, optimizer) if mode == "plain" else _wrapped(model, inputs, mode)
        torch.cuda.empty_cache()  # segments that only building the model needed are none of the steps'
        torch.cuda.reset_peak_memory_stats()
        try:
            if trainer is not None:
                trainer.train()
            else:
                _train(row, model, inputs, optimizer)
        except torch.cuda.OutOfMemoryError:
            return predicted, False
    return predicted, True


def _child(name: str, mode: str) -> None:
    import torch

    row = {"model": name, "mode": mode, "versions": versions() | {"torch": str(torch.version.__version__)}}
    print(_MARK + json.dumps(row | _figures(name, mode)), flush=True)


def _figures(name: str, mode: str) -> dict[str, Any]:
    """What is predicted and what was taken, or the sentence that says that nothing fits."""
    import torch

    import emucuda
    import memscale

    try:
        predicted, fits = _trains(ROWS[name], mode)
    except memscale.DoesNotFitError as error:
        return {"does_not_fit": str(error)}
    reserved_bytes = torch.cuda.max_memory_reserved()
    return predicted | {
        "out_of_memory": not fits,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": reserved_bytes,
        "total_bytes": reserved_bytes + emucuda.Settings().context_bytes,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:])
    else:
        main()
