"""`memscale table`: asks for what the log does not have yet, and shows all answers."""

from __future__ import annotations

import pathlib

import memscale
from memscale._errors import ConfigError, shown
from memscale.commands import files, table
from memscale.commands.progress import print_result, quiet, say
from memscale.commands.subject import check_host
from memscale.commands.table.page import lines, markdown


def run(
    log: pathlib.Path,
    parts: list[table.Stairs],
    *,
    host_gb: float,
    page: pathlib.Path | None,
    show: bool,
    as_json: bool,
) -> None:
    """Answer what these parts ask and the log does not know; `show`: nothing, and the log is printed as it is."""
    check_host(host_gb)
    for option, path in (("--log", log), ("--page", page)):
        files.check_writable(option, path)
    files.refuse_same_file("--log", log, "--page", page)
    answers = table.Log.load(log) if log.exists() else table.Log(host_gb, memscale.__version__)
    if answers.host_gb != host_gb:
        raise ConfigError(
            f"{log} has answers for a host of {answers.host_gb:g} GB, not {host_gb:g}: name another --log"
        )
    with quiet():
        for latest in table.plan_all(answers, [] if show else parts, say):
            latest.save(log)
            answers = latest
        if page is not None:
            files.write("--page", page, markdown(answers))
        shown_lines = lines(answers)
    print_result(answers, shown_lines, as_json=as_json)


def parts_of(cards: list[int] | None, families: list[str] | None, kind: str | None) -> list[table.Stairs]:
    """The parts of the table that these options name; without them, all."""
    for option, given, known in (
        ("--card", cards, table.CARDS),
        ("--family", families, table.FAMILIES),
        ("--kind", None if kind is None else [kind], table.KINDS),
    ):
        for each in given or ():
            if each not in known:
                raise ConfigError(
                    f"{option} {shown(each)} is not known; it must be one of {', '.join(map(str, known))}"
                )
    kinds = table.KINDS if kind is None else tuple(each for each in table.KINDS if each == kind)
    return table.stairs_of(cards or table.CARDS, families or table.FAMILIES, kinds)
