"""The cells of the grid on one and two ranks, and those that cannot be. See grid.py."""

from __future__ import annotations

import pytest

from tests.training.compare import References
from tests.training.grid import (
    COLUMNS,
    REFUSED,
    ROWS,
    SCHEDULE,
    Row,
    bf16_rows,
    cells,
    config_of,
    masked_rows,
    more_rows,
    train_cell,
    train_in_bf16,
    train_masked,
    train_row,
)
from titanlite.config.errors import ConfigError


@pytest.mark.parametrize(("row", "column"), cells(1, 2))
def test_a_cell_trains_as_transformers_does(references: References, row: str, column: str) -> None:
    train_cell(references, row, column)


@pytest.mark.parametrize(("row", "accumulation"), more_rows(1, 2))
def test_another_row_trains_as_transformers_does(references: References, row: Row, accumulation: int) -> None:
    train_row(references, row, accumulation)


@pytest.mark.parametrize("row", masked_rows(1, 2))
def test_masked_documents_train_as_each_document_alone(references: References, row: str) -> None:
    train_masked(references, row)


@pytest.mark.parametrize("row", bf16_rows(1, 2))
def test_bf16_stays_within_the_spread_of_seeds(references: References, row: str) -> None:
    train_in_bf16(references, row)


@pytest.mark.parametrize(("row", "column"), REFUSED, ids=map(" - ".join, REFUSED))
def test_a_cell_that_cannot_work_is_refused(row: str, column: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(ROWS[row], COLUMNS[column])
    assert {problem.key for problem in caught.value.problems} == {SCHEDULE}
    assert REFUSED[row, column] in caught.value.problems[0].message
