"""Where a client puts blocks that the daemon copies: saves where its memory may not be written."""

from __future__ import annotations

import logging
import threading

from kvferry.client.blocks import OwnBlocks, StagedBlocks
from kvferry.core.errors import StoreError
from kvferry.core.staging import StagingMemory

__all__ = ["Staging"]

log = logging.getLogger(__name__)


class Staging:
    """Staging memory of one client, made when it is first needed. Thread safe.

    Args:
        nbytes: Most that it takes; 0 for none at all.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._memory: StagingMemory | None = None

    @property
    def memory(self) -> StagingMemory | None:
        """It, if it was needed."""
        return self._memory

    def blocks(self, count: int, block_nbytes: int) -> StagedBlocks | None:
        """Room for ``count`` blocks; ``None`` if there is none: they are sent then."""
        wanted = count * OwnBlocks.step(block_nbytes)
        if not 0 < wanted <= self._nbytes:
            return None
        with self._lock:
            if self._memory is None and not self._make():
                return None
        assert self._memory is not None
        piece = self._memory.piece(wanted)
        return None if piece is None else StagedBlocks(piece, block_nbytes)

    def _make(self) -> bool:
        try:
            self._memory = StagingMemory(self._nbytes)
        except StoreError as error:
            self._nbytes = 0
            log.warning("blocks are sent to the daemon instead: %s", error)
            return False
        return True

    def close(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self._nbytes = 0
            if self._memory is not None:
                self._memory.close()
