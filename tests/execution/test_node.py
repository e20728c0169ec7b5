"""The trainer's mathematics: gradients of any plan against `jax.grad` of the whole model (T1), equal holders (T3)."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.presets import load_preset
from oobleck_jax.config import Precision, Remat, RunConfig, ScheduleKind
from oobleck_jax.data import TokenDataset
from oobleck_jax.execution.layer_functions import functions_of, keys_of
from oobleck_jax.execution.layout import groups_of, own_group
from oobleck_jax.execution.precision import as_computed
from oobleck_jax.execution.state import StateBuilder
from oobleck_jax.model import Layer, LayeredModel
from oobleck_jax.plan_text import parse_plan
from tests.execution.thread_cluster import CODE_AS_FOR_USERS, flat, plan_of, run_cluster, run_generations, shared_home


TOY = f"{Path(__file__).parents[1] / 'models' / 'toy_model.py'}:toy"


def config_of(**changes) -> RunConfig:
    config = replace(load_preset("gpt-test"), eval_every=0)
    model = {name: changes.pop(name) for name in ("dropout_rate", "tie_embeddings") if name in changes}
    return replace(config, model=replace(config.model, **model), **changes)


def reference_gradients(config: RunConfig, plan, step: int) -> dict[str, np.ndarray]:
    """Return `jax.grad` of the whole model's loss, microbatch by microbatch, added up as the plan splits them."""
    model, dataset = config.model.build(), TokenDataset.open(config)
    gradient = _whole_gradient(replace(config, remat=Remat.NONE, eval_every=0))
    builder = StateBuilder(
        model,
        functions_of(model, config.precision),
        groups_of(model),
        config.optimizer,
        shared_home(config.model, 1),
    )
    params = {name: builder.initial(name, config.seed).params for name in builder.sizes}
    params = as_computed(params, config.precision)
    # Each use of a tied parameter is a variable of its own, so that their gradients are added up last.
    uses = [(name, layer) for name in builder.sizes for layer in _layers_of(model, name)]
    variables = {use: params[use[0]] for use in uses}
    indices = dataset.sample_indices(step)
    by_pipeline = []
    for number in range(len(plan.pipelines)):
        total = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), variables)
        for microbatch in plan.microbatches_of(number):
            samples = indices[microbatch * config.microbatch_size :][: config.microbatch_size]
            one = gradient(variables, dataset.tokens(samples), np.uint32(step), samples.astype(np.uint32))
            total = jax.tree.map(lambda a, g: a + np.asarray(g), total, one)
        summed: dict[str, np.ndarray] = {}
        for name, layer in uses:
            summed[name] = summed[name] + flat(total[name, layer]) if name in summed else flat(total[name, layer])
        by_pipeline.append(summed)
    return {name: sum(summed[name] for summed in by_pipeline[1:]) + by_pipeline[0][name] for name in builder.sizes}


def _layers_of(model, name: str) -> tuple[int, ...]:
    return next(group.layers for group in groups_of(model) if group.name == name)


