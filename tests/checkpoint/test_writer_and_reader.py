"""What is written is what is read, or the damage is named."""

import gc
import resource
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from oobleck_jax.checkpoint import writer as writer_module
from oobleck_jax.checkpoint.named_arrays import named_arrays
from oobleck_jax.checkpoint.reader import read_group, read_params, read_state
from oobleck_jax.checkpoint.store import Checkpoint, CheckpointStore
from oobleck_jax.checkpoint.writer import CheckpointWriter, Outcome, Written, write_group
from oobleck_jax.errors import CheckpointDamaged, CheckpointUnwritable, ConfigError
from oobleck_jax.execution.state import GroupState
from oobleck_jax.execution.state_transfer import checksum_of
from tests.checkpoint.checkpoints import files, save, state, states


def shapes_of(tree: GroupState) -> GroupState:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def equal(one: object, other: object) -> bool:
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), one, other)
    return jax.tree.structure(one) == jax.tree.structure(other) and all(jax.tree.leaves(same))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint that no test changes for longer than it takes."""
    return save(CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints"), step=4, seed=5)


def test_states_come_back_to_the_bit(saved: Checkpoint) -> None:
    for group, expected in states(5).items():
        assert equal(read_state(saved, group, shapes_of(expected)), expected)
        assert equal(read_params(saved, group), expected.params)


def test_the_checksum_is_the_one_that_holders_compare(saved: Checkpoint) -> None:
    for group, expected in states(5).items():
        leaves = jax.tree.leaves(expected)
        assert saved.manifest.groups[group].checksum == checksum_of(leaves)
        assert saved.manifest.groups[group].num_bytes == sum(leaf.nbytes for leaf in leaves)


def test_every_file_with_a_flipped_byte_is_named(saved: Checkpoint) -> None:
    for path in files(saved.folder / "layer-000"):
        content = path.read_bytes()
        for position in {0, len(content) // 2, len(content) - 1} if content else ():
            flipped = bytearray(content)
            flipped[position] ^= 0x10
            path.write_bytes(flipped)
            with pytest.raises(CheckpointDamaged) as caught:
                read_group(saved, "layer-000")
            assert (caught.value.step, caught.value.group, caught.value.file) == (4, "layer-000", path)
        path.write_bytes(content)
    read_group(saved, "layer-000")


def test_a_missing_or_truncated_file_is_named(saved: Checkpoint) -> None:
    for path in files(saved.folder / "wte"):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointDamaged, match="is missing") as caught:
            read_group(saved, "wte")
        assert caught.value.file == path
        path.write_bytes(content[:-1])
        if content:
            with pytest.raises(CheckpointDamaged, match="bytes, not the"):
                read_group(saved, "wte")
        path.write_bytes(content)


def test_other_numbers_than_were_saved_are_refused(saved: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever lies between the bytes on disk and the arrays in memory, the arrays are checked, too.
    from oobleck_jax.checkpoint import reader

    restore = reader._restore  # pyright: ignore[reportPrivateUsage]

    def wrong(folder: Path) -> object:
        return jax.tree.map(lambda leaf: leaf + np.ones_like(leaf) * (leaf.ndim == 2), restore(folder))

    monkeypatch.setattr(reader, "_restore", wrong)
    with pytest.raises(CheckpointDamaged, match="other numbers"):
        read_group(saved, "layer-000")


def test_an_unknown_group_is_refused(saved: Checkpoint) -> None:
    with pytest.raises(CheckpointDamaged, match="layer-007 has no record"):
        read_group(saved, "layer-007")


def test_a_state_of_another_form_is_refused_with_its_arrays(saved: Checkpoint) -> None:
    wider = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leaf.shape, 2), leaf.dtype), state(5))
    with pytest.raises(ConfigError, match="params/mlp/bias is"):
        read_state(saved, "layer-000", wider)


def test_the_writer_saves_what_was_there_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = jax.tree.map(np.copy, states(1))
    may_write = threading.Event()

    def slow(folder: Path, group: str, arrays: dict[str, np.ndarray]) -> object:
        assert may_write.wait(30)
        return write_group(folder, group, arrays)

    monkeypatch.setattr(writer_module, "write_group", slow)
    outcomes: list[Outcome] = []
    writer = CheckpointWriter()
    assert writer.begin(tmp_path / "step", given, outcomes.append)
    jax.tree.map(lambda leaf: leaf.fill(9), given)  # the next step
    assert writer.begin(tmp_path / "next", states(2), outcomes.append)  # waits for its turn
    assert not writer.begin(tmp_path / "third", given, outcomes.append)
    assert not writer.wait(0.01)
    may_write.set()
    assert writer.wait(30)
    assert len(outcomes) == 2
    for number, written in enumerate(outcomes, start=1):
        assert isinstance(written, Written)
        expected = {group: checksum_of(jax.tree.leaves(saved)) for group, saved in states(number).items()}
        assert {group: record.checksum for group, record in written.groups.items()} == expected
    assert writer.begin(tmp_path / "third", {}, outcomes.append)
    assert writer.wait(30)


def outcome_of(folder: Path) -> Outcome:
    outcomes: list[Outcome] = []
    writer = CheckpointWriter()
    assert writer.begin(folder, states(1), outcomes.append)
    assert writer.wait(30)
    return outcomes[0]


def test_a_folder_that_cannot_be_made_ends_the_save_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = outcome_of(tmp_path / "file" / "step")
    assert isinstance(outcome, CheckpointUnwritable)
    assert "Not a directory" in str(outcome)


# Where one array cannot be written, Orbax closes its event loop while others are still on their way.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_takes_no_more_ends_the_save_and_nothing_else(tmp_path: Path) -> None:
    """A limit of the size of files stands for a full disk: the same calls fail, in Orbax's threads."""
    outcome_of(tmp_path / "first")  # imports Orbax, whose caches are files, too
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    try:
        outcome = outcome_of(tmp_path / "step")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(outcome, CheckpointUnwritable)
    assert outcome.path == tmp_path / "step" / "layer-000"
    gc.collect()  # what Orbax left warns here, not in a later test


def test_a_half_written_group_is_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    first = write_group(folder, "wte", named_arrays(states(1)["wte"]))
    second = write_group(folder, "wte", named_arrays(states(1)["wte"]))
    assert first.checksum == second.checksum
