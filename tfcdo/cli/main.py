"""The entry point of the `tfcdo` command: whatever the user got wrong is told in one line."""

from __future__ import annotations

import sys

# What pip calls the module that is missing, and the extra that brings it.
_EXTRAS = {
    "click": ("click", "cli"),
    "rich": ("rich", "cli"),
    "matplotlib": ("matplotlib", "plot"),
    "sklearn": ("scikit-learn", "demo"),
}


def main() -> None:
    """Runs the command line and exits with its status."""
    try:
        from tfcdo.cli import commands

        sys.exit(commands.run(sys.argv[1:]))
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        package, extra = _EXTRAS[error.name]
        sys.exit(f"tfcdo: {package} is not installed: pip install 'tfcdo[{extra}]'")


if __name__ == "__main__":
    main()
