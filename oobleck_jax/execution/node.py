"""A node at work: what one worker does in a generation, step by step. Knows no messages and no other process.

The order of calls is `prepare`, `start`, then for each step `compute` and, once the step counts, `commit`; `evaluate`
after a commit; `abandon` at any time, after which the next `prepare` can come. Until `commit`, nothing that a step does
changes parameters or optimizer state, so that a step can be dropped at any moment and done again.

Shapes: B microbatch, T sequence.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from oobleck_jax.config import RunConfig
from oobleck_jax.data import TokenDataset
from oobleck_jax.execution.compilations import compiled_since, num_compilations
from oobleck_jax.execution.executor import Executor, Losses
from oobleck_jax.execution.fabric import Fabric
from oobleck_jax.execution.gradient_sum import GradientSums, SumReport
from oobleck_jax.execution.home import Home
from oobleck_jax.execution.hop import hops_of
from oobleck_jax.execution.layer_functions import Params, functions_of, input_specs
from oobleck_jax.execution.layout import LocalStage, NodeLayout, buckets_of, groups_of, layout_of, spans_of
from oobleck_jax.execution.link import Link
from oobleck_jax.execution.optimizer import clip_factor
from oobleck_jax.execution.patience import Patience
from oobleck_jax.execution.recorder import Activity, NoRecorder, Recorder, Stopwatch
from oobleck_jax.execution.span_library import SpanLibrary
from oobleck_jax.execution.stage_runtime import MicrobatchShape, StageRuntime
from oobleck_jax.execution.state import GroupState, StateBuilder
from oobleck_jax.execution.state_transfer import StateTransfer, checksum_of
from oobleck_jax.inject import AtMoment, Moment
from oobleck_jax.learning_rate import learning_rate
from oobleck_jax.model import LayeredModel
from oobleck_jax.planning.plan import NodeId, Plan, Stage
from oobleck_jax.planning.reconfigure import State, copies_of


logger = logging.getLogger(__name__)

ReadState: TypeAlias = Callable[[str, GroupState], GroupState]
"""Reads the state of a group, given its name and what it looks like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What a node must know of one generation."""

    number: int
    plan: Plan
    node: NodeId  # this node
    link_addresses: Mapping[NodeId, str]
    ranks: Mapping[NodeId, int]  # in the fabric
    step: int = 0  # first step of the generation
    holdings: Mapping[NodeId, tuple[int, ...]] = field(default_factory=dict)  # layers whose state after step - 1 it has


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """What getting ready for a generation took."""

    num_compilations: int  # programs that were not ready, with the small ones that JAX compiles unasked
    received_bytes: int  # of layer states
    seconds: dict[str, float]  # compile, copy; restore, where there is a checkpoint to restore


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a node knows of a step before it counts.

    Attributes:
        loss_sum: loss summed over the tokens of its last stages, 0.0 where it has none.
        num_tokens: tokens that `loss_sum` covers.
        reports: of each group that the node holds.
        seconds: compute, receive (waiting for other stages) and sum (of gradients, waiting included).
    """

    loss_sum: float
    num_tokens: int
    reports: tuple[SumReport, ...]
    seconds: dict[str, float]

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.loss_sum)) and all(np.isfinite(item.squared_norm) for item in self.reports)


