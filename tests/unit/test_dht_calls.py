"""An answer to a call that was just given up must not end hivemind's reader of answers."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import p2pd_pb2

from dht.host import LiveCalls


def message(call_id: bytes, **fields: Any) -> bytes:
    body: bytes = p2pd_pb2.PersistentConnectionResponse(callId=call_id, **fields).SerializeToString()
    assert len(body) < 128, "its length fits one byte"
    return bytes([len(body)]) + body


@pytest.mark.parametrize("given_up", ["cancelled", "answered"])
@pytest.mark.parametrize("kind", ["response", "error", "daemon", "empty"])
def test_answer_to_a_call_given_up_is_dropped_and_the_next_is_delivered(given_up: str, kind: str) -> None:
    fields: dict[str, Any] = {
        "response": {"callUnaryResponse": p2pd_pb2.CallUnaryResponse(response=b"late")},
        "error": {"callUnaryResponse": p2pd_pb2.CallUnaryResponse(error=b"late")},
        "daemon": {"daemonError": p2pd_pb2.DaemonError(message="late")},
        "empty": {},
    }[kind]

    async def scenario() -> None:
        control = ControlClient(None, _initialized_with_create=True)
        calls = control._pending_calls = LiveCalls()
        late, live = uuid4(), uuid4()
        calls[late], calls[live] = asyncio.Future(), asyncio.Future()
        if given_up == "cancelled":
            calls[late].cancel()
        else:
            calls[late].set_result(b"first")
        reader = asyncio.StreamReader()
        reader.feed_data(message(late.bytes, **fields))
        reader.feed_data(
            message(live.bytes, callUnaryResponse=p2pd_pb2.CallUnaryResponse(response=b"in time"))
        )
        reader.feed_eof()
        await control._read_from_persistent_conn(reader)
        assert calls[live].result() == b"in time"

    asyncio.run(scenario())
