"""Parameters and optimizer state: by group where they are kept or moved, stacked by run where they are used.

A group's state is a function of (seed, layer) at the start, and never depends on the partition. On a stage, groups of
equal structure that are used together are stacked into one `ParameterRun`, so that one program updates them all.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oobleck_jax.config import OptimizerConfig, Precision
from oobleck_jax.execution.home import Home, StageDevices
from oobleck_jax.execution.layer_functions import LayerFunctions, Params, num_elements
from oobleck_jax.execution.layout import Group
from oobleck_jax.execution.optimizer import init_optimizer, update_groups
from oobleck_jax.execution.precision import as_computed
from oobleck_jax.model import LayeredModel


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupState:
    """Parameters and optimizer state of one group, as numpy arrays; read only."""

    params: Params
    optimizer_state: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRun:
    """Groups of equal structure on the devices of one stage, every leaf stacked `[len(groups), ...]`.

    Attributes:
        computed: the parameters as layers compute with them: `params` itself, or a copy rounded once per step.
    """

    groups: tuple[str, ...]
    params: Params
    optimizer_state: Any
    computed: Params


class StateBuilder:
    """Makes, stacks, updates and unstacks the states of a model's groups.

    Attributes:
        sizes: number of parameters of each group.
        rounds: whether layers compute with rounded copies of the parameters.
    """

    def __init__(
        self,
        model: LayeredModel,
        functions: Mapping[str, LayerFunctions],
        groups: Sequence[Group],
        optimizer: OptimizerConfig,
        home: Home,
    ) -> None:
        self._model, self._functions, self._optimizer, self._home = model, functions, optimizer, home
        self._state_shapes: dict[tuple[str, str | None], GroupState] = {}
        self._precision = next(iter(functions.values())).precision
        self.rounds = self._precision is Precision.MIXED
        self._updates: dict[Hashable, jax.stages.Compiled] = {}
        self._groups = {group.name: group for group in groups}
        self.sizes = {group.name: num_elements(self.shapes(group.name)) for group in groups}

    def shapes(self, name: str) -> Params:
        """Return the shapes of one group's parameters."""
        group = self._groups[name]
        functions = self._functions[self._model.layers[group.layers[0]].kind]
        return functions.own_shapes if group.attribute is None else functions.tied_shapes[group.attribute]

    def initial(self, name: str, seed: int) -> GroupState:
        """Return the state of a group before the first step."""
        group = self._groups[name]
        layer = group.layers[0]
        kind = self._model.layers[layer].kind
        devices = StageDevices(self._home.devices[:1])
        scalar = devices.replicated_spec((), jnp.uint32)
        init = self._home.compiled(
            ("init", kind, self._precision, devices.key), self._functions[kind].init, lambda: (scalar, scalar)
        )
        own, tied = init(np.uint32(seed % 2**32), np.uint32(layer))
        params = own if group.attribute is None else tied[group.attribute]
        # AdamW starts from zeros: the shapes are enough, and no program is needed.
        shapes = self.state_shapes(name).optimizer_state
        return GroupState(
            params=jax.tree.map(np.asarray, params),
            optimizer_state=jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes),
        )

    def state_shapes(self, name: str) -> GroupState:
        """Return what the state of a group looks like, as `jax.ShapeDtypeStruct`s."""
        group = self._groups[name]
        kind = (self._model.layers[group.layers[0]].kind, group.attribute)
        if kind not in self._state_shapes:
            self._state_shapes[kind] = self._shapes_of_state(self.shapes(name))
        return self._state_shapes[kind]

    def _shapes_of_state(self, params: Params) -> GroupState:
        stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), params)
        state = jax.eval_shape(lambda p: init_optimizer(self._optimizer, p), stacked)
        return GroupState(
            params=params,
            optimizer_state=jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), state),
        )

    def stack(self, names: Sequence[str], states: Mapping[str, GroupState], devices: StageDevices) -> ParameterRun:
        """Put the states of several groups onto the devices of a stage, as one run."""
        both = [(states[name].params, states[name].optimizer_state) for name in names]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *both)
        shardings = devices.shardings_of_parameters(stacked, num_stacked_dims=1)
        params, optimizer_state = jax.device_put(stacked, shardings)  # all at once: many small calls take far longer
        computed = self._computed(names, params, devices)
        return ParameterRun(groups=tuple(names), params=params, optimizer_state=optimizer_state, computed=computed)

    def unstack(self, run: ParameterRun) -> dict[str, GroupState]:
        """Return the states of the groups of a run as numpy arrays."""
        params, optimizer_state = jax.tree.map(np.asarray, (run.params, run.optimizer_state))
        return {
            name: GroupState(
                params=jax.tree.map(lambda leaf, i=index: leaf[i], params),
                optimizer_state=jax.tree.map(lambda leaf, i=index: leaf[i], optimizer_state),
            )
            for index, name in enumerate(run.groups)
        }

    def compile_rounding(self, names: Sequence[str], devices: StageDevices) -> jax.stages.Compiled:
        """`(params) -> params`, as layers compute with them; one program for all, so that replicas are equal."""
        specs = self._params_specs(names, devices)
        shardings = jax.tree.map(lambda spec: spec.sharding, specs)
        return self._home.compiled(
            self.rounding_key(names, devices),
            lambda params: as_computed(params, self._precision),
            lambda: (specs,),
            out_shardings=shardings,
        )

    def rounding_key(self, names: Sequence[str], devices: StageDevices) -> tuple[Hashable, ...]:
        """Return what the program of `compile_rounding` depends on."""
        return "round", *self._structure_key(names), devices.key, self._precision

    def _computed(self, names: Sequence[str], params: Params, devices: StageDevices) -> Params:
        return self.compile_rounding(names, devices)(params) if self.rounds else params

    def compile_update(self, names: Sequence[str], devices: StageDevices) -> jax.stages.Compiled:
        """`(params, optimizer_state, gradient[N, P], clip_factor, learning_rate) -> params, optimizer_state`.

        Parameters and optimizer state are donated; the gradient never, because it may be memory of a fabric.
        """
        key = self.update_key(names, devices)
        if key not in self._updates:
            self._updates[key] = self._compile_update(key, names, devices)
        return self._updates[key]

    def update_key(self, names: Sequence[str], devices: StageDevices) -> tuple[Hashable, ...]:
        """Return what the program of `compile_update` depends on."""
        return "update", *self._structure_key(names), devices.key, self._optimizer

    def _structure_key(self, names: Sequence[str]) -> tuple[Hashable, ...]:
        shapes = self.shapes(names[0])
        leaves = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(shapes))
        return str(jax.tree.structure(shapes)), leaves, len(names)

    def _params_specs(self, names: Sequence[str], devices: StageDevices) -> Params:
        shapes = self.shapes(names[0])
        stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((len(names), *s.shape), s.dtype), shapes)
        return devices.parameter_specs(stacked, num_stacked_dims=1)

    def _compile_update(
        self, key: tuple[Hashable, ...], names: Sequence[str], devices: StageDevices
    ) -> jax.stages.Compiled:
        params = self._params_specs(names, devices)
        state = jax.eval_shape(lambda p: init_optimizer(self._optimizer, p), params)
        state = devices.parameter_specs(state, num_stacked_dims=1)
        size = self.sizes[names[0]]
        gradient = jax.ShapeDtypeStruct((len(names), size), jnp.float32, sharding=devices.of_rows(size))
        scalar = devices.replicated_spec((), jnp.float32)
        return self._home.compiled(
            key,
            lambda params, state, gradient, factor, rate: update_groups(
                self._optimizer, params, state, gradient, factor, rate
            ),
            lambda: (params, state, gradient, scalar, scalar),
            donate=(0, 1),
            out_shardings=jax.tree.map(lambda spec: spec.sharding, (params, state)),
        )

    def update(
        self,
        run: ParameterRun,
        gradient_NP: np.ndarray,
        factors: Sequence[jax.Array],
        devices: StageDevices,
    ) -> ParameterRun:
        """Return the run after one optimizer step; the run given must not be used again.

        Args:
            factors: that clips the gradient, and the learning rate; on the devices.
        """
        program = self.compile_update(run.groups, devices)
        gradient = jax.device_put(gradient_NP, devices.of_rows(gradient_NP.shape[1]))
        params, optimizer_state = program(run.params, run.optimizer_state, gradient, *factors)
        return replace(
            run,
            params=params,
            optimizer_state=optimizer_state,
            computed=self._computed(run.groups, params, devices),
        )
