"""The credentials file: who may use the daemon, as which tenant, with which rights and within which bounds.

Tokens are made here, 256 random bits each, and only what a secret hashes to is kept. Nobody can guess such a
token, so one salted hash does; a slow one would only let strangers burn the daemon's time (ADR 0025).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from kvferry.core.errors import AuthError, ConfigError
from kvferry.core.tenants import check_tenant
from kvferry.core.token_file import require_owners_alone
from kvferry.core.user_path import user_path

__all__ = [
    "RIGHTS",
    "Credential",
    "CredentialFile",
    "Credentials",
    "Limits",
    "Right",
    "credentials_path",
    "edited",
    "new_credential",
    "read_credentials",
]

Right: TypeAlias = Literal["read", "write", "admin"]
RIGHTS: Final[tuple[Right, ...]] = ("read", "write", "admin")
MAX_TENANTS: Final = 64
_MAX_CREDENTIALS: Final = 4096
_MAX_NBYTES: Final = 4 << 20
_TOKEN: Final = re.compile(rb"kvf1_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_DUMMY: Final = secrets.token_bytes(16)
_MIB: Final = 1 << 20
_LOCK_S: Final = 5.0

_Salt = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Size = Annotated[int, msgspec.Meta(ge=_MIB, le=1 << 60)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one tenant may use.

    Attributes:
        dram: Bytes of memory; an equal share of what others leave, if not given.
        disk: Bytes of all disk tiers together; likewise.
        rate: Bytes a second that it may load and save, over all its connections; no limit if not given.
        requests: Requests a second, likewise.
        connections: Connections at once; as many as the daemon takes, if not given.
    """

    dram: _Size | None = None
    disk: _Size | None = None
    rate: Annotated[float, msgspec.Meta(ge=1)] | None = None
    requests: Annotated[float, msgspec.Meta(ge=0.1)] | None = None
    connections: Annotated[int, msgspec.Meta(ge=1, le=65536)] | None = None


class Credential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One token: what is known of it, which is not the token.

    Attributes:
        id: Names it; the token begins with it.
        tenant: Whose blocks it opens.
        rights: What it may do.
        salt: Of the hash.
        hash: HMAC-SHA-256 of its secret under the salt.
        expires_at: ``time.time()`` from which on it is not valid any more.
        note: For people.
    """

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{12}$")]
    tenant: str
    rights: tuple[Right, ...]
    salt: _Salt
    hash: _Hash
    expires_at: float | None = None
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""

    def __repr__(self) -> str:
        return f"<Credential {self.id} of {self.tenant}: {', '.join(self.rights)}>"

    def is_over(self, now: float) -> bool:
        """Whether it is not valid any more at ``time.time()`` ``now``."""
        return self.expires_at is not None and now >= self.expires_at

    def same_power(self, other: Credential | None) -> bool:
        """Whether who was let in by this one would be by the other, as the same and with the same rights."""
        return (
            other is not None
            and (self.id, self.tenant, self.hash) == (other.id, other.tenant, other.hash)
            and set(self.rights) == set(other.rights)
        )


class CredentialFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds: every tenant there is, and the credentials of each."""

    version: Literal[1] = 1
    tenants: dict[str, Limits] = {}
    credentials: tuple[Credential, ...] = ()

    def check(self) -> None:
        """See that it fits together.

        Raises:
            ConfigError: With what does not.
        """
        for tenant in self.tenants:
            check_tenant(tenant)
            if not tenant.isprintable():
                raise ConfigError(f"tenant {tenant!r}: take characters that can be printed")
        if len(self.tenants) > MAX_TENANTS or len(self.credentials) > _MAX_CREDENTIALS:
            raise ConfigError(
                f"{len(self.tenants)} tenants and {len(self.credentials)} credentials; at most {MAX_TENANTS} "
                f"and {_MAX_CREDENTIALS} may be"
            )
        ids = [one.id for one in self.credentials]
        if len(set(ids)) < len(ids):
            raise ConfigError("two credentials have the same id; remove one of them")
        for one in self.credentials:
            if one.tenant not in self.tenants:
                raise ConfigError(f"credential {one.id} is of tenant {one.tenant!r}, which is not in tenants")
            if not one.rights or len(set(one.rights)) < len(one.rights):
                raise ConfigError(f"credential {one.id} needs rights, each once, of {', '.join(RIGHTS)}")


