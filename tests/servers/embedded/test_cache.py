"""The KV pool: no slot is lost or held twice, and a cached prefix is what was computed for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.servers.embedded.cache import Node, PrefixCache


def cached(cache: PrefixCache, tokens: list[int], namespace: str = "a") -> list[int]:
    """Slots of the longest cached prefix."""
    node, slots = cache.match(namespace, tokens)
    cache.unlock(node)
    return slots


def keep(cache: PrefixCache, tokens: list[int], namespace: str = "a") -> list[int]:
    """Compute ``tokens`` and leave them in the cache."""
    slots = cache.allocate(len(tokens))
    assert slots is not None
    node, kept = cache.insert(namespace, tokens, slots, owned_from=0)
    cache.unlock(node)
    return kept


def test_a_prefix_is_found_with_its_slots() -> None:
    """As far as the tokens agree."""
    cache = PrefixCache(8)
    slots = keep(cache, [1, 2, 3])
    assert cached(cache, [1, 2, 9, 3]) == slots[:2]
    assert cached(cache, [2]) == []


def test_namespaces_share_nothing() -> None:
    """The same tokens under another key are computed anew."""
    cache = PrefixCache(8)
    keep(cache, [1, 2, 3])
    assert cached(cache, [1, 2, 3], "b") == []


def test_what_another_request_cached_first_is_used_and_ours_given_back() -> None:
    """Two requests that computed the same tokens end with one copy."""
    cache = PrefixCache(8)
    first = keep(cache, [1, 2])
    assert keep(cache, [1, 2, 3])[:2] == first
    assert cache.free == 8 - 3


def test_the_least_recently_used_is_evicted_first() -> None:
    """Leaf by leaf, so that what is left can still be found."""
    cache = PrefixCache(4)
    keep(cache, [1, 2])
    keep(cache, [3, 4])
    assert len(cached(cache, [1, 2])) == 2
    assert cache.allocate(1) is not None
    assert len(cached(cache, [1, 2])) == 2
    assert len(cached(cache, [3, 4])) == 1


def test_what_a_request_stands_on_is_not_evicted() -> None:
    """Not for another request, and not by a flush."""
    cache = PrefixCache(4)
    keep(cache, [1, 2, 3])
    node, _ = cache.match("a", [1, 2])
    assert cache.allocate(3) is None
    assert len(cached(cache, [1, 2, 3])) == 2
    cache.clear()
    assert len(cached(cache, [1, 2])) == 2
    cache.unlock(node)
    cache.clear()
    assert cache.free == 4


def test_a_prefix_in_use_stays_when_what_follows_it_is_evicted() -> None:
    """A request may stand in the middle of what is cached."""
    cache = PrefixCache(4)
    slots = keep(cache, [1, 2, 3, 4])
    node, _ = cache.match("a", [1, 2])
    assert cache.allocate(3) is None
    assert cached(cache, [1, 2, 3, 4]) == slots[:2]
    cache.unlock(node)


def test_a_full_pool_is_evicted_in_bulk() -> None:
    """One search for what to evict serves many allocations: it looks at every cached token."""
    cache = PrefixCache(64)
    keep(cache, [*range(64)])
    assert cache.allocate(1) is not None
    assert cache.free == 64 // 8 - 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=60))
@pytest.mark.timeout(60)
def test_no_slot_is_lost_or_held_twice(operations: list[tuple[bool, list[int]]]) -> None:
    """Whatever requests of few tokens come and go, in a pool that is too small for them."""
    cache = PrefixCache(12)
    content: dict[int, tuple[int, ...]] = {}
    held: list[tuple[Node | None, list[int]]] = []
    for begins, tokens in operations:
        if not begins and held:
            node, _ = held.pop(0)
            cache.unlock(node)
            continue
        found, slots = cache.match("a", tokens)
        assert [content[slot] for slot in slots] == [tuple(tokens[: i + 1]) for i in range(len(slots))]
        new = cache.allocate(len(tokens) - len(slots))
        if new is None:
            cache.unlock(found)
            continue
        for i, slot in enumerate(new, len(slots)):
            assert all(slot not in others for _, others in held)
            content[slot] = tuple(tokens[: i + 1])
        node, kept = cache.insert("a", tokens, [*slots, *new], owned_from=len(slots))
        cache.unlock(found)
        held.append((node, kept))
    for node, _ in held:
        cache.unlock(node)
    cache.clear()
    assert cache.free == 12
