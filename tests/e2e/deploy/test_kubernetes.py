"""The manifests: valid for Kubernetes' own schemas, as hardened as docs/operate/kubernetes.md says, and of one mind."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.docs.blocks import claimed, taken_from
from tests.e2e.deploy.commands import DEPLOY, KUBECTL, MANIFESTS, ROOT, built, containers, objects

from collectived_proto.ipc import job_files
from collectived_proto.types import RELEASE

BASE = {
    (entry["kind"], entry["metadata"]["name"]): entry
    for path in MANIFESTS
    if path.parent.name == "base"
    for entry in objects(path)
}
WORKERS = BASE["DaemonSet", "collectived-worker"]
COORDINATOR = BASE["Deployment", "collectived-coordinator"]
EXAMPLES = [entry for path in MANIFESTS if path.parent.name == "examples" for entry in objects(path)]
JOBS = [entry for entry in EXAMPLES if entry["kind"] == "Job"]
PODS = [WORKERS, COORDINATOR, *JOBS]
VERSIONS = ("1.29", kubernetes_validate.latest_version())
GROUP = 7450
FOLDER = str(job_files.SYSTEM_FOLDER)


def named(entry: dict[str, Any]) -> str:
    return f"{entry['kind']} {entry['metadata']['name']}"


def pod(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = entry["spec"]["template"]["spec"]
    return found


def only(entry: dict[str, Any]) -> dict[str, Any]:
    """The one container of its pods that stays."""
    (found,) = pod(entry)["containers"]
    return dict(found)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("entry", [*BASE.values(), *EXAMPLES], ids=named)
def test_each_object_is_one(entry: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(entry, version, strict=True)


@pytest.mark.skipif(not KUBECTL, reason="kubectl is not installed, and with it Kustomize")
@pytest.mark.parametrize("folder", ["base", "overlays/gpu"])
def test_what_kustomize_makes_of_them_is_valid_and_names_hang_together(folder: str) -> None:
    made = built(folder)
    assert {(entry["kind"], entry["metadata"]["name"]) for entry in made} == BASE.keys()
    for entry in made:
        kubernetes_validate.validate(entry, VERSIONS[-1], strict=True)
        assert entry["kind"] == "Namespace" or entry["metadata"]["namespace"] == "collectived"
        for container in containers(entry):
            assert container["image"] == f"collectived:{RELEASE}"
    by_name = {named(entry): entry for entry in made}
    service = by_name["Service collectived-coordinator"]["spec"]["selector"]
    labels = by_name["Deployment collectived-coordinator"]["spec"]["template"]["metadata"]["labels"]
    assert service.items() <= labels.items()


def test_the_image_has_the_tag_of_this_release() -> None:
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/base/kustomization.yaml").read_text())
    assert kustomization["images"] == [{"name": "collectived", "newTag": RELEASE}]
    for job in JOBS:
        assert {container["image"] for container in containers(job)} == {f"collectived:{RELEASE}"}


@pytest.mark.skipif(not KUBECTL, reason="kubectl is not installed, and with it Kustomize")
def test_the_gpu_overlay_lets_the_worker_see_all_gpus_and_reserves_none() -> None:
    (workers,) = (entry for entry in built("overlays/gpu") if entry["kind"] == "DaemonSet")
    environment = {entry["name"]: entry.get("value") for entry in only(workers)["env"]}
    assert environment.keys() == {"NODE_NAME", "POD_IP", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all" and pod(workers)["runtimeClassName"] == "nvidia"
    assert not [name for name in only(workers)["resources"]["limits"] if "nvidia" in name]


def hardened() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for entry in PODS:
        for container in containers(entry):
            yield f"{named(entry)}: {container['name']}", pod(entry), container


@pytest.mark.parametrize(("name", "pod", "container"), list(hardened()), ids=lambda value: value if value else "")
def test_every_container_is_as_closed_as_it_can_be(name: str, pod: dict[str, Any], container: dict[str, Any]) -> None:
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] is True and own["allowPrivilegeEscalation"] is False
    assert own["capabilities"]["drop"] == ["ALL"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["automountServiceAccountToken"] is False
    if container["name"] == "folder":  # the one that gives the folder of sockets to the worker
        assert own["capabilities"]["add"] == ["CHOWN", "FOWNER"] and own["runAsUser"] == 0
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {FOLDER}
    else:
        assert not {"runAsUser", "runAsNonRoot"} & own.keys() and "add" not in own["capabilities"]


@pytest.mark.parametrize("entry", PODS, ids=named)
def test_no_service_of_the_cluster_sets_variables_of_ours(entry: dict[str, Any]) -> None:
    assert pod(entry)["enableServiceLinks"] is False


def test_the_workers_memory_is_promised_whole_and_the_arenas_follow_it() -> None:
    resources = only(WORKERS)["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert not [word for word in only(WORKERS)["args"] if word.startswith("--memory-limit")]  # half of the limit


def test_there_is_one_coordinator_at_a_time_and_its_journal_outlives_it() -> None:
    assert COORDINATOR["spec"]["replicas"] == 1 and COORDINATOR["spec"]["strategy"] == {"type": "Recreate"}
    volumes = {volume["name"]: volume for volume in pod(COORDINATOR)["volumes"]}
    assert volumes["journal"]["persistentVolumeClaim"]["claimName"] == "collectived-journal"
    (journal,) = (word for word in only(COORDINATOR)["args"] if word.startswith("--journal="))
    assert any(journal.startswith(f"--journal={m['mountPath']}/") for m in only(COORDINATOR)["volumeMounts"])


@pytest.mark.parametrize("entry", [WORKERS, COORDINATOR], ids=named)
def test_probes_ask_the_health_service_where_the_daemon_serves(entry: dict[str, Any]) -> None:
    container = only(entry)
    (served,) = {
        int(word.rpartition(":")[2])
        for word in container["args"]
        if word.startswith("--listen=") and not word.startswith("--listen=unix:")
    }
    assert served in {port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == served


@pytest.mark.parametrize("entry", [WORKERS, COORDINATOR], ids=named)
def test_prometheus_is_told_where_metrics_are(entry: dict[str, Any]) -> None:
    told = entry["spec"]["template"]["metadata"]["annotations"]
    (served,) = (word for word in only(entry)["args"] if word.startswith("--metrics="))
    assert told == {"prometheus.io/scrape": "true", "prometheus.io/port": served.rpartition(":")[2]}


def test_it_drains_before_it_is_killed() -> None:
    first = only(WORKERS)["lifecycle"]["preStop"]["exec"]["command"]
    assert first[:2] == ["collectived", "drain"]
    told = " ".join([*first, *only(WORKERS)["args"]])
    seconds = sum(int(said) for said in re.findall(r"--(?:timeout|drain-seconds)=(\d+)s", told))
    assert pod(WORKERS)["terminationGracePeriodSeconds"] >= seconds + 5 > 60


def test_worker_and_clients_mean_the_same_folder_and_the_same_group() -> None:
    assert pod(WORKERS)["securityContext"]["runAsGroup"] == GROUP
    for entry in (WORKERS, *JOBS):
        (volume,) = (volume for volume in pod(entry)["volumes"] if volume["name"] == "sockets")
        (mount,) = (mount for mount in only(entry)["volumeMounts"] if mount["name"] == "sockets")
        if "hostPath" in volume:
            assert volume["hostPath"]["path"] == FOLDER
            assert GROUP in (
                pod(entry)["securityContext"]["runAsGroup"],
                *pod(entry)["securityContext"].get("supplementalGroups", ()),
            )
        assert mount["mountPath"] == FOLDER
    assert f"--listen=unix:{FOLDER}/{job_files.SYSTEM_SOCKET}" in only(WORKERS)["args"]


def test_network_policies_open_the_ports_that_are_served_and_no_others() -> None:
    served = {
        part: {port["containerPort"] for port in only(entry)["ports"]}
        for part, entry in (("worker", WORKERS), ("coordinator", COORDINATOR))
    }
    for part, ports in served.items():
        policy = BASE["NetworkPolicy", f"collectived-{part}"]["spec"]
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
        assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": part}
        assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_the_example_runs_the_program_of_the_readme() -> None:
    program = taken_from("README.md", "import collectived as cd")
    (config,) = (entry for entry in EXAMPLES if entry["kind"] == "ConfigMap")
    assert config["data"] == {"mean.py": program}
    (job,) = (entry for entry in JOBS if entry["metadata"]["name"] == "mean")
    environment = {entry["name"]: entry for entry in only(job)["env"]}
    assert environment["WORLD_SIZE"]["value"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert "completion-index" in environment["RANK"]["valueFrom"]["fieldRef"]["fieldPath"]


def test_the_commands_of_the_page_name_what_there_is(tmp_path: Path) -> None:
    """`kubectl` is a stand-in that writes down what it is told, and what is in the files that it is given."""
    (block,) = claimed(__file__)
    script = """
        kubectl() {
            echo "$*"
            for word; do
                case $word in --from-file=*) echo "  $(cut -d= -f2 <<< "$word") $(cat "${word#*=*=}")";; esac
            done
        }
    """
    done = subprocess.run(["bash", "-euc", script + block.text], cwd=ROOT, text=True, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    for option, name in re.findall(r"--(filename|kustomize) (\S+)", block.text):
        assert ROOT.joinpath(name, "kustomization.yaml" if option == "kustomize" else "").exists(), name
    assert (DEPLOY / "kubernetes/overlays/gpu/kustomization.yaml").exists()
    held = {
        name: re.fullmatch(r"(?:jobs )?([0-9a-f]{32,64})", text)
        for name, text in re.findall("^  ([a-z-]+) (.*)$", done.stdout, re.M)
    }
    assert all(held.values()) and set(held) == {"client-tokens", "secret", "viewing-token", "token"}
    assert held["token"] and held["client-tokens"] and held["token"][1] == held["client-tokens"][1]
    for name in ("client-tokens", "secret", "viewing-token"):
        assert any(f"/etc/collectived/secret/{name}" in word for word in only(WORKERS)["args"]), name
    assert ("DaemonSet", "collectived-worker") in BASE and "daemonset/collectived-worker" in block.text
    assert "job-name=mean" in block.text and "mean" in [job["metadata"]["name"] for job in JOBS]
    (volume,) = [one["secret"] for job in JOBS[:1] for one in pod(job)["volumes"] if "secret" in one]
    assert f"secret generic {volume['secretName']} " in block.text