class Credentials:
    """The credentials of a file, to look tokens up in. Immutable, thread safe."""

    def __init__(self, file: CredentialFile) -> None:
        self._by_id = {one.id: one for one in file.credentials}

    def get(self, credential_id: str) -> Credential | None:
        """The credential of that id."""
        return self._by_id.get(credential_id)

    def find(self, shown: bytes | None) -> Credential:
        """The credential of a token. The time that it takes does not depend on how much of it is right.

        Raises:
            AuthError: If there is none; the message tells nothing of those that there are.
        """
        if not shown:
            raise AuthError(
                "a token is needed here: name its file with $KVFERRY_TOKEN_FILE or ClientOptions.token_file"
            )
        parts = _TOKEN.fullmatch(shown)
        found = self._by_id.get(parts[1].decode()) if parts else None
        salt = _DUMMY if found is None else bytes.fromhex(found.salt)
        digest = _digest(salt, parts[2] if parts else b"")
        expected = _DUMMY * 2 if found is None else bytes.fromhex(found.hash)
        if not hmac.compare_digest(digest, expected) or found is None or found.is_over(time.time()):
            raise AuthError("the token is not valid here (any more)")
        return found


def _digest(salt: bytes, secret: bytes) -> bytes:
    return hmac.new(salt, b"kvferry token 1\0" + secret, hashlib.sha256).digest()


def new_credential(
    tenant: str, rights: tuple[Right, ...], *, note: str = "", expires_at: float | None = None
) -> tuple[Credential, str]:
    """A credential with a token of its own, which is nowhere else."""
    secret, salt, name = secrets.token_urlsafe(32), secrets.token_bytes(16), secrets.token_hex(6)
    credential = Credential(
        id=name,
        tenant=tenant,
        rights=rights,
        salt=salt.hex(),
        hash=_digest(salt, secret.encode()).hex(),
        expires_at=expires_at,
        note=note,
    )
    return credential, f"kvf1_{name}_{secret}"


def credentials_path(setting: str) -> Path | None:
    """Where ``daemon.credentials`` says that the file is.

    Raises:
        ConfigError: If the path is not absolute.
    """
    if setting == "none":
        return None
    path = user_path(setting, "daemon.credentials")
    if not path.is_absolute():
        raise ConfigError(f"daemon.credentials is {setting!r}: write an absolute path or none")
    return path


def read_credentials(path: Path) -> CredentialFile:
    """What a credentials file holds.

    Raises:
        ConfigError: If it cannot be read, others may read or write it, or it does not fit together.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"the credentials file {path} cannot be read: {error.strerror}; kvferry credentials add makes it"
        ) from error
    try:
        require_owners_alone(number, f"the credentials file {path}")
        data = os.read(number, _MAX_NBYTES + 1)
    finally:
        os.close(number)
    if len(data) > _MAX_NBYTES:
        raise ConfigError(f"the credentials file {path} is over {_MAX_NBYTES} bytes")
    try:
        content = msgspec.json.decode(data, type=CredentialFile)
        content.check()
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"the credentials file {path}: {error}") from None
    return content


@contextmanager
def edited(path: Path) -> Iterator[list[CredentialFile]]:
    """Change a credentials file: the only item of the list is what it holds; another one is written.

    The file is whole at any moment, its owner's alone, and of one writer at a time.

    Raises:
        ConfigError: As :func:`read_credentials`, or if it cannot be written.
    """
    path = Path(os.path.realpath(path))
    try:
        with _locked(path.with_name(f".{path.name}.lock")):
            box = [read_credentials(path) if path.exists() else CredentialFile()]
            yield box
            box[0].check()
            _write(path, msgspec.json.format(msgspec.json.encode(box[0]), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"the credentials file {path} cannot be written: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise ConfigError(f"somebody else holds {path} for {_LOCK_S:g} s already") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(number)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            with contextlib.suppress(FileNotFoundError):
                before = path.stat()
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(number, before.st_uid, before.st_gid)  # root changes it for the daemon's user
            file.flush()
            os.fsync(number)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
