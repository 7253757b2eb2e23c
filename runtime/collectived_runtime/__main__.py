"""`python -m collectived_runtime coordinator | worker | simulate`: what `collectived …` becomes."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from collectived_runtime import logs

COORDINATOR_METRICS, WORKER_METRICS = 9450, 9451  # ports


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["simulate"]:
        from collectived_runtime.simulation import command

        sys.exit(command.main(arguments[1:]))
    options = _parser().parse_args(arguments)
    logs.configure(options.log_level, options.log_format)
    secret = (
        sys.stdin.buffer.readline().decode().strip() if options.attached else os.environ.get("COLLECTIVED_SECRET", "")
    )
    asyncio.run(_run(options, secret))


async def _run(options: argparse.Namespace, secret: str) -> None:
    lifeline = asyncio.ensure_future(_end_of_input()) if options.attached else None
    if options.daemon == "coordinator":
        from collectived_runtime.coordinator import server as coordinator
        from collectived_runtime.coordinator.table_file import default_path

        settings = coordinator.CoordinatorSettings(
            job=options.job,
            listen=tuple(options.listen),
            secret=secret,
            heartbeat_seconds=options.heartbeat,
            stall_seconds=options.stall_after,
            insecure=options.insecure,
            journal=options.journal,
            tune=options.tune,
            tables=options.tables or (default_path() if options.tune else None),
            metrics=options.metrics,
            reflection=options.reflection,
            http=options.http,
            viewing_token_file=options.viewing_token_file,
        )
        await coordinator.serve(settings, lifeline)
    else:
        from collectived_runtime.worker import server as worker

        await worker.serve(
            worker.WorkerSettings(
                job=options.job,
                task=options.task,
                coordinator=options.coordinator,
                folder=options.folder,
                listen=options.listen,
                link_listen=options.link_listen,
                host=options.host_name or worker.default_host(),
                secret=secret,
                memory_limit=options.memory_limit,
                patience_seconds=options.patience,
                insecure=options.insecure,
                otel=options.otel,
                metrics=options.metrics,
                reflection=options.reflection,
                viewing_token_file=options.viewing_token_file,
            ),
            lifeline,
        )


async def _end_of_input() -> None:
    """Returns when standard input ends: whoever started us holds its other end for as long as it lives."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            ended.set()

    loop.add_reader(sys.stdin.fileno(), readable)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m collectived_runtime", description=__doc__)
    daemons = parser.add_subparsers(dest="daemon", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--job", default="default", help="name of the job")
    both.add_argument(
        "--attached",
        action="store_true",
        help="the first line of standard input is the job's secret, and its end means: end in order",
    )
    both.add_argument("--insecure", action="store_true", help="admit TCP connections without the job's secret")
    both.add_argument("--viewing-token-file", type=Path, help="file of a token that is good for looking only")
    both.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    both.add_argument("--log-format", default="text", choices=logs.FORMATS, help="how it is said; json: a line each")
    coordinator = daemons.add_parser("coordinator", parents=[both], help="hands out group keys and ranks")
    coordinator.add_argument("--listen", action="append", required=True, help="unix:/path or host:port; repeatable")
    coordinator.add_argument("--heartbeat", type=float, default=5.0, help="seconds between signs of life of a worker")
    coordinator.add_argument("--stall-after", type=float, default=1.0, help="seconds after which waiting is reported")
    coordinator.add_argument("--journal", type=Path, default=None, help="file that keeps the epoch across restarts")
    coordinator.add_argument(
        "--tune", action="store_true", help="measure the links of a group when it forms, unless its table is stored"
    )
    coordinator.add_argument(
        "--tables",
        type=Path,
        default=None,
        help="file of stored tables; with --tune by default $XDG_STATE_HOME/collectived/tables.json",
    )
    coordinator.add_argument(
        "--http",
        default="",
        metavar="[HOST:]PORT",
        help="serve a web page that shows what status shows; without HOST on the loopback",
    )
    worker = daemons.add_parser("worker", parents=[both], help="owns this host's devices and runs collectives")
    worker.add_argument("--task", type=int, required=True, help="number of this worker")
    worker.add_argument("--coordinator", required=True, help="address of the coordinator")
    worker.add_argument("--folder", type=Path, required=True, help="folder for sockets")
    worker.add_argument(
        "--listen",
        default="",
        help="unix:/path instead of FOLDER/worker-TASK.sock, or host:port beside it (no host: the loopback)",
    )
    worker.add_argument("--link-listen", default="127.0.0.1:0", help="host:port for links of other workers")
    worker.add_argument("--patience", type=float, default=10.0, help="seconds to look for the coordinator")
    worker.add_argument("--host-name", default="", help="name of this host, for people")
    for daemon, port in ((coordinator, COORDINATOR_METRICS), (worker, WORKER_METRICS)):
        daemon.add_argument(
            "--metrics",
            nargs="?",
            const=str(port),
            default="",
            metavar="[HOST:]PORT",
            help=f"serve Prometheus metrics there (no host: the loopback; nothing: port {port}; 0: one that is free)",
        )
        daemon.add_argument("--reflection", action="store_true", help="tell tools such as grpcurl what is served")
    worker.add_argument(
        "--memory-limit", type=int, default=0, help="bytes of shared memory in all; 0: half of what there is"
    )
    worker.add_argument(
        "--otel", action="store_true", help="send OpenTelemetry spans, one per collective; see docs/trace.md"
    )
    return parser


if __name__ == "__main__":
    main()
