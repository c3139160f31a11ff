"""The thread beside the verbs: verifies headers after the start, brings back directories that were down."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import CorruptBlockError, TierError
from kvferry.store.disk import names
from kvferry.store.disk.blocks import read_header_bytes
from kvferry.store.disk.encoded import Stored
from kvferry.store.disk.entries import DiskEntry, NamespaceIndex
from kvferry.store.disk.files import is_gone, open_quietly, read_parts, reason_of
from kvferry.store.disk.header import parse_header, readable
from kvferry.store.disk.identity import require_identity
from kvferry.store.disk.root import Root
from kvferry.store.disk.state import DiskState
from kvferry.store.io_pool import IoPool

__all__ = ["Maintenance"]

_IDLE_S: Final = 10.0
_BATCH: Final = 64
_BATCH_S: Final = 60.0
_log = logging.getLogger(__name__)


class Maintenance:
    """Owns the thread. Thread safe.

    Args:
        name: Of the tier.
        state: Of the tier.
        pool: Whose threads read headers, in turns with what else they have to read.
        start_root: Opens a directory and enters what it holds; returns what is to be verified.
    """

    def __init__(
        self, name: str, state: DiskState, pool: IoPool, start_root: Callable[[Root], list[DiskEntry]]
    ) -> None:
        self._pool = pool
        self._state = state
        self._start_root = start_root
        self._wake = threading.Condition()
        self._closing = False
        self._woken = False
        self._pending: deque[DiskEntry] = deque()
        self.found = 0
        self.verified = 0
        self._thread = threading.Thread(target=self._serve, name=f"kvferry-{name}-maintain", daemon=True)

    def start(self, pending: list[DiskEntry]) -> None:
        """Start the thread with what was found at the start."""
        self._add(pending)
        self._thread.start()

    def wake(self) -> None:
        """Look now whether something is to be done."""
        with self._wake:
            self._woken = True
            self._wake.notify_all()

    @property
    def pending(self) -> int:
        """Headers that are still to be compared."""
        return self.found - self.verified

    def wait_verified(self, deadline: float) -> bool:
        """Wait until all headers have been compared; ``False`` at the deadline."""
        with self._wake:
            return self._wake.wait_for(lambda: not self.pending, max(0.0, deadline - time.monotonic()))

    def close(self, deadline: float) -> bool:
        """End the thread; ``False`` if it hangs in the device and was left behind."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(time_left(deadline))
        return not self._thread.is_alive()

    def _add(self, pending: list[DiskEntry]) -> None:
        if self._state.options.verify:
            self._pending.extend(pending)
            self.found += len(pending)

    def _serve(self) -> None:
        while not self._closing:
            try:
                while self._pending and not self._closing:
                    self._verify_some()
                pause = self._look_after()
            except Exception:  # noqa: BLE001  thread root
                _log.exception("maintenance of a disk tier failed; it goes on")
                pause = self._state.options.retry_s
            with self._wake:
                self._wake.notify_all()
                if not self._closing and not self._pending:
                    self._wake.wait_for(lambda: self._closing or self._woken, pause)
                self._woken = False

    def _look_after(self) -> float:
        """Bring back directories, remove what has to go, look for room; returns how long to pause."""
        busy = self._state.retry_removals() | self._state.go_on_shrinking()
        for root in self._state.roots:
            if root.is_up:
                self._state.is_lost(root)
            if not root.is_up:
                busy |= not self._bring_back(root)
            busy |= root.retry_leftovers()
            busy |= self._state.retry_obstacles(root)
            busy |= root.try_writes(self._state.index.reserve_at_most)
        return self._state.options.retry_s if busy else _IDLE_S

    def _bring_back(self, root: Root) -> bool:
        try:
            self._add(self._start_root(root))
        except OSError as error:
            self._state.problems.begin(root.path, "down", reason_of(error))
        except TierError as error:
            self._state.problems.begin(root.path, "down", str(error))
        return root.is_up

    def _verify_some(self) -> None:
        some = [self._pending.popleft() for _ in range(min(_BATCH, len(self._pending)))]
        # what a hanging device holds up is left to its first use
        self._pool.run(len(some), lambda number: self._verify(some[number]), deadline_in(_BATCH_S)).cancel()
        self.verified += len(some)

    def _verify(self, entry: DiskEntry) -> None:
        """Compare one header; what is wrong is quarantined, what cannot be read is left to its first use."""
        state, home = self._state, entry.index
        if entry.verified or home.entries.get(entry.key) is not entry:
            return
        root = state.roots[entry.root]
        try:
            folder = root.folder(home.tenant, home.namespace_id, entry.key)
            fd, nbytes = open_quietly(state.files, names.block_name(entry.key), folder.fd)
            try:
                found = self._compare(home, entry, fd, nbytes)
            finally:
                state.files.close(fd)
            if state.codec.takes(lossy=found.encoding is not None and found.encoding.lossy):
                state.index.learn(entry, found.parent, found.position, found.encoding)
            else:
                state.drop(entry)
        except CorruptBlockError as error:
            state.quarantine(entry, str(error))
        except OSError as error:
            if is_gone(error) and not state.check_vanished(root) and state.index.discard(entry):
                state.index.gone(entry, entry.nbytes)

    def _compare(self, home: NamespaceIndex, entry: DiskEntry, fd: int, nbytes: int) -> Stored:
        """What the header says, if all is as it should be."""
        files, template = self._state.files, self._state.templates.known(home)
        if template is not None and nbytes == template.file_nbytes:
            start = bytearray(template.header_nbytes)
            read_parts(files, fd, [memoryview(start)])
            plain = template.check(bytes(start), entry.key)
            if plain is not None:
                return Stored(*plain)
        header = read_header_bytes(files, fd)
        if template is not None:
            found = template.encoded.check(header, entry.key)
            if found is not None and nbytes == template.encoded.file_nbytes(len(header), found.sizes):
                return Stored(*found[:4])
        parsed = parse_header(header)
        namespace = parsed.namespace() if home.told is None else home.told
        require_identity(parsed, namespace, entry.key)
        if (parsed.tenant, parsed.namespace_id) != (readable(home.tenant), home.namespace_id):
            raise CorruptBlockError("the header names another tenant or namespace than its folder")
        if nbytes != parsed.file_nbytes:
            raise CorruptBlockError(f"the file has {nbytes} bytes, its header speaks of {parsed.file_nbytes}")
        if template is None:
            self._state.templates.get(home, namespace)  # the next header is compared with it
        return Stored(parsed.parent, parsed.position, parsed.checksum, parsed.encoding)
