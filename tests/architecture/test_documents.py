"""Documents that are made by a script are current, and no link leads nowhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tools.diagrams import DIAGRAMS, IMAGES

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"^[\w./-]+\.(?:py|sh|mjs|js|toml|yaml|yml)$")
RUN = re.compile(r"python3? -m ((?:benchmarks|common|deploy|examples|models|services|tools)[\w.]*)")
MAKE = re.compile(r"(?:`|^ *)make ([a-z][a-z-]*)", re.MULTILINE)
RECORDS = ("CHANGELOG.md", "benchmarks/results/")  # these tell what was
# A user's own files, and a placeholder.
NOT_OURS = {"my.toml", "compose.override.yaml", "training/skills/NOUN.py"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MAX_README_LINES = 150
TOP = {path.name for path in ROOT.iterdir() if path.is_dir()}


def tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "-z", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def documents() -> list[Path]:
    return [ROOT / name for name in tracked("*.md", ":!tests/unit")]


def current_documents() -> list[Path]:
    return [path for path in documents() if not str(path.relative_to(ROOT)).startswith(RECORDS)]


def missing_files(document: Path, files: list[str]) -> list[str]:
    """Return the files that a document names in code and that are not there.

    A folder's README names the files below that folder, other documents those of the whole tree.
    """
    folder = document.parent.relative_to(ROOT)
    is_of_a_folder = document.name == "README.md" and document.parent not in (ROOT, ROOT / "docs")
    inside = f"{folder}/" if is_of_a_folder else ""
    missing = []
    for name in CODE.findall(document.read_text()):
        is_path = "/" in name and name.partition("/")[0] in TOP and " " not in name
        if not (is_path or FILE.match(name)) or name in NOT_OURS:
            continue
        is_there = (ROOT / name).exists() or (document.parent / name).exists()
        if not is_there and not any(
            file.startswith(inside) and file.endswith(f"/{name}") for file in files
        ):
            missing.append(f"{document.relative_to(ROOT)}: {name}")
    return missing


def anchor_of(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def leads_nowhere(document: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return False
    path, _, fragment = target.partition("#")
    place = (document.parent / path) if path else document
    if not place.exists():
        return True
    if not fragment or place.suffix != ".md":
        return False
    return fragment not in {anchor_of(found) for found in HEADING.findall(place.read_text())}


def test_no_link_between_documents_leads_nowhere() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents()
        for target in LINK.findall(document.read_text())
        if leads_nowhere(document, target)
    ]
    assert broken == []


def test_every_file_that_a_document_names_is_there() -> None:
    files = tracked()
    named = [name for document in current_documents() for name in missing_files(document, files)]
    assert named == []


def test_every_command_that_a_document_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for document in current_documents():
        text = document.read_text()
        name = document.relative_to(ROOT)
        missing += [f"{name}: make {goal}" for goal in MAKE.findall(text) if goal not in targets]
        for module in RUN.findall(text):
            path = ROOT / module.rstrip(".").replace(".", "/")
            if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
                missing.append(f"{name}: python -m {module}")
    assert missing == []


def test_the_diagrams_are_those_of_their_script() -> None:
    """`python -m tools.diagrams` draws them anew."""
    stale = [name for name, draw in DIAGRAMS.items() if (IMAGES / name).read_text() != draw()]
    assert stale == []


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES
