"""Rows of integer columns that no other row beats: the building block of exact planning."""

from collections.abc import Sequence

import numpy as np

from oobleck_jax.planning.costs import Ints


def unbeaten(group: Ints, columns: Sequence[Ints], *, ties: Sequence[Ints] = ()) -> Ints:
    """Return the rows that no other row of their group beats, sorted by group and columns.

    A row beats another if it is at most as large in every column. Of rows that are equal in all columns the one with
    the smallest `ties` stays, and then the first.

    Args:
        group: one number for each row.
        columns: what rows are compared by.
        ties: columns, the most important first.
    """
    if not len(group):
        return np.zeros(0, dtype=np.int64)
    if len(columns) == 2:
        return _unbeaten_in_two(group, columns, ties)
    # Whatever beats a row comes before it in the order of the sum, so the first row of each group is unbeaten. Columns
    # are scaled to equal size, because then the first rows beat most others.
    largest = max(int(column.max()) for column in columns)
    total = np.sum([column * (largest // max(int(column.max()), 1)) for column in columns], axis=0)
    rows = np.lexsort((*reversed(ties), *reversed(columns), total, group))
    found: list[Ints] = []
    while len(rows):
        is_leader = np.concatenate([[True], group[rows[1:]] != group[rows[:-1]]])
        leader = rows[is_leader]
        found.append(leader)
        number = np.cumsum(is_leader) - 1
        is_beaten = np.ones(len(rows), dtype=bool)
        for column in columns:
            is_beaten &= column[rows] >= column[leader][number]
        rows = rows[~is_beaten]
    unsorted = np.concatenate(found)
    return unsorted[np.lexsort((*(column[unsorted] for column in reversed(columns)), group[unsorted]))]


def _unbeaten_in_two(group: Ints, columns: Sequence[Ints], ties: Sequence[Ints]) -> Ints:
    """Do the same in one go: in order of the first column, unbeaten is what is below all before it in the second."""
    rows = np.lexsort((*reversed(ties), columns[1], columns[0], group))
    second = columns[1][rows]
    number = np.cumsum(np.concatenate([[0], group[rows[1:]] != group[rows[:-1]]]))
    level = second - number * (int(second.max()) + 1)  # lower in each group, so that the minima start anew there
    lowest = np.minimum.accumulate(level)
    return rows[np.concatenate([[True], level[1:] < lowest[:-1]])]


def join(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Return all pairs of a row of `left` and a row of `right` with equal keys, by the rows of `left`.

    Args:
        left: keys.
        right: keys, ascending.
    """
    begin, end = np.searchsorted(right, left, side="left"), np.searchsorted(right, left, side="right")
    counts = end - begin
    left_rows = np.repeat(np.arange(len(left)), counts)
    right_rows = np.arange(len(left_rows)) + (begin - np.cumsum(counts) + counts)[left_rows]
    return left_rows, right_rows
