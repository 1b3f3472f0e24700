"""The cells of the grid on one and two ranks, and those that cannot be. See grid.py."""

from __future__ import annotations

import pytest

from tests.support.grid import COLUMNS, REFUSED, SCHEDULE, config_of, grid_on
from titanlite.config.errors import ConfigError

(
    test_a_cell_trains_as_transformers_does,
    test_another_row_trains_as_transformers_does,
    test_masked_documents_train_as_each_document_alone,
    test_bf16_stays_within_the_spread_of_seeds,
) = grid_on(1, 2)


@pytest.mark.parametrize(("row", "column"), REFUSED, ids=map(" - ".join, REFUSED))
def test_a_cell_that_cannot_work_is_refused(row, column):
    with pytest.raises(ConfigError) as caught:
        config_of(row, COLUMNS[column])
    assert {problem.key for problem in caught.value.problems} == {SCHEDULE}
    assert REFUSED[row, column] in caught.value.problems[0].message
