"""One slower tier in the configuration: a table, or the same in one line of text."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode

from pydantic import Field, model_validator

from kvferry.core.config_types import Nbytes, Policy, Seconds, Section, allowed, show
from kvferry.core.errors import ConfigError, PluginUnavailableError
from kvferry.core.nearest import did_you_mean
from kvferry.core.tier_plugins import TIERS, TierOption

__all__ = ["TierConfig"]

_MIB, _GIB = 2**20, 2**30
_OPTIONS = "options"
_PLACES = ("urls", "peers", "bucket")  # options that tell where a tier without a directory is


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
    write: Annotated[str, Policy("write")] = Field(
        default="write_back",
        min_length=1,
        max_length=64,
        description="When blocks are written to it: write_through, write_back or on_evict.",
    )
    admission: Annotated[str, Policy("admission")] = Field(
        default="always",
        min_length=1,
        max_length=64,
        description="Which blocks are written to it: always or second_hit.",
    )
    promotion: Annotated[str, Policy("promotion")] = Field(
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
        for key, value in own.items():
            if isinstance(value, list | tuple):
                raise ConfigError(f"{key} is {list(value)}: give it once, as one value")
        nested = table.get(_OPTIONS, {})
        if not isinstance(nested, dict):
            raise ConfigError(f"options is {nested!r}, must be a table of the kind's own options")
        for key in rest.keys() & nested.keys():
            raise ConfigError(f"{key} is given twice, beside options and in it")
        rest |= cast("dict[str, object]", nested)
        kind, name = own.get("kind"), own.get("name")
        if isinstance(kind, str) and isinstance(name, str | None):
            described = _describe(kind, name or kind, rest, list(cls.model_fields))
            rest = {option.name: option.value for option in described if option.given}
        return own | {_OPTIONS: rest}

    def values(self) -> Iterator[TierOption]:
        """Every value that holds: those of the store's side, then the options of the kind."""
        for name, field in type(self).model_fields.items():
            if name != _OPTIONS:
                value, given = getattr(self, name), name in self.model_fields_set
                text = show(field, value)
                yield TierOption(name, value, given, text, allowed(field), field.description or "")
        yield from _describe(self.kind, self.name or self.kind, self.options, [])

    def shown(self) -> "TierConfig":
        """The same with stars for what is secret."""
        secret = [option.name for option in self.values() if option.secret and option.given]
        options = {name: "***" if name in secret else value for name, value in self.options.items()}
        return self.model_copy(update={_OPTIONS: options})

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
        if isinstance(listed := options.get("directories"), list | tuple) and len(listed) == 1:
            path = options.pop("directories")[0]
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
    if path and "directory" in found:
        raise ConfigError(f"{text!r}: directory is given twice, before the question mark and after it")
    if path:
        found["directory"] = unquote(path)
    return {"kind": kind, **found}


def _describe(kind: str, name: str, options: Mapping[str, object], own: list[str]) -> list[TierOption]:
    """Check the options of a tier by its plug-in; ``own`` are the names that the store itself knows."""
    try:
        plugin = TIERS.load(kind)
    except PluginUnavailableError:  # whoever opens it is told what is missing
        return [TierOption(key, value, True, str(value)) for key, value in options.items()]
    known: tuple[str, ...] | None = plugin.option_names
    for option in options:
        if known is not None and option not in known:
            near = did_you_mean(option, [*known, *own])
            place = next((each for each in _PLACES if each in known), None)
            if option == "directory" and place is not None:
                raise ConfigError(
                    f"tier {name}: what stands between the colon and the question mark is the directory of a "
                    f"disk, and {kind} has none: write {kind}:?{place}=…"
                )
            of_store = [each for each in own if each != _OPTIONS]
            raise ConfigError(
                f"tier {name}: no option {option!r}{near} (of {kind}: {', '.join(known)}; "
                f"of every tier: {', '.join(of_store)})"
            )
    return cast("list[TierOption]", plugin.describe_options(name, options))