@functools.cache
def _whole_gradient(config: RunConfig):
    model = config.model.build()
    by_kind = functions_of(model, config.precision)
    functions = [by_kind[layer.kind] for layer in model.layers]

    first, block, head = functions[0], functions[1], functions[-1]
    last = len(functions) - 1

    def tied(variables, number):
        return {attribute: variables[name, number] for attribute, name in model.layers[number].tied}

    def loss(variables, tokens_BT, step, samples_B):
        randomness = (jnp.array([config.seed, 0], jnp.uint32).at[1].set(step), samples_B)

        def keys(number):
            return keys_of(randomness, number) if model.is_stochastic else None

        def body(h, own_and_number):
            own, number = own_and_number
            return block.apply(own, {}, h, keys(number)), None

        h = first.apply(variables[own_group(0), 0], tied(variables, 0), tokens_BT[:, :-1], keys(jnp.int32(0)))
        blocks = [variables[own_group(number), number] for number in range(1, last)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        # A barrier on each side of the blocks, so that XLA does not fuse, and round, across them.
        h = jax.lax.scan(jax.checkpoint(body), jax.lax.optimization_barrier(h), (stacked, jnp.arange(1, last)))[0]
        h = jax.lax.optimization_barrier(h)
        module = head.module(variables[own_group(last), last], tied(variables, last))
        return module.loss(h, tokens_BT[:, 1:], keys(jnp.int32(last))) / config.tokens_per_step

    return jax.jit(jax.grad(loss), compiler_options=CODE_AS_FOR_USERS)


def relative_error(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    difference = np.sqrt(sum(np.sum((actual[name] - expected[name]) ** 2) for name in expected))
    return float(difference / np.sqrt(sum(np.sum(expected[name] ** 2) for name in expected)))


def merged(gradients) -> dict[str, np.ndarray]:
    """Return the gradient of every group, after checking that all holders have the same bits."""
    result: dict[str, np.ndarray] = {}
    for held in gradients.values():
        for name, value in held.items():
            if name in result:
                np.testing.assert_array_equal(result[name], value)
            result[name] = value
    return result


def zb_h1(plan):
    """Return the plan with that schedule."""
    return replace(plan, pipelines=tuple(replace(item, schedule=ScheduleKind.ZB_H1) for item in plan.pipelines))


PLANS = {
    "1 stage": plan_of(([6], 8)),
    "2 stages": plan_of(([3, 3], 8)),
    "3 stages": plan_of(([1, 3, 2], 8)),
    "2+1 stages": plan_of(([4, 2], 4), ([6], 4)),
    "3+2+1 stages": plan_of(([2, 2, 2], 3), ([3, 3], 3), ([6], 2)),
    "fewer microbatches than stages": plan_of(([2, 1, 1, 2], 2), ([6], 6)),
    "uneven split": plan_of(([3, 3], 5), ([2, 4], 3)),
    "interleaved": parse_plan("0-2@0,2-3@1,3-5@0,5-6@1", num_microbatches=8),
    "zb-h1": zb_h1(plan_of(([2, 3, 1], 8))),
    "interleaved, incomplete round": parse_plan("0-1@0,1-2@1,2-3@0,3-4@1,4-5@0,5-6@1:5 | 0-6:3", num_microbatches=8),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_gradients_equal_single_device_T1(plan):
    is_split = any(pipeline.schedule is ScheduleKind.ZB_H1 for pipeline in plan.pipelines)
    config = config_of(remat=Remat.NONE) if is_split else config_of()
    gradients = merged(run_cluster(config, plan, steps=1).gradients)
    expected = reference_gradients(config, plan, 0)
    assert relative_error(gradients, expected) < 1e-6
    if len(plan.pipelines) == 1 and not is_split:
        for name, value in expected.items():
            np.testing.assert_array_equal(gradients[name], value, err_msg=name)


@pytest.mark.parametrize("precision", [Precision.MIXED, Precision.BFLOAT16])
def test_gradients_equal_single_device_to_the_bit_in_less_precision_T1(precision):
    config = config_of(precision=precision)
    plan = PLANS["3 stages"]
    gradients = merged(run_cluster(config, plan, steps=1).gradients)
    for name, value in reference_gradients(config, plan, 0).items():
        np.testing.assert_array_equal(gradients[name], value, err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout_rate": 0.2},
        {"tie_embeddings": False},
        {"remat": Remat.NONE},
        {"remat": Remat.DOTS},
        {"remat": Remat.STAGE},
    ],
    ids=lambda changes: next(iter(changes)) + "=" + str(next(iter(changes.values()))),
)
def test_gradients_equal_single_device_with_options_T1(changes):
    config = config_of(**changes)
    plan = PLANS["2 stages"]
    gradients = merged(run_cluster(config, plan, steps=1).gradients)
    assert relative_error(gradients, reference_gradients(config, plan, 0)) < 1e-6


def test_gradients_of_another_model_equal_single_device_T1():
    config = load_preset(TOY)
    num_layers, num_microbatches = config.model.num_layers, config.num_microbatches
    plan = plan_of(([1, num_layers - 1], num_microbatches - 1), ([num_layers], 1))
    gradients = merged(run_cluster(config, plan, steps=1).gradients)
    assert relative_error(gradients, reference_gradients(config, plan, 0)) < 1e-6


@dataclass(frozen=True, kw_only=True)
class Bare:
    """A model with a layer that has no parameters, and a head that has only tied ones."""

    num_layers: int = 4
    vocab_size: int = 256
    max_sequence_length: int = 16

    def build(self) -> LayeredModel:
        class Embedding(nnx.Module):
            def __init__(self, rngs: nnx.Rngs) -> None:
                self.wte = nnx.Param(0.1 * jax.random.normal(rngs.params(), (256, 8)))

            def __call__(self, x, keys):
                return self.wte[...][x]

        class Sine(nnx.Module):
            def __call__(self, x, keys):
                return x + jnp.sin(3 * x)

        class Head(Embedding):
            def loss(self, x, targets_BT, keys):
                logits = jax.nn.log_softmax(x @ self.wte[...].T)
                return -jnp.take_along_axis(logits, targets_BT[..., None], -1).sum()

        tied = (("wte", "wte"),)
        return LayeredModel(
            layers=(
                Layer(kind="embedding", create=Embedding, tied=tied),
                *(Layer(kind="sine", create=lambda rngs: Sine()) for _ in range(2)),
                Layer(kind="head", create=Head, tied=tied),
            ),
            vocab_size=256,
            max_sequence_length=16,
        )


def test_layers_without_own_parameters_T1():
    config = replace(config_of(), model=Bare())
    plan = plan_of(([2, 2], 4), ([4], 4))
    gradients = merged(run_cluster(config, plan, steps=2).gradients)
    assert gradients["layer-001"].size == gradients["layer-003"].size == 0
    assert np.isfinite(gradients["wte"]).all()
    assert gradients["wte"].any()


def test_gradients_equal_with_several_devices_a_node_T1():
    config = config_of(devices_per_node=2, microbatch_size=2)
    for plan in (plan_of(([6], 4), devices=2), plan_of(([3, 3], 2), ([6], 2), devices=2)):
        gradients = merged(run_cluster(config, plan, steps=1).gradients)
        assert relative_error(gradients, reference_gradients(config, plan, 0)) < 1e-6


def test_gradients_equal_of_groups_that_devices_do_not_divide_T1():
    config = replace(load_preset(TOY), devices_per_node=2, microbatch_size=2, eval_every=0)
    odd = replace(config, model=replace(config.model, width=5, num_taps=4))
    plan = plan_of(([2, 3], 2), ([5], 2), devices=2)
    gradients = merged(run_cluster(odd, plan, steps=1).gradients)
    assert {name for name, gradient in gradients.items() if gradient.size % 2} == {own_group(n) for n in range(1, 5)}
    assert relative_error(gradients, reference_gradients(odd, plan, 0)) < 1e-6
    bare = replace(config_of(devices_per_node=2, microbatch_size=2), model=Bare())
    assert merged(run_cluster(bare, plan_of(([4], 4), devices=2), steps=1).gradients)["layer-001"].size == 0


def test_gradients_equal_when_devices_are_tensor_parallel_T1():
    config = config_of(devices_per_node=2, microbatch_size=1, tensor_parallel=True)
    for plan in (plan_of(([6], 8), devices=2), plan_of(([3, 3], 4), ([6], 4), devices=2)):
        gradients = merged(run_cluster(config, plan, steps=1).gradients)
        assert relative_error(gradients, reference_gradients(config, plan, 0)) < 1e-6


def test_tensor_parallel_devices_have_the_same_losses_T2():
    config = config_of(devices_per_node=2, eval_every=8)
    plan = plan_of(([3, 3], 8), devices=2)
    parallel = run_cluster(replace(config, tensor_parallel=True), plan, steps=8, evaluate=True)
    shared = run_cluster(config, plan, steps=8, evaluate=True)
    np.testing.assert_allclose(parallel.losses, shared.losses, rtol=1e-6)
    assert parallel.eval_loss == pytest.approx(shared.eval_loss, rel=1e-6)


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.MIXED])
def test_gradients_are_bitwise_equal_for_every_cut_T1(precision):
    config = config_of(dropout_rate=0.2, precision=precision)
    cuts = ([6], [1, 5], [2, 4], [3, 2, 1], [1, 1, 1, 1, 1, 1])
    plans = [plan_of((cut, 4), ([4, 2], 4)) for cut in cuts]
    plans.append(parse_plan("0-1@0,1-3@1,3-4@0,4-6@1:4 | 0-4,4-6:4", num_microbatches=8))
    runs = [merged(run_cluster(config, plan, steps=1).gradients) for plan in plans]
    for run in runs[1:]:
        for name, value in runs[0].items():
            np.testing.assert_array_equal(run[name], value, err_msg=name)


