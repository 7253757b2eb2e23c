"""The gate before every call of a daemon, the same for coordinator and worker: callers, permissions and pace."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from collectived_proto.config.daemons import DaemonSettings
from collectived_runtime.auth.callers import CallerIdentifier
from collectived_runtime.auth.credentials import create_authenticator
from collectived_runtime.auth.peers import resolve_allowed_users
from collectived_runtime.auth.unix_proxy import PeerCredentialProxy
from collectived_runtime.grpc_server.aborts import AbortInterceptor
from collectived_runtime.grpc_server.authentication import AuthInterceptor
from collectived_runtime.grpc_server.throttling import ThrottleInterceptor
from collectived_runtime.grpc_server.validation import ValidationInterceptor
from collectived_runtime.limits.descriptors import raise_limit
from collectived_runtime.limits.rejections import RejectionCounters


class ServerGuard:
    """The parts of a daemon that know its callers, and refuse them.

    Raises:
        StartupError: a file of credentials, a user or a group cannot be used.
    """

    def __init__(self, settings: DaemonSettings, is_mutual: bool) -> None:
        self.authenticator = create_authenticator(settings)
        self.rejections = RejectionCounters()
        self.descriptor_limit = raise_limit()
        with_tokens = settings.client_tokens_file is not None
        self.allowed = resolve_allowed_users(settings.allow_users, settings.allow_groups, with_tokens)
        self.proxy = PeerCredentialProxy(self.allowed, self.descriptor_limit // 9, self.rejections)
        self.callers = CallerIdentifier(self.authenticator, self.proxy, is_mutual)

    def create_server(self, options: Sequence[tuple[str, int]]) -> grpc.aio.Server:
        """Return a server of gRPC, every call of which passes the guard; it listens nowhere yet."""
        return grpc.aio.server(
            interceptors=[
                AbortInterceptor(),
                AuthInterceptor(self.callers, self.rejections),
                ThrottleInterceptor(self.callers, self.rejections),
                ValidationInterceptor(self.rejections),
            ],
            options=options,
        )
