"""The page in a real browser, of a run with real processes and invented workers."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck_jax.run_dir import read_contact
from tests.dashboard.chromium import PROGRAM, Tab, browser
from tests.test_train import Launch


pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium on this machine"),
]

FLAGS = (
    *("--nodes", "5", "--plan", "0-1,1-2,2-4,4-6 | 0-6", "--fault-tolerance", "1"),
    *("--steps", "100000", "--eval-every", "0"),
)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


def test_a_run_can_be_watched_and_acted_on_whatever_happens(launch: Launch, tmp_path: Path) -> None:
    async def use() -> None:
        first = launch.start(*FLAGS, worker=("--step-s", "0.05"))
        launch.await_step(3)
        contact = read_contact(launch.run_dir)
        assert contact is not None
        async with browser(tmp_path / "profile") as tab:
            await tab.open(f"http://{contact.address}/")
            await tab.wait_for("document.querySelector('#phase').textContent == 'training'")
            assert await tab.run("document.querySelectorAll('.stage.working').length") == 5
            assert await tab.run("document.querySelector('#loss .curve') !== null")
            await assert_fits_a_phone(tab)

            await kill_node_1(tab, contact.token or "")
            await tab.wait_for("document.querySelector('.kind-loss b') !== null")
            assert "a person asked for it" in await tab.run("document.querySelector('#incidents').innerText")
            await tab.wait_for("document.querySelectorAll('.stage.working').length == 5")  # it is back

            os.kill(first.pid, signal.SIGKILL)
            await tab.wait_for("document.body.classList.contains('offline')")
            second = launch.start(*FLAGS, worker=("--step-s", "0.05"))
            await tab.wait_for("!document.body.classList.contains('offline')")
            await tab.wait_for("document.querySelector('.kind-coordinator b') !== null")
            assert await tab.run("document.querySelector('.kind-loss b') !== null")  # what was before is still there

            await tab.run("document.querySelector('#act').click(); document.querySelector('#do-checkpoint').click()")
            await tab.wait_for("document.querySelector('#said').textContent.includes('is saved, in the background')")
            await tab.run("document.querySelector('#do-stop').click()")
            await tab.wait_for("document.querySelector('#phase').textContent == 'stopped'")
            assert "by a person" in await tab.run("document.querySelector('#reason').textContent")
            assert second.wait(timeout=20) == 130
            assert tab.errors == []

    asyncio.run(use())


async def kill_node_1(tab: Tab, token: str) -> None:
    """Click on a node, give a wrong token, then the right one."""
    await tab.run("[...document.querySelectorAll('.stage')].find(it => it.innerText.includes('node 1')).click()")
    for given, answer in (("wrong", "wrong or no token"), (token, "the worker of node 1 is killed")):
        await tab.run(f"document.querySelector('#token').value = '{given}'; document.querySelector('#do-kill').click()")
        await tab.wait_for(f"document.querySelector('#said').textContent.includes('{answer}')")
    await tab.run("document.querySelector('#ask').close()")


async def assert_fits_a_phone(tab: Tab) -> None:
    """Nothing sticks out of a narrow screen, and the page is dark where the device is."""
    await tab.look_like(width=360, is_dark=True)
    assert await tab.run("document.documentElement.scrollWidth") <= 360
    colour = await tab.run("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) < 150
    await tab.look_like(width=1200, is_dark=False)
