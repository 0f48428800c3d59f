"""`python -m emucuda.random_cards`: small models on small cards, at random; what "fits" never runs out of memory.

    python -m emucuda.random_cards --cases 200 --seed 1     # one line a case, a summary; ends with 1 if a case fails
    python -m emucuda.random_cards --seed 1 --only 17 42    # these again
    python -m emucuda.random_cards --case '{"family": "gpt2", ...}'     # the one that is written there
    python -m emucuda.random_cards --json docs/results/random_cards.json    # outcomes as data, with versions

A case is a card with less memory than its model would like, of which others hold a part; a model, an optimizer, a
training loop; a mode of memscale's, transfers that overlap or do not, and perhaps a budget. It is wrapped and trained
for some steps. It passes if `wrap` (or the first step) says `DoesNotFitError`, or if the steps run. It fails if they
run out of memory, if they take longer than `--seconds`, or with any other exception.

The draw goes by sizes alone and never asks memscale what a model needs, so that a seed means the same cases whatever
memscale predicts. Every case is a fork of one process in which the libraries are loaded and CUDA is not yet: cases
share no state of the card, and start at once. What others hold is taken from the card by `cudaMalloc`.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from emucuda.peaks import versions

MIB = 1 << 20
CONTEXT_BYTES = 256 * MIB
_MARK = "emucuda.random_cards: "
_NUM_STEPS = 4
MAX_SECONDS = 900.0

FAMILIES = ("gpt2", "bert", "llama", "qwen2", "vit", "resnet", "lora", "mlp", "encoder")
MODES = ("conservative", "balanced", "aggressive")
LOOPS = ("plain", "clipped", "accumulated", "autocast")
OPTIMIZERS = ("adamw", "adamw fused", "sgd", "momentum")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run."""

    card: str
    total_bytes: int
    held_bytes: int
    """What others hold of the card, beside the context."""
    family: str
    width: int
    layers: int
    vocabulary: int
    batch: int
    length: int
    """Of sequences; for images, their height."""
    dtype: str
    optimizer: str
    loop: str
    mode: str
    overlaps: bool
    starts_on_host: bool
    """The model is on the host and `Config(device="cuda")` says where it goes."""
    plans_late: bool
    """`wrap` gets no sample: the plan is made when the first batch comes."""
    budget_share: float | None
    """`memory_budget_gb` as a share of what is free; None: the default budget."""


# ---- drawing


def drawn(seed: int, index: int) -> Case:
    """The case of this number under this seed."""
    chance = random.Random(f"{seed}/{index}")
    family = chance.choice(FAMILIES)
    shape = _drawn_shape(chance, family)
    dtype = chance.choice(("float32", "float32", "bfloat16"))
    needed_bytes = _rough_bytes(family, shape, dtype)
    free_bytes = int(needed_bytes * 10 ** chance.uniform(-0.8, 0.15)) + 48 * MIB
    held_bytes = int(chance.choice((0, chance.uniform(0, 1.5))) * free_bytes)
    return Case(
        card=chance.choice(("RTX 3090", "RTX 3090", "RTX 2080 Ti", "A100", "H100")),
        total_bytes=CONTEXT_BYTES + held_bytes + free_bytes,
        held_bytes=held_bytes,
        family=family,
        **shape,
        dtype=dtype,
        optimizer=chance.choice(OPTIMIZERS),
        loop=chance.choice(LOOPS if dtype == "float32" else LOOPS[:3]),
        mode=chance.choice(MODES),
        overlaps=chance.random() < 0.5,
        starts_on_host=chance.random() < 0.4,
        plans_late=chance.random() < 0.3,
        budget_share=chance.choice((None, None, None, round(chance.uniform(0.4, 1.0), 2))),
    )


def _drawn_shape(chance: random.Random, family: str) -> dict[str, int]:
    is_image = family in ("vit", "resnet")
    return {
        "width": chance.choice((192, 256, 384, 512, 768)),
        "layers": chance.randint(2, 4),
        "vocabulary": chance.choice((1000, 8192, 30522, 50257)),
        "batch": chance.choice((1, 2, 4, 8, 16)),
        "length": chance.choice((64, 96, 128) if is_image else (64, 128, 256, 512)),
    }


