"""From a checkpoint on disk to text and to a Hugging Face directory."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.gpt import GptConfig
from models.presets import load_preset
from oobleck_jax.checkpoint.named_arrays import named_arrays
from oobleck_jax.checkpoint.store import Checkpoint, CheckpointStore
from oobleck_jax.checkpoint.writer import write_group
from oobleck_jax.errors import CheckpointDamaged, ConfigError
from oobleck_jax.execution.layer_functions import LayerFunctions
from oobleck_jax.execution.layout import groups_of
from oobleck_jax.execution.state import GroupState
from oobleck_jax.huggingface import init_from
from oobleck_jax.sampling import WholeModel, sample
from oobleck_jax.saved_model import load_model
from oobleck_jax.script import run_script
from oobleck_jax.tokenizer import byte_tokenizer
from scripts import export_hf, generate
from tests.checkpoint.checkpoints import files, manifest


CONFIG = load_preset("gpt-test")


def random_params(config: Any, seed: int) -> dict[str, Any]:
    model = config.build()
    rng = np.random.default_rng(seed)
    params: dict[str, Any] = {}
    for group in groups_of(model):
        functions = LayerFunctions(model.layers[group.layers[0]])
        shapes = functions.own_shapes if group.attribute is None else functions.tied_shapes[group.attribute]
        params[group.name] = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)
    return params


def save_model(run_dir: Path, step: int) -> Checkpoint:
    store = CheckpointStore(run_dir / "checkpoints")
    folder = store.folder(step=step, generation=1)
    records = {
        group: write_group(folder, group, named_arrays(GroupState(params=params, optimizer_state=())))
        for group, params in random_params(CONFIG.model, step).items()
    }
    return store.commit(manifest(records, step=step, generation=1))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 3 and 7."""
    path = tmp_path_factory.mktemp("run")
    save_model(path, 3)
    save_model(path, 7)
    return path


def refuse(error: CheckpointDamaged) -> None:
    raise error


def test_the_newest_checkpoint_is_loaded_or_the_one_of_a_step(run_dir: Path) -> None:
    for step, expected in ((None, 7), (7, 7), (3, 3)):
        saved = load_model(run_dir, step=step, on_damage=refuse)
        assert saved.checkpoint.step == expected
        assert saved.config == CONFIG
        same = jax.tree.map(np.array_equal, saved.params, random_params(CONFIG.model, expected))
        assert all(jax.tree.leaves(same))


def test_a_damaged_checkpoint_is_passed_over_and_told(run_dir: Path) -> None:
    checkpoint = load_model(run_dir, step=7, on_damage=refuse).checkpoint
    path = files(checkpoint.folder / "layer-002")[-1]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    told: list[CheckpointDamaged] = []
    try:
        assert load_model(run_dir, step=None, on_damage=told.append).checkpoint.step == 3
        with pytest.raises(ConfigError, match="intact checkpoint of step 7; there are those of the steps 3, 7"):
            load_model(run_dir, step=7, on_damage=told.append)
    finally:
        path.write_bytes(content)
    assert [error.file for error in told] == [path, path]


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not have an intact checkpoint; there is none"):
        load_model(tmp_path, step=None, on_damage=refuse)


def test_generated_text_begins_with_the_prompt_and_depends_on_the_seed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts: list[str] = []
    for seed in (1, 1, 2):
        arguments = generate.Arguments(run_dir=run_dir, prompt="héllo", max_new_tokens=20, seed=seed, temperature=3.0)
        assert generate.main(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("héllo")
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "--prompt is empty; give at least one token"),
        ({"temperature": -1.0}, "--temperature is -1.0; it must not be negative"),
        ({"step": 5}, "there are those of the steps 3, 7"),
    ],
)
def test_what_cannot_be_generated_is_explained(
    changes: dict[str, Any], message: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = dataclasses.replace(generate.Arguments(run_dir=run_dir, prompt="x"), **changes)
    assert generate.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_text_comes_in_whole_characters() -> None:
    tokens = list("né🙂".encode())
    prompt = list(b"a")
    assert list(generate.decoded(byte_tokenizer(), prompt, tokens)) == ["n", "é", "🙂", ""]
    assert list(generate.decoded(byte_tokenizer(), prompt, tokens[:-1])) == ["n", "é", "\ufffd"]


def test_a_checkpoint_is_exported_with_its_tokenizer(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export_hf.main(export_hf.Arguments(run_dir=run_dir, output=tmp_path / "hf", step=3)) == 0
    assert "step 3 of" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    model = CONFIG.model
    assert isinstance(model, GptConfig)
    same = jax.tree.map(np.array_equal, init_from(tmp_path / "hf", model), random_params(model, 3))
    assert all(jax.tree.leaves(same))


def test_a_scanned_model_equals_its_layers_one_by_one() -> None:
    params = random_params(CONFIG.model, 0)
    model = CONFIG.model.build()
    tokens = np.random.default_rng(0).integers(256, size=(2, 16)).astype(np.int32)
    x: Any = jnp.asarray(tokens)
    for number, layer in enumerate(model.layers):
        tied = {attribute: params[name] for attribute, name in layer.tied}
        x = LayerFunctions(layer).module(params[f"layer-{number:03d}"], tied)(x, None)
    np.testing.assert_allclose(WholeModel(model, params).logits(tokens), x, rtol=1e-4, atol=1e-3)


def test_the_likeliest_tokens_are_taken_and_the_context_slides() -> None:
    model = WholeModel(CONFIG.model.build(), random_params(CONFIG.model, 0))
    settings = {"max_new_tokens": 5, "context_length": 8, "seed": 0}
    prompt = list(range(20))
    greedy = list(sample(model, prompt, temperature=0.0, top_k=0, **settings))
    assert greedy == list(sample(model, prompt, temperature=1.0, top_k=1, **settings))
    window = np.asarray(prompt[-8:], np.int32)
    assert greedy[0] == int(model.next_logits(window, 8).argmax())
    assert greedy == list(sample(model, prompt[-8:], temperature=0.0, top_k=0, **settings))


def test_only_a_gpt_is_exported(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    saved = load_model(run_dir, step=None, on_damage=pytest.fail)
    toy = load_preset(f"{Path(__file__).parent / 'models' / 'toy_model.py'}:toy")
    monkeypatch.setattr(export_hf, "load_model", lambda *_, **__: dataclasses.replace(saved, config=toy))
    arguments = export_hf.Arguments(run_dir=run_dir, output=tmp_path / "exported")
    assert run_script(export_hf.main, arguments) == 2
    assert "trains no GPT-2, but a ToyConfig" in capsys.readouterr().err
