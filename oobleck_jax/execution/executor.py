"""The executor: carries out the actions of a node's schedule, microbatch by microbatch.

One thread starts the programs; they run asynchronously, a little ahead (pace.py), and what comes from other stages is
asked for one action ahead, so that transfers run beside compute. Every wait for another node is a `Patience.wait`.

Shapes: B microbatch, T sequence.
"""

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from oobleck_jax.config import RunConfig
from oobleck_jax.data import TokenDataset
from oobleck_jax.execution.gradient_sum import Emit
from oobleck_jax.execution.hop import Hop
from oobleck_jax.execution.layout import NodeLayout
from oobleck_jax.execution.link import Payload
from oobleck_jax.execution.pace import Pace
from oobleck_jax.execution.patience import Patience
from oobleck_jax.execution.recorder import Activity, Recorder
from oobleck_jax.execution.stage_runtime import StageRuntime
from oobleck_jax.inject import AtMoment, Moment
from oobleck_jax.planning.schedule import Action, Phase


_ACTIVITIES: Mapping[str, Activity] = {  # by the last word of a program's name
    "forward": Activity.FORWARD,
    "loss": Activity.LOSS,
    "backward": Activity.BACKWARD,
    "weights": Activity.BACKWARD,
    "infer": Activity.FORWARD,
    "infer_loss": Activity.FORWARD,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Loss summed over the tokens of the node's last stages; zeros where it has none."""

    loss_sum: float
    num_tokens: int
    received_s: float  # time spent waiting for other stages


class _Samples(NamedTuple):
    """The samples of a microbatch."""

    indices_B: Int[np.ndarray, " B"]
    tokens_BT: Int[np.ndarray, "B T"]  # of no samples where the node has neither a first nor a last stage


class Executor:
    """Runs the stages of one node in one generation."""

    def __init__(
        self,
        *,
        config: RunConfig,
        dataset: TokenDataset,
        layout: NodeLayout,
        stages: Mapping[int, StageRuntime],
        hops_before: Mapping[int, Hop],
        hops_after: Mapping[int, Hop],
        at_moment: AtMoment,
        recorder: Recorder,
    ) -> None:
        self._config, self._dataset, self._layout, self._stages = config, dataset, layout, stages
        self._before, self._after = hops_before, hops_after
        self._at_moment = at_moment
        self._recorder = recorder
        self._last_backward = {  # by stage, the position of the action that completes its gradients
            action.stage: position
            for position, action in enumerate(layout.actions)
            if action.phase is stages[action.stage].completing_phase
        }
        self._pace = Pace(self._record_program if recorder.is_on else None)
        self._step = 0
        self._received_s = 0.0
        self._samples: tuple[int, list[_Samples]] = (-1, [])  # of which step, and those of each microbatch

    def train(self, step: int, patience: Patience, emit: Emit) -> Losses:
        """Run all forwards and backwards of a step.

        Args:
            emit: takes the gradient sums of the stages as they become complete, last layers first.

        Raises:
            Abandoned, PeerLost, Stalled: a neighbour's data does not come.
        """
        self._step, self._received_s = step, 0.0
        self._pace.begin(patience.abandoned)
        self.look_ahead(step)
        scale = 1.0 / self._config.tokens_per_step
        losses: list[jax.Array] = []
        for stage in self._stages.values():
            stage.begin_step()
        actions = self._layout.actions
        for position, action in enumerate(actions):
            self._ask(step, action)
            if position + 1 < len(actions):
                self._ask(step, actions[position + 1])
            stage = self._stages[action.stage]
            self._pace.item = self._item(action)
            samples = self._samples[1][action.microbatch]
            emit_now = emit if self._last_backward[action.stage] == position else None
            self._at_moment(Moment.FORWARD if action.phase is Phase.FORWARD else Moment.BACKWARD, step)
            if action.phase is Phase.WEIGHT:
                stage.backward_weights(action.microbatch, self._pace, emit_now)
                continue
            if action.phase is Phase.BACKWARD:
                if not stage.is_last:  # the last stage did it with its forward
                    dy = self._receive(self._after, Payload.GRADIENT, step, action, patience)
                    self._send_back(step, action, stage.backward(action.microbatch, dy, self._pace, emit_now))
                continue
            randomness = stage.randomness(self._config.seed, step, samples.indices_B)
            x = self._input(step, action, samples, patience)
            if stage.is_last:
                targets = samples.tokens_BT[:, 1:]
                loss, dx = stage.loss_and_backward(
                    action.microbatch, x, targets, scale, randomness, self._pace, emit_now
                )
                losses.append(loss)
                self._send_back(step, action, dx)
            else:
                y = stage.forward(action.microbatch, x, randomness, self._pace)
                self._after[action.stage].send(Payload.ACTIVATION, step, self._item(action), y)
        return self._total(losses)

    def look_ahead(self, step: int) -> None:
        """Get the samples of a step, so that it can begin at once."""
        if self._samples[0] != step:
            indices = self._dataset.sample_indices(step)
            takes_tokens = any(index not in self._before or stage.is_last for index, stage in self._stages.items())
            chosen = [indices[self._rows(microbatch)] for microbatch in range(len(self._layout.microbatches))]
            self._samples = (
                step,
                [
                    _Samples(samples_B, self._dataset.tokens(samples_B if takes_tokens else samples_B[:0]))
                    for samples_B in chosen
                ],
            )

    def evaluate(self, step: int, patience: Patience) -> Losses:
        """Run the node's share of the evaluation batches forward, without randomness.

        Raises:
            Abandoned, PeerLost, Stalled: a neighbour's data does not come.
        """
        self._step, self._received_s = step, 0.0
        self._pace.begin(patience.abandoned)
        losses: list[jax.Array] = []
        num_microbatches = len(self._layout.microbatches)
        group = self._layout.num_lanes  # so many microbatches are under way where a node has several stages
        for batch in range(self._config.eval_batches):
            indices = self._dataset.eval_indices(batch)
            for first in range(0, num_microbatches, group):
                for index in self._stages:
                    for microbatch in range(first, min(first + group, num_microbatches)):
                        tokens_BT = self._dataset.eval_tokens(indices[self._rows(microbatch)])
                        number = batch * self._config.num_microbatches + self._layout.microbatches[microbatch]
                        losses += self._infer(step, index, number, tokens_BT, patience)
        return self._total(losses)

    def _infer(
        self, step: int, index: int, number: int, tokens_BT: Int[np.ndarray, "B T"], patience: Patience
    ) -> list[jax.Array]:
        """Run a microbatch forward on one stage, without gradients; return its loss, if it is the last one."""
        stage = self._stages[index]
        self._pace.item = number
        if index in self._before:
            self._before[index].ask(Payload.EVALUATION, step, number)
            x = self._wait(self._before[index], Payload.EVALUATION, step, number, patience)
        else:
            x = stage.put_batch(tokens_BT[:, :-1])
        if stage.is_last:
            return [stage.infer_loss(x, tokens_BT[:, 1:], self._pace)]
        self._after[index].send(Payload.EVALUATION, step, number, stage.infer(x, self._pace))
        return []

    # -- helpers

    def _rows(self, microbatch: int) -> slice:
        """Return the rows of the global batch that a microbatch of this node's pipeline takes."""
        first = self._layout.microbatches[microbatch] * self._config.microbatch_size
        return slice(first, first + self._config.microbatch_size)

    def _item(self, action: Action) -> int:
        """Return the number of an action's microbatch over all pipelines."""
        return self._layout.microbatches[action.microbatch]

    def _input(self, step: int, action: Action, samples: _Samples, patience: Patience) -> jax.Array:
        """Return a stage's input of a microbatch."""
        if action.stage in self._before:
            return self._receive(self._before, Payload.ACTIVATION, step, action, patience)
        return self._stages[action.stage].put_batch(samples.tokens_BT[:, :-1])

    def _ask(self, step: int, action: Action) -> None:
        if action.phase is Phase.FORWARD and action.stage in self._before:
            self._before[action.stage].ask(Payload.ACTIVATION, step, self._item(action))
        if action.phase is Phase.BACKWARD and action.stage in self._after:
            self._after[action.stage].ask(Payload.GRADIENT, step, self._item(action))

    def _receive(
        self, hops: Mapping[int, Hop], payload: Payload, step: int, action: Action, patience: Patience
    ) -> jax.Array:
        return self._wait(hops[action.stage], payload, step, self._item(action), patience)

    def _wait(self, hop: Hop, payload: Payload, step: int, item: int, patience: Patience) -> jax.Array:
        began_s = time.monotonic()
        if self._recorder.is_on:
            self._pace.watch(until=lambda: hop.is_here(payload, step, item))
        array = hop.receive(payload, step, item, patience)
        received_s = time.monotonic()
        self._received_s += received_s - began_s
        self._recorder.add(Activity.RECEIVE, began_s, received_s, step, item)
        return array

    def _record_program(self, program: Hashable, item: int, began_s: float, ended_s: float) -> None:
        assert isinstance(program, tuple)
        self._recorder.add(_ACTIVITIES[program[-1]], began_s, ended_s, self._step, item)

    def _send_back(self, step: int, action: Action, dx: jax.Array | None) -> None:
        if action.stage in self._before:
            assert dx is not None, f"stage {action.stage} has a stage before it but no gradient of its input"
            self._before[action.stage].send(Payload.GRADIENT, step, self._item(action), dx)

    def _total(self, losses: list[jax.Array]) -> Losses:
        self._pace.finish()
        return Losses(
            loss_sum=float(sum(float(loss) for loss in losses)),
            num_tokens=len(losses) * self._config.microbatch_size * self._config.sequence_length,
            received_s=self._received_s,
        )
