"""What an agent is told when it cannot get in."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from oobleck_jax.elastic.connection import Connection, connect
from oobleck_jax.errors import RunFailed


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _connected(handler: Handler, authority: str | None = None, tls: ssl.SSLContext | None = None) -> None:
    """Connect to a server that answers like this, and take what it sends first."""
    server = web.Server(handler)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, ssl=tls)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with aiohttp.ClientSession() as session:
        try:
            connection = await connect(session, address, token=None, tls_authority=authority, silence_s=5.0)
            assert isinstance(connection, Connection)
            try:
                await connection.receive()
            finally:
                await connection.close()
        finally:
            listener.close()
            await server.shutdown(0)


async def _forbid(_: web.Request) -> web.StreamResponse:
    raise web.HTTPForbidden


async def _babble(request: web.Request) -> web.StreamResponse:
    websocket = web.WebSocketResponse()
    await websocket.prepare(request)
    await websocket.send_str("hello")
    await websocket.receive()
    return websocket


@pytest.mark.parametrize(
    ("handler", "message"),
    [(_forbid, r"127\.0\.0\.1:\d+ answered 403"), (_babble, "the coordinator sent something that is no message: ")],
)
def test_an_answer_that_is_none_of_a_coordinator_is_told(handler: Handler, message: str) -> None:
    with pytest.raises(RunFailed, match=message):
        asyncio.run(_connected(handler))


@pytest.mark.process
@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_whom_nobody_vouches_for_is_not_trusted(tmp_path: Path) -> None:
    """And a coordinator that signs for itself is, if its certificate is the authority."""
    for name in ("own", "other"):
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-days", "1"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "own.pem", tmp_path / "own.key")
    with pytest.raises(RunFailed, match=r"no TLS connection with 127\.0\.0\.1:\d+: "):
        asyncio.run(_connected(_babble, str(tmp_path / "other.pem"), tls))
    with pytest.raises(RunFailed, match="is no message"):  # it is in
        asyncio.run(_connected(_babble, str(tmp_path / "own.pem"), tls))
