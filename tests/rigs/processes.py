"""`ull` and `ulld`, each run to its end in a process of its own."""

import subprocess

from ull.spawn import python_command, python_environment


def ull(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs ull to its end in a process of its own."""
    return subprocess.run(
        [*python_command("ull.cli"), *arguments],
        env=python_environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def ulld(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ulld to its end."""
    return subprocess.run(
        [*python_command("ull.daemon"), *arguments],
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
