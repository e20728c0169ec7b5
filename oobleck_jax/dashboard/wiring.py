"""The dashboard of a session: made of its setting, and given the coordinator to act on."""

from oobleck_jax import events
from oobleck_jax.dashboard.access import Access
from oobleck_jax.dashboard.facts import facts_of
from oobleck_jax.dashboard.run_state import RunState
from oobleck_jax.dashboard.server import Actions, Dashboard
from oobleck_jax.elastic.coordinator import Coordinator
from oobleck_jax.elastic.effects import Asked, Wish
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.setting import Setting


_STOP_EXIT_CODE = 130  # as after Ctrl-C


def make_dashboard(setting: Setting) -> Dashboard:
    """Return what people look at, with what has happened before if the run goes on."""
    token = setting.contact.token
    facts = facts_of(
        setting.preset,
        setting.config,
        setting.run_dir.path,
        smallest_num_nodes=setting.proposer.smallest_num_nodes,
        has_actions=token is not None,
    )
    state = RunState(facts)
    if setting.past is not None:
        state.take_all(events.read_run(setting.run_dir.path))
    return Dashboard(state, Access(token=token))


def address_text(setting: Setting) -> str:
    """Return where the page is, for the terminal."""
    scheme = "http" if setting.contact.tls_authority is None else "https"
    return f"page: {scheme}://{setting.contact.address}/"


def actions_on(coordinator: Coordinator) -> Actions:
    """Return what people may do to a run."""

    def drain(node: NodeId) -> str:
        coordinator.ask(Asked(node=node, wish=Wish.DRAIN))
        return f"node {node} leaves after the step in progress; the others go on without it"

    def kill(node: NodeId) -> str:
        coordinator.ask(Asked(node=node, wish=Wish.KILL))
        return f"the worker of node {node} is killed; the others go on, and its agent starts a new one"

    def checkpoint() -> str:
        coordinator.ask(Asked(wish=Wish.CHECKPOINT))
        return "the state after the step in progress is saved, in the background"

    def stop() -> str:
        coordinator.interrupt("stopped by a person, on the page", _STOP_EXIT_CODE)
        return "the run ends: every node is told to stop"

    return Actions(drain=drain, kill=kill, checkpoint=checkpoint, stop=stop)
