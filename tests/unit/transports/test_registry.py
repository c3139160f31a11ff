from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import UnknownPluginError
from kvferry.transports import connect, get_transport, listen
from kvferry.transports.base import Transport


@pytest.mark.parametrize("scheme", ["inproc", "tcp"])
def test_transport_by_scheme(scheme: str) -> None:
    transport = get_transport(scheme)
    assert isinstance(transport, Transport)
    assert transport.scheme == scheme


def test_unknown_scheme_names_the_nearest() -> None:
    for call in (listen, lambda url: connect(url, deadline_in(1))):
        with pytest.raises(UnknownPluginError, match="did you mean tcp"):
            call("tpc://127.0.0.1:0")


def test_address_without_a_scheme_is_tcp() -> None:
    listener = listen("127.0.0.1:0")
    assert listener.address.startswith("tcp://127.0.0.1:")
    connect(listener.address.removeprefix("tcp://"), deadline_in(30)).close()
    listener.close()


def test_transports_are_imported_when_used() -> None:
    code = (
        "import sys, kvferry.transports as t\n"
        "mine = {'kvferry.transports.tcp', 'kvferry.transports.inproc'}\n"
        "loaded = lambda: sorted(mine.intersection(sys.modules))\n"
        "assert loaded() == [], loaded()\n"
        "t.get_transport('inproc')\n"
        "assert loaded() == ['kvferry.transports.inproc'], loaded()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
