"""`memscale table`: asks for what the log does not have yet, and shows all answers."""

from __future__ import annotations

import pathlib

import memscale
from memscale._errors import ConfigError, shown
from memscale.commands import files, what_fits
from memscale.commands.progress import print_result, quiet, say
from memscale.commands.subject import check_host
from memscale.commands.what_fits.page import lines, markdown


def run(
    log: pathlib.Path,
    parts: list[what_fits.Stairs],
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
    answers = what_fits.Log.load(log) if log.exists() else what_fits.Log(host_gb, memscale.__version__)
    if answers.host_gb != host_gb:
        raise ConfigError(
            f"{log} has answers for a host of {answers.host_gb:g} GB, not {host_gb:g}: name another --log"
        )
    with quiet():
        for latest in what_fits.plan_all(answers, [] if show else parts, say):
            latest.save(log)
            answers = latest
        if page is not None:
            files.write("--page", page, markdown(answers))
        shown_lines = lines(answers)
    print_result(answers, shown_lines, as_json=as_json)


def parts_of(cards: list[int] | None, families: list[str] | None, kind: str | None) -> list[what_fits.Stairs]:
    """The parts of the table that these options name; without them, all."""
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
    return what_fits.stairs_of(cards or what_fits.CARDS, families or what_fits.FAMILIES, kinds)
