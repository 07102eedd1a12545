"""A rank at work: does what the driver asks for, all ranks the same, until it is told to end.

A refusal (an error of asyncrl's: a gradient that is not finite, a damaged checkpoint) is the answer, whichever rank it
came from, and the ranks go on. Any other error of one of several ranks ends them all, for the others wait for it in the
middle of the same computation; what it says reaches the driver before that.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import AsyncRLError, LearnerError
from asyncrl.learning.modelhost import ModelOptions, load_model
from asyncrl.learning.ranks.driverlink import DriverLink
from asyncrl.learning.ranks.frames import Frame
from asyncrl.learning.ranks.sequences import KnownSequences
from asyncrl.learning.ranks.values import any_class, pack, unpack
from asyncrl.learning.ranks.world import World

__all__ = ["serve"]

METHODS = frozenset(
    {
        "adapter_config",
        "discard_gradients",
        "end_step",
        "export",
        "forward_backward",
        "load_exported",
        "load_state",
        "logprobs",
        "optimizer_step",
        "prepare_step",
        "save_state",
    }
)


def serve(link: DriverLink | None, *, timeout_s: float) -> int:
    """Serve the driver behind ``link``, which rank 0 has and the others do not; returns the exit code."""
    world = World(timeout_s)
    if link is not None:
        world.watch_failures(link.fail)
    rank = _Rank(world, link)
    try:
        while rank.serve_one():
            pass
    except Exception as error:  # noqa: BLE001  this process ends with it, and says so
        text = f"rank {world.rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        print(text, file=sys.stderr, flush=True)
        world.report_failure(text)
        if link is not None:
            link.fail(text)
        return 1
    world.leave()
    return 0


class _Rank:
    def __init__(self, world: World, link: DriverLink | None) -> None:
        self._world = world
        self._link = link
        self._model: Any = None
        self._sequences = KnownSequences()

    def serve_one(self) -> bool:
        """Do the next request; false if it was the last."""
        if self._link is None:
            request = self._world.told()
        else:
            request = self._link.next_request()
            self._world.tell(request)
        if request.header["method"] == "close":
            if self._link is not None:
                self._link.close()
            return False
        answer = self._answer(request)
        if self._link is not None:
            self._link.send(answer)
        return True

    def _answer(self, request: Frame) -> Frame:
        refusal, result = None, None
        try:
            arguments = unpack(request.header["arguments"], request.arrays(), any_class)
            method = request.header["method"]
            result = self._done(method, self._sequences.restored(method, arguments))
        except AsyncRLError as error:
            refusal = _refusal(error)
        except Exception as error:
            if self._world.size > 1:
                raise
            refusal = _refusal(error)
        first = self._world.first_refusal(refusal)
        if first is not None:
            return Frame(header=orjson.loads(first))
        values, arrays = pack("result", result)
        return Frame.of({"result": values}, arrays)

    def _done(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "open":
            return self._load(**arguments)
        if self._model is None:
            raise LearnerError("the learner is not open")
        if method == "weights":
            return self._send_weights()
        if method not in METHODS:
            raise LearnerError(f"a rank of the learner knows no {method!r}")
        return getattr(self._model, method)(**arguments)

    def _load(self, options: ModelOptions, paths: list[str]) -> None:
        # Where the driver finds modules, the user's loss may be; what is found here comes first.
        sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]
        peers = None
        if self._world.size > 1:
            from asyncrl.learning.ranks.sharding import ShardedPeers

            peers = ShardedPeers()
        self._model = load_model(options, peers)

    def _send_weights(self) -> None:
        """One by one, so that no second copy of the model is made here."""
        from safetensors.torch import save

        for name, tensor in self._model.weights().items():
            if self._link is not None:
                self._link.send(Frame(header={"part": name}, payload=save({name: tensor.cpu().contiguous()})))


def _refusal(error: Exception) -> str:
    """The header of the answer, as a text."""
    trace = "" if isinstance(error, AsyncRLError) else traceback.format_exc()
    return orjson.dumps({"error": type(error).__name__, "text": str(error), "trace": trace}).decode()
