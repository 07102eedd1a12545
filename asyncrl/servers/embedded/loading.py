"""From server options to a service: reads the model and its tokenizer. Blocking, and where torch is first imported."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from asyncrl.concurrency.worker import Worker
from asyncrl.servers.embedded.engine import Engine
from asyncrl.servers.embedded.model import DecoderModel
from asyncrl.servers.embedded.options import ServerOptions
from asyncrl.servers.embedded.service import Service
from asyncrl.servers.wireserver import ServerLimits

__all__ = ["load_service"]


def load_service(options: ServerOptions, worker: Worker) -> Service:
    """Load everything in the thread that will compute, because torch keeps its number of threads for each."""
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = DecoderModel(
        options.model, dtype=getattr(torch, options.dtype), device=device, slots=options.max_total_tokens
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    engine = Engine(
        model, tokenizer, max_running_requests=options.max_running_requests, random_seed=options.random_seed
    )
    limits = ServerLimits(
        context_length=options.context_length or model.config.max_position_embeddings,
        max_total_tokens=model.slots,
        max_running_requests=options.max_running_requests,
        vocab_size=model.config.vocab_size,
    )
    return Service(engine, tokenizer, worker=worker, limits=limits, eos=_eos(options, model.config))


def _eos(options: ServerOptions, config: Any) -> frozenset[int]:
    """End-of-sequence ids of the model's configuration and of its generation configuration."""
    found: set[int] = set()
    sources = [config]
    if (options.model / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(options.model, local_files_only=True))
    for source in sources:
        ids = source.eos_token_id
        found.update([] if ids is None else ids if isinstance(ids, list) else [ids])
    return frozenset(found)
