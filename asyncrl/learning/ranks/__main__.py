"""What each rank runs: ``python -m asyncrl.learning.ranks``, by itself or under torchrun.

    torchrun .. -m asyncrl.learning.ranks --listen 0.0.0.0:29400 --token-file token

Rank 0 listens there for one driver; all ranks end with it. Everything else comes from the driver.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.learning.ranks.driverlink import DriverLink, die_with_parent
from asyncrl.learning.ranks.launch import read_token, split_address

__all__ = ["main"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.learning.ranks", description="A rank of a learner.")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--connect", type=Path, metavar="SOCKET", help="Unix socket of the driver that started the ranks")
    way.add_argument("--listen", metavar="HOST:PORT", help="where rank 0 waits for the driver")
    parser.add_argument("--token-file", type=Path, help="file with the secret that the driver knows too")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="how long ranks wait for each other")
    return parser.parse_args()


def main() -> int:
    """Connect to the driver before torch is imported, so that nobody waits for what cannot be; then serve it."""
    arguments = _arguments()
    die_with_parent()
    link = None
    from asyncrl.learning.ranks.world import World

    try:
        if World.is_first():
            link = _link(arguments)
    except ConfigError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    from asyncrl.learning.ranks.service import serve

    return serve(link, timeout_s=arguments.timeout_s)


def _link(arguments: argparse.Namespace) -> DriverLink:
    if arguments.connect is not None:
        return DriverLink.connected(arguments.connect)
    if arguments.token_file is None:
        raise ConfigError("--listen needs --token-file: a file with a secret that the driver knows too")
    host, port = split_address(arguments.listen, "--listen")
    return DriverLink.accepted(host, port, read_token("--token-file", arguments.token_file))


if __name__ == "__main__":
    sys.exit(main())
