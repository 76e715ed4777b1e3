"""Scripts that run inside sandboxes: the supervisor of a command, the relay to the proxy, the test runner."""
