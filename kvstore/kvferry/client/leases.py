"""Leases as a client has them: views of the daemon's memory, or of memory of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from kvferry.client.blocks import Blocks, OwnBlocks, StagedBlocks
from kvferry.core.clock import checked_deadline
from kvferry.core.errors import KVFerryError, LeaseExpiredError, StoreError, TransportError, UnavailableError
from kvferry.core.keys import BlockKey
from kvferry.core.leases import checked_indexes
from kvferry.core.raw_copy import copy_blocks
from kvferry.core.segments import MappedSlots
from kvferry.core.spec import KVSpec
from kvferry.wire import daemon_messages as d

if TYPE_CHECKING:
    from kvferry.client.link import Link

__all__ = ["ClientReadLease", "ClientWriteLease"]

log = logging.getLogger(__name__)

_NEVER = float("inf")


class _ClientLease:
    """What both kinds share. Thread safe.

    Attributes:
        number: What the daemon knows it by.
        expires_at: On this process's clock, not later than the daemon's own end of it.
        lossy: Numbers of the blocks that have lost something.
        namespace_id: Of their namespace; empty where it is not known (found by its id).
    """

    kind = ""

    def __init__(
        self, link: Link, spec: KVSpec, keys: tuple[BlockKey, ...], *, number: int = 0, epoch: str = "",
        blocks: Blocks | None = None, expires_at: float = _NEVER, found: bool = False,
        lossy: Iterable[int] | msgspec.UnsetType = msgspec.UNSET, namespace_id: bytes = b"",
    ) -> None:  # fmt: skip
        self._link = link
        self.spec, self.namespace_id = spec, namespace_id
        self.keys = keys
        self.number = number
        self.epoch = epoch
        self.expires_at = expires_at if keys else _NEVER
        self.lossy = frozenset[int]() if lossy is msgspec.UNSET else checked_indexes(lossy, len(keys))
        self._blocks = blocks.read_only() if blocks is not None and self.kind == "read" else blocks
        self._lock = threading.Lock()
        self._over = ""
        self._found = found  # taken by another process: that one ends it if nobody else does
        if keys and not found:
            link.leases[number] = self

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<{self.kind} lease {self.lease_id} of {len(self)} blocks at {self._link.url}>"

    @property
    def lease_id(self) -> str:
        """Identity that can be pickled; :meth:`Client.find_lease` of another process resolves it."""
        return f"{self.number:x}"

    def view(self, index: int) -> memoryview:
        """The bytes of block ``index``; see :class:`kvferry.core.blockstore.Lease`."""
        if self._over or self._link.closed or time.monotonic() >= self.expires_at:
            self._require_active()  # written out: it is asked for each block
        blocks, count = self._blocks, len(self.keys)
        if blocks is not None and 0 <= index < count:
            return blocks.view(index)
        if blocks is None or not -count <= index < 0:
            raise IndexError(f"{self!r} has no block {index}")
        return blocks.view(index + count)

    def layer(self, index: int, layer: int) -> memoryview:
        """The layer slice ``layer`` of block ``index``."""
        return self.view(index)[self.spec.layer_slice(layer)]

    def renew(self) -> None:
        """Move the deadline to a whole lease length from now.

        Raises:
            LeaseExpiredError: If it is past its deadline, has ended, or the daemon cannot be reached or was
                restarted.
        """
        self._require_active()
        if not self.keys:
            return
        deadline = self._link.call_deadline()
        try:
            with self._link.line(deadline, epoch=self.epoch) as line:
                request = d.RenewLease(
                    lease=self.number, ended=line.take_ended(), abandoned=line.take_abandoned()
                )
                answer = line.call(request, d.LeaseRenewed, deadline)
                self.expires_at = max(self.expires_at, line.local(answer.expires_at))
        except (TransportError, UnavailableError) as error:
            raise LeaseExpiredError(f"{self!r} cannot be renewed: {error}") from error

    def _require_active(self) -> None:
        if self._over:
            raise LeaseExpiredError(f"{self.kind} lease {self.lease_id} has ended: {self._over}")
        if self._link.closed:
            raise LeaseExpiredError(f"{self.kind} lease {self.lease_id} has ended: the client was closed")
        late = time.monotonic() - self.expires_at
        if late >= 0:
            raise LeaseExpiredError(
                f"{self.kind} lease {self.lease_id} is {late:.3f} s past its deadline; ask again"
            )

    def _finish(self, reason: str) -> bool:
        """Note the end; ``False`` if it had ended before."""
        with self._lock:
            if self._over:
                return False
            self._over = reason
        if self.keys:
            self._link.leases.pop(self.number, None)
        return True


class ClientReadLease(_ClientLease):
    """See :class:`kvferry.core.blockstore.ReadLease`: views are read-only, tentative until :meth:`check`."""

    kind = "read"

    def check(self) -> None:
        """Confirm that all that was read so far is right; asks nobody.

        Raises:
            LeaseExpiredError: If it is past its deadline, has ended, or a slot was used again.
        """
        stale = None if self._blocks is None else self._blocks.first_stale()
        if stale is not None:
            raise LeaseExpiredError(
                f"read lease {self.lease_id}: the slot of block {stale} was used again; what was read is void"
            )
        self._require_active()

    def void(self) -> None:
        """Its bytes did not come: nobody has it, and who asked for it abandons it."""
        self._finish("its bytes did not come")

    def release(self) -> None:
        """Check, then give the blocks back, also when the check fails.

        The daemon learns of it with the next request, at most a second later.

        Raises:
            LeaseExpiredError: As :meth:`check`; also on a second release, which changes nothing.
        """
        failed: LeaseExpiredError | None = None
        try:
            self.check()
        except LeaseExpiredError as error:
            failed = error
        if not self._finish("it was released"):
            raise LeaseExpiredError(f"read lease {self.lease_id} has ended: {self._over}")
        if self.keys:
            self._link.end(self.number, self.epoch)
        if failed is not None:
            raise failed

    def __enter__(self) -> ClientReadLease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._over:
            return
        try:
            self.release()
        except LeaseExpiredError:
            if exc_info[0] is None:
                raise

    def __del__(self) -> None:
        if self.keys and not (self._over or self._found or self._link.closed):
            self._link.end(self.number, self.epoch)


class ClientWriteLease(_ClientLease):
    """See :class:`kvferry.core.blockstore.WriteLease`.

    A lease that is just dropped, without commit or abort, keeps its slots in quarantine as long as its
    session's processes run, since somebody may still write into views of it: use it as a context manager.
    """

    kind = "write"
    _writings = 0
    _quarantined = False

    def mark_lossy(self, indexes: Iterable[int]) -> None:
        """Blocks that have lost something; the daemon hears of it with the commit."""
        self.lossy |= checked_indexes(indexes, len(self))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Held around a write by somebody else's hand into the slots.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or has ended.
        """
        self._require_active()
        with self._lock:
            self._writings += 1
        try:
            yield
        finally:
            with self._lock:
                self._writings -= 1
                last = self._quarantined and not self._writings
            if last:
                self._link.end(self.number, self.epoch)

    def save(self, sources: Mapping[BlockKey, memoryview], deadline: float) -> int:
        """Copy blocks into their slots, or send them from where they are, and commit.

        Args:
            sources: The bytes of all keys of the lease; those of others are left.
            deadline: As :meth:`commit`.

        Raises:
            KVFerryError: As :meth:`commit`.
        """
        self._require_active()
        blocks, wanted = self._blocks, [sources[key] for key in self.keys]
        if isinstance(blocks, (MappedSlots, StagedBlocks)):
            copy_blocks(blocks.addresses(), wanted, self.spec.block_nbytes)
            wanted = []
        return self._commit(deadline, 0, wanted)[0]

    def commit(self, deadline: float | None = None) -> int:
        """Publish all blocks at once and end the lease.

        Args:
            deadline: By when the daemon's answer must be there; ``call_timeout_s`` from now if not given.

        Returns:
            Blocks newly stored.

        Raises:
            LeaseExpiredError: If the lease is past its deadline, has ended, or the daemon was restarted;
                nothing is published.
            UnavailableError: If the daemon does not answer: nothing is stored, or it is not known.
            StoreError: If a ``writing()`` is still open.
        """
        return self._commit(deadline, 0)[0]

    def publish(self) -> tuple[int, ClientReadLease]:
        """Commit and go on holding the same memory for reading; raises as :meth:`commit`."""
        number = self._link.new_number()
        count, expires_at = self._commit(None, number)
        return count, ClientReadLease(
            self._link, self.spec, self.keys, number=number, epoch=self.epoch, blocks=self._blocks,
            expires_at=expires_at, lossy=self.lossy,
        )  # fmt: skip

    def abort(self) -> None:
        """Publish nothing and give the slots back; without effect on a lease that has ended."""
        if not self._finish("it was aborted") or not self.keys:
            return
        with self._lock:
            self._quarantined = bool(self._writings)
        if not self._quarantined:
            self._link.end(self.number, self.epoch)
            return
        deadline = self._link.call_deadline()
        with contextlib.suppress(KVFerryError), self._link.line(deadline, epoch=self.epoch) as line:
            request = d.QuarantineLease(
                lease=self.number, ended=line.take_ended(), abandoned=line.take_abandoned()
            )
            line.call(request, d.Done, deadline)

    def _commit(
        self, deadline: float | None, publish: int, payload: Sequence[memoryview] = ()
    ) -> tuple[int, float]:
        try:
            self._require_active()
        except LeaseExpiredError:
            self.abort()
            raise
        deadline = self._link.call_deadline() if deadline is None else checked_deadline(deadline)
        if self._writings:
            raise StoreError(f"{self!r}: commit with {self._writings} writing() open; close them first")
        if not self._finish("it was committed"):
            raise LeaseExpiredError(f"write lease {self.lease_id} has ended: {self._over}")
        if not self.keys:
            return 0, _NEVER
        try:
            return self._ask_commit(deadline, publish, payload)
        except BaseException as error:
            self._over = f"its commit failed: {error}"
            self._link.end(self.number, self.epoch)
            if publish:
                self._link.abandon(publish)
            if isinstance(error, TransportError):
                raise UnavailableError(
                    f"{self!r}: no answer to its commit; nobody knows whether the blocks are stored: {error}"
                ) from error
            raise

    def _ask_commit(self, deadline: float, publish: int, payload: Sequence[memoryview]) -> tuple[int, float]:
        blocks = self._blocks
        with self._link.line(deadline, epoch=self.epoch) as line:
            staged: bytes | msgspec.UnsetType = msgspec.UNSET
            if isinstance(blocks, StagedBlocks) and line.has_staging(self._link.staging, deadline):
                staged = blocks.offsets(len(self))
            elif not payload and isinstance(blocks, OwnBlocks):
                payload = blocks.views(len(self))
            request = d.CommitBlocks(
                lease=self.number, timeout_s=max(0.0, deadline - time.monotonic()), publish=publish,
                lossy=tuple(sorted(self.lossy)) or msgspec.UNSET, staged=staged,
                ended=line.take_ended(), abandoned=line.take_abandoned(),
            )  # fmt: skip
            answer = line.call(request, d.Stored, deadline, payload, lent=True)
            return answer.blocks, line.local(answer.expires_at)

    def __enter__(self) -> ClientWriteLease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()
