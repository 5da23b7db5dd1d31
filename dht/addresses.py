"""Multiaddrs as text: what a volunteer may listen on, announce or dial."""

from __future__ import annotations

from dataclasses import dataclass

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

MAX_ADDRESS_CHARACTERS = 256
HOST_PROTOCOLS = ("ip4", "ip6", "dns", "dns4", "dns6")


class AddressError(ValueError):
    """A multiaddr that cannot be used; the message names it and says what would do."""


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP multiaddr in parts.

    protocol: ip4, ip6, dns, dns4 or dns6; host and port as written; peer_id: base58, or None.
    """

    protocol: str
    host: str
    port: int
    peer_id: str | None

    @property
    def transport(self) -> str:
        """The multiaddr without its peer id."""
        return f"/{self.protocol}/{self.host}/tcp/{self.port}"

    def with_peer_id(self, peer_id: str) -> str:
        """The full multiaddr of the peer `peer_id` at this place."""
        return f"{self.transport}/p2p/{peer_id}"


def parse_address(text: str, *, needs_peer_id: bool = False) -> Address:
    """Take a TCP multiaddr apart.

    Raises AddressError for anything else: no multiaddr, another transport (QUIC loses the last answers of
    a stream), a relay address, a peer id that is not one, or none where `needs_peer_id`.
    """
    shape = "/ip4/203.0.113.5/tcp/31330" + ("/p2p/Qm..." if needs_peer_id else "")
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise AddressError(f"address of {len(text)} characters; at most {MAX_ADDRESS_CHARACTERS}")
    if "/p2p-circuit" in text:
        raise AddressError(f"{text!r} goes through a relay: expected a direct TCP address like {shape}")
    if "/p2p/" in text:
        parse_peer_id(text.rsplit("/p2p/", 1)[1])
    try:
        parts = [(protocol.name, value) for protocol, value in Multiaddr(text).items()]
    except Exception as error:  # its parser raises many kinds, from ValueError to binascii.Error
        raise AddressError(f"{text!r} is not a multiaddr: expected one like {shape}") from error
    names = [name for name, _ in parts]
    if "udp" in names:
        raise AddressError(f"{text!r} is not TCP: only TCP is used, expected an address like {shape}")
    if len(names) not in {2, 3} or names[0] not in HOST_PROTOCOLS or names[1] != "tcp":
        raise AddressError(f"{text!r} is not a TCP address: expected one like {shape}")
    peer_id = None
    if len(names) == 3:
        if names[2] != "p2p":
            raise AddressError(f"{text!r} ends in /{names[2]}: expected an address like {shape}")
        peer_id = text.rsplit("/p2p/", 1)[1]
    elif needs_peer_id:
        raise AddressError(f"{text!r} lacks the peer's id: expected an address like {shape}")
    return Address(names[0], str(parts[0][1]), int(parts[1][1]), peer_id)


def parse_peer_id(text: str) -> PeerID:
    """hivemind's PeerID of base58 text; AddressError if it is not a peer id."""
    try:
        peer_id = PeerID.from_base58(text)
    except ValueError as error:
        raise AddressError(f"{text!r} is not a peer id (base58, like Qm... or 12D3KooW...)") from error
    raw = peer_id.to_bytes()
    if raw[:2] not in {b"\x12\x20", b"\x00\x24"} or len(raw) != raw[1] + 2:
        raise AddressError(f"{text!r} is not a peer id (base58, like Qm... or 12D3KooW...)")
    return peer_id
