"""`memscale cache`: the plans that are kept for the next start of a program."""

from __future__ import annotations

from memscale._errors import ConfigError
from memscale._planning.saved import plan_cache
from memscale.commands.progress import print_result
from memscale.report import terminal


def run(*, clear: bool, as_json: bool) -> None:
    try:
        directory = plan_cache.plan_dir()
    except RuntimeError as error:
        raise ConfigError(f"there is no cache: {error}; MEMSCALE_CACHE_DIR names a directory for one") from error
    if clear:
        print(f"Plans deleted from {directory}: {plan_cache.clear()}")
        return
    kept = list(plan_cache.kept_plans())
    print_result(kept, terminal.cache_lines(directory, kept), as_json=as_json)
