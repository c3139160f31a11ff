"""The receiving process of the streaming benchmarks: ``python -m kvferry.bench.peer``.

Takes every stream into a memory store that wraps around, prints its address as its first line, and
ends when its standard input closes (so it never outlives the benchmark).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xxhash

from kvferry.core.buffers import ByteArray
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CorruptBlockError, KVFerryError
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import KVSpec
from kvferry.streaming import (
    STREAM_CAPABILITIES,
    LayerReceiver,
    SegmentGrant,
    StreamCodec,
    WriterWatch,
    codec_capabilities,
)
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire.messages import BeginStream, Ping, Pong

__all__ = ["DIGEST_PREFIX", "VERIFY_PREFIX", "PeerProcess", "pattern"]

VERIFY_PREFIX = "verify-"
"""Of the names of streams of a :func:`pattern` that is compared; its seed follows."""
DIGEST_PREFIX = "digest-"
"""Of the names of streams whose xxh3 over all layers, and all blocks of each, follows and is compared."""
_WAIT_S = 60.0
_IDLE_S = 3600.0


def pattern(spec: KVSpec, blocks: int, seed: int) -> ByteArray:
    """Bytes of ``blocks`` blocks that both processes can make: ``[blocks, block_nbytes]``."""
    return np.random.default_rng(seed).integers(0, 256, (blocks, spec.block_nbytes), np.uint8)


def _verify(receiver: LayerReceiver, begin: BeginStream) -> None:
    blocks = len(begin.keys) // 32
    expected = pattern(begin.spec, blocks, int(begin.stream.removeprefix(VERIFY_PREFIX)))
    for layer in range(len(begin.spec.layers)):
        for block in range(blocks):
            got = np.frombuffer(receiver.view(layer, block), np.uint8)
            if not np.array_equal(got, expected[block, begin.spec.layer_slice(layer)]):
                raise CorruptBlockError(f"layer {layer} of block {block} arrived with other bytes")


def _check_digest(receiver: LayerReceiver, begin: BeginStream) -> None:
    digest = xxhash.xxh3_64()
    for layer in range(len(begin.spec.layers)):
        for block in range(len(begin.keys) // 32):
            digest.update(receiver.view(layer, block))
    if digest.hexdigest() != begin.stream.removeprefix(DIGEST_PREFIX):
        raise CorruptBlockError(f"stream {begin.stream!r} arrived with other bytes: {digest.hexdigest()}")


def _serve(channel: Channel, store: MemoryStore, watch: WriterWatch) -> None:
    grant, codec = SegmentGrant(channel, store.arena, watch), StreamCodec(allow_lossy=True)
    while (incoming := channel.receive_idle(deadline_in(_IDLE_S))) is not None:
        message = incoming.message
        if isinstance(message, Ping):
            channel.send(Pong(at=time.monotonic()), deadline=deadline_in(_WAIT_S))
        elif isinstance(message, BeginStream):
            namespace = store.namespace(message.spec, message.scope)
            receiver = LayerReceiver(channel, namespace, message, grant=grant, codec=codec)
            try:
                receiver.start()
                receiver.run(deadline_in(message.timeout_s))
                if message.stream.startswith(VERIFY_PREFIX):
                    _verify(receiver, message)
                if message.stream.startswith(DIGEST_PREFIX):
                    _check_digest(receiver, message)
            finally:
                receiver.close()


class PeerProcess:
    """A receiving child process.

    Attributes:
        address: URL to connect to.
        pid: Its process id.
    """

    def __init__(self, capacity_nbytes: int, *, transport: str = "tcp") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvf-")  # short: a socket's path has a limit
        url = f"unix://{self._folder.name}/s" if transport == "unix" else f"{transport}://127.0.0.1:0"
        command = [
            sys.executable, "-m", "kvferry.bench.peer", "--capacity", str(capacity_nbytes), "--listen", url,
        ]  # fmt: skip
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._child.pid
        assert self._child.stdout is not None
        self.address = self._child.stdout.readline().strip()
        if not self.address:
            raise KVFerryError(
                f"the benchmark's receiving process ended with code {self._child.wait(_WAIT_S)}"
            )

    def cpu_s(self) -> float:
        """Processor seconds that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        self._child.communicate(timeout=_WAIT_S)
        self._folder.cleanup()


def main() -> None:
    """Serve until standard input closes, as it does however the benchmark ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--listen", default="tcp://127.0.0.1:0")
    arguments = parser.parse_args()
    store, watch = MemoryStore(arguments.capacity, lease_s=_IDLE_S), WriterWatch()
    # Off here leaves the choice to the sender: payloads carry a checksum unless both sides want none.
    options = ChannelOptions(
        role="bench",
        session="bench-peer",
        checksum=False,
        capabilities=STREAM_CAPABILITIES + codec_capabilities(),
    )
    server = ChannelServer(
        arguments.listen, options, lambda channel: _serve(channel, store, watch), name="bench"
    )
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()
    watch.close()
    store.close()


if __name__ == "__main__":
    main()
