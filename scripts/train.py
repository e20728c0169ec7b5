"""Train a model: `python scripts/train.py --preset gpt-laptop --nodes 4`; see `--help`."""

import sys

from oobleck_jax.train import main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
