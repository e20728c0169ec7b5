"""The configuration of a run: one frozen value, made by a preset and changed by typed flags.

Nothing here imports jax, so that the coordinator and the agents can read it. The comment beside a field becomes the
help of its flag.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from oobleck_jax.errors import ConfigError
from oobleck_jax.model_config import ModelConfig


class Precision(StrEnum):
    """Which numbers are kept, and with which is computed. Gradients are always summed in float32."""

    FLOAT32 = "float32"  # everything
    BFLOAT16 = "bfloat16"  # everything: half the memory, but changes of less than 1/256 of a parameter are lost
    MIXED = "mixed"  # bfloat16 computes; parameters and optimizer state are float32, and are rounded once per step

    @property
    def bytes_of_activation(self) -> int:
        return 4 if self is Precision.FLOAT32 else 2


WHY_NOT_FLOAT16 = (
    "--precision float16 is not there: gradients below 6e-8 would become 0 and those above 65504 infinite, unless the "
    "loss is scaled by a factor that must be found anew again and again; take mixed, whose bfloat16 has the range of "
    "float32"
)


class Remat(StrEnum):
    """What the forward pass keeps for the backward pass."""

    NONE = "none"  # every intermediate value
    DOTS = "dots"  # results of weight matmuls; the rest is recomputed
    LAYER = "layer"  # the input of each layer only
    STAGE = "stage"  # the input of each stage only: everything is computed twice, and within layers three times
    AUTO = "auto"  # the planner takes the fastest of these that fits memory

    @property
    def of_layers(self) -> "Remat":
        """What the programs of layers keep: where whole stages are computed again, as little as they can."""
        return self if self in (Remat.NONE, Remat.DOTS) else Remat.LAYER


class ScheduleKind(StrEnum):
    """In which order the stages of a pipeline do their work (planning/schedule_kinds.py)."""

    AUTO = "auto"  # 1F1B, unless the planner predicts another one to be faster by a margin that matters
    ONE_F_ONE_B = "1f1b"  # one stage on each device, forward and backward in turn
    INTERLEAVED = "interleaved"  # several stages on each device: smaller bubble, more in memory and on the way
    ZB_H1 = "zb-h1"  # gradients of weights fill the bubble; with --remat none only, because it needs what that keeps


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and clipping by the global norm."""

    peak_learning_rate: float = 3e-4  # learning rate after warm-up
    final_learning_rate_fraction: float = 0.1  # learning rate at the last step, as a fraction of the peak
    warmup_steps: int = 10  # steps of linear warm-up from 0
    beta1: float = 0.9  # decay of AdamW's first moment
    beta2: float = 0.95  # decay of AdamW's second moment
    epsilon: float = 1e-8  # AdamW's epsilon
    weight_decay: float = 0.1  # decoupled weight decay of matrices and embeddings (vectors are not decayed)
    clip_norm: float = 1.0  # clip gradients to this global norm; 0 turns clipping off


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that decides what a run computes and on how many nodes."""

    model: ModelConfig  # the model (fields of its own configuration)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # the optimizer

    steps: int = 100  # optimizer steps to run
    global_batch_size: int = 32  # sequences per step, over all pipelines
    microbatch_size: int = 4  # sequences per microbatch
    sequence_length: int = 128  # tokens per sequence
    skip_steps: int = 0  # steps in a row that may do without an update because a gradient is not finite; else: the end
    init_from: str | None = None  # begin with the parameters of this Hugging Face folder (GPT-2), not with random ones
    seed: int = 0  # decides initial parameters, order of samples and dropout

    data: str = "builtin"  # token file (.bin, see scripts/prepare_data.py), or "builtin": the prose of Python, as bytes
    data_dtype: str = "uint16"  # token type of a .bin file that has no header beside it: uint16 or uint32
    validation_fraction: float = 0.05  # share of the tokens, at the end of the file, kept for evaluation
    eval_every: int = 50  # evaluate after every so many steps; 0 never evaluates
    eval_batches: int = 2  # global batches per evaluation

    nodes: int = 1  # nodes to start (on this machine, unless --coordinator-address is given)
    devices_per_node: int = 1  # devices of each node
    fault_tolerance: int = 0  # f: losses of nodes that must be survivable at once; needs f+1 pipelines
    precision: Precision = Precision.FLOAT32  # of computation and state; mixed: bfloat16 computes, float32 is kept
    schedule: ScheduleKind = ScheduleKind.AUTO  # order of a pipeline's work; auto: 1f1b, or what is clearly faster
    tensor_parallel: bool = False  # devices of a stage share out its products, not the samples of a microbatch
    remat: Remat = Remat.LAYER  # what the forward pass keeps for the backward pass; auto: as much as fits

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step, over all pipelines."""
        return self.global_batch_size // self.microbatch_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    @property
    def may_split_backward(self) -> bool:
        """Whether a plan of the run may have pipelines with `ScheduleKind.ZB_H1`."""
        return self.remat is Remat.NONE and self.schedule in (ScheduleKind.AUTO, ScheduleKind.ZB_H1)

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows the commit of a step: every `eval_every` steps, and after the last."""
        return self.eval_every > 0 and ((step + 1) % self.eval_every == 0 or step + 1 == self.steps)


def check_config(config: RunConfig) -> None:
    """Refuse a configuration that cannot run, before anything starts.

    Raises:
        ConfigError: with the numbers and the flags to change.
    """
    counts = ("steps", "global_batch_size", "microbatch_size", "sequence_length", "nodes", "devices_per_node")
    for name in counts:
        if getattr(config, name) < 1:
            raise ConfigError(f"{flag(name)} is {getattr(config, name)}; it must be at least 1")
    for name in ("eval_every", "fault_tolerance", "skip_steps"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{flag(name)} is {getattr(config, name)}; it must not be negative")
    if config.eval_every and config.eval_batches < 1:
        raise ConfigError(f"--eval-batches is {config.eval_batches}; give at least 1, or --eval-every 0")
    if config.global_batch_size % config.microbatch_size:
        raise ConfigError(
            f"--global-batch-size {config.global_batch_size} is not a multiple of --microbatch-size "
            f"{config.microbatch_size}; change one of them"
        )
    is_uneven = config.microbatch_size % config.devices_per_node and config.devices_per_node % config.microbatch_size
    if is_uneven and not config.tensor_parallel:
        raise ConfigError(
            f"--microbatch-size {config.microbatch_size} cannot be shared by --devices-per-node "
            f"{config.devices_per_node}; make one a multiple of the other, or give --tensor-parallel"
        )
    if config.tensor_parallel and not (model := config.model.build()).tensor_dims:  # imports jax, but few ask for it
        raise ConfigError(
            "--tensor-parallel needs a model that says which parameters can be shared out (Layer.tensor_dims), but "
            f"none of its kinds of layers ({', '.join(model.kinds)}) does; run without it"
        )
    if config.num_microbatches < config.fault_tolerance + 1:
        raise ConfigError(
            f"a step has {config.num_microbatches} microbatches, but --fault-tolerance {config.fault_tolerance} needs "
            f"{config.fault_tolerance + 1} pipelines with one each; lower --microbatch-size"
        )
    if config.schedule is ScheduleKind.ZB_H1 and config.remat not in (Remat.NONE, Remat.AUTO):
        raise ConfigError(
            f"--schedule zb-h1 splits the backward pass, which --remat {config.remat} begins with computing again; "
            "give --remat none, or another --schedule"
        )
    if config.sequence_length > config.model.max_sequence_length:
        raise ConfigError(
            f"--sequence-length {config.sequence_length} is more than the model's {config.model.max_sequence_length}"
        )
    if not 0 <= config.validation_fraction < 1:
        raise ConfigError(f"--validation-fraction is {config.validation_fraction}; it must be in [0, 1)")
    if config.optimizer.warmup_steps < 0 or config.optimizer.peak_learning_rate <= 0:
        raise ConfigError(
            f"--warmup-steps {config.optimizer.warmup_steps} must not be negative and --peak-learning-rate "
            f"{config.optimizer.peak_learning_rate} must be positive"
        )


def flag(field_name: str) -> str:
    """Return the command-line flag of a configuration field."""
    return "--" + field_name.replace("_", "-")
