"""Prints the requirements that pyproject.toml declares, one a line, for pip to read.

Installing them apart from the code keeps the image's large layers when only the code changes.
"""

from __future__ import annotations

import argparse
import re
import tomllib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pyproject")
    parser.add_argument("--without", action="append", default=[], help="a package to leave out")
    parser.add_argument("--extra", action="append", default=[], help="an extra to add")
    parser.add_argument("--build", action="store_true", help="add what building the wheel needs")
    args = parser.parse_args()

    with open(args.pyproject, "rb") as file:
        pyproject = tomllib.load(file)
    requirements = list(pyproject["project"]["dependencies"])
    for extra in args.extra:
        requirements += pyproject["project"]["optional-dependencies"][extra]
    if args.build:
        requirements += pyproject["build-system"]["requires"]
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if name not in args.without:
            print(requirement)


if __name__ == "__main__":
    main()
