"""The architecture as tests: ranks, cycles, plug-ins that nobody names, paths that exist, size.

What ARCHITECTURE.md promises is only true while something checks it. All of this reads source by
`ast`; nothing is imported, so a module that cannot be imported here is checked as well. Each test
lists every culprit at once, as `file:line`.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "outsize"

# Low to high. A package imports itself and strictly lower ranks, so two of one rank never meet:
# that is what lets a family, a format and a placement change without looking at each other.
RANKS = (
    {"base"},
    {
        "recipes",
        "devices",
        "weights",
        "formats",
        "arithmetic",
        "objectives",
        "dialects",
        "registry",
        "teaching",
    },
    {"layers", "adapters", "families", "data", "placement", "runs"},
    {"plan", "train", "sample", "export", "doctor"},
    {"app"},
    {"cli"},
)
RANK_OF = {package: rank for rank, packages in enumerate(RANKS) for package in packages}

PLUG_IN_FOLDERS = (
    "families",
    "formats",
    "arithmetic",
    "placement",
    "dialects",
    "objectives",
    "devices",
    "plan/tasks",
    "app/tasks",
    "recipes/importers",
)

# Who may name which plug-in, and why: (file, plug-in's file, reason), as patterns below the package.
NAME_EXCEPTIONS = (
    # torch's own words, which two plug-ins happen to share
    ("*", "devices/cpu.py", "torch's word for host memory, whatever the device"),
    (
        "devices/_torch_gpu.py",
        "devices/cuda.py",
        "torch calls an AMD card's device type cuda as well",
    ),
    ("*", "arithmetic/bf16.py", "the field's word for a type of numbers, which tensors have too"),
    ("formats/fp8.py", "arithmetic/fp8.py", "the field's word for both: storing and multiplying"),
    ("weights/dtypes.py", "formats/int8.py", "torch's name of a type, which files have too"),
    # facts of an architecture, which its family is there to state
    ("families/*", "objectives/*", "an architecture was trained with one objective"),
    ("families/*", "*/tasks/*", "and tasks are named by objectives"),
    ("families/*", "families/*", "siblings name each other as components: encoders and codecs"),
    ("families/*", "dialects/diffusers.py", "the layout of that library's folders bears its name"),
    # `plain` is the absence of a format: what is not packed is held in it, whatever packs the rest
    (
        "recipes/recipe.py",
        "formats/plain.py",
        "what is not packed; codecs, unless it says otherwise",
    ),
    ("plan/draft.py", "placement/*", "what a recipe gets that leaves the placement at auto"),
    ("doctor/*", "devices/*", "libraries that torch is built with, whose versions it judges"),
    ("doctor/*", "dialects/*", "packages of these names, whose versions it judges"),
    # defaults, each stated once, where the person who leaves the choice open will look
    ("recipes/recipe.py", "formats/nf4.py", "the default of a recipe that names no format"),
    ("app/tasks/*", "dialects/*", "what --to is when it is left out"),
    ("app/models.py", "placement/*", "where a model without blocks is put"),
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Module:
    """One source file: its path below the package, its dotted name, its tree."""

    path: Path
    name: str
    tree: ast.Module
    num_lines: int

    @property
    def file(self) -> str:
        """Its path below the package, with slashes on every system."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def top(self) -> str:
        """The top-level package it belongs to; "" for the root's own files."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else ""

    def at(self, node: ast.AST) -> str:
        """Say where a node stands, as an editor can open it."""
        return f"{self.file}:{getattr(node, 'lineno', 0)}"


@cache
def modules() -> tuple[Module, ...]:
    """Read every module of the package."""
    return tuple(read_module(path) for path in sorted(PACKAGE.rglob("*.py")))


def read_module(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(path, name, ast.parse(text, filename=str(path)), text.count("\n"))


@cache
def imports(module: Module) -> tuple[tuple[ast.AST, str], ...]:
    """Return each import of our own package as (node, dotted name), wherever it stands.

    An import inside a function or under TYPE_CHECKING is a dependency like any other.
    """
    found: list[tuple[ast.AST, str]] = []
    package = module.name if module.path.stem == "__init__" else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*parents, node.module or ""]) if node.level else node.module or ""
            names = [f"{base.strip('.')}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(node, name) for name in names if name.split(".")[0] == "outsize"]
    return tuple(found)


def nodes(kind: type[ast.AST]) -> Iterator[tuple[Module, ast.AST]]:
    """Yield every node of a kind in the package, with its module."""
    for module in modules():
        yield from ((module, node) for node in ast.walk(module.tree) if isinstance(node, kind))


def listed(culprits: list[str]) -> str:
    return "\n" + "\n".join(sorted(set(culprits)))


# --- dependencies --------------------------------------------------------------------------------


def test_every_package_has_a_rank_and_every_rank_a_package() -> None:
    """A folder without a rank would be free of all the rules below."""
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert found == RANK_OF.keys(), found ^ RANK_OF.keys()


def test_packages_import_only_lower_ranks() -> None:
    """The root's own files are exempt: `__init__` holds the version, `__main__` starts the cli."""
    culprits = []
    for module in modules():
        for node, name in imports(module):
            target = [*name.split("."), ""][1]
            if not module.top or target not in RANK_OF or target == module.top:
                continue
            if RANK_OF[target] >= RANK_OF.get(module.top, 0):
                culprits.append(f"{module.at(node)} imports {name}")
    assert not culprits, listed(culprits)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """In a circle nothing can be read, tested or replaced alone."""
    known = {module.name for module in modules()}
    graph = {
        module.name: {target_of(name, known) for _, name in imports(module)} for module in modules()
    }
    cycles = [" -> ".join(cycle) for cycle in find_cycles(graph)]
    assert not cycles, listed(cycles)


