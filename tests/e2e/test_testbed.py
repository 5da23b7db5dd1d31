"""The network of namespaces that benchmarks and tests run on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed import Host, Network, TestbedError, is_possible

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not is_possible(), reason="needs root, ip and tc to make network namespaces"),
]

SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
while True:
    server.accept()[0].close()
"""
CONNECT = """
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 5000), float(sys.argv[2])).close()
    print(time.monotonic() - began)
except OSError:
    print("nothing")
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def connect(network: Network, index: int, target: int, patience_s: float) -> str:
    command = [sys.executable, "-c", CONNECT, network.address(target), str(patience_s)]
    process = network.start(index, command, stdout=subprocess.PIPE, text=True)
    return str(process.communicate(timeout=60)[0]).strip()


@pytest.mark.skipif(not shutil.which("gcc") and not shutil.which("cc"), reason="a delay needs a C compiler")
def test_hosts_reach_each_other_after_the_delay_and_not_over_a_cut_cable() -> None:
    with Network([Host(delay_ms=40), Host(20, 20, 10)]) as network:
        server = network.start(1, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        assert float(connect(network, 0, 1, 30)) >= 0.05
        network.cut(1)
        assert connect(network, 0, 1, 0.5) == "nothing"
        network.mend(1)
        assert float(connect(network, 0, 1, 30)) >= 0.05
        name = network.namespace(0)
        assert name in namespaces()
    assert name not in namespaces()
    assert server.poll() is not None


def test_a_network_that_cannot_be_made_leaves_nothing() -> None:
    network = Network([Host(), Host(up_mbps=1e-9)])
    with pytest.raises(TestbedError, match="tc qdisc"), network:
        pass
    assert network.namespace(0) not in namespaces()


def test_networks_of_processes_that_are_gone_are_swept(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from benchmarks.testbed import Host, Network\n"
        "network = Network([Host()]).__enter__()\n"
        "print(network.namespace(0), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code]
    name = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False).stdout.strip()
    assert name and name in namespaces()
    with Network([Host()]):
        assert name not in namespaces()


@pytest.mark.parametrize("text", ["", "1:2", "1:2:x", "1:2:3:4", "-1:2:3", "nan:0:0"])
def test_a_host_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(TestbedError, match=r"UP_MBPS:DOWN_MBPS:DELAY_MS|Mbit/s and milliseconds"):
        Host.parse(text)
