"""Options of the s3 tier."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.core.errors import ConfigError
from kvferry.store.remote.options import RemoteOptions, option, read_secret

__all__ = ["S3Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options(RemoteOptions):
    """What the s3 tier takes, beside :class:`~kvferry.store.remote.options.RemoteOptions`.

    Attributes:
        part_nbytes: See :class:`~kvferry.store.remote.options.RemoteOptions`; objects may be large.
        connections: Requests at once.
        bucket: It must exist.
        endpoint: ``http://`` or ``https://`` and host; ``None``: that of AWS in the region.
        region: Of the bucket.
        path_style: The bucket stands in the path (``host/bucket/…``), else before the host
            (``bucket.host/…``).
        access_key_id: Of the user; without it the usual places are looked in (environment, instance).
        secret_access_key: Its key; better given in a file.
        secret_access_key_file: File whose first line is the key.
        ca_file: PEM file of the certificates that the endpoint's is checked against; ``None``: the system's.
        multipart_nbytes: Larger objects are uploaded in several requests of this size.
        retries: How often a request that may succeed later is made again, within its time.
    """

    part_nbytes: int = option(
        "size", "Larger blocks are split into parts of this size.", 1 << 30, least=64 << 10, most=1 << 30
    )
    connections: int = option("whole", "Requests at once.", 8, least=1, most=64)
    bucket: str = option("text", "Where to; it must exist.")
    endpoint: str | None = option("text", "http:// or https:// and host; AWS if none.", None)
    region: str = option("text", "Of the bucket.", "us-east-1")
    path_style: bool = option("bool", "Whether the bucket stands in the path, not before the host.", True)
    access_key_id: str | None = option("text", "Of the user; from the environment if none.", None)
    secret_access_key: str | None = option("text", "Its key; better in a file.", None, secret=True)
    secret_access_key_file: str | None = option("text", "File whose first line is the key.", None)
    ca_file: str | None = option("text", "Certificates that the endpoint's is checked against.", None)
    multipart_nbytes: int = option(
        "size", "Larger objects are uploaded in several requests.", 16 << 20, least=5 << 20, most=1 << 30
    )
    retries: int = option("whole", "How often a request is made again.", 3, least=0, most=20)

    def __post_init__(self) -> None:
        RemoteOptions.__post_init__(self)
        keys = [k for k in (self.secret_access_key, self.secret_access_key_file) if k is not None]
        if len(keys) > 1:
            raise ConfigError("give secret_access_key or secret_access_key_file, not both")
        if bool(keys) != (self.access_key_id is not None):
            raise ConfigError("give access_key_id and secret_access_key_file, both or neither")
        if "/" in self.bucket:
            raise ConfigError(f"bucket is {self.bucket!r}: its name alone, without a path; see prefix")
        if self.endpoint is not None:
            parts = urlsplit(self.endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
                raise ConfigError(
                    "endpoint must be http:// or https:// and a host, such as https://s3.local:9000"
                )
            if "@" in parts.netloc:
                raise ConfigError("endpoint has a user before an '@': give access_key_id")

    def secret(self) -> str | None:
        """The key as it is now."""
        if self.secret_access_key is not None:
            return self.secret_access_key
        found = read_secret(self.secret_access_key_file, "secret_access_key_file")
        return None if found is None else found.decode("utf-8", "strict")

    def url(self) -> str | None:
        """The endpoint as requests are sent to it."""
        if self.endpoint is None or self.path_style:
            return self.endpoint
        parts = urlsplit(self.endpoint)
        return parts._replace(netloc=f"{self.bucket}.{parts.netloc}").geturl()