def target_of(name: str, known: set[str]) -> str:
    """Name the module that an imported name lives in: `a.b.thing` is module `a.b`."""
    return name if name in known else name.rpartition(".")[0]


def find_cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield each cycle that a depth-first walk closes."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> Iterator[list[str]]:
        if name in trail:
            yield [*trail[trail.index(name) :], name]
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                yield from visit(target, [*trail, name])
            done.add(name)

    for start in sorted(graph):
        yield from visit(start, [])


def test_the_walk_finds_a_cycle() -> None:
    """A checker that cannot fail checks nothing."""
    assert list(find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == [["b", "c", "b"]]
    assert not list(find_cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}))


# --- plug-ins ------------------------------------------------------------------------------------


def plug_ins() -> dict[str, str]:
    """Map each plug-in's file, relative to the package, to its name."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.stem
        for folder in PLUG_IN_FOLDERS
        for path in sorted((PACKAGE / folder).glob("*.py"))
        if path.stem != "protocol" and not path.stem.startswith("_")
    }


def mentions(module: Module, known: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (plug-in's file, what was found) where a module names one: as a string, or by import."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and node.value in known.values():
            for plug_in in [file for file, name in known.items() if name == node.value]:
                yield plug_in, f"{module.at(node)} names {node.value!r} of {plug_in}"
    for node, imported in imports(module):
        for plug_in in known:
            dotted = "outsize." + plug_in.removesuffix(".py").replace("/", ".")
            if f"{imported}.".startswith(f"{dotted}."):
                yield plug_in, f"{module.at(node)} imports {plug_in}"


def excuses(file: str, plug_in: str) -> list[int]:
    """Return the indices of the exceptions that let a file name a plug-in."""
    return [
        index
        for index, (who, whom, _) in enumerate(NAME_EXCEPTIONS)
        if fnmatch(file, who) and fnmatch(plug_in, whom)
    ]


def all_mentions() -> Iterator[tuple[str, str, str]]:
    """Yield each (file, plug-in's file, what was found) outside the plug-in and teaching data.

    Teaching data is exempt, as it IS a choice of plug-ins; so are examples, tests and docs, which
    lie outside the package.
    """
    known = plug_ins()
    for module in modules():
        for plug_in, found in mentions(module, known):
            if not is_own(module.file, plug_in) and module.top != "teaching":
                yield module.file, plug_in, found


def is_own(file: str, plug_in: str) -> bool:
    """Whether a file is the plug-in or a helper named after it: `_nf4_kernels.py` is nf4's own."""
    own = PurePosixPath(plug_in)
    return file == plug_in or fnmatch(file, f"{own.parent}/_{own.stem}*.py")


def test_no_file_names_a_plug_in() -> None:
    """The file is the variant: a new one is one file added and none edited.

    Whoever names a plug-in must be edited when one is added.
    """
    culprits = [found for file, plug_in, found in all_mentions() if not excuses(file, plug_in)]
    assert not culprits, listed(culprits)


def test_no_exception_outlives_its_cause() -> None:
    """An exception that nothing needs is a hole for the next mistake."""
    used = {index for file, plug_in, _ in all_mentions() for index in excuses(file, plug_in)}
    stale = [row for index, row in enumerate(NAME_EXCEPTIONS) if index not in used]
    assert not stale, listed([" ".join(row) for row in stale])


# --- size and what is never used -----------------------------------------------------------------


def test_no_file_is_longer_than_can_be_read_in_one_sitting() -> None:
    long = [f"{m.file}: {m.num_lines} lines" for m in modules() if m.num_lines > MAX_FILE_LINES]
    assert not long, listed(long)


def test_no_function_is_longer_than_a_screen() -> None:
    long = []
    for kind in (ast.FunctionDef, ast.AsyncFunctionDef):
        for module, node in nodes(kind):
            assert isinstance(node, kind)
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long.append(f"{module.at(node)} {node.name}: {lines} lines")
    assert not long, listed(long)


FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle"}  # a file must not run code
FORBIDDEN_ATTRIBUTES = {
    "torch.load",  # pickle by another name
    "os.pread",  # not on Windows: base.files reads at an offset everywhere
    "os.fork",  # not on Windows, and a forked process shares a broken CUDA context
}


def forbidden(node: ast.AST) -> str | None:
    """Say what a node does that this package never does, or None."""
    if isinstance(node, ast.Import):
        names = {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_IMPORTS
        return f"import {min(names)}" if names else None
    if isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{alias.name}" for alias in node.names} & FORBIDDEN_ATTRIBUTES
        names |= {(node.module or "").split(".")[0]} & FORBIDDEN_IMPORTS
        return f"import {min(names)}" if names else None
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        return text if text in FORBIDDEN_ATTRIBUTES else None
    if isinstance(node, ast.keyword):
        is_shell = node.arg == "shell" and ast.unparse(node.value) != "False"
        return node.arg if is_shell or node.arg == "trust_remote_code" else None
    if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
        return "trust_remote_code"
    return None


def test_nothing_that_runs_foreign_code_or_works_on_one_system_only() -> None:
    """A model file is data. One that can start a program is a way in."""
    culprits = [
        f"{module.at(node)} {what}" for module, node in nodes(ast.AST) if (what := forbidden(node))
    ]
    assert not culprits, listed(culprits)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path)",
        "os.pread(fd, 1, 0)",
        "os.fork()",
        "run(x, shell=True)",
        "from_pretrained(x, trust_remote_code=True)",
        "f(**{'trust_remote_code': True})",
    ],
)
def test_the_check_for_forbidden_things_finds_them(source: str) -> None:
    assert any(forbidden(node) for node in ast.walk(ast.parse(source)))


