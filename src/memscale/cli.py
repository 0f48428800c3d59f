"""The command line: `memscale estimate`, `plan`, `report`, `fit`, `table`, `verify`, `watch`, `doctor`, `cache` and
`bench`.

Exit codes: 0 done; 1 no plan fits (`plan` and `report`); 2 bad input, with one sentence on stderr. Results go to
stdout, progress to stderr. torch is imported inside the commands, so that `memscale --help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memscale
from memscale import _json, zoo
from memscale._config import Config, OptimizationMode
from memscale._errors import ConfigError, DoesNotFitError, MemScaleError, PlanError, quoted, shortened, shown
from memscale.report import doctor as doctor_report
from memscale.report import terminal

if TYPE_CHECKING:
    from torch import nn

    from memscale._hardware import Hardware
    from memscale._plan import FrontPoint, Plan
    from memscale._planning.estimate import Estimate
    from memscale._planning.planner import Planner
    from memscale._profile.inputs import Inputs
    from memscale.commands.verify.record import Machine, Record
    from memscale.commands.what_fits import Question
    from memscale.report.page import Report
    from memscale.report.watch import Frame

EXIT_DOES_NOT_FIT = 1
EXIT_BAD_INPUT = 2

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
MAX_SIZE = 2**24
"""The largest batch or sequence; with more, bytes could not be counted in 64 bits."""
_MAX_HOST_GB = 1e6
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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args=arguments, prog_name="memscale", standalone_mode=False)
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
        return _complain("interrupted", 130)
    except BrokenPipeError:
        return _end_quietly()
    except Exception:
        raise  # an error of ours: its traceback is what we need to see
    except BaseException as error:  # a model's own, raised where only errors were expected
        return _complain(f"the model's own code raised {quoted(error)} while a step of it was tried", EXIT_BAD_INPUT)


def _end_quietly() -> int:
    """`memscale ... | head`: whoever read us has seen enough."""
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
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, max=MAX_SIZE, help="Ranks that train it together.")
    ] = None,
    ddp: Annotated[bool, typer.Option("--ddp", help="Every rank has the whole model, as with DDP.")] = False,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Ranks share it out, as with fully_shard (FSDP2).")] = False,
    snapshot: Annotated[
        pathlib.Path | None,
        typer.Option("--snapshot", help="Write the step there for pytorch.org/memory_viz: plain, or that of --mode."),
    ] = None,
    lengths: Annotated[
        pathlib.Path | None,
        typer.Option("--lengths", help="A file of sequence lengths, one a line, each with a count if it has one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the peak of a training step, plain and in each mode. Nothing is allocated."""
    config = _config(mode, budget, utilization, overlaps, force=force)
    _check_writable("--snapshot", snapshot)
    _refuse_own_source(model, "--snapshot", snapshot)
    _check_ranks(world_size, ddp=ddp, fsdp=fsdp, snapshot=snapshot)
    if lengths is not None and (snapshot is not None or world_size is not None or seq is not None):
        raise ConfigError("--lengths is a table of its own: leave --seq, --snapshot and --world-size away")
    histogram = None if lengths is None else _read_lengths(lengths)
    longest = seq if histogram is None or zoo.is_factory(model) else max(histogram)
    subject = _open_subject(model, batch, longest, gpu, optimizer, with_weights, lora, host)
    if histogram is not None:
        _print_lengths(subject, config, optimizer, histogram, as_json=as_json)
        return
    if snapshot is not None and not subject.hardware.has_caching_allocator:
        raise ConfigError(
            '--snapshot shows the memory of a card, which this machine does not have: add --gpu "RTX 3090"'
        )
    with _progress(f"profiling {model} on fake tensors"), _quiet():
        result = _estimate_of(subject, config, optimizer, world_size or 1, shards=fsdp)
    result = result if mode is None else _of_mode(result, config.mode)
    way = "shared out by FSDP2" if fsdp else "replicated by DDP"
    is_alone = world_size in (None, 1)  # then nothing is shared out, and all that holds of a plain model holds
    name = model if is_alone else f"{model}, {way} over {world_size} ranks, each of them"
    _print_estimate(name, subject, result, as_json=as_json)
    if fsdp and not is_alone and subject.hardware.has_caching_allocator and not as_json:
        print("What PyTorch reserves for it is not predicted: whether it fits is said of live bytes alone.")
    if snapshot is not None:
        planned = None if mode is None else result.by_mode[config.mode].plan
        with _progress(f"writing {snapshot}"), _quiet():
            _write("--snapshot", snapshot, _snapshot_of(subject, config, optimizer, planned))


