"""One block on its way to its file."""

from __future__ import annotations

from kvferry.store.disk.entries import DiskEntry, Reservation
from kvferry.store.disk.folders import OpenFolder
from kvferry.store.disk.root import Root
from kvferry.store.encoded_block import Encoding
from kvferry.store.tier import BlockWrite, WriteResult

__all__ = ["WriteJob"]


class WriteJob:
    """One block on its way to its file.

    Attributes:
        result: ``None`` until it is decided.
        entry: What was stored.
        root: Where it goes.
        folder: Its folder; ``None`` if that is to be made.
        room: What was taken for it and not yet given back; of the index too if it ``has_room``.
        looks: Whether the device was looked at for room.
        header: Of its file.
        nbytes: Of its file.
        name: Of its file.
        temporary: The name that it has first; empty once that was used.
        flags: To open it with.
        parts: What is written to it.
        addresses: Of its header, data and last page.
        asked: Whether it was tried to encode the block.
        encoded: What that came to, in memory of the thread; ``None`` if the block is written as it is.
        encoding: How it was encoded.
        taken: What the file takes up; 0 until it is written.
        folder_nbytes: What its folder takes up then, if that is known.
        failure: Why it could not be written together with others.
        ended: Whether its key may be written by others again.
    """

    __slots__ = (
        "addresses", "asked", "block", "encoded", "encoding", "ended", "entry", "failure", "flags",
        "folder", "folder_nbytes", "has_room", "header", "looks", "name", "nbytes", "parts", "result",
        "room", "root", "taken", "temporary",
    )  # fmt: skip

    def __init__(self, block: BlockWrite, nbytes: int) -> None:
        self.block = block
        self.nbytes = nbytes
        self.result: WriteResult | None = None
        self.entry: DiskEntry | None = None
        self.root: Root | None = None
        self.folder: OpenFolder | None = None
        self.room: Reservation | None = None
        self.has_room = False
        self.looks = False
        self.header = b""
        self.name = ""
        self.temporary = ""
        self.flags = 0
        self.parts: list[memoryview] = []
        self.addresses: tuple[int, int, int] = (0, 0, 0)
        self.asked = False
        self.encoded: memoryview | None = None
        self.encoding: Encoding | None = None
        self.taken = 0
        self.folder_nbytes: int | None = None
        self.failure: OSError | None = None
        self.ended = False

    def take_failure(self) -> OSError:
        """The failure, for the caller to raise at once.

        In a local variable it would keep the frame that raises it, and the folders open that are used there.
        """
        failure, self.failure = self.failure, None
        assert failure is not None
        return failure
