"""Write a checkpoint as a Hugging Face GPT-2 directory.

python scripts/export_hf.py runs/gpt-laptop-20250101-120000 exported/

Then, where the transformers library is installed: AutoModelForCausalLM.from_pretrained("exported/").
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from models.gpt import GptConfig
from oobleck_jax.errors import ConfigError
from oobleck_jax.huggingface import export
from oobleck_jax.saved_model import load_model
from oobleck_jax.script import run_script
from oobleck_jax.tokenizer import tokenizer_of


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    run_dir: Annotated[Path, tyro.conf.Positional]  # folder of the run
    output: Annotated[Path, tyro.conf.Positional]  # folder to write: model.safetensors, config.json, tokenizer.json
    step: int | None = None  # export the checkpoint of this step (default: the newest)
    tokenizer: Path | None = None  # tokenizer.json of the data (default: beside the token file)


def main(arguments: Arguments) -> int:
    """Read, write; return the exit code."""
    try:
        saved = load_model(arguments.run_dir, step=arguments.step, on_damage=lambda error: _note(str(error)))
        if not isinstance(saved.config.model, GptConfig):
            raise ConfigError(f"{arguments.run_dir} trains no GPT-2, but a {type(saved.config.model).__name__}")
        try:
            tokenizer = tokenizer_of(saved.config, arguments.tokenizer)
        except ConfigError as error:
            if arguments.tokenizer is not None:
                raise
            tokenizer = None
            _note(f"no tokenizer is exported: {error}")
        export(arguments.output, saved.params, saved.config.model, tokenizer)
    except OSError as error:
        raise ConfigError(str(error)) from None
    print(f"step {saved.checkpoint.step} of {arguments.run_dir} is in {arguments.output}")
    return 0


def _note(text: str) -> None:
    print(f"export_hf.py: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
