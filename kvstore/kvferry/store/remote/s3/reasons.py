"""What ``obstore`` says of a request that failed, in our words: what happened, where, and what to do."""

from __future__ import annotations

import re
from typing import Final

from kvferry.core.errors import KVFerryError

__all__ = ["late", "reason_of"]

_MAX_NBYTES: Final = 200
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_DETAIL: Final = re.compile(r'(?:message|error): "([^"\\]{1,200})"')
_CERTIFICATE: Final = re.compile(r"InvalidCertificate\(\s*(\w+)")
_KIND: Final = re.compile(r"kind: (Timeout|Connect|Interrupted|Decode|Request)\b")
_URL: Final = re.compile(r"\S*://\S+")
_TIMES: Final = re.compile(r" in [\d.]+\S*s\b(?:, after \d+ retries, max_retries: \d+, retry_timeout: \S+)?")
_SEE_LOG: Final = "its log says why"
_REMEDIES: Final = {
    "401": "look at the keys",
    "403": "look at the keys, the rights, and the clock of this machine",
    "429": "fewer connections, or less of others",
    "503": "fewer connections, or less of others",
}


def late(where: str) -> str:
    """Of a request that nobody waits for any more."""
    return f"{where}: not done by the deadline: it hangs, is slow, or cannot be reached; see timeout"


def reason_of(error: BaseException, where: str) -> str:
    """One line, without names of blocks and without what a client adds.

    Args:
        error: What was raised.
        where: The endpoint.
    """
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status or code:
        told = " ".join(found[1] for found in (status, code) if found)
        remedy = _REMEDIES.get(status[1], _SEE_LOG) if status else _SEE_LOG
        return f"the store answered with {'status ' if status else ''}{told}, at {where}; {remedy}"
    if isinstance(error, KVFerryError):
        return text
    kind, detail = _KIND.search(text), _DETAIL.findall(text)
    if certificate := _CERTIFICATE.search(text):
        return f"{where}: its certificate is not valid here: {certificate[1]}; see ca_file"
    if kind and kind[1] == "Timeout":
        return f"{where}: timed out: it hangs, is slow, or cannot be reached; see timeout"
    if kind and kind[1] == "Connect":
        return f"{where}: {_lower(detail) or 'no connection'}; start the store, or mend the endpoint"
    if kind and detail:
        return f"{where}: {_lower(detail)}; {_SEE_LOG}"
    line = " ".join(_TIMES.sub("", _URL.sub(where, text.split("\n\nDebug source", 1)[0])).split())
    return line[:_MAX_NBYTES] or type(error).__name__


def _lower(detail: list[str]) -> str:
    return detail[-1][:1].lower() + detail[-1][1:] if detail else ""
