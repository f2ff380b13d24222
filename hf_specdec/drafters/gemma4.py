"""Drafting with a Gemma 4 assistant, whose layers attend to the target's keys and values.

An assistant has no keys of its own. Every step of a proposal stands at one and the same position,
joins the newest token's embedding with a state (the target's at the last right token; later what
the assistant makes of its own), and attends to the keys of what the target has verified. They are
read as views of the target's cache; what was rejected is behind the mask. (vLLM's
``gemma4_mtp``; transformers' ``SinglePositionMultiTokenCandidateGenerator``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec.caches.ragged_cache import RaggedCache
from hf_specdec.drafters.base import Drafter, Feed, PickToken, VerifiedStep, check_device
from hf_specdec.modeling.gemma4_mtp import Gemma4MTP, Gemma4MTPSwitches, States, shared_layers
from hf_specdec.modeling.placement import device_of
from hf_specdec.options.config import Method
from hf_specdec.targets.attention import additive
from hf_specdec.targets.prompt import Prompt

# More than anybody drafts; steps can go on for as long as wished.
_MOST = 64
# What transformers fills in where nobody said how many.
_UNSAID = (None, 20)


@dataclass(frozen=True)
class _Context:
    """What every step of a proposal attends to, and from where.

    Attributes:
        shared: by layer type, keys and values ``[n, heads, T, dim]``.
        visible: by layer type bool ``[n, 1, 1, T]``.
        position_ids: int64 ``[n, 1]``.
    """

    shared: States
    visible: Mapping[str, torch.Tensor]
    position_ids: torch.Tensor


class Gemma4Drafter(Drafter):
    """Drafts with a Gemma 4 assistant.

    Args:
        model: a ``Gemma4AssistantForCausalLM`` or ``Gemma4UnifiedAssistantForCausalLM``, or a
            `Gemma4MTP` whose switches are turned.
        switches: how a model is fed.
    """

    method: ClassVar[Method | None] = "mtp"
    runs_target_modules: ClassVar[bool] = True
    # For transformers' own loop, which hands out the keys with the outputs.
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {
        "output_hidden_states": -1,
        "return_shared_kv_states": True,
    }

    def __init__(self, model: Any, switches: Gemma4MTPSwitches | None = None):
        self.network = model if isinstance(model, Gemma4MTP) else Gemma4MTP(model, switches)
        self.model = self.network.model
        self._layers: dict[str, int] = {}
        self._embeddings: Any = None
        self._cache: RaggedCache | None = None
        self._context: _Context | None = None
        self._hidden_states: torch.Tensor | None = None

    @property
    def feed(self) -> Feed:
        """Which state of the target it reads."""
        return self.network.switches.feed

    @property
    def max_draft_tokens(self) -> int:
        """No limit of the assistant's own."""
        return _MOST

    @property
    def default_draft_tokens(self) -> int:
        """What the assistant's generation_config says, or 1."""
        said = getattr(self.model.generation_config, "num_assistant_tokens", None)
        return 1 if said in _UNSAID else said

    def check_config(self, target: PreTrainedModel) -> None:
        """Raise ValueError unless the target has the keys that the assistant attends to."""
        config: Any = target.config.get_text_config(decoder=True)
        name = type(target).__name__
        layers = shared_layers(config)
        missing = sorted(set(self.network.layer_types) - set(layers))
        if missing:
            raise ValueError(
                f"assistant_model attends to the keys of its target, but {name} (model_type="
                f"{config.model_type!r}) shares none of its {' and '.join(missing)} layers. Use it "
                "with the Gemma 4 model that it was trained for."
            )
        width = self.network.backbone_hidden_size
        if width != config.hidden_size:
            raise ValueError(
                f"assistant_model was trained for a target of backbone_hidden_size={width}, but "
                f"{name} has hidden_size={config.hidden_size}. Use the assistant of this target."
            )
        own = self.network.config
        if own.vocab_size != config.vocab_size:
            raise ValueError(
                f"assistant_model knows vocab_size={own.vocab_size} tokens, but {name} has "
                f"vocab_size={config.vocab_size}. Use the assistant of this target."
            )
        for layer_type in self.network.layer_types:
            mine = _shape_of_keys(own, own.layer_types.index(layer_type))
            theirs = _shape_of_keys(config, layers[layer_type])
            if mine != theirs:
                raise ValueError(
                    f"assistant_model's {layer_type} layers read keys with {mine}, but those of "
                    f"{name} have {theirs}. Use the assistant of this target."
                )

    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError unless sizes, device and dtype fit the target."""
        self.check_config(target)
        check_device(self.model, target, self.device_for(target))
        self.network.check_token_ordering()
        size, own = (getattr(model, "tp_size", None) or 1 for model in (target, self.model))
        if own != size:
            raise ValueError(
                f"assistant_model attends to the keys of the target, whose heads are spread over "
                f"{size} rank(s), and its own heads over {own}. Load both with distributed_config="
                f"DistributedConfig(tp_size={size}), or both without."
            )
        if self.model.dtype != target.dtype:
            raise ValueError(
                f"assistant_model is in {self.model.dtype}, but attends to the keys of the target, "
                f"which are in {target.dtype}. Load it with dtype={target.dtype}, or call "
                f"assistant_model.to({target.dtype})."
            )

    def device_for(self, target: PreTrainedModel) -> torch.device:
        """Where the keys are that it attends to; a head tied to the embedding may be elsewhere."""
        decoder: Any = target.get_decoder()
        layers = shared_layers(target.config.get_text_config(decoder=True))
        return device_of(decoder.layers[max(layers.values())])

    def start(
        self,
        target: PreTrainedModel,
        prompt: Prompt | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """See `Drafter.start`."""
        self._first_proposal = True
        self._cache, self._context, self._hidden_states = None, None, None
        self._embeddings = target.get_input_embeddings()
        self._layers = shared_layers(target.config.get_text_config(decoder=True))

    def share_cache(self, cache: Cache) -> None:
        """See `Drafter.share_cache`."""
        if not isinstance(cache, RaggedCache):
            raise ValueError(
                f"assistant_model attends to the keys of the target, and a {type(cache).__name__} "
                "can't be shared with it. It needs a target whose layers are all attention."
            )
        self._cache = cache

    def observe(self, step: VerifiedStep) -> None:
        """Keep the state ``[n, D]`` at the last right position."""
        self._hidden_states = step.last_states()

    def propose(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: PickToken | None = None
    ) -> torch.Tensor:
        """See `Drafter.propose`."""
        assert self._hidden_states is not None, "observe() comes before propose()"
        context, network = self._context or self._context_of_cache(), self.network
        # With the keys, not with the target's head, should these be on different devices.
        home, device = token_ids.device, self.model.device
        states = self._hidden_states.to(device)
        masks = additive(context.visible, states.dtype)
        draft_ids: list[torch.Tensor] = []
        while len(draft_ids) < num_draft_tokens and not (pick is not None and pick.done):
            embeds = self._embeddings(token_ids).to(states.device)
            inner = network.step(embeds, states, context.position_ids, context.shared, masks)
            token_ids = (
                network.most_likely(inner)
                if pick is None
                else pick(len(draft_ids), network.logits(inner), None)
            )
            draft_ids.append(token_ids)
            if len(draft_ids) < num_draft_tokens:
                states = network.recycle(inner)
        return torch.stack(draft_ids, dim=1).to(home)

    def keep_rows(self, order: Sequence[int]) -> None:
        """Reorder the kept states; the cache has been reordered by its owner."""
        assert self._hidden_states is not None
        index = torch.tensor(order, device=self._hidden_states.device)
        self._hidden_states = self._hidden_states[index]

    def finish(self) -> None:
        """Let go of the target, its keys and the states."""
        self._cache, self._context, self._hidden_states = None, None, None
        self._embeddings = None

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        """See `Drafter.get_candidates`."""
        if not kwargs.get("is_first_iteration"):
            self._context = self._context_of_outputs(input_ids.shape[1] - 1, **kwargs)
        return super().get_candidates(input_ids, **kwargs)

    def _context_of_cache(self) -> _Context:
        """The verified tokens of every row, where they are in the target's cache."""
        cache, device = self._cache, self.model.device
        assert cache is not None, "share_cache() comes before propose()"
        ahead = self.network.switches.position_offset
        visible = cache.kept_masks(ahead)
        shared: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in self.network.layer_types:
            keys, values = cache.kept_states(self._layers[name])
            # There already, unless the target's last layers are on several devices.
            shared[name] = keys.to(device), values.to(device)
        positions = (cache.lengths - 1 + ahead - cache.offsets).clamp(min=0)
        masks = {name: visible[name].to(device) for name in shared}
        return _Context(shared, masks, positions[:, None].to(device))

    def _context_of_outputs(
        self, length: int, model_outputs: Any, n_last_matches: Any, **kwargs: Any
    ) -> _Context:
        """The same in transformers' own loop: one row, and keys that come with the outputs.

        Args:
            length: tokens whose keys count.
            model_outputs: of the last forward, which may have run rejected tokens behind these.
            n_last_matches: how many drafts of it were right.
        """
        run = model_outputs.hidden_states[-1].shape[1]
        rejected = 0 if self._first_proposal else run - 1 - int(n_last_matches)
        query = length - 1 + self.network.switches.position_offset
        shared, visible = {}, {}
        for name in self.network.layer_types:
            keys, values = model_outputs.shared_kv_states[name]
            count = keys.shape[2]
            slots = torch.arange(count, device=keys.device) + (length + rejected - count)
            seen = slots < length
            if name == "sliding_attention":
                seen &= slots > query - self.network.config.sliding_window
            shared[name], visible[name] = (keys, values), seen[None, None, None]
        position = torch.full((1, 1), query, device=self.model.device)
        return _Context(shared, visible, position)


def _shape_of_keys(config: Any, layer: int) -> dict[str, Any]:
    """What the readers and the writer of a layer's keys must agree on."""
    own = config.per_layer_config[layer]
    shape = {"num_key_value_heads": own.num_key_value_heads, "head_dim": own.head_dim}
    if config.layer_types[layer] == "sliding_attention":
        shape["sliding_window"] = own.sliding_window
    return shape
