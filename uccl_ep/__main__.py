# SPDX-License-Identifier: Apache-2.0
"""`python -m uccl_ep`: the command line, and the two questions that a build system asks."""

from __future__ import annotations

import sys

from . import paths


def main() -> None:
    answers = {"--include-dir": paths.include_dir, "--library-dir": paths.library_dir}
    if len(sys.argv) == 2 and sys.argv[1] in answers:
        try:
            print(answers[sys.argv[1]]())
        except ImportError as error:
            sys.exit(f"uccl_ep: {error}")
        return
    from .cli import main as cli

    cli()


if __name__ == "__main__":
    main()
