"""Packed rows: documents by number, and positions within them."""

import pytest
import torch

from linrope import InputError
from linrope.ops.documents import document_positions, number_documents

IDS = torch.tensor([[4, 4, 7, 7, 4], [1, 1, 1, 1, 1]])


def test_each_change_of_id_begins_a_document():
    assert number_documents(IDS).tolist() == [[0, 0, 1, 1, 2], [0, 0, 0, 0, 0]]


def test_positions_restart_in_each_document_and_later_calls_continue_the_open_one():
    positions, start = document_positions((2, 5), IDS, 10, torch.tensor([8, 0]))
    assert (positions.tolist(), start.tolist()) == ([[2, 3, 0, 1, 0], [10, 11, 12, 13, 14]], [14, 0])
    positions, start = document_positions((2, 2), None, 15, start)
    assert (positions.tolist(), start.tolist()) == ([[1, 2], [15, 16]], [14, 0])
    assert document_positions((2, 2), None, 15, None) == (None, None)
    assert document_positions((2, 0), IDS[:, :0], 15, None) == (None, None)
    with pytest.raises(InputError, match=r"state.document_start is \(2,\), this call needs \(1,\)"):
        document_positions((1, 2), None, 15, torch.tensor([14, 0]))
