"""What a plan rests on, as one hash: equal hashes mean that planning would give an equal plan.

NOTE [what counts]: the code that runs (every loaded file that belongs to no installed package, and the versions of the
packages), the model as an object graph (classes, attributes, hooks, shapes, values of integers; not the weights), the
form of the batch, the optimizer, the wishes, the figures of the hardware, and PyTorch's own switches. What is free at
the moment is left out: a plan that is found is held against it (`plan_cache.py`). Whatever cannot be described without
doubt (code without a file, as in a notebook) has no fingerprint, and is planned anew every time.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from memscale._decide.policy.learned import used_for
from memscale._execute.reserving import settings_in_force
from memscale._planning.job import Job
from memscale._planning.reserved.found_memory import find_workspaces
from memscale._profile.inputs import Inputs
from memscale._torch import private
from memscale._torch.overrides import OWN_ATTRIBUTES, OwnHook

_MAX_OBJECTS = 200_000
"""The most objects that are looked at in one model. A model with more holds something else: a dataset, a trainer."""
_PACKAGE = pathlib.Path(__file__).resolve().parents[2]
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NAMED = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_PASSING_FIELDS = ("free_bytes", "host_available_bytes", "disk_free_bytes")
"""Fields of `Hardware` that say what is free now, which differs from start to start."""
_PASSING_OPTIONS = ("params", "lr", "initial_lr")
"""Options of an optimizer's group that memory does not depend on, and that a schedule changes."""


class NoFingerprintError(Exception):
    """This cannot be described without doubt; says why."""


def fingerprint(job: Job, inputs: Inputs) -> str:
    """The fingerprint of planning this job for this batch, before anything is attached to the model."""
    describe = _Description()
    describe.add("code", *_code_of(job.model))
    describe.add("model", job.model)
    describe.add("inputs", *_form_of(inputs))
    for optimizer in (job.optimizer, job.replacement):
        describe.add("optimizer", *_optimizer_of(optimizer, job.model))
    describe.add("wishes", job.config, used_for(job.config), job.holds_gradients, job.ranks, job.loop)
    figures = {f.name: getattr(job.hardware, f.name) for f in dataclasses.fields(job.hardware)}
    describe.add("hardware", {name: figure for name, figure in figures.items() if name not in _PASSING_FIELDS})
    describe.add("process", *_switches())
    describe.add("workspaces", _workspaces(job, inputs))
    return describe.hash.hexdigest()


# ---- code


def _code_of(model: nn.Module) -> Iterator[Any]:
    """Files of the user's own code; of packages the version, and the state of the files that the model is from."""
    yield sys.version_info[:3], torch.version.__version__
    for path in sorted(_own_files()):
        yield str(path), _hash_of_file(path)
    for name in sorted({type(module).__module__ for module in model.modules()}):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is None:
            raise NoFingerprintError(f"a class of the model was defined in {name}, which has no file")
        if _is_installed(pathlib.Path(file).resolve()):
            state, package = os.stat(file), sys.modules.get(name.partition(".")[0])
            yield name, str(getattr(package, "__version__", "")), state.st_size, state.st_mtime_ns


def _own_files() -> set[pathlib.Path]:
    """The files of loaded modules that belong to no installed package; and MemScale's, which loads parts of itself
    later."""
    files = [vars(m).get("__file__") for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]
    loaded = {os.path.abspath(file) for file in files if isinstance(file, str) and file.endswith(".py")}
    own = {file for file in loaded if os.path.islink(file) or not _is_installed_folder(os.path.dirname(file))}
    paths = {pathlib.Path(file).resolve() for file in own}
    return {path for path in paths if not _is_installed(path)} | set(_PACKAGE.rglob("*.py"))


@functools.cache
def _is_installed_folder(folder: str) -> bool:
    """Thousands of modules are loaded from a few hundred folders: following links takes long, and is done for these."""
    return _is_installed(pathlib.Path(folder).resolve() / "module.py")


def _is_installed(path: pathlib.Path) -> bool:
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _library_dirs())


def _is_installed_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or _is_installed_file(file)


@functools.cache
def _is_installed_file(file: str) -> bool:
    return _is_installed(pathlib.Path(file).resolve())


