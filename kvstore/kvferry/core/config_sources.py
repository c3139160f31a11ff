"""Where the values of the configuration come from, and what is said about wrong ones."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from kvferry.core.config import Config, TierConfig
from kvferry.core.config_types import allowed, is_secret, show
from kvferry.core.errors import ConfigError
from kvferry.core.nearest import did_you_mean
from kvferry.core.user_path import user_path

__all__ = [
    "OTHER_VARIABLES",
    "Flag",
    "Loaded",
    "Value",
    "check_assignments",
    "check_environment",
    "fields",
    "load_config",
]

PREFIX = "KVFERRY_"

OTHER_VARIABLES: Mapping[str, str] = {
    "KVFERRY_CONFIG": "the configuration file, where no --config is given",
    "KVFERRY_DEBUG": "1: show the traceback of an error",
    "KVFERRY_CACHE_DIR": "where converted models and other files that can be made again are kept",
    "KVFERRY_NATIVE": "off: no native kernels; a path: those of that library",
    "KVFERRY_NATIVE_ISA": "portable: native kernels without the processor's vector instructions",
    "KVFERRY_TOKEN": "the token that clients show to the daemon; better $KVFERRY_TOKEN_FILE",
    "KVFERRY_TOKEN_FILE": "the file with the token that clients show to the daemon",
    "KVFERRY_SMOLLM2_DIR": "a folder with the SmolLM2 checkpoint, for the demo and for tests",
    "KVFERRY_CHECK_DEVICE": "which device the suites of real devices run on",
    "KVFERRY_POOL_STRESS": "how many actions the device suite's stress of a pool takes",
    "KVFERRY_C004_RUNS": "how often the device suite saves right behind a kernel",
}
"""Environment variables with our prefix that are no fields of the configuration."""

_TIERS = "store.tiers"
_KUBERNETES_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT(_\d+_(TCP|UDP)\w*)?)$")


class _Settings(BaseSettings, Config):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The same tree, for the readers of pydantic-settings."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", enable_decoding=False)


@dataclass(frozen=True, slots=True)
class Value:
    """One line of ``kvferry config show``."""

    key: str
    value: object
    """The typed value; ``***`` for a secret."""
    text: str
    """The value as a person would write it."""
    source: str
    allowed: str
    description: str


@dataclass(frozen=True, slots=True)
class Flag:
    """The value of a command's own option, with the option's name for messages."""

    option: str
    value: object


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and where each value that is no default came from."""

    config: Config
    sources: Mapping[str, str]
    """Dotted key to ``FILE``, ``environment KVFERRY_…``, ``--set`` or an option; defaults are left out."""

    def values(self) -> Iterator[Value]:
        """Every value, in the order of the tree."""
        for key, field in fields().items():
            section, _, name = key.partition(".")
            value = getattr(getattr(self.config, section), name)
            tiers: list[TierConfig] = []
            if key == _TIERS:
                value = tuple(tier.shown() for tier in value)
                tiers = list(getattr(getattr(self.config, section), name))
            yield Value(
                key,
                "***" if is_secret(field) and value is not None else _plain(value),
                show(field, value),
                self.sources.get(key, "default"),
                allowed(field),
                field.description or "",
            )
            for number, tier in enumerate(tiers):
                yield from self._of_tier(f"{key}[{number}]", tier)

    def _of_tier(self, where: str, tier: TierConfig) -> Iterator[Value]:
        source = self.sources.get(_TIERS, "default")
        for option in tier.values():
            yield Value(
                f"{where}.{option.name}",
                "***" if option.secret and option.value is not None else option.value,
                "***" if option.secret and option.value is not None else option.text,
                source if option.given else "default",
                option.allowed,
                option.description,
            )


def _plain(value: object) -> object:
    """Tables as dictionaries, for ``--json``."""
    if isinstance(value, tuple):
        return tuple(item.model_dump() if isinstance(item, BaseModel) else item for item in value)
    return value


def fields() -> dict[str, FieldInfo]:
    """Every field by its dotted key, such as ``decode.listen``."""
    return {
        f"{section}.{name}": field
        for section, table in _sections().items()
        for name, field in table.model_fields.items()
    }


def _sections() -> dict[str, type[BaseModel]]:
    found = {}
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        found[name] = field.annotation
    return found


