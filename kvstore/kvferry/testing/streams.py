"""The decode end of layer streams, for tests and benchmarks."""

from __future__ import annotations

import queue
import threading

from kvferry.core.blockstore import BlockStore
from kvferry.core.clock import deadline_in, is_past, time_left
from kvferry.core.errors import ConnectionClosedError, KVFerryError, ProtocolError, TransferTimeoutError
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.streaming import (
    STREAM_CAPABILITIES,
    LayerReceiver,
    RegionGrant,
    SegmentGrant,
    SlotGrant,
    StreamCodec,
    WindowKeeper,
    WriterWatch,
    codec_capabilities,
    windows_capability,
)
from kvferry.transports.region import RegionTransport
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire.messages import BeginStream

__all__ = ["DecodeEnd"]


class DecodeEnd:
    """A port that receives streams into a store. Thread safe; as a context manager it closes.

    Args:
        listen_url: Where to listen.
        store: Where the blocks go; stays the caller's.
        spec: What is served.
        scope: Adapter and salt that are served.
        ring: Frames that a sender may have under way.
        timeout_s: How long a stream may take.
        checksum: Whether this end asks for checksums.
        codec: Which codecs are accepted; with none, this end decodes none.
        segments: Whether senders on this machine may write into the slots; takes a store in memory.
        regions: An endpoint over which senders may write into the slots; takes a store in memory.
    """

    def __init__(
        self,
        listen_url: str,
        store: BlockStore,
        spec: KVSpec,
        *,
        scope: KeyScope = KeyScope(),  # noqa: B008 - frozen
        ring: int = 8,
        timeout_s: float = 30.0,
        checksum: bool = True,
        segments: bool = False,
        regions: RegionTransport | None = None,
        codec: StreamCodec | None = None,
    ) -> None:
        self._codec = codec
        self._arena = store.arena if isinstance(store, MemoryStore) else None
        self._segments = segments and self._arena is not None
        self._regions = regions
        self.watch = WriterWatch()
        self.keeper = WindowKeeper()
        self.namespace = store.namespace(spec, scope)
        self._ring = ring
        self._timeout_s = timeout_s
        self._checksum = checksum
        self._receivers: queue.SimpleQueue[LayerReceiver] = queue.SimpleQueue()
        self._cond = threading.Condition()
        self._errors: list[KVFerryError] = []
        self._server = ChannelServer(listen_url, self._options("decode"), self._serve, name="streams")

    def __enter__(self) -> DecodeEnd:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The dialable URL."""
        return self._server.address

    def close(self) -> None:
        """End all streams and join the threads."""
        self._server.close()
        self.watch.close()

    def connect(self, address: str = "") -> Channel:
        """A channel as a prefill worker opens it; ``address`` may add options such as a rate."""
        return Channel.connect(address or self.address, self._options("prefill"), deadline_in(10))

    def receiver(self, deadline: float) -> LayerReceiver:
        """The receiver of the next stream whose opening was accepted; the caller closes it.

        Raises:
            TransferTimeoutError: If there is none by the deadline.
        """
        try:
            return self._receivers.get(timeout=time_left(deadline))
        except queue.Empty:
            raise TransferTimeoutError("no stream was opened in time") from None

    def error(self, deadline: float) -> KVFerryError:
        """The error of the next stream that failed.

        Raises:
            TransferTimeoutError: If none failed by the deadline.
        """
        with self._cond:
            while not self._errors:
                if is_past(deadline):
                    raise TransferTimeoutError("no stream failed in time")
                self._cond.wait(time_left(deadline))
            return self._errors.pop(0)

    def _options(self, role: str) -> ChannelOptions:
        capabilities: tuple[str, ...] = STREAM_CAPABILITIES if self._segments else ()
        if self._regions is not None:
            capabilities += (windows_capability(self._regions),)
        if self._codec is not None:
            capabilities += codec_capabilities()
        return ChannelOptions(
            role=role, session=f"{role}-end", checksum=self._checksum, capabilities=capabilities
        )

    def _grant(self, channel: Channel) -> SlotGrant | None:
        if self._arena is None:
            return None
        if self._regions is not None:
            return RegionGrant(channel, self._arena, self._regions, self.keeper)
        return SegmentGrant(channel, self._arena, self.watch) if self._segments else None

    def _serve(self, channel: Channel) -> None:
        """Streams of one connection, one after the other."""
        grant = self._grant(channel)
        while True:
            try:
                message = channel.receive(deadline_in(self._timeout_s)).message
            except ConnectionClosedError:
                return  # between two streams: the sender has no more
            if not isinstance(message, BeginStream):
                raise ProtocolError(f"{type(message).__name__} where a stream should begin", remote=True)
            receiver = LayerReceiver(
                channel, self.namespace, message, ring=self._ring, grant=grant, codec=self._codec
            )
            try:
                receiver.start()
                self._receivers.put(receiver)
                receiver.run(deadline_in(self._timeout_s))
            except KVFerryError as error:
                with self._cond:
                    self._errors.append(error)
                    self._cond.notify_all()
                raise
