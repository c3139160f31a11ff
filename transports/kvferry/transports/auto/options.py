"""What stands behind the ``?`` of an ``auto`` address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvferry.core.address import Address, parse_url
from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_rate
from kvferry.transports.lanes import parse_lanes

__all__ = ["SCHEMES", "AutoOptions", "parse_auto"]

SCHEMES: Final = ("unix", "ucx", "tcp")
"""What can be chosen, the best first."""
_WISHES: Final = ("rdma", *SCHEMES)
_OPTIONS: Final = ("require", "fallback", "rate", "lanes")


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """The options of an address.

    Attributes:
        require: What has to be taken: ``rdma``, or a transport; empty for the best.
        fallback: Transports that may be taken if what was wanted cannot be had, in this order.
        rate: As the address has it; ``None`` for no limit. ``ucx`` has no limit and is not taken with one.
        lanes: Sockets of a ``tcp`` connection.
    """

    require: str = ""
    fallback: tuple[str, ...] = ()
    rate: str | None = None
    lanes: int = 1

    @property
    def wish(self) -> str:
        """The transport that ``require`` asks for; empty for the best."""
        return "ucx" if self.require == "rdma" else self.require

    def considers(self, scheme: str) -> bool:
        """Whether ``scheme`` may be taken at all."""
        return not self.require or scheme == self.wish or scheme in self.fallback


def parse_auto(address: str) -> tuple[Address, AutoOptions]:
    """An address and its options.

    Raises:
        ConfigError: If it is malformed, not of ``auto``, or an option is.
    """
    parsed = parse_url(address, options=_OPTIONS)
    if parsed.scheme != "auto":
        raise ConfigError(f"address {address!r}: is not an auto address")
    given = parsed.options
    require = given.get("require", "")
    if require and require not in _WISHES:
        raise ConfigError(f"address {address!r}: require is one of {', '.join(_WISHES)}, not {require!r}")
    fallback = tuple(given["fallback"].split(",")) if given.get("fallback", "none") != "none" else ()
    for one in fallback:
        if one not in SCHEMES:
            raise ConfigError(
                f"address {address!r}: fallback is none, or some of {', '.join(SCHEMES)} with commas "
                f"between, not {one!r}"
            )
    if len(set(fallback)) < len(fallback):
        raise ConfigError(f"address {address!r}: fallback={given['fallback']} names one twice")
    try:
        lanes = parse_lanes(given.get("lanes", "1"))
        if "rate" in given:
            parse_rate(given["rate"])
    except ConfigError as error:
        raise ConfigError(f"address {address!r}: {error}") from error
    return parsed, AutoOptions(require, fallback, given.get("rate"), lanes)
