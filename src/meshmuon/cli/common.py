"""What the commands share: how they end, and how they ask for what the user wrote."""

import difflib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
WIDTH = 80

VERBOSE = typer.Option("--verbose", "-v", help="Show the traceback of an error.")


class InputError(ValueError):
    """What the user wrote cannot be done; the message says what to write instead."""


def fail(command: str, text: str, code: int) -> NoReturn:
    """End a command with one line on stderr.

    Args:
        command: Its name.
        text: What was found, and what to do.
        code: The exit code.
    """
    if os.environ.get("RANK", "0") == "0" or code == EXIT_FAILED:  # what all of torchrun's processes know, one says
        print(f"meshmuon {command}: {' '.join(text.split())}", file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def one_line_errors(command: str, *, verbose: bool) -> Iterator[None]:
    """Turn exceptions into one line and an exit code.

    Args:
        command: Name of the command.
        verbose: Print the traceback before that line.

    Yields:
        Nothing.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):  # the last: the reader of a pipe had enough
        raise
    except KeyboardInterrupt:
        fail(command, "interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        if isinstance(error, InputError):
            fail(command, str(error), EXIT_BAD_INPUT)
        if _is_out_of_memory(error):
            fail(command, f"out of memory ({_first_line(error)}). {_LESS_MEMORY}", EXIT_FAILED)
        if isinstance(error, (ValueError, TypeError)):  # ours: they name the thing, and what to do
            fail(command, str(error), EXIT_BAD_INPUT)
        again = "" if verbose else " Run it again with --verbose and report this."
        fail(command, f"unexpected {type(error).__name__}: {_first_line(error)}.{again}", EXIT_FAILED)


_LESS_MEMORY = "Close other programs, or ask for less: a smaller model or --size, --quick, or another --device."


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _is_out_of_memory(error: BaseException) -> bool:
    # On a CPU torch raises a plain RuntimeError.
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)


def closest(word: str, known: Iterable[str]) -> str:
    """Suggest what may have been meant.

    Args:
        word: What the user wrote.
        known: What there is.

    Returns:
        A sentence: the nearest word if one is near, then all of them.
    """
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return (f"Did you mean {near[0]}? " if near else "") + f"Choose from {', '.join(words)}."


def choice(option: str, word: str, known: tuple[str, ...]) -> str:
    """Check a word.

    Args:
        option: Where it was written.
        word: What was written.
        known: What there is.

    Returns:
        The word.

    Raises:
        InputError: If it is not known, with a suggestion.
    """
    if word not in known:
        raise InputError(f"{option}: unknown word {word!r}. {closest(word, known)}")
    return word


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, left: frozenset[int] = frozenset({0})) -> str:
    """Line up cells under their titles.

    Args:
        header: The titles.
        rows: Cells, as many as titles.
        left: Columns that are flush left; the others hold numbers.

    Returns:
        Lines without trailing spaces.
    """
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
