"""`meshmuon doctor`: shows what `testing.health` finds, and ends with an exit code."""

import json
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from meshmuon.cli.common import EXIT_FAILED, VERBOSE, WIDTH, one_line_errors

if TYPE_CHECKING:
    from meshmuon.testing.health import Finding

HELP = """Check this installation: versions, kernels, exactness on two processes, checkpoints.

Each line is ok or FAIL, and a FAIL comes with what to do. Takes less than a minute; nothing is left behind.

Exit codes: 0 all is well, 1 a check failed, 130 interrupted.
"""

_Json = typer.Option("--json", help="The findings as JSON.")


def doctor_command(
    *,
    json_output: Annotated[bool, _Json] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Check this installation.

    Args:
        json_output: Print JSON instead of lines.
        verbose: Show tracebacks of checks that raised.
    """
    console = Console(stderr=json_output, highlight=False, soft_wrap=True)
    start = time.perf_counter()
    with one_line_errors("doctor", verbose=verbose):
        findings = _examine_all(console, verbose=verbose)
    failed = [finding for finding in findings if not finding.ok]
    seconds = time.perf_counter() - start
    if json_output:
        record = {"ok": not failed, "seconds": seconds, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(record))
    elif failed:
        console.print(f"\n{len(failed)} of {len(findings)} FAILED, {seconds:.0f} s", style="red")
    else:
        console.print(f"\nall {len(findings)} ok, {seconds:.0f} s", style="green")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _examine_all(console: Console, *, verbose: bool) -> list["Finding"]:
    from meshmuon.testing.health import CHECKS, Site, examine

    findings, site = [], Site()
    try:
        for name in CHECKS:
            with console.status(f"checking {name} ...") if console.is_terminal else nullcontext():
                for finding in examine(site, name):
                    findings.append(finding)
                    _show(finding, console, verbose=verbose)
    finally:
        site.close()
    return findings


def _show(finding: "Finding", console: Console, *, verbose: bool) -> None:
    word, style = ("[ ok ]", "green") if finding.ok else ("[FAIL]", "red")
    text = textwrap.fill(f"{finding.name}: {finding.detail}", WIDTH - 7, break_on_hyphens=False)
    console.print(Text(word, style=style), textwrap.indent(text, " " * 7).lstrip())
    if not finding.ok:
        do = textwrap.fill(f"do: {finding.remedy}", WIDTH - 7, subsequent_indent="    ", break_on_hyphens=False)
        console.print(textwrap.indent(do, " " * 7), markup=False)
        if verbose and finding.traceback:
            print(finding.traceback, file=sys.stderr)
