"""The command line: `memscale estimate`, `plan`, `report`, `fit`, `table`, `verify`, `watch`, `doctor`, `cache` and
`bench`.

Here are their options and how a command ends; what each of them does is in `commands/`, and is imported when it is
called, so that `memscale --help` answers at once. Exit codes: 0 done; 1 no plan fits (`plan` and `report`); 2 bad
input, with one sentence on stderr. Results go to stdout, progress to stderr.
"""

from __future__ import annotations

import errno
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import memscale
from memscale._errors import DoesNotFitError, MemScaleError, quoted, shortened, shown
from memscale.commands import MAX_SIZE

EXIT_DOES_NOT_FIT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What writing to a standard output ends with that takes no more, or is open for reading
only; commands say by themselves what a file met."""

# typer carries a click of its own since 0.2x; this is the base of usage errors in whichever it uses.
_UsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException" and issubclass(base, Exception)
)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="What a PyTorch training step peaks at, and how MemScale would lower it. GB = 1e9 bytes.",
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A name (gpt2-medium) or path/to/file.py:factory.")]
BatchOption = Annotated[int | None, typer.Option("--batch", min=1, max=MAX_SIZE, help="Batch size.  [default: 1]")]
SeqOption = Annotated[
    int | None, typer.Option("--seq", min=1, max=MAX_SIZE, help="Sequence length.  [default: up to 512]")
]
GpuOption = Annotated[str | None, typer.Option("--gpu", help='A card by name ("RTX 3090"); without: this machine.')]
OptimizerOption = Annotated[str, typer.Option("--optimizer", help="The optimizer that will train it.")]
BudgetOption = Annotated[float | None, typer.Option("--budget", metavar="GB", help="A hard budget in GB.")]
UtilizationOption = Annotated[
    float, typer.Option("--utilization", metavar="SHARE", help="Without a budget: the share of memory to fill.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="As low as the mode allows, even if it fits as it is.")]
AsyncOption = Annotated[
    bool | None, typer.Option("--async/--no-async", help="Transfers overlap, or block; without it the plan chooses.")
]
WeightsOption = Annotated[
    bool, typer.Option("--with-weights", help="Call a factory with real tensors, not on the meta device.")
]
LoraOption = Annotated[
    int | None,
    typer.Option("--lora", metavar="RANK", min=1, max=65536, help="Train LoRA adapters of this rank; weights in bf16."),
]
HostOption = Annotated[
    float | None, typer.Option("--host", metavar="GB", help="With --gpu: the host's memory; without: this machine's.")
]
OffloadDirOption = Annotated[
    pathlib.Path | None,
    typer.Option(
        "--offload-dir", metavar="DIR", help="A directory: what the host has no room for may wait on its disk."
    ),
]
WorldOption = Annotated[
    int | None, typer.Option("--world-size", min=1, max=MAX_SIZE, help="Ranks that train it together.")
]
SnapshotOption = Annotated[
    pathlib.Path | None,
    typer.Option("--snapshot", help="Write the step there for pytorch.org/memory_viz: plain, or that of --mode."),
]
LengthsOption = Annotated[
    pathlib.Path | None,
    typer.Option("--lengths", help="A file of sequence lengths, one a line, each with a count if it has one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args=arguments, prog_name="memscale", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # here an error has a sentence; at the interpreter's end it would have none
        if code == EXIT_INTERRUPTED:  # how typer ends where a command was interrupted
            return _complain("interrupted", EXIT_INTERRUPTED)
        return code if isinstance(code, int) else 0
    except DoesNotFitError as error:
        return _complain(str(error), EXIT_DOES_NOT_FIT)
    except MemScaleError as error:
        return _complain(str(error), EXIT_BAD_INPUT)
    except _UsageError as error:
        return _complain(shortened(error.format_message()), EXIT_BAD_INPUT)  # type: ignore[attr-defined]
    except SystemExit as error:  # never ours: a model's code must not decide how this command ends
        if isinstance(error.__context__, BrokenPipeError):
            return _end_quietly()  # how typer ends then
        return _complain(
            f"the model's own code ended the program (sys.exit({shown(error.code)})) while a step of it was tried; "
            "take that call out of its forward",
            EXIT_BAD_INPUT,
        )
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        return _end_quietly()
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        _end_quietly()  # what is left of the output has nowhere to go
        return _complain(f"the output could not be written: {error.strerror}", EXIT_BAD_INPUT)
    except Exception:
        raise  # an error of ours: its traceback is what we need to see
    except BaseException as error:  # a model's own, raised where only errors were expected
        return _complain(f"the model's own code raised {quoted(error)} while a step of it was tried", EXIT_BAD_INPUT)


def _end_quietly() -> int:
    """Nothing more is written: `memscale ... | head` has seen enough, or a disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return 0