# --- the written word ----------------------------------------------------------------------------


DOCUMENTS = [
    path
    for pattern in ("ARCHITECTURE.md", "README.md", "docs/*.md")
    for path in sorted(ROOT.glob(pattern))
]
CODE_SPAN = re.compile(r"`([\w.\-]+(?:/[\w.\-]+)*/?)`")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)[^)]*\)")
PLACEHOLDER = re.compile(r"(^|/)[A-Z]{3,}(?=[-/.]|$)(?!\.md)|\.\.\.")  # runs/NAME/, NNN-title.md
SOURCE_SUFFIXES = {".md", ".py", ".toml", ".yml"}  # other suffixes are the user's own files
OUR_FOLDERS = {"src", "tests", "docs", "examples", "tools", "bench", ".ci", ".github", *RANK_OF}


def paths_named(text: str) -> set[str]:
    """Return the paths of this repository that a document names, in code spans and in links.

    A span with a slash is ours if it starts in a folder of ours: `comfy/lora.py` is somebody
    else's file, and `a-lab/model-9` is no file at all.
    """
    spans = set()
    for span in CODE_SPAN.findall(text):
        is_path = span.split("/")[0] in OUR_FOLDERS if "/" in span else is_source(span)
        spans |= {span} if is_path and not PLACEHOLDER.search(span) else set()
    return spans | set(LINK.findall(text))


def is_source(name: str) -> bool:
    return Path(name).suffix in SOURCE_SUFFIXES


def exists(span: str, document: Path) -> bool:
    """Whether a path is there, counted from the repository, the package or the document.

    A bare file name, such as `protocol.py`, may stand for any file of that name.
    """
    if any((base / span).exists() for base in (ROOT, PACKAGE, document.parent)):
        return True
    return "/" not in span and any(PACKAGE.rglob(span))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_path_a_document_names_exists(document: Path) -> None:
    """A map with streets that are gone is worse than none."""
    named = paths_named(document.read_text(encoding="utf-8"))
    gone = [span for span in named if not exists(span, document)]
    assert not gone, listed(gone)


def test_paths_are_told_from_other_words() -> None:
    text = "`src/outsize` `docs/no.md` `runs/NAME/` `torch.load` `a-lab/model-9` `comfy/lora.py` [x](docs/y.md) `z.py`"
    assert paths_named(text) == {"src/outsize", "docs/no.md", "docs/y.md", "z.py"}


# --- what a start costs --------------------------------------------------------------------------


def test_the_cli_starts_without_torch() -> None:
    """`--help` in a tenth of a second; importing torch alone takes several."""
    program = (
        "import sys; import outsize.cli.main;"
        "print(*sorted({'torch', 'transformers', 'diffusers', 'peft', 'bitsandbytes'} & {*sys.modules}))"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == [], f"loaded by the cli: {child.stdout}"
