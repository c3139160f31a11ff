"""The s3 tier."""

from __future__ import annotations

from kvferry.store.problems import Problems
from kvferry.store.remote.s3.backend import S3Backend
from kvferry.store.remote.s3.options import S3Options
from kvferry.store.remote.tier import RemoteTier

__all__ = ["S3Tier"]


class S3Tier(RemoteTier[S3Options]):
    """Keeps blocks in a bucket, an object each. Nothing is asked of the store before the first use.

    See :class:`~kvferry.store.remote.tier.RemoteTier` for arguments and errors.
    """

    options_class = S3Options

    def make_backend(self, options: S3Options, problems: Problems) -> S3Backend:
        """See :class:`~kvferry.store.remote.tier.RemoteTier`."""
        return S3Backend(self.name, options, problems)
