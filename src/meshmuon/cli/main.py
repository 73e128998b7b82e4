"""Entry point of the `meshmuon` command.

typer and rich are an extra, so this module imports neither at the top: `main()` must be able to say that they
are missing. Commands import torch inside their functions, so that `--help` does not wait for it.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line; without typer and rich, say how to install them and exit with code 2."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"meshmuon: the command line needs {' and '.join(missing)}, not installed here.\n"
            "Install with:  pip install 'meshmuon[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    build_app()(prog_name="meshmuon")


def build_app() -> "typer.Typer":
    """Collect the commands.

    Returns:
        The typer application, also reachable as `meshmuon.cli.main.app`.
    """
    import typer

    from meshmuon.cli import bench, doctor, plan
    from meshmuon.cli.train import HELP, train_command

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.command("train", help=HELP)(train_command)
    app.command("plan", help=plan.HELP)(plan.plan_command)
    app.command("doctor", help=doctor.HELP)(doctor.doctor_command)
    app.command("bench", help=bench.HELP)(bench.bench_command)

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
        ] = False,
    ) -> None:
        """Muon for hidden matrices, AdamW for the rest: one optimizer for a whole model."""

    return app


def _print_version(requested: bool) -> None:
    if not requested:
        return
    import typer

    import meshmuon

    print(f"meshmuon {meshmuon.__version__}")
    raise typer.Exit


def __getattr__(name: str) -> Any:
    # Made on request: a Typer at module level would need typer before main() can report it missing.
    if name == "app":
        return build_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
