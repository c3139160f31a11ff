"""One slower tier in the configuration: a table, or the same in one line of text."""

from typing import Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode

from pydantic import Field, model_validator

from kvferry.core.config_types import Nbytes, Seconds, Section
from kvferry.core.errors import ConfigError

__all__ = ["TierConfig"]

_MIB, _GIB = 2**20, 2**30
_OPTIONS = "options"


class TierConfig(Section):
    """How one slower tier is made and used.

    Keys beside those named here are options of the tier's own kind, such as ``directory`` and ``capacity``
    of a disk. As text: ``disk:/var/cache/kv?capacity=100GiB&write=write_back``; what stands between the
    colon and the question mark is the option ``directory``, and an option that is named several times is a
    list.
    """

    kind: str = Field(min_length=1, max_length=64, description="Which plug-in it is, such as disk.")
    name: str | None = Field(
        default=None, min_length=1, max_length=64, description="How it is called; as its kind if none."
    )
    write: str = Field(
        default="write_back",
        min_length=1,
        max_length=64,
        description="When blocks are written to it: write_through, write_back or on_evict.",
    )
    admission: str = Field(
        default="always",
        min_length=1,
        max_length=64,
        description="Which blocks are written to it: always or second_hit.",
    )
    promotion: str = Field(
        default="always",
        min_length=1,
        max_length=64,
        description="Which blocks read from it stay in memory: always, second_hit or never.",
    )
    queue: Nbytes = Field(
        default=256 * _MIB, ge=1, le=1024 * _GIB, description="Bytes that may wait to be written to it."
    )
    errors: int = Field(default=3, ge=1, le=1000, description="Failures in a row before it is left alone.")
    pause: Seconds = Field(default=1.0, ge=0.001, le=3600, description="Before it is tried again.")
    lookup_timeout: Seconds = Field(default=1.0, ge=0.001, le=300, description="For its answer to a lookup.")
    read_timeout: Seconds = Field(default=30.0, ge=0.001, le=3600, description="For a read, at most.")
    write_timeout: Seconds = Field(default=30.0, ge=0.001, le=3600, description="For a write, at most.")
    options: dict[str, Any] = Field(default_factory=dict, description="What the kind itself takes.")

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, given: object) -> object:
        if isinstance(given, str):
            given = _from_line(given)
        if not isinstance(given, dict):
            return given
        table = cast("dict[str, object]", given)
        own = {name: value for name, value in table.items() if name in cls.model_fields and name != _OPTIONS}
        rest = {name: value for name, value in table.items() if name not in cls.model_fields}
        nested = table.get(_OPTIONS)
        if isinstance(nested, dict):
            rest |= cast("dict[str, object]", nested)
        return own | {_OPTIONS: rest}

    def __str__(self) -> str:
        """The text form, with what differs from the defaults."""
        fields = type(self).model_fields
        shown: dict[str, object] = {
            name: getattr(self, name)
            for name in fields
            if name not in ("kind", _OPTIONS) and getattr(self, name) != fields[name].default
        }
        options = dict(self.options)
        path = options.pop("directory", "") if isinstance(options.get("directory"), str) else ""
        query = urlencode({**options, **shown}, doseq=True, safe="/:[]")
        return f"{self.kind}:{quote(str(path))}{'?' if query else ''}{query}"


def _from_line(text: str) -> dict[str, object]:
    kind, colon, rest = text.partition(":")
    path, _, query = rest.partition("?")
    if not colon or not kind:
        raise ConfigError(
            f"{text!r} is no tier; write kind:path?option=value, such as disk:/cache?capacity=8GiB, and an "
            "option of several values once for each: disk:?directories=/a&directories=/b"
        )
    found: dict[str, object] = {}
    given = parse_qsl(query, keep_blank_values=True)
    for name, value in given:
        same = [v for n, v in given if n == name]
        found[name] = same if len(same) > 1 else value
    if path:
        found["directory"] = unquote(path)
    return {"kind": kind, **found}
