"""``kvferry bench transport``: what each transport delivers, beside a bare socket in the same run."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from kvferry.bench.ceilings import COLD_NBYTES
from kvferry.bench.link.ends import LinkEnds
from kvferry.bench.link.memory import parse_walk
from kvferry.bench.link.mooncake import MooncakeTe
from kvferry.bench.link.redis import redis_problem
from kvferry.bench.pairing import MIN_RUNS, Progress
from kvferry.bench.registry import Options
from kvferry.bench.results import Result
from kvferry.bench.scenarios.transport_arena import parse_block
from kvferry.core.address import parse_url
from kvferry.core.buffers import PAGE_NBYTES
from kvferry.core.errors import ConfigError, PluginUnavailableError, UnknownPluginError
from kvferry.core.nearest import did_you_mean
from kvferry.core.units import parse_nbytes, parse_rate
from kvferry.transports import registry
from kvferry.transports.lanes import MAX_LANES

__all__ = ["DEFAULT_PORT", "DEFAULT_SIZES", "SCENARIOS", "SCHEMES", "TransportOptions", "is_installed", "run"]

log = logging.getLogger(__name__)

DEFAULT_SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB"
SCHEMES = ("tcp", "tls", "unix", "ucx", "inproc")
ALTERNATIVES = ("mooncake", "ucxx", "redis")
DEFAULT_PORT = 8470
_KINDS = ("put", "get", "roundtrip", "batch")
_CHECKSUMS = ("off", "xxh3")
_PLACES = ("apart", "anywhere")
_MAX_SECONDS = 3600
SCENARIOS = {
    **{
        f"transport.{scheme}.{kind}": "transport_batch:run" if kind == "batch" else "transport_link:run_link"
        for scheme in SCHEMES
        for kind in _KINDS
    },
    "transport.tcp.rate": "transport_rate:run",
    "transport.unix.arena": "transport_arena:run",
    "transport.mooncake.write": "transport_windows:run_windows",
    "transport.mooncake.read": "transport_windows:run_windows",
}


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How to run the scenarios.

    Attributes:
        scenarios: Which, in order.
        sizes: Bytes of a part.
        batches: Parts of a message.
        lanes: Sockets of a connection, for ``tcp``.
        rate_lanes: Those of ``transport.tcp.rate``, unless ``lanes`` were asked for.
        checksums: ``off``, ``xxh3``.
        runs: Rounds that count.
        warmup: Rounds before them.
        walk_nbytes: What both ends walk through; below 256 MiB they are not cold.
        run_nbytes: What a round moves, about.
        requests: Requests of a round of ``roundtrip``.
        verify: Every operation of the rounds is compared too, within its time.
        address: A server on another machine; empty: a child process.
        alternatives: Others that are measured beside, where they are installed.
        apart: Whether each end, of others too, has a CPU of its own; else the scheduler places them.
        rate: Bytes a second of ``transport.tcp.rate``.
        seconds: How long each of its runs takes.
    """

    scenarios: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1 << 20,)
    batches: tuple[int, ...] = (1, 32)
    lanes: tuple[int, ...] = (1,)
    rate_lanes: tuple[int, ...] = (1, 4)
    checksums: tuple[str, ...] = _CHECKSUMS
    runs: int = MIN_RUNS
    warmup: int = 1
    walk_nbytes: int = COLD_NBYTES
    run_nbytes: int = 64 << 20
    requests: int = 500
    verify: bool = False
    address: str = ""
    alternatives: tuple[str, ...] = ()
    apart: bool = True
    rate: str = "100MB/s"
    seconds: float = 5.0

    @classmethod
    def of(cls, options: Options) -> TransportOptions:
        """From what the command line gave.

        Raises:
            ConfigError: For a value that cannot be used.
        """
        _refuse_empty(options)
        address = _server(str(options.param("connect", "")))
        walk = parse_walk(options.param("walk", COLD_NBYTES))
        if address and str(options.param("lanes", "")):
            raise ConfigError(
                "--lanes beside --connect: the lanes are part of the address, as in tcp://host:port?lanes=4"
            )
        rate = str(options.param("rate", "100MB/s"))
        parse_rate(rate)
        if block := str(options.param("block", "")):
            parse_block(block)  # before anything runs
        scenarios = _scenarios(options, address)
        sizes = _sizes(str(options.param("sizes", DEFAULT_SIZES)), walk)
        return cls(
            scenarios=scenarios,
            sizes=sizes,
            batches=_batches(options, sizes, walk),
            lanes=_lanes(options, scenarios, "1,2"),
            rate_lanes=_lanes(options, scenarios, "1,4"),
            checksums=_words(options, "checksum", ",".join(_CHECKSUMS), _CHECKSUMS),
            runs=options.runs,
            warmup=options.warmup,
            walk_nbytes=walk,
            run_nbytes=max(1, min(64 << 20, walk // 4)),
            requests=int(options.param("requests", 500)),
            verify=bool(options.param("verify", False)),
            address=address,
            alternatives=_alternatives(options),
            apart=_words(options, "ends", "apart", _PLACES) != ("anywhere",),
            rate=rate,
            seconds=_seconds(options),
        )


def _refuse_empty(options: Options) -> None:
    for name, value in (options.params or {}).items():
        if isinstance(value, str) and not value.strip(" ,"):
            raise ConfigError(f"--{name} {value!r} names nothing; leave it out for its default")


def _seconds(options: Options) -> float:
    found = float(options.param("seconds", 5.0))
    if not found <= _MAX_SECONDS:
        raise ConfigError(f"--seconds {found:g}: a run takes at most {_MAX_SECONDS} s")
    return found


def _server(text: str) -> str:
    """The URL of ``HOST``, ``HOST:PORT`` or a URL; empty for none.

    Raises:
        ConfigError: If it is malformed, or of something that is not measured between machines.
    """
    if not text:
        return ""
    address = parse_url(text, default_port=DEFAULT_PORT)
    if address.scheme not in SCHEMES or address.scheme == "inproc":
        raise ConfigError(
            f"--connect {text}: what is measured has to be named, one of tcp, tls, unix, ucx"
            + ("; auto chooses by itself" if address.scheme == "auto" else "")
        )
    return address.url


def _words(options: Options, name: str, default: str, known: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(word.strip() for word in str(options.param(name, default)).split(",") if word.strip())
    for word in found:
        if word not in known:
            raise ConfigError(f"--{name} {word!r}{did_you_mean(word, known)}; there are: {', '.join(known)}")
    return found


def _alternatives(options: Options) -> tuple[str, ...]:
    """Those that were asked for, else those that can be measured here."""
    asked = _words(options, "with", "", (*ALTERNATIVES, "none"))
    if "none" in asked and len(asked) > 1:
        raise ConfigError(f"--with {','.join(asked)}: none leaves all of them out; name some, or none alone")
    problems = {name: _problem_with(name) for name in asked or ALTERNATIVES if name != "none"}
    for name in asked:
        if problems.get(name):
            raise PluginUnavailableError(f"--with {name}: {problems[name]}")
    for problem in problems.values():
        if "cannot be loaded" in problem:  # it was meant to be there
            log.warning("left out: %s", problem)
    return asked or tuple(name for name, problem in problems.items() if not problem)


def _problem_with(alternative: str) -> str:
    if alternative == "mooncake":
        return MooncakeTe.problem()
    if alternative == "redis":
        return redis_problem()
    return "" if is_installed("ucx") else "ucxx is not installed: the extra ucx has it"


def _numbers(options: Options, name: str, default: str) -> tuple[int, ...]:
    text = str(options.param(name, default))
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"--{name} {text!r}: write numbers from 1 on, as in {default}")
    return found


def _lanes(options: Options, scenarios: tuple[str, ...], default: str) -> tuple[int, ...]:
    found = _numbers(options, "lanes", default)
    if max(found) > MAX_LANES:
        raise ConfigError(f"--lanes {max(found)}: a connection has 1 to {MAX_LANES} lanes")
    asked = max(found) > 1 and bool(str(options.param("lanes", "")))
    if asked and not any(name.startswith("transport.tcp.") for name in scenarios):
        schemes = ", ".join(dict.fromkeys(name.split(".")[1] for name in scenarios))
        raise ConfigError(
            f"--lanes {max(found)}: no lanes over {schemes}, only tcp has them; leave --lanes out"
        )
    return found


def _batches(options: Options, sizes: tuple[int, ...], walk_nbytes: int) -> tuple[int, ...]:
    """Those that a walk holds of the smallest size; of a larger one it takes as many as it holds."""
    found, most = _numbers(options, "batch", "1,32"), walk_nbytes // min(sizes)
    if max(found) > most and str(options.param("batch", "")):
        raise ConfigError(
            f"--batch {max(found)}: a walk of {walk_nbytes} bytes holds {most} parts of {min(sizes)}; "
            f"take at most {most}, or raise --walk"
        )
    return found


def _sizes(text: str, walk_nbytes: int) -> tuple[int, ...]:
    found = tuple(parse_nbytes(word) for word in text.split(","))
    for nbytes in found:
        if nbytes <= 0 or nbytes % PAGE_NBYTES or nbytes > walk_nbytes:
            raise ConfigError(
                f"--sizes {nbytes}: take multiples of {PAGE_NBYTES} bytes up to the walk of {walk_nbytes}"
            )
    return found


def _scenarios(options: Options, address: str) -> tuple[str, ...]:
    """Those that were asked for, without transports that are not installed unless they were named."""
    asked = _words(options, "scheme", "", (*SCHEMES, "mooncake"))
    name = options.scenario(SCENARIOS)
    named = name.split(".")[1] if name else parse_url(address).scheme if address else ""
    if named and asked and asked != (named,):
        what = f"--scenario {name}" if name else f"--connect {address}"
        raise ConfigError(
            f"--scheme {','.join(asked)} beside {what}: that is of {named}; leave one of both out"
        )
    if name:
        return (name,)
    if address:
        return tuple(f"transport.{named}.{kind}" for kind in _KINDS)
    schemes = asked or tuple(scheme for scheme in SCHEMES if is_installed(scheme))
    return tuple(found for found in SCENARIOS if found.split(".")[1] in schemes)


def is_installed(scheme: str) -> bool:
    """Whether the transport of ``scheme`` can be used here."""
    try:
        registry.load(scheme)
    except (PluginUnavailableError, UnknownPluginError):
        return False
    return scheme != "ucx" or find_spec("ucxx") is not None  # loaded when an address is used


class _Scenario(Protocol):
    def __call__(
        self, scenario: str, options: TransportOptions, peers: LinkEnds, progress: Progress
    ) -> Iterator[Result]: ...


def run(options: Options, progress: Progress) -> Iterator[Result]:
    """Run the group."""
    own = TransportOptions.of(options)
    with LinkEnds(own.walk_nbytes, own.address) as peers:
        for name in own.scenarios:
            module, function = SCENARIOS[name].split(":")
            found = getattr(importlib.import_module(f"{__package__}.{module}"), function)
            if module == "transport_arena":
                yield from found(options, progress)
            else:
                scenario: _Scenario = found
                yield from scenario(name, own, peers, progress)
