"""A byte corpus that is already on the machine: Python's own standard library, or any file or folder.

Reading, hashing and splitting are plain Python, the same everywhere; torch only cuts windows.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VALIDATION_SHARE = 0.05
# A corpus is held in memory. Past this size the path is more likely a mistake (a home folder) than a corpus.
MAX_BYTES = 1 << 30
# Put after every file: text holds no NUL, so the model can learn where a file ends.
SEPARATOR = b"\0"

# Tests, generated tables, and packages that are not in every Python of the same version.
_STDLIB_DROPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "encodings", "distutils", "site-packages", "__pycache__"}
)
# Written when Python is built: they name compilers and folders of one machine and would change the hash.
_STDLIB_BUILD_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a corpus.

    Attributes:
        name: Path relative to the corpus folder, with forward slashes.
        data: Its bytes.
    """

    name: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """What a run writes down about its corpus.

    Attributes:
        label: What it is, without naming a folder of this machine.
        source: The folder or file it was read from.
        sha256: Hash over names and contents of all files, in sorted order.
        train_bytes: Size of the training side.
        validation_bytes: Size of the held-out side.
    """

    label: str
    source: str
    sha256: str
    train_bytes: int
    validation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Bytes to train on and bytes held out.

    Attributes:
        facts: Origin, hash and sizes.
        train: Training bytes.
        validation: Held-out bytes, from other files than `train` (from the file's end for a single file).
        train_files: Names of the training files.
        validation_files: Names of the held-out files.
    """

    facts: CorpusFacts
    train: bytes
    validation: bytes
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]


def load_corpus(path: Path | None = None, *, window: int) -> Corpus:
    """Read a corpus and split it 95/5.

    Args:
        path: A file, or a folder whose files are all read (hidden names excepted). None means the source of
            Python's standard library.
        window: Bytes in one training example. Each side of the split must hold at least one.

    Returns:
        The corpus; the same bytes under the same names always give the same split.

    Raises:
        ValueError: The path is missing, unreadable, empty, too small or too large.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    if not root.exists():
        raise ValueError(f"corpus {root}: no such file or folder. Give an existing one with --corpus PATH.")
    if path is None:
        names = _list_files(root, _is_stdlib_source, suffix=".py")
    else:
        names = _list_files(root, _is_visible, suffix="")
    files = _read(root, names)
    if not files:
        raise ValueError(f"corpus {root}: empty. Give a file or folder with {40 * window} bytes or more.")
    train_files, validation_files = _split(files)
    train, validation = _join(train_files), _join(validation_files)
    if min(len(train), len(validation)) < window:
        raise ValueError(
            f"corpus {root}: too small. It splits into {len(train)} bytes for training and {len(validation)} "
            f"for validation, and one example takes {window}. Give about {40 * window} bytes or more."
        )
    return Corpus(
        facts=CorpusFacts(
            label=f"standard library of Python {platform.python_version()}" if path is None else root.name,
            source=str(root),
            sha256=_hash(files),
            train_bytes=len(train),
            validation_bytes=len(validation),
        ),
        train=train,
        validation=validation,
        train_files=tuple(file.name for file in train_files),
        validation_files=tuple(file.name for file in validation_files),
    )


def batch_drawer(data: bytes, *, window: int, batch: int, seed: int) -> "Callable[[int], Tensor]":
    """Prepare drawing training examples at random places.

    Args:
        data: Bytes to cut from.
        window: Bytes in one example.
        batch: Examples in one tensor.
        seed: Decides the places, together with the step.

    Returns:
        A function from the number of a step to its examples, (batch, window) of int64 on the CPU. Step 7 gets the same
        ones whether or not steps 0 to 6 were drawn before, so a resumed run needs to remember nothing.
    """
    import torch

    candidates = _all_windows(data, window)

    def draw(step: int) -> "Tensor":
        # torch's CPU generator reads 32 bits of its seed; the prime keeps the steps of nearby seeds apart.
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)
        return candidates[torch.randint(len(candidates), (batch,), generator=generator)].long()

    return draw


