"""asyncrl: asynchronous reinforcement learning of language models, with a bound on policy age that always holds.

Names are loaded when they are first used, so that ``import asyncrl`` is quick and imports no torch. They and their
homes are listed in ``__init__.pyi``.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
