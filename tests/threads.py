"""For tests that need a certain number of threads."""

import contextlib

import torch


@contextlib.contextmanager
def using(number):
    """Let torch use so many threads here, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
