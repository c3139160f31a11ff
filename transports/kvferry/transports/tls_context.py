"""What a ``tls`` address says: certificates by path, whom to trust, and what each failure of TLS means."""

from __future__ import annotations

import logging
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.core.address import Address, parse_url
from kvferry.core.errors import AuthError, ConfigError, ConnectError, TransportError
from kvferry.core.open_files import OUT_OF_FILES
from kvferry.core.regular_file import open_regular
from kvferry.core.units import parse_rate
from kvferry.transports.ip import reason_of
from kvferry.transports.spin import TLS_SPIN_S, parse_spin

__all__ = ["TlsAddress", "TlsSession", "handshake_error", "stream_error"]

_log = logging.getLogger(__name__)

_OPTIONS: Final = ("rate", "spin", "cert", "key", "ca", "client_ca", "server_name")
_NO_TLS_1_3: Final = "the peer does not speak TLS 1.3, the only version that is accepted; update it"
_CHANGED: Final = "bytes were changed on their way"
_MEANINGS: Final = {
    "WRONG_VERSION_NUMBER": "the peer does not speak TLS; use tls:// on both sides or on neither",
    "HTTP_REQUEST": "the peer speaks plain HTTP",
    "UNSUPPORTED_PROTOCOL": _NO_TLS_1_3,
    "NO_PROTOCOLS_AVAILABLE": _NO_TLS_1_3,
    "TLSV1_ALERT_PROTOCOL_VERSION": _NO_TLS_1_3,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": (
        "the peer sent no certificate, and this listener wants one (client_ca); dial with cert and key"
    ),
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": _CHANGED,
    "SSLV3_ALERT_BAD_RECORD_MAC": _CHANGED,
    "UNEXPECTED_EOF_WHILE_READING": (
        "the peer ended the connection during the TLS handshake; does it speak TLS?"
    ),
}
# What the peer says of our certificate.
_REFUSALS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "wants a client certificate and got none; dial with cert and key",
    "TLSV1_ALERT_UNKNOWN_CA": (
        "does not know the CA of our certificate; give it that CA's own "
        "(ca where it dials, client_ca where it listens)"
    ),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "says that our certificate has expired; renew it",
    "SSLV3_ALERT_BAD_CERTIFICATE": (
        "does not accept our certificate: it is for another host name, or not yet valid"
    ),
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "does not accept our certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "does not accept a certificate of this kind",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "says that our certificate was revoked; renew it",
    "TLSV1_ALERT_DECRYPT_ERROR": "could not verify that our key belongs to our certificate",
    "TLSV1_ALERT_ACCESS_DENIED": "denies access to our certificate",
}
# OpenSSL's x509_vfy.h
_UNKNOWN_CA: Final = "is of a CA that is not trusted; give its certificate with {ca}"
_VERDICTS: Final = {
    2: _UNKNOWN_CA,
    9: "is not valid yet; check the clocks of both machines",
    10: "has expired; renew it, or check the clock of this machine",
    18: _UNKNOWN_CA,
    19: _UNKNOWN_CA,
    20: _UNKNOWN_CA,
    21: _UNKNOWN_CA,
    24: "is signed by one that is no CA",
    26: "is not made for this purpose (extended key usage)",
    62: "is not for {name}; dial a name that it has, or say it with server_name",
    64: "is not for the address {name}; dial a name that it has, or say it with server_name",
}


