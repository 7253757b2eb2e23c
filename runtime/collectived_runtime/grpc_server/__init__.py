"""Interceptors of every gRPC call: authentication, throttling, validation; and the health service."""
