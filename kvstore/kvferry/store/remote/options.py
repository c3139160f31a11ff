"""Options of the remote tiers: what all of them take, and how a table of the configuration becomes them.

An option is a field of a dataclass with :func:`option`; its name in the configuration, its values as text,
what ``kvferry config show`` says of it and its bounds follow from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from dataclasses import Field as DataField
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from kvferry.core.errors import ConfigError
from kvferry.core.nearest import did_you_mean
from kvferry.core.regular_file import open_regular
from kvferry.core.tier_plugins import TierOption
from kvferry.core.units import format_nbytes, parse_nbytes, parse_seconds
from kvferry.core.values import require_bool, require_number, require_text, require_whole

__all__ = [
    "RemoteOptions",
    "check_options",
    "describe_options",
    "option",
    "option_names",
    "read_options",
    "read_secret",
]

T = TypeVar("T")
Kind = Literal["size", "time", "whole", "text", "bool", "list"]
_MAX_TEXT = 4096
_MAX_SECRET_NBYTES = 64 << 10
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class _About:
    kind: Kind
    about: str
    least: float | None = None
    most: float | None = None
    one_of: tuple[str, ...] = ()
    secret: bool = False

    @property
    def allowed(self) -> str:
        """What values it takes, for people."""
        if self.one_of:
            return f"one of {', '.join(self.one_of)}"
        show: Callable[[float], str] = {"size": format_nbytes, "time": lambda s: f"{s:g} s"}.get(
            self.kind, lambda n: f"{n:g}"
        )
        name = {
            "size": "a size such as 8GiB", "time": "a time such as 5s", "whole": "a whole number",
            "text": "text", "bool": "true or false", "list": "a list, or text with commas",
        }[self.kind]  # fmt: skip
        bounds = [
            f"{w} {show(b)}" for w, b in (("at least", self.least), ("at most", self.most)) if b is not None
        ]
        return ", ".join([name, *bounds])


def option(
    kind: Kind,
    about: str,
    default: object = MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    one_of: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:  # noqa: ANN401  as dataclasses.field
    """A field that is an option; ``_nbytes`` of sizes and ``_s`` of times no configuration sees."""
    metadata = {"option": _About(kind, about, least, most, one_of, secret)}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """What all remote tiers take.

    Attributes:
        capacity_nbytes: Most bytes that this tier keeps there, of what it wrote itself and found at the
            start; the least recently used ones go. 0: no bound of its own.
        part_nbytes: A block with its manifest that is larger is split into parts of at most this.
        timeout_s: For one request, the connection included; the deadline of a call holds besides.
        connections: Most connections to one server; further calls wait for one.
        prefix: What every stored name begins with.
        secret_file: File with the cluster's secret, from which the names of tenants are made. All that share
            a store need the same.
        server_errors: Failures in a row after which a server is left alone for a while.
        server_pause_s: How long that is at first; doubled each time, up to twenty times as long.
    """

    capacity_nbytes: int = option("size", "Most bytes kept there by this tier; 0: no bound.", 0, least=0)
    part_nbytes: int = option(
        "size", "Larger blocks are split into parts of this size.", 32 << 20, least=64 << 10, most=1 << 30
    )
    timeout_s: float = option("time", "For one request.", 5.0, least=0.01, most=300)
    connections: int = option("whole", "Most connections to one server.", 4, least=1, most=64)
    prefix: str = option("text", "What every stored name begins with.", "kvferry")
    secret_file: str | None = option(
        "text", "File with the secret that names of tenants are made with.", None
    )
    server_errors: int = option(
        "whole", "Failures in a row before a server is left alone.", 3, least=1, most=1000
    )
    server_pause_s: float = option("time", "Before it is tried again.", 0.5, least=0.01, most=60)

    def __post_init__(self) -> None:
        check_options(self)
        allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
        if not 0 < len(self.prefix) <= 128 or set(self.prefix) - set(allowed) or self.prefix.startswith("."):
            raise ConfigError(f"prefix is {self.prefix!r}, must be 1 to 128 letters, digits, or . _ -")


def read_secret(path: str | None, what: str) -> bytes | None:
    """The first line of a file that holds a secret; ``None`` without a path.

    Raises:
        ConfigError: If it cannot be read, is empty, or absurdly large.
    """
    if path is None:
        return None
    try:
        with open_regular(Path(path).expanduser()) as file:
            found = file.read(_MAX_SECRET_NBYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{what}: cannot read {path}: {reason}") from error
    secret = found.split(b"\n", 1)[0].strip(b"\r\n ")
    if not secret or len(found) > _MAX_SECRET_NBYTES:
        raise ConfigError(f"{what}: {path} holds no secret in its first line")
    return secret


def check_options(options: object) -> None:
    """Check each option by its kind and bounds.

    Raises:
        ConfigError: For the first that is wrong.
    """
    for each, about in _abouts(type(options)):
        _check(_shown_name(each), getattr(options, each.name), about, optional=each.default is None)


def option_names(cls: type[Any]) -> tuple[str, ...]:
    """Names of all options of a class, as the configuration has them."""
    return tuple(_shown_name(each) for each, _ in _abouts(cls))


def read_options(cls: type[T], where: str, values: Mapping[str, object]) -> T:
    """Options from a table of the configuration; sizes also as ``8GiB``, times as ``5s``.

    Raises:
        ConfigError: For an unknown name, a missing or a wrong value.
    """
    known = {_shown_name(each): (each, about) for each, about in _abouts(cls)}
    found: dict[str, object] = {}
    for name, value in values.items():
        if name not in known:
            near = did_you_mean(name, list(known))
            raise ConfigError(f"{where}: no option {name!r}{near} (existing: {', '.join(known)})")
        each, about = known[name]
        found[each.name] = _converted(f"{where}.{name}", value, about)
    missing = [n for n, (each, _) in known.items() if each.default is MISSING and each.name not in found]
    if missing:
        raise ConfigError(f"{where}: {' and '.join(missing)} must be given")
    try:
        return cls(**found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def describe_options(cls: type[Any], where: str, values: Mapping[str, object]) -> list[TierOption]:
    """Check a table of the configuration, and tell every option with the value that holds.

    Raises:
        ConfigError: As :func:`read_options`.
    """
    options = read_options(cls, where, values)
    found = []
    for each, about in _abouts(cls):
        name, value = _shown_name(each), getattr(options, each.name)
        plain = list(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else value
        text = _text(plain, about)
        found.append(TierOption(name, plain, name in values, text, about.allowed, about.about, about.secret))
    return found


def _abouts(cls: type[Any]) -> list[tuple[DataField[Any], _About]]:
    return [(each, each.metadata["option"]) for each in fields(cls) if "option" in each.metadata]


def _shown_name(each: DataField[Any]) -> str:
    return each.name.removesuffix("_nbytes").removesuffix("_s")


def _text(value: object, about: _About) -> str:
    if value is None:
        return "(none)"
    if about.secret:
        return "***"
    if isinstance(value, bool):
        return str(value).lower()
    if about.kind == "size" and isinstance(value, int):
        text = format_nbytes(value)
        return text if parse_nbytes(text) == value else f"{value} B"
    if about.kind == "time":
        return f"{value:g} s"
    return ", ".join(map(str, cast("list[object]", value))) if isinstance(value, list) else str(value)


def _converted(where: str, value: object, about: _About) -> object:
    """The value of an option, which may be text: a tier can be given in one line."""
    if about.kind == "list":
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{where} is {value!r}, must be a list")
        listed = cast("Sequence[object]", items)
        return tuple(i.strip() if isinstance(i, str) else i for i in listed)
    if isinstance(value, list | tuple):
        raise ConfigError(f"{where} is given several times: give it once, as one value")
    if about.secret and not isinstance(value, str):
        raise ConfigError(f"{where} must be text")
    if about.kind == "bool" and isinstance(value, str):
        return _WORDS.get(value.lower(), value)
    if about.kind == "whole" and isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    try:
        if about.kind == "size" and isinstance(value, str | int) and not isinstance(value, bool):
            return parse_nbytes(value)
        if about.kind == "time" and isinstance(value, str | int | float) and not isinstance(value, bool):
            return parse_seconds(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return value


def _check(name: str, value: object, about: _About, *, optional: bool) -> None:
    if value is None and optional:
        return
    if about.kind in ("size", "whole"):
        least = None if about.least is None else int(about.least)
        require_whole(name, value, least=least, most=(1 << 60) if about.most is None else int(about.most))
    elif about.kind == "time":
        require_number(name, value, least=about.least, most=about.most)
    elif about.kind == "bool":
        require_bool(name, value)
    elif about.kind == "list":
        items = cast("Sequence[object]", value if isinstance(value, tuple) else ())
        if not items or not all(isinstance(i, str) and 0 < len(i) <= _MAX_TEXT for i in items):
            raise ConfigError(f"{name} is {value!r}, must be one or more texts")
    elif about.secret:
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT:
            raise ConfigError(f"{name} must be text of 1 to {_MAX_TEXT} characters")  # never shown
    else:
        require_text(name, value)
        if about.one_of and value not in about.one_of:
            raise ConfigError(f"{name} is {value!r}, must be {about.allowed}")
        if not 0 < len(cast("str", value)) <= _MAX_TEXT:
            raise ConfigError(f"{name} must have 1 to {_MAX_TEXT} characters")
