"""The command lines that stand in deploy/: of manifests, units, compose services and the Dockerfile."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = DEPLOY / "compose/compose.yaml"
KUBECTL = shutil.which("kubectl")
INSTALLED_AT = "/opt/collectived/bin/collectived"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C, where PyYAML has it, is ten times as fast


class Command(NamedTuple):
    """`collectived` and its arguments; `place` says where they stand."""

    place: str
    arguments: list[str]


def objects(path: Path) -> list[dict[str, Any]]:
    """The Kubernetes objects of a file."""
    found = [entry for entry in yaml.load_all(path.read_text(), _LOADER) if entry]
    return [entry for entry in found if entry["kind"] != "Kustomization"]


def built(folder: str) -> list[dict[str, Any]]:
    """What `kubectl apply -k` would send."""
    assert KUBECTL
    command = [KUBECTL, "kustomize", str(DEPLOY / "kubernetes" / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [entry for entry in yaml.load_all(done.stdout, _LOADER) if entry]


def containers(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of a workload's pods, init containers first."""
    pod = entry.get("spec", {}).get("template", {}).get("spec", {})
    yield from (*pod.get("initContainers", ()), *pod.get("containers", ()))


def services() -> dict[str, Any]:
    """Of the compose file, by name."""
    found: dict[str, Any] = yaml.load(COMPOSE.read_text(), _LOADER)["services"]
    return found


def sections(unit: Path) -> dict[str, list[str]]:
    """`[Service]` -> its lines, continued ones joined, without comments."""
    text = re.sub(r"\\\n\s*", "", "\n".join(x for x in unit.read_text().splitlines() if not x.startswith("#")))
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            lines = found.setdefault(line, [])
        else:
            lines.append(line)
    return found


def setting(unit: Path, name: str) -> list[str]:
    """All values of a setting of a unit."""
    lines = [line for section in sections(unit).values() for line in section]
    return [line.partition("=")[2] for line in lines if line.partition("=")[0] == name]


def of_manifests() -> Iterator[Command]:
    for path in MANIFESTS:
        for entry in objects(path):
            for container in containers(entry):
                place = f"{path.relative_to(ROOT)}: {container['name']}"
                command = container.get("command", ())
                if container.get("args") and not command:
                    yield Command(place, container["args"])
                for hook in ("preStop", "postStart"):
                    said = container.get("lifecycle", {}).get(hook, {}).get("exec", {}).get("command", ())
                    if said[:1] == ["collectived"]:
                        yield Command(f"{place}, {hook}", said[1:])


def of_units() -> Iterator[Command]:
    for path in UNITS:
        for name in ("ExecStart", "ExecStop", "ExecReload"):
            for line in setting(path, name):
                words = shlex.split(line.lstrip("-"))
                assert words[0] == INSTALLED_AT, path
                yield Command(f"{path.relative_to(ROOT)}: {name}", words[1:])


def of_compose() -> Iterator[Command]:
    for name, service in services().items():
        if "entrypoint" not in service:
            yield Command(f"{COMPOSE.relative_to(ROOT)}: {name}", service["command"])


def all_commands() -> list[Command]:
    return [*of_manifests(), *of_units(), *of_compose()]