@functools.cache
def _library_dirs() -> tuple[pathlib.Path, ...]:
    return tuple(pathlib.Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


def _hash_of_file(path: pathlib.Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise NoFingerprintError(f"the code in {path} cannot be read: {error}") from error


# ---- batch, optimizer, process


def _form_of(inputs: Inputs) -> Iterator[Any]:
    """Shapes and types of tensors, and what else is given. Values of tensors count where a plan says that they do."""
    leaves, structure = tree_flatten((inputs.args, inputs.kwargs))
    yield str(structure)
    for leaf in leaves:
        yield _form_of_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _form_of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return kind, tuple(tensor.shape), strides, str(tensor.dtype), tensor.device.type, tensor.requires_grad


def _optimizer_of(optimizer: str | Optimizer | None, model: nn.Module) -> Iterator[Any]:
    if not isinstance(optimizer, Optimizer):
        yield optimizer
        return
    yield type(optimizer)
    yield _settings_of(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        yield {name: option for name, option in group.items() if name not in _PASSING_OPTIONS}
        yield isinstance(group.get("lr"), torch.Tensor)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            forms = {n: _form_of_tensor(v) if isinstance(v, torch.Tensor) else type(v) for n, v in state.items()}
            yield names.get(id(parameter), _form_of_tensor(parameter)), forms


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """What it keeps beside its groups: bitsandbytes has its number of bits in an object of options."""
    found: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        holder = {"": value} if isinstance(value, _PLAIN) else getattr(value, "__dict__", {})
        found.update((f"{name}.{part}", each) for part, each in holder.items() if isinstance(each, _PLAIN))
    return found


def _switches() -> Iterator[Any]:
    """The switches of this process that decide which kernels run and what they keep."""
    yield torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    # PyTorch 2.9 warns of the function that returns both of these as one.
    backends: tuple[Any, ...] = (torch.backends.cuda, torch.backends.mkldnn)
    yield [backend.matmul.fp32_precision for backend in backends]
    yield torch.is_autocast_enabled("cpu")
    attention = torch.backends.cuda
    yield attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled()
    yield attention.cudnn_sdp_enabled(), torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    yield None if accelerator is None else torch.is_autocast_enabled(accelerator.type)
    settings = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
    yield [*(os.environ.get(name) for name in settings), settings_in_force()]  # or as another model's plan has set it


def _workspaces(job: Job, inputs: Inputs) -> list[tuple[int, list[int]]]:
    """What products of matrices before the plan keep of the card; see NOTE [workspaces stay]."""
    hardware, found = job.hardware, None
    if hardware.present:
        found = find_workspaces(job.model, inputs, hardware.device_type, hardware.workspace_bytes)
    return found.form() if found is not None else []


# ---- objects


class _Description:
    """Feeds a hash with a graph of objects. What was met before is named by its place, so shared and circular
    references count, and end."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []
        """What was met stays alive while it is described: a place belongs to one object only."""

    def add(self, *values: Any) -> None:
        for value in values:
            self._add(value)

    def _write(self, *words: Any) -> None:
        self.hash.update(repr(words).encode())

    def _add(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._write(type(value).__name__, value)
        elif isinstance(value, _NAMED):
            self._write("named", str(value))
        elif isinstance(value, enum.Enum):
            self._write("enum", _name_of(type(value)), value.name)
        elif isinstance(value, type):
            self._write("class", _name_of(value))
        elif id(value) in self._places:
            self._write("again", self._places[id(value)])
        else:
            self._places[id(value)] = len(self._places)
            self._kept.append(value)
            if len(self._places) > _MAX_OBJECTS:
                raise NoFingerprintError(f"the model holds more than {_MAX_OBJECTS:,} objects")
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        self._write("object", _name_of(type(value)))
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, nn.Module):
            self._add_module(value)
        elif isinstance(value, Mapping):
            self._write(len(value))
            self.add(*(part for pair in value.items() for part in pair))
        elif isinstance(value, list | tuple):
            self._write(len(value))
            self.add(*value)
        elif isinstance(value, set | frozenset):
            self._write(sorted(map(_hash_alone, value)))
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self.add(value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self.add(value.func, value.args, value.keywords)
        elif isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            self._write(value.__name__)
        else:
            self.add(*_attributes_of(value))

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        """The form of a tensor; of integers the values, too, which may decide where a step goes."""
        self.add(_form_of_tensor(tensor), isinstance(tensor, nn.Parameter))
        has_values = not private.is_fake(tensor) and tensor.device.type != "meta" and tensor.layout is torch.strided
        if has_values and not tensor.is_floating_point() and not tensor.is_complex() and not tensor.is_quantized:
            self.hash.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def _add_module(self, module: nn.Module) -> None:
        """All that is in a module and in classes of the user's own, but what MemScale has put there."""
        for kind in type(module).__mro__:
            if not _is_installed_class(kind):
                self._add_class(kind)
        for name, value in sorted(vars(module).items()):
            if name not in OWN_ATTRIBUTES or name == "forward":
                self._write(name)
                self._add(_of_hooks(module, name, value) if "_hooks" in name and isinstance(value, Mapping) else value)

    def _add_class(self, kind: type) -> None:
        """What a class has that its file does not say: what its functions close over, and values set later."""
        if id(kind) in self._places:
            return
        self._places[id(kind)] = len(self._places)
        for name, value in sorted(vars(kind).items()):
            value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            is_told = isinstance(value, (types.FunctionType, *_PLAIN))
            if is_told and (name == "__init__" or not name.startswith("__")):
                self._write(name)
                self._add(value)

    def _add_function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._write(function.__module__, function.__qualname__, code.co_code, code.co_names)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        self.add(function.__defaults__, function.__kwdefaults__, *cells)


def _of_hooks(module: nn.Module, name: str, table: Mapping[int, Any]) -> list[Any]:
    """Hooks that are not ours, or what a table such as `_forward_pre_hooks_with_kwargs` says of each, in their order.

    The keys are left out: they are numbers that count all hooks that the process has ever had.
    """
    hooks = vars(module).get(name[: name.index("_hooks") + len("_hooks")], table)
    return [table.get(number) for number, hook in hooks.items() if not isinstance(hook, OwnHook)]


def _attributes_of(value: Any) -> Iterator[Any]:
    """The attributes of any object, by name; an object of C without attributes is known by its class alone."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    for name, attribute in sorted(found.items()):
        if not name.endswith("hash"):  # Python's own differ from process to process
            yield name
            yield attribute


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


def _hash_alone(value: Any) -> str:
    """The hash of a member of a set, which has no order."""
    alone = _Description()
    alone.add(value)
    return alone.hash.hexdigest()


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
