"""`python -m collectived_runtime coordinator | worker | simulate`: what `collectived …` becomes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

from collectived_proto.config import flags
from collectived_proto.config.daemons import DAEMONS, CoordinatorSettings, DaemonSettings, WorkerSettings
from collectived_proto.config.resolve import resolve_settings
from collectived_proto.config.sources import ConfigError, find_config_file, load_config_file
from collectived_runtime import logs
from collectived_runtime.heap import keep_one_arena

END_TIMEOUT = 8.0  # seconds from the end of standard input to that of the process, whatever its threads do
ServeWorker = Callable[[WorkerSettings, Awaitable[None] | None], Awaitable[None]]


def main(arguments: list[str] | None = None, serve_worker: ServeWorker | None = None) -> None:
    """Run what the arguments say.

    Args:
        serve_worker: instead of `worker.server.serve`, whose GPUs are those of this machine.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["simulate"]:
        from collectived_runtime.simulation import cli

        sys.exit(cli.main(arguments[1:]))
    options = flags.build_parser("collectived").parse_args(arguments)
    kind = DAEMONS[options.daemon]
    try:
        path = find_config_file(options.config, os.environ)
        file = load_config_file(path) if path else None
        secret = sys.stdin.buffer.readline().decode().strip() if options.attached else None
        settings = resolve_settings(kind, flags.collect_flags(kind, options), os.environ, file, secret)
    except ConfigError as error:
        print(f"collectived {options.daemon}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    # Else gRPC logs a line for every caller that fails to speak TLS with it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # TLS 1.3 alone: gRPC's API for Python names no version. These are the suites of TLS 1.2. This one needs a key that
    # both ends share beforehand, which no daemon has; those of TLS 1.3 are always on. The setting in the environment
    # for other programs is not used.
    os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-CHACHA20-POLY1305"
    # Else NumPy starts a thread on every core, which spins for a while; no daemon multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    keep_one_arena()
    logs.configure(settings.log_level, settings.log_format)
    asyncio.run(_run(settings, options.attached, serve_worker))


async def _run(settings: DaemonSettings, attached: bool, serve_worker: ServeWorker | None) -> None:
    lifeline = _watch_stdin(asyncio.get_running_loop()) if attached else None
    match settings:
        case CoordinatorSettings():
            with _freeze_gc_after_import():
                from collectived_runtime.coordinator import server as coordinator

            await coordinator.serve(settings, lifeline)
        case WorkerSettings():
            with _freeze_gc_after_import():
                from collectived_runtime.worker import server as worker

            await (serve_worker or worker.serve)(settings, lifeline)


@contextlib.contextmanager
def _freeze_gc_after_import() -> Iterator[None]:
    """Keep the imports of the block out of garbage collection: now, beside group loops, and at the end.

    That takes a quarter off the processor time of a daemon's start and end, and spares group loops a pause of 28 ms.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _watch_stdin(loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
    """Done when standard input ends: the process that started this one holds the other end for as long as it lives.

    Its thread ends the process when that does not end by itself: no other process may be left to end it.
    """
    ended: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not ended.done():
            ended.set_result(None)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
            loop.call_soon_threadsafe(finish)
        time.sleep(END_TIMEOUT)
        os.write(2, f"standard input has ended, and this daemon did not end within {END_TIMEOUT:g} s\n".encode())
        os._exit(1)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
    return ended


if __name__ == "__main__":
    main()
