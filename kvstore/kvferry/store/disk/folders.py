"""Open folders of one directory: descriptors kept for those in use, and how large each folder is."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvferry.store.disk.files import Files, is_gone
from kvferry.store.disk.names import shard_name, tenant_folder

__all__ = ["BLOCK_NBYTES", "Folders", "OpenFolder", "allocated_nbytes", "disk_nbytes", "file_nbytes"]

_MAX_OPEN: Final = 320  # all shards of a namespace, and the folders of others that take turns with it
_ALL: Final = -1  # in the place of a shard: the namespace's own folder
BLOCK_NBYTES: Final = 512
"""The unit of st_blocks, whatever the file system."""


def allocated_nbytes(found: os.stat_result) -> int:
    """What a file or folder takes up now: for one with holes less than its size."""
    return found.st_blocks * BLOCK_NBYTES


def disk_nbytes(found: os.stat_result) -> int:
    """What a file or folder takes up, as ``du`` counts it; never less than its size in whole pages.

    A file system may allocate late, or put off what it will need: the size is what it comes to.
    """
    return file_nbytes(found.st_size if stat.S_ISREG(found.st_mode) else 0, found.st_blocks)


def file_nbytes(size: int, blocks: int) -> int:
    """As :func:`disk_nbytes`, from size and blocks of a file."""
    return max(blocks * BLOCK_NBYTES, -(-size // 4096) * 4096)


class OpenFolder:
    """A folder's descriptor, closed with its last reference: who uses it may lose it from the cache.

    ``path`` is where it lies below the tier's directory; empty for that itself.
    """

    __slots__ = ("_files", "_lock", "fd", "nbytes", "path")

    def __init__(self, files: Files, fd: int, path: str = "") -> None:
        self._files = files
        self.fd = fd
        self.path = path
        self._lock = threading.Lock()
        self.nbytes = allocated_nbytes(files.status(fd))

    def growth(self, now: int | None = None) -> int:
        """By how many bytes the folder has grown since this was last asked.

        ``now`` is what it took up a moment ago, if that is known; others may have seen it larger since.
        """
        with self._lock:
            if now is None:
                now = allocated_nbytes(self._files.status(self.fd))
            grown = max(0, now - self.nbytes)
            self.nbytes += grown
            return grown

    def __del__(self) -> None:
        self._files.close(self.fd)


_Name = tuple[str, bytes, int]


class Folders:
    """The folders below one directory. Thread safe.

    Args:
        files: System calls.
        root: Descriptor of the directory; owned by the caller.
        charge: Told of the bytes that removed folders give back (negative).
        durable: Whether a new folder is made durable before anything is put into it.
    """

    def __init__(self, files: Files, root: int, charge: Callable[[int], None], *, durable: bool) -> None:
        self._files = files
        self._durable = durable
        self._root = OpenFolder(files, os.dup(root))
        self._charge = charge
        self._lock = threading.Lock()
        self._open: OrderedDict[_Name, OpenFolder] = OrderedDict()

    def open(
        self, tenant: str, namespace_id: bytes, shard: int, *, make: Callable[[int], None] | None = None
    ) -> OpenFolder:
        """The folder of the keys of a namespace that start with the byte ``shard``.

        Args:
            tenant: Whose namespace.
            namespace_id: Its id.
            shard: First byte of the keys.
            make: Make folders that are not there, and tell this of the bytes that they take up.

        Raises:
            OSError: If it is not there and not to be made, or something else is in its place.
        """
        name = (tenant, namespace_id, shard)
        found = self._find(name)
        if found is not None:
            return found
        above = self._namespace(tenant, namespace_id, make=make)
        try:
            folder = self._step(above, shard_name(shard), make=make)
        except OSError as error:
            if not (is_gone(error) and self.is_removed(above)):
                raise
            above = self._namespace(tenant, namespace_id, make=make)
            folder = self._step(above, shard_name(shard), make=make)
        return self._keep(name, folder)

    def _namespace(
        self, tenant: str, namespace_id: bytes, *, make: Callable[[int], None] | None
    ) -> OpenFolder:
        name = (tenant, namespace_id, _ALL)
        found = self._find(name)
        if found is not None:
            return found
        parent = self._step(self._root, tenant_folder(tenant), make=make)
        return self._keep(name, self._step(parent, namespace_id.hex(), make=make))

    def _find(self, name: _Name) -> OpenFolder | None:
        with self._lock:
            found = self._open.get(name)
            if found is not None:
                self._open.move_to_end(name)
            return found

    def _keep(self, name: _Name, folder: OpenFolder) -> OpenFolder:
        with self._lock:
            # another thread may have been quicker; one object a folder, or its growth counts twice
            folder = self._open.setdefault(name, folder)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
            return folder

    def _step(
        self, parent: OpenFolder, name: str, *, make: Callable[[int], None] | None = None
    ) -> OpenFolder:
        made = make is not None and self._files.make_folder(name, parent.fd)
        path = f"{parent.path}/{name}" if parent.path else name
        folder = OpenFolder(self._files, self._files.open_folder(name, parent.fd), path)
        if make is not None and made:
            make(folder.nbytes + parent.growth())
            if self._durable:
                self._files.sync(parent.fd)
        return folder

    def remove_if_empty(self, tenant: str, namespace_id: bytes, shard: int) -> None:
        """Remove a shard's folder, and its namespace's, if there is nothing in them.

        Whoever is about to make a file there finds the folder removed, and makes it anew.
        """
        try:
            parent = self._step(self._root, tenant_folder(tenant))
            namespace = self._step(parent, namespace_id.hex())
            for above, name in ((namespace, shard_name(shard)), (parent, namespace_id.hex())):
                nbytes = self._step(above, name).nbytes
                if not self._files.remove_folder(name, above.fd):
                    return
                self._charge(-nbytes)
        except OSError:  # gone already, or the medium fails: it stays, and stays counted
            return
        finally:
            with self._lock:
                for which in (shard, _ALL):
                    found = self._open.get((tenant, namespace_id, which))
                    if found is not None and not self._files.status(found.fd).st_nlink:
                        del self._open[tenant, namespace_id, which]

    def is_removed(self, folder: OpenFolder) -> bool:
        """Whether somebody removed ``folder``; it and all others are then opened anew when needed."""
        if self._files.status(folder.fd).st_nlink:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Close all; they are opened again when needed."""
        with self._lock:
            self._open.clear()
