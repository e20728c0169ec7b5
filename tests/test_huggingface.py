"""The same model on both sides: in our layers, and in Hugging Face's library where that is installed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.gpt import GptConfig
from oobleck_jax.errors import ConfigError
from oobleck_jax.execution.layer_functions import LayerFunctions
from oobleck_jax.execution.layout import groups_of
from oobleck_jax.huggingface import export, init_from
from oobleck_jax.sampling import WholeModel
from oobleck_jax.tokenizer import byte_tokenizer


CONFIG = GptConfig(num_blocks=3, width=32, num_heads=4, mlp_ratio=4, vocab_size=300, context_length=24)
UNTIED = replace(CONFIG, tie_embeddings=False)


def random_params(config: GptConfig, seed: int = 0) -> dict[str, Any]:
    """Parameters larger than those of a new model, so that every one of them matters for the logits."""
    model = config.build()
    rng = np.random.default_rng(seed)
    params: dict[str, Any] = {}
    for group in groups_of(model):
        functions = LayerFunctions(model.layers[group.layers[0]])
        shapes = functions.own_shapes if group.attribute is None else functions.tied_shapes[group.attribute]
        params[group.name] = jax.tree.map(lambda s: (0.3 * rng.normal(size=s.shape)).astype(np.float32), shapes)
    return params


def logits_of(config: GptConfig, params: dict[str, Any], tokens_BT: np.ndarray) -> np.ndarray:
    return np.asarray(WholeModel(config.build(), params).logits(tokens_BT))


def tokens_of(config: GptConfig) -> np.ndarray:
    shape = (2, config.context_length)
    return np.random.default_rng(1).integers(config.vocab_size, size=shape).astype(np.int32)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_what_is_exported_comes_back(config: GptConfig, tmp_path: Path) -> None:
    params = random_params(config)
    export(tmp_path, params, config, None)
    back = init_from(tmp_path, config)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, params)))


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_an_export_gives_the_same_logits_in_transformers(config: GptConfig, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'hf': torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf': torch and transformers")
    params, tokens = random_params(config), tokens_of(config)
    export(tmp_path, params, config, byte_tokenizer())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits_of(config, params, tokens), expected, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("héllo")["input_ids"] == list("héllo".encode())
    assert tokenizer.decode(list("héllo".encode())) == "héllo"


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_a_model_of_transformers_gives_the_same_logits_here(config: GptConfig, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'hf': torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf': torch and transformers")
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_embd=config.width,
            n_layer=config.num_blocks,
            n_head=config.num_heads,
            tie_word_embeddings=config.tie_embeddings,
            initializer_range=0.3,
        )
    ).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    tokens = tokens_of(config)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits_of(config, init_from(tmp_path, config), tokens), expected, atol=1e-4)


def test_names_without_prefix_and_several_files_are_read(tmp_path: Path) -> None:
    params = random_params(CONFIG)
    export(tmp_path, params, CONFIG, None)
    tensors = {
        name.removeprefix("transformer."): value for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)  # the mask that old files contain
    (tmp_path / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]
    weight_map = {name: f"part-{number}.safetensors" for number, part in enumerate(parts) for name in part}
    for number, part in enumerate(parts):
        save_file(part, tmp_path / f"part-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, init_from(tmp_path, CONFIG), params)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layer", 5, r"does not fit the model: n_layer is 5, the model has 3 \(--num-blocks\)"),
        ("model_type", "llama", "model_type is llama, the model has gpt2"),
        ("activation_function", "relu", "activation_function is relu, the model has gelu_new"),
        ("layer_norm_epsilon", 1e-6, "layer_norm_epsilon is 1e-06"),
        ("tie_word_embeddings", False, "--tie-embeddings"),
        ("scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx is True"),
    ],
)
def test_another_model_is_refused_with_its_differences(field: str, value: Any, message: str, tmp_path: Path) -> None:
    export(tmp_path, random_params(CONFIG), CONFIG, None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=message):
        init_from(tmp_path, CONFIG)


def test_a_damaged_or_foreign_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        init_from(tmp_path, CONFIG)
    export(tmp_path, random_params(CONFIG), CONFIG, None)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "transformer.h.1.mlp.c_fc.bias"
    save_file(tensors | {name: tensors[name][:-1]}, path)
    with pytest.raises(ConfigError, match=r"model\.safetensors has shape \(.*,\), the model needs \("):
        init_from(tmp_path, CONFIG)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"has no tensor 'h\.1\.mlp\.c_fc\.bias'; is it a GPT-2\?"):
        init_from(tmp_path, CONFIG)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        init_from(tmp_path, CONFIG)
