"""Which of the offered transports is taken, and why not the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvferry.core.errors import KVFerryError
from kvferry.transports.auto.offers import Offer, Offers, shown
from kvferry.transports.auto.options import SCHEMES, AutoOptions
from kvferry.transports.choices import Rejected

if TYPE_CHECKING:
    from kvferry.transports.ucx import UcxReport

__all__ = ["Ranking", "rank", "remedy_for_wish", "ucx_problem"]

_FALL_BACK: Final = "fallback=tcp in the address goes on without it"


@dataclass(frozen=True, slots=True)
class Ranking:
    """What can be taken.

    Attributes:
        usable: Offers that both ends can use and the address admits, the best first, with the reason.
        rejected: The other transports, with the reason.
    """

    usable: tuple[tuple[Offer, str], ...]
    rejected: tuple[Rejected, ...]


def ucx_problem(require: str, look: Callable[[], UcxReport] | None = None) -> str:
    """Why this process cannot use ``ucx`` here; empty if it can.

    Args:
        require: As in the address. ``ucx`` is taken without RDMA only if it is asked for by this name.
        look: Looks at UCX; :func:`effective_settings` of this process if it is left out.
    """
    from kvferry.transports.ucx import effective_settings, rdma_remedy
    from kvferry.transports.ucx.rdma import rdma_devices

    if require != "ucx" and not rdma_devices():
        return "there is no RDMA: " + rdma_remedy("all", "all", "")
    try:
        report = (look or effective_settings)()
    except KVFerryError as error:  # not installed, its options contradict each other, no descriptors
        return str(error)
    return report.rdma_remedy if require != "ucx" else ""


def remedy_for_wish(options: AutoOptions, found: list[str], why: str) -> str:
    """The end of a message: what was asked, what is there, and how to get on."""
    return f"asked for {options.require}, found {', '.join(found) or 'nothing'}: {why}; {_FALL_BACK}"


def rank(answer: Offers, host: str, options: AutoOptions, ucx: Callable[[str], str] = ucx_problem) -> Ranking:
    """Order what ``answer`` offers to a process on ``host`` whose address has ``options``.

    Args:
        answer: Of the listener.
        host: See ``host_identity``.
        options: Of the address.
        ucx: See :func:`ucx_problem`.
    """
    offers = {offer.scheme: offer for offer in reversed(answer.offers)}
    rejected: list[Rejected] = []
    usable: list[tuple[Offer, str]] = []
    order = dict.fromkeys((options.wish, *options.fallback)) if options.require else SCHEMES
    for scheme in order:
        offer = offers.get(scheme)
        if offer is None:
            lacking = shown(answer.lacking.get(scheme, "it does not know it"))
            rejected.append(Rejected(scheme, f"the listener does not offer it, {lacking}"))
        elif problem := _problem(offer, answer, host, options, ucx):
            rejected.append(Rejected(scheme, problem))
        else:
            usable.append((offer, _reason(offer, options)))
    rejected += [Rejected(scheme, f"require={options.require}") for scheme in SCHEMES if scheme not in order]
    return Ranking(tuple(usable), tuple(rejected))


def _problem(offer: Offer, answer: Offers, host: str, options: AutoOptions, ucx: Callable[[str], str]) -> str:
    """Why this end cannot take ``offer``; empty if it can."""
    if offer.scheme == "unix":
        return _unix_problem(offer, answer, host)
    if offer.scheme == "ucx":
        if options.rate is not None:
            return "it cannot limit its rate"
        if not offer.rdma and options.require != "ucx":
            return "the listener has it without RDMA"
        return ucx("rdma" if options.require != "ucx" else "ucx")
    return ""


def _unix_problem(offer: Offer, answer: Offers, host: str) -> str:
    if not host or not answer.host:
        return "one end cannot tell which host it is on"
    if host != answer.host:
        mine, theirs = host.partition("/")[0], answer.host.partition("/")[0]
        return "they are in different containers" if mine == theirs else "they are on different hosts"
    if offer.uid != os.geteuid():
        return f"the listener runs as uid {offer.uid}, this process as uid {os.geteuid()}"
    try:
        found = Path(offer.path).stat()
    except ValueError:
        return f"{shown(offer.path)} is no path"
    except OSError as error:
        return f"its socket {shown(offer.path)} cannot be found from here: {error.strerror}"
    if (found.st_dev, found.st_ino) != offer.inode:
        return f"{shown(offer.path)} is another file here"
    return ""


def _reason(offer: Offer, options: AutoOptions) -> str:
    if options.require and offer.scheme == options.wish:
        return f"as require={options.require} asks"
    if options.require:
        return f"as fallback={','.join(options.fallback)} allows"
    return {"unix": "both ends are on one host", "ucx": "both ends have RDMA"}.get(
        offer.scheme, "all have it"
    )
