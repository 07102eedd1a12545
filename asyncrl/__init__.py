"""asyncrl: asynchronous reinforcement learning of language models, with a bound on policy age that always holds.

Names are loaded when they are first used, so that ``import asyncrl`` is quick and imports no torch. They and their
homes are listed in ``__init__.pyi``.
"""

from __future__ import annotations

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """A public name, loaded now; ``__version__`` is that of the installed package."""
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    return _load(name)
