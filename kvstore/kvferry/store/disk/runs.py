"""A few files by one call into the native library, which gives the GIL away once instead of around each step.

Here is only what is the same for every file; what is unusual is left to who does it one system call at a time
with :class:`~kvferry.store.disk.files.Files`, and meets it again there.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any, Final, TypeAlias

from kvferry.core.native import native
from kvferry.store.disk.files import CREATE_FLAGS, READ_FLAGS, REUSE_FLAGS
from kvferry.store.disk.header import ALIGNMENT, HeaderTemplate

__all__ = ["DONE", "NOT_BEGUN", "SYNC_FOLDER", "WRITE", "FileRuns", "Run", "Turns", "Written", "file_runs"]

# How far a file came: the step that failed; DONE if none did. Before WRITE nothing new is there; from then on
# it lies there under its temporary name, from SYNC_FOLDER on under its own.
NOT_BEGUN: Final = 0
WRITE: Final = 3
SYNC_FOLDER: Final = 5
DONE: Final = 6

Written: TypeAlias = "tuple[int, int, int, int, int, int, int, int]"
"""What became of a file: the step it came to, the errno of that, whether the spare file has left its place,
the bytes that were written, its size, the blocks of 512 bytes that it takes up, those of its folder (-1: not
known), the checksum of its data.
"""

Turns: TypeAlias = "ctypes.Array[ctypes.c_char]"
"""See :meth:`FileRuns.turns`."""

_IN: Final = struct.Struct("<7Q8i4qQ80s96s80s")  # kvc_file of files.h
_OUT: Final = struct.Struct("<68x3i8x4qQ256x")
_NO_FOLDER: Final = -1
_SYNC: Final = {"none": 0, "data": 1, "full": 2}


class _Records(threading.local):
    """Memory of each thread for the records of a call."""

    def __init__(self) -> None:
        self._memory = bytearray()
        self.view = memoryview(b"")
        self.address = 0

    def provide(self, count: int) -> None:
        nbytes = count * _IN.size
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
            self.view = memoryview(self._memory)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


_records = _Records()


class Run:
    """Files of one layout that are written, or read, by one call; the only one of its thread at a time.

    What is given by address or descriptor must stay until that call returns. Addresses are those of a file's
    header, of its data, and of a page for the end of the data if that ends within a page.

    Args:
        template: Of the namespace: how long everything is.
        count: How many files there may be.
    """

    def __init__(self, template: HeaderTemplate, count: int) -> None:
        self.template = template
        self.count = 0
        _records.provide(count)
        self._view = _records.view

    def add_write(
        self, folder: int, flags: int, addresses: tuple[int, int, int], sum_at: int, name: str,
        temporary: str, ended: int, spare_folder: int = _NO_FOLDER, spare: str = "",
    ) -> None:  # fmt: skip
        """A file to be written; the checksum of its data is put into its header.

        Args:
            folder: Descriptor of its folder.
            flags: To open it with, beside the usual ones.
            addresses: See above; what O_DIRECT takes if the flags ask for it.
            sum_at: Where the digits of the checksum are in the header.
            name: Its name.
            temporary: The one it has first.
            ended: Address of 32 bits: it is not begun once they are not 0.
            spare_folder: Descriptor of the folder of a file that is written over; -1 if there is none.
            spare: Name of that.
        """
        template, (page, data, tail) = self.template, addresses
        rest = template.rest_nbytes
        _IN.pack_into(
            self._view, self.count * _IN.size,
            page, template.header_nbytes, data, template.data_nbytes - rest, tail, ALIGNMENT if rest else 0,
            ended, folder, flags, spare_folder, 0, 0, 0, rest, sum_at, 0, 0, 0, 0, 0,
            name.encode(), temporary.encode(), spare.encode(),
        )  # fmt: skip
        self.count += 1

    def add_read(self, folder: int, flags: int, addresses: tuple[int, int, int], name: str) -> None:
        """A file to be read; arguments as those of :meth:`add_write`."""
        template, (page, into, tail) = self.template, addresses
        rest = template.rest_nbytes
        _IN.pack_into(
            self._view, self.count * _IN.size,
            page, template.header_nbytes, into, template.data_nbytes - rest, tail, ALIGNMENT if rest else 0,
            0, folder, flags, _NO_FOLDER, 0, 0, 0, rest, 0, 0, 0, 0, 0, 0, name.encode(), b"", b"",
        )  # fmt: skip
        self.count += 1

    def results(self, count: int) -> list[Written]:
        """Of the first ``count`` files."""
        return list(_OUT.iter_unpack(self._view[: count * _OUT.size]))


class FileRuns:
    """Writes and reads runs of files. Thread safe; raises nothing that the medium does.

    Args:
        library: With the functions of ``files.h``.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        void, size, int64, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
        self._write: Any = library.kvc_write_files
        self._write.argtypes = (void, size, int64, integer, integer, integer, ctypes.c_double, void)
        self._read: Any = library.kvc_read_files
        self._read.argtypes = (void, size, int64, integer, ctypes.c_double)
        for function in (self._write, self._read):
            function.restype = size
        library.kvc_turns_nbytes.restype = size
        self._turns_nbytes = int(library.kvc_turns_nbytes())
        self._begin_turns: Any = library.kvc_turns_begin
        self._begin_turns.argtypes, self._begin_turns.restype = (void, size), None

    begin = Run

    def turns(self, count: int) -> Turns:
        """For up to ``count`` threads that write at once; others wait in the library, with all prepared."""
        turns = ctypes.create_string_buffer(self._turns_nbytes)
        self._begin_turns(turns, count)
        return turns

    def write(self, run: Run, sync: str, deadline: float, turns: Turns) -> list[Written]:
        """Write files one after another, up to the first that fails or is not begun by the deadline.

        Args:
            run: Which.
            sync: As :attr:`~kvferry.store.disk.options.DiskOptions.sync`.
            deadline: Of the call.
            turns: Whose turn it is.

        Returns:
            One for each up to that first one.
        """
        nbytes, how = run.template.file_nbytes, _SYNC[sync]
        flags = CREATE_FLAGS, REUSE_FLAGS
        done = self._write(_records.address, run.count, nbytes, *flags, how, deadline, turns)
        return run.results(min(done + 1, run.count))

    def read(self, run: Run, deadline: float) -> list[Written]:
        """Read files, with O_DIRECT several at once, up to the first that is not begun by the deadline.

        Returns:
            One for each that was begun; in the place of bytes written those that the file has: it was read,
            and has a checksum, if they are those of the template.
        """
        nbytes = run.template.file_nbytes
        return run.results(self._read(_records.address, run.count, nbytes, READ_FLAGS, deadline))


@functools.lru_cache(1)
def file_runs() -> FileRuns | None:
    """That of this process; ``None`` without a library that can do it."""
    library = native().library
    if library is None or not hasattr(library, "kvc_write_files"):
        return None
    library.kvc_file_nbytes.restype = ctypes.c_size_t
    return FileRuns(library) if library.kvc_file_nbytes() == _IN.size else None
