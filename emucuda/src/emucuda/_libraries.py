"""Which libraries of NVIDIA are stood in for, from which sources, and what answers for functions that nobody wrote.

See NOTE [never silently] in csrc/card.h: a function of the real library that is neither written in C++ nor covered by a
rule below fails with its name.
"""

import dataclasses
import re
from collections.abc import Callable

Parameters = tuple[tuple[str, str], ...]
"""(type, name) of each parameter, as the library's header declares them."""

Rule = Callable[[str, Parameters], "str | None"]
"""A C++ expression over the parameters `p0`, `p1`, ... that answers for a function; None: the function is missing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    soname: str
    sources: tuple[str, ...]
    real: str | None
    """Where the real library is in the `nvidia` package. None: a part of the driver, which is not installed."""
    headers: tuple[str, ...] = ()
    """Whose declarations the rule needs."""
    not_supported: int = 0
    """The status that says so in this library's own enumeration."""
    rule: Rule = lambda name, parameters: None


def _index(parameters: Parameters, *names: str) -> int | None:
    return next((i for i, (_, name) in enumerate(parameters) if name in names), None)


def _launch(name: str, parameters: Parameters) -> str:
    """A launch on the handle's stream; it writes the integers that report success. See NOTE [info] in handles.h."""
    batch = _index(parameters, "batchSize", "batchCount")
    is_array = _ARRAY_OF_INFO.search(name) is not None
    calls = []
    for i, (_, parameter) in enumerate(parameters):
        if parameter in ("infoArray", "devInfoArray") or (is_array and parameter == "info"):
            calls.append(f"succeed(p{i}, long(p{batch}))")
        elif parameter in ("info", "devInfo", "d_info"):
            calls.append(f"succeed(p{i}, 1)")
    return ", ".join([*calls, f'launch_on(p0, "{name}")'])


_ARRAY_OF_INFO = re.compile(r"(getrf|getri|matinv|gesvdj|syevj|heevj|syev|gesvdaStrided)Batched")
"""Where `info` is an integer for every matrix of the batch; elsewhere it is one integer, often of the host."""


def _cublas(name: str, parameters: Parameters) -> str | None:
    if not parameters or parameters[0][0] != "cublasHandle_t" or re.match(r"cublas(Get|Set|Create|Destroy)", name):
        return None
    return _launch(name, parameters)


_SPECTRAL = re.compile(r"gesvd|syev|heev|geev|gesvda")


def _cusolver(name: str, parameters: Parameters) -> str | None:
    if re.match(r"cusolverDnCreate\w+", name):
        return "make_opaque(p0)"
    if re.match(r"cusolverDn(Destroy\w+|X?\w*Set\w+)", name):
        return "0"
    if not parameters or parameters[0][0] != "cusolverDnHandle_t":
        return None
    if not name.endswith("_bufferSize"):
        return _launch(name, parameters)
    columns = _index(parameters, "n")
    rows = _index(parameters, "m")
    rows = columns if rows is None else rows
    elements, device = _index(parameters, "lwork", "Lwork"), _index(parameters, "workspaceInBytesOnDevice")
    host = _index(parameters, "workspaceInBytesOnHost")
    spectral = "true" if _SPECTRAL.search(name) else "false"
    if elements is not None and columns is not None:
        return f"answer_elements(p{elements}, long(p{rows}), long(p{columns}), {spectral})"
    if device is not None and columns is not None:
        there = f"p{host}" if host is not None else "nullptr"
        return f"answer_bytes(p{device}, {there}, long(p{rows}), long(p{columns}), {spectral})"
    return None


LIBRARIES = (
    Library(
        soname="libcuda.so.1",
        sources=("card.cpp", "memory.cpp", "order.cpp", "kernels.cpp", "control.cpp", "driver.cpp"),
        real=None,
        headers=("cuda.h",),
        not_supported=801,
    ),
    Library(soname="libnvidia-ml.so.1", sources=("nvml.cpp",), real=None),
    Library(soname="libcudart.so.13", sources=("runtime.cpp",), real="cu13/lib/libcudart.so.13", not_supported=801),
    Library(soname="libcublasLt.so.13", sources=("cublaslt.cpp",), real="cu13/lib/libcublasLt.so.13", not_supported=15),
    Library(
        soname="libcublas.so.13",
        sources=("cublas.cpp",),
        real="cu13/lib/libcublas.so.13",
        headers=("cu13/include/cublas_api.h",),
        not_supported=15,
        rule=_cublas,
    ),
    Library(
        soname="libcudnn.so.9",
        sources=("cudnn.cpp", "cudnn_graph.cpp", "cudnn_rnn.cpp"),
        real="cudnn/lib/libcudnn.so.9",
        not_supported=3000,
    ),
    Library(
        soname="libcusolver.so.12",
        sources=("cusolver.cpp",),
        real="cu13/lib/libcusolver.so.12",
        headers=("cu13/include/cusolverDn.h",),
        not_supported=9,
        rule=_cusolver,
    ),
    Library(soname="libcusparse.so.12", sources=("cusparse.cpp",), real="cu13/lib/libcusparse.so.12", not_supported=10),
    Library(soname="libcufft.so.12", sources=("cufft.cpp",), real="cu13/lib/libcufft.so.12", not_supported=16),
)
