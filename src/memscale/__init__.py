"""MemScale: a drop-in memory optimizer for PyTorch training.

    model = memscale.wrap(model)      # and the training loop stays as it was

    wrap / optimize                                      _api.py        the verbs; _planning/ runs these stages
       |
       v
    profile_model(model, sample)   -> Profile            _profile/      what each layer costs
    Hardware.detect(device)        -> Hardware           _hardware/     what there is to spend
    resolve(config, hardware)      -> Eligible           _decide/       what of the wishes can be followed there
    choose_strategy(eligible, ...) -> Strategy           _decide/policy stage 1: which techniques may be used
    decide(profile, eligible, ...) -> Plan               _decide/       stage 2: pure, deterministic, explained
    execute(model, plan)           -> Executor           _execute/      attaches hooks, owns the undo stack

The rooms beside these: `techniques/` holds what a plan can do to a model, a file or a folder each, and the table of
their records, over which every stage iterates (docs/design/add_a_technique.md); `_torch/` is what lies below them;
`report/` turns data into words; `integrations/` knows other libraries; `_config.py` and `_plan.py` are data. Beside the
rooms lie `cli.py` (the options of the command line) and `commands/` (what each command does), `zoo.py` (models by
name), `_measurement.py` (`measure()`), and what every room may use: `_errors.py`, `_units.py`, `_json.py`,
`_progress.py`.

Only frozen data crosses between the stages. Importing this package does no work: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memscale._api import (
        apply_all_optimizations as apply_all_optimizations,
    )
    from memscale._api import detach as detach
    from memscale._api import execute as execute
    from memscale._api import executor_of as executor_of
    from memscale._api import optimize as optimize
    from memscale._api import park as park
    from memscale._api import parked as parked
    from memscale._api import resume as resume
    from memscale._api import wrap as wrap
    from memscale._config import AsyncOffloadConfig as AsyncOffloadConfig
    from memscale._config import Config as Config
    from memscale._config import OptimizationMode as OptimizationMode
    from memscale._errors import ChecksumError as ChecksumError
    from memscale._errors import ConfigError as ConfigError
    from memscale._errors import DoesNotFitError as DoesNotFitError
    from memscale._errors import MemScaleError as MemScaleError
    from memscale._errors import OffloadError as OffloadError
    from memscale._errors import ParkedError as ParkedError
    from memscale._errors import PartialStepError as PartialStepError
    from memscale._errors import PlanError as PlanError
    from memscale._errors import ProfileError as ProfileError
    from memscale._errors import StaticProfileError as StaticProfileError
    from memscale._errors import StepInBackwardError as StepInBackwardError
    from memscale._errors import StoreFullError as StoreFullError
    from memscale._errors import StoreIOError as StoreIOError
    from memscale._errors import UnknownModelError as UnknownModelError
    from memscale._errors import VerificationError as VerificationError
    from memscale._execute.executor import Executor as Executor
    from memscale._hardware import Hardware as Hardware
    from memscale._measurement import Measurement as Measurement
    from memscale._measurement import measure as measure
    from memscale._plan import Plan as Plan
    from memscale._planning.questions.estimate import Estimate as Estimate
    from memscale._planning.questions.estimate import estimate as estimate

__version__ = "0.3.0"

_HOME_OF = {
    "wrap": "_api",
    "optimize": "_api",
    "detach": "_api",
    "execute": "_api",
    "executor_of": "_api",
    "apply_all_optimizations": "_api",
    "park": "_api",
    "resume": "_api",
    "parked": "_api",
    "estimate": "_planning.questions.estimate",
    "Estimate": "_planning.questions.estimate",
    "measure": "_measurement",
    "Measurement": "_measurement",
    "Config": "_config",
    "OptimizationMode": "_config",
    "AsyncOffloadConfig": "_config",
    "Hardware": "_hardware",
    "Plan": "_plan",
    "Executor": "_execute.executor",
    "MemScaleError": "_errors",
    "ConfigError": "_errors",
    "DoesNotFitError": "_errors",
    "PlanError": "_errors",
    "ProfileError": "_errors",
    "UnknownModelError": "_errors",
    "ChecksumError": "_errors",
    "OffloadError": "_errors",
    "ParkedError": "_errors",
    "PartialStepError": "_errors",
    "StaticProfileError": "_errors",
    "StepInBackwardError": "_errors",
    "StoreFullError": "_errors",
    "StoreIOError": "_errors",
    "VerificationError": "_errors",
}

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'memscale' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"memscale.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
