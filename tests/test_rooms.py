"""The rooms of jaxcomp: imports go downwards, and each module has its tests and its own name."""

import ast
import functools
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = ["compressors", "replicas", "exchange", "methods", "steps", "sharded", "measure"]
BESIDE = "launch"  # a room that is tied to no other
ON_TOP = "islands"  # a room that no other imports, with names of its own
# The rooms and single modules of the trainer, from the ground up: readers and models know no
# config, checkpoints no run; programs are on top.
FLOORS = ["checks", "output", "data", "models", "huggingface", "config", "placement", "checkpoints"]
FLOORS += ["examples", "island", "task", "report", "resume", "outputs", "loop", "plan"]
FLOORS += ["program", "__main__"]
PROGRAMS = ["compare", "deepspeed", "export", "generate", "launch"]
TRAINER = sorted(path.relative_to(ROOT / "train") for path in (ROOT / "train").rglob("*.py"))
MODULES = sorted(
    path.relative_to(ROOT / "jaxcomp")
    for path in (ROOT / "jaxcomp").rglob("*.py")
    if path.name != "__init__.py"
)
# Modules without a test file of their own, and where their tests are.
COMPRESSORS, QSDP = "compressors/test_compressors.py", "sharded/test_qsdp.py"
ELSEWHERE = {
    "_checks.py": "methods/test_common.py",
    "_printing.py": "test_printing.py",
    "compressors/base.py": COMPRESSORS,  # what all compressors state, of each
    "compressors/bin_means.py": COMPRESSORS,  # a row there
    "compressors/blocks.py": COMPRESSORS,  # a helper of those that have blocks
    "replicas/fast.py": "steps/test_fast.py",  # the step that is made of it
    "replicas/shards.py": QSDP,
    "flax.py": "users/test_nnx.py",  # whole programs
    "islands/courier.py": "islands/test_island.py",  # its thread
    "islands/programs.py": "islands/test_island.py",  # its arithmetic
    "islands/runs.py": "islands/test_island.py",  # what islands share
    "launch/__main__.py": "launch/test_launch.py",
    "launch/aborts.py": "launch/test_watchdog.py",  # what a watchdog says in an abort
    "launch/addresses.py": "launch/test_distributed.py",
    "launch/agree.py": "launch/test_exits.py",
    "launch/board.py": "launch/test_strangers.py",
    "launch/control.py": "launch/test_supervise.py",
    "launch/copies.py": "train/checkpoints/test_emergency.py",  # of a run
    "launch/arrivals.py": "launch/test_distributed.py",
    "launch/lines.py": "launch/test_handing.py",  # which asks and answers
    "launch/local.py": "launch/test_launch.py",
    "launch/member.py": "launch/test_programs_of_others.py",
    "launch/options.py": "launch/test_launch.py",
    "launch/peers.py": "launch/test_watchdog.py",
    "launch/place.py": "launch/test_launch.py",
    "launch/program.py": "launch/test_restarts.py",
    "launch/progress.py": "launch/test_echo.py",
    "launch/regular.py": "train/test_checks.py",  # which reads such files
    "launch/rendezvous.py": "launch/test_distributed.py",
    "launch/seals.py": "launch/test_strangers.py",
    "launch/signals.py": "train/test_stops.py",  # a run that they stop
    "launch/starting.py": "launch/test_launch.py",
    "launch/variables.py": "launch/test_detect.py",
    "steps/gradient.py": "steps/test_train.py",  # both halves of a step
    "steps/update.py": "steps/test_train.py",
    "methods/moments.py": "methods/test_one_bit_adam.py",  # constants of the Adam family
    "methods/inner.py": "methods/test_cocktail_sgd.py",  # whose inner optimizer it first was
    "methods/mean_variance.py": "methods/test_slamb.py",  # whose variance it is
    "sharded/gathering.py": "sharded/test_gather_once.py",
    "sharded/levels.py": "compressors/test_learned.py",
    "sharded/walks.py": "sharded/test_layers.py",
}


def place(parts):
    """How high a module is: its room's number; `flax` lies on all of them, `schedules` below."""
    name = parts[0].removesuffix(".py")
    if name == ON_TOP:
        return ROOMS.index("methods") + 0.5
    return [*ROOMS, "flax"].index(name) if name in [*ROOMS, "flax"] else -1


