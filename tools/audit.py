"""Checks every pinned version for known vulnerabilities: `make audit`.

pip-audit asks the package index. It takes a package that the index does not know for one without
vulnerabilities; here each of them is named, and an index that answers for none is no good news.
Exit codes: 0 nothing known, 1 vulnerabilities, or some package was not checked, 2 none was.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

OPTIONS = ("--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off")
"""Nothing is resolved or installed: the file has every version."""


def main(requirements: str = "constraints.txt") -> int:
    """Check the versions in a file; print the outcome, and return the exit code."""
    command = [sys.executable, "-m", "pip_audit", f"--requirement={requirements}", *OPTIONS]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(run.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (run.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1]
        print(f"nothing was checked: the package index cannot be reached ({last[:200]})")
        return 2
    lines, code = outcome(packages)
    print("\n".join(lines))
    return code


def outcome(packages: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Return the lines to print and the exit code for pip-audit's list of packages."""
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        return ["nothing was checked: the package index knows none of the versions"], 2
    lines = [
        f"{package['name']} {package['version']}: {found['id']}, mended in "
        f"{', '.join(found['fix_versions']) or 'no version yet'}"
        for package in packages
        for found in package.get("vulns", [])
    ]
    num_known = len(lines)
    if unknown:
        lines.append(f"not checked, since the index does not know them: {', '.join(unknown)}")
    checked = len(packages) - len(unknown)
    lines.append(f"{checked} of {len(packages)} versions checked: {num_known} vulnerabilities")
    return lines, 1 if num_known or unknown else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
