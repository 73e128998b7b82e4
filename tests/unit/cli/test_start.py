"""The command answers at once, and the package still has its names."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import meshmuon
from meshmuon.cli.main import build_app


def test_help_waits_for_torch() -> None:
    script = (
        "import sys; from meshmuon.cli.main import build_app\n"
        "for command in ('train', 'plan', 'doctor', 'bench'):\n"
        "    build_app()([command, '--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'meshmuon.cli.train' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--steps" in done.stdout and "--mesh" in done.stdout, done.stderr


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


@pytest.mark.parametrize(
    "command", [[], ["train"], ["plan"], ["doctor"]], ids=lambda words: " ".join(words) or "meshmuon"
)
def test_help_fits_eighty_columns_and_tells_exit_codes(command: list[str]) -> None:
    shown = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(build_app(), [*command, "--help"])
    assert shown.exit_code == 0 and max(map(len, shown.output.splitlines())) <= 80
    assert not command or "Exit codes: 0 " in shown.output
