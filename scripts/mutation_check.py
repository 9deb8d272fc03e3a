"""Mutation testing: change modules in small ways, and count the changes that their tests detect.

A mutant is one module with one operator, constant or condition changed. It is killed if the module's tests fail or do
not end in time; a survivor is a decision that no test verifies. The sample depends only on the seed and the source.

    python scripts/mutation_check.py                        # all modules, 40 mutants each
    python scripts/mutation_check.py fetch/scheduler.py --mutants 200 --show
    python scripts/mutation_check.py --tree ../before --json before.json
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# By module below src/bootseer, its tests below tests.
MODULES = {
    "report/analysis/barriers.py": ["report/test_barriers.py"],
    "checkpoint/layout.py": ["checkpoint/test_layout.py", "checkpoint/test_parity.py", "checkpoint/test_policy.py"],
    "env/life/decide.py": ["env/life/test_decide.py"],
    "fetch/hotset.py": ["fetch/test_hotset.py", "fetch/test_hotset_format.py", "fetch/test_worth.py"],
    "fetch/scheduler.py": [
        "fetch/test_scheduler.py",
        "fetch/test_scheduler_origins.py",
        "fetch/test_scheduler_properties.py",
        "fetch/test_routed.py",
    ],
    "hdfs/choice.py": [
        "hdfs/test_choice.py",
        "hdfs/test_deadlines.py",
        "hdfs/test_schedule.py",
        "hdfs/test_schedule_properties.py",
    ],
    "hdfs/schedule.py": ["hdfs/test_deadlines.py", "hdfs/test_schedule.py", "hdfs/test_schedule_properties.py"],
}
TIMEOUT_S = 120

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip


def mutants(tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    """All possible changes of a module: a description, and the changed module."""
    # frozen=True has no effect on behaviour.
    beside = [top for node in ast.walk(tree) for top in getattr(node, "decorator_list", [])]
    beside += [word for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for word in node.keywords]
    kept = {id(part) for top in beside for part in ast.walk(top)}
    for at, node in enumerate(ast.walk(tree)):
        if id(node) in kept:
            continue
        for name in _changes(node):
            changed = copy.deepcopy(tree)
            found = next(other for other_at, other in enumerate(ast.walk(changed)) if other_at == at)
            _change(found)
            yield f"line {getattr(node, 'lineno', 0)}: {name}", changed


def _changes(node: ast.AST) -> Iterator[str]:
    """The change of a syntax node, and its description, if it can be changed."""
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in _COMPARISONS:
            yield f"{type(operator).__name__} -> {_COMPARISONS[type(operator)].__name__}"
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            yield f"{type(operator).__name__} -> {_OPERATORS[type(operator)].__name__}"
        case ast.BoolOp(op=operator):
            yield "and -> or" if isinstance(operator, ast.And) else "or -> and"
        case ast.Constant(value=bool() | int() as value):
            yield f"{value!r} changed"
        case ast.If() | ast.While() | ast.IfExp():
            yield "condition negated"


def _change(node: ast.AST) -> None:
    match node:
        case ast.Compare():
            node.ops[0] = _COMPARISONS[type(node.ops[0])]()
        case ast.BinOp():
            node.op = _OPERATORS[type(node.op)]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() as value):
            node.value = value + 1
        case ast.If() | ast.While() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)


def is_killed(tree: Path, module: str, text: str, tests: list[str]) -> bool:
    """Whether a module's tests fail if it has this text, in a copy of the package."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package = Path(folder, "bootseer")
        shutil.copytree(tree / "src" / "bootseer", package, ignore=shutil.ignore_patterns("__pycache__"))
        (package / module).write_text(text)
        words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", f"--basetemp={folder}/tests"]
        # The copy precedes the installed package in the path; nothing is written into the checkout.
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{tree / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ran = subprocess.run(
                [sys.executable, "-m", "pytest", *words, *(str(tree / "tests" / test) for test in tests)],
                cwd=tree, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return True
        return ran.returncode != 0


def check(tree: Path, module: str, tests: list[str], count: int, seed: int, jobs: int) -> dict[str, object]:
    """A module's mutants: their number, how many were tried and killed, and the survivors."""
    source = (tree / "src" / "bootseer" / module).read_text()
    if is_killed(tree, module, source, tests):
        sys.exit(f"mutation_check: the tests of {module} fail without a change")
    every = list(mutants(ast.parse(source)))
    tried = random.Random(seed).sample(every, min(count, len(every)))  # noqa: S311
    with ThreadPoolExecutor(jobs) as pool:
        killed = list(pool.map(lambda mutant: is_killed(tree, module, ast.unparse(mutant[1]), tests), tried))
    survivors = [name for (name, _), dead in zip(tried, killed, strict=True) if not dead]
    return {"module": module, "mutants": len(every), "tried": len(tried), "killed": sum(killed), "survivors": survivors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="below src/bootseer (default: all that decide)")
    parser.add_argument(
        "--tree", type=Path, default=Path(__file__).parents[1], help="the checkout whose modules and tests are used"
    )
    parser.add_argument("--mutants", type=int, default=40, help="of each module, at most (default: 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--show", action="store_true", help="list the survivors")
    parser.add_argument("--json", type=Path, help="write the results to a file")
    options = parser.parse_args()
    results = []
    for module in options.modules or MODULES:
        result = check(options.tree.resolve(), module, MODULES[module], options.mutants, options.seed, options.jobs)
        results.append(result)
        print(f"{module}: {result['killed']} of {result['tried']} killed, {result['mutants']} possible", flush=True)  # noqa: T201
        if options.show:
            print(*(f"    survived: {name}" for name in result["survivors"]), sep="\n")  # noqa: T201
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