_DATES: Final = (9, 10)


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """A ``tls`` address.

    Attributes:
        address: As parsed.
        rate: Bytes a second, or ``None``.
        spin_s: How long to look for bytes before sleeping, while they come that fast.
        cert: Path of our certificate with its chain (PEM). A listener needs one, who dials only where the
            listener has ``client_ca``.
        key: Path of its private key, not encrypted; the certificate's file where none is given.
        ca: Who dials: path of the CAs (PEM) that may have signed the listener's certificate; the system's
            where none is given.
        client_ca: Listener: path of the CAs that must have signed who dials; none: anybody may.
        server_name: Who dials: the name that the listener's certificate must have; the host where none is
            given.
    """

    address: Address
    rate: float | None
    spin_s: float
    cert: str | None
    key: str | None
    ca: str | None
    client_ca: str | None
    server_name: str | None

    @classmethod
    def parse(cls, text: str) -> TlsAddress:
        """Parse and check ``text``.

        Raises:
            ConfigError: If it is malformed.
        """
        parsed = parse_url(text, options=_OPTIONS)
        if parsed.scheme != "tls":
            raise ConfigError(f"address {text!r}: is not a tls address")
        options = parsed.options
        try:
            rate = parse_rate(options["rate"]) if "rate" in options else None
            spin_s = parse_spin(options["spin"]) if "spin" in options else TLS_SPIN_S
        except ConfigError as error:
            raise ConfigError(f"address {text!r}: {error}") from error
        if "key" in options and "cert" not in options:
            raise ConfigError(f"address {text!r}: has a key without a cert that it belongs to")
        names = ("cert", "key", "ca", "client_ca", "server_name")
        return cls(parsed, rate, spin_s, *(options.get(name) for name in names))

    @property
    def expected_name(self) -> str:
        """The name or numeric address that the listener's certificate must have."""
        return self.server_name or self.address.host.partition("%")[0]

    def client_context(self) -> ssl.SSLContext:
        """The context of who dials.

        Raises:
            ConfigError: If a file cannot be used; the message names option, path and reason.
        """
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is None:
            context.load_default_certs()
        else:
            self._trust(context, "ca", self.ca)
        if self.cert is not None:
            self._present(context, self.cert)
        return context

    def server_context(self) -> ssl.SSLContext:
        """The context of a listener; raises as :meth:`client_context`."""
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        if self.cert is None:
            raise ConfigError(
                f"{self.address.url}: a tls listener needs its certificate; "
                "write tls://host:port?cert=PATH&key=PATH"
            )
        self._present(context, self.cert)
        if verdict := _validity(context, self.cert):
            _log.warning("%s: the certificate in %s %s", self.address.url, self.cert, verdict)
        context.num_tickets = 0  # nothing resumes a session
        if self.client_ca is not None:
            self._trust(context, "client_ca", self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _present(self, context: ssl.SSLContext, cert: str) -> None:
        self._readable("cert", cert)
        if self.key is not None:
            self._readable("key", self.key)
        key = self.key or cert

        def ask() -> str:  # else OpenSSL asks on the terminal
            raise ConfigError(f"{self.address.url}: the key in {key} is encrypted; write it out decrypted")

        try:
            context.load_cert_chain(cert, self.key, password=ask)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                why = f"the key in {key} does not belong to the certificate in {cert}"
            elif error.reason:  # it could read both
                why = f"the certificate in {cert} cannot be used ({error.reason})"
            elif not _has_certificate(cert):
                why = f"no certificate in {cert} in PEM form"
            else:
                why = f"no key in {key} in PEM form" + ("" if self.key else "; add key=PATH")
            raise ConfigError(f"{self.address.url}: {why}") from error

    def _trust(self, context: ssl.SSLContext, option: str, path: str) -> None:
        self._readable(option, path)
        try:
            context.load_verify_locations(path)
        except ssl.SSLError as error:
            raise ConfigError(
                f"{self.address.url}: {option}={path} has no certificate in PEM form "
                f"({error.reason or error})"
            ) from error

    def _readable(self, option: str, path: str) -> None:
        try:
            open_regular(Path(path)).close()
        except (OSError, ValueError) as error:
            kind = ConnectError if isinstance(error, OSError) and error.errno in OUT_OF_FILES else ConfigError
            raise kind(f"{self.address.url}: {option}={path} cannot be read: {reason_of(error)}") from error


def _has_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError):
        return False
    return True


def _context(protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _validity(server: ssl.SSLContext, cert: str) -> str:
    """What is wrong with the dates of the certificate that ``server`` shows; empty if they are right."""
    client = _context(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it is trusted as it is, whoever has signed it
    client.load_verify_locations(cert)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    try:
        for end in (*ends, ends[0]):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return _VERDICTS[error.verify_code] if error.verify_code in _DATES else ""
    except ssl.SSLError:
        return ""
    return ""


class TlsSession:
    """One end of TLS without a socket.

    What it receives is written to ``incoming``, what it sends is read from ``outgoing``.
    """

    __slots__ = ("incoming", "name", "outgoing", "tls")

    def __init__(self, context: ssl.SSLContext, *, server_side: bool, name: str | None = None) -> None:
        self.incoming: Final = ssl.MemoryBIO()
        self.outgoing: Final = ssl.MemoryBIO()
        self.name: Final = name
        try:
            self.tls: Final = context.wrap_bio(
                self.incoming, self.outgoing, server_side=server_side, server_hostname=name
            )
        except ValueError as error:
            raise ConfigError(f"server_name={name}: {error}") from error

    def step(self, peer: str) -> bool:
        """Go on with the handshake; whether it is complete. What came out of it is still to be sent.

        Raises:
            ConnectError: If it failed; the message begins with ``peer``.
            AuthError: If the peer refused our certificate.
        """
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise handshake_error(error, peer, self.name) from error
        return True


def handshake_error(error: ssl.SSLError, peer: str, name: str | None) -> ConnectError | AuthError:
    """What a failed handshake with ``peer``, whose certificate must be for ``name``, is raised as."""
    if isinstance(error, ssl.SSLCertVerificationError):
        option = "ca" if name is not None else "client_ca"
        verdict = _VERDICTS.get(error.verify_code, "cannot be verified: {why}")
        text = verdict.format(ca=option, name=repr(name), why=error.verify_message)
        return ConnectError(f"{peer}: the peer's certificate {text}")
    reason = error.reason or ""
    if reason in _REFUSALS:
        return AuthError(f"{peer}: the peer {_REFUSALS[reason]}")
    if isinstance(error, ssl.SSLEOFError):
        reason = "UNEXPECTED_EOF_WHILE_READING"
    return ConnectError(f"{peer}: {_MEANINGS.get(reason) or f'the TLS handshake failed: {reason or error}'}")


def stream_error(error: ssl.SSLError, connection: str) -> TransportError | AuthError:
    """What an error of TLS on an established ``connection`` is raised as."""
    reason = error.reason or ""
    if reason in _REFUSALS:
        return AuthError(f"{connection}: the peer {_REFUSALS[reason]}")
    return TransportError(f"{connection} failed: {_MEANINGS.get(reason) or reason or error}")
