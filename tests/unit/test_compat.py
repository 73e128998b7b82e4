"""What of torch's own is put aside for a while, and comes back."""

import contextlib
import inspect
from unittest import mock

import pytest
from torch.distributed import distributed_c10d

from meshmuon._compat import groups_of_members


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_group_of_some_ranks_is_split_off_the_job_which_takes_all_of_them(ends):
    with mock.patch.object(distributed_c10d, "_get_split_source", return_value="the job's"):
        with contextlib.suppress(ZeroDivisionError), groups_of_members("a name"):
            assert distributed_c10d._get_split_source(None) is None
            assert distributed_c10d._hash_ranks_to_str([0, 1]) == "a name"
            assert ends == "well" or 1 / 0
        assert distributed_c10d._get_split_source(None) == "the job's"
        assert distributed_c10d._hash_ranks_to_str([0, 1]) != "a name"


def test_torch_still_asks_there_what_to_split():
    source = inspect.getsource(distributed_c10d._new_process_group_helper)
    assert "split_from = _get_split_source(" in source
