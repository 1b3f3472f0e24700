"""The cells of the grid on four and eight ranks. See grid.py."""

from __future__ import annotations

from tests.support.grid import grid_on

(
    test_a_cell_trains_as_transformers_does,
    test_another_row_trains_as_transformers_does,
    test_masked_documents_train_as_each_document_alone,
    test_bf16_stays_within_the_spread_of_seeds,
) = grid_on(4, 8)
