"""The five models of the Oobleck paper, as its trace simulator has them: batches, sequences, and A40 nodes.

Microbatch sizes are not published; ours have two to four thousand tokens. BERT-large is planned as layers of the same
sizes: an encoder block costs what a decoder block of the same width does, because attention is computed in full.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from oobleck_jax.config import Precision, Remat
from oobleck_jax.planning.devices import Device, device_named, rates_of
from oobleck_jax.planning.estimate import LayerSize, estimate_profile, gpt_sizes
from oobleck_jax.replay.workload import Workload


NETWORK_BYTES_PER_S = 12.5e9  # 100 Gbit/s, in each direction
NETWORK_LATENCY_S = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperModel:
    """A model and its batch."""

    num_blocks: int
    width: int
    num_heads: int
    vocab_size: int
    sequence_length: int
    global_batch_size: int
    microbatch_size: int

    def sizes(self) -> tuple[LayerSize, ...]:
        return gpt_sizes(
            num_blocks=self.num_blocks,
            width=self.width,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            sequence_length=self.sequence_length,
            remat=Remat.LAYER,
        )


def _model(
    num_blocks: int, width: int, num_heads: int, vocab_size: int, sequence_length: int, batch: int, microbatch: int
) -> PaperModel:
    return PaperModel(
        num_blocks=num_blocks,
        width=width,
        num_heads=num_heads,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        global_batch_size=batch,
        microbatch_size=microbatch,
    )


PAPER_MODELS: Mapping[str, PaperModel] = MappingProxyType(
    {
        "bert-large": _model(24, 1024, 16, 30522, 512, 8192, 8),
        "gpt2": _model(24, 1024, 16, 50257, 1024, 1024, 4),  # 355 million parameters: "medium"
        "gpt3-medium": _model(24, 1024, 16, 50257, 2048, 819, 1),
        "gpt3-2.7b": _model(32, 2560, 32, 50257, 2048, 512, 1),
        "gpt3-6.7b": _model(32, 4096, 32, 50257, 2048, 1024, 1),
    }
)


def paper_workload(name: str, *, device: str = "a40") -> Workload:
    """Return a model of the paper on nodes with one device each, with estimated costs."""
    model = PAPER_MODELS[name]
    kind: Device = device_named(device)
    rates = rates_of(
        kind, precision=Precision.MIXED, network_bytes_per_s=NETWORK_BYTES_PER_S, network_latency_s=NETWORK_LATENCY_S
    )
    profile = estimate_profile(
        model.sizes(),
        microbatch_size=model.microbatch_size,
        precision=Precision.MIXED,
        remat=Remat.LAYER,
        rates=rates,
    )
    return Workload(
        name=name,
        profile=profile,
        num_microbatches=model.global_batch_size // model.microbatch_size,
        sequence_length=model.sequence_length,
        device_memory_bytes=kind.usable_memory_bytes,
    )
