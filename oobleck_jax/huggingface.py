"""GPT-2 in the form of Hugging Face: the same parameters under other names, in safetensors.

Both sides agree on the mathematics: pre-LN, epsilon 1e-5, GELU by tanh, scores divided by the root of the head's width,
q, k and v side by side, matrices as [in, out] (its `Conv1D`); tests/test_huggingface.py compares the logits.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from models.gpt import GptConfig
from oobleck_jax.errors import ConfigError


# Hugging Face's names of a block's modules, and ours.
_BLOCK = {
    "ln_1": "ln_1",
    "attn.c_attn": "qkv",
    "attn.c_proj": "attention_out",
    "ln_2": "ln_2",
    "mlp.c_fc": "mlp_in",
    "mlp.c_proj": "mlp_out",
}
_TIED = "wte"
_PREFIX = "transformer."
_WEIGHTS = "model.safetensors"
_END_OF_TEXT = "<|endoftext|>"


def names_of(config: GptConfig) -> dict[str, dict[tuple[str, ...], str]]:
    """Return, for each group, the path of each parameter in it and Hugging Face's name of it.

    A tied group has one parameter and the path ().
    """
    head = config.num_layers - 1
    groups: dict[str, dict[tuple[str, ...], str]] = {_own(0): {("wpe",): "wpe.weight"}}
    for block in range(config.num_blocks):
        groups[_own(block + 1)] = {
            path: f"h.{block}.{name}"
            for theirs, ours in _BLOCK.items()
            for path, name in _module(theirs, ours, weight="scale" if ours.startswith("ln") else "kernel")
        }
    groups[_own(head)] = dict(_module("ln_f", "ln_f", weight="scale"))
    if config.tie_embeddings:
        groups[_TIED] = {(): "wte.weight"}
    else:
        groups[_own(0)]["wte",] = "wte.weight"
        groups[_own(head)]["wte",] = "lm_head.weight"
    return groups


def _module(theirs: str, ours: str, *, weight: str) -> Iterator[tuple[tuple[str, ...], str]]:
    yield (ours, weight), f"{theirs}.weight"
    yield (ours, "bias"), f"{theirs}.bias"


def _own(layer: int) -> str:
    return f"layer-{layer:03d}"  # as execution.layout.own_group, which needs jax


def shapes_of(config: GptConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter, by Hugging Face's name."""
    width, hidden = config.width, config.mlp_ratio * config.width
    block: dict[str, tuple[int, ...]] = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, hidden),
        "mlp.c_fc.bias": (hidden,),
        "mlp.c_proj.weight": (hidden, width),
        "mlp.c_proj.bias": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, width),
        "wpe.weight": (config.context_length, width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    shapes |= {f"h.{number}.{name}": shape for number in range(config.num_blocks) for name, shape in block.items()}
    return shapes if config.tie_embeddings else shapes | {"lm_head.weight": (config.vocab_size, width)}


class PretrainedGpt:
    """A GPT-2 in a directory, checked against a configuration; parameters are read when they are asked for."""

    def __init__(self, directory: Path, config: GptConfig) -> None:
        """Open it; nothing is read but names and shapes.

        Raises:
            ConfigError: it is missing, damaged, or another model; names the differences.
        """
        self._directory, self._names = directory, names_of(config)
        _check_config(_read_json(directory / "config.json"), config, directory)
        self._files = dict(_files_by_name(directory))
        for name, shape in shapes_of(config).items():
            if name not in self._files:
                raise ConfigError(f"{directory} has no tensor {name!r}; is it a GPT-2?")
            path, stored = self._files[name]
            with _open(path) as file:
                found = tuple(file.get_slice(stored).get_shape())
            if found != shape:
                raise ConfigError(f"{stored} of {path} has shape {found}, the model needs {shape}")

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self._names)

    def params(self, group: str) -> Any:
        """Return the parameters of a group in float32, as the layers of models/layers.py have them."""
        params: Any = {}
        for path, name in self._names[group].items():
            file_path, stored = self._files[name]
            try:
                with _open(file_path) as file:
                    array = np.asarray(file.get_tensor(stored)).astype(np.float32)
            except (SafetensorError, TypeError) as error:
                raise ConfigError(f"{stored} of {file_path} cannot be read: {error}") from error
            if not path:
                return array
            *folders, last = path
            inner = params
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[last] = array
        return params


