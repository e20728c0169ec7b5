"""What may differ between the run that saved a checkpoint and the run that goes on with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oobleck_jax.checkpoint.manifest import Manifest
from oobleck_jax.errors import ConfigError


# What may differ, and why the run is still the same one. Everything else changes what is computed.
_MAY_DIFFER = {
    "preset": "only a name: its fields are compared one by one",
    "nodes": "the plan is made anew",
    "devices_per_node": "the plan is made anew",
    "fault_tolerance": "the plan is made anew",
    "microbatch_size": "losses change by less than 1e-6 relative: gradients are sums over tokens, dropout is by sample",
    "remat": "the same numbers, computed once or twice",
    "tensor_parallel": "losses change by less than 1e-6 relative: sums over the width are made in parts",
    "schedule": "the same numbers, in another order",
    "steps": "the next steps are the same samples; the learning rate is on its way to another last step",
    "init_from": "the parameters are those of the checkpoint",
    "skip_steps": "decides only what happens to a gradient that is not finite",
    "eval_every": "evaluation changes nothing",
    "eval_batches": "evaluation changes nothing",
    "data": "files move; the data themselves are compared by their fingerprint",
    "data_dtype": "files are converted; the data themselves are compared by their fingerprint",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A field that differs."""

    name: str  # as in config.json, such as "model.width"
    saved: Any  # None: there is no such field
    given: Any

    def __str__(self) -> str:
        return f"{self.name} {_text(self.saved)} (saved) and {_text(self.given)} (now)"


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return where two configurations differ so that one run cannot go on with the other's checkpoint.

    Args:
        saved: what the manifest says of the configuration.
        given: what config.json says of this run.
    """
    return tuple(item for item in _all_differences(saved, given) if item.name not in _MAY_DIFFER)


def check_compatible(
    manifest: Manifest, given: Mapping[str, Any], *, num_train_samples: int, data_fingerprint: str
) -> None:
    """Refuse a checkpoint that this run cannot go on with.

    Args:
        given: what config.json says of this run.
        num_train_samples: of one pass over this run's data.
        data_fingerprint: of them.

    Raises:
        ConfigError: names every difference.
    """
    found = [str(item) for item in differences(manifest.config, given)]
    data = manifest.num_train_samples, manifest.data_fingerprint
    if not found and data != (num_train_samples, data_fingerprint):
        found = [
            f"the training data, {data[0]} samples of {data[1]} (saved) and {num_train_samples} samples of "
            f"{data_fingerprint} (now)"
        ]
    if found:
        raise ConfigError(
            f"the checkpoint of step {manifest.step} is of another run; they differ in {'; '.join(found)}. Use the "
            "same settings, or another --run-dir"
        )


def harmless_differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[tuple[Difference, str], ...]:
    """Return where two configurations differ without harm, each with the reason."""
    found = _all_differences(saved, given)
    return tuple((item, _MAY_DIFFER[item.name]) for item in found if item.name in _MAY_DIFFER)


def _all_differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[Difference]:
    then, now = dict(_flat(saved)), dict(_flat(given))
    names = dict.fromkeys([*then, *now])
    return [
        Difference(name=name, saved=then.get(name), given=now.get(name))
        for name in names
        if then.get(name) != now.get(name)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    fields: list[tuple[str, Any]] = []
    for name, inner in value.items():
        fields += _flat(inner, f"{prefix}{name}.") if isinstance(inner, Mapping) else [(prefix + name, inner)]
    return fields


def _text(value: Any) -> str:
    return "absent" if value is None else str(value)
