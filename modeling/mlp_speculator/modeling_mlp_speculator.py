"""The MLP speculator network.

Boundary: hidden states and token ids in, logits or draft ids out. When to draft, how many tokens,
and what the target makes of them is the engine's business.

The maths, with d the target's hidden size, D the inner size, n heads, V the vocabulary:

    s = h                   the target's state after its final norm, as its lm_head reads it
    s = rms(s) / sqrt(2)    only with scale_input
    for head i = 0 .. n-1:
        s = proj_i(s) + (emb_weight / state_weight) * emb_i[token_i]
        s = gelu(ln_i.weight * rms(s) + ln_i.bias)
        logits_i = head_i(s)
        token_{i+1} = the token chosen from logits_i

where rms(x) = x / sqrt(mean(x^2) + 1e-6) without subtraction of the mean, gelu is the exact (erf)
one, state_weight = 0.5 ** (0.5 / n) and emb_weight = sqrt((1 - state_weight^2) * D / 2). Both
constants follow from the config's n even when fewer heads are run. token_0 is the token the target
chose from h, so head 0 predicts the token after it.

Source: Wertheimer et al. 2024, "Accelerating Production LLMs with Combined Token/Embedding
Speculators" (arXiv 2404.19124), and IBM's published checkpoints (``*-accelerator``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from hf_specdec.modeling.card_on_save import CardOnSave
from hf_specdec.modeling.checkpoint_files import HUB_ARGUMENTS, read_weights_files
from hf_specdec.modeling.largest import index_of_largest

from .arguments import (
    check_draft_token_ids,
    check_last_position,
    check_teacher_forced,
    check_tree,
    checked_heads,
)
from .candidates import grow_candidates
from .configuration_mlp_speculator import MLPSpeculatorConfig
from .loading import check_dtypes, check_files, check_loaded, tied_weight_names
from .loss import IGNORE_INDEX, mean_cross_entropy
from .network import MLPSpeculatorNetwork, SpeculatorNorm
from .target_binding import TargetBinding

ChooseFn = Callable[[int, Tensor, Tensor | None], Tensor]


@dataclass
class MLPSpeculatorOutput(ModelOutput):
    """Result of a teacher-forced pass.

    Attributes:
        loss: sum over heads of their mean cross-entropy, float32 scalar; ``None`` without labels.
        logits: [heads, B, N, V], or [heads, B, N, Vd] with a reduced draft vocabulary; ``None``
            when they were not asked for.
        head_losses: mean cross-entropy of each head, float32 [heads]; ``None`` without labels.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    head_losses: Tensor | None = None


class MLPSpeculatorPreTrainedModel(CardOnSave, TargetBinding, PreTrainedModel):  # type: ignore[misc]
    """The complete MLP speculator.

    The class name is the one that the published configs give as ``architectures``.

    Args:
        config: see [`MLPSpeculatorConfig`].
    """

    config_class = MLPSpeculatorConfig
    config: MLPSpeculatorConfig
    # Also the prefix transformers adds to the keys of a checkpoint written without it.
    base_model_prefix = "speculator"
    main_input_name = "hidden_states"
    _no_split_modules = ["MLPSpeculatorNetwork"]
    # There is no attention, so whatever implementation was asked for the target is fine here too.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: MLPSpeculatorConfig) -> None:
        super().__init__(config)
        self.speculator = MLPSpeculatorNetwork(config)
        self._tied_weights_keys = tied_weight_names(config)
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: Any,
        *model_args: Any,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a checkpoint, as transformers does, and refuse one that does not fill the network.

        Read are safetensors (one file, shards, tied weights stored once) and pytorch ``.bin`` files
        (tied weights stored under all their names; always with ``weights_only``), keys with or
        without the prefix ``speculator.``, in a dtype of 16 bits or more.

        Args:
            pretrained_model_name_or_path: folder or repository, as for every transformers model.
            *model_args: passed on.
            ignore_mismatched_sizes: initialise weights of another shape anew instead of raising.
            output_loading_info: return ``(model, loading_info)``.
            **kwargs: passed on.

        Raises:
            ValueError: naming the weights that are missing, of the wrong shape or dtype, unused, or
                tied by the config but different in the checkpoint; the file that is cut off,
                damaged, in another folder, or a pickle of more than tensors.
        """
        files = None
        if kwargs.get("state_dict") is None:
            files = read_weights_files(pretrained_model_name_or_path, **kwargs)
        if files is not None:
            kwargs["config"] = _config_for(pretrained_model_name_or_path, kwargs)
            with torch.device("meta"):
                network = MLPSpeculatorNetwork(kwargs["config"])
            num_parameters = sum(p.numel() for p in network.parameters())
            check_files(kwargs["config"], pretrained_model_name_or_path, files, num_parameters)
        # Mismatched shapes are let through here so that check_loaded can name them.
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path,
            *model_args,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **kwargs,
        )
        model, loading_info = loaded
        check_loaded(
            model.config,
            pretrained_model_name_or_path,
            loading_info,
            model.all_tied_weights_keys,
            ignore_mismatched_sizes,
        )
        if files is not None and getattr(model, "hf_quantizer", None) is None:
            check_dtypes(pretrained_model_name_or_path, files)
        if (ids := model.speculator.draft_token_ids) is not None and not ids.is_meta:
            check_draft_token_ids(model.config, ids)
        return (model, loading_info) if output_loading_info else model

    def initial_state(self, hidden_states: Tensor) -> Tensor:
        """State before the first stage.

        Args:
            hidden_states: the target's states after its final norm [.., d], any floating dtype.

        Returns:
            [.., d] in the speculator's dtype, normalised if the config says ``scale_input``.
        """
        return self.speculator.initial_state(hidden_states)

    def stage(self, index: int, state: Tensor, token_ids: Tensor) -> Tensor:
        """State of head ``index``.

        Args:
            index: the head, 0 .. n-1.
            state: [.., d] from ``initial_state`` for head 0, else [.., D] of the head before.
            token_ids: the token before the one head ``index`` predicts, int64 [..].

        Returns:
            [.., D].

        Raises:
            RuntimeError: with ``share_target_weights`` before ``bind_target``.
        """
        return self.speculator.stage(index, state, token_ids)

    def head_logits(self, index: int, state: Tensor) -> Tensor:
        """Logits [.., V] of head ``index`` for its state [.., D]; [.., Vd] with reduced drafts.

        Raises:
            RuntimeError: with ``share_target_weights`` before ``bind_target``.
        """
        return self.speculator.head_logits(index, state)

    def draft_ids(self, index: Tensor) -> Tensor:
        """Target ids of positions in the last dimension of the logits; int64, any shape."""
        return self.speculator.draft_ids(index)

    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        labels: Tensor | None = None,
        num_heads: int | None = None,
        return_logits: bool = True,
    ) -> MLPSpeculatorOutput:
        """Run the heads on given tokens (teacher forcing).

        ``input_ids[:, t]`` is the token that follows the position ``hidden_states[:, t]`` was
        computed at: for a text x and its target states h, ``hidden_states = h[:, :N]`` and
        ``input_ids = x[:, 1:]``. Head i reads ``input_ids[:, t + i]`` and predicts the token after
        it.

        Args:
            hidden_states: the target's states after its final norm [B, N, d].
            input_ids: int64 [B, >= N + heads - 1].
            labels: int64 [B, >= N + heads], aligned with ``input_ids`` (they may be the same
                tensor): head i at position t is trained on ``labels[:, t + i + 1]``. -100 is left
                out, and so is a token a reduced draft vocabulary does not cover.
            num_heads: run only the first heads; all n if ``None``.
            return_logits: whether to return the logits; ``False`` saves their memory where only
                the losses are read.

        Returns:
            [`MLPSpeculatorOutput`] with logits [heads, B, N, V] or [heads, B, N, Vd]. Losses are
            computed in float32; the loss is the sum over heads.

        Raises:
            ValueError: for shapes that do not fit.
            RuntimeError: with ``share_target_weights`` before ``bind_target``.
        """
        heads = checked_heads(self.config, "num_heads", num_heads)
        check_teacher_forced(self.config, hidden_states, input_ids, labels, heads)
        length = hidden_states.shape[1]
        if labels is not None:
            labels = self.speculator.draft_labels(labels, IGNORE_INDEX)
        state = self.initial_state(hidden_states)
        logits, losses = [], []
        for i in range(heads):
            state = self.stage(i, state, input_ids[:, i : i + length])
            head_logits = self.head_logits(i, state)
            if labels is not None:
                losses.append(mean_cross_entropy(head_logits, labels[:, i + 1 : i + 1 + length]))
            if return_logits:
                logits.append(head_logits)
        head_losses = torch.stack(losses) if losses else None
        return MLPSpeculatorOutput(
            loss=None if head_losses is None else head_losses.sum(),
            logits=torch.stack(logits) if logits else None,
            head_losses=None if head_losses is None else head_losses.detach(),
        )

    @torch.no_grad()
    def propose(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        num_draft_tokens: int | None = None,
        choose: ChooseFn | None = None,
    ) -> Tensor:
        """Draft a chain of tokens: every head reads the token chosen from the head before.

        Args:
            hidden_states: the target's state after its final norm [B, d], from which it chose
                ``input_ids``.
            input_ids: the token the target chose last, int64 [B].
            num_draft_tokens: K, 1 .. n; all n heads if ``None``.
            choose: picks from the logits of one head: ``choose(step, logits [B, V or Vd], token_ids
                [Vd] or None) -> index int64 [B]``, where the index counts in the logits and
                ``token_ids`` tells the target ids of a reduced draft vocabulary. The largest logit
                if ``None``. After it has set its attribute ``done``, if it has one, no further
                token is drafted.

        Returns:
            Target ids, int64 [B, K]; fewer than K columns if ``choose`` was done before.

        Raises:
            ValueError: for shapes that do not fit, or more draft tokens than heads.
            RuntimeError: with ``share_target_weights`` before ``bind_target``.
        """
        steps = checked_heads(self.config, "num_draft_tokens", num_draft_tokens)
        check_last_position(self.config, hidden_states, input_ids)
        state, token_ids, drafts = self.initial_state(hidden_states), input_ids, []
        for i in range(steps):
            state = self.stage(i, state, token_ids)
            logits = self.head_logits(i, state)
            index = (
                index_of_largest(logits)
                if choose is None
                else choose(i, logits, self.speculator.draft_token_ids)
            )
            token_ids = self.draft_ids(index)
            drafts.append(token_ids)
            if getattr(choose, "done", False):
                break
        return torch.stack(drafts, dim=1)

    @torch.no_grad()
    def propose_candidates(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        top_k: Sequence[int] | None = None,
        n_candidates: int | None = None,
    ) -> Tensor:
        """Draft several chains and keep the most probable.

        Every head extends every live chain by its ``top_k`` most probable tokens; the chains with
        the largest summed log-probability are kept at the end. The first one can differ from
        ``propose``, which takes the best token head by head. The rows of the last matmul grow with
        the product of ``top_k``.

        Args:
            hidden_states: the target's state after its final norm [B, d].
            input_ids: the token the target chose last, int64 [B].
            top_k: branches per head, one entry for each head to run; the config's list if ``None``.
            n_candidates: chains to keep; the config's number if ``None``.

        Returns:
            Target ids, int64 [B, n_candidates, len(top_k)], the most probable chain first.

        Raises:
            ValueError: for shapes or numbers that do not fit.
            RuntimeError: with ``share_target_weights`` before ``bind_target``.
        """
        branches = list(self.config.top_k_tokens_per_head if top_k is None else top_k)
        keep = self.config.n_candidates if n_candidates is None else n_candidates
        check_last_position(self.config, hidden_states, input_ids)
        check_tree(self.config, branches, keep)
        return grow_candidates(self.speculator, hidden_states, input_ids, branches, keep)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Aliases of tied weights: by ``config.tie_weights``, never by ``tie_word_embeddings``."""
        return tied_weight_names(self.config)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Load as transformers' own models do.

        For other models it drops a tied weight that is missing from the reported missing keys,
        and leaves it without a value.
        """
        return False

    def get_input_embeddings(self) -> nn.Module | None:  # type: ignore[override]
        """Token table of head 0, or ``None`` when the target's is shared."""
        return None if self.config.share_target_weights else self.speculator.emb[0]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the vocabulary is the target's.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "the vocabulary of an MLP speculator is its target's and cannot be resized; train "
            "one for the new target"
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # The scale at which state_weight and emb_weight balance; truncation hurt the initial loss
        # upstream.
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, mean=0.0, std=self.config.inner_size**-0.5)
        elif isinstance(module, SpeculatorNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, MLPSpeculatorNetwork) and module.draft_token_ids is not None:
            init.copy_(module.draft_token_ids, torch.arange(self.config.draft_vocab_size))


def _config_for(source: Any, kwargs: dict[str, Any]) -> Any:
    """The config that ``from_pretrained(source, **kwargs)`` builds the network from.

    Raises:
        ValueError: it is another model's.
    """
    config = kwargs.get("config")
    if not isinstance(config, PreTrainedConfig):
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        return MLPSpeculatorConfig.from_pretrained(config or source, **hub)
    # By its word: a drafter's own remote code has a class that isn't this file's.
    if config.model_type != MLPSpeculatorConfig.model_type:
        raise ValueError(
            f"config is a {type(config).__name__} (model_type {config.model_type!r}), but "
            f"{str(source)!r} is an MLP speculator: give an MLPSpeculatorConfig, or leave "
            "config out, and the checkpoint's own is read"
        )
    return config
