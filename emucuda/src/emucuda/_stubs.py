"""Writes what answers for the functions of a real library that our sources do not define.

NOTE [parameters by register]: a stub takes its parameters as pointers, whatever they are, and leaves out those that are
passed by value in floating point registers. The calling conventions of Linux on x86-64 and aarch64 hand over integers
and pointers in one sequence and floating point numbers in another, so the rest arrive where they are expected.
"""

import re
import subprocess
from pathlib import Path

from emucuda._libraries import Library, Parameters

_BY_VALUE = {"float", "double", "cuComplex", "cuDoubleComplex"}


def exported(library: Path) -> set[str]:
    """The functions that a shared library offers to others."""
    return _symbols("nm", "-D", "--defined-only", str(library))


def defined(objects: list[Path]) -> set[str]:
    """The functions that our object files define."""
    return _symbols("nm", "--defined-only", *map(str, objects))


def driver_functions(preprocessed: str) -> set[str]:
    """The functions that cuda.h declares, under the versioned names that programs link to."""
    return set(re.findall(r"\bCUresult\s+(cu\w+)\s*\(", preprocessed))


def declarations(header: str) -> dict[str, Parameters]:
    """The functions that a header declares: their parameters' types and names."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.DOTALL)
    found = re.findall(r"\bcu\w+Status_t\s+\w+\s+(\w+)\s*\(([^()]*)\)", text)
    return {name: tuple(_parameter(each) for each in inside.split(",") if each.strip()) for name, inside in found}


def source(library: Library, names: set[str], known: dict[str, Parameters]) -> str:
    """C++ source that defines the functions `names`."""
    lines = ['#include "handles.h"', "using namespace emucuda;", 'extern "C" {']
    lines += [_stub(library, name, known.get(name, ())) for name in sorted(names)]
    return "\n".join([*lines, "}", ""])


def version_script(soname: str) -> str:
    """NVIDIA's symbols carry the library's name as their version, and PyTorch asks for it."""
    return f"{soname} {{\n  global: cu*; __cuda*;\n  local: *;\n}};\n"


def _stub(library: Library, name: str, parameters: Parameters) -> str:
    answer = library.rule(name, parameters)
    if answer is None:
        return f'int {name}() {{ return missing("{name}", {library.not_supported}); }}'
    taken = ", ".join(f"void* p{i}" for i, (kind, _) in enumerate(parameters) if kind not in _BY_VALUE)
    return f"int {name}({taken}) {{ return {answer}; }}"


def _parameter(text: str) -> tuple[str, str]:
    words = re.sub(r"\[\d*\]", "", text).replace("*", " * ").split()
    kind = [word for word in words[:-1] if word != "const"]
    return " ".join(kind), words[-1]


def _symbols(*command: str) -> set[str]:
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = re.findall(r" [TWB] (\w+)", text)
    return {name for name in symbols if re.match(r"(__)?cu[a-z]*[A-Z]|cu[A-Z]|__cuda", name)}
