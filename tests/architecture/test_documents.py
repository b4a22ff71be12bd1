"""Documents that are made by a script are current, and no link leads nowhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tools.diagrams import DIAGRAMS, IMAGES

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MAX_README_LINES = 150


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md", ":!tests/unit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


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


def test_the_diagrams_are_those_of_their_script() -> None:
    """`python -m tools.diagrams` draws them anew."""
    stale = [name for name, draw in DIAGRAMS.items() if (IMAGES / name).read_text() != draw()]
    assert stale == []


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES
