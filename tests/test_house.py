"""The rules of the house that a machine can keep: layers, who may know what, sizes, docstrings."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import meshmuon

SOURCE = Path(meshmuon.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# Top to bottom; names in one row do not import each other.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"bench"},
    {"testing"},
    {"__init__"},  # `import meshmuon`: everything public
    {"importers", "resume"},
    {"muon", "planner", "sharded_polar", "attention"},
    {"step", "measure"},
    {"preparation"},
    {"routing", "groups", "checkpoint", "saved_files"},
    {"state"},
    {"runtime"},
    {"exchange", "update"},
    {"plan"},
    {"polar", "layout"},
    {"kernels"},
    {"config", "_compat"},
    {"checks"},
    {"errors"},
]
# Exceptions stand here with their reason, or not at all.
ALLOWED: dict[tuple[str, str], str] = {}
KNOWS_DTENSOR = ("layout", "checkpoint", "testing")  # testing's small models are wrapped as users wrap theirs
# `meshmuon train` stands where a user stands, who wraps the model and averages the loss: in this one file.
PLAYS_THE_USER = ("cli/parallel.py",)
CALLS_COLLECTIVES = ("exchange", "testing")  # the oracles of testing gather whole tensors
COLLECTIVES = re.compile(
    r"^(all_reduce|all_gather\w*|all_to_all\w*|reduce_scatter\w*|broadcast\w*|barrier|monitored_barrier|isend|irecv|"
    r"send|recv|gather|scatter|gather_object|scatter_object_list|new_group|batch_isend_irecv|full_tensor|redistribute)$"
)
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 50


def room(path):
    part = path.relative_to(SOURCE).parts[0]
    return part.removesuffix(".py")


def imports(tree):
    """Full names of what is imported; of relative imports, as they are written: `..muon.Muon`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (f"{module}{alias.name}" for alias in node.names)


def depth(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


def layer_violations(name, tree):
    rooms = set().union(*LAYERS)
    for imported in imports(tree):
        if imported.startswith("."):
            yield f"{name} imports {imported}: say where from"
        if imported.split(".")[0] != "meshmuon":
            continue
        other = (*imported.split("."), "")[1]
        other = other if other in rooms else "__init__"  # a public name, or the package itself
        if other == name or (name, other) in ALLOWED:
            continue
        if depth(other) <= depth(name):
            yield f"{name} imports {imported}"


def dtensor_violations(tree):
    yield from (
        name for name in imports(tree) if name.startswith(("torch.distributed.tensor", "torch.distributed._tensor"))
    )


def collective_violations(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and COLLECTIVES.match(node.func.attr):
            owner = ast.unparse(node.func.value)
            if owner in ("dist", "torch.distributed", "distributed", "c10d") or node.func.attr in (
                "full_tensor",
                "redistribute",
            ):
                yield ast.unparse(node.func)
    yield from (
        name
        for name in imports(tree)
        if name.startswith("torch.distributed.") and COLLECTIVES.match(name.split(".")[-1])
    )


def code_lines(node, text):
    """Lines of a node without the docstrings inside it."""
    docs = 0
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            inner
        ):
            expression = inner.body[0]
            docs += expression.end_lineno - expression.lineno + 1
    first = getattr(node, "lineno", 1)
    last = getattr(node, "end_lineno", None) or text.count("\n")
    return last - first + 1 - docs


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_file_keeps_the_rules(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    name = room(path)
    if name != "__init__":
        assert list(layer_violations(name, tree)) == []
    plays_the_user = path.relative_to(SOURCE).as_posix() in PLAYS_THE_USER
    if name not in KNOWS_DTENSOR and not plays_the_user:
        assert list(dtensor_violations(tree)) == []
    if name not in CALLS_COLLECTIVES and not plays_the_user:
        assert list(collective_violations(tree)) == []
    assert code_lines(tree, text) <= MAX_FILE_LINES
    if name != "_compat":
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and node.type is not None and name != "cli":
                assert "ImportError" not in ast.unparse(node.type), "only _compat.py asks what is installed"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            assert code_lines(node, text) <= MAX_FUNCTION_LINES, node.name


def test_the_checks_above_can_fail():
    bad = ast.parse(
        "import torch.distributed as dist\nfrom torch.distributed.tensor import DTensor\n"
        "from meshmuon.muon import Muon\ndist.all_reduce(x)\ny.full_tensor()\n"
    )
    assert list(layer_violations("polar", bad)) == ["polar imports meshmuon.muon.Muon"]
    for public in ("from meshmuon import Muon", "import meshmuon", "from meshmuon import muon", "import meshmuon.muon"):
        assert len(list(layer_violations("polar", ast.parse(public)))) == 1, public
        assert list(layer_violations("cli", ast.parse(public))) == [], public
    for relative in (
        "from ..muon import Muon",
        "from .. import muon",
        "from . import gram",
        "from .gram import split_at",
    ):
        assert len(list(layer_violations("polar", ast.parse(relative)))) == 1, relative
    assert list(dtensor_violations(bad)) == ["torch.distributed.tensor.DTensor"]
    assert list(collective_violations(bad)) == ["dist.all_reduce", "y.full_tensor"]
    long = "def f():\n" + "    x = 1\n" * 60
    assert code_lines(ast.parse(long).body[0], long) > MAX_FUNCTION_LINES


def documented_arguments(docstring):
    found = re.search(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", inspect.cleandoc(docstring), re.M)
    return re.findall(r"^ {4}(\*{0,2}\w+):", found.group(1), re.M) if found else []


def signature_arguments(node):
    arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    arguments += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    arguments += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return [name for name in arguments if name not in ("self", "cls")]


def docstring_problems(tree):
    """Functions whose docstring has an Args section that does not match the signature, in name and order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            doc = ast.get_docstring(node)
            inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            if doc and "Args:\n" in doc and inits and documented_arguments(doc) != signature_arguments(inits[0]):
                yield node.name
            fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            if doc and "Attributes:\n" in doc and documented_arguments(doc) != fields:
                yield node.name
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node) or ""
            if "Args:\n" in doc and documented_arguments(doc) != signature_arguments(node):
                yield node.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_docstrings_match_signatures(path):
    assert list(docstring_problems(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_the_docstring_check_can_fail():
    tree = ast.parse('def f(a, b):\n    """Do.\n\n    Args:\n        a: One.\n        c: Two.\n    """\n')
    assert list(docstring_problems(tree)) == ["f"]


def test_public_names_are_documented_and_exported():
    for name in meshmuon.__all__:
        assert inspect.getdoc(getattr(meshmuon, name)), name
    assert meshmuon.__all__ == sorted(meshmuon.__all__)


def test_the_core_imports_torch_and_nothing_else():
    """Without Triton, typer, rich or matplotlib, and without a C compiler being asked for."""
    script = textwrap.dedent(
        """
        import sys
        banned = ("triton", "typer", "rich", "matplotlib", "safetensors")
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in banned:
                    raise ImportError(f"{name} is not there")
        sys.meta_path.insert(0, Refuse())
        import meshmuon
        assert not [name for name in sys.modules if name.split(".")[0] in banned]
        import torch
        p = torch.randn(4, 6, requires_grad=True)
        p.grad = torch.randn(4, 6)
        meshmuon.Muon([p]).step()
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
