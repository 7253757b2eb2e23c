"""The header of our own says what Python.h says."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from tests.native.building import compile_core

HEADER = compile_core.PACKAGE / "src" / "stable_abi.h"
INCLUDE = Path(sysconfig.get_path("include"))

STRUCTURES = {
    "PyMethodDef": ("ml_name", "ml_meth", "ml_flags", "ml_doc"),
    "PyModuleDef_Slot": ("slot", "value"),
    "PyModuleDef": ("m_base", "m_name", "m_doc", "m_size", "m_methods", "m_slots", "m_traverse", "m_clear", "m_free"),
    "Py_buffer": (
        "buf",
        "obj",
        "len",
        "itemsize",
        "readonly",
        "ndim",
        "format",
        "shape",
        "strides",
        "suboffsets",
        "internal",
    ),
    "PyObject": ("ob_refcnt", "ob_type"),
    "PyType_Slot": ("slot", "pfunc"),
    "PyType_Spec": ("name", "basicsize", "itemsize", "flags", "slots"),
}
CONSTANTS = re.compile(r"\b((?:METH|PyBUF|Py_mod|Py_TPFLAGS|Py_tp)_\w+|Py_EQ) = ")


def describe(includes: str, folder: Path) -> str:
    """Compile and run a program that prints sizes, offsets and constants as that header has them."""
    constants = sorted(set(CONSTANTS.findall(HEADER.read_text())))
    structures = {
        name: fields for name, fields in STRUCTURES.items() if re.search(rf"\b{name};|{name} \{{", HEADER.read_text())
    }
    lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in structures]
    lines += [
        f'printf("{name}.{one} %zu\\n", offsetof({name}, {one}));'
        for name, fields in structures.items()
        for one in fields
    ]
    lines += [f'printf("{name} %lld\\n", (long long){name});' for name in constants]
    program = (
        f"{includes}\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n"
        + "\n".join(lines)
        + "\nreturn 0;}\n"
    )
    source = folder / "describe.c"
    source.write_text(program)
    subprocess.run(
        [*compile_core.find_compiler(), "-std=c11", "-w", str(source), "-o", str(folder / "describe")], check=True
    )
    return subprocess.run([folder / "describe"], check=True, capture_output=True, text=True).stdout


needs_headers = pytest.mark.skipif(
    not (INCLUDE / "Python.h").exists() or not compile_core.find_compiler(),
    reason=f"no Python.h in {INCLUDE}, or no C compiler, to compare with",
)


@needs_headers
def test_structures_and_constants_are_those_of_python_h(tmp_path: Path) -> None:
    ours = describe(f'#include "{HEADER}"', tmp_path)
    theirs = describe(f'#define Py_LIMITED_API 0x030B0000\n#include "{INCLUDE}/Python.h"', tmp_path)
    assert ours == theirs
    assert len(ours.splitlines()) > 30


@needs_headers
def test_functions_have_the_types_that_python_h_gives_them(tmp_path: Path) -> None:
    """Both declare each function in one file: a compiler takes that only where the types agree."""
    declarations = re.findall(r"^STABLE (\w[^;]*?\bPy\w+\([^;]*\));", HEADER.read_text(), re.MULTILINE | re.DOTALL)
    assert len(declarations) > 25
    source = tmp_path / "both.c"
    source.write_text(
        f'#define Py_LIMITED_API 0x030B0000\n#include "{INCLUDE}/Python.h"\n'
        + "".join(f"extern {declaration};\n" for declaration in declarations)
    )
    subprocess.run([*compile_core.find_compiler(), "-std=c11", "-fsyntax-only", str(source)], check=True)
