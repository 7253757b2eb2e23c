"""What stands before every gRPC call: authentication, throttling, validation; and the health service."""