def init_from(directory: Path, config: GptConfig) -> dict[str, Any]:
    """Return the parameters of all groups, from a Hugging Face directory of the GPT-2 family.

    Raises:
        ConfigError: see `PretrainedGpt`.
    """
    model = PretrainedGpt(directory, config)
    return {group: model.params(group) for group in model.groups}


def export(directory: Path, params: Mapping[str, Any], config: GptConfig, tokenizer: Tokenizer | None) -> None:
    """Write a Hugging Face directory.

    Args:
        params: of all groups.
        tokenizer: of the data, if it is known.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for group, names in names_of(config).items():
        for path, name in names.items():
            value = params[group]
            for part in path:
                value = value[part]
            prefix = "" if name.startswith("lm_head") else _PREFIX
            tensors[prefix + name] = np.ascontiguousarray(value)
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
    end = None if tokenizer is None else tokenizer.token_to_id(_END_OF_TEXT)
    _write_json(directory / "config.json", huggingface_config(config, end_of_text=end))
    if tokenizer is not None:
        tokenizer.save(str(directory / "tokenizer.json"))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context_length}
        if end is not None:
            named |= {"eos_token": _END_OF_TEXT, "bos_token": _END_OF_TEXT}
        _write_json(directory / "tokenizer_config.json", named | {"clean_up_tokenization_spaces": False})


def huggingface_config(config: GptConfig, *, end_of_text: int | None = None) -> dict[str, Any]:
    """Return what config.json says of a model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_embd": config.width,
        "n_layer": config.num_blocks,
        "n_head": config.num_heads,
        "n_inner": config.mlp_ratio * config.width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": config.tie_embeddings,
        "embd_pdrop": config.dropout_rate,
        "resid_pdrop": config.dropout_rate,
        "attn_pdrop": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }


def _check_config(theirs: Mapping[str, Any], config: GptConfig, directory: Path) -> None:
    # What is absent has the default of transformers' GPT2Config.
    defaults = {
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    found = defaults | dict(theirs)
    if found["n_inner"] is None:
        found["n_inner"] = 4 * int(found.get("n_embd", 0))
    if found["activation_function"] == "gelu_pytorch_tanh":  # another name of the same function
        found["activation_function"] = "gelu_new"
    ours = huggingface_config(config) | {"add_cross_attention": False}
    flags = {
        "vocab_size": "--vocab-size",
        "n_positions": "--context-length",
        "n_embd": "--width",
        "n_layer": "--num-blocks",
        "n_head": "--num-heads",
        "n_inner": "--mlp-ratio times --width",
        "tie_word_embeddings": "--tie-embeddings",
    }
    wrong = [
        f"{name} is {found.get(name)}, the model has {ours[name]}" + (f" ({flags[name]})" if name in flags else "")
        for name in ("model_type", *flags, *defaults)
        if found.get(name) != ours[name]
    ]
    if wrong:
        raise ConfigError(f"{directory} does not fit the model: {'; '.join(dict.fromkeys(wrong))}")


def _files_by_name(directory: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Yield the name of each tensor, its file, and its name there, which may have a prefix."""
    index = directory / f"{_WEIGHTS}.index.json"
    files = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else [_WEIGHTS]
    for file_name in files:
        with _open(directory / file_name) as file:
            for stored in file.keys():  # noqa: SIM118 (it is no dict)
                yield stored.removeprefix(_PREFIX), (directory / file_name, stored)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
