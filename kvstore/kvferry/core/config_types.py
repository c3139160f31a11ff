"""What a field of the configuration can be, how text becomes its value, and what is allowed in it.

One text form serves the environment, ``--set`` and quoted values of a file, so a value means the same
wherever it is written.
"""

import enum
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from kvferry.core.address import parse_url
from kvferry.core.errors import ConfigError
from kvferry.core.tier_plugins import policy_names, require_policy
from kvferry.core.units import format_nbytes, format_seconds, parse_nbytes, parse_seconds

__all__ = ["Kind", "Nbytes", "Policy", "Seconds", "Section", "Url", "allowed", "is_secret", "show"]

T = TypeVar("T")


class Kind(enum.Enum):
    """Numbers that are written with a unit."""

    SIZE = "size"
    TIME = "time"


Nbytes = Annotated[int, Kind.SIZE]
"""A size in bytes, written as ``8GiB``, ``1.5GB`` or a number of bytes."""

Seconds = Annotated[float, Kind.TIME]
"""A time in seconds, written as ``5s``, ``200ms`` or a number of seconds."""


@dataclass(frozen=True, slots=True)
class Url:
    """Marks a ``str`` (or a tuple of them) as an address; a bare host takes this scheme and port."""

    default_port: int
    default_scheme: str = "tcp"


@dataclass(frozen=True, slots=True)
class Policy:
    """Marks a ``str`` as the name of a policy of this kind, a plug-in of the store."""

    kind: str


class Section(BaseModel):
    """Base of every table of the configuration.

    A field is an annotation, a default and a ``Field`` with bounds and a description; everything else (the
    file, the environment, ``--set``, messages, ``kvferry config show``) follows from it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name or ""]
        return value if isinstance(value, BaseModel | dict) else _value(field, value)


def _marker(field: FieldInfo, kind: type[T]) -> T | None:
    return next((m for m in field.metadata if isinstance(m, kind)), None)


def _types(field: FieldInfo) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _value(field: FieldInfo, value: object) -> object:
    types = _types(field)
    if type(None) in types and _is_none(value):
        return None
    if isinstance(value, bool) and bool not in types:
        raise ConfigError(f"takes no {str(value).lower()}")
    kind = _marker(field, Kind)
    if kind is not None and isinstance(value, str | int | float):
        return parse_nbytes(value) if kind is Kind.SIZE else parse_seconds(value)
    policy = _marker(field, Policy)
    if policy is not None and isinstance(value, str) and value != field.default:
        require_policy(policy.kind, value)
    url = _marker(field, Url)
    if any(get_origin(t) is tuple for t in types):
        items = _items(value)
        if type(None) in types and any(_is_none(item) for item in items):
            raise ConfigError("has `none` beside other values")
        return tuple(_address(url, item) for item in items) if url is not None else items
    if any(get_origin(t) is Literal for t in types) and isinstance(value, str):
        return value.lower()
    return value if url is None else _address(url, value)


def _is_none(value: object) -> bool:
    """Whether it says none: by itself, or as all that is in a list."""
    if isinstance(value, list | tuple) and len(value) == 1:
        return _is_none(value[0])
    return value is None or (isinstance(value, str) and value.lower() in ("", "none"))


def _items(value: object) -> tuple[object, ...]:
    """The items of a list that may be written as text with commas."""
    if isinstance(value, str):
        return tuple(item for item in (part.strip() for part in value.split(",")) if item)
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ConfigError("is not a list")


def _address(url: Url, value: object) -> object:
    if not isinstance(value, str):
        raise ConfigError("is not an address")
    return parse_url(value, default_scheme=url.default_scheme, default_port=url.default_port).url


def is_secret(field: FieldInfo) -> bool:
    """Whether values of ``field`` are never shown."""
    return SecretStr in _types(field)


def show(field: FieldInfo, value: object) -> str:
    """``value`` as a person would write it; a secret as stars."""
    if is_secret(field):
        return "(none)" if value is None else "***"
    if value is None:
        return "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return _show_number(_marker(field, Kind), value)
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return str(value)


def _show_number(kind: Kind | None, value: float) -> str:
    if kind is Kind.SIZE:
        text = format_nbytes(value)
        return text if parse_nbytes(text) == value else f"{value} B"
    if kind is Kind.TIME:
        text = format_seconds(value)
        return text if text.count(" ") == 1 and parse_seconds(text) == value else f"{value:g} s"
    return str(value)


def allowed(field: FieldInfo) -> str:
    """What values ``field`` takes, for messages and ``kvferry config show``."""
    types = [t for t in _types(field) if t is not type(None)]
    suffix = ", or none" if len(types) < len(_types(field)) else ""
    return _allowed_type(field, types[0]) + suffix


def _allowed_type(field: FieldInfo, kind: object) -> str:
    bounds = {name: getattr(m, name) for m in field.metadata for name in _BOUNDS if hasattr(m, name)}
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if kind is bool:
        return "true or false"
    if (
        get_origin(kind) is tuple
        and isinstance(get_args(kind)[0], type)
        and issubclass(get_args(kind)[0], BaseModel)
    ):
        return f"at most {bounds['max_length']} tables, or text with commas"
    if get_origin(kind) is tuple:
        few = f"at least {bounds['min_length']} " if "min_length" in bounds else ""
        return f"{few}address{'es' if few != 'at least 1 ' else ''} (a list, or text with commas)"
    policy = _marker(field, Policy)
    if policy is not None:
        return "one of " + ", ".join(policy_names(policy.kind))
    url = _marker(field, Url)
    if url is not None:
        return f"an address such as {url.default_scheme}://127.0.0.1:{url.default_port}"
    if kind in (int, float):
        unit = _marker(field, Kind)
        return f"{_show_number(unit, bounds['ge'])} to {_show_number(unit, bounds['le'])}"
    return f"text of at most {bounds['max_length']} characters"


_BOUNDS = ("ge", "le", "min_length", "max_length")