@pytest.mark.parametrize("precision", Precision)
def test_what_is_computed_again_changes_no_bit_of_any_cut_T1(precision):
    plans = [plan_of((cut, 5), ([4, 2], 3)) for cut in ([2, 4], [3, 2, 1])]
    expected = merged(run_cluster(config_of(precision=precision), plans[0], steps=1).gradients)
    for remat, plan in zip((Remat.NONE, Remat.DOTS, Remat.STAGE, Remat.STAGE), (*plans, *plans), strict=True):
        gradients = merged(run_cluster(config_of(precision=precision, remat=remat), plan, steps=1).gradients)
        for name, value in expected.items():
            np.testing.assert_array_equal(gradients[name], value, err_msg=f"{remat}: {name}")


@pytest.mark.parametrize(("precision", "bound"), [(Precision.FLOAT32, 1e-6), (Precision.MIXED, 1e-4)])
def test_split_gradients_are_bitwise_equal_for_every_cut_and_close_to_joint_ones_T1(precision, bound):
    """What the halves of a backward hand over goes through memory: in mixed precision some of it is rounded there."""
    config = config_of(remat=Remat.NONE, precision=precision)
    plans = [plan_of((cut, 5), ([4, 2], 3)) for cut in ([3, 3], [1, 4, 1])]
    joint, *split = [merged(run_cluster(config, plan, steps=1).gradients) for plan in (plans[0], *map(zb_h1, plans))]
    for run in split:
        assert relative_error(run, joint) < bound
        for name, value in split[0].items():
            np.testing.assert_array_equal(run[name], value, err_msg=name)


