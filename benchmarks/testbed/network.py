"""Hosts with bandwidth and delay: network namespaces joined by veth, shaped by tc.

Needs Linux, root, iproute2 (ip, tc) and, for delays, a C compiler. Every host has one device `eth0` and reaches
every other through a router. Upload is shaped on the host's own exit, download on the router's port towards it.
A host with a delay is joined through a cable of its own, `delay.c`: what it sends arrives that much later, so
the round trip between two hosts is the sum of their delays.

Devices send no packet larger than the line's, so that their counters see every packet's headers, as those of a
real line do. Namespaces are named after this process; those of processes that are gone are swept.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

FRAME_BYTES = 1514
QUEUE_S = 0.05
"""Depth of a line's queue, in seconds of the line."""
_PREFIX = "swarm-peer-bed"
_SOURCE = Path(__file__).with_name("delay.c")


class TestbedError(RuntimeError):
    """The network could not be made; what had been made is gone again."""

    __test__ = False  # no test, though pytest would take it for one


@dataclass(frozen=True, slots=True)
class Host:
    """One host's line. up_mbps, down_mbps: Mbit/s, 0 is not shaped; delay_ms: one way, of what it sends."""

    up_mbps: float = 0.0
    down_mbps: float = 0.0
    delay_ms: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= value < 1e6 for value in (self.up_mbps, self.down_mbps, self.delay_ms)):
            raise TestbedError(f"{self}: Mbit/s and milliseconds from 0 to below a million")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`UP_MBPS:DOWN_MBPS:DELAY_MS`. Raises TestbedError."""
        try:
            up_mbps, down_mbps, delay_ms = map(float, text.split(":"))
        except ValueError as error:
            raise TestbedError(f"host {text!r}: UP_MBPS:DOWN_MBPS:DELAY_MS is expected") from error
        return cls(up_mbps, down_mbps, delay_ms)


def is_possible() -> bool:
    """Whether this process may make such a network."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


