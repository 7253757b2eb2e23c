"""Compile the native core: one shared object from all C files, with the compiler that is here.

`python native/compile_core.py` builds it in place, as `make native` does; the hook of the wheel calls `compile_core`.
Any C11 compiler will do; where there is none, Zig's, which is a wheel (`pip install ziglang`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parent / "collectived_native"
MODULE = "_core.abi3.so"
ARCHITECTURES = ("x86_64", "aarch64")
ZIG = "ziglang>=0.15,<0.18"
GLIBC = "2.28"  # zig links against it: manylinux_2_28

# No contraction and no fast math: a sum must have the same bits with every compiler. No -march: the core is copied to
# other processors; arithmetic.c chooses at run time which instructions this one has.
FLAGS = (
    "-std=c11",
    "-O3",
    "-fno-math-errno",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
    "-shared",
)
STRICT = ("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wvla", "-Werror")


class CompilerMissingError(RuntimeError):
    """There is no C compiler, nor the wheel that brings one."""


def find_compiler() -> list[str]:
    """Return the command of the C compiler that is installed, or an empty list."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named
    return next(([found] for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), [])


def choose_compiler(architecture: str = "") -> list[str]:
    """Return the command that compiles for this machine, or, for a release, for the architecture that is named.

    Raises:
        CompilerMissingError: there is none.
    """
    if not architecture and (found := find_compiler()):
        return found
    if importlib.util.find_spec("ziglang"):
        libc = f"gnu.{GLIBC}" if architecture or platform.libc_ver()[0] == "glibc" else "musl"
        # A zig of a release adds checks of undefined behaviour that need its own runtime.
        return [
            *(sys.executable, "-m", "ziglang", "cc"),
            *("-target", f"{architecture or platform.machine()}-linux-{libc}", "-mcpu=baseline"),
            "-fno-sanitize=undefined",
        ]
    which = f"for {architecture}" if architecture else "($CC, cc, gcc or clang)"
    raise CompilerMissingError(f"the native core needs a C compiler {which}: install one, or: pip install '{ZIG}'")


def compile_core(target: Path, *, architecture: str = "", flags: tuple[str, ...] = (), is_strict: bool = False) -> None:
    """Compile the core to `target`, which appears whole or not at all.

    Args:
        target: the file to make.
        architecture: for which one, by Zig and against an old C library, as for a release; '' for this machine.
        flags: instead of those that strip the file and make it the same every time.
        is_strict: every warning is an error.

    Raises:
        CompilerMissingError: there is no compiler.
        subprocess.CalledProcessError: the compiler failed; its messages are on stderr.
    """
    target = target.absolute()
    sources = runpy.run_path(str(PACKAGE / "sources.py"))
    names = [path.name for path in sources["list_sources"]() if path.suffix == ".c"]
    # Stripped, without an identity of the build, from relative names: the same sources give the same file.
    links = ("-s", "-Wl,--build-id=none", "-Wl,-z,relro,-z,now")
    digest = f'-DSOURCE_DIGEST="{sources["digest_sources"]()}"'
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".core-") as folder:
        made = Path(folder) / target.name
        # Zig keeps what it made of its own sources: within the folder that goes away again.
        environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        command = [
            *choose_compiler(architecture),
            *FLAGS,
            *(STRICT if is_strict else ()),
            *(flags or links),
            digest,
            *names,
            "-o",
            str(made),
        ]
        subprocess.run(command, cwd=PACKAGE / "src", env=environment, check=True)
        made.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the native core of collectived in place.")
    parser.add_argument("--strict", action="store_true", help="take every warning of the compiler for an error")
    parser.add_argument("--sanitize", metavar="KINDS", help="build with these sanitizers: address,undefined or thread")
    parser.add_argument(
        "--output", type=Path, default=PACKAGE / MODULE, metavar="FILE", help="where it goes (%(default)s)"
    )
    parser.add_argument("--zig", action="store_true", help="say which wheel brings a compiler where there is none")
    options = parser.parse_args()
    if options.zig:
        print(ZIG)
        return
    flags: tuple[str, ...] = ()
    if options.sanitize:
        flags = (f"-fsanitize={options.sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    compile_core(options.output, flags=flags, is_strict=options.strict)


if __name__ == "__main__":
    main()
