"""Calls with static shapes, and what was compiled for them, without a compiler."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import CompileConfig, LlamaConfig
from transformers.models.auto import AutoModelForCausalLM

from hf_specdec import static_shapes


class Graphs:
    """A backend for ``torch.compile`` that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.compiled: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.compiled.append(graph)
        return graph.forward

    def __deepcopy__(self, memo: Any) -> "Graphs":
        # generate() copies what it is given; it is this list that counts.
        return self

    def __len__(self) -> int:
        return len(self.compiled)

    @property
    def arguments(self) -> dict[str, Any]:
        """For ``generate``: static shapes, and one graph a function or an error."""
        config = CompileConfig(backend=self, fullgraph=True)
        return {"cache_implementation": "static", "compile_config": config}


class Recordings:
    """What CUDA graphs do, on CPU: the inputs' addresses are those of the recording, for ever.

    Put in the place of `static_shapes.record`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.replays = 0

    def record(self, function: Callable, pool: Callable, device: torch.device) -> Any:
        self.count += 1
        function()
        outputs = tuple(output.clone() for output in function())
        for output in outputs:
            # Recording computes nothing yet.
            output.fill_(-1)

        def replay() -> None:
            self.replays += 1
            for output, value in zip(outputs, function(), strict=True):
                output.copy_(value)

        return static_shapes.Recording(replay, outputs)


def small_target(**fields: Any) -> Any:
    """A Llama of two layers with peaked random logits, a model of its own for every call."""
    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "initializer_range": 0.4,
    }
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**values, **fields})).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
