"""Whether a node may take part in a run, and why not."""

from collections.abc import Collection, Mapping

from oobleck_jax.elastic.messages import Join
from oobleck_jax.elastic.terms import OnLoss, Terms
from oobleck_jax.planning.plan import NodeId


def why_refuse(
    join: Join, terms: Terms, *, taken: Collection[NodeId], excluded: Mapping[NodeId, str], has_begun: bool
) -> str | None:
    """Return why a node cannot take part, or None when it is welcome.

    Args:
        join: what the node says of itself.
        terms: of the run.
        taken: the nodes that take part already.
        excluded: nodes that may not come back, and why.
        has_begun: whether the first generation has begun.
    """
    if has_begun and terms.on_loss is OnLoss.STOP and join.worker is None:
        return "the run has begun, and its nodes stay the same to the end"
    for name, wanted in terms.versions.items():
        if join.versions.get(name) != wanted:
            return f"{name} {join.versions.get(name, '(unknown)')} on {join.name}, but the run uses {name} {wanted}"
    if join.config_digest not in (None, terms.config_digest):
        return f"{join.name} was started with other flags than the coordinator; start all with the same ones"
    if join.num_devices != terms.num_devices:
        return f"{join.name} offers {join.num_devices} devices, but the run uses {terms.num_devices} of each node"
    if join.node is None:
        return _why_full(terms, taken=taken, excluded=excluded)
    if join.node in excluded:
        return excluded[join.node]
    if join.node in taken:
        return f"node {join.node} takes part already"
    if not 0 <= join.node < terms.most_nodes:
        return f"there is no node {join.node}: the run has nodes 0 to {terms.most_nodes - 1}; raise --max-nodes"
    return None


def free_node(terms: Terms, *, taken: Collection[NodeId], excluded: Collection[NodeId]) -> NodeId | None:
    """Return the lowest id that a new node can have; None when there is none left."""
    free = (NodeId(number) for number in range(terms.most_nodes) if number not in taken and number not in excluded)
    return next(free, None)


def _why_full(terms: Terms, *, taken: Collection[NodeId], excluded: Mapping[NodeId, str]) -> str | None:
    if free_node(terms, taken=taken, excluded=excluded) is not None:
        return None
    others = "".join(f", and {why}" for node, why in sorted(excluded.items()) if node not in taken)
    return f"the run has {len(taken)} of at most {terms.most_nodes} nodes{others}; raise --max-nodes"
