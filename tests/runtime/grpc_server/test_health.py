"""Health and reflection, where they cannot be asked of a real daemon; tests/e2e/metrics/test_daemon_metrics.py asks
those.
"""

from __future__ import annotations

import asyncio
import sys

import grpc.aio
import pytest

from collectived_runtime.grpc_server.health import Health, add_reflection
from collectived_runtime.startup_error import StartupError


def test_without_its_package_reflection_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc_reflection.v1alpha", None)

    async def start() -> None:
        with pytest.raises(StartupError, match=r"--reflection needs .*grpcio-reflection.*collectived\[reflection\]"):
            add_reflection(grpc.aio.server(), "some.Service")

    asyncio.run(start())


def test_a_service_is_well_from_its_start_until_it_cannot_work() -> None:
    async def story() -> None:
        health = Health("some.Service", grpc.aio.server())
        assert not health.is_healthy
        await health.start()
        assert health.is_healthy
        health.set_healthy(False)
        while health.is_healthy:
            await asyncio.sleep(0)
        await health.stop()

    asyncio.run(story())
