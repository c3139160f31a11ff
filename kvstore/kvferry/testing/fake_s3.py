"""A small S3 in memory that answers as a test says: with any status, late, half, or nothing."""

from __future__ import annotations

import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final
from urllib.parse import unquote, urlsplit

__all__ = ["FakeS3"]

_JOIN_S: Final = 5.0
_CODES: Final = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


class FakeS3:
    """Objects of one bucket, reached in path style or by the name of the bucket in the host.

    Args:
        bucket: Its name.

    Attributes:
        objects: By name.
        answers: Statuses of the next requests, used up one by one; 0 takes a request as it is.
        always: The status of all requests; 0 takes them as they are.
        gate: Requests wait until it is set; it is at first.
        seen: Requests so far, by method.
        paths: Host and path of each.
    """

    def __init__(self, bucket: str = "blocks") -> None:
        self.bucket = bucket
        self.objects: dict[str, bytes] = {}
        self.answers: list[int] = []
        self.always = 0
        self.gate = threading.Event()
        self.gate.set()
        self.seen: Counter[str] = Counter()
        self.paths: list[str] = []
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="kvferry-fake-s3", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> FakeS3:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; requests that wait at the gate are let go."""
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)

    def next_status(self) -> int:
        """What the next request is answered with; 0: as it is."""
        with self.lock:
            return self.answers.pop(0) if self.answers else self.always


class _Handler(BaseHTTPRequestHandler):
    store: FakeS3
    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str = "") -> None:
        text = f"<Error><Code>{code or _CODES.get(status, 'Other')}</Code></Error>"
        self._answer(status, text.encode())

    def _take(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        parts = urlsplit(self.path)
        host = self.headers.get("Host", "")
        with self.store.lock:
            self.store.seen[self.command] += 1
            self.store.paths.append(f"{host}{unquote(parts.path)}")
        self.store.gate.wait(30)
        if status := self.store.next_status():
            self._error(status)
            return
        path = unquote(parts.path).lstrip("/")
        if not host.startswith(f"{self.store.bucket}."):
            bucket, _, path = path.partition("/")
            if bucket != self.store.bucket:
                self._error(404, "NoSuchBucket")
                return
        with self.store.lock:
            getattr(self, f"_{self.command.lower()}")(path, parts.query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _take  # noqa: N815  names of http.server

    def _get(self, path: str, query: str, body: bytes) -> None:
        del query, body
        found = self.store.objects.get(path)
        if found is None:
            self._error(404)
            return
        headers = {"ETag": '"x"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            self._answer(200, found, headers | {"Content-Length": str(len(found))})
            return
        start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(found))
        headers |= {"Content-Range": f"bytes {start}-{end - 1}/{len(found)}"}
        self._answer(206, found[start:end], headers | {"Content-Length": str(end - start)})

    _head = _get

    def _put(self, path: str, query: str, body: bytes) -> None:
        if part := re.search(r"partNumber=(\d+)", query):
            self.store.uploads.setdefault(path, {})[int(part[1])] = body
        elif self.headers.get("If-None-Match") == "*" and path in self.store.objects:
            self._error(412, "PreconditionFailed")
            return
        else:
            self.store.objects[path] = body
        self._answer(200, headers={"ETag": '"x"'})

    def _post(self, path: str, query: str, body: bytes) -> None:
        if "uploads" in query:
            self.store.uploads[path] = {}
            text = f"<InitiateMultipartUploadResult><Bucket>{self.store.bucket}</Bucket><Key>k</Key>"
            self._answer(200, f"{text}<UploadId>u1</UploadId></InitiateMultipartUploadResult>".encode())
        elif "uploadId" in query:
            self.store.objects[path] = b"".join(
                data for _, data in sorted(self.store.uploads.pop(path).items())
            )
            text = "<CompleteMultipartUploadResult><Location>l</Location><Bucket>b</Bucket><Key>k</Key>"
            self._answer(200, f"{text}<ETag>x</ETag></CompleteMultipartUploadResult>".encode())
        else:
            keys = re.findall(rb"<Key>(.*?)</Key>", body)
            for key in keys:
                self.store.objects.pop(key.decode(), None)
            gone = b"".join(b"<Deleted><Key>%b</Key></Deleted>" % key for key in keys)
            self._answer(200, b"<DeleteResult>%b</DeleteResult>" % gone)

    def _delete(self, path: str, query: str, body: bytes) -> None:
        del query, body
        self.store.objects.pop(path, None)
        self._answer(204)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401  as the base has it
        del format, args