def _print_lengths(
    subject: _Subject, config: Config, optimizer: str, lengths: dict[int, int], *, as_json: bool
) -> None:
    from memscale._planning.job import Job
    from memscale._planning.length_estimate import estimate_lengths

    with _progress(f"planning {subject.name} for {len(lengths)} lengths on fake tensors"), _quiet():
        job = Job(subject.model, config, subject.hardware, optimizer)
        result = estimate_lengths(job, subject.inputs, lengths)
    if as_json:
        print(_json.dumps({"model": subject.name, "lengths": result}), end="")
    else:
        print("\n".join(terminal.length_lines(subject.name, result)))


def _read_lengths(path: pathlib.Path) -> dict[int, int]:
    """A histogram: lines of a length, or of a length and how often it comes."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--lengths {shown(str(path))} cannot be read: {quoted(error)}") from error
    found: dict[int, int] = {}
    for line in lines:
        if not all(word.isdecimal() and len(word) < 10 for word in line) or len(line) > 2 or not int(line[0]):
            raise ConfigError(f"--lengths {path}: {shown(' '.join(line))} is neither a length nor a length and a count")
        if int(line[0]) > MAX_SIZE:
            raise ConfigError(f"--lengths {path}: a length of {line[0]} is above {MAX_SIZE}")
        found[int(line[0])] = found.get(int(line[0]), 0) + (int(line[1]) if len(line) == 2 else 1)
    if not any(found.values()):
        raise ConfigError(f"--lengths {path} has no lengths, or none that comes more than 0 times")
    return found


def _check_ranks(world_size: int | None, *, ddp: bool, fsdp: bool, snapshot: pathlib.Path | None) -> None:
    if ddp and fsdp:
        raise ConfigError("--ddp and --fsdp do not go together: choose one")
    if (world_size is not None) != (ddp or fsdp):
        raise ConfigError("--world-size says how many ranks train it, and --ddp or --fsdp how: give both")
    if fsdp and snapshot is not None:
        raise ConfigError("--snapshot shows a model that is not shared out: leave --fsdp away")


def _estimate_of(subject: _Subject, config: Config, optimizer: str, num_ranks: int, *, shards: bool) -> Estimate:
    from memscale._planning.estimate import estimate_job
    from memscale._planning.job import Job
    from memscale._profile.ranks import ALONE, Ranks

    together = Ranks(num_ranks, shards=True) if shards else Ranks.replicated(subject.model, num_ranks)
    ranks = ALONE if num_ranks == 1 else together
    return estimate_job(Job(subject.model, config, subject.hardware, optimizer, ranks=ranks), subject.inputs)


def _of_mode(result: Estimate, mode: OptimizationMode) -> Estimate:
    """The estimate as if there were this mode alone."""
    entry = result.by_mode[mode]
    return dataclasses.replace(result, by_mode={mode: entry}, recommended_mode=mode if entry.fits else None)


def _print_estimate(model: str, subject: _Subject, result: Estimate, *, as_json: bool) -> None:
    num_parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    if as_json:
        print(_json.dumps({"model": model, "num_parameters": num_parameters, "estimate": result}), end="")
    else:
        print("\n".join(terminal.estimate_lines(model, num_parameters, subject.hardware, result)))


def _snapshot_of(subject: _Subject, config: Config, optimizer: str, planned: Plan | None) -> bytes:
    from memscale._planning.snapshot import step_snapshot

    planner, config = _planner_of(subject, config, optimizer, planned)
    return step_snapshot(planner, () if planned is None else planned.actions, config)


def _planner_of(subject: _Subject, config: Config, optimizer: str, planned: Plan | None) -> tuple[Planner, Config]:
    """What rehearses steps under this plan, and the config that has tensors travel as the plan says."""
    from memscale._decide.travel import travel_of
    from memscale._planning.job import Job
    from memscale._planning.planner import Planner

    config = config if planned is None else travel_of(planned, config, subject.hardware).said_in(config)
    return Planner(Job(subject.model, config, subject.hardware, optimizer), subject.inputs), config


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
    config = _config(mode, budget, utilization, overlaps, force=force)
    _check_writable("--output", output)
    _check_writable("--pareto", pareto)
    _refuse_own_source(model, "--output", output)
    _refuse_own_source(model, "--pareto", pareto)
    if _is_same_file(output, pareto):
        raise PlanError(f"--output and --pareto are both {output}: one would overwrite the other")
    if pareto is not None:
        from memscale.report.charts import plotly

        plotly()  # before anything that takes long
    subject = _open_subject(model, batch, seq, gpu, optimizer, with_weights, lora, host)
    with _progress(f"planning {model} on fake tensors"), _quiet():
        made = _make_plan(subject, config, optimizer, with_front=pareto is not None)
    _write_plan(made, output, pareto)
    _print_plan(made, as_json=as_json, explain=explain)
    for path in (output, pareto):
        if path is not None:
            print(f"written to {path}", file=sys.stderr)


def _make_plan(subject: _Subject, config: Config, optimizer: str, *, with_front: bool) -> Plan:
    """The plan; with the front of everything that the mode allows, where it is to be drawn."""
    from memscale._planning import make_plan
    from memscale._planning.job import Job

    fronts: list[tuple[FrontPoint, ...]] = []
    job = Job(subject.model, config, subject.hardware, optimizer)
    made = make_plan(job, subject.inputs, on_front=fronts.append if with_front else None)
    return dataclasses.replace(made, front=fronts[0], front_note="") if with_front else made


def _write_plan(made: Plan, output: pathlib.Path | None, pareto: pathlib.Path | None) -> None:
    if pareto is not None:
        from memscale.report.page import Report

        _write("--pareto", pareto, Report(made).html())
    if output is not None:
        _write("--output", output, made.to_json())


def _print_plan(made: Plan, *, as_json: bool, explain: bool) -> None:
    if as_json:
        print(made.to_json(), end="")
    elif explain:
        print(made.explain())
    else:
        print("\n".join(terminal.plan_lines(made)))


@app.command()
def report(
    subject: Annotated[
        str, typer.Argument(metavar="MODEL|PLAN.json", help="A model, as for `plan`; or a plan that was saved.")
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
) -> None:
    """Write one HTML page: memory over a step with and without MemScale, the plan, what there would be instead."""
    from memscale.report.charts import plotly
    from memscale.report.page import Report

    _check_writable("--output", output)
    _refuse_own_source(subject, "--output", output)
    plotly()
    if subject.endswith(".json"):
        unread = (batch, seq, gpu, budget, overlaps, lora, host) != (None,) * 7 or force or with_weights
        if unread or (optimizer, utilization, mode) != ("adamw", 0.85, "balanced"):
            raise ConfigError(f"{subject} is a plan that was made already: of the options only --output applies to it")
        made = Report(_read_plan(pathlib.Path(subject)))
    else:
        config = _config(mode, budget, utilization, overlaps, force=force)
        opened = _open_subject(subject, batch, seq, gpu, optimizer, with_weights, lora, host)
        made = _report_of(opened, config, optimizer)
    _write("--output", output, made.html())
    print(f"written to {output}", file=sys.stderr)


def _refuse_own_source(model: str, option: str, path: pathlib.Path | None) -> None:
    """What a factory is read from is the user's own code, and is not written to."""
    source = model.rpartition(":")[0] or model
    if _is_same_file(pathlib.Path(source), path):
        raise PlanError(f"{option} {path} is the file that the model comes from, which would be overwritten")