class NodeTrainer:
    """The tensors of one node, over all generations of a run.

    Attributes:
        home: its devices and programs.
        groups: whose states there are.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        model: LayeredModel,
        dataset: TokenDataset,
        home: Home,
        link: Link,
        at_moment: AtMoment = lambda moment, step: None,
        recorder: Recorder | None = None,
        pretrained: Callable[[str], Params] | None = None,
    ) -> None:
        """Begin without any state.

        Args:
            pretrained: parameters of each group before the first step; None: random ones.
        """
        self.home = home
        self._at_moment = at_moment
        self._recorder = recorder or NoRecorder()
        self._watch = Stopwatch(self._recorder)
        self._config, self._model, self._dataset, self._link = config, model, dataset, link
        self._functions = functions_of(model, config.precision)
        self._library = SpanLibrary(self.home, self._functions)
        self._builder = StateBuilder(model, self._functions, groups_of(model), config.optimizer, self.home)
        self._microbatch = MicrobatchShape(num_samples=config.microbatch_size, num_tokens=config.sequence_length)
        self._groups = groups_of(model)
        self._pretrained = pretrained
        self.groups = tuple(
            State(name=group.name, layers=group.layers, num_bytes=self._builder.sizes[group.name])
            for group in self._groups
            if self._builder.sizes[group.name]
        )
        tokens_BT = jax.ShapeDtypeStruct(self._microbatch.shape, jnp.int32)
        self._x_specs = input_specs(model.layers, self._functions, tokens_BT)
        self._stages: dict[int, StageRuntime] = {}  # of the current generation
        self._held: dict[int, StageRuntime] = {}  # those that have the state after the last commit
        self._compiled: set[Hashable] = set()
        self._executor: Executor | None = None
        self._sums: dict[str, np.ndarray] = {}

    # -- a generation

    def prepare(
        self,
        generation: Generation,
        *,
        progress: Callable[[str, int, int], None],
        patience: Patience,
        restore: ReadState | None = None,
    ) -> Preparation:
        """Lay out the node's stages: compile their programs, and get the state of their layers.

        What the node held before stays as it is until `start`, because the generation may end before it begins, and
        others may need it then. If it is not among the holdings it is out of date (steps were committed without this
        node), and dropped.

        Args:
            progress: told (phase, done, total) as the work goes on.
            restore: reads states from a checkpoint; None: they come from nodes, or are those before the first step.

        Raises:
            Abandoned, PeerLost, Stalled, StateDamaged: a state does not come.
            CheckpointDamaged, CheckpointUnreadable: a state cannot be restored.
        """
        began_s, num_compilations_before = time.monotonic(), num_compilations()
        self._watch.start()
        self._generation = generation
        if not generation.holdings.get(generation.node):
            self._held = {}
        self._buckets = buckets_of(self._groups, self._builder.sizes, generation.plan)
        layout = layout_of(self._model, generation.plan, generation.node)
        self._stages = self._make_stages(layout)
        transfer = self._transfer(generation)
        transfer.offer(self.held_states(transfer.outgoing))
        calls = {key: call for stage in self._stages.values() for key, call in self._compilations(stage).items()}
        missing = [key for key in calls if key not in self._compiled]
        for done, key in enumerate(missing):
            progress("compile", done, len(missing))
            if generation.number > 1:
                logger.warning("was not compiled ahead: %s", key)
            calls[key]()
            self._compiled.add(key)
        if missing:
            progress("compile", len(missing), len(missing))
        compiled_s = time.monotonic()
        self._watch.lap(Activity.COMPILE, generation.step)
        received = transfer.receive({name: self._builder.state_shapes(name) for name in transfer.incoming}, patience)
        copied_s = time.monotonic()
        self._load(received, self._initial if restore is None else restore, progress)
        loaded_s = time.monotonic()
        self._watch.lap(Activity.COPY, generation.step)
        if generation.number > 1 and (names := compiled_since(num_compilations_before)):
            logger.warning("generation %d waited for the compilation of %s", generation.number, ", ".join(names))
        before, after = hops_of(self._stages, generation.number, generation.node, generation.link_addresses, self._link)
        self._executor = Executor(
            config=self._config,
            dataset=self._dataset,
            layout=layout,
            stages=self._stages,
            hops_before=before,
            hops_after=after,
            at_moment=self._at_moment,
            recorder=self._recorder,
        )
        return Preparation(
            num_compilations=num_compilations() - num_compilations_before,
            received_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(received)),
            seconds={
                "compile": compiled_s - began_s,
                "copy": (copied_s if restore else loaded_s) - compiled_s,
                **({"restore": loaded_s - copied_s} if restore else {}),
            },
        )

    def compile_ahead(self, stages: Iterable[Stage], *, rank: int, num_ranks: int) -> Iterator[tuple[int, int]]:
        """Compile what any node may need for these stages; yield (done, total) before each program and at the end.

        Of several nodes that share a store of programs, each compiles another part first, in the given order, and finds
        the rest there. May run in another thread than the rest, beside it.

        Args:
            stages: those that are needed first come first.
            rank: of this node among the `num_ranks` that do the same.
        """
        calls: dict[Hashable, Callable[[], Any]] = {}
        for stage, is_split in product(stages, (False, True) if self._config.may_split_backward else (False,)):
            spans = spans_of(self._model, stage.layers)
            local = LocalStage(pipeline=0, index=0, stage=stage, spans=spans, is_split=is_split)
            for key, call in self._compilations(self._make_stage(local)).items():
                calls.setdefault(key, call)
        keys = list(calls)
        mine = keys[rank::num_ranks]
        others = [key for number, key in enumerate(keys) if number % num_ranks != rank]
        missing = [key for key in (*mine, *others) if key not in self._compiled]
        for number, key in enumerate(missing):
            yield len(keys) - len(missing) + number, len(keys)
            calls[key]()
            self._compiled.add(key)
        yield len(keys), len(keys)

    def start(self) -> None:
        """Everybody is prepared: what the node held only for others is dropped."""
        self._watch.lap(Activity.FABRIC, self._generation.step)
        self._held = self._stages
        self._link.settle()

    def abandon(self) -> None:
        """Drop the generation: its offers, its unfinished step, and what was prepared but not started."""
        self._link.drain()
        self._executor = None
        self._sums = {}
        self._stages = self._held
        for stage in self._held.values():
            stage.forget_step()

    def _transfer(self, generation: Generation) -> StateTransfer:
        held = {node: frozenset(layers) for node, layers in generation.holdings.items()}
        copies = copies_of(generation.plan, held, self.groups)
        return StateTransfer(
            copies,
            node=generation.node,
            generation=generation.number,
            step=generation.step,
            ranks=generation.ranks,
            addresses=generation.link_addresses,
            link=self._link,
            device=self.home.devices[0],
        )

    def held_states(self, names: Iterable[str]) -> dict[str, GroupState]:
        """Return those states, after the last commit, that the node has; the next commit invalidates them."""
        wanted = set(names)
        states: dict[str, GroupState] = {}
        for stage in self._held.values():
            states |= stage.states(wanted)
        return states

    def _load(
        self, received: Mapping[str, GroupState], read: ReadState, progress: Callable[[str, int, int], None]
    ) -> None:
        """Fill the prepared stages: with what was held, else received, else read."""
        for stage in self._stages.values():
            for held in self._held.values():
                stage.adopt(held)
        missing = {name for stage in self._stages.values() for name in stage.missing}
        states = self.held_states(missing) | dict(received)
        unread = sorted(missing - states.keys())
        for done, name in enumerate(unread):
            progress("load", done, len(unread))
            states[name] = read(name, self._builder.state_shapes(name))
        for stage in self._stages.values():
            stage.load(states)

    def _initial(self, name: str, shapes: GroupState) -> GroupState:
        assert self._generation.step == 0, f"nobody holds {name} after step {self._generation.step - 1}"
        state = self._builder.initial(name, self._config.seed)
        return state if self._pretrained is None else replace(state, params=self._pretrained(name))

    def fabric_sums(self, generation: Generation) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Return (ranks, length) of every sum that the nodes of a generation ask the fabric for, in one order."""
        return tuple(
            (tuple(generation.ranks[holder] for holder in bucket.holders), bucket.size)
            for bucket in buckets_of(self._groups, self._builder.sizes, generation.plan)
            if bucket.is_shared
        )

    # -- a step

    def compute(self, step: int, *, fabric: Fabric | None, patience: Patience) -> StepResult:
        """Run forward and backward of the node's share of a step, and meanwhile sum gradients over the holders.

        Changes nothing that lasts; the sums are kept for `commit`.

        Raises:
            Abandoned, PeerLost, Stalled: the step cannot be finished.
        """
        assert self._executor is not None, "prepare comes first"
        began_s = time.monotonic()
        gradient_sums = GradientSums(
            self._buckets,
            sizes=self._builder.sizes,
            num_rows=Counter(name for stage in self._stages.values() for name in stage.emitted),
            node=self._generation.node,
            ranks=self._generation.ranks,
            fabric=fabric,
        )
        losses = self._executor.train(step, patience, gradient_sums.add)
        computed_s = time.monotonic()
        self._watch.start()
        self._at_moment(Moment.SUM, step)
        self._sums, reports = gradient_sums.finish(
            patience, lambda began_s, ended_s: self._recorder.add(Activity.REDUCE, began_s, ended_s, step)
        )
        summed_s = time.monotonic()
        self._watch.lap(Activity.SUM, step)
        return StepResult(
            loss_sum=losses.loss_sum,
            num_tokens=losses.num_tokens,
            reports=reports,
            seconds={
                "compute": computed_s - began_s - losses.received_s,
                "receive": losses.received_s,
                "sum": summed_s - computed_s,
            },
        )

    def look_ahead(self, step: int) -> None:
        """Get ready what a step needs that does not depend on the one before: while that is being decided on."""
        assert self._executor is not None, "prepare comes first"
        self._executor.look_ahead(step)
        self._watch.start()  # from now on it only waits for the vote

    def commit(self, step: int, global_norm: float | None) -> None:
        """Update parameters and optimizer state with the sums of the step just computed; not if they are not finite."""
        self._watch.lap(Activity.VOTE, step)
        if global_norm is not None:
            factor = clip_factor(self._config.optimizer, global_norm)
            rate = learning_rate(self._config, step)
            for stage in self._stages.values():
                stage.update(self._sums, factor, rate)
        self._sums = {}
        self._link.settle()
        self._watch.lap(Activity.UPDATE, step)
        self._recorder.flush()

    def evaluate(self, step: int, patience: Patience) -> Losses:
        """Return the loss of the evaluation batches, as far as the node's last stages computed it.

        Raises:
            Abandoned, PeerLost, Stalled: a neighbour's data does not come.
        """
        assert self._executor is not None, "prepare comes first"
        self._watch.start()
        losses = self._executor.evaluate(step, patience)
        self._watch.lap(Activity.EVALUATE, step)
        return losses

    # -- what tests and diagnosis look at

    def fingerprints(self) -> dict[str, int]:
        """Return a checksum of parameters and optimizer state of every group that the node holds."""
        states = self.held_states(name for stage in self._held.values() for name in stage.groups)
        return {name: checksum_of(jax.tree.leaves(state)) for name, state in states.items()}

    def states(self) -> dict[str, GroupState]:
        """Return the state of every group that the node holds, as copies."""
        states: dict[str, GroupState] = {}
        for stage in self._stages.values():
            states |= jax.tree.map(np.copy, stage.states(stage.groups))
        return states

    def summed_gradients(self) -> dict[str, np.ndarray]:
        """Return the summed gradients of the step just computed, float32[P] by group."""
        return dict(self._sums)

    # -- helpers

    def _make_stages(self, layout: NodeLayout) -> dict[int, StageRuntime]:
        return {local.index: self._make_stage(local) for local in layout.stages}

    def _compilations(self, stage: StageRuntime) -> dict[Hashable, Callable[[], Any]]:
        return stage.compilations(with_evaluation=self._config.eval_every > 0)

    def _make_stage(self, local: LocalStage) -> StageRuntime:
        return StageRuntime(
            local,
            model=self._model,
            home=self.home,
            library=self._library,
            builder=self._builder,
            microbatch=self._microbatch,
            x_spec=self._x_specs[local.stage.first_layer],
            precision=self._config.precision,
            remat=self._config.remat,
        )
