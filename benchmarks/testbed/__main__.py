"""A network to try things on by hand.

    python -m benchmarks.testbed 200:200:25 80:80:25      # UP_MBPS:DOWN_MBPS:DELAY_MS of each host; 0: not shaped

Prints how to run something on each host, and stands until Ctrl+C. The round trip between two hosts is the sum
of their delays. Needs root, iproute2 and, for delays, a C compiler.
"""

from __future__ import annotations

import argparse
import signal
import sys

from benchmarks.testbed.network import Host, Network, TestbedError


def main() -> int:
    """Make the network, wait, remove it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hosts", nargs="+", metavar="UP:DOWN:DELAY_MS")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Network([Host.parse(text) for text in arguments.hosts]) as network:
            for index in range(len(network.hosts)):
                print(f"{network.address(index)}  ip netns exec {network.namespace(index)} COMMAND")
            print("Ctrl+C removes it", flush=True)
            signal.pause()
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
