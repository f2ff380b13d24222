"""Drafting with an MLP speculator: K tokens from one hidden state, without a cache of its own.

The speculator reads the target's state at the last accepted position and the token chosen there; it
predicts the tokens after that one (fms-extras; Wertheimer et al. 2024, arXiv 2404.19124).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from transformers import PreTrainedModel

from hf_specdec.drafters.base import (
    Drafter,
    Feed,
    NodeLogits,
    PickToken,
    VerifiedStep,
    check_device,
)
from hf_specdec.drafters.compiled_chain import CompiledChain
from hf_specdec.drafters.covered_ids import CoveredIds
from hf_specdec.drafters.mlp_chain import draft_chain
from hf_specdec.drafters.mlp_tree import (
    draft_candidates,
    draft_shape,
    most_candidate_nodes,
)
from hf_specdec.drafters.whole_weights import whole
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorPreTrainedModel
from hf_specdec.modeling.placement import weight_on
from hf_specdec.modeling.quantized import num_ids
from hf_specdec.options.config import Method
from hf_specdec.static_shapes import CompileChoice
from hf_specdec.targets.prompt import Prompt
from hf_specdec.tree import TokenTree, TreeShape

# Vocabularies are padded to multiples of up to 256 rows that no tokenizer ever produces.
_VOCABULARY_PADDING = 256


class MLPDrafter(Drafter):
    """Drafts with a `MLPSpeculatorPreTrainedModel`.

    Args:
        model: the speculator, on the device of the target's output head.
        feed: which state of the target it reads; published speculators read ``"post_norm"``.
    """

    method: ClassVar[Method | None] = "mlp_speculator"
    drafts_trees: ClassVar[bool] = True

    def __init__(self, model: PreTrainedModel, feed: Feed = "post_norm"):
        if not isinstance(model, MLPSpeculatorPreTrainedModel) and not _is_remote_copy(model):
            raise TypeError(f"MLPDrafter needs an MLP speculator, got {type(model).__name__}")
        self.model = cast(MLPSpeculatorPreTrainedModel, model)
        self._bound = self.model
        self._hidden_states: torch.Tensor | None = None
        self._num_target_ids = 0
        self._covered: CoveredIds | None = None
        self._feed = feed
        self._compiled: CompiledChain | None = None
        self._choice: CompileChoice | None = None

    @property
    def feed(self) -> Feed:
        """Which state of the target it reads."""
        return self._feed

    @property
    def max_draft_tokens(self) -> int:
        """One token for each of the speculator's heads."""
        return self.model.config.n_predict

    @property
    def max_children(self) -> int:
        """As many as the heads have tokens to choose from."""
        return self.model.config.head_size

    @property
    def max_candidate_nodes(self) -> int:
        """Of ``n_candidates`` chains without a common token."""
        return most_candidate_nodes(self.model.config)

    def check_config(self, target: PreTrainedModel) -> None:
        """Raise ValueError unless width and vocabulary fit the target."""
        config = self.model.config
        target_config = target.config.get_text_config()
        if config.emb_dim != target_config.hidden_size:
            trained_for = getattr(config, "base_model_name_or_path", None)
            hint = f" It was trained for {trained_for}." if trained_for else ""
            raise ValueError(
                f"assistant_model reads hidden states of width emb_dim={config.emb_dim}, but the "
                f"target {type(target).__name__} has hidden_size={target_config.hidden_size}."
                f"{hint} Use the speculator that was trained for this target."
            )
        missing = target_config.vocab_size - config.vocab_size
        if missing > _VOCABULARY_PADDING:
            raise ValueError(
                f"assistant_model knows vocab_size={config.vocab_size} tokens, but the target has "
                f"vocab_size={target_config.vocab_size}: {missing} tokens more, which isn't "
                f"padding (up to {_VOCABULARY_PADDING}). They have different tokenizers; use the "
                "speculator that was trained for this target."
            )

    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError unless width, vocabulary and device fit the target."""
        self.check_config(target)
        check_device(self.model, target)

    def compile_with(self, choice: CompileChoice | None) -> None:
        """Compile the chain of greedy drafts, if the call is compiled."""
        self._choice = choice

    def start(
        self,
        target: PreTrainedModel,
        prompt: Prompt | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """Bind the target's embeddings if the speculator shares them."""
        self._hidden_states = None
        self._first_proposal = True
        embeddings: Any = target.get_input_embeddings()
        self._num_target_ids = num_ids(embeddings)
        self._covered = None
        ids = self.model.speculator.draft_token_ids
        if ids is not None and self._num_target_ids < self.model.config.vocab_size:
            self._covered = CoveredIds(ids, self._num_target_ids)
        if self.model.config.share_target_weights:
            head: Any = target.get_output_embeddings()
            # Copies only of a target that is spread over devices or ranks, or offloaded.
            tables = (weight_on(part, self.model.device) for part in (embeddings, head))
            self._bound = self.model.bound_to(*map(whole, tables))
        self._compiled = None
        if self._choice is not None:
            most = num_draft_tokens or self.max_draft_tokens
            self._compiled = CompiledChain(self.model, self._bound, most, self._choice)

    def observe(self, step: VerifiedStep) -> None:
        """Keep the state at the last accepted position: ``[n, d]``, in the speculator's dtype."""
        self._hidden_states = step.last_states().to(self.model.dtype)

    def propose(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: PickToken | None = None
    ) -> torch.Tensor:
        """Run ``num_draft_tokens`` stages of the speculator; see `Drafter.propose`."""
        assert self._hidden_states is not None, "observe() comes before propose()"
        # Ids beyond a vocabulary that one side has padded are never real tokens; they must only
        # not break the look-up in an embedding.
        token_ids = token_ids.clamp(max=self.model.config.vocab_size - 1)
        if self._covered is not None and pick is not None:
            pick = self._covered.pick_with(pick)
        if self._compiled is not None and pick is None:
            # Its first tokens are those of a shorter chain.
            draft_ids = self._compiled(self._hidden_states, token_ids)[:, :num_draft_tokens]
        else:
            draft_ids = draft_chain(
                self._bound, self._hidden_states, token_ids, num_draft_tokens, pick
            )
        if self._num_target_ids < self.model.config.vocab_size:
            draft_ids = draft_ids.clamp(max=self._num_target_ids - 1)
        return draft_ids

    def propose_tree(
        self, token_ids: torch.Tensor, depth: int, shape: TreeShape | None, node_logits: NodeLogits
    ) -> tuple[torch.Tensor, TokenTree]:
        """Run the stages once for all nodes of a depth; see `Drafter.propose_tree`."""
        assert self._hidden_states is not None, "observe() comes before propose_tree()"
        states = self._hidden_states
        if self._covered is not None:
            node_logits = self._covered.nodes_with(node_logits)
        if shape is None:
            drafts, tree = draft_candidates(self._bound, states, token_ids, depth, node_logits)
        else:
            drafts = draft_shape(self._bound, states, token_ids, shape, node_logits)
            tree = shape.on(drafts.device)
        if self._covered is not None:
            drafts = drafts.clamp(max=self._num_target_ids - 1)
        return drafts, tree

    def keep_rows(self, order: Sequence[int]) -> None:
        """Reorder the kept states."""
        assert self._hidden_states is not None
        index = torch.tensor(order, device=self._hidden_states.device)
        self._hidden_states = self._hidden_states[index]

    def finish(self) -> None:
        """Let go of the states, the buffers of compiled steps, and the target's weights."""
        self._hidden_states = self._compiled = self._choice = None
        self._bound = self.model


def _is_remote_copy(model: PreTrainedModel) -> bool:
    """Whether a model's class is our own, loaded from a repository before hf_specdec was imported.

    transformers keeps such code under ``transformers_modules``.
    """
    cls = type(model)
    is_remote = cls.__module__.startswith("transformers_modules.")
    return is_remote and cls.__name__ == MLPSpeculatorPreTrainedModel.__name__