class Network:
    """A network that stands inside a `with` block; hosts are counted from 0.

    Raises TestbedError on entering if it cannot be made.
    """

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        self._name = f"{_PREFIX}-{os.getpid()}-{id(self) & 0xFFFF:x}"
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        if not is_possible():
            raise TestbedError("a network needs root, ip and tc (Debian: apt-get install iproute2)")
        sweep()
        try:
            self._make_namespace(self._router)
            _sh(f"ip netns exec {self._router} sysctl -qw net.ipv4.ip_forward=1")
            with tempfile.TemporaryDirectory(prefix="swarm-peer-bed-") as directory:
                for index, host in enumerate(self.hosts):
                    self._add(index, host, Path(directory))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def namespace(self, index: int) -> str:
        """Name of a host's namespace."""
        return f"{self._name}-h{index}"

    def address(self, index: int) -> str:
        """A host's IPv4 address."""
        return f"10.77.{index + 1}.2"

    def start(self, index: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host; it is killed when the network goes."""
        process = subprocess.Popen(["ip", "netns", "exec", self.namespace(index), *command], **options)
        self._processes.append(process)
        return process

    def cut(self, index: int) -> None:
        """Pull a host's cable; `mend` puts it back."""
        _sh(f"ip -n {self._router} link set r{index} down")

    def mend(self, index: int) -> None:
        """Put a host's cable back."""
        _sh(f"ip -n {self._router} link set r{index} up")

    def shape(self, index: int, up_mbps: float, down_mbps: float) -> None:
        """Give a host another line than the one it was made with. Mbit/s; 0 is not shaped."""
        for namespace, device, mbps in self._ends(index, up_mbps, down_mbps):
            with suppress(TestbedError):  # there may be none
                _sh(f"ip netns exec {namespace} tc qdisc del dev {device} root")
            _shape(namespace, device, mbps)

    def lose(self, index: int, share: float) -> None:
        """Drop this share (0 to 1) of the packets that a host sends and of those sent to it, at random.

        Needs nft. Raises TestbedError.
        """
        nft, table = f"ip netns exec {self._router} nft", f"ip loss{index}"
        with suppress(TestbedError):  # there may be none
            _sh(f"{nft} delete table {table}")
        if share:
            _sh(f"{nft} add table {table}")
            _sh(f"{nft} add chain {table} forward {{ type filter hook forward priority 0; }}")
            for way in ("iifname", "oifname"):
                chance = f"numgen random mod 10000 < {round(share * 10000)}"
                _sh(f"{nft} add rule {table} forward {way} r{index} {chance} drop")

    def close(self) -> None:
        """End every process started here and remove the namespaces; harmless when repeated."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        self._processes.clear()
        for name in _namespaces():
            if name.startswith(f"{self._name}-"):
                _sh(f"ip netns del {name}")

    # -- making it -------------------------------------------------------------------------------------------

    @property
    def _router(self) -> str:
        return f"{self._name}-r"

    def _make_namespace(self, name: str) -> None:
        _sh(f"ip netns add {name}")
        _sh(f"ip -n {name} link set lo up")
        # A cable and a router speak only when spoken to; addresses here are IPv4.
        _sh(f"ip netns exec {name} sysctl -qw net.ipv6.conf.all.disable_ipv6=1")

    def _add(self, index: int, host: Host, directory: Path) -> None:
        inside, router, net = self.namespace(index), self._router, f"10.77.{index + 1}"
        self._make_namespace(inside)
        if host.delay_ms:
            cable = f"{self._name}-c{index}"
            self._make_namespace(cable)
            self._join(inside, "eth0", cable, "near")
            self._join(cable, "far", router, f"r{index}")
            self._start_delay(cable, host.delay_ms, directory)
        else:
            self._join(inside, "eth0", router, f"r{index}")
        _sh(f"ip -n {router} addr add {net}.1/24 dev r{index}")
        _sh(f"ip -n {inside} addr add {net}.2/24 dev eth0")
        # A namespace may not choose its congestion control by sysctl, but a route may; cubic is what most have.
        _sh(f"ip -n {inside} route add default via {net}.1 congctl cubic")
        for namespace, device, mbps in self._ends(index, host.up_mbps, host.down_mbps):
            _shape(namespace, device, mbps)

    def _ends(self, index: int, up_mbps: float, down_mbps: float) -> list[tuple[str, str, float]]:
        """Where a host's line is shaped: namespace, device, Mbit/s of each direction."""
        return [(self.namespace(index), "eth0", up_mbps), (self._router, f"r{index}", down_mbps)]

    def _join(self, one: str, one_device: str, other: str, other_device: str) -> None:
        _sh(f"ip -n {one} link add {one_device} type veth peer name {other_device} netns {other}")
        for namespace, device in ((one, one_device), (other, other_device)):
            _sh(f"ip -n {namespace} link set {device} gso_max_segs 1 up")

    def _start_delay(self, cable: str, delay_ms: float, directory: Path) -> None:
        binary = directory / "delay"
        if not binary.exists():
            compiler = shutil.which("gcc") or shutil.which("cc")
            if compiler is None:
                raise TestbedError(
                    "a delay needs a C compiler (Debian: apt-get install gcc); a delay of 0 does not"
                )
            subprocess.run([compiler, "-O2", "-o", str(binary), str(_SOURCE)], check=True)
        command = ["ip", "netns", "exec", cable, str(binary), f"{delay_ms:g}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._processes.append(process)
        output: IO[bytes] | None = process.stdout
        if output is None or output.readline().strip() != b"ready":
            raise TestbedError(f"the delay of {delay_ms:g} ms did not start")


def _shape(namespace: str, device: str, mbps: float) -> None:
    """Limit what leaves a device."""
    if not mbps:
        return
    bytes_per_s = mbps * 1e6 / 8
    # Under two frames or 1.5 ms of the line the shaper loses 5%; above 64 KiB pacing gets coarse.
    burst = max(2 * FRAME_BYTES, min(int(bytes_per_s * 0.0015), 65536))
    queue = max(int(bytes_per_s * QUEUE_S), 6 * FRAME_BYTES)
    qdisc = f"tbf rate {mbps}mbit burst {burst} limit {queue + burst}"
    _sh(f"ip netns exec {namespace} tc qdisc add dev {device} root {qdisc}")


def _sh(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"{command}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _namespaces() -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listing.splitlines() if line.strip()]


def sweep() -> None:
    """Remove the namespaces of processes that were killed."""
    for name in _namespaces():
        match = re.match(rf"{_PREFIX}-(\d+)-", name)
        if match is not None and not Path(f"/proc/{match[1]}").exists():
            with suppress(TestbedError):  # another process sweeps too
                _sh(f"ip netns del {name}")
