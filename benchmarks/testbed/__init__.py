"""A wide-area network on one Linux machine, for benchmarks and tests that need lines instead of loopback."""

from benchmarks.testbed.network import Host, Network, TestbedError, is_possible

__all__ = ["Host", "Network", "TestbedError", "is_possible"]
