"""How much does the schedule cost, and how close does it come to the best possible one?

Prints one JSON line for each question, nothing else. Four parts, each in its own module:

* ``events`` (``reservations.py``): CPU of the scheduler for each event.
* ``idle`` (``idle.py``): how long the trainer waits, beside the best schedule of the same trace.
* ``binding`` (``idle.py``): what it brings that groups do not age before they begin.
* ``river`` (``rivalry.py``): CPU and stalls of whole runs beside river-client 0.16.0.

    uv run python benchmarks/schedule.py --only events
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping

from benchmarks import idle, reservations, rivalry
from benchmarks.answer import Answer

_PARTS: Mapping[str, Callable[[], Iterator[Answer]]] = {
    "events": reservations.answers,
    "idle": idle.idle_answers,
    "binding": idle.binding_answers,
    "river": rivalry.answers,
}


def main() -> None:
    """Answer every question, or those of one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=_PARTS, help="run one part")
    only = parser.parse_args().only
    for part, answers in _PARTS.items():
        if only in (None, part):
            for answer in answers():
                print(answer.line(), flush=True)


if __name__ == "__main__":
    main()
