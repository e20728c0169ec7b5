from dataclasses import replace
from typing import Any

import msgspec
import pytest

from models.presets import config_to_json, load_preset
from oobleck_jax.checkpoint.compatibility import check_compatible, differences, harmless_differences
from oobleck_jax.config import Remat, RunConfig
from oobleck_jax.errors import ConfigError
from tests.checkpoint.checkpoints import manifest


SAVED = load_preset("gpt-test")


def fields_of(config: RunConfig, preset: str = "gpt-test") -> dict[str, Any]:
    return msgspec.json.decode(config_to_json(preset, config))


def test_a_run_may_go_on_on_other_machines_and_longer() -> None:
    given = replace(SAVED, nodes=3, devices_per_node=2, fault_tolerance=1, steps=900, remat=Remat.NONE, eval_every=7)
    assert differences(fields_of(SAVED), fields_of(given)) == ()
    reasons = {
        difference.name: reason for difference, reason in harmless_differences(fields_of(SAVED), fields_of(given))
    }
    assert reasons.keys() == {"nodes", "devices_per_node", "fault_tolerance", "steps", "remat", "eval_every"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (replace(SAVED, seed=3), "seed 0 (saved) and 3 (now)"),
        (replace(SAVED, global_batch_size=16), "global_batch_size 8 (saved) and 16 (now)"),
        (replace(SAVED, optimizer=replace(SAVED.optimizer, beta2=0.99)), "optimizer.beta2 0.95 (saved) and 0.99 (now)"),
        (replace(SAVED, validation_fraction=0.5), "validation_fraction 0.05 (saved) and 0.5 (now)"),
    ],
)
def test_what_changes_the_numbers_is_named(given: RunConfig, text: str) -> None:
    assert [str(item) for item in differences(fields_of(SAVED), fields_of(given))] == [text]


def test_another_model_is_named_field_by_field() -> None:
    given = fields_of(load_preset("gpt-laptop"))
    given["model"] = {"depth": 3, "width": 32}
    names = {item.name for item in differences(fields_of(SAVED), given)}
    assert {"model.depth", "model.num_blocks", "optimizer.peak_learning_rate"} <= names
    assert "model.width" not in names
    assert "model.depth absent (saved) and 3 (now)" in map(str, differences(fields_of(SAVED), given))


def test_a_checkpoint_of_another_run_is_refused_with_every_difference() -> None:
    saved = manifest({}, step=4, generation=1)
    data = {"num_train_samples": 1000, "data_fingerprint": "abc"}
    check_compatible(saved, fields_of(replace(SAVED, nodes=4)), **data)
    given = fields_of(replace(SAVED, seed=3, optimizer=replace(SAVED.optimizer, beta1=0.8)))
    with pytest.raises(ConfigError, match=r"step 4 .*beta1 0\.9 .* and 0\.8 .*; seed 0 \(saved\) and 3 \(now\)"):
        check_compatible(saved, given, **data)
    with pytest.raises(ConfigError, match=r"1000 samples of abc .* and 999 samples of xyz"):
        check_compatible(saved, fields_of(SAVED), num_train_samples=999, data_fingerprint="xyz")