def _rough_bytes(family: str, shape: dict[str, int], dtype: str) -> float:
    """What plain training takes, to a factor of two or so; enough to draw cards of an interesting size."""
    width, layers, vocabulary = shape["width"], shape["layers"], shape["vocabulary"]
    item_bytes = 2 if dtype == "bfloat16" else 4
    if family == "resnet":
        weights, rows, head = 25_000_000, shape["batch"] * (shape["length"] / 4) ** 2 / 8, 0.0
    elif family == "vit":
        weights, rows, head = 12 * layers * width**2, shape["batch"] * (shape["length"] / 8) ** 2, 0.0
    else:
        rows = shape["batch"] * shape["length"]
        has_words = family not in ("mlp", "encoder")
        weights = 12 * layers * width**2 + has_words * vocabulary * width
        head = has_words * 3.0 * rows * vocabulary * 4
    return item_bytes * (4 * weights + 30 * rows * layers * width) + head


# ---- models and loops, on the card


def _model_and_batch(case: Case) -> tuple[Any, Any]:
    import torch

    batch: Any
    if case.family in ("vit", "resnet"):
        images = torch.zeros(case.batch, 3, case.length, case.length, dtype=getattr(torch, case.dtype))
        batch = {"pixel_values": images, "labels": torch.zeros(case.batch, dtype=torch.long)}
    elif case.family in ("mlp", "encoder"):
        batch = (torch.zeros(case.batch, case.length, case.width, dtype=getattr(torch, case.dtype)),)
    else:
        ids = torch.randint(0, case.vocabulary, (case.batch, case.length))
        batch = {"input_ids": ids, "labels": ids}
    return _model(case).to(getattr(torch, case.dtype)).train(), batch


