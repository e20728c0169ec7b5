"""GptConfig: counts of parameters, structure, refusals."""

import subprocess
import sys
from dataclasses import replace

import jax
import pytest
from flax import nnx

from models.gpt import GptConfig
from models.presets import load_preset
from oobleck_jax.errors import ConfigError


SMALL = GptConfig(num_blocks=2, width=16, num_heads=2, vocab_size=32, context_length=8)

# GPT-2: as counted in the published weights. GPT-3: as printed in table 2.1 of Brown et al. 2020, to its precision.
EXACT = {"gpt2-small": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
ROUNDED = {
    "gpt3-small": 125e6,
    "gpt3-medium": 350e6,
    "gpt3-large": 760e6,
    "gpt3-xl": 1.3e9,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13e9,
    "gpt3-175b": 175e9,
}


def count_parameters(config: GptConfig) -> int:
    """Count those of the built model, tied ones once."""
    model = config.build()
    total, seen = 0, set()
    for layer in model.layers:
        params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda layer=layer: layer.create(nnx.Rngs(0)))))
        for attribute, group in layer.tied:
            if group in seen:
                del params[attribute]
            seen.add(group)
        total += sum(leaf.size for leaf in jax.tree.leaves(params))
    return total


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"num_blocks": 1},
        {"mlp_ratio": 3, "width": 24, "num_heads": 3},
        {"vocab_size": 7},
    ],
    ids=str,
)
def test_number_of_parameters_is_that_of_the_built_model(changes: dict) -> None:
    config = replace(SMALL, **changes)
    assert count_parameters(config) == config.num_parameters


@pytest.mark.parametrize("name", ["gpt2-small", "gpt3-13b"])
def test_number_of_parameters_is_that_of_large_models(name: str) -> None:
    model = load_preset(name).model
    assert isinstance(model, GptConfig)
    assert count_parameters(replace(model, num_blocks=2)) == replace(model, num_blocks=2).num_parameters


@pytest.mark.parametrize(("name", "published"), EXACT.items())
def test_number_of_parameters_is_the_published_one(name: str, published: int) -> None:
    assert load_preset(name).model.num_parameters == published  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("name", "published"), ROUNDED.items())
def test_number_of_parameters_rounds_to_the_published_one(name: str, published: float) -> None:
    num_parameters = load_preset(name).model.num_parameters  # pyright: ignore[reportAttributeAccessIssue]
    assert num_parameters == pytest.approx(published, rel=0.02)


def test_layers_are_embedding_blocks_and_head() -> None:
    model = SMALL.build()
    assert [layer.kind for layer in model.layers] == ["embedding", "block", "block", "head"]
    assert len(model.layers) == SMALL.num_layers
    assert model.layers[0].tied == model.layers[-1].tied == (("wte", "wte"),)
    assert not any(layer.tied for layer in replace(SMALL, tie_embeddings=False).build().layers)
    assert not model.is_stochastic
    assert replace(SMALL, dropout_rate=0.1).build().is_stochastic


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "width 16 is not a multiple of its 3 heads; change one of them"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"dropout_rate": 1.0}, r"the model's dropout_rate is 1\.0"),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


def test_configurations_are_read_without_jax() -> None:
    program = """
import sys
import models.presets, oobleck_jax.data
text = models.presets.config_to_json("gpt2-small", models.presets.load_preset("gpt2-small"))
models.presets.config_from_json(text)
assert not {"jax", "flax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
