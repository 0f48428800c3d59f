"""A log as text for a terminal, and as the page docs/results/what_fits.md."""

from __future__ import annotations

import dataclasses

from memscale.commands.table import (
    ACTIVATIONS_SHARE,
    BYTES_A_PARAMETER,
    CARDS,
    FAMILIES,
    KINDS,
    RANK,
    Answer,
    Kind,
    Log,
    Question,
    fits,
    rule_of_thumb,
)
from memscale.report.tables import table

_TITLES: dict[Kind, str] = {"full": "in full", "lora": "with LoRA"}
_HEADER = ("card", "family", "largest", "total on the card", "step", "host RAM", "mode", "rule of thumb")


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One card and one family."""

    size: int
    family: str
    kind: Kind
    best: Answer | None
    """The largest that was found to fit."""
    is_final: bool
    """Whether no larger model of the family fits."""

    @property
    def smallest(self) -> Question:
        return Question(CARDS[self.size], FAMILIES[self.family][0], self.kind)


def cells(log: Log, kind: Kind) -> list[Cell]:
    """All cells, also those that nothing is known of."""
    found = []
    for size, card in CARDS.items():
        for family, models in FAMILIES.items():
            questions = [Question(card, model, kind) for model in models]
            known = [fits(log, question) for question in questions]
            planned = [place for place, question in enumerate(questions) if _was_planned(log, question)]
            best = log.answer(questions[planned[-1]]) if planned else None
            is_final = all(each is False for each in known[planned[-1] + 1 if planned else 0 :])
            found.append(Cell(size, family, kind, best, is_final))
    return found


def _why_empty(cell: Cell, log: Log) -> str:
    """Why a cell has no figures."""
    if cell.is_final:
        too_large = cell.smallest.cannot_fit(log.host_gb)
        return "none: weights and optimizer state alone exceed card and host" if too_large else "none: no plan fits"
    questions = [Question(CARDS[cell.size], model, cell.kind) for model in FAMILIES[cell.family]]
    errors = [answer.error for answer in map(log.answer, questions) if answer is not None and answer.error]
    if errors:
        return f"not known: {errors[0]}"
    known = [question.model for question in questions if fits(log, question)]
    if not known:
        return "not planned for yet"
    more = "" if known[-1] == questions[-1].model else " or larger"
    return f"{known[-1]}{more}, as a smaller card trains it: not planned for yet"


def _was_planned(log: Log, question: Question) -> bool:
    """Whether there is a plan for it, on this very card."""
    answer = log.answer(question)
    return answer is not None and answer.fits


def lines(log: Log) -> list[str]:
    """Both tables, for a terminal."""
    parts = [_caption(log)]
    for kind in KINDS:
        rows = [_row(cell, log) for cell in cells(log, kind)]
        parts += ["", f"{_sentence(_TITLES[kind])}: {_what_is_trained(kind)}", ""]
        parts += table([_HEADER, *rows], left=(0, 1, 2, 6, 7))
    return [*parts, "", *_legend()]


def _row(cell: Cell, log: Log) -> tuple[str, ...]:
    thumb = rule_of_thumb(cell.family, cell.kind, cell.size) or "none"
    best = cell.best
    if best is None:
        return (f"{cell.size} GB", cell.family, _why_empty(cell, log), "", "", "", "", thumb)
    return (
        f"{cell.size} GB",
        cell.family,
        f"{best.question.model}{'' if cell.is_final else ' or larger'}{_mark(best, log)}",
        _gb(best.total_bytes),
        "-" if best.step_ms is None else f"{best.step_ms:,.0f} ms, {best.slowdown:.2f}x",
        _gb(best.host_bytes),
        "plain: fits as it is" if best.what == "nothing" else "balanced",
        thumb,
    )


def _mark(answer: Answer, log: Log) -> str:
    """The mark of a cell that another version than that of the log has planned."""
    return f" ({answer.version})" if answer.version not in ("", log.version) else ""


def _gb(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.2f} GB"


def _what_is_trained(kind: Kind) -> str:
    shapes = "text 1 x 1024; ViT 16 images of 224 x 224; SDXL and FLUX one of 1024 x 1024"
    if kind == "full":
        return f"every weight, in fp32, with AdamW; {shapes}"
    layers = "every linear layer (SDXL, FLUX: of attention)"
    return f"adapters of rank {RANK} on {layers}, frozen weights in bf16, AdamW; {shapes}"


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _caption(log: Log) -> str:
    return (
        f"The largest model of each family that trains, on a host with {log.host_gb:g} GB. All figures are predicted."
    )


def _legend() -> list[str]:
    cards = ", ".join(f"{size} GB {card}" for size, card in CARDS.items())
    shares = BYTES_A_PARAMETER
    return [
        f"card: {cards}; they differ in speed as well as in memory",
        "step: the time of a training step, and how many times that of one without MemScale, if that had the memory",
        "host RAM: what waits in the host's memory",
        f"rule of thumb: what should fit without MemScale, at {shares['full']} B per parameter in full and "
        f"{shares['lora']} with LoRA, in {1 - ACTIVATIONS_SHARE:.0%} of the card",
        '"or larger": the next larger model has not been tried; a version in brackets: the one that made that plan',
    ]


def markdown(log: Log) -> str:
    """The page."""
    num_known = sum(fits(log, question) is not None for question in _all_questions())
    parts = [
        "# What can my card train?",
        "",
        f"{_caption(log)} Only exact techniques are used: a model trains as it would without MemScale, bit for bit.",
        f"Written by `memscale table` (memscale {log.version}) from [what_fits.json](what_fits.json), which answers "
        f"{num_known} of {len(_all_questions())} questions (does this model train on this card?). {_how_full(log)}",
        "Every figure is of a plan for that very card. A larger model is said not to fit where planning found no way,"
        " for it, for a smaller model or on a larger card; or where its weights and optimizer state alone exceed"
        " card and host together.",
        "For SDXL and FLUX only the network that is trained counts: text encoders and VAE run before it.",
        "",
        *(f"- {line}" for line in _legend()),
    ]
    for kind in KINDS:
        parts += [
            "",
            f"## {_sentence(_TITLES[kind])}",
            "",
            f"{_sentence(_what_is_trained(kind))}.",
            "",
        ]
        parts += _markdown_table([_HEADER, *(_row(cell, log) for cell in cells(log, kind))])
        parts += [
            "",
            f"### Commands: {_TITLES[kind]}",
            "",
            "Each gives the plan of its cell, with every choice; `memscale table` fills a cell that is not final.",
            "",
        ]
        parts += ["```sh", *(_command(log, cell) for cell in cells(log, kind)), "```"]
    return "\n".join(parts) + "\n"


def _all_questions() -> list[Question]:
    return [
        Question(card, model, kind)
        for card in CARDS.values()
        for models in FAMILIES.values()
        for model in models
        for kind in KINDS
    ]


def _how_full(log: Log) -> str:
    """How many cells have figures, and what the others lack."""
    every = [cell for kind in KINDS for cell in cells(log, kind)]
    num_filled = sum(cell.best is not None or cell.is_final for cell in every)
    if num_filled == len(every):
        return f"Each of its {num_filled} cells has its answer."
    return f"{num_filled} of {len(every)} cells have their answer; each of the others says what is not known."


def _command(log: Log, cell: Cell) -> str:
    """The command for the largest model that fits, or for the smallest where none does; else the one that finds out."""
    if cell.best is not None or cell.is_final:
        return (cell.best.question if cell.best is not None else cell.smallest).command(log.host_gb)
    where = f"--card {cell.size} --family {cell.family} --kind {cell.kind}"
    return f"memscale table --log docs/results/what_fits.json {where}"


def _markdown_table(rows: list[tuple[str, ...]]) -> list[str]:
    rule = tuple("---:" if column in (3, 4, 5) else "---" for column in range(len(rows[0])))
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]
