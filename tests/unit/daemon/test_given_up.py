"""What a client has given up is not done when its turn comes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.spec import KeyScope, namespace_id
from kvferry.daemon import service, verbs
from kvferry.daemon.tenants import Grant
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import daemon_messages as d
from kvferry.wire.messages import Message

from .conftest import Running

SPEC = small_spec()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Before it is set the daemon serves nothing that changes anything, as if its process stood still."""
    opened, require_leave = threading.Event(), verbs.require_leave

    def late(grant: Grant, message: Message) -> None:
        if isinstance(message, (d.BlockVerb, d.AskPeer)):
            assert opened.wait(60)
        require_leave(grant, message)

    monkeypatch.setattr(service, "require_leave", late)
    yield opened
    opened.set()


@pytest.mark.parametrize("verb", ["clear", "remove", "pin", "remove of a peer"])
def test_a_verb_whose_client_has_gone_is_not_done(
    running: Running, gate: threading.Event, verb: d.Verb, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = running.client.namespace(SPEC)
    keys = namespace.keys([1] * 2 * SPEC.block_tokens)
    save_blocks(namespace, keys)
    wait_until(lambda: running.client.stats().pinned_nbytes == 0)  # by what writes them to the disk
    channel = Channel.connect(running.daemon.addresses[0], ChannelOptions("x", "gone"), deadline_in(20))
    opening = d.OpenNamespace(spec=SPEC, namespace_id=namespace_id(SPEC, KeyScope()))
    number = channel.call(opening, d.NamespaceOpened, deadline=deadline_in(20)).namespace
    asked: Message
    if verb in ("clear", "remove", "pin"):
        asked = d.BlockVerb(namespace=number, verb=verb, keys=b"".join(keys), ttl_s=60.0)
    else:
        asked = d.AskPeer(namespace=number, verb="remove", keys=b"".join(keys), timeout_s=60.0)
    channel.send(asked, deadline=deadline_in(20))
    channel.abort()
    with caplog.at_level(logging.WARNING):
        gate.set()
        wait_until(lambda: "is not done: who asked for it has gone" in caplog.text)
    assert namespace.lookup(keys).prefix == 2
    assert running.client.stats().pinned_nbytes == 0


def test_a_verb_whose_client_waits_is_done(running: Running) -> None:
    namespace = running.client.namespace(SPEC)
    keys = namespace.keys([1] * 2 * SPEC.block_tokens)
    save_blocks(namespace, keys)
    assert namespace.pin(keys, ttl=60.0) == 2
    namespace.unpin(keys)
    assert namespace.remove(keys[1:]) == 1
    assert namespace.lookup(keys).prefix == 1
    namespace.clear()
    assert namespace.lookup(keys).prefix == 0
