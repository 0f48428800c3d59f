"""`python -m emucuda [options] program.py [arguments]`: run a Python program on the emulated card."""

import argparse
import dataclasses
import os
import sys
from typing import Any

from emucuda._build import BuildError
from emucuda._cards import cards
from emucuda._launch import Settings, command, environment

_HELP = {
    "card": "one of the cards that `--list` shows",
    "total_bytes": "the card's memory, if it is not to be that of the named card",
    "context_bytes": "what the context, and others that use the card, hold of it",
    "copy_limit_bytes": "count longer copies, do not make them",
    "lag": "how many pieces of work a stream may be behind the host",
    "races": "find races between streams",
    "kernels": "count launches by the kernels' names",
    "log": "1: first launches (with --kernels), 2: allocations",
    "pins": "answer for host code that would decide by values of the device",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m emucuda", description="Run a Python program on an emulated CUDA card."
    )
    for field in dataclasses.fields(Settings):
        kind: dict[str, Any] = {"type": str if field.name == "card" else int}
        if isinstance(field.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, default=field.default, help=_HELP[field.name], **kind)
    parser.add_argument("--list", action="store_true", help="show the cards and end")
    parser.usage = f"{parser.prog} [options] (program.py | -m module | -c code) [arguments]"
    return parser


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our options, and what would follow `python`. argparse would take the program's `-c` and `-m` for ours."""
    flags = {"--" + field.name for field in dataclasses.fields(Settings) if isinstance(field.default, bool)}
    takes_value = False
    for i, argument in enumerate(arguments):
        if argument in ("-c", "-m") or not (takes_value or argument.startswith("-")):
            return arguments[:i], arguments[i:]
        is_flag = argument in {"--list", "--help", "-h"} or argument.replace("--no-", "--") in flags
        takes_value = argument.startswith("-") and "=" not in argument and not is_flag
    return arguments, []


def main() -> None:
    parser = _parser()
    ours, program = _split(sys.argv[1:])
    options = vars(parser.parse_args(ours))
    if options.pop("list"):
        for card in cards():
            print(f"{card.name:12} {card.total_bytes:>14,} B  sm_{card.major}{card.minor}  {card.multiprocessors} SMs")
        return
    try:
        arguments = command(program)
        variables = environment(Settings(**options))
    except (ValueError, BuildError) as error:
        parser.error(str(error))
    sys.stdout.flush()
    os.execve(arguments[0], arguments, variables)


if __name__ == "__main__":
    main()