def _is_same_file(one: pathlib.Path | None, other: pathlib.Path | None) -> bool:
    return one is not None and other is not None and one.resolve() == other.resolve()


def _read_plan(path: pathlib.Path) -> Plan:
    from memscale._plan import Plan

    try:
        return Plan.load(path)
    except OSError as error:
        raise PlanError(f"{shown(str(path))} cannot be read: {error.strerror or error}") from error


def _report_of(subject: _Subject, config: Config, optimizer: str) -> Report:
    from memscale._planning.step_memory import step_memory
    from memscale._planning.step_times import step_times
    from memscale.report.page import Report

    with _progress(f"planning {subject.name} on fake tensors"), _quiet():
        made = _make_plan(subject, config, optimizer, with_front=True)
    with _progress("rehearsing a step with the plan and one without"), _quiet():
        planner, travelling = _planner_of(subject, config, optimizer, made)
        plain = step_memory(planner, (), travelling)
        under = step_memory(planner, made.actions, travelling, made.allocator)
        return Report(made, plain, under, times=step_times(planner, made.actions, travelling))


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
    as_json: JsonOption = False,
) -> None:
    """Find the largest batch (or the longest sequence) that fits, plain and in each mode. By prediction alone."""
    if vary not in ("batch", "seq"):
        raise ConfigError(f"--vary {shown(vary)} is not known; it must be batch or seq")
    if (batch if vary == "batch" else seq) is not None:
        raise ConfigError(f"--{vary} is what is looked for: leave it out, or vary the other")
    config = _config(mode, budget, utilization, overlaps)
    subject = _open_subject(model, batch, seq, gpu, optimizer, with_weights)
    from memscale._planning.largest_batch import fit as find
    from memscale._profile.inputs import longest_sequence

    dimension = 0 if vary == "batch" else 1
    if subject.inputs.size(dimension) is None:
        raise ConfigError(f"--vary {vary}: the inputs of {model} have no {vary} dimension in common")
    with _status() as say, _quiet():
        result = find(
            subject.model,
            lambda size: subject.inputs.resized(dimension, size),
            vary="batch" if vary == "batch" else "seq",
            config=config,
            optimizer=optimizer,
            hardware=subject.hardware,
            modes=tuple(OptimizationMode) if mode is None else (config.mode,),
            limit=longest_sequence(subject.model) if vary == "seq" else None,
            on_progress=say,
        )
    print(_json.dumps(result) if as_json else "\n".join(terminal.fit_lines(model, result)), end="" if as_json else "\n")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Print what was detected: hardware, versions, and which extras are there."""
    with _progress("looking at this machine"):
        findings = doctor_report.examine()
    print(_json.dumps(findings) if as_json else "\n".join(doctor_report.lines(findings)), end="" if as_json else "\n")


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
    from memscale.commands import what_fits
    from memscale.commands.what_fits.page import lines, markdown

    questions = _questions(cards, families, kind)
    _check_host(host)
    for option, path in (("--log", log), ("--page", page)):
        _check_writable(option, path)
    if _is_same_file(log, page):
        raise PlanError(f"--log and --page are both {log}: one would overwrite the other")
    answers = what_fits.Log.load(log) if log.exists() else what_fits.Log(host, memscale.__version__)
    if answers.host_gb != host:
        raise ConfigError(f"{log} has answers for a host of {answers.host_gb:g} GB, not {host:g}: name another --log")
    with _quiet():
        for latest in what_fits.plan_all(answers, [] if show else questions, _say):
            latest.save(log)
            answers = latest
        if page is not None:
            _write("--page", page, markdown(answers))
        shown_lines = [] if as_json else lines(answers)
    print(_json.dumps(answers) if as_json else "\n".join(shown_lines), end="" if as_json else "\n")


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _questions(cards: list[int] | None, families: list[str] | None, kind: str | None) -> list[Question]:
    from memscale.commands import what_fits

    for option, given, known in (
        ("--card", cards, what_fits.CARDS),
        ("--family", families, what_fits.FAMILIES),
        ("--kind", None if kind is None else [kind], what_fits.KINDS),
    ):
        for each in given or ():
            if each not in known:
                raise ConfigError(
                    f"{option} {shown(each)} is not known; it must be one of {', '.join(map(str, known))}"
                )
    kinds = what_fits.KINDS if kind is None else tuple(each for each in what_fits.KINDS if each == kind)
    return what_fits.wanted(cards or what_fits.CARDS, families or what_fits.FAMILIES, kinds)


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
    from memscale.commands.verify import cases
    from memscale.commands.verify.session import Session
    from memscale.commands.verify.words import record_lines

    if (batch is not None or seq is not None) and not models:
        raise ConfigError("--batch and --seq are of models that are named: memscale verify gpt2 --batch 4 --seq 256")
    named = cases.named_cases(models or (), batch, seq)
    for case in named:  # what a model cannot take is said before anything is trained
        _inputs_for(case.model, zoo.build(case.model), None, case.batch, case.seq)
    _check_writable("--output", output)
    session = Session(device, _say)
    machine = session.look()
    path = output or pathlib.Path(f"memscale-verify-{_file_name(machine.device_name)}.json")
    record = _record_at(path, machine)
    chosen = named or cases.default_cases(machine.device_type, with_large=not small)
    for so_far in session.run(record, chosen):
        _save_record(path, so_far)
        record = so_far
    print(_json.dumps(record) if as_json else "\n".join(record_lines(record)), end="" if as_json else "\n")
    print(f"written to {path}; please send it back: it says nothing about you or your data", file=sys.stderr)


def _file_name(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def _record_at(path: pathlib.Path, machine: Machine) -> Record:
    """What is there already of this machine, to go on from; otherwise an empty one."""
    from memscale.commands.verify.record import Record
    from memscale.commands.verify.session import new_record

    if not path.exists():
        return new_record(machine)
    found = Record.load(path)
    if (found.machine.device_name, found.machine.versions) != (machine.device_name, machine.versions):
        raise ConfigError(
            f"{path} is of {found.machine.device_name} with other versions than these: name another --output"
        )
    print(f"going on from {path}, which has {len(found.trials)} trials", file=sys.stderr)
    return found


def _save_record(path: pathlib.Path, record: Record) -> None:
    try:
        record.save(path)
    except OSError as error:
        raise PlanError(f"--output {shown(str(path))} cannot be written: {error.strerror or error}") from error


@app.command()
def watch(
    target: Annotated[str, typer.Argument(metavar="PORT|PID|URL", help="Of a training with observability_port.")],
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.05, max=3600.0, help="Between two readings.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and end.")] = False,
) -> None:
    """Watch a training: bytes by tier against budget and prediction, link use, step time. Ends when it does."""
    from memscale.report import watch as view

    url = view.find_endpoint(target)
    seen = view.frames(url, interval)
    if once:
        frame = next(seen, None)
        if frame is None:
            raise ConfigError(f"the training at {url} has ended")
        print("\n".join(view.frame_lines(frame)))
        return
    _watch(seen)
    print(f"the training at {url} has ended", file=sys.stderr)


def _watch(seen: Iterator[Frame]) -> None:
    """On a terminal a view that changes, elsewhere frame after frame."""
    from memscale.report import watch as view

    if not sys.stdout.isatty():
        for frame in seen:
            print("\n".join([*view.frame_lines(frame), ""]), flush=True)
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for frame in seen:
            live.update(view.frame_view(frame), refresh=True)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete the plans that are kept.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the plans that are kept for the next start of a program, or delete them. MEMSCALE_CACHE=0 keeps none."""
    from memscale._planning import plan_cache

    try:
        directory = plan_cache.plan_dir()
    except RuntimeError as error:
        raise ConfigError(f"there is no cache: {error}; MEMSCALE_CACHE_DIR names a directory for one") from error
    if clear:
        print(f"Plans deleted from {directory}: {plan_cache.clear()}")
        return
    kept = list(plan_cache.kept_plans())
    print(
        _json.dumps(kept) if as_json else "\n".join(terminal.cache_lines(directory, kept)), end="" if as_json else "\n"
    )


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

    with zoo.quiet():
        table = _benchmarks_table()
        table.run(fake=fake, quick=quick, factory=factory, only=only, results=results, as_json=as_json)