def _model(case: Case) -> Any:
    import transformers
    from torch import nn

    heads, inner = max(1, case.width // 64), 4 * case.width
    sizes: dict[str, Any] = {
        "hidden_size": case.width,
        "num_hidden_layers": case.layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }
    words = {"vocab_size": case.vocabulary}
    models: Any = transformers
    match case.family:
        case "gpt2" | "lora":
            config = models.GPT2Config(
                n_embd=case.width, n_layer=case.layers, n_head=heads, bos_token_id=0, eos_token_id=0, **words
            )
            model = models.GPT2LMHeadModel(config)
            return _with_adapters(model) if case.family == "lora" else model
        case "bert":
            return models.BertForMaskedLM(models.BertConfig(**sizes, **words))
        case "llama":
            return models.LlamaForCausalLM(models.LlamaConfig(**sizes, **words, num_key_value_heads=heads))
        case "qwen2":
            config = models.Qwen2Config(**sizes, **words, num_key_value_heads=1, tie_word_embeddings=True)
            return models.Qwen2ForCausalLM(config)
        case "vit":
            return models.ViTForImageClassification(models.ViTConfig(**sizes, image_size=case.length, patch_size=8))
        case "resnet":
            return models.ResNetForImageClassification(models.ResNetConfig(depths=[2, 2, 2, 2]))
        case "mlp":
            return nn.Sequential(*(_mlp(nn, case.width) for _ in range(case.layers)))
        case "encoder":
            layer = nn.TransformerEncoderLayer(case.width, heads, inner, batch_first=True)
            return nn.TransformerEncoder(layer, case.layers, enable_nested_tensor=False)
    raise ValueError(f"There is no family {case.family!r}. Families are {', '.join(FAMILIES)}.")


def _mlp(nn: Any, width: int) -> Any:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _with_adapters(model: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def _optimizer(case: Case, model: Any) -> Any:
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    match case.optimizer:
        case "adamw":
            return torch.optim.AdamW(parameters)
        case "adamw fused":
            return torch.optim.AdamW(parameters, fused=True)
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.01)
        case "momentum":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    raise ValueError(f"There is no optimizer {case.optimizer!r}. Optimizers are {', '.join(OPTIMIZERS)}.")


def _loss(model: Any, batch: Any) -> Any:
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    return output.loss if hasattr(output, "loss") else output.float().square().mean()


@dataclasses.dataclass(slots=True)
class _Batches:
    """What was promised and taken, batch by batch: from the beginning of a forward to that of the next."""

    plans: list[Any] = dataclasses.field(default_factory=list)
    allocated_bytes: list[int] = dataclasses.field(default_factory=list)
    reserved_bytes: list[int] = dataclasses.field(default_factory=list)
    _forward_bytes: int = 0
    """What the forward has allocated in which another plan came."""

    def begin(self) -> None:
        """A forward begins: what was taken until now was under the plan before."""
        import torch

        self._note()
        self._forward_bytes = 0
        torch.cuda.reset_peak_memory_stats()

    def follow(self, plan: Any) -> None:
        """The forward is over; this plan was made for it, or before. What was reserved when another one came was held
        under that one, and is given back by now."""
        import torch

        if self.plans and _promises(plan) != _promises(self.plans[-1]):
            self._forward_bytes = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self.plans.append(plan)

    def _note(self) -> None:
        import torch

        if len(self.allocated_bytes) < len(self.plans):
            self.allocated_bytes.append(max(self._forward_bytes, torch.cuda.max_memory_allocated()))
            self.reserved_bytes.append(torch.cuda.max_memory_reserved())

    def figures(self) -> dict[str, Any]:
        """The promise of the last plan, and what was taken under it: one that was replaced before its first step was
        over has shown nothing of its own. But none may have been exceeded, by either figure."""
        from memscale.report.explain import what_is_done

        self._note()
        if not self.plans:
            return {"predicted_allocated_bytes": None, "predicted_reserved_bytes": None, "what": None}
        last = self.plans[-1]
        allocated_bytes, reserved_bytes = self._highest_under(last)
        return {
            "predicted_allocated_bytes": last.predicted_allocated_bytes or 0,
            "predicted_reserved_bytes": last.predicted_reserved_bytes or 0,
            "allocated_bytes": allocated_bytes,
            "reserved_bytes": reserved_bytes,
            "exceeds_by": max(
                taken / promised - 1
                for plan in self.plans
                for taken, promised in zip(self._highest_under(plan), _promises(plan), strict=True)
            ),
            "what": what_is_done(last),
        }

    def _highest_under(self, plan: Any) -> tuple[int, int]:
        """What was allocated and reserved at most under this plan."""
        taken = zip(self.plans, self.allocated_bytes, self.reserved_bytes, strict=True)
        _, allocated, reserved = zip(*(one for one in taken if _promises(one[0]) == _promises(plan)), strict=True)
        return max(allocated), max(reserved)


def _promises(plan: Any) -> tuple[int, int]:
    """What is to be allocated and reserved; live bytes stand for what is not promised."""
    allocated_bytes = plan.predicted_allocated_bytes or plan.predicted_peak_bytes or 1
    return allocated_bytes, plan.predicted_reserved_bytes or allocated_bytes


def _train(case: Case, model: Any, batch: Any, optimizer: Any, batches: _Batches) -> None:
    """Some steps; what was promised and taken is noted."""
    import torch

    uses_scaler = case.loop == "autocast"
    scaler = torch.amp.GradScaler("cuda", enabled=uses_scaler)
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(2 if case.loop == "accumulated" else 1):
            batches.begin()
            with torch.autocast("cuda", torch.float16, enabled=uses_scaler):
                loss = _loss(model, batch)
            batches.follow(model._memscale_executor.plan)
            scaler.scale(loss).backward()
        if case.loop == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


# ---- one case


def _hold(num_bytes: int) -> None:
    """Memory of the card that is not PyTorch's."""
    if not num_bytes:
        return
    import torch

    torch.cuda.init()
    status = ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(num_bytes))
    if status:
        raise RuntimeError(f"The card refused {num_bytes:,} bytes that others are to hold: cudaMalloc gave {status}.")


