"""The plan of a run: the user's, or the planner's; and what the planner is told of model and machine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from models.gpt import LOGITS_AT_ONCE, GptConfig
from oobleck_jax.config import Remat, RunConfig, ScheduleKind
from oobleck_jax.elastic.terms import Proposal
from oobleck_jax.errors import NotEnoughNodes, PlanError
from oobleck_jax.plan_text import read_plan
from oobleck_jax.planning import schedule_kinds
from oobleck_jax.planning.ahead import stages_ahead
from oobleck_jax.planning.estimate import LayerSize, estimate_profile, gpt_sizes
from oobleck_jax.planning.plan import NodeId, Plan, Stage, check_plan
from oobleck_jax.planning.planner import Planning, plan_from, templates_for
from oobleck_jax.planning.profile import Profile
from oobleck_jax.planning.reconfigure import reconfigure
from oobleck_jax.planning.schedule import StageCost
from oobleck_jax.planning.schedule_text import render_grid
from oobleck_jax.planning.templates import Templates


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposer:
    """Proposes plans for the nodes there are.

    Attributes:
        config: of the run.
        profile: what the layers cost.
        device_memory_bytes: what a stage may use of each device.
        given: the user's plan, which is used as it is.
        max_nodes: the most there can be; None: as many as at the start.
        shares_cores: whether several nodes compute on the same cores.
    """

    config: RunConfig
    profile: Profile
    device_memory_bytes: int
    given: Plan | None = None
    max_nodes: int | None = None
    shares_cores: bool = False

    @property
    def needs_costs(self) -> bool:
        """Whether the plans depend on what layers cost: not where there is nothing to choose."""
        is_decided = self.given is not None or self.config.nodes * self.config.devices_per_node == 1
        return self.config.fault_tolerance > 0 or not is_decided

    @property
    def smallest_num_nodes(self) -> int:
        """The fewest nodes for which there is a plan."""
        if self.given is not None and not self.config.fault_tolerance:
            return len(self.given.nodes)
        return self.templates.smallest or self.config.nodes

    def check(self) -> None:
        """Refuse what cannot be planned, whatever layers cost.

        Raises:
            PlanError, NotEnoughNodes: see `first`.
        """
        num_nodes, fault_tolerance = self.config.nodes, self.config.fault_tolerance
        if self.given is None:
            if num_nodes <= fault_tolerance:
                raise NotEnoughNodes(
                    f"--nodes {num_nodes} is too few for --fault-tolerance {fault_tolerance}, which needs "
                    f"{fault_tolerance + 1} pipelines; add nodes, or lower --fault-tolerance",
                    num_nodes=num_nodes,
                    num_needed=fault_tolerance + 1,
                )
            return
        self._check_given(self.given)
        if len(self.given.pipelines) <= fault_tolerance:
            raise PlanError(
                f"--plan has {len(self.given.pipelines)} pipelines, but --fault-tolerance {fault_tolerance} needs "
                f"{fault_tolerance + 1}; add pipelines, or lower --fault-tolerance"
            )

    def first(self) -> Proposal:
        """Return the plan to begin with.

        Raises:
            PlanError: there is none, or the user's breaks a rule.
            NotEnoughNodes: --nodes are too few for the model, or for --fault-tolerance.
        """
        self.check()
        num_nodes, fault_tolerance = self.config.nodes, self.config.fault_tolerance
        nodes = tuple(NodeId(node) for node in range(num_nodes))
        proposal = self.replan(nodes, {}, None)
        if len(proposal.plan.pipelines) > fault_tolerance:
            return proposal
        raise NotEnoughNodes(
            f"--nodes {num_nodes} is too few for --fault-tolerance {fault_tolerance}, which needs "
            f"{fault_tolerance + 1} pipelines ({proposal.reason}); add nodes, or lower --fault-tolerance",
            num_nodes=num_nodes,
            num_needed=num_nodes + 1,
        )

    @property
    def ahead(self) -> tuple[Stage, ...]:
        """The stages that any plan of the run may need, the most likely first; none if the first loss ends the run."""
        num_nodes, fault_tolerance = self.config.nodes, self.config.fault_tolerance
        if not fault_tolerance:
            return ()
        return stages_ahead(
            self.templates,
            num_nodes=num_nodes,
            max_nodes=self._most_nodes,
            fault_tolerance=fault_tolerance,
            given=self.given,
        )

    def replan(
        self, nodes: tuple[NodeId, ...], holdings: Mapping[NodeId, tuple[int, ...]], old: Plan | None
    ) -> Proposal:
        """Return the plan for these nodes: the user's while all of its nodes are there, else the planner's. Pure.

        Args:
            nodes: the nodes there are, ascending.
            holdings: the layers whose current state each of them has.
            old: the plan so far.

        Raises:
            PlanError: see `first`.
        """
        if self.given is not None and set(self.given.nodes) <= set(nodes):
            working = self.given.working_nodes
            spare = tuple(node for node in nodes if node not in working)
            return Proposal(plan=replace(self.given, spare_nodes=spare), reason="given by --plan")
        return self._replanned(nodes, holdings, old) if any(holdings.values()) else self._planned(nodes)

    def _planned(self, nodes: tuple[NodeId, ...]) -> Proposal:
        planning = plan_from(self.templates, nodes=nodes, fault_tolerance=self.config.fault_tolerance)
        return Proposal(plan=planning.plan, reason=self._reason(planning))

    def _replanned(
        self, nodes: tuple[NodeId, ...], holdings: Mapping[NodeId, tuple[int, ...]], old: Plan | None
    ) -> Proposal:
        reconfiguration = reconfigure(
            self.templates,
            nodes=nodes,
            holdings=holdings,
            fault_tolerance=self.config.fault_tolerance,
            old=old,
        )
        planning = reconfiguration.planning
        moved = f"{len(reconfiguration.copies)} layer states ({reconfiguration.num_bytes / 1e6:.1f} MB) to copy"
        return Proposal(plan=planning.plan, reason=f"{self._reason(planning)}; {moved}")

    def _reason(self, planning: Planning) -> str:
        # The profile is of a node that has its cores for itself.
        return f"{planning.reason}; longer, because nodes share cores" if self.shares_cores else planning.reason

    @property
    def _most_nodes(self) -> int:
        return max(self.config.nodes, self.max_nodes or 0)

    @property
    def templates(self) -> Templates:
        """The same for any number of nodes, so that they are made only once, and not while nodes recover."""
        return templates_for(
            self.profile,
            num_nodes=self._most_nodes,
            devices_per_node=self.config.devices_per_node,
            num_microbatches=self.config.num_microbatches,
            device_memory_bytes=self.device_memory_bytes,
            schedule=schedule_of(self.config, shares_cores=self.shares_cores),
        )

    def _check_given(self, plan: Plan) -> None:
        check_plan(
            plan,
            num_layers=self.config.model.num_layers,
            num_microbatches=self.config.num_microbatches,
            devices_per_node=self.config.devices_per_node,
        )
        if self.config.remat not in (Remat.NONE, Remat.AUTO) and any(
            p.schedule is ScheduleKind.ZB_H1 for p in plan.pipelines
        ):
            raise PlanError(
                f"--plan has the schedule zb-h1, which splits the backward pass, but --remat {self.config.remat} "
                "begins that with computing again; give --remat none"
            )
        nodes = range(self.config.nodes)
        if absent := sorted(set(plan.nodes) - set(nodes)):
            raise NotEnoughNodes(
                f"--plan uses {len(plan.nodes)} nodes ({list(plan.nodes)}), but --nodes {len(nodes)} gives only "
                f"{list(nodes)}: {absent} are missing; raise --nodes to {max(plan.nodes) + 1}",
                num_nodes=len(nodes),
                num_needed=max(plan.nodes) + 1,
            )


def make_proposer(
    config: RunConfig,
    *,
    plan: str | None,
    device_memory_bytes: int,
    max_nodes: int | None = None,
    shares_cores: bool = False,
) -> Proposer:
    """Return the proposer of a run.

    Raises:
        PlanError: `plan` is neither a plan nor a file with one, or has not the schedule that is asked for.
    """
    given = None if plan is None else _read_given(plan, config)
    return Proposer(
        config=config,
        profile=estimated_profile(config),
        device_memory_bytes=device_memory_bytes,
        given=given,
        max_nodes=max_nodes,
        shares_cores=shares_cores,
    )


def _read_given(text: str, config: RunConfig) -> Plan:
    plan = read_plan(text, num_microbatches=config.num_microbatches)
    if config.schedule is ScheduleKind.ZB_H1:
        pipelines = (
            replace(pipeline, schedule=config.schedule) if pipeline.schedule is ScheduleKind.ONE_F_ONE_B else pipeline
            for pipeline in plan.pipelines
        )
        return replace(plan, pipelines=tuple(pipelines))
    kinds = {pipeline.schedule for pipeline in plan.pipelines}
    if config.schedule is ScheduleKind.INTERLEAVED and ScheduleKind.INTERLEAVED not in kinds:
        raise PlanError(
            "--plan is used as it is, and none of its pipelines is interleaved, but --schedule interleaved asks for "
            "it; give several stages to each node, as in 0-3@0,3-5@1,5-8@0,8-10@1, or leave out --plan"
        )
    return plan


def schedule_of(config: RunConfig, *, shares_cores: bool) -> ScheduleKind:
    """Return what pipelines are to have: where nodes share cores no time is lost in bubbles, because others use it."""
    is_plain = config.schedule is ScheduleKind.AUTO and shares_cores
    return ScheduleKind.ONE_F_ONE_B if is_plain else config.schedule


def estimated_profile(config: RunConfig) -> Profile:
    """Return a profile without measuring: closed forms for a GPT, equal layers for any other model."""
    return estimate_profile(
        layer_sizes(config),
        microbatch_size=config.microbatch_size,
        precision=config.precision,
        remat=config.remat,
        devices_per_node=config.devices_per_node,
        tensor_parallel=config.tensor_parallel,
    )


def layer_sizes(config: RunConfig) -> tuple[LayerSize, ...]:
    """Return what each layer computes and keeps: closed forms for a GPT, equal layers for any other model."""
    model = config.model
    if isinstance(model, GptConfig):
        return gpt_sizes(
            num_blocks=model.num_blocks,
            width=model.width,
            num_heads=model.num_heads,
            vocab_size=model.vocab_size,
            sequence_length=config.sequence_length,
            remat=config.remat,
            logits_at_once=LOGITS_AT_ONCE // config.microbatch_size,
        )
    layer = LayerSize(
        kind="layer", num_parameters=1, forward_flops=10**6, num_outputs=1, num_residuals=1, num_temporaries=1
    )
    return (layer,) * model.num_layers


def memory_per_device(num_local_devices: int) -> int:
    """Return the bytes that each of the virtual devices of this machine may use: an equal share of four fifths."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total * 4 // 5 // num_local_devices


