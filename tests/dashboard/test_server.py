"""What is served, to whom, and what actions answer."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request
from prometheus_client.parser import text_string_to_metric_families

from oobleck_jax import events
from oobleck_jax.dashboard.access import Access
from oobleck_jax.dashboard.server import Actions, Dashboard
from oobleck_jax.dashboard.snapshot import RunPhase, Snapshot
from oobleck_jax.errors import ActionRefused
from oobleck_jax.planning.plan import NodeId
from tests.dashboard.states import watch
from tests.elastic.simulation import committing, kill, regrouping
from tests.test_progress import committed


WITH_TOKEN = {"Authorization": "Bearer secret"}


@dataclass
class Done:
    """Actions that only take notes."""

    calls: list[tuple[str, int | None]] = field(default_factory=list)

    def actions(self) -> Actions:
        return Actions(drain=self._drain, kill=self._kill, checkpoint=self._checkpoint, stop=self._stop)

    def _drain(self, node: NodeId) -> str:
        self.calls.append(("drain", node))
        return f"node {node} leaves"

    def _kill(self, node: NodeId) -> str:
        raise ActionRefused(f"there is no node {node}")

    def _checkpoint(self) -> str:
        raise ActionRefused("this run saves nothing")

    def _stop(self) -> str:
        self.calls.append(("stop", None))
        return "the run ends"


def serve(
    use: Callable[["TestClient[web.Request, web.Application]", Dashboard, Done], Awaitable[None]],
    *,
    token: str | None = "secret",
) -> None:
    """Serve a run that goes on, and let a client use it."""

    async def run() -> None:
        dashboard, done = Dashboard(watch(committing(3)[0]), Access(token=token), clock=lambda: 2000.0), Done()
        app = web.Application()
        dashboard.serve(app, done.actions())
        async with TestClient(TestServer(app)) as client:
            await use(client, dashboard, done)

    asyncio.run(asyncio.wait_for(run(), 30))


async def next_snapshot(answer: ClientResponse) -> Snapshot:
    line = await answer.content.readuntil(b"\n\n")
    return msgspec.json.decode(line.removeprefix(b"data: "), type=Snapshot)


def test_the_page_and_the_snapshot_are_served() -> None:
    async def use(client, dashboard, done) -> None:
        page = await client.get("/")
        text = await page.text()
        assert text.startswith("<!doctype html>")
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing from elsewhere
        assert "https://" not in text
        run = msgspec.json.decode(await (await client.get("/snapshot")).read(), type=Snapshot)
        assert (run.step, run.phase) == (3, RunPhase.TRAINING)

    serve(use)


def test_readers_hear_of_what_happens_and_of_the_end() -> None:
    async def use(client, dashboard, done) -> None:
        async with client.get("/live") as answer:
            assert (await next_snapshot(answer)).step == 3
            dashboard.take(committed(3))
            assert (await next_snapshot(answer)).step == 4
            dashboard.take(events.Finished(steps=4, reason="all 4 steps are done", exit_code=0))
            assert (await next_snapshot(answer)).phase is RunPhase.FINISHED
            assert await answer.content.read() == b""  # and that is all

    serve(use)


def test_what_happens_before_a_reader_comes_is_not_missed() -> None:
    async def use(client, dashboard, done) -> None:
        dashboard.take(committed(3))
        async with client.get("/live") as answer:
            assert (await next_snapshot(answer)).step == 4
            for step in range(4, 30):
                dashboard.take(committed(step))
            assert (await next_snapshot(answer)).step == 30  # the latest, not each

    serve(use)


def test_actions_need_the_token_and_say_what_they_did() -> None:
    async def use(client, dashboard, done) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = await client.post("/actions/stop", headers=headers)
            assert answer.status == 401
            assert "coordinator.json" in await answer.text()
        assert done.calls == []
        answer = await client.post("/actions/drain", headers=WITH_TOKEN, json={"node": 2})
        assert (answer.status, await answer.json()) == (200, {"done": "node 2 leaves"})
        answer = await client.post("/actions/stop", headers=WITH_TOKEN)
        assert (answer.status, await answer.json()) == (200, {"done": "the run ends"})
        assert done.calls == [("drain", 2), ("stop", None)]

    serve(use)


def test_actions_that_cannot_be_done_say_why() -> None:
    async def use(client, dashboard, done) -> None:
        for action, body, status, words in (
            ("kill", '{"node": 9}', 409, "there is no node 9"),
            ("kill", "", 409, 'kill needs a node: {"node": 0}'),
            ("checkpoint", "", 409, "this run saves nothing"),
            ("explode", "", 400, "there are drain, kill, checkpoint, stop"),
            ("drain", '{"node": "all"}', 400, "Expected `int | null`, got `str`"),
            ("drain", '{"node": 1, "at": 3}', 400, "unknown field `at`"),
            ("drain", "{", 400, "truncated"),
        ):
            answer = await client.post(f"/actions/{action}", headers=WITH_TOKEN, data=body)
            assert answer.status == status
            assert words in (await answer.text()).replace("\\", "")
        assert (await client.get("/actions/stop", headers=WITH_TOKEN)).status == 405
        assert done.calls == []

    serve(use)


def test_without_a_token_nobody_can_act() -> None:
    async def use(client, dashboard, done) -> None:
        answer = await client.post("/actions/stop", headers={"Authorization": "Bearer None"})
        assert answer.status == 403
        assert "--token-file" in await answer.text()
        assert (await client.get("/snapshot")).status == 200

    serve(use, token=None)


class Transport:
    def __init__(self, address: str) -> None:
        self.address = address

    def get_extra_info(self, name: str, default: object = None) -> object:
        return (self.address, 1) if name == "peername" else default


@pytest.mark.parametrize(
    ("address", "host", "token", "refused"),
    [
        ("127.0.0.1", "127.0.0.1:7000", None, None),
        ("127.0.0.1", "localhost:7000", None, None),
        ("127.0.0.1", "LOCALHOST", None, None),
        ("::1", "[::1]:7000", None, None),
        ("127.0.0.1", "localhost:8080", None, None),  # through a tunnel, whose port is another one
        ("127.0.0.1", "evil.example:7000", None, web.HTTPForbidden),
        ("127.0.0.1", "localhost.evil.example", None, web.HTTPForbidden),
        ("127.0.0.1", "", None, web.HTTPForbidden),
        ("10.0.0.7", "localhost:7000", None, web.HTTPUnauthorized),
        ("10.0.0.7", "10.0.0.1:7000", "wrong", web.HTTPUnauthorized),
        ("10.0.0.7", "10.0.0.1:7000", "secret", None),
        ("127.0.0.1", "proxy.example", "secret", None),
    ],
)
def test_who_may_read(address: str, host: str, token: str | None, refused: type[web.HTTPException] | None) -> None:
    headers = {"Host": host, **({"Authorization": f"Bearer {token}"} if token else {})}
    request = make_mocked_request("GET", "/snapshot", headers=headers, transport=Transport(address))
    access = Access(token="secret")
    if refused is None:
        access.check_read(request)
    else:
        with pytest.raises(refused):
            access.check_read(request)


def test_metrics_are_what_prometheus_can_read() -> None:
    async def use(client, dashboard, done) -> None:
        simulation, nodes = regrouping()
        kill(simulation, nodes[1])
        simulation.pump_steps(3)
        for record in simulation.records(events.Incident):
            dashboard.take(record)
        dashboard.take(committed(3, step_time_s=0.25))
        answer = await client.get("/metrics")
        assert answer.content_type == "text/plain"
        families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
        values = {name: family.samples[0].value for name, family in families.items() if len(family.samples) == 1}
        assert values["oobleck_step"] == 4
        assert values["oobleck_loss"] == 4.25
        assert values["oobleck_live_nodes"] == 3
        assert values["oobleck_survivable_losses"] == 1
        assert values["oobleck_redone_microbatches"] == 8
        assert 0 <= values["oobleck_goodput_ratio"] <= 1
        assert "oobleck_mfu_ratio" not in values  # nobody knows the peak of this machine
        assert "oobleck_checkpoint_age_seconds" not in values  # there is none
        incidents = {sample.labels["kind"]: sample.value for sample in families["oobleck_incidents"].samples}
        assert incidents == {"loss": 1, "join": 1, "leave": 0, "coordinator": 0}
        histogram = families["oobleck_recovery_seconds"]
        assert histogram.type == "histogram"
        buckets = [s.value for s in histogram.samples if s.name.endswith("_bucket") and s.labels["kind"] == "loss"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == 1
        phases = {sample.labels["phase"]: sample.value for sample in families["oobleck_phase"].samples}
        assert phases["training"] == 1
        assert sum(phases.values()) == 1

    serve(use)


def test_the_grafana_dashboard_asks_only_for_metrics_there_are() -> None:
    board = json.loads((Path(__file__).parents[2] / "scripts" / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"oobleck_\w+", query)}

    async def use(client, dashboard, done) -> None:
        text = await (await client.get("/metrics")).text()
        there = {s.name for family in text_string_to_metric_families(text) for s in family.samples}
        optional = {"oobleck_mfu_ratio", "oobleck_eval_loss", "oobleck_checkpoint_age_seconds"}
        assert asked - optional <= there
        assert len(asked) > 10

    serve(use)
