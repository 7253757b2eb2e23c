"""Build the image of the wheel in dist/, and run its command: `make image`.

With a container engine that runs (docker, podman or buildah) the Dockerfile is built. Without one its instructions are
carried out in a root file system in .image/rootfs, of Debian's packages by mmdebstrap (root; `apt-get install
mmdebstrap`), and the command runs in it under chroot. Both stages are carried out in this one. It has another Python
than the base image, and takes the packages of the lock from a folder, for it need not reach an index.
"""

from __future__ import annotations

import io
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
LOCK = ROOT / "deploy/docker/requirements.lock"
FOLDER = ROOT / ".image"
ROOTFS, DOWNLOADS = FOLDER / "rootfs", FOLDER / "wheels"
PROGRAM = "import collectived as cd; group = cd.connect().join(); print(group.all_reduce('sum', 1))"
PACKAGES = "python3,python3-venv,python-is-python3"  # Debian's packages for the content of the base image
_FROM_FOLDER = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
_SAYS_NOTHING_HERE = ("FROM", "EXPOSE", "HEALTHCHECK", "CMD")  # to a root file system


@dataclass(slots=True)
class Recipe:
    """The steps of a Dockerfile, in order, and how its command is run.

    Attributes:
        steps: ("COPY", folder, words) or ("RUN", folder, the shell's text); `folder` is where they are carried out.
    """

    steps: list[tuple[str, str, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    command: str = ""


def read_recipe(text: str) -> Recipe:
    """All stages as one. Pure.

    Raises:
        SystemExit: the Dockerfile has an instruction that this does not carry out.
    """
    parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
    made, folder = Recipe(), "/"
    for entry in parser.structure:
        match entry["instruction"], entry["value"]:
            case "WORKDIR", value:
                folder = value
            case ("RUN" | "COPY") as kind, value:
                if not value.startswith("--from="):
                    made.steps.append((kind, folder, value))
            case "ENV", value:
                made.environment |= dict(word.split("=", 1) for word in shlex.split(value))
            case "USER", value:
                made.user = value
            case "ENTRYPOINT", value:
                (made.command,) = re.findall(r'^\["([^"]+)"\]$', value)
            case kind, _ if kind not in (*_SAYS_NOTHING_HERE, "COMMENT"):
                raise SystemExit(f"{DOCKERFILE.name} has {kind}, which a root file system is not built by")
    return made


def find_wheel() -> Path:
    """The wheel of this architecture.

    Raises:
        SystemExit: there is none.
    """
    found = sorted((ROOT / "dist").glob(f"collectived-*_{platform.machine()}.whl"))
    if len(found) != 1:
        raise SystemExit(f"dist/ has {len(found)} wheels for {platform.machine()}, expected one: run `make wheels`")
    return found[0]


def find_engine() -> str | None:
    """A container engine that answers, not only its client."""
    for name in ("docker", "podman", "buildah"):
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True, check=False).returncode:
            return name
    return None


def build_with(engine: str, tag: str) -> None:
    """Build the Dockerfile, and run the command of the image."""
    verb = ["bud"] if engine == "buildah" else ["build"]
    run([engine, *verb, "--file", str(DOCKERFILE), "--tag", tag, str(ROOT)])
    if engine != "buildah":
        run([engine, "run", "--rm", tag, "--version"])
        run([engine, "run", "--rm", tag, "launch", "--clients", "2", "--", "python", "-c", PROGRAM])
    print(f"built {tag} with {engine}")


def build_rootfs() -> None:
    """Carry out the Dockerfile by Debian's tools; the content of the image lies in .image/rootfs."""
    if shutil.which("mmdebstrap") is None or os.geteuid() != 0:
        raise SystemExit("no container engine runs here; without one, root and mmdebstrap are needed")
    shutil.rmtree(FOLDER, ignore_errors=True)
    DOWNLOADS.mkdir(parents=True)
    run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(ROOTFS)])
    version = in_rootfs(["python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], {}).strip()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    download = ["download", "--only-binary", ":all:", "--python-version", version, "--require-hashes"]
    run([*pip, *download, "--requirement", str(LOCK), "--dest", str(DOWNLOADS)])
    shutil.copytree(DOWNLOADS, ROOTFS / "wheels")
    recipe = read_recipe(DOCKERFILE.read_text())
    for kind, folder, words in recipe.steps:
        (ROOTFS / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        if kind == "COPY":
            copy(words.split()[:-1], ROOTFS / folder.lstrip("/"), words.split()[-1])
        else:
            in_rootfs(["sh", "-c", f"cd {shlex.quote(folder)} && {words}"], _FROM_FOLDER)
    for rest in ("source", "wheels"):
        shutil.rmtree(ROOTFS / rest)
    for arguments in (["--version"], ["launch", "--clients", "2", "--", "python", "-c", PROGRAM]):
        print(in_rootfs([recipe.command, *arguments], recipe.environment, recipe.user), end="")
    print(
        f"no container engine runs here: {ROOTFS.relative_to(ROOT)} is of the Dockerfile's steps, and its command ran"
    )


def copy(sources: Iterable[str], folder: Path, target: str) -> None:
    """From the repository, as COPY does it with a file or folder and a name for it."""
    for source in sources:
        there = ROOTFS / target.lstrip("/") if target.startswith("/") else folder / target
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, there, ignore=shutil.ignore_patterns("*.tar.gz"))
        else:
            shutil.copy2(ROOT / source, there)


def in_rootfs(command: list[str], environment: dict[str, str], user: str = "") -> str:
    """Run a command in the root file system, as root or as that user. Return what it prints."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    words = {"HOME": "/tmp", **environment, "PATH": environment.get("PATH", path).replace("$PATH", path)}
    chroot = ["chroot", *([f"--userspec={user}"] if user else []), str(ROOTFS)]
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={ROOTFS}/proc"]
    settings = ["env", "-i", *(f"{name}={value}" for name, value in words.items())]
    done = subprocess.run([*isolated, *chroot, *settings, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed in the image:\n{done.stdout}{done.stderr}")
    return done.stdout


def run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"{' '.join(command)} failed")


def main() -> None:
    wheel = find_wheel()
    release = re.match(r"collectived-([^-]+)-", wheel.name)
    assert release is not None
    engine = find_engine()
    if engine:
        build_with(engine, f"collectived:{release[1]}")
    else:
        build_rootfs()


if __name__ == "__main__":
    main()