def _complain(message: str, code: int) -> int:
    print(f"memscale: {' '.join(message.split())}", file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"memscale {memscale.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def estimate(
    model: ModelArgument,
    batch: BatchOption = None,
    seq: SeqOption = None,
    gpu: GpuOption = None,
    optimizer: OptimizerOption = "adamw",
    budget: BudgetOption = None,
    utilization: UtilizationOption = 0.85,
    mode: Annotated[str | None, typer.Option("--mode", help="Show this mode only.")] = None,
    force: ForceOption = False,
    overlaps: AsyncOption = None,
    with_weights: WeightsOption = False,
    lora: LoraOption = None,
    host: HostOption = None,
    offload_dir: OffloadDirOption = None,
    world_size: WorldOption = None,
    ddp: Annotated[bool, typer.Option("--ddp", help="Every rank has the whole model, as with DDP.")] = False,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Ranks share it out, as with fully_shard (FSDP2).")] = False,
    snapshot: SnapshotOption = None,
    lengths: LengthsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the peak of a training step, plain and in each mode. Nothing is allocated."""
    from memscale.commands import estimate as command
    from memscale.commands.subject import Asked, config_of

    command.run(
        Asked(model, batch, seq, gpu, optimizer, with_weights, lora, host, offload_dir),
        config_of(mode, budget, utilization, overlaps, force=force, offload_dir=offload_dir),
        command.Together(world_size, ddp, fsdp),
        is_mode_chosen=mode is not None,
        snapshot=snapshot,
        lengths=lengths,
        as_json=as_json,
    )


@app.command()
def plan(
    model: ModelArgument,
    batch: BatchOption = None,
    seq: SeqOption = None,
    gpu: GpuOption = None,
    optimizer: OptimizerOption = "adamw",
    budget: BudgetOption = None,
    utilization: UtilizationOption = 0.85,
    mode: Annotated[str, typer.Option("--mode", help="conservative, balanced or aggressive.")] = "balanced",
    force: ForceOption = False,
    overlaps: AsyncOption = None,
    with_weights: WeightsOption = False,
    lora: LoraOption = None,
    host: HostOption = None,
    offload_dir: OffloadDirOption = None,
    output: Annotated[
        pathlib.Path | None, typer.Option("--output", "-o", help="Write the plan there, as JSON.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every choice, with its rule and numbers.")] = False,
    pareto: Annotated[
        pathlib.Path | None, typer.Option("--pareto", help="Draw peak against time there (HTML): all the mode allows.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make the plan that `memscale.wrap` would attach. Exits with 1 when none fits."""
    from memscale.commands import plan as command
    from memscale.commands.subject import Asked, config_of

    asked = Asked(model, batch, seq, gpu, optimizer, with_weights, lora, host, offload_dir)
    config = config_of(mode, budget, utilization, overlaps, force=force, offload_dir=offload_dir)
    command.run(asked, config, output=output, pareto=pareto, explain=explain, as_json=as_json)


@app.command()
def report(
    subject: Annotated[
        str,
        typer.Argument(metavar="MODEL|FILE.json", help="A model, as for `plan`; a saved plan; or what a run wrote."),
    ],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", help="The HTML file to write.")] = pathlib.Path(
        "memscale-report.html"
    ),
    batch: BatchOption = None,
    seq: SeqOption = None,
    gpu: GpuOption = None,
    optimizer: OptimizerOption = "adamw",
    budget: BudgetOption = None,
    utilization: UtilizationOption = 0.85,
    mode: Annotated[str, typer.Option("--mode", help="conservative, balanced or aggressive.")] = "balanced",
    force: ForceOption = False,
    overlaps: AsyncOption = None,
    with_weights: WeightsOption = False,
    lora: LoraOption = None,
    host: HostOption = None,
    offload_dir: OffloadDirOption = None,
) -> None:
    """Write one HTML page: memory over a step with and without MemScale, the plan, what there would be instead."""
    from memscale.commands import report as command
    from memscale.commands.subject import Asked, config_of

    options = (batch, seq, gpu, budget, overlaps, lora, host, offload_dir)
    is_anything_given = any(option is not None for option in options) or force or with_weights
    is_anything_changed = (optimizer, utilization, mode) != ("adamw", 0.85, "balanced")
    command.run(
        Asked(subject, batch, seq, gpu, optimizer, with_weights, lora, host, offload_dir),
        config_of(mode, budget, utilization, overlaps, force=force, offload_dir=offload_dir),
        has_options=is_anything_given or is_anything_changed,
        output=output,
    )