def test_different_plans_have_the_same_losses_T2():
    config = config_of(eval_every=8)
    one = run_cluster(config, plan_of(([3, 3], 8)), steps=8, evaluate=True)
    interleaved = parse_plan("0-1@0,1-3@1,3-5@0,5-6@1:5 | 0-6:3", num_microbatches=8)
    for plan in (plan_of(([2, 2, 2], 3), ([4, 2], 3), ([6], 2)), interleaved):
        other = run_cluster(config, plan, steps=8, evaluate=True)
        np.testing.assert_allclose(other.losses, one.losses, rtol=1e-6)
        assert other.eval_loss == pytest.approx(one.eval_loss, rel=1e-6)
    assert one.losses[-1] < one.losses[0]


@pytest.mark.parametrize("precision", Precision)
def test_all_holders_of_a_layer_are_equal_after_some_steps_T3(precision):
    run = run_cluster(
        config_of(steps=20, precision=precision), plan_of(([2, 2, 2], 3), ([4, 2], 3), ([6], 2)), steps=10
    )
    holders: dict[str, list] = {}
    for states in run.states.values():
        for name, state in states.items():
            holders.setdefault(name, []).append(state)
    assert {name: len(found) for name, found in holders.items()} == {
        **{own_group(layer): 3 for layer in range(6)},
        "wte": 5,  # first and last stage of two pipelines, and the only stage of the third
    }
    for name, found in holders.items():
        for state in found[1:]:
            jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), state, found[0])


@pytest.mark.parametrize("precision", Precision)
def test_losses_after_a_change_of_membership_are_those_without_T2(precision):
    config = config_of(steps=12, precision=precision)
    expected = run_cluster(config, plan_of(([3, 3], 8)), steps=12)
    first = plan_of(([2, 2, 2], 3), ([4, 2], 3), ([6], 2))  # nodes 0 1 2 | 3 4 | 5
    second = rebind(plan_of(([3, 3], 5), ([4, 2], 3)), [0, 2, 3, 4])  # 1 and 5 are lost; 0 and 2 must fetch layers
    # 6 joins; 1 comes back with the layers it had, which are out of date.
    third = rebind(plan_of(([2, 2, 2], 4), ([3, 3], 3), ([6], 1)), [0, 1, 4, 2, 3, 6])
    # The same nodes once more, two of them with layers that are not neighbours.
    text = "0-1@0,1-3@1,3-5@0,5-6@1:3 | 0-2,2-4,4-6:3 | 0-6:2"
    fourth = rebind(parse_plan(text, num_microbatches=8), [0, 4, 1, 2, 3, 6])
    run = run_generations(config, [(first, 4), (second, 4), (third, 2), (fourth, 2)], wasted_step=True)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-6)
    holders: dict[str, list] = {}
    for states in run.states.values():
        for name, state in states.items():
            holders.setdefault(name, []).append(state)
    for name, found in holders.items():
        for state in found[1:]:
            jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), state, found[0])


def test_a_step_that_is_skipped_changes_no_state():
    config, plan = config_of(steps=3), plan_of(([3, 3], 4), ([6], 4))
    expected = run_cluster(config, plan, steps=2)
    skipped = run_cluster(config, plan, steps=3, skipped=(2,))
    assert len(skipped.losses) == 3
    jax.tree.map(np.testing.assert_array_equal, skipped.states, expected.states)


def test_losses_of_less_precision_are_close_to_those_of_float32():
    runs = {
        precision: run_cluster(config_of(precision=precision), plan_of(([3, 3], 8)), steps=20)
        for precision in Precision
    }
    exact = np.array(runs[Precision.FLOAT32].losses)
    assert exact[-1] < exact[0] - 0.5
    for precision in (Precision.MIXED, Precision.BFLOAT16):
        losses = np.array(runs[precision].losses)
        assert 0 < np.abs(losses - exact).max() < 0.05, precision
    (states,) = [states for node, states in runs[Precision.MIXED].states.items() if node == 0]
    assert {leaf.dtype for leaf in jax.tree.leaves(states["layer-001"].params)} == {np.dtype(np.float32)}
    (states,) = [states for node, states in runs[Precision.BFLOAT16].states.items() if node == 0]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(states["layer-001"].params)} == {"bfloat16"}


def rebind(plan, nodes):
    """Return the plan with its nodes replaced, in the order of the pipelines."""
    remaining = iter(nodes)
    pipelines = tuple(
        replace(pipeline, nodes=tuple(next(remaining) for _ in pipeline.nodes)) for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)
