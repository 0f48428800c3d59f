"""Plans that were made before: the second start of a program attaches at once.

    MEMSCALE_CACHE=0        neither read nor write plans
    memscale cache          what is kept, and where; `--clear` deletes it

A plan is kept under the hash of everything that it rests on (`fingerprint.py`). What is free at the moment is not part
of that: a plan that is found is held against the budget of now. It is used if it fits, and if not so much more is free
than it was made for that a faster one might. See NOTE [budgets that drift].
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import logging
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from memscale import _json
from memscale._decide.budget import Held
from memscale._errors import MemScaleError
from memscale._hardware.user_cache import cache_dir, read_json, write_json
from memscale._plan import Plan
from memscale._planning.job import Job
from memscale._planning.saved.fingerprint import NoFingerprintError, fingerprint
from memscale._planning.saved.saved_plans import refuse_plan
from memscale._profile.inputs import Inputs

logger = logging.getLogger("memscale")

_FORMAT = 2
_MAX_PLANS = 256
"""The oldest go first."""
_DRIFT = 0.02
"""NOTE [budgets that drift]: without a budget in GB, what is free decides, and that is never the same twice. A plan
that was made for at least this much less is made anew, because a faster one may fit now; a plan without techniques is
as fast as any."""
_NAME = re.compile(r"[0-9a-f]{64}\.json")


class PlanSlot:
    """The place of one plan in the cache."""

    def __init__(self, job: Job, path: pathlib.Path) -> None:
        self._job, self._path = job, path

    def read(self) -> Plan | None:
        """The plan that was made for just this, if it holds here and now."""
        content = read_json(self._path)
        if not content:
            return None
        try:
            return self._as_of_now(_plan_in(content, self._path.stem))
        except (MemScaleError, ValueError) as error:
            logger.debug("the plan in %s is not used: %s", self._path, str(error))
            return None

    def _as_of_now(self, plan: Plan) -> Plan | None:
        """The plan with the budget of now; raises `MemScaleError` where it does not fit any more."""
        eligible = self._job.eligible
        budget_bytes = eligible.budget.device_bytes
        if plan.actions and budget_bytes > plan.budget_bytes * (1 + _DRIFT):
            return None
        refuse_plan(plan, eligible)
        plan = dataclasses.replace(plan, budget_bytes=budget_bytes)
        if plan.predicted_allocated_bytes is None or plan.predicted_reserved_bytes is None:
            return plan
        held = Held.on(eligible.hardware, plan.predicted_allocated_bytes, plan.predicted_reserved_bytes, plan.allocator)
        return held.written_in(plan) if eligible.has_room_for(held) else None

    def write(self, plan: Plan) -> None:
        """Keep a plan where that is possible; one that cannot be kept is made again."""
        made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            content = {"format": _FORMAT, "key": self._path.stem, "made": made, "plan": _json.encode(plan)}
            write_json(self._path, {**content, "digest": _digest(content["plan"])})
            _drop_oldest(self._path.parent)
        except OSError as error:
            logger.debug("the plan cannot be kept in %s: %s", self._path, str(error))


def _plan_in(content: dict[str, Any], key: str) -> Plan:
    """The plan in a file for this key, as it was written; raises `MemScaleError` or `ValueError` for anything else.

    A file that was changed may still be a plan: one that names other modules, or that promises what it does not keep.
    """
    if content.get("format") != _FORMAT or content.get("key") != key:
        raise ValueError("it was written by another version")
    if content.get("digest") != _digest(content.get("plan")):
        raise ValueError("it is not as it was written")
    return Plan.from_json(_json.dumps(content["plan"]))


def _digest(plan: object) -> str:
    return hashlib.sha256(_json.dumps(plan).encode()).hexdigest()


def slot_for(job: Job, inputs: Inputs) -> PlanSlot | None:
    """Where the plan of this job for this batch is, or would be. None where plans are not kept."""
    if not is_enabled():
        return None
    try:
        return PlanSlot(job, plan_dir() / f"{fingerprint(job, inputs)}.json")
    except (NoFingerprintError, RuntimeError) as error:
        logger.debug("plans of this model are not kept: %s", str(error))
        return None


def is_enabled() -> bool:
    return os.environ.get("MEMSCALE_CACHE", "1") != "0"


def plan_dir() -> pathlib.Path:
    return cache_dir() / "plans"


@dataclasses.dataclass(frozen=True, slots=True)
class KeptPlan:
    """One line of `memscale cache`."""

    file_name: str
    num_bytes: int
    made: str
    plan: Plan | None
    """None: it cannot be read."""


def kept_plans() -> Iterator[KeptPlan]:
    """The newest first."""
    for path, found in reversed(_files(plan_dir())):
        content: dict[str, Any] = read_json(path)
        if not content and not os.path.lexists(path):
            continue  # another process has just deleted it
        try:
            plan = _plan_in(content, path.stem)
        except (MemScaleError, ValueError):
            plan = None
        yield KeptPlan(path.name, found.st_size, str(content.get("made", "")), plan)


def clear() -> int:
    """Delete what is kept; how many files that were. What others have put there stays."""
    files = _files(plan_dir())
    for path, _ in files:
        path.unlink(missing_ok=True)
    return len(files)


def _files(directory: pathlib.Path) -> list[tuple[pathlib.Path, os.stat_result]]:
    """The files of kept plans, the oldest first; those that another process has just deleted are left out."""
    found = []
    with contextlib.suppress(OSError):  # there is no such directory, or it is not ours
        for path in directory.iterdir():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    found.append((path, path.lstat()))
    return sorted(found, key=lambda each: (each[1].st_mtime_ns, each[0].name))


def _drop_oldest(directory: pathlib.Path) -> None:
    for path, _ in _files(directory)[:-_MAX_PLANS]:
        path.unlink(missing_ok=True)
