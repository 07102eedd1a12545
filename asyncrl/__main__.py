"""``python -m asyncrl`` is the ``asyncrl`` command."""

from __future__ import annotations

import sys

from asyncrl.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
