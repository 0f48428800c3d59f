"""`memscale doctor`: what was detected of this machine."""

from __future__ import annotations

from memscale.commands.progress import print_result, progress
from memscale.report import doctor


def run(*, as_json: bool) -> None:
    with progress("looking at this machine"):
        findings = doctor.examine()
    print_result(findings, doctor.lines(findings), as_json=as_json)
