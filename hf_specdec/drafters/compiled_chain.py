"""The greedy chain of an MLP speculator with static shapes, compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import cast

import torch

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorPreTrainedModel
from hf_specdec.static_shapes import (
    CompileChoice,
    StaticShapes,
    Tensors,
    Workspace,
    bucket,
    kept_for,
    state_of,
)
from hf_specdec.targets.recorded_states import twin

_BOUND = "bound"


class CompiledChain:
    """Proposes for the rows of one call; what is compiled is kept with the speculator.

    Args:
        model: the speculator.
        bound: the same with the tables of this call's target, which may be ``model`` itself.
        num_draft_tokens: K; the chain is always as long.
        choice: how it is compiled.
    """

    def __init__(
        self,
        model: MLPSpeculatorPreTrainedModel,
        bound: MLPSpeculatorPreTrainedModel,
        num_draft_tokens: int,
        choice: CompileChoice,
    ):
        self._num_draft_tokens, self._choice = num_draft_tokens, choice
        self._shapes = kept_for(model)
        self._bound = _same_binding(self._shapes, bound)
        self._workspace: Workspace | None = None

    def __call__(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Draft.

        Args:
            states: ``[n, d]`` in the speculator's dtype.
            token_ids: int64 ``[n]``, ids that it knows.

        Returns:
            int64 ``[n, K]``.
        """
        rows, (size, width) = states.shape[0], (bucket(states.shape[0]), states.shape[1])
        if self._workspace is None:
            self._workspace = self._borrow(size)
        work, device = self._workspace, states.device
        all_states = work.tensor("states", (work.rows, width), states.dtype, device)
        all_ids = work.tensor("token_ids", (work.rows,), torch.long, device)
        all_states[:rows], all_ids[:rows] = states, token_ids
        most = self._num_draft_tokens
        function = self._shapes.function(
            (size, most), self._choice, lambda: _chain_function(self._bound, most)
        )

        def views() -> Tensors:
            return all_states[:size], all_ids[:size]

        return work.run((size, most), function, views, self._choice.graphs)[0][:rows]

    def _borrow(self, rows: int) -> Workspace:
        state = state_of(self._bound) if self._choice.graphs else None
        workspace = self._shapes.borrow("chain", rows, state)
        # The drafter lets go of this object at the end of a call, however that ends.
        weakref.finalize(self, self._shapes.give_back, workspace).atexit = False
        return workspace


def _same_binding(
    shapes: StaticShapes, bound: MLPSpeculatorPreTrainedModel
) -> MLPSpeculatorPreTrainedModel:
    """The model of an earlier call if it has the same tables: compiled code knows it already."""
    with shapes.lock:
        known: MLPSpeculatorPreTrainedModel | None = shapes.models.get(_BOUND)
        if known is None or known.speculator.target_tables is not bound.speculator.target_tables:
            shapes.forget()
            # Not the model itself, which is to go when nobody else has it.
            known = shapes.models[_BOUND] = cast(MLPSpeculatorPreTrainedModel, twin(bound))
        return known


def _chain_function(
    bound: MLPSpeculatorPreTrainedModel, num_draft_tokens: int
) -> Callable[..., Tensors]:
    def chain(states: torch.Tensor, token_ids: torch.Tensor) -> Tensors:
        return (bound.propose(states, token_ids, num_draft_tokens),)

    return chain