def layer_names(profile: Profile) -> tuple[str, ...]:
    """Return a name for each layer: its kind, with a number where several layers have it."""
    kinds = [layer.kind for layer in profile.layers]
    seen: dict[str, int] = {}
    names: list[str] = []
    for kind in kinds:
        number = seen[kind] = seen.get(kind, -1) + 1
        names.append(kind if kinds.count(kind) == 1 else f"{kind} {number}")
    return tuple(names)


def schedule_text(plan: Plan, profile: Profile) -> str:
    """Return the schedules of all pipelines, drawn as grids."""
    parts: list[str] = []
    for number, pipeline in enumerate(plan.pipelines):
        stages = pipeline.template.stages
        nodes = ", ".join(f"stage {index} on node {pipeline.node_of(index)}" for index in range(len(stages)))
        grid = render_grid(schedule_kinds.schedule_of(pipeline), [_stage_cost(profile, stage) for stage in stages])
        parts.append(
            f"pipeline {number}: {pipeline.num_microbatches} microbatches, {pipeline.schedule}; {nodes}\n\n{grid}"
        )
    return "\n\n".join(parts)


def _stage_cost(profile: Profile, stage: Stage) -> StageCost:
    costs = [
        profile.layers[layer].cost_on(stage.num_devices) or profile.layers[layer].costs[0] for layer in stage.layers
    ]
    return StageCost(forward_s=sum(cost.forward_s for cost in costs), backward_s=sum(cost.backward_s for cost in costs))