@app.command()
def fit(
    model: ModelArgument,
    vary: Annotated[str, typer.Option("--vary", help="What to make as large as fits: batch or seq.")] = "batch",
    batch: BatchOption = None,
    seq: SeqOption = None,
    gpu: GpuOption = None,
    optimizer: OptimizerOption = "adamw",
    budget: BudgetOption = None,
    utilization: UtilizationOption = 0.85,
    mode: Annotated[str | None, typer.Option("--mode", help="This mode only.")] = None,
    overlaps: AsyncOption = None,
    with_weights: WeightsOption = False,
    offload_dir: OffloadDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the largest batch (or the longest sequence) that fits, plain and in each mode. By prediction alone."""
    from memscale.commands import fit as command
    from memscale.commands.subject import Asked, config_of

    asked = Asked(model, batch, seq, gpu, optimizer, with_weights, offload_dir=offload_dir)
    config = config_of(mode, budget, utilization, overlaps, offload_dir=offload_dir)
    command.run(asked, config, vary, is_mode_chosen=mode is not None, as_json=as_json)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Print what was detected: hardware, versions, and which extras are there."""
    from memscale.commands import doctor as command

    command.run(as_json=as_json)


@app.command()
def table(
    log: Annotated[
        pathlib.Path, typer.Option("--log", help="Answers are kept there; a second call goes on from them.")
    ] = pathlib.Path("memscale-table.json"),
    cards: Annotated[
        list[int] | None, typer.Option("--card", metavar="GB", help="Cards of this size only; may be repeated.")
    ] = None,
    families: Annotated[list[str] | None, typer.Option("--family", help="This family only; may be repeated.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="full or lora; without: both.")] = None,
    host: Annotated[float, typer.Option("--host", metavar="GB", help="The host's memory.")] = 64.0,
    page: Annotated[pathlib.Path | None, typer.Option("--page", help="Write the table there, as Markdown.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Plan nothing: show what the log has.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the largest model of each family that trains on cards of 8 to 48 GB, in full and with LoRA. Predicted."""
    from memscale.commands.table import command

    parts = command.parts_of(cards, families, kind)
    command.run(log, parts, host_gb=host, page=page, show=show, as_json=as_json)


@app.command()
def verify(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Models by name; without: five small ones and two large ones."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, max=MAX_SIZE, help="Batch size of named models.")
    ] = None,
    seq: Annotated[int | None, typer.Option("--seq", min=1, max=MAX_SIZE, help="Their sequence length.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="Where to train; without: this machine's GPU.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Leave the two large models out.")] = False,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--output", "-o", help="The JSON to write, and to go on from.  [default: memscale-verify-CARD.json]"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train models plain and wrapped on this machine's GPU: bytes and times, predicted and measured; parity."""
    from memscale.commands.verify import command

    command.run(models or (), batch, seq, device, with_large=not small, output=output, as_json=as_json)


@app.command()
def watch(
    target: Annotated[str, typer.Argument(metavar="PORT|PID|URL", help="Of a training with observability_port.")],
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.05, max=3600.0, help="Between two readings.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and end.")] = False,
) -> None:
    """Watch a training: bytes by tier against budget and prediction, link use, step time. Ends when it does."""
    from memscale.commands import watch as command

    command.run(target, interval, once=once)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete the plans that are kept.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the plans that are kept for the next start of a program, or delete them. MEMSCALE_CACHE=0 keeps none."""
    from memscale.commands import cache as command

    command.run(clear=clear, as_json=as_json)


@app.command()
def bench(
    factory: Annotated[
        str | None, typer.Argument(metavar="[PATH.py:FACTORY]", help="Your own model; without: the published table.")
    ] = None,
    fake: Annotated[bool, typer.Option("--fake", help="Predict only, for an RTX 3090.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="BERT-Base and a small GPT-2, for real.")] = False,
    only: Annotated[str | None, typer.Option("--only", metavar="MODEL", help="One row, by its name.")] = None,
    results: Annotated[
        pathlib.Path | None, typer.Option("--results", help="Keep results there, and go on from what is there.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train models plain and under MemScale and compare peaks, times and losses. Real runs need simgpu."""
    from memscale.commands import bench as command

    command.run(fake=fake, quick=quick, factory=factory, only=only, results=results, as_json=as_json)
