"""Metrics, health and reflection of real daemons, as a scraper and a tool would use them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.e2e.conftest import SECRET, Cluster, Daemon
from tests.waiting import settle

import collectived as cd
from collectived_proto.v1 import status_pb2, trace_pb2, worker_pb2, worker_pb2_grpc
from collectived_proto.viewing_token import viewing_token
from collectived_runtime.metrics.catalogue import COORDINATOR_METRICS, PROCESS_METRICS, WORKER_METRICS

pytestmark = pytest.mark.timeout(120)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    both = ("--metrics", "0", "--reflection")
    return make_cluster(2, options=(*both, "--heartbeat", "0.2"), worker_options=both)


class Page:
    """What an endpoint told."""

    def __init__(self, where: str, token: str = viewing_token(SECRET)) -> None:
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/openmetrics-text; version=1.0.0"}
        with urllib.request.urlopen(urllib.request.Request(f"http://{where}/metrics", headers=headers)) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            text = answer.read().decode()
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self.names = {family.name for family in text_string_to_metric_families(text)}

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all series of a metric with these labels."""
        return sum(float(s.value) for s in self.samples if s.name == name and labels.items() <= s.labels.items())


def test_a_group_that_is_joined_again_uses_its_links_again(cluster: Cluster) -> None:
    """What one side has not given back when the other needs it is dialled anew, which nobody notices.

    So is the connection for collectives, which may be lent to ranks; that for messages serves again.
    """
    times = 20

    def body(group: cd.Group) -> None:
        for _ in range(times):
            assert group.all_reduce("sum", 1.0) == 2.0
            if group.rank:
                assert group.recv(0) == group.generation
            else:
                group.send(group.generation, 1)
            group.rejoin(timeout=20)

    before = [Page(where) for where in cluster.metrics[1:]]
    cluster.run(2, body)
    name = "collectived_links_opened_total"
    dialler, acceptor = (
        {how: page(name, how=how) - then(name, how=how) for how in ("dialled", "accepted", "kept")}
        for then, page in zip(before, map(Page, cluster.metrics[1:]), strict=True)
    )
    assert dialler["dialled"] + dialler["kept"] == acceptor["accepted"] + acceptor["kept"] == 2 * times
    assert times / 2 < dialler["kept"] == acceptor["kept"] < times


def test_daemons_say_where_their_metrics_are(cluster: Cluster) -> None:
    assert [where.rpartition(":")[0] for where in cluster.metrics] == ["127.0.0.1"] * 3


def _more(before: Page, now: Page, name: str, **labels: str) -> float:
    return now(name, **labels) - before(name, **labels)


def test_what_workers_do_is_counted_and_stays_counted(cluster: Cluster) -> None:
    def body(group: cd.Group) -> None:
        for _ in range(3):
            group.all_reduce("sum", np.ones(1000, np.float32))
        group.barrier()

    before = [Page(where) for where in cluster.metrics[1:]]
    cluster.run_sessions(4, lambda _, group: body(group), name="counted")
    settle(lambda: all(Page(where)("collectived_groups") == 0 for where in cluster.metrics[1:]))
    for task, where in enumerate(cluster.metrics[1:]):
        page, me = Page(where), {"group": "counted", "worker": str(task)}
        more = partial(_more, before[task], page)
        assert more("collectived_group_collectives_total", outcome="ok", **me) == 4
        assert more("collectived_collectives_total", operation="all_reduce", outcome="ok") == 3
        assert more("collectived_collective_duration_seconds_count", operation="barrier") == 1
        assert more("collectived_payload_bytes_total", operation="all_reduce") == 12_000
        assert more("collectived_link_sent_bytes_total", **me) >= 3 * 4000
        assert more("collectived_link_received_bytes_total", **me) >= 3 * 4000
        assert more("collectived_joins_total", outcome="granted") == 2
        assert more("collectived_sessions_opened_total") == 2
        assert page("collectived_arena_limit_bytes") > 0 and page("collectived_coordinator_connected") == 1