def outcome_of(case: Case) -> dict[str, Any]:
    """Wrap and train in this process, whose card is the case's. "outcome": trained, does not fit, or out of memory."""
    import torch

    import memscale

    _hold(case.held_bytes)
    model, batch = _model_and_batch(case)
    if not case.starts_on_host:
        with contextlib.suppress(torch.cuda.OutOfMemoryError):  # a user would start on the host then, too
            model.cuda()
    move = {name: value.cuda() for name, value in batch.items()} if isinstance(batch, dict) else None
    batch = move or tuple(value.cuda() for value in batch)
    optimizer = _optimizer(case, model)
    free_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    config = memscale.Config(
        mode=case.mode,
        async_offload=case.overlaps,
        device="cuda",
        enable_logging=False,
        memory_budget_gb=None if case.budget_share is None else case.budget_share * free_bytes / 1e9,
    )
    batches = _Batches()
    try:
        memscale.wrap(model, config, sample_input=None if case.plans_late else batch)
        _train(case, model, batch, optimizer, batches)
    except memscale.DoesNotFitError as error:
        return {"outcome": "does not fit", "says": str(error)}
    except torch.cuda.OutOfMemoryError as error:
        return _figures(batches) | {"outcome": "out of memory", "says": str(error)}
    return _figures(batches) | {"outcome": "trained"}


