"""Presets: functions that return the whole configuration of a run, and how a configuration travels.

A preset is named on the command line (`--preset gpt2-small`), or is a function in a file of the user's own
(`--preset path/to/file.py:function`), which is all that is needed to train another model:

    @dataclass(frozen=True, kw_only=True, slots=True)
    class MyConfig:                    # implements oobleck_jax.model_config.ModelConfig
        depth: int = 4                 # comments become the help of the flags
        ...
        def build(self) -> LayeredModel: ...

    def my_run() -> RunConfig:
        return RunConfig(model=MyConfig(), steps=1000)

Nothing here imports jax.
"""

import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias, get_type_hints

import msgspec

from models.gpt import GptConfig
from oobleck_jax.config import OptimizerConfig, Remat, RunConfig
from oobleck_jax.errors import ConfigError


Preset: TypeAlias = Callable[[], RunConfig]


def gpt_test() -> RunConfig:
    """60 thousand parameters on bytes, for tests; the loss falls from 5.5 to 3.2 in 100 steps, a few seconds."""
    return RunConfig(
        model=GptConfig(num_blocks=4, width=32, num_heads=2, vocab_size=256, context_length=16),
        optimizer=OptimizerConfig(peak_learning_rate=3e-3, warmup_steps=10),
        steps=100,
        global_batch_size=8,
        microbatch_size=1,
        sequence_length=16,
    )


def gpt_laptop() -> RunConfig:
    """6.4 million parameters on bytes, for two CPU cores: the loss falls from 5.5 to 2.6 in about two minutes.

    The learning rate is near the best: with 2e-3 and more the loss stays near 3.0, what letters alone tell. On a core,
    a block forward and backward takes 59 ms if products with parameters are kept (dots), 63 ms if all is, 77 ms if only
    its input is.
    """
    return RunConfig(
        model=GptConfig(num_blocks=8, width=256, num_heads=4, vocab_size=256, context_length=128),
        optimizer=OptimizerConfig(peak_learning_rate=7e-4, warmup_steps=10),
        steps=70,
        global_batch_size=32,
        microbatch_size=4,
        sequence_length=128,
        remat=Remat.DOTS,
        eval_every=35,
    )


def gpt2_small() -> RunConfig:
    """GPT-2, 124 million parameters."""
    return _gpt2(num_blocks=12, width=768, num_heads=12, peak_learning_rate=6e-4)


def gpt2_medium() -> RunConfig:
    """GPT-2 medium, 355 million parameters."""
    return _gpt2(num_blocks=24, width=1024, num_heads=16, peak_learning_rate=3e-4)


def gpt2_large() -> RunConfig:
    """GPT-2 large, 774 million parameters."""
    return _gpt2(num_blocks=36, width=1280, num_heads=20, peak_learning_rate=2.5e-4)


def gpt2_xl() -> RunConfig:
    """GPT-2 XL, 1558 million parameters."""
    return _gpt2(num_blocks=48, width=1600, num_heads=25, peak_learning_rate=2e-4)


def _gpt2(*, num_blocks: int, width: int, num_heads: int, peak_learning_rate: float) -> RunConfig:
    """Radford et al. 2019: 1024 tokens, 512 sequences per step.

    The paper gives neither learning rates nor the number of steps: learning rates are those of GPT-3 models of the same
    size (its table 2.1), and 40,000 steps are about two passes over the 9 billion tokens of OpenWebText.
    """
    return RunConfig(
        model=GptConfig(num_blocks=num_blocks, width=width, num_heads=num_heads, vocab_size=50257, context_length=1024),
        optimizer=OptimizerConfig(peak_learning_rate=peak_learning_rate, warmup_steps=700),
        steps=40_000,
        global_batch_size=512,
        microbatch_size=4,
        sequence_length=1024,
        validation_fraction=0.0005,
        eval_every=1000,
    )


def _gpt3(*, num_blocks: int, width: int, num_heads: int, batch_sequences: int, peak_learning_rate: float) -> RunConfig:
    """Brown et al. 2020, table 2.1 and appendix B: 2048 tokens, 300 billion tokens in all, Adam with beta2 0.95.

    Batch sizes are round numbers next to the paper's tokens per step (0.5M, 1M, 2M, 3.2M). Not modelled: the ramp of
    the batch size at the start, the sparse attention of every second block, and that the learning rate reaches its
    end after 260 billion tokens and stays there.
    """
    tokens_per_step = batch_sequences * 2048
    return RunConfig(
        model=GptConfig(num_blocks=num_blocks, width=width, num_heads=num_heads, vocab_size=50257, context_length=2048),
        optimizer=OptimizerConfig(peak_learning_rate=peak_learning_rate, warmup_steps=round(375e6 / tokens_per_step)),
        steps=round(300e9 / tokens_per_step),
        global_batch_size=batch_sequences,
        microbatch_size=1,
        sequence_length=2048,
        validation_fraction=0.0005,
        eval_every=1000,
    )


def gpt3_small() -> RunConfig:
    """GPT-3 small, 125 million parameters."""
    return _gpt3(num_blocks=12, width=768, num_heads=12, batch_sequences=256, peak_learning_rate=6e-4)


