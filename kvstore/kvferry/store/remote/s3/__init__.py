"""The ``s3`` tier: stores that speak the protocol of S3, through ``obstore`` (extra ``s3``)."""

from __future__ import annotations

from kvferry.store.remote.s3.options import S3Options
from kvferry.store.remote.s3.tier import S3Tier

__all__ = ["S3Options", "S3Tier"]