def _benchmarks_table() -> Any:
    """The benchmark lies in a folder of its own beside the package, and is not installed with it."""
    root = pathlib.Path(__file__).parents[2]
    if (root / "benchmarks" / "table.py").is_file() and str(root) not in sys.path:
        sys.path.append(str(root))
    try:
        return importlib.import_module("benchmarks.table")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", "benchmarks.table"):
            raise
        raise MemScaleError(
            "The benchmarks are not part of the installed package. Clone the repository and run `memscale bench` or "
            "`python -m benchmarks` in its folder."
        ) from error


# ---- what a command works on


@dataclasses.dataclass(frozen=True, slots=True)
class _Subject:
    name: str
    model: nn.Module
    inputs: Inputs
    hardware: Hardware


def _config(
    mode: str | None, budget: float | None, utilization: float, overlaps: bool | None, *, force: bool = False
) -> Config:
    """What the options of a command wish for. What is wrong with one is said of the option, not of the field."""
    try:
        return Config(
            mode=OptimizationMode.BALANCED if mode is None else mode,  # type: ignore[arg-type]
            memory_budget_gb=budget,
            target_gpu_utilization=utilization,
            force_optimize=force,
            async_offload=overlaps,
        )
    except ConfigError as error:
        field, equals, rest = str(error).partition("=")
        raise ConfigError(f"{_OPTION_OF.get(field, field)}{equals}{rest}") from error


