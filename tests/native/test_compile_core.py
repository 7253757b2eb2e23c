"""Building the core: the same file every time, with any compiler, and with a wheel's where there is none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.native.building import NATIVE, compile_core

from collectived_native.loading import BESIDE

ROOT = NATIVE.parent
HAS_COMPILER = bool(compile_core.find_compiler())

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler is installed here")


@needs_compiler
@pytest.mark.skipif("COLLECTIVED_NATIVE" in os.environ, reason="the core was built elsewhere")
@pytest.mark.timeout(300)
def test_the_same_sources_give_the_same_file_as_make_native(tmp_path: Path) -> None:
    again = tmp_path / "again.so"
    compile_core.compile_core(again)
    assert again.read_bytes() == BESIDE.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.so"]  # nothing is left behind


@needs_compiler
def test_a_build_that_fails_leaves_the_core_that_was_there(tmp_path: Path) -> None:
    target = tmp_path / "core.so"
    target.write_text("what was there")
    with pytest.raises(subprocess.CalledProcessError):
        compile_core.compile_core(target, flags=("-fno-such-flag",))
    assert target.read_text() == "what was there" and [*tmp_path.iterdir()] == [target]


def test_the_compiler_that_is_named_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "ccache my-cc -m64")
    assert compile_core.choose_compiler() == ["ccache", "my-cc", "-m64"]


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is not None, reason="ziglang is installed here")
def test_without_any_compiler_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(compile_core.CompilerMissingError, match=r"needs a C compiler .* pip install 'ziglang"):
        compile_core.choose_compiler()
    with pytest.raises(compile_core.CompilerMissingError, match="for aarch64"):
        compile_core.choose_compiler("aarch64")


@pytest.mark.skipif("COLLECTIVED_TEST_WHEELS" not in os.environ, reason="takes a minute: make wheels")
@pytest.mark.timeout(400)
def test_where_no_compiler_is_installed_pip_makes_a_wheel_whose_core_folds_the_same_bits(tmp_path: Path) -> None:
    """For real: no compiler on the path, pip brings Zig's for the build, and another process loads what came of it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    found = subprocess.run(
        [*pip, "download", "--no-deps", "--dest", str(tmp_path / "zig"), compile_core.ZIG],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip(f"ziglang cannot be installed here: {found.stderr.strip().splitlines()[-1]}")
    bare = {name: value for name, value in os.environ.items() if name not in ("CC", "COLLECTIVED_NATIVE")}
    bare |= {
        "PATH": str(tmp_path / "nothing"),
        "PIP_FIND_LINKS": f"{tmp_path / 'zig'} {os.environ.get('PIP_FIND_LINKS', '')}",
    }
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], env=bare, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp311-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extract("collectived_native/_core.abi3.so", tmp_path)
    assert not [name for name in names if name.endswith((".c", ".h"))]
    tests = ["tests/native/test_arithmetic.py", "-k", "numpy_path or cuts"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=os.environ | {"COLLECTIVED_NATIVE": str(tmp_path / "collectived_native/_core.abi3.so")},
        check=True,
    )
