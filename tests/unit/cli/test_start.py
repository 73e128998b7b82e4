"""The command answers at once, and the package still has its names."""

import subprocess
import sys

import pytest

import meshmuon


def test_help_waits_for_torch() -> None:
    script = (
        "import sys; from meshmuon.cli.main import build_app\n"
        "build_app()(['train', '--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'meshmuon.cli.train' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--steps" in done.stdout, done.stderr


def test_names_loaded_on_request_are_all_there() -> None:
    assert set(meshmuon.__all__) == set(meshmuon._HOMES)
    assert set(meshmuon.__all__) <= set(dir(meshmuon))
    for name in meshmuon.__all__:
        assert getattr(meshmuon, name) is getattr(meshmuon, name), "the same object each time"
    with pytest.raises(AttributeError, match="no attribute 'Moun'"):
        _ = meshmuon.Moun


def test_a_star_import_brings_every_public_name() -> None:
    names: dict[str, object] = {}
    exec("from meshmuon import *", names)
    assert set(meshmuon.__all__) <= set(names)