_OPTION_OF = {"memory_budget_gb": "--budget", "target_gpu_utilization": "--utilization", "mode": "--mode"}


def _open_subject(
    name: str,
    batch: int | None,
    seq: int | None,
    gpu: str | None,
    optimizer: str,
    with_weights: bool,
    lora: int | None = None,
    host: float | None = None,
) -> _Subject:
    """Check what is cheap to check before anything heavy is imported, then build the model."""
    from memscale._hardware import Hardware

    zoo.check_name(name)
    hardware = _card(gpu, host)
    with _progress(f"building {name}"):
        _check_optimizer(optimizer)
        if zoo.is_factory(name):
            model, sample = zoo.load_factory(name, with_weights=with_weights)
        else:
            model, sample = zoo.build(name), None
        inputs = _inputs_for(name, model, sample, batch, seq)
        model = model if lora is None else zoo.with_adapters(model, lora)
        return _Subject(name, model, inputs, hardware or Hardware.detect())


def _card(gpu: str | None, host_gb: float | None) -> Hardware | None:
    """The card of this name in a machine with so much memory; None: what this machine has."""
    from memscale._hardware import Hardware
    from memscale.commands.what_fits import with_host

    if host_gb is not None:
        _check_host(host_gb)
    if gpu is None:
        if host_gb is not None:
            raise ConfigError("--host is the memory of the machine that a named card is in, and comes with --gpu")
        return None
    hardware = Hardware.from_name(gpu)
    return hardware if host_gb is None else with_host(hardware, host_gb)


