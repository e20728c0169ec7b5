"""An agent's connection to the coordinator, which may not be up yet, or again."""

import asyncio
import contextlib
import ssl

import aiohttp
import msgspec

from oobleck_jax.elastic import messages
from oobleck_jax.elastic.worker_process import MAX_MESSAGE_BYTES
from oobleck_jax.errors import RunFailed


_RETRY_S = 0.2
_CLOSE_S = 1.0  # what is still to be sent gets out, and the other side answers


class Connection:
    """A connection that is up until `receive` says that it ended.

    What is sent goes through a queue, so that a coordinator that does not read keeps nobody from anything.
    """

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self._websocket = websocket
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send_all())

    @property
    def own_address(self) -> str:
        """The address of this host towards the coordinator."""
        return self._websocket.get_extra_info("sockname")[0]

    def send(self, message: bytes) -> None:
        """Send a message. Never waits; quietly drops it when the connection has ended."""
        self._outgoing.put_nowait(message)

    async def receive(self) -> tuple[bytes, messages.ToNode] | None:
        """Return the next message, as it came and decoded; None when the connection has ended.

        Raises:
            RunFailed: what came is no message.
        """
        frame = await self._websocket.receive()
        if frame.type is not aiohttp.WSMsgType.TEXT:
            return None
        data: str = frame.data
        try:
            return data.encode(), messages.decode_to_node(data)
        except msgspec.MsgspecError as error:
            raise RunFailed(f"the coordinator sent something that is no message: {error}") from None

    async def close(self) -> None:
        """Send what is in the queue, and close."""
        self._outgoing.put_nowait(None)
        await asyncio.wait([self._sender], timeout=_CLOSE_S)
        self._sender.cancel()
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self._websocket.close()

    async def _send_all(self) -> None:
        # A lost connection is noticed where messages are received.
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while (message := await self._outgoing.get()) is not None:
                await self._websocket.send_str(message.decode())


async def connect(
    session: aiohttp.ClientSession, address: str, *, token: str | None, tls_authority: str | None, silence_s: float
) -> Connection | None:
    """Try to connect to the coordinator once; None: nobody is there.

    Args:
        session: that the connection belongs to.
        address: host:port.
        token: secret of the run.
        tls_authority: file of certificates to trust; None: no TLS.
        silence_s: a coordinator that answers no ping for so long is gone.

    Raises:
        RunFailed: somebody is there who does not want us, or whom we do not trust.
    """
    context = ssl.create_default_context(cafile=tls_authority) if tls_authority else None
    try:
        async with asyncio.timeout(10):
            websocket = await session.ws_connect(
                f"{'wss' if context else 'ws'}://{address}/control",
                headers={"Authorization": f"Bearer {token}"} if token else None,
                heartbeat=silence_s,
                max_msg_size=MAX_MESSAGE_BYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),  # pyright: ignore[reportCallIssue] (attrs)
                ssl=context or True,
            )
    except aiohttp.WSServerHandshakeError as error:
        if error.status >= 500:  # of a proxy before a coordinator that is not up
            await asyncio.sleep(_RETRY_S)
            return None
        hint = "; give the same --token to all" if error.status == 401 else ""
        raise RunFailed(f"{address} answered {error.status} {error.message}{hint}") from None
    except aiohttp.ClientSSLError as error:
        raise RunFailed(f"no TLS connection with {address}: {error}") from None
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        await asyncio.sleep(_RETRY_S)
        return None
    return Connection(websocket)


async def join(connection: Connection, request: messages.Join, *, within_s: float) -> messages.Welcome | None:
    """Ask to take part; None: no answer.

    Raises:
        RunFailed: the coordinator refuses, and why.
    """
    connection.send(messages.encode(request))
    answer = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            answer = await connection.receive()
    match answer:
        case (_, messages.Welcome() as welcome):
            return welcome
        case (_, messages.Refused(reason=reason)):
            raise RunFailed(f"the coordinator refused {request.name}: {reason}")
        case _:
            return None