def named(path, package="jaxcomp"):
    """The names that a file imports, those in functions too."""
    for node in ast.walk(ast.parse((ROOT / package / path).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from names


def imported(path, package="jaxcomp"):
    """Of these the modules of a package, as tuples of names."""
    for name in named(path, package):
        first, *rest = name.split(".")
        if first == package:
            assert rest, f"{path} imports all of {package}"
            yield tuple(rest)


def test_the_rooms_are_those_of_the_architecture():
    folders = {path.parent.name for path in (ROOT / "jaxcomp").rglob("__init__.py")}
    assert folders == {"jaxcomp", *ROOMS, BESIDE, ON_TOP}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_imports_from_its_room_and_those_below_alone(path):
    above = [".".join(parts) for parts in imported(path) if place(parts) > place(path.parts)]
    assert not above


def test_the_trainer_s_floors_have_all_its_rooms_and_modules():
    inside = {path.stem for path in (ROOT / "train").iterdir() if path.suffix in ("", ".py")}
    assert inside - {"__init__", "__pycache__"} == {*FLOORS, *PROGRAMS}


@pytest.mark.parametrize(
    "path", [*(ROOT / "train").rglob("*.py")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_module_of_the_trainer_imports_from_its_floor_and_those_below_alone(path):
    path = path.relative_to(ROOT / "train")
    room, floor = path.parts[0].removesuffix(".py"), {name: at for at, name in enumerate(FLOORS)}
    reached = {parts[0] for parts in imported(path, "train")} - {room}
    assert not {name for name in reached if name not in floor or floor[name] > floor.get(room, 99)}


@pytest.mark.parametrize("path", [*MODULES, "__init__.py", f"{BESIDE}/__init__.py"], ids=str)
def test_the_launcher_and_the_other_rooms_do_not_import_each_other(path):
    is_inside = str(path).startswith(f"{BESIDE}/")
    assert {parts[0] == BESIDE for parts in imported(path)} <= {is_inside}
    needed = {name.partition(".")[0] for name in named(path)}
    assert not is_inside or needed <= {*sys.stdlib_module_names, "jaxcomp", "jax", "numpy", "tqdm"}
    assert "train" not in needed


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_room_imports_the_islands(path):
    assert path.parts[0] == ON_TOP or ON_TOP not in {parts[0] for parts in imported(path)}


def long_files(folder):
    return [path for path in folder.rglob("*.py") if path.read_text().count("\n") > 500]


@pytest.mark.parametrize("folder", ["jaxcomp", "train", "benchmarks", "tests"])
def test_a_file_holds_one_idea_in_at_most_500_lines(folder, tmp_path):
    for lines in (500, 501):
        (tmp_path / f"{lines}.py").write_text("\n" * lines)
    assert long_files(tmp_path) == [tmp_path / "501.py"]
    assert not long_files(ROOT / folder)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_has_its_tests_where_one_looks_for_them(path):
    tests = path.parent / f"test_{path.name}"
    assert (ROOT / "tests" / ELSEWHERE.get(str(path), tests)).is_file()
    assert str(path) not in ELSEWHERE or not (ROOT / "tests" / tests).exists()


def test_one_module_alone_needs_flax():
    importing = [
        str(path.relative_to(ROOT / "jaxcomp"))
        for path in (ROOT / "jaxcomp").rglob("*.py")
        if re.search(r"^\s*(from|import) (flax|jaxcomp\.flax)\b", path.read_text(), re.MULTILINE)
    ]
    assert importing == ["flax.py"]


def test_what_is_exported_hides_no_module():
    exports = ast.parse((ROOT / "jaxcomp" / "__init__.py").read_text())
    names = {
        alias.asname or alias.name
        for node in exports.body
        if isinstance(node, ast.ImportFrom) and node.module != "jaxcomp"
        for alias in node.names
    }
    inside = {path.stem for path in (ROOT / "jaxcomp").iterdir() if not path.name.startswith("_")}
    assert names & (inside - {"schedules"}) <= {"report"}
    for room in ROOMS:
        text = (ROOT / "jaxcomp" / room / "__init__.py").read_text()
        assert [type(node) for node in ast.parse(text).body] == [ast.Expr], f"{room} exports"


def test_every_line_of_the_slow_tests_names_one():
    names = functools.cache(
        lambda path: [
            node.name
            for node in ast.parse((ROOT / "tests" / path).read_text()).body
            if isinstance(node, ast.FunctionDef)
        ]
    )
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        path, name = line.removesuffix(" QUICK").split("::")
        assert name in names(path), line


def test_the_quick_suite_has_a_slow_test_of_each_room_of_the_library_and_of_train():
    lines = (ROOT / "tests" / "slow.txt").read_text().splitlines()
    room = lambda line: pathlib.Path(line.split("::")[0]).parent
    of_jaxcomp = {path.name for path in (ROOT / "jaxcomp").iterdir()}
    rooms = {path for path in map(room, lines) if {*path.parts[:1]} & {"train", *of_jaxcomp}}
    assert rooms == {room(line) for line in lines if line.endswith(" QUICK")}
