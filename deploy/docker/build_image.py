"""Build the image of the wheel in dist/, and run its command: `make image`.

With a container engine that runs (docker, podman or buildah) the Dockerfile is built. Without one, the same steps make
a root file system in .image/rootfs, of Debian's packages by mmdebstrap (root; `apt-get install mmdebstrap`), and the
command runs in it under chroot. That tries wheel, hashes, user and folders, but not the Dockerfile itself.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "deploy/docker/requirements.lock"
FOLDER = ROOT / ".image"
ROOTFS, DOWNLOADS = FOLDER / "rootfs", FOLDER / "wheels"
PROGRAM = "import collectived as cd; group = cd.connect().join(); print(group.all_reduce('sum', 1))"
_USER = "7450"
_ENVIRONMENT = [
    "env",
    "-i",
    "PATH=/opt/collectived/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/tmp",
    "PYTHONDONTWRITEBYTECODE=1",
]


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
    run([engine, *verb, "--file", str(ROOT / "deploy/docker/Dockerfile"), "--tag", tag, str(ROOT)])
    if engine != "buildah":
        run([engine, "run", "--rm", tag, "--version"])
        run([engine, "run", "--rm", tag, "launch", "--clients", "2", "--", "python", "-c", PROGRAM])
    print(f"built {tag} with {engine}")


def build_rootfs(wheel: Path) -> None:
    """The same steps by Debian's tools; what the image would hold lies in .image/rootfs."""
    if shutil.which("mmdebstrap") is None or os.geteuid() != 0:
        raise SystemExit("no container engine runs here; without one, root and mmdebstrap are needed")
    shutil.rmtree(FOLDER, ignore_errors=True)
    DOWNLOADS.mkdir(parents=True)
    run(["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,python3-venv", "bookworm", str(ROOTFS)])
    version = in_rootfs("python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    download = ["download", "--only-binary", ":all:", "--python-version", version, "--require-hashes"]
    run([*pip, *download, "--requirement", str(LOCK), "--dest", str(DOWNLOADS)])
    source = ROOTFS / "source"
    shutil.copytree(DOWNLOADS, source / "wheels")
    for path in (wheel, LOCK):
        shutil.copy2(path, source)
    in_rootfs("python3", "-m", "venv", "/opt/collectived")
    inside = ["/opt/collectived/bin/pip", "--disable-pip-version-check", "--quiet"]
    hashed = [
        "--no-index",
        "--find-links",
        "/source/wheels",
        "--require-hashes",
        "--requirement",
        f"/source/{LOCK.name}",
    ]
    in_rootfs(*inside, "install", *hashed)
    in_rootfs(*inside, "install", "--no-index", "--no-deps", f"/source/{wheel.name}")
    in_rootfs(*inside, "check")
    in_rootfs(*inside, "uninstall", "--yes", "pip")
    shutil.rmtree(source)
    shutil.copy2(ROOT / "deploy/docker/health.py", ROOTFS / "opt/collectived/health.py")
    in_rootfs("groupadd", "--system", "--gid", _USER, "collectived")
    in_rootfs("useradd", "--system", "--uid", _USER, "--gid", _USER, "--no-create-home", "collectived")
    for folder, mode in (("/run/collectived", "0750"), ("/var/lib/collectived", "0700")):
        in_rootfs("install", "--directory", f"--owner={_USER}", f"--group={_USER}", f"--mode={mode}", folder)
    print(in_rootfs("collectived", "--version", user=True), end="")
    print(in_rootfs("collectived", "launch", "--clients", "2", "--", "python", "-c", PROGRAM, user=True), end="")
    print(
        f"no container engine runs here: {ROOTFS.relative_to(ROOT)} was built by mmdebstrap, and its command ran in it"
    )


def in_rootfs(*command: str, user: bool = False) -> str:
    """Run a command in the root file system, as root or as the user of the image; what it prints."""
    chroot = ["chroot", *([f"--userspec={_USER}:{_USER}"] if user else []), str(ROOTFS)]
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={ROOTFS}/proc"]
    done = subprocess.run([*isolated, *chroot, *_ENVIRONMENT, *command], capture_output=True, text=True, check=False)
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
        build_rootfs(wheel)


if __name__ == "__main__":
    main()
