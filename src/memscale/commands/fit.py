"""`memscale fit`: the largest batch, or the longest sequence, that fits."""

from __future__ import annotations

from memscale._config import Config, OptimizationMode
from memscale._errors import ConfigError, shown
from memscale.commands.progress import print_result, quiet, status
from memscale.commands.subject import Asked, open_subject
from memscale.report import terminal


def run(asked: Asked, config: Config, vary: str, *, is_mode_chosen: bool, as_json: bool) -> None:
    """Look for the largest size; `is_mode_chosen`: in the mode of `config` alone."""
    if vary not in ("batch", "seq"):
        raise ConfigError(f"--vary {shown(vary)} is not known; it must be batch or seq")
    if (asked.batch if vary == "batch" else asked.seq) is not None:
        raise ConfigError(f"--{vary} is what is looked for: leave it out, or vary the other")
    subject = open_subject(asked)
    from memscale._planning.questions.largest_batch import fit
    from memscale._profile.inputs import longest_sequence

    dimension = 0 if vary == "batch" else 1
    if subject.inputs.size(dimension) is None:
        raise ConfigError(f"--vary {vary}: the inputs of {asked.name} have no {vary} dimension in common")
    with status() as show, quiet():
        result = fit(
            subject.model,
            lambda size: subject.inputs.resized(dimension, size),
            vary="batch" if vary == "batch" else "seq",
            config=config,
            optimizer=subject.optimizer,
            hardware=subject.hardware,
            modes=(config.mode,) if is_mode_chosen else tuple(OptimizationMode),
            limit=longest_sequence(subject.model) if vary == "seq" else None,
            on_progress=show,
        )
    print_result(result, terminal.fit_lines(asked.name, result), as_json=as_json)