def gpt3_medium() -> RunConfig:
    """GPT-3 medium, 350 million parameters."""
    return _gpt3(num_blocks=24, width=1024, num_heads=16, batch_sequences=256, peak_learning_rate=3e-4)


def gpt3_large() -> RunConfig:
    """GPT-3 large, 760 million parameters."""
    return _gpt3(num_blocks=24, width=1536, num_heads=16, batch_sequences=256, peak_learning_rate=2.5e-4)


def gpt3_xl() -> RunConfig:
    """GPT-3 XL, 1.3 billion parameters.

    The paper's 24 heads of 128 do not make its width of 2048; 16 heads of 128 do, and give its number of parameters.
    """
    return _gpt3(num_blocks=24, width=2048, num_heads=16, batch_sequences=512, peak_learning_rate=2e-4)


def gpt3_2_7b() -> RunConfig:
    """GPT-3 2.7B."""
    return _gpt3(num_blocks=32, width=2560, num_heads=32, batch_sequences=512, peak_learning_rate=1.6e-4)


def gpt3_6_7b() -> RunConfig:
    """GPT-3 6.7B, the largest model of the Oobleck paper."""
    return _gpt3(num_blocks=32, width=4096, num_heads=32, batch_sequences=1024, peak_learning_rate=1.2e-4)


def gpt3_13b() -> RunConfig:
    """GPT-3 13B. The paper prints a width of 5140, but its 40 heads of 128 make 5120."""
    return _gpt3(num_blocks=40, width=5120, num_heads=40, batch_sequences=1024, peak_learning_rate=1e-4)


def gpt3_175b() -> RunConfig:
    """GPT-3, 175 billion parameters; 1536 sequences are 3.1 million tokens."""
    return _gpt3(num_blocks=96, width=12288, num_heads=96, batch_sequences=1536, peak_learning_rate=0.6e-4)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gpt-test": gpt_test,
        "gpt-laptop": gpt_laptop,
        "gpt2-small": gpt2_small,
        "gpt2-medium": gpt2_medium,
        "gpt2-large": gpt2_large,
        "gpt2-xl": gpt2_xl,
        "gpt3-small": gpt3_small,
        "gpt3-medium": gpt3_medium,
        "gpt3-large": gpt3_large,
        "gpt3-xl": gpt3_xl,
        "gpt3-2.7b": gpt3_2_7b,
        "gpt3-6.7b": gpt3_6_7b,
        "gpt3-13b": gpt3_13b,
        "gpt3-175b": gpt3_175b,
    }
)


def load_preset(reference: str) -> RunConfig:
    """Return the configuration of a preset.

    Args:
        reference: a name in `PRESETS`, or `path/to/file.py:function`.

    Raises:
        ConfigError: there is no such preset, file or function, or it does not return a `RunConfig`.
    """
    path, colon, function = reference.rpartition(":")
    preset = _preset_of_file(Path(path), function) if colon else _preset_named(reference)
    config = preset()
    if not isinstance(config, RunConfig):
        raise ConfigError(f"--preset {reference} returns a {type(config).__name__}; it must return a RunConfig")
    return config


def config_to_json(reference: str, config: RunConfig) -> str:
    """Write a configuration as JSON: the reference of its preset, which tells the model's type, and all fields."""
    return msgspec.json.format(msgspec.json.encode({"preset": reference} | msgspec.to_builtins(config))).decode()


def config_from_json(text: str) -> tuple[str, RunConfig]:
    """Read what `config_to_json` wrote: the reference and the configuration.

    Raises:
        ConfigError: the text is not a configuration, or its preset cannot be loaded here.
    """
    try:
        values = msgspec.json.decode(text, type=dict[str, Any])
        reference = msgspec.convert(values.get("preset"), str)
        types = get_type_hints(RunConfig) | {"model": type(load_preset(reference).model)}
        settings: dict[str, Any] = {
            field.name: msgspec.convert(values[field.name], types[field.name]) for field in fields(RunConfig)
        }
    except msgspec.MsgspecError as error:
        raise ConfigError(f"this is not the configuration of a run: {error}") from error
    except KeyError as error:
        raise ConfigError(f"the configuration of the run lacks {error}; was it written by another version?") from error
    return reference, RunConfig(**settings)


def _preset_named(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name, PRESETS, n=1)
    suggestion = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(
        f"there is no preset {name!r}{suggestion}; there are {', '.join(PRESETS)}, and a preset of your own is given "
        "as path/to/file.py:function"
    )


def _preset_of_file(path: Path, function: str) -> Preset:
    if not path.is_file():
        raise ConfigError(f"--preset: there is no file {path} (looked for it in {Path.cwd()})")
    module = _load_file(path.resolve())
    if not callable(getattr(module, function, None)):
        raise ConfigError(f"--preset: {path} has no function {function!r} that returns a RunConfig")
    return getattr(module, function)


def _load_file(path: Path) -> ModuleType:
    """Import a file by its path, once in a process."""
    name = f"preset_file:{path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--preset: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def source_digest(preset: str) -> str:
    """Return a digest of the file that a preset of the user's own comes from; empty for ours."""
    path, colon, _ = preset.rpartition(":")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if colon else ""