def spread_windows(data: bytes, *, window: int, count: int) -> "Tensor":
    """Cut examples at even distances, always the same ones.

    Args:
        data: Bytes to cut from.
        window: Bytes in one example.
        count: Examples wanted. Fewer come back if `data` cannot hold so many without overlap.

    Returns:
        A tensor (examples, window) of int64 on the CPU.
    """
    candidates = _all_windows(data, window)
    stride = max(window, len(data) // count)
    return candidates[::stride][:count].long()


def _all_windows(data: bytes, window: int) -> "Tensor":
    """Every window of the data, as a view: row i starts at byte i."""
    import torch

    # A bytearray, because torch warns about memory it may not write, which bytes are.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).unfold(0, window, 1)


def _list_files(root: Path, keep: Callable[[str], bool], *, suffix: str) -> list[str]:
    """Names relative to `root`, sorted; for a single file, its own name."""
    if root.is_file():
        return [root.name]
    names = []
    for folder, subfolders, filenames in os.walk(root):
        # Pruned in place, so that os.walk never enters a dropped folder (site-packages may be huge).
        subfolders[:] = [name for name in subfolders if keep(name)]
        for filename in filenames:
            if keep(filename) and filename.endswith(suffix):
                names.append((Path(folder) / filename).relative_to(root).as_posix())
    return sorted(names)


def _is_stdlib_source(name: str) -> bool:
    return name not in _STDLIB_DROPPED_FOLDERS and not name.startswith(_STDLIB_BUILD_PREFIXES)


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _read(root: Path, names: list[str]) -> list[SourceFile]:
    """The files with content, after a look at their total size."""
    base = root.parent if root.is_file() else root
    # A named pipe or a dangling link has no bytes to offer, and opening the pipe would block for ever.
    paths = {name: base / name for name in names if (base / name).is_file()}
    try:
        total = sum(path.stat().st_size for path in paths.values())
        if total > MAX_BYTES:
            raise ValueError(f"corpus {root}: {total} bytes, the limit is {MAX_BYTES}. Give a smaller one.")
        files = [SourceFile(name=name, data=path.read_bytes()) for name, path in paths.items()]
    except OSError as error:
        raise ValueError(f"corpus {root}: {error}. Make it readable or give another.") from error
    return [file for file in files if file.data]


def _hash(files: list[SourceFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        # Name and length first: otherwise bytes could move between files without changing the hash.
        digest.update(f"{file.name}\0{len(file.data)}\0".encode("utf-8", "surrogateescape"))
        digest.update(file.data)
    return digest.hexdigest()


def _split(files: list[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """Hold out about 5 % of the bytes, by whole files, so that no training file reappears in validation.

    A file's place in the draw is the hash of its name: no folder is preferred, and no random state is needed.
    Files larger than the whole validation share come last, smallest first: used if the rest is too little.
    """
    if len(files) == 1:
        name, data = files[0].name, files[0].data
        cut = len(data) - max(1, int(len(data) * VALIDATION_SHARE))
        return [SourceFile(name=name, data=data[:cut])], [SourceFile(name=name, data=data[cut:])]
    target = VALIDATION_SHARE * sum(len(file.data) for file in files)

    def place(file: SourceFile) -> tuple[int, str]:
        size = len(file.data)
        return (size if size > target else 0, hashlib.sha256(os.fsencode(file.name)).hexdigest())

    held_out: set[str] = set()
    held_bytes = 0
    # The last one stays: training needs at least one file.
    for file in sorted(files, key=place)[:-1]:
        if held_bytes >= target:
            break
        held_out.add(file.name)
        held_bytes += len(file.data)
    train = [file for file in files if file.name not in held_out]
    return train, [file for file in files if file.name in held_out]


def _join(files: list[SourceFile]) -> bytes:
    return b"".join(file.data + SEPARATOR for file in files)
