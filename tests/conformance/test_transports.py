from __future__ import annotations

import itertools
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import trustme

from kvferry.testing.transports import SharedMemorySuite, TransportSuite
from kvferry.transports import get_transport
from kvferry.transports.base import Transport

_numbers = itertools.count()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class TestInproc(TransportSuite):
    crosses_processes: ClassVar[bool] = False

    def transport(self) -> Transport:
        return get_transport("inproc")

    def listen_url(self) -> str:
        return f"inproc://suite-{next(_numbers)}"


class TestTcp(TransportSuite):
    def transport(self) -> Transport:
        return get_transport("tcp")

    def listen_url(self) -> str:
        return "tcp://127.0.0.1:0"


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
class TestTcpIpv6(TransportSuite):
    largest_nbytes: ClassVar[int] = 4 << 20
    connect_cycles: ClassVar[int] = 20

    def transport(self) -> Transport:
        return get_transport("tcp")

    def listen_url(self) -> str:
        return "tcp://[::1]:0"


class TestPacedTcp(TransportSuite):
    """A rate changes when bytes are sent, nothing else."""

    largest_nbytes: ClassVar[int] = 4 << 20
    connect_cycles: ClassVar[int] = 5

    def transport(self) -> Transport:
        return get_transport("tcp")

    def listen_url(self) -> str:
        return "tcp://127.0.0.1:0?rate=400MB/s"


class TestUnix(SharedMemorySuite):
    @pytest.fixture(autouse=True)
    def _folder(self) -> Iterator[None]:
        # of its own, and short: the path of a socket has at most 107 bytes
        with tempfile.TemporaryDirectory(prefix="kvf-") as self._path:
            yield

    def transport(self) -> Transport:
        return get_transport("unix")

    def listen_url(self) -> str:
        return f"unix://{self._path}/s"


class TestSpinningUnix(TestUnix):
    """Spinning changes how a process waits, nothing else."""

    largest_nbytes: ClassVar[int] = 4 << 20
    connect_cycles: ClassVar[int] = 20

    def listen_url(self) -> str:
        return f"unix://{self._path}/s?spin=50us"


class TestTcpFourLanes(TransportSuite):
    def transport(self) -> Transport:
        return get_transport("tcp")

    def listen_url(self) -> str:
        return "tcp://127.0.0.1:0?lanes=4"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("certificates")
    files = {name: folder / name for name in ("ca", "cert", "key")}
    ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
    own = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(files["ca"])
    own.private_key_pem.write_to_path(files["key"])
    files["cert"].write_bytes(b"".join(blob.bytes() for blob in own.cert_chain_pems))
    return files


class TestTls(TransportSuite):
    connect_cycles: ClassVar[int] = 30

    @pytest.fixture(autouse=True)
    def _files(self, certificates: dict[str, Path]) -> None:
        self.files = certificates

    def transport(self) -> Transport:
        return get_transport("tls")

    def listen_url(self) -> str:
        return "tls://127.0.0.1:0?cert={cert}&key={key}&ca={ca}".format(**self.files)


class TestMutualTls(TestTls):
    largest_nbytes: ClassVar[int] = 4 << 20

    def listen_url(self) -> str:
        return super().listen_url() + "&client_ca={ca}".format(**self.files)


@pytest.mark.skipif(sys.platform != "linux", reason="ucxx has wheels for Linux only")
class TestUcxShm(TransportSuite):
    """UCX over shared memory."""

    connect_cycles: ClassVar[int] = 20

    def transport(self) -> Transport:
        return get_transport("ucx")

    def listen_url(self) -> str:
        return "ucx://127.0.0.1:0?tls=posix,cma&inline=8KiB"


class TestUcxTcp(TestUcxShm):
    def listen_url(self) -> str:
        return "ucx://127.0.0.1:0?tls=tcp"


class TestAuto(SharedMemorySuite):
    """Both ends on one host: ``unix`` is what it takes."""

    largest_nbytes: ClassVar[int] = 4 << 20
    connect_cycles: ClassVar[int] = 20

    def transport(self) -> Transport:
        return get_transport("auto")

    def listen_url(self) -> str:
        return "auto://127.0.0.1:0"


class TestAutoTcp(TransportSuite):
    """The stream goes on over the socket that asked."""

    largest_nbytes: ClassVar[int] = 4 << 20
    connect_cycles: ClassVar[int] = 20

    def transport(self) -> Transport:
        return get_transport("auto")

    def listen_url(self) -> str:
        return "auto://127.0.0.1:0?require=tcp"
