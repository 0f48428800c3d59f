"""`Session`: the trials of a verification, one after the other, each in a process of its own.

    session = Session(device=None, on_progress=print)
    machine = session.look()                       # ConfigError: there is no such device
    for record in session.run(Record(machine), cases): record.save(path)

Whatever becomes of a process is a result: what it says, or how it ended. This process never touches the card.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memscale import _json
from memscale._errors import ConfigError, MemScaleError, shown
from memscale.commands.verify.cases import BUDGET, BUDGET_SHARE, PLAIN, WAYS, CardCase
from memscale.commands.verify.record import Machine, Record, Trial

MARK = "memscale.commands.verify: "
_PROGRAM = ("-m", "memscale.commands.verify.trial")
_DEVICE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,4})?")
"""What another process is asked about; anything else is no device."""


def _by_this_python(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, *arguments]


class Session:
    """Runs trials.

    Args:
        device: Where to train; None: the machine's accelerator.
        on_progress: Is told what begins.
        command: Makes the command line that runs these arguments of Python; another one runs them on a stand-in.
        environment: Of the processes; None: this process's own.
    """

    def __init__(
        self,
        device: str | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
        command: Callable[[Sequence[str]], list[str]] = _by_this_python,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._device, self._say, self._command = device, on_progress, command
        self._environment = dict(os.environ if environment is None else environment)

    def look(self) -> Machine:
        """What is there. Raises `ConfigError` where there is no such device, with what to do."""
        if self._device is not None and not _DEVICE_NAME.fullmatch(self._device):
            raise ConfigError(f"--device {shown(self._device)}: devices are called cpu, cuda, cuda:1, xpu or the like")
        self._say("looking at the device")
        answer = self._ask({"look": self._device})
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        if "crashed" in answer:
            raise MemScaleError(f"the device cannot be used: {answer['detail']}")
        machine: Machine = _json.decode(Machine, answer)
        if not machine.computes:
            # Kernels that do nothing would be measured as those of an impossibly fast card: plan by the data sheet.
            self._environment["MEMSCALE_MEASURE"] = "0"
        return machine

    def run(self, record: Record, cases: Sequence[CardCase]) -> Iterator[Record]:
        """The record after each trial. What it has already, it keeps; what had failed is tried again."""
        trials = [(case, way) for case in cases for way in case.ways]
        for number, (case, way) in enumerate(trials, 1):
            known = record.trial(case.title, way)
            if known is not None and known.outcome != "failed":
                continue
            self._say(f"{number} of {len(trials)}: {case.title}, {way} ({WAYS[way]})")
            record = record.with_trial(self._trial(record, case, way))
            yield record

    def _trial(self, record: Record, case: CardCase, way: str) -> Trial:
        order: dict[str, Any] = {"case": _json.encode(case), "way": way, "device": self._device}
        if way == BUDGET:
            plain = record.trial(case.title, PLAIN)
            needed = None if plain is None else plain.predicted.reserved or plain.predicted.live
            if needed is None:
                return Trial(case.title, way, "failed", "the plain model's peak is not known: it was not predicted")
            order["budget_bytes"] = int(needed * BUDGET_SHARE)
        answer = self._ask({"run": order})
        if "refused" in answer:
            return Trial(case.title, way, "failed", answer["refused"])
        if "crashed" in answer:
            return Trial(case.title, way, "failed", answer["detail"], error=answer["crashed"])
        trial: Trial = _json.decode(Trial, answer)
        return trial

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """What a process answers; how it ended, where it does not."""
        command = self._command([*_PROGRAM, json.dumps(order)])
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        for line in reversed(done.stdout.splitlines()):
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        last = done.stderr.strip().splitlines()[-6:]
        return {"crashed": without_paths("\n".join(last)), "detail": _how_it_ended(done.returncode)}


def without_paths(text: str) -> str:
    """The text with only the names of files: what is sent back tells nothing about whose machine it was."""
    return re.sub(r"(?:[A-Za-z]:)?(?:[\\/][\w.~ -]+)+[\\/]([\w.-]+)", r"\1", text)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code}"
    name = signal.Signals(-code).name if -code in [each.value for each in signal.Signals] else str(-code)
    hint = ": host memory may have run out" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def new_record(machine: Machine) -> Record:
    """An empty one of today."""
    return Record(machine, made=datetime.date.today().isoformat())