def load_config(
    file: str | os.PathLike[str] | None = None,
    *,
    assignments: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """Read the configuration: defaults, file, environment, ``--set``, flags, the later over the earlier.

    Args:
        file: A TOML file; ``None`` takes the one that ``$KVFERRY_CONFIG`` names, if any.
        assignments: ``key=value`` each, from ``--set``.
        flags: Values of a command's own options by dotted key, as they are or as :class:`Flag`; ``None``
            values were not given.

    Raises:
        ConfigError: For a file that cannot be read, an unknown key, or values that are not allowed; the
            message names the key, the value, its source and what is allowed.
    """
    merged: dict[str, object] = {}
    sources: dict[str, str] = {}
    for found in (_from_file(file), _from_environment(), _from_assignments(assignments)):
        for key, (value, source) in found.items():
            merged[key], sources[key] = value, source
    for key, given in (flags or {}).items():
        flag = given if isinstance(given, Flag) else Flag("flag", given)
        if flag.value is not None:
            _check_key(key, flag.option)
            merged[key], sources[key] = flag.value, flag.option
    return Loaded(_validated(merged, sources), sources)


def check_environment(names: Iterable[str]) -> None:
    """Check only these variables of the environment, if they are set: a child process will read them.

    Raises:
        ConfigError: As :func:`load_config`, for one of them.
    """
    merged: dict[str, object] = {}
    sources: dict[str, str] = {}
    for name in names:
        if (value := os.environ.get(name)) is not None:
            key = _check_variable(name)
            merged[key], sources[key] = value, f"environment {name}"
    _validated(merged, sources)


def check_assignments(assignments: Sequence[str]) -> Config:
    """The defaults with these ``key=value`` alone: what a child process will read that gets nothing else.

    Raises:
        ConfigError: As :func:`load_config`, for one of them.
    """
    found = _from_assignments(assignments)
    return _validated({k: value for k, (value, _) in found.items()}, {k: s for k, (_, s) in found.items()})


def _validated(merged: Mapping[str, object], sources: Mapping[str, str]) -> Config:
    tree: dict[str, dict[str, object]] = {}
    for key, value in merged.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, merged, sources)) from None  # its own text would show secrets


_Found = dict[str, tuple[object, str]]


def _from_file(file: str | os.PathLike[str] | None) -> _Found:
    named = f"{file}"
    if file is None:
        file = os.environ.get("KVFERRY_CONFIG") or None
        named = f"{file} ($KVFERRY_CONFIG)"
    if file is None:
        return {}
    path = user_path(file, "the configuration file")
    if path.is_dir():
        raise ConfigError(f"configuration file {named}: it is a folder, must be a TOML file")
    if not path.is_file():
        raise ConfigError(f"configuration file {named}: there is no such file")
    try:
        tree = TomlConfigSettingsSource(_Settings, path)()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file {named}: cannot be read: {error}") from error
    return {key: (value, str(path)) for key, value in _flatten(tree, str(path))}


def _from_environment() -> _Found:
    names: dict[str, str] = {}
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name not in OTHER_VARIABLES:
            names[_check_variable(name)] = name
    if not names:
        return {}
    tree = EnvSettingsSource(_Settings)()
    return {key: (value, f"environment {names[key]}") for key, value in _flatten(tree, "the environment")}


def _from_assignments(assignments: Sequence[str]) -> _Found:
    found: _Found = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {text}: write it as key=value, such as --set log.level=debug")
        _check_key(key, "--set")
        found[key] = (value.strip(), "--set")
    return found


def _flatten(tree: Mapping[str, object], where: str) -> Iterator[tuple[str, object]]:
    """Dotted keys and values of nested tables; unknown keys are refused."""
    for section, table in tree.items():
        if section not in _sections():
            _check_key(section, where)
        if not isinstance(table, Mapping):
            raise ConfigError(f"{section} (from {where}) is a section: write {section}.NAME")
        for name, value in table.items():
            key = f"{section}.{name}"
            _check_key(key, where)
            yield key, value


def _check_key(key: str, where: str) -> None:
    known = fields()
    if key in known:
        return
    section, dot, name = key.partition(".")
    sections = _sections()
    if section in sections and not dot:
        raise ConfigError(f"{key} ({where}) is a section: write {key}.NAME, one of {_names(section)}")
    if section in sections:
        hint = did_you_mean(name, sections[section].model_fields) or did_you_mean(key, known)
        raise ConfigError(f"unknown key {key} ({where}){hint}; {section} has {_names(section)}")
    hint = did_you_mean(section, sections) or did_you_mean(key, known)
    raise ConfigError(f"unknown key {key} ({where}){hint}; the sections are {', '.join(sections)}")


def _names(section: str) -> str:
    return ", ".join(_sections()[section].model_fields)


def _check_variable(name: str) -> str:
    """The dotted key that an environment variable sets."""
    key = name[len(PREFIX) :].lower().replace("__", ".")
    known = fields()
    if key in known:
        return key
    if key in _sections():
        raise ConfigError(f"environment {name}: {key} is a section: write {PREFIX}{key.upper()}__NAME")
    hint = did_you_mean(name, [*(PREFIX + k.upper().replace(".", "__") for k in known), *OTHER_VARIABLES])
    if _KUBERNETES_LINK.search(name):
        hint += " (if it is a Kubernetes service link, set enableServiceLinks: false in the pod)"
    raise ConfigError(f"unknown environment variable {name}{hint}")


def _explain(error: ValidationError, given: Mapping[str, object], sources: Mapping[str, str]) -> str:
    known = fields()
    parts = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"][:2])
        field = known[key]
        value = "***" if is_secret(field) else repr(given.get(key, problem["input"]))
        cause = problem.get("ctx", {}).get("error")
        reason = str(cause) if isinstance(cause, ConfigError) else problem["msg"]
        inner = problem["loc"][3:]  # of a table in a list, whose number is before it
        if inner:
            reason = f"{key}[{problem['loc'][2]}].{'.'.join(map(str, inner))}: {reason}"
        if is_secret(field):
            reason = "not usable"
        parts.append(
            f"{key} = {value} (from {sources.get(key, 'default')}): {reason}; allowed: {allowed(field)}"
        )
    return " | ".join(parts)