def test_only_what_the_catalogue_lists_is_told(cluster: Cluster) -> None:
    for where, listed in zip(cluster.metrics, (COORDINATOR_METRICS, WORKER_METRICS, WORKER_METRICS), strict=True):
        assert Page(where).names <= {metric.family for metric in (*listed.values(), *PROCESS_METRICS.values())}


def test_a_rank_that_does_not_come_shows_on_both_sides(cluster: Cluster) -> None:
    come = threading.Event()

    def body(group: cd.Group) -> None:
        if group.rank == 1:
            come.wait(50)
        group.barrier()

    def waiting() -> bool:
        central, worker = Page(cluster.metrics[0]), Page(cluster.metrics[1])
        return (
            worker("collectived_group_stalled", group="waiting") == 1
            and worker("collectived_group_stalls_total", group="waiting") == 1
            and worker("collectived_group_oldest_seconds", group="waiting") > 1
            and central("collectived_group_waiting", group="waiting") == 1
            and central("collectived_group_missing_ranks", group="waiting") == 1
            and central("collectived_rank_lateness_seconds", group="waiting", rank="1", worker="1") > 1
        )

    ranks = threading.Thread(target=cluster.run_sessions, args=(2, lambda _, group: body(group), "waiting"))
    ranks.start()
    try:
        settle(waiting)
    finally:
        come.set()
        ranks.join()
    settle(lambda: Page(cluster.metrics[0])("collectived_group_waiting", group="waiting") == 0)


def test_who_comes_late_each_time_is_told_by_the_coordinator(cluster: Cluster) -> None:
    over = threading.Event()

    def body(group: cd.Group) -> None:
        while not group.all_reduce("max", float(over.is_set())):
            if group.rank == 1:
                threading.Event().wait(0.02)

    def late() -> bool:
        name, central = "collectived_rank_lateness_seconds", Page(cluster.metrics[0])
        return central(name, group="late", rank="1") > 0.01 > central(name, group="late", rank="0")

    ranks = threading.Thread(target=cluster.run_sessions, args=(2, lambda _, group: body(group), "late"))
    ranks.start()
    try:
        settle(late)
    finally:
        over.set()
        ranks.join()


def test_a_failure_is_counted_with_its_code(cluster: Cluster) -> None:
    failed = threading.Event()

    def body(group: cd.Group) -> None:
        if group.rank == 1:
            failed.wait(50)
        else:
            with pytest.raises(cd.errors.DeadlineExceededError):
                group.barrier(options=cd.CommunicationOptions(timeout_seconds=0.1))
            failed.set()

    cluster.run(2, body)
    worker, central = Page(cluster.metrics[1]), Page(cluster.metrics[0])
    assert worker("collectived_collectives_total", operation="barrier", outcome="deadline_exceeded") == 1
    assert worker("collectived_verdicts_total", code="deadline_exceeded") == 1
    assert central("collectived_coordinator_verdicts_total", code="deadline_exceeded") == 1


def test_reflection_tells_a_generic_client_what_is_served(cluster: Cluster) -> None:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    asked = ((cluster.coordinator_address, "Coordinator"), (cluster.addresses[0], "Worker"))
    for address, name in asked:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert {f"collectived.v1.{name}", "grpc.health.v1.Health"} <= set(database.get_services())
            service = DescriptorPool(database).FindServiceByName(f"collectived.v1.{name}")
            assert "Status" in service.methods_by_name


def test_without_the_flag_nothing_is_reflected(one_worker: Cluster) -> None:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    for address in (one_worker.coordinator_address, one_worker.addresses[0]):
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert one_worker.metrics == ["", ""]


def health(address: str, service: str) -> Iterator[int]:
    """What the health service says of a service, each time that it changes; then why it ended."""
    with grpc.insecure_channel(address) as channel:
        try:
            for reply in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service)):
                yield reply.status
        except grpc.RpcError:
            return


