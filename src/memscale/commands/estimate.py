"""`memscale estimate`: the peak of a training step, plain and in each mode."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from memscale import zoo
from memscale._config import Config, OptimizationMode
from memscale._errors import ConfigError, quoted, shown
from memscale.commands import MAX_SIZE, files
from memscale.commands.plan import planner_of
from memscale.commands.progress import print_result, progress, quiet
from memscale.commands.subject import Asked, Subject, open_subject
from memscale.report import terminal

if TYPE_CHECKING:
    from memscale._plan import Plan
    from memscale._planning.questions.estimate import Estimate


@dataclasses.dataclass(frozen=True, slots=True)
class Together:
    """The options that say how ranks train the model together."""

    world_size: int | None
    ddp: bool
    fsdp: bool

    @property
    def is_alone(self) -> bool:
        """Whether one process trains it: then nothing is shared out, and all that holds of a plain model holds."""
        return self.world_size in (None, 1)

    def check(self, snapshot: pathlib.Path | None) -> None:
        if self.ddp and self.fsdp:
            raise ConfigError("--ddp and --fsdp do not go together: choose one")
        if (self.world_size is not None) != (self.ddp or self.fsdp):
            raise ConfigError("--world-size says how many ranks train it, and --ddp or --fsdp how: give both")
        if self.fsdp and snapshot is not None:
            raise ConfigError("--snapshot shows a model that is not shared out: leave out --fsdp")


def run(
    asked: Asked,
    config: Config,
    together: Together,
    *,
    is_mode_chosen: bool,
    snapshot: pathlib.Path | None,
    lengths: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Print the estimate, or that of several lengths; `is_mode_chosen`: for the mode of `config` alone."""
    files.check_writable("--snapshot", snapshot)
    files.refuse_own_source(asked.name, "--snapshot", snapshot)
    together.check(snapshot)
    if lengths is not None:
        if snapshot is not None or together.world_size is not None or asked.seq is not None:
            raise ConfigError("--lengths is a table of its own: leave out --seq, --snapshot and --world-size")
        _run_lengths(asked, config, _read_lengths(lengths), as_json=as_json)
        return
    subject = open_subject(asked)
    if snapshot is not None and not subject.hardware.has_caching_allocator:
        raise ConfigError(
            '--snapshot shows the memory of a card, which this machine does not have: add --gpu "RTX 3090"'
        )
    with progress(f"profiling {asked.name} on fake tensors"), quiet():
        result = _estimate_of(subject, config, together)
    result = _of_mode(result, config.mode) if is_mode_chosen else result
    _print_estimate(subject, result, together, as_json=as_json)
    if snapshot is not None:
        planned = result.by_mode[config.mode].plan if is_mode_chosen else None
        with progress(f"writing {snapshot}"), quiet():
            files.write("--snapshot", snapshot, _snapshot_of(subject, config, planned))


def _estimate_of(subject: Subject, config: Config, together: Together) -> Estimate:
    from memscale._planning.questions.estimate import estimate_job
    from memscale._profile.ranks import ALONE, Ranks

    num_ranks = together.world_size or 1
    shared = Ranks(num_ranks, shards=True) if together.fsdp else Ranks.replicated(subject.model, num_ranks)
    return estimate_job(subject.job(config, ranks=ALONE if num_ranks == 1 else shared), subject.inputs)


def _of_mode(result: Estimate, mode: OptimizationMode) -> Estimate:
    """The estimate as if there were this mode alone."""
    entry = result.by_mode[mode]
    return dataclasses.replace(result, by_mode={mode: entry}, recommended_mode=mode if entry.fits else None)


def _print_estimate(subject: Subject, result: Estimate, together: Together, *, as_json: bool) -> None:
    way = "shared out by FSDP2" if together.fsdp else "replicated by DDP"
    ranks = "" if together.is_alone else f", {way} over {together.world_size} ranks, each of them"
    name, hardware = f"{subject.name}{ranks}", subject.hardware
    num_parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    data = {"model": name, "num_parameters": num_parameters, "estimate": result}
    print_result(data, terminal.estimate_lines(name, num_parameters, hardware, result), as_json=as_json)
    is_open = hardware.has_caching_allocator and result.baseline_reserved_bytes is None
    if together.fsdp and not together.is_alone and is_open and not as_json:
        print("What PyTorch reserves for it is not predicted: whether it fits is said of live bytes alone.")


def _snapshot_of(subject: Subject, config: Config, planned: Plan | None) -> bytes:
    from memscale._planning.questions.snapshot import step_snapshot

    planner = planner_of(subject, config, planned)
    return step_snapshot(planner, () if planned is None else planned.actions, planner.job.config)


# ---- sequences of several lengths


def _run_lengths(asked: Asked, config: Config, lengths: dict[int, int], *, as_json: bool) -> None:
    from memscale._planning.questions.length_estimate import estimate_lengths

    longest = asked.seq if zoo.is_factory(asked.name) else max(lengths)
    subject = open_subject(dataclasses.replace(asked, seq=longest))
    with progress(f"planning {subject.name} for {len(lengths)} lengths on fake tensors"), quiet():
        result = estimate_lengths(subject.job(config), subject.inputs, lengths)
    data = {"model": subject.name, "lengths": result}
    print_result(data, terminal.length_lines(subject.name, result), as_json=as_json)


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