def _check_host(host_gb: float) -> None:
    if not 0 < host_gb <= _MAX_HOST_GB:
        raise ConfigError(f"--host {host_gb:g} must be above 0 and at most {_MAX_HOST_GB:g} GB")


def _check_optimizer(name: str) -> None:
    from memscale._profile.optimizer_twin import OPTIMIZERS

    allowed = [*OPTIMIZERS, "none"]
    if name not in allowed:
        raise ConfigError(f"--optimizer {shown(name)} is not known; it must be one of {', '.join(allowed)}")


def _inputs_for(name: str, model: nn.Module, sample: Any, batch: int | None, seq: int | None) -> Inputs:
    from memscale._profile.inputs import Inputs, derive_inputs

    if sample is not None:
        if batch is not None or seq is not None:
            raise ConfigError(f"{name} gives its own sample: --batch and --seq do not apply")
        return Inputs.from_sample(sample)
    inputs = derive_inputs(model, batch or 1, seq)
    if inputs is None:
        raise ConfigError(
            f"no inputs can be derived for {type(model).__name__}; let the factory return (model, sample)"
        )
    if seq is not None and "input_ids" not in inputs.kwargs:
        raise ConfigError(f"--seq does not apply to {name}: it does not take a sequence")
    return inputs


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """Say what takes time: a spinner on a terminal, a line elsewhere."""
    if not sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{text} ..."):
        yield


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """The same for work in several parts: each says what it is."""
    if not sys.stderr.isatty():
        yield lambda text: print(f"{text} ...", file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("...") as status:
        yield lambda text: status.update(f"{text} ...")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Others' chatter is not ours to print: advice of `transformers`. What the model itself prints goes to stderr."""

    with zoo.quiet(), zoo.speaking_on_stderr():
        yield


def _check_writable(option: str, path: pathlib.Path | None) -> None:
    """Before anything that takes long."""
    if path is None:
        return
    try:
        is_directory, has_parent = path.is_dir(), path.absolute().parent.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, or that no file can have
        raise PlanError(f"{option} {shown(str(path))} cannot be written: {quoted(error)}") from error
    if is_directory:
        raise PlanError(f"{option} {path}: that is a directory")
    if not has_parent:
        raise PlanError(f"{option} {path}: there is no directory {path.parent}")


def _write(option: str, path: pathlib.Path, content: str | bytes) -> None:
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    except OSError as error:
        raise PlanError(f"{option} {shown(str(path))} cannot be written: {error.strerror or error}") from error
