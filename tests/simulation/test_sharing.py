from __future__ import annotations

import anyio
import pytest

from asyncrl.simulation.sharing import ProcessorSharing
from asyncrl.testing.clock import run_virtual


def _leaving(*requests: tuple[float, float, float], cancel: dict[int, float] | None = None) -> dict[int, float]:
    """When requests leave that arrive, wait, and then need service: (arrival, own seconds, shared seconds)."""
    left: dict[int, float] = {}

    async def request(station: ProcessorSharing, place: int) -> None:
        arrival, own, shared = requests[place]
        await anyio.sleep(arrival)
        with anyio.move_on_at((cancel or {}).get(place, float("inf"))), station.request():
            await anyio.sleep(own)
            await station.serve(shared)
            left[place] = anyio.current_time()

    async def main() -> None:
        station = ProcessorSharing()
        async with anyio.create_task_group() as tasks:
            for place in range(len(requests)):
                tasks.start_soon(request, station, place)
        assert station.in_flight == 0

    run_virtual(main)
    return left


def test_alone_a_request_takes_its_own_time() -> None:
    """Own and shared seconds add up."""
    assert _leaving((1.0, 0.5, 2.0)) == pytest.approx({0: 3.5})


def test_two_share_equally() -> None:
    """Two that need a second each leave together after two."""
    assert _leaving((0.0, 0.0, 1.0), (0.0, 0.0, 1.0)) == pytest.approx({0: 2.0, 1: 2.0})


def test_an_arrival_slows_and_a_departure_speeds_up() -> None:
    """By hand: alone until 1, then halves; the second has its 0.5 at 2, and the first its last 0.5 at 2.5."""
    assert _leaving((0.0, 0.0, 2.0), (1.0, 0.0, 0.5)) == pytest.approx({1: 2.0, 0: 2.5})


def test_a_request_in_its_own_time_is_in_flight_too() -> None:
    """The other one is served at half speed meanwhile: n counts everything in flight."""
    assert _leaving((0.0, 10.0, 0.0), (0.0, 0.0, 1.0)) == pytest.approx({1: 2.0, 0: 10.0})


def test_who_gives_up_leaves_its_share() -> None:
    """Cancelled at 2, with one second received by each; the other one needs one more, alone."""
    assert _leaving((0.0, 0.0, 2.0), (0.0, 0.0, 5.0), cancel={1: 2.0}) == pytest.approx({0: 3.0})


def test_what_is_no_request_is_served_between_them_or_alone() -> None:
    """An update of weights waits for what is in flight, and does not wait for ever if nothing is."""

    async def main() -> list[float]:
        station = ProcessorSharing()
        await station.serve(1.5)
        alone = anyio.current_time()
        with station.request(), station.request():
            await station.serve(1.5)
        return [alone, anyio.current_time()]

    assert run_virtual(main) == pytest.approx([1.5, 4.5])


def test_work_beside_requests_is_slowed_down() -> None:
    """3 s of work at half speed: 1 s alone, 2 s beside a request, and the last second alone again."""

    async def main() -> float:
        station = ProcessorSharing()

        async def request() -> None:
            await anyio.sleep(1.0)
            with station.request():
                await anyio.sleep(2.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request)
            await station.work(3.0, speed=0.5)
        return anyio.current_time()

    assert run_virtual(main) == pytest.approx(4.0)


def test_many_requests_are_work_conserving() -> None:
    """Whatever the order of arrival and size, a station that is never idle ends after the sum of all work."""
    requests = [(0.001 * i, 0.0, 1.0 + (i * 7919) % 13) for i in range(300)]
    left = _leaving(*requests)
    assert max(left.values()) == pytest.approx(sum(shared for _, _, shared in requests))
