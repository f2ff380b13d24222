"""One network for the MTP layers of every family of `families`.

Boundary: one pass of one module on tensors, with weights that are given. Reading them is
`checkpoint_mtp`'s business, the order of passes, caches and verification the engine's.

A module, for the state h_t of the target at position t and the token x_{t+1} that follows:

    z = projection([embedding_norm(embed(x_{t+1})), hidden_norm(h_t)])     [.., 2d] -> [.., d]
    y_t = final_norm(decoder layers(z))               attending to the module's own earlier z
    logits of x_{t+2} = head(y_t)

The first module draws x_{t+2}; further modules, or the same one again, go on from y_t (or from the
final norm's input) in place of h_{t+1}. Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hf_specdec.modeling.placement import head_device
from hf_specdec.modeling.quantized import compute_dtype

from .families import MTPFamily
from .longcat_mtp import LongcatMTPBlock
from .switches import Feed


class MTPModel(PreTrainedModel):
    """MTP modules of one target, whose embedding, rotary positions and head they share.

    Args:
        target: the loaded model the modules belong to; it isn't registered as a submodule.
        family: see [`MTPFamily`].
        num_modules: how many there are.
    """

    # Of the decoder layers, which come from a target that has chosen its attention already.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, target: Any, family: MTPFamily, num_modules: int) -> None:
        self._layers_per_module = _layers_per_module(target)
        super().__init__(mtp_config(target, family, num_modules * self._layers_per_module))
        self.family = family
        self._layer_types = _layer_types(self.config, num_modules * self._layers_per_module)
        rotary = getattr(target.get_decoder(), "rotary_emb", None)
        self._rotary_takes_layer_type = (
            rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        )
        self.n_predict = num_modules
        self.switches = family.switches
        # In a tuple, so that the target doesn't become a part of this module.
        self._target = (target,)
        norm = final_norm(target)
        size, eps = self.config.hidden_size, _epsilon(norm)
        parts = 1 if family.shared_parts else num_modules

        def norms(count: int) -> nn.ModuleList:
            # Any: every family has a norm class of its own with these two parameters.
            norm_class: Any = type(norm)
            return nn.ModuleList([norm_class(size, eps=eps) for _ in range(count)])

        self.embedding_norm, self.hidden_norm = norms(parts), norms(parts)
        self.projection = nn.ModuleList(
            [nn.Linear(2 * size, size, bias=False) for _ in range(parts)]
        )
        layer_class = _layer_class(target)
        self.blocks = nn.ModuleList()
        for i in range(num_modules):
            first = i * self._layers_per_module
            layers = range(first, first + self._layers_per_module)
            self.blocks.append(nn.ModuleList([layer_class(self.config, j) for j in layers]))
        self.final_norm = norms(parts if family.final_norm else 0)
        heads = num_modules if family.own_heads else 0
        self.heads = nn.ModuleList(
            [nn.Linear(size, self.config.vocab_size, bias=False) for _ in range(heads)]
        )

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # As the target's layers can.
        return True

    @property
    def target(self) -> Any:
        """The model the modules belong to."""
        return self._target[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the projections; routers may be float32."""
        projection: Any = self.projection[0]
        return projection.weight.dtype

    @property
    def feed(self) -> Feed:
        """Which state of the target a module reads."""
        return self.switches.feed

    @property
    def num_modules(self) -> int:
        """Modules that are run in turn."""
        return self.n_predict

    @property
    def draft_token_ids(self) -> Tensor | None:
        """Ids of the columns of `logits`; ``None``: all of the vocabulary."""
        return None

    @property
    def token_shift(self) -> int:
        """Entry i is paired with the token at i + this."""
        return self.switches.token_shift

    @property
    def layer_types(self) -> list[str]:
        """For each decoder layer, in order of its index in the cache, the kind of attention."""
        return self._layer_types

    @property
    def layer_windows(self) -> list[int | None]:
        """For each decoder layer its window, ``None`` if it attends to everything."""
        window = getattr(self.config, "sliding_window", None)
        return [window if t == "sliding_attention" else None for t in self.layer_types]

    def with_switches(self, **changes: Any) -> MTPModel:
        """The same modules, fed in another way; `MTPSwitches` names what can be changed."""
        other = copy.copy(self)
        other.switches = replace(self.switches, **changes)
        return other

    def follow_target(self) -> None:
        """Move to where the target's head is, and to its dtype, should it have changed."""
        device = head_device(self.target)
        dtype = compute_dtype(self.target)
        if self.device != device or self.dtype != dtype:
            self.cast(dtype, device)

    def cast(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Change dtype and device; what the target keeps in float32 stays so, routers above all."""
        nn.Module.to(self, device=device, dtype=dtype)
        names: list[str] = []
        if dtype in (torch.float16, torch.bfloat16):
            names += getattr(self.target, "_keep_in_fp32_modules_strict", None) or ()
        if dtype == torch.float16:
            names += getattr(self.target, "_keep_in_fp32_modules", None) or ()
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if any(part in name for part in names):
                tensor.data = tensor.data.float()

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embeddings [B, N, d] of the tokens that follow the states at ``position_ids`` [B, N]."""
        embeds: Tensor = self.target.get_input_embeddings()(token_ids)
        if self.switches.mask_position_0:
            # The embedding's device may not be the positions'.
            embeds = embeds.to(position_ids.device)
            embeds = embeds.masked_fill((position_ids == 0)[..., None], 0.0)
        return embeds

    def forward(
        self,
        hidden_states: Tensor,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        masks: Mapping[str, Tensor] | None = None,
        cache: Cache | None = None,
        module: int = 0,
    ) -> Tensor:
        """Run one module.

        Args:
            hidden_states: h, or what the module before made of it [B, N, d].
            inputs_embeds: see `embed` [B, N, d].
            position_ids: int64 [B, N], of the target's states.
            masks: by layer type, additive [B, 1, N, keys]; ``None`` without padding or window.
            cache: of the MTP layers alone.
            module: which one.

        Returns:
            [B, N, d], what `logits` reads and what is recycled.
        """
        part = 0 if self.family.shared_parts else module
        projection: Any = self.projection[part]
        # Targets on several devices hand over states where their last layer is.
        embedding = self.embedding_norm[part](inputs_embeds.to(projection.weight))
        hidden = self.hidden_norm[part](hidden_states.to(projection.weight))
        pair = [hidden, embedding] if self.switches.hidden_first else [embedding, hidden]
        states = projection(torch.cat(pair, dim=-1))
        position_ids = position_ids + self.switches.position_offset
        first = module * self._layers_per_module
        blocks: Any = self.blocks[module]
        for i, block in enumerate(blocks, start=first):
            layer_type = self.layer_types[i]
            states = block(
                states,
                attention_mask=(masks or {}).get(layer_type),
                position_embeddings=self._rotary(states, position_ids, layer_type),
                position_ids=position_ids,
                cache=cache,
                use_cache=cache is not None,
            )
            if isinstance(states, tuple):
                # Layers with an indexer hand on what it chose.
                states = states[0]
        if self.family.final_norm and self.family.recycles == "normed":
            states = self.final_norm[part](states)
        return states

    def logits(self, states: Tensor, module: int = 0) -> Tensor:
        """Logits [.., V] of what a module returned."""
        if self.family.final_norm and self.family.recycles == "block":
            states = self.final_norm[0 if self.family.shared_parts else module](states)
        if self.family.own_heads:
            return self.heads[module](states)
        return self.target.get_output_embeddings()(states)

    def _rotary(self, states: Tensor, position_ids: Tensor, layer_type: str) -> Any:
        rotary = getattr(self.target.get_decoder(), "rotary_emb", None)
        if rotary is None:
            return None
        more = (layer_type,) if self._rotary_takes_layer_type else ()
        angles = rotary(states, position_ids, *more)
        # It stays where the target has it. Some families hand out one complex tensor.
        if isinstance(angles, tuple):
            return tuple(part.to(states.device) for part in angles)
        return angles.to(states.device)


def mtp_config(target: Any, family: MTPFamily, num_layers: int) -> Any:
    """The config the decoder layers are made with: the target's, but for what goes by layer."""
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    # Checkpoints keep these layers in full precision more often than not; see `checkpoint_mtp`.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for name, value in family.overrides(config, num_layers).items():
        if value is None:
            # Not through __setattr__, which insists on the published type.
            vars(config)[name] = None
        else:
            setattr(config, name, value)
    return config


def final_norm(model: Any) -> nn.Module:
    """The norm behind a decoder's last layer.

    Raises:
        ValueError: it isn't where transformers' decoders have it.
    """
    decoder = model.get_decoder()
    for name in ("norm", "norm_f"):
        norm = getattr(decoder, name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise ValueError(
        f"The target {type(model).__name__} has no module 'norm' in its decoder, so the states "
        "that this drafter reads can't be picked up."
    )


def _epsilon(norm: nn.Module) -> float:
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return float(getattr(norm, name))
    raise ValueError(f"the final norm {type(norm).__name__} has no epsilon that is known")


def _layer_class(target: Any) -> Any:
    if target.config.get_text_config(decoder=True).model_type == "longcat_flash":
        return LongcatMTPBlock
    return type(target.get_decoder().layers[-1])


def _layer_types(config: Any, num_layers: int) -> list[str]:
    """The kind of attention of each layer, as far as caches tell them apart."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    special = ("sliding_attention", "indexed_attention")
    return [t if t in special else "full_attention" for t in types]


def _layers_per_module(target: Any) -> int:
    return len(getattr(target.config.get_text_config(decoder=True), "mtp_layers_block_type", [0]))
