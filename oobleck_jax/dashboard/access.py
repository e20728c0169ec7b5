"""Who may read a run's page, and who may act.

Acting always needs the token of the run. Reading does not for whoever is on this machine: the connection comes from a
loopback address, and the browser believes it talks to one. The latter keeps out pages of strangers whose name was made
to point to this machine (DNS rebinding): their requests come from here, too, but name their own host. No cookie is
used, so no other page can act in the name of somebody who has given the token to this one.
"""

import hmac
import ipaddress
from dataclasses import dataclass

from aiohttp import web


_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_TOKEN_HINT = "give the token of the run (RUN_DIR/coordinator.json has it) as `Authorization: Bearer TOKEN`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Decides who may do what.

    Attributes:
        token: of the run; None: nobody can act, and only this machine can read.
    """

    token: str | None

    def check_read(self, request: web.Request) -> None:
        """Let readers in.

        Raises:
            web.HTTPForbidden: it is neither from this machine nor has it the token.
        """
        if self._has_token(request):
            return
        if not _is_loopback(request.remote):
            raise web.HTTPUnauthorized(text=f"from another machine: {_TOKEN_HINT}")
        if _host_of(request.headers.get("Host", "")) not in _LOOPBACK_NAMES:
            raise web.HTTPForbidden(
                text=f"asked for as {request.headers.get('Host', '')!r}, which is not this machine's own name; "
                f"use localhost, or {_TOKEN_HINT}"
            )

    def check_act(self, request: web.Request) -> None:
        """Let those in who have the token.

        Raises:
            web.HTTPForbidden: nobody can act on this run.
            web.HTTPUnauthorized: the token is missing or wrong.
        """
        if self.token is None:
            raise web.HTTPForbidden(text="this run has no token, so nobody can act on it; start it with --token-file")
        if not self._has_token(request):
            raise web.HTTPUnauthorized(text=f"wrong or no token: {_TOKEN_HINT}")

    def _has_token(self, request: web.Request) -> bool:
        if self.token is None:
            return False
        given = request.headers.get("Authorization", "").encode(errors="replace")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())


def _is_loopback(address: str | None) -> bool:
    try:
        return address is not None and ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _host_of(header: str) -> str:
    """Return the host of a Host header, without its port."""
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdecimal() and not header.endswith("]") else header).lower()
