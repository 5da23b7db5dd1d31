"""hivemind's DHTNode in our own loop, with the holes closed that a stranger's answer could use.

As it stands, hivemind refuses a whole dictionary for one bad entry (so one late clock or one hostile holder
hides all peers), believes the expiration that a holder claims for a dictionary (an infinite one ends the
search with that holder's answer), and answers a request for a hundred thousand keys with as many copies of the
board. All are mended on the node's own protocol object.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P
from hivemind.proto import dht_pb2
from hivemind.utils.auth import AuthorizedRequestBase, AuthorizedResponseBase, AuthorizerBase
from hivemind.utils.timed_storage import ValueWithExpiration

from dht.validators import SignedRecordValidator

CALL_TIMEOUT_S = 3.0
"""One DHT call to one peer; a search makes several, some in parallel."""

MAX_REQUEST_KEYS = 16
"""Keys of one FIND or STORE. We ask for two at a time; hivemind's own searches for no more than this."""


async def create_node(p2p: P2P, validator: SignedRecordValidator, *, client_mode: bool) -> DHTNode:
    """A node that knows nobody yet: no bootstrap, no caches (the noticeboard reads the newest itself)."""
    node = await DHTNode.create(
        p2p=p2p,
        record_validator=validator,
        authorizer=_RequestBound(),
        client_mode=client_mode,
        wait_timeout=CALL_TIMEOUT_S,
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        reuse_get_requests=False,
    )
    protocol = node.protocol
    protocol._validate_dictionary = functools.partial(_drop_bad_entries, protocol)
    protocol.call_find = functools.partial(_find_with_honest_expirations, protocol)
    return node


class _RequestBound(AuthorizerBase):  # type: ignore[misc]  # hivemind has no types
    """What hivemind asks before it answers a request. Nothing is signed: records carry their own signatures."""

    async def validate_request(self, request: AuthorizedRequestBase) -> bool:
        """Whether a request is small enough to be answered at once."""
        keys = getattr(request, "keys", ())
        is_find = isinstance(request, dht_pb2.FindRequest)
        return len(keys) <= MAX_REQUEST_KEYS and not (is_find and len(set(keys)) < len(keys))

    async def sign_request(self, request: AuthorizedRequestBase, service_public_key: Any) -> None:
        """Requests go as they are."""

    async def sign_response(self, response: AuthorizedResponseBase, request: AuthorizedRequestBase) -> None:
        """Responses go as they are."""

    async def validate_response(
        self, response: AuthorizedResponseBase, request: AuthorizedRequestBase
    ) -> bool:
        """Their records are checked one by one."""
        return True


def _drop_bad_entries(protocol: DHTProtocol, key: bytes, dictionary: DictionaryDHTValue) -> bool:
    """In place of DHTProtocol._validate_dictionary: remove what is refused, keep the rest."""
    with dictionary.freeze():
        for subkey, (value, expiration_time) in list(dictionary.items()):
            is_plain = (
                isinstance(subkey, str) and isinstance(value, bytes) and isinstance(expiration_time, float)
            )
            if not is_plain or not protocol.record_validator.validate(
                DHTRecord(key, protocol.serializer.dumps(subkey), value, expiration_time)
            ):
                del dictionary[subkey]
    dictionary.maxsize = float("inf")  # a holder's figure; a small one would drop entries of others
    return True


async def _find_with_honest_expirations(protocol: DHTProtocol, peer: Any, keys: Collection[Any]) -> Any:
    """In place of DHTProtocol.call_find: an answer expires with its last entry, whatever its holder says."""
    response = await DHTProtocol.call_find(protocol, peer, keys)
    for key, (found, nearest) in (response or {}).items():
        if found is None:
            continue
        entries = list(found.value.items()) if isinstance(found.value, DictionaryDHTValue) else []
        honest = None
        if entries:
            latest = max(item.expiration_time for _, item in entries)
            honest = ValueWithExpiration(found.value, latest)
        response[key] = (honest, nearest)
    return response