def test_a_worker_without_its_coordinator_lives_but_cannot_serve(make_cluster: Callable[..., Cluster]) -> None:
    alone = make_cluster(1, worker_options=("--metrics", "0"))
    said = health(alone.addresses[0], "collectived.v1.Worker")
    assert next(said) == SERVING
    alone.coordinator.process.send_signal(signal.SIGTERM)
    assert next(said) == NOT_SERVING
    assert next(health(alone.addresses[0], "")) == SERVING, "it must not be restarted for that"
    settle(lambda: Page(alone.metrics[1])("collectived_coordinator_connected") == 0)
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(f"http://{alone.metrics[1]}/healthz")
    assert answer.value.code == 503
    answer.value.close()


def test_a_viewing_token_over_tcp_is_good_for_looking_only(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    file, token = tmp_path / "token", "a-token-of-the-watchers"
    file.write_text(f"{token}\n")
    file.chmod(0o600)
    watched = make_cluster(
        1, worker_options=("--listen", "127.0.0.1:0", "--metrics", "0", "--viewing-token-file", str(file))
    )
    refusals = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(watched.tcp_addresses[0]) as channel:
        worker, probe = worker_pb2_grpc.WorkerStub(channel), health_pb2_grpc.HealthStub(channel)
        for shown, refusal in ((token, refusals[0]), (viewing_token(SECRET), refusals[0]), ("nonsense", refusals[1])):
            metadata = (("authorization", f"Bearer {shown}"),)
            if refusal is refusals[0]:
                reply = worker.Status(status_pb2.StatusRequest(), metadata=metadata)
                assert reply.coordinator.job == "test", "the worker asks the coordinator by its own secret"
                assert list(worker.Trace(trace_pb2.TraceRequest(), metadata=metadata))
                assert probe.Check(health_pb2.HealthCheckRequest(), metadata=metadata).status == SERVING
            with pytest.raises(grpc.RpcError) as refused:
                worker.Abort(worker_pb2.AbortRequest(), metadata=metadata)
            assert refused.value.code() is refusal
    page = Page(watched.metrics[1], token)
    assert page("collectived_refused_total", component="worker", protocol="grpc", reason="viewing") == 2
    assert page("collectived_refused_total", component="worker", protocol="grpc", reason="wrong") == 1
    with pytest.raises(urllib.error.HTTPError, match="401") as answer:
        Page(watched.metrics[1], "nonsense")
    answer.value.close()


def test_a_token_file_that_others_may_read_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-the-watchers\n")
    file.chmod(0o644)
    daemon = Daemon("coordinator", "--listen", "127.0.0.1:0", "--viewing-token-file", str(file))
    with pytest.raises(cd.errors.UnavailableError, match="has mode 0644, by which all users of the host can read it"):
        daemon.wait_ready()


def test_who_is_ending_says_that_it_does_not_serve(make_cluster: Callable[..., Cluster]) -> None:
    ending = make_cluster(1)
    for address, name, daemon in (
        (ending.addresses[0], "collectived.v1.Worker", ending.workers[0]),
        (ending.coordinator_address, "collectived.v1.Coordinator", ending.coordinator),
    ):
        said = [health(address, service) for service in ("", name)]
        assert [next(one) for one in said] == [SERVING, SERVING]
        daemon.process.send_signal(signal.SIGTERM)
        for one in said:
            assert next(one, NOT_SERVING) == NOT_SERVING


def test_promtool_finds_nothing_to_say_about_them(cluster: Cluster) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    admitted = {"Authorization": f"Bearer {viewing_token(SECRET)}"}
    for where in cluster.metrics:
        with urllib.request.urlopen(urllib.request.Request(f"http://{where}/metrics", headers=admitted)) as answer:
            page = answer.read()
        done = subprocess.run([tool, "check", "metrics"], input=page, capture_output=True, timeout=50)
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")
