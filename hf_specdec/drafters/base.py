"""What a way of drafting must offer.

A drafter observes every forward of the target and proposes the next tokens of every active row. It
is also a transformers ``CandidateGenerator``, so that it works in transformers' own assisted loop
(one row, whatever that loop verifies) as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specdec.modeling.placement import head_device, is_offloaded
from hf_specdec.options.config import Method
from hf_specdec.static_shapes import CompileChoice
from hf_specdec.targets.prompt import Prompt
from hf_specdec.tree import TokenTree, TreeShape

Feed = Literal["post_norm", "pre_norm"]
"""Which state of the target a drafter reads: behind its final norm, or before it."""


class PickToken(Protocol):
    """The engine's way to choose draft tokens: called for each of them, in order.

    Attributes:
        done: set by a call after which drafting is to stop; the tokens so far are the proposal.
    """

    done: bool

    def __call__(
        self, k: int, logits: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Choose the k-th draft token.

        Args:
            k: from 0.
            logits: ``[B, V']``.
            token_ids: int64 ``[V']``, the ids of the columns; ``None`` means 0..V'-1.

        Returns:
            int64 ``[B]`` column indices.
        """


class NodeLogits(Protocol):
    """The engine's way to shape the logits of a tree's nodes, whose best children are drafted."""

    def __call__(
        self, k: int, logits: torch.Tensor, token_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Prepare the logits behind the nodes of depth k.

        Args:
            k: from 0.
            logits: ``[n, nodes, V']``.
            token_ids: int64 ``[V']``, the ids of the columns; ``None`` means 0..V'-1.

        Returns:
            Logits ``[n, nodes, V'']`` of the first columns, sampling noise added, and their ids.
        """


@dataclass(frozen=True)
class VerifiedStep:
    """One forward of the target over the active rows, after verification.

    Attributes:
        input_ids: int64 ``[n, Q]``, the tokens of the forward. Of the prompt the last one, or all
            that were run if the drafter reads the prompt.
        hidden_states: ``[n, Q, d]``, the target's states at those tokens.
        num_accepted: int64 ``[n]``, draft tokens accepted; index of the last right position.
        host_num_accepted: the same numbers on the host.
    """

    input_ids: torch.Tensor
    hidden_states: torch.Tensor
    num_accepted: torch.Tensor
    host_num_accepted: Sequence[int]

    @classmethod
    def of_prompt(cls, input_ids: torch.Tensor, hidden_states: torch.Tensor) -> VerifiedStep:
        """What a drafter that reads the prompt observes first: the tokens that were run.

        Args:
            input_ids: int64 ``[B, T_ids]``, the prompts.
            hidden_states: ``[B, T, d]``.
        """
        rows, length = hidden_states.shape[:2]
        # Embeddings have no ids, and of a text continued from a cache only the rest was run.
        ids = input_ids[:, -length:]
        ids = torch.nn.functional.pad(ids, (length - ids.shape[1], 0))
        last = [length - 1] * rows
        return cls(ids, hidden_states, torch.tensor(last, device=ids.device), last)

    def last_states(self) -> torch.Tensor:
        """The state ``[n, d]`` at the last right position of every row."""
        states = self.hidden_states
        if states.shape[1] == 1:
            return states[:, 0]
        row = torch.arange(states.shape[0], device=states.device)
        return states[row, self.num_accepted]


def check_device(model: PreTrainedModel, target: PreTrainedModel, *others: torch.device) -> None:
    """Raise ValueError unless an assistant is where the target computes its states.

    Args:
        model: the assistant.
        target: the model it drafts for.
        others: where it may be as well.
    """
    if is_offloaded(model):
        raise ValueError(
            "assistant_model is offloaded, and its weights would be fetched for every draft token. "
            f"Load it whole: from_pretrained(..., device_map={str(head_device(target))!r})."
        )
    if model.device != head_device(target) and model.device not in others:
        device = str(others[0] if others else head_device(target))
        raise ValueError(
            f"assistant_model is on device {model.device}, but the target computes its hidden "
            f"states on {device}. Move it: assistant_model.to({device!r})."
        )
    if model.device.type == "meta":
        raise ValueError(
            "assistant_model and the target are on device meta and have no weights. Load them "
            "with from_pretrained."
        )


class Drafter(CandidateGenerator, ABC):
    """Proposes draft tokens for the rows of one ``generate`` call.

    Subclasses are stateful: `start` begins a call, `observe` follows every target forward, and
    `keep_rows` drops finished rows.
    """

    requires_model_outputs = True
    # -1: of all hidden states transformers' own loop collects the last layer's alone.
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {"output_hidden_states": -1}

    method: ClassVar[Method | None] = None
    """What a `SpeculativeConfig` calls this way of drafting; ``None`` for drafters of your own."""

    drafts_trees: ClassVar[bool] = False
    """Whether there is a `propose_tree`."""

    reads_prompt: ClassVar[bool] = False
    """Whether `observe` is shown the whole prompt, not its last position alone."""

    runs_target_modules: ClassVar[bool] = False
    """Whether `propose` calls the target's embedding or output head."""

    @property
    def source(self) -> Drafter:
        """Whose drafts these are: another drafter's, if this one only passes them on."""
        return self

    @property
    def feed(self) -> Feed:
        """Which state of the target `observe` is shown."""
        return "post_norm"

    @property
    @abstractmethod
    def max_draft_tokens(self) -> int:
        """The most tokens `propose` can be asked for."""

    @property
    def default_draft_tokens(self) -> int:
        """Tokens to propose where nobody asks for a number."""
        return self.max_draft_tokens

    @property
    def max_children(self) -> int:
        """The most children of a node, where `drafts_trees`."""
        return 0

    @property
    def max_candidate_nodes(self) -> int:
        """The most nodes of the tree that the checkpoint describes, where `drafts_trees`."""
        return 0

    def check_config(self, target: PreTrainedModel) -> None:
        """Raise ValueError if the configs alone say so; works before the weights are loaded."""

    @abstractmethod
    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError if this drafter can't draft for ``target``; no heavy work."""

    def device_for(self, target: PreTrainedModel) -> torch.device:
        """Where a drafter that is loaded for a target is put: where the target ends."""
        return head_device(target)

    @abstractmethod
    def start(
        self,
        target: PreTrainedModel,
        prompt: Prompt | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """Begin a call; nothing of an earlier one may remain.

        Args:
            target: the model to draft for.
            prompt: where the prompt's tokens stand; ``None`` in transformers' own loop, where
                there is one row without padding.
            num_draft_tokens: the most that `propose` will be asked for; ``None`` if not known.
        """

    def compile_with(self, choice: CompileChoice | None) -> None:
        """Be told before `start` whether the call is compiled; most drafters run as ever.

        Args:
            choice: how, or ``None`` if it isn't.
        """

    def share_cache(self, cache: Cache) -> None:
        """Be shown the target's keys and values, right after `start`; most drafters need none.

        Args:
            cache: the target's own. When `propose` is called it counts all tokens but the last one
                of each row, and its rows are in the order of the proposal's.
        """

    @abstractmethod
    def observe(self, step: VerifiedStep) -> None:
        """Take from a target forward what the next proposal needs."""

    @abstractmethod
    def propose(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: PickToken | None = None
    ) -> torch.Tensor:
        """Draft.

        Args:
            token_ids: int64 ``[n]``, the last token of each row (chosen, not yet run).
            num_draft_tokens: K, at least 1 and at most `max_draft_tokens`.
            pick: chooses each token from its logits, the largest logit by default; look at
                ``pick.done`` after each call.

        Returns:
            int64 ``[n, K]`` ids of the target's vocabulary, fewer columns if ``pick`` was done.
        """

    def propose_tree(
        self, token_ids: torch.Tensor, depth: int, shape: TreeShape | None, node_logits: NodeLogits
    ) -> tuple[torch.Tensor, TokenTree]:
        """Draft a tree; only where `drafts_trees` says so.

        Args:
            token_ids: int64 ``[n]``, the last token of each row.
            depth: the most tokens of a draft, at least 1 and at most `max_draft_tokens`.
            shape: at most that deep; ``None`` leaves it to the drafter's checkpoint.
            node_logits: to be applied to the logits of every depth before the best are taken.

        Returns:
            int64 ``[n, N]`` ids of the target's vocabulary, in the order of the tree's nodes, and
            the tree.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts chains only")

    @abstractmethod
    def keep_rows(self, order: Sequence[int]) -> None:
        """Reorder the state: row i becomes the present row ``order[i]``."""

    def finish(self) -> None:
        """Let go of a call's states and keys; it is over, or has failed.

        A drafter may live long after it, attached or in a caller's variable. Called after every
        `start` that was called, also one that raised.
        """

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        """transformers' contract: the row followed by its draft, and no logits (``None``).

        Without logits transformers verifies by comparing tokens, which is exact.
        """
        if kwargs.get("is_first_iteration"):
            return input_ids, None
        last = kwargs["n_last_matches"]
        last = torch.as_tensor(last, device=input_ids.device).reshape(1)
        # A prefill (no match yet, states of the whole prompt) counts from its last position.
        hidden_states = kwargs["model_outputs"].hidden_states[-1]
        width = input_ids.shape[1]
        # The tokens of the forward that were right: the newest one was not in it.
        run_ids = input_ids[:, width - 2 - int(last) : width - 1]
        if hidden_states.shape[1] == width - 1 and self._first_proposal:
            run_ids, last = input_ids[:, :-1], torch.full_like(last, width - 2)
            if not self.reads_prompt:
                hidden_states, run_ids = hidden_states[:, -1:], run_ids[:, -1:]
                last = torch.zeros_like(last)
        self._first_proposal = False
        run_ids = torch.nn.functional.pad(run_ids, (0, hidden_states.shape[1] - run_ids.shape[1]))
        self.observe(VerifiedStep(run_ids, hidden_states, last, last.tolist()))
        draft = self.propose(input_ids[:, -1], self.default_draft_tokens)
        return torch.cat([input_ids, draft], dim=1), None

    _first_proposal = True


@contextmanager
def started(
    drafter: Drafter, target: PreTrainedModel, cache: Cache, prompt: Prompt, num_draft_tokens: int
) -> Iterator[None]:
    """Let a drafter draft inside the block; behind it nothing of the call is left in it.

    Args:
        drafter: see `Drafter.start`, as for the other arguments.
        target: the model to draft for.
        cache: the target's keys and values.
        prompt: where the prompt's tokens stand.
        num_draft_tokens: the most that will be asked for.
    """
    try:
        drafter.start(target, prompt, num_draft_tokens)
        drafter.share_cache(cache)
        yield
    finally:
        drafter.finish()