def _figures(batches: _Batches) -> dict[str, Any]:
    """What was promised and taken, and how often the allocator had to give back what it had cached to go on."""
    import torch

    return batches.figures() | {"num_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0)}


def _forked(case: Case, max_seconds: float) -> dict[str, Any]:
    """The outcome, from a process that has the case's card."""
    from emucuda import Settings

    start = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.environ.update(Settings(card=case.card, total_bytes=case.total_bytes).variables())
        try:
            found = outcome_of(case)
        except BaseException:  # whatever it is, the parent is told
            found = {"outcome": "error", "says": traceback.format_exc()}
        with os.fdopen(writer, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        has_ended = bool(select.select([pipe], [], [], max_seconds)[0])
        if not has_ended:
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    found: dict[str, Any] = {"outcome": "error", "says": f"The process ended with status {status} and said nothing."}
    if not has_ended:
        found = {"outcome": "took too long", "says": f"It had not ended after {max_seconds:.0f} s."}
    elif text:
        found = json.loads(text)
    return found | {"seconds": time.monotonic() - start}


def _child(max_seconds: float) -> None:
    """Cases come on stdin, one a line; outcomes go to stdout. What is loaded here no fork loads again; but PEFT asks
    for cards when it is loaded, after which no fork may have one. So does torchao, which transformers loads where it is
    installed, and which no case needs."""
    import importlib

    sys.modules["torchao"] = None  # type: ignore[assignment]  # as if it were not installed
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for module in ("memscale._api", "memscale._planning.planner", "torch._dynamo"):
        importlib.import_module(module)
    for module in ("bert", "gpt2", "llama", "qwen2", "resnet", "vit"):
        importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    for line in sys.stdin:
        found = _forked(Case(**json.loads(line)), max_seconds)
        print(_MARK + json.dumps(found), flush=True)


# ---- many cases


def outcomes(cases: Sequence[Case], max_seconds: float = MAX_SECONDS) -> Iterator[dict[str, Any]]:
    """Of each case, as it ends."""
    from emucuda import Settings, environment
    from emucuda._launch import command

    settings = Settings(copy_limit_bytes=MIB, context_bytes=CONTEXT_BYTES)
    # Kernels that do nothing would be measured as those of an impossibly fast card: plan by the data sheet instead.
    # A plan that was kept may be another version's.
    env = environment(settings, os.environ | {"MEMSCALE_MEASURE": "0", "MEMSCALE_CACHE": "0"})
    text = "".join(json.dumps(dataclasses.asdict(case)) + "\n" for case in cases)
    arguments = command(["-m", "emucuda.random_cards", "--child", str(max_seconds)])
    with subprocess.Popen(arguments, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(text)
        process.stdin.close()
        for line in process.stdout:
            if line.startswith(_MARK):
                yield json.loads(line.removeprefix(_MARK))
    if process.returncode:
        raise RuntimeError(f"The process of the cases ended with code {process.returncode}.")


def passes(found: dict[str, Any]) -> bool:
    return found["outcome"] in ("trained", "does not fit")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emucuda.random_cards", description="Random cards and models.")
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--only", type=int, nargs="+", help="cases of these numbers")
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS, help="how long a case may take")
    parser.add_argument("--case", type=json.loads, help="the case that is written here, as JSON")
    parser.add_argument("--json", type=Path, help="also keep the outcomes in this file; those of other cases stay")
    options = parser.parse_args(arguments)
    if options.json is not None and options.case is not None:
        parser.error("--json keeps cases by seed and number, and --case has neither.")
    numbers = options.only or range(options.first, options.first + options.cases)
    cases = {number: drawn(options.seed, number) for number in numbers}
    if options.case is not None:
        cases = {0: Case(**options.case)}
    return _report(cases, options.seconds, None if options.json is None else (options.json, options.seed))


def _report(cases: dict[int, Case], max_seconds: float, record: tuple[Path, int] | None) -> int:
    """One line a case; 1 if one fails. `record` is the file that keeps outcomes, and the seed."""
    counts: dict[str, int] = {}
    off: dict[str, list[float]] = {"allocated": [], "reserved": []}
    for (number, case), found in zip(cases.items(), outcomes(list(cases.values()), max_seconds), strict=True):
        counts[found["outcome"]] = counts.get(found["outcome"], 0) + 1
        print(_line(number, case, found), flush=True)
        if record is not None:
            _keep(*record, number, case, found)
        for kind, values in off.items():
            if found["outcome"] == "trained" and found[f"predicted_{kind}_bytes"]:
                values.append(found[f"predicted_{kind}_bytes"] / found[f"{kind}_bytes"] - 1)
        if not passes(found):
            print(f"  {json.dumps(dataclasses.asdict(case))}\n  {found['says']}\n  {found.get('what')}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    for kind, values in off.items():
        if values:
            low, high = 100 * min(values), 100 * max(values)
            print(f"Predicted {kind} bytes are {low:+.2f} % to {high:+.2f} % off, in {len(values)} cases.")
    return int(any(outcome not in ("trained", "does not fit") for outcome in counts))


def _keep(path: Path, seed: int, number: int, case: Case, found: dict[str, Any]) -> None:
    """Put an outcome into the file, with what it was measured with. Seconds are not kept: they are the machine's."""
    data = json.loads(path.read_text()) if path.exists() else {"cases": []}
    rows = [row for row in data["cases"] if (row["seed"], row["number"]) != (seed, number)]
    figures = {name: value for name, value in found.items() if name != "seconds"}
    kept = {"seed": seed, "number": number, "case": dataclasses.asdict(case)} | figures | {"versions": versions()}
    data["cases"] = sorted([*rows, kept], key=lambda row: (row["seed"], row["number"]))
    path.write_text(json.dumps(data, indent=1) + "\n")


def _line(number: int, case: Case, found: dict[str, Any]) -> str:
    free_bytes = case.total_bytes - case.held_bytes - CONTEXT_BYTES
    what = (
        f"{case.family} {case.width}x{case.layers} {case.batch}x{case.length} {case.dtype} {case.optimizer} {case.loop}"
    )
    how = f"{case.mode} {'async' if case.overlaps else 'sync'}"
    start = f"{number:4} {found['outcome']:13} {found['seconds']:4.0f} s  {free_bytes / MIB:6.0f} MiB free"
    text = f"{start}  {what}, {how}"
    if not found.get("predicted_reserved_bytes"):
        return text
    shares = (found[f"predicted_{kind}_bytes"] / found[f"{kind}_bytes"] - 1 for kind in ("allocated", "reserved"))
    return text + ": " + " ".join(f"{100 * share:+.2f} %" for share in shares)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(float(sys.argv[2]))
    else:
        sys.exit(main())
