"""Building: cached, private, and clear about what is missing."""

import subprocess

import pytest

from emucuda import _build, _stubs
from emucuda._libraries import LIBRARIES


def test_the_stand_ins_are_built_once_under_their_real_names():
    made = _build.libraries()
    assert [path.name for path in made] == [library.soname for library in LIBRARIES]
    times = [path.stat().st_mtime_ns for path in made]
    assert [path.stat().st_mtime_ns for path in _build.libraries()] == times


def test_a_cache_that_others_can_write_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("EMUCUDA_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(_build.BuildError, match="chmod 700"):
        _build.libraries()


def test_a_new_cache_is_private(tmp_path):
    made = _build._private(tmp_path / "a" / "cache")
    assert made.stat().st_mode & 0o777 == 0o700


def test_the_cache_directory_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("EMUCUDA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert _build._cache_root() == tmp_path / "own"
    monkeypatch.delenv("EMUCUDA_CACHE_DIR")
    assert _build._cache_root() == tmp_path / "caches" / "emucuda"


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(_build.BuildError, match="needs the compiler 'no-such-compiler'"):
        _build.libraries()


def test_a_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(_build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(_build.BuildError, match=r"pip install 'torch===2\.13\.0'"):
        _build._site()


def test_a_source_that_does_not_compile_is_named(tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++")
    with pytest.raises(_build.BuildError, match=r"broken\.cpp"):
        _build._run(["-c", str(broken), "-o", str(tmp_path / "broken.o")])


def test_every_function_of_the_real_libraries_is_answered_for():
    nvidia, _ = _build._site()
    for library, made in zip(LIBRARIES, _build.libraries(), strict=True):
        if library.real is not None:
            assert _stubs.exported(nvidia / library.real) <= _stubs.exported(made), library.soname


def test_torch_finds_its_symbols_under_their_versions():
    made = {path.name: path for path in _build.libraries()}
    text = subprocess.run(["nm", "-D", made["libcudart.so.13"]], capture_output=True, text=True, check=True).stdout
    assert "cudaMalloc@@libcudart.so.13" in text


def test_declarations_are_read_from_a_header():
    header = """
    /* cusolverStatus_t CUSOLVERAPI old(int a); */
    cusolverStatus_t CUSOLVERAPI cusolverDnSgetrf(
      cusolverDnHandle_t handle, int m, const float *A, float alpha, int *devInfo[]); // the end
    """
    assert _stubs.declarations(header) == {
        "cusolverDnSgetrf": (
            ("cusolverDnHandle_t", "handle"),
            ("int", "m"),
            ("float *", "A"),
            ("float", "alpha"),
            ("int *", "devInfo"),
        )
    }


def test_a_stub_leaves_out_what_comes_in_floating_point_registers():
    solver = next(library for library in LIBRARIES if library.soname == "libcusolver.so.12")
    parameters = (("cusolverDnHandle_t", "handle"), ("float", "alpha"), ("int *", "devInfo"))
    text = _stubs.source(solver, {"cusolverDnSgetrf", "cusolverUnheardOf"}, {"cusolverDnSgetrf": parameters})
    body = 'return succeed(p2, 1), launch_on(p0, "cusolverDnSgetrf");'
    assert f"int cusolverDnSgetrf(void* p0, void* p2) {{ {body} }}" in text
    assert 'int cusolverUnheardOf() { return missing("cusolverUnheardOf", 9); }' in text
