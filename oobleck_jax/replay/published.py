"""What the authors of other systems published, and what others measured of them.

`[artifact]` is the trace simulator that came with the Oobleck paper (SOSP '23, its repository's branch
sosp23-artifact): the constants with which the paper's figures of failures were made, for five models on 30 A40.
Between these models they are interpolated by the number of parameters; beyond the largest they grow in proportion.
"""

from dataclasses import dataclass

import numpy as np


NUM_PARAMETERS = (0.35e9, 2.7e9, 6.7e9)  # BERT-large, GPT-2 and GPT-3 medium; GPT-3 2.7B; GPT-3 6.7B
NODE_START_S = 45.0  # [artifact] from "add" until a node can be used, for every system


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A number for each of three sizes of models."""

    values: tuple[float, float, float]
    source: str

    def at(self, num_parameters: float) -> float:
        """Return the value for a model."""
        if num_parameters > NUM_PARAMETERS[-1]:
            return self.values[-1] * num_parameters / NUM_PARAMETERS[-1]
        return float(np.interp(num_parameters, NUM_PARAMETERS, self.values))


OOBLECK_RECONFIGURE_S = Published(
    values=(2.0, 6.0, 10.0), source="[artifact]; 2 s for BERT-large and GPT-2, 3 s medium"
)
OOBLECK_MEASURED_LOSS_S = Published(
    values=(57.0, 57.0, 57.0), source="TrainMover, arXiv 2412.12636: GPT 6.7B on 32 devices, one machine less"
)
OOBLECK_MEASURED_JOIN_S = Published(
    values=(100.0, 100.0, 100.0), source="TrainMover, arXiv 2412.12636: GPT 6.7B on 32 devices, one machine more"
)
VARUNA_RESTART_S = Published(values=(79.0, 515.0, 701.0), source="[artifact]; 76, 83 and 78.7 s for the small models")
VARUNA_CHECKPOINT_S = Published(
    values=(12.8, 50.0, 120.0), source="[artifact]; 15.8, 11.5 and 11.2 s for the small models"
)
VARUNA_CHECKPOINT_EVERY = 10  # steps [artifact]
VARUNA_RENDEZVOUS_S = 10.0  # [artifact] besides the restart
BAMBOO_REBALANCE_S = Published(values=(85.0, 230.0, 450.0), source="[artifact]; 76, 80 and 100 s for the small models")
BAMBOO_RENDEZVOUS_S = 30.0  # [artifact] besides the rebalancing
BAMBOO_USEFUL = 0.2785  # [artifact] of the training time, the better of its two settings; the rest is redundant
BAMBOO_DEGRADED = 1.5  # [artifact] how much longer a step takes where a node does the work of two
BAMBOO_LONGEST_SEQUENCE = 1024  # tokens; [artifact] all GPT-3 models (2048 tokens) are out of memory
