"""Runs every test of this folder in a process of its own, where Triton interprets kernels on the CPU.

`TRITON_INTERPRET` has to be set before Triton is imported and would then hold for every other test of the session, also
for those on a GPU. So a worker process is started once, and each test function is sent there.
"""

import importlib.util
import multiprocessing
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _prepare(path):
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)


def _run(file, name, arguments):
    key = f"interpreted_{Path(file).stem}"
    module = sys.modules.get(key)
    if module is None:
        spec = importlib.util.spec_from_file_location(key, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        spec.loader.exec_module(module)
    try:
        getattr(module, name)(**arguments)
    except BaseException:  # not every exception can be sent to another process
        return traceback.format_exc()
    return None


@pytest.fixture(scope="session")
def _worker():
    pool = ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare, initargs=(sys.path,)
    )
    with pool:
        yield pool


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.fixturenames.append("_worker")
            if not _HAS_TRITON:
                item.add_marker(pytest.mark.skip(reason="needs Triton: pip install triton"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    wanted = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    name = pyfuncitem.originalname
    failure = pyfuncitem.funcargs["_worker"].submit(_run, str(pyfuncitem.path), name, arguments).result()
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True
