"""Trials in a process of their own, which is ended and started again when one hangs or ends it.

A command that tries things answers `--serve` with `serve(attempt)`: words come in, one line a trial, and a line of JSON
goes out. `Server` is the other end, and `Trials` asks it for what a log does not know yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable

import psutil

import benchmarks

Result = dict[str, str]
WAITS = 10
"""A trial that does not answer is ended after so many times the processor time that it may take."""


def said(error: BaseException) -> str:
    """Another's error, in the width of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def serve(attempt: Callable[..., Result]) -> int:
    """Answer lines of words with results, and what each took of the processor, until there are no more of them."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        began = time.process_time()
        found = attempt(*json.loads(line))
        print(json.dumps({**found, "seconds": f"{time.process_time() - began:.1f}"}), file=answers, flush=True)
    return 0


class Server:
    """A process that tries things; one that hangs is ended."""

    def __init__(self, module: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=benchmarks.environment(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1"),
        )
        self.answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def ask(self, words: tuple[str, ...], seconds: float) -> Result | str:
        """What it answers, or a sentence where it died or took too long; it is of no use after that."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        line = self._answer(seconds)
        if line is None:
            self.close()
            return f"over {seconds:.0f} s"
        if line:
            found: Result = json.loads(line)
            return found
        code = self.process.wait()
        self.close()
        return f"the process ended with code {code}"

    def _answer(self, seconds: float) -> str | None:
        """A line, or none where it took so long of the processor, or waits: how busy the machine is does not count."""
        began, worked = time.monotonic(), self._processor_seconds()
        while time.monotonic() - began < WAITS * seconds and self._processor_seconds() - worked < seconds:
            with contextlib.suppress(queue.Empty):
                return self.answers.get(timeout=min(seconds, 1.0))
        return None

    def _processor_seconds(self) -> float:
        try:
            spent = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:  # it has ended, and its last line says so
            return 0.0
        return float(spent.user + spent.system)

    def close(self) -> None:
        """End the process and what reads from it. A second call does nothing."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a question that was never read
                    pipe.close()


class Trials:
    """Asks a server for what a log does not know yet, and appends what it answers. Use as a context."""

    def __init__(self, module: str, seconds: float, log: pathlib.Path | None) -> None:
        self.module, self.seconds, self.log = module, seconds, log
        self._known = known(log)
        self._server: Server | None = None

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.close()

    def run(self, words: tuple[str, ...]) -> Result:
        """The result of this trial, from the log where it is there."""
        if words not in self._known:
            result = self._known[words] = self._asked(words)
            print(f"{' '.join(words)}: {result['status']} {result.get('why', '')}", file=sys.stderr)
            if self.log is not None:
                with self.log.open("a") as file:
                    file.write(json.dumps({"case": words, **result}) + "\n")
        return self._known[words]

    def _asked(self, words: tuple[str, ...]) -> Result:
        self._server = self._server or Server(self.module)
        answer = self._server.ask(words, self.seconds)
        if not isinstance(answer, str):
            return answer
        self._server = None
        return {"status": "too slow" if answer.startswith("over") else "ended", "why": answer}


def run(
    module: str, cases: Iterable[tuple[str, ...]], seconds: float, log: pathlib.Path | None
) -> dict[tuple[str, ...], Result]:
    """Results by case. What is in the log is not tried again, and what is tried is appended to it."""
    with Trials(module, seconds, log) as trials:
        return {words: trials.run(words) for words in cases}


def known(log: pathlib.Path | None) -> dict[tuple[str, ...], Result]:
    """What a log of earlier trials says; the last line about a case counts."""
    if log is None or not log.exists():
        return {}
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return {tuple(each.pop("case")): each for each in found}
