"""Which rows of the KV pool hold what: token-granular slots, and a trie of finished prefixes to reuse.

A slot is one token's keys and values in every layer. A request owns the slots of its own tokens; what it has computed
is put into the trie, where a later request with the same namespace and the same tokens finds it. Nodes that a request
stands on are locked; the others are evicted, least recently used first, when slots run out.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import count

__all__ = ["Node", "PrefixCache"]

_EVICTED_SHARE = 8
# Finding what to evict looks at every cached token, so at least this part of the pool is evicted at once.


class Node:
    """One cached token. ``locks`` counts the requests that stand on it; while it lives, its ancestors do."""

    __slots__ = ("children", "last_use", "locks", "parent", "slot", "token")

    def __init__(self, parent: Node | None, token: int, slot: int) -> None:
        self.parent = parent
        self.token = token
        self.slot = slot
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.last_use = 0


class PrefixCache:
    """Owns ``slots`` slots and the trie."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._roots: dict[Hashable, Node] = {}
        self._clock = count(1)

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def match(self, namespace: Hashable, tokens: Sequence[int]) -> tuple[Node | None, list[int]]:
        """The deepest node of the longest cached prefix, and the slots of that prefix. The node is locked."""
        node = self._roots.get(namespace)
        slots: list[int] = []
        if node is None:
            return None, slots
        now = next(self._clock)
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                break
            child.last_use = now
            slots.append(child.slot)
            node = child
        if not slots:
            return None, slots
        node.locks += 1
        return node, slots

    def unlock(self, node: Node | None) -> None:
        """The request no longer stands on ``node``."""
        if node is not None:
            node.locks -= 1

    def allocate(self, wanted: int) -> list[int] | None:
        """That many slots, evicting unlocked prefixes if need be; None if there are not enough."""
        if len(self._free) < wanted:
            self._evict(max(wanted - len(self._free), self.slots // _EVICTED_SHARE))
        if len(self._free) < wanted:
            return None
        taken = self._free[len(self._free) - wanted :]
        del self._free[len(self._free) - wanted :]
        return taken

    def insert(
        self, namespace: Hashable, tokens: Sequence[int], slots: Sequence[int], *, owned_from: int
    ) -> tuple[Node | None, list[int]]:
        """Cache ``tokens`` with their ``slots``; those before ``owned_from`` are the trie's own already.

        Returns the deepest node, locked, and the slots as the trie has them: where another request cached the same
        token first, its slot is used and ours is given back.
        """
        node = self._roots.setdefault(namespace, Node(None, -1, -1))
        kept = []
        now = next(self._clock)
        for position, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node(node, token, slot)
            elif position >= owned_from and child.slot != slot:
                self._free.append(slot)
            child.last_use = now
            kept.append(child.slot)
            node = child
        if not kept:
            return None, []
        node.locks += 1
        return node, kept

    def clear(self) -> None:
        """Forget every prefix that nobody stands on."""
        self._evict(self.slots)

    def _evict(self, wanted: int) -> None:
        leaves = [(node.last_use, id(node), node) for node in self._leaves() if not node.locks]
        heapq.heapify(leaves)
        while leaves and wanted > 0:
            _, _, node = heapq.heappop(leaves)
            self._free.append(node.slot)
            wanted -= 1
            parent = node.parent
            if parent is None:
                continue
            del parent.children[node.token]
            if parent.parent is not None and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.last_use, id(parent), parent))
        self._roots = {name: root for name, root in self._roots.items() if root.children}

    def _leaves(self) -> list[Node]:
        found = []
        open_nodes = [child for root in self._roots.values() for child in root.children.values()]
        while open_nodes:
            node = open_nodes.pop()
            if node.children:
                open_nodes.extend(node.children.values())
            else:
                found.append(node)
        return found
