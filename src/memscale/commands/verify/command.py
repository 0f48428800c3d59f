"""`memscale verify` as a command: which models, and the file that a session is kept in and goes on from."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from memscale import zoo
from memscale._errors import ConfigError
from memscale.commands import files
from memscale.commands.progress import print_result, say
from memscale.commands.subject import inputs_for
from memscale.commands.verify import cases
from memscale.commands.verify.record import Machine, Record
from memscale.commands.verify.session import Session, new_record
from memscale.commands.verify.words import record_lines


def run(
    models: Sequence[str],
    batch: int | None,
    seq: int | None,
    device: str | None,
    *,
    with_large: bool,
    output: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Train these models, or those that are trained by default, and write what comes out."""
    if (batch is not None or seq is not None) and not models:
        raise ConfigError("--batch and --seq are of models that are named: memscale verify gpt2 --batch 4 --seq 256")
    named = cases.named_cases(models, batch, seq)
    for case in named:  # what a model cannot take is said before anything is trained
        inputs_for(case.model, zoo.build(case.model), None, case.batch, case.seq)
    files.check_writable("--output", output)
    session = Session(device, say)
    machine = session.look()
    path = output or pathlib.Path(f"memscale-verify-{_file_name(machine.device_name)}.json")
    record = _record_at(path, machine)
    chosen = named or cases.default_cases(machine.device_type, with_large=with_large)
    for so_far in session.run(record, chosen):
        _save_record(path, so_far)
        record = so_far
    print_result(record, record_lines(record), as_json=as_json)
    print(f"written to {path}; please send it back: it says nothing about you or your data", file=sys.stderr)


def _file_name(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def _record_at(path: pathlib.Path, machine: Machine) -> Record:
    """What is there already of this machine, to go on from; otherwise an empty one."""
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
        raise files.cannot_write("--output", path, error) from error
