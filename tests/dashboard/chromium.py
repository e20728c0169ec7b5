"""A headless Chromium, driven by its DevTools protocol over aiohttp, which is here anyway."""

import asyncio
import base64
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp


PROGRAM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "about:blank",
)
_START_S = 30.0
_ANSWER_S = 20.0


class Tab:
    """A page of the browser.

    Attributes:
        errors: what its scripts threw.
    """

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._websocket = websocket
        self._number = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        await self._websocket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._websocket.receive_json(timeout=_ANSWER_S)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.wait_for(f"location.href == '{url}' && document.readyState == 'complete'")

    async def run(self, script: str) -> Any:
        """Return what a script returns."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait_for(self, condition: str, *, within_s: float = 30.0) -> None:
        """Wait until a script returns something true."""
        deadline_s = asyncio.get_running_loop().time() + within_s
        while not await self.run(condition):
            text = await self.run("document.body.innerText")
            assert asyncio.get_running_loop().time() < deadline_s, f"{condition} did not come; the page says:\n{text}"
            await asyncio.sleep(0.05)

    async def look_like(self, *, width: int, is_dark: bool) -> None:
        """Take the size and colours of a device."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    async def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Tab]:
    """Start a browser with an empty profile, and end it."""
    assert PROGRAM is not None
    process = subprocess.Popen(
        [PROGRAM, *_FLAGS, f"--user-data-dir={profile}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(_START_S + 600):
            address = await _first_page(session, profile / "DevToolsActivePort")
            async with session.ws_connect(address, max_msg_size=0) as websocket:
                tab = Tab(websocket)
                await tab.call("Runtime.enable")
                yield tab
    finally:
        process.kill()
        process.wait()


async def _first_page(session: aiohttp.ClientSession, port_file: Path) -> str:
    """Return where the first page can be driven, as soon as there is one."""
    async with asyncio.timeout(_START_S):
        while True:
            await asyncio.sleep(0.1)
            with contextlib.suppress(FileNotFoundError, IndexError, aiohttp.ClientError):
                port = port_file.read_text().splitlines()[0]
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [target for target in await answer.json() if target["type"] == "page"]
                return pages[0]["webSocketDebuggerUrl"]
