"""Coordinate a run whose nodes are all elsewhere: they come with `train.py --join HOST:PORT`.

python scripts/coordinator.py --coordinator-address HOST:PORT --nodes 8 --preset gpt2-small --token-file secret
"""

import sys

from oobleck_jax.train import main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="coordinator.py", has_nodes=False))
