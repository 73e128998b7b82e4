"""A process that ends lets gloo's threads finish: torch aborts when one of them asks for the interpreter too late."""

import subprocess
import sys
from unittest import mock

import pytest

from meshmuon.exchange import groups

SCRIPT = """
import os, sys, threading
from meshmuon import _compat

begin = threading.Event()
def finish():  # what a thread of gloo does after the last collective: it waits for the interpreter
    begin.wait()
    os.write(1, b"finished")

threading.Thread(target=finish, daemon=True).start()
{call}
sys.setswitchinterval(60)  # nobody gets the interpreter unless it is given away
begin.set()
"""


@pytest.mark.parametrize(
    ("call", "out"), [("_compat.let_threads_finish_at_exit()", "finished"), ("", "")], ids=["ours", "sabotage"]
)
def test_threads_finish_before_the_process_ends(call, out):
    source = SCRIPT.format(call=call)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, out), done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_jobs_wait(ranks):
    with (
        mock.patch.object(groups, "world_size", return_value=ranks),
        mock.patch.object(groups, "let_threads_finish_at_exit") as waits,
    ):
        groups.Groups()
    assert waits.call_count == ranks - 1
